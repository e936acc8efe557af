"""Frames survive any cutting of the stream, and damage is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.effects import Copy, Doubt, DropAgent, Exempt, Forget, LoadAgent, Post, Quiesce
from kvd.core.inputs import AgentLoaded, PostDone, PostFailed, Unposted, WritePath
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.transfer.orders import (
    UNSTAMPED,
    BadStream,
    BeginTransfer,
    Frames,
    RegionPlan,
    frame_of,
    order_of,
    reports_of,
)
from kvd.types import Pages, pack_ids

ORDERS = [
    BeginTransfer(
        "n-1", (5,), (RegionPlan("kv", 6, Geometry(3, 4096, (PieceRow(0, 4096, 4096),), ())),)
    ),
    LoadAgent("peer", 2, b"\0\xff"),
    Post(9, "peer", 2, "kv", Pages(pack_ids([1, 2])), Pages(pack_ids([3, 4]))),
    Post(10, "peer", 2, "kv", Pages(b""), Pages(b""), after=bytes(range(64))),
    Forget(10),
    DropAgent("peer", 2),
    Quiesce(1, Doubt.SENT),
    Exempt((1, 2), ("10.0.0.1:4>10.0.0.2:5",)),
    Copy(7, "kv", Pages(pack_ids([1, 2])), "kv.saved", Pages(pack_ids([5, 6]))),
]


@given(st.lists(st.integers(1, 50)))
def test_orders_arrive_whole_when_the_stream_is_cut_anywhere(cuts):
    stream = b"".join(frame_of(order) for order in ORDERS)
    frames = Frames()
    heard = []
    for size in [*cuts, len(stream)]:
        heard += [order_of(body) for body in frames.feed(stream[:size])]
        stream = stream[size:]
    assert heard == ORDERS


def test_reports_travel_in_batches():
    reports = [
        AgentLoaded(UNSTAMPED, "p", 1, path=WritePath.SAME_HOST),
        PostDone(UNSTAMPED, 3, 4096, active_s=0.5),
        PostFailed(UNSTAMPED, 4, "gone"),
        Unposted(UNSTAMPED, 5, "no"),
    ]

    (body,) = Frames().feed(frame_of(reports))

    assert reports_of(body) == reports


def test_a_length_beyond_all_reason_ends_the_stream():
    with pytest.raises(BadStream, match="frame of 4294967295 bytes"):
        list(Frames().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x82\xa4type\xa4drop", b"\xd9\xff\xed\xa0\x80", b"\xc0"],
)
@pytest.mark.parametrize("read", [order_of, reports_of])
def test_a_body_that_cannot_be_read_is_a_bad_stream(read, body):
    with pytest.raises(BadStream, match=f"{len(body)} bytes that cannot be read"):
        read(body)
