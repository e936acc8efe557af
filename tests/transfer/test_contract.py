"""What every transport promises, asked of the loopback and of real transfer processes.

scenario A28, scenario B6, scenario B12, scenario G5.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import numpy as np
import pytest

from kvd.core.effects import Doubt, DropAgent, LoadAgent, Quiesce
from kvd.core.inputs import (
    AgentDropped,
    AgentFailed,
    AgentLoaded,
    PostDone,
    PostFailed,
    PostMoved,
    Quiet,
)
from kvd.transfer.orders import UNSTAMPED
from tests.transfer.loopback import Loopback

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAST = 24
"""The last page of every region."""

PATTERNS = {
    "one page": ([3], [5]),
    "a run": (list(range(1, 25)), list(range(1, 25))),
    "a run elsewhere": (list(range(1, 11)), list(range(11, 21))),
    "scattered": ([9, 2, 17, 24, 1], [4, 23, 8, 1, 12]),
    "runs on one side": ([1, 2, 3, 4], [7, 5, 6, 9]),
    "backwards": ([1, 2, 3, 4], [14, 13, 12, 11]),
    "nothing": ([], []),
}

numbers = iter(range(1, 10_000))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_post_writes_the_pages_it_names_and_no_others(pair, region, pattern):
    sender, receiver = pair
    source, destination = PATTERNS[pattern]
    ours, theirs = sender.memories[region], receiver.memories[region]
    theirs.paint(next(numbers))
    expected = theirs.bytes.copy()
    for row in theirs.shape.rows:
        for a, b in zip(source, destination, strict=True):
            expected[theirs.piece(row, b)] = ours.bytes[ours.piece(row, a)]

    post = next(numbers)
    sender.post(post, receiver, source, destination, component=region)
    outcome = await sender.outcome(post)

    size = len(source) * theirs.shape.page_bytes
    assert outcome == PostDone(UNSTAMPED, post, size, active_s=outcome.active_s)
    assert np.array_equal(theirs.bytes, expected)
    assert all(moved.moved_bytes <= size for moved in sender.heard(PostMoved, post=post))


async def test_a_small_post_does_not_wait_for_the_large_ones_before_it(pair):
    sender, receiver = pair
    everything = list(range(1, LAST + 1))
    large = [next(numbers) for _ in range(30)]
    small = next(numbers)

    for post in large:
        sender.post(post, receiver, everything, everything)
    sender.post(small, receiver, [1], [2])
    for post in (*large, small):
        assert isinstance(await sender.outcome(post), PostDone)

    ended = [report.post for report in sender.reports if isinstance(report, PostDone)]
    assert len(ended) - ended.index(small) > len(large) // 2


@pytest.mark.parametrize(
    ("source", "destination", "other", "complaint"),
    [
        ([1], [25], {}, "destination page 25 is not a page of region 'kv'"),
        ([25], [1], {}, "source page 25 is not a page of region 'kv'"),
        ([1, 2], [5, 0], {}, "destination page 0 is not a page"),
        ([0], [5], {}, "source page 0 is not a page"),
        ([1], [-1], {}, "destination page -1 is not a page"),
        ([1, 2], [3], {}, "2 source pages for 1 destination pages"),
        ([1], [1], {"component": "swa"}, "no region 'swa'|region 'swa' is not"),
        ([1], [1], {"generation": 2}, "generation 2 is loaded"),
    ],
)
async def test_a_post_that_makes_no_sense_is_refused_and_writes_nothing(
    pair, source, destination, other, complaint
):
    sender, receiver = pair
    before = receiver.memories["kv"].bytes.copy()

    post = next(numbers)
    sender.post(post, receiver, source, destination, **other)
    outcome = await sender.outcome(post)

    assert isinstance(outcome, PostFailed)
    assert re.search(complaint, outcome.why)
    assert np.array_equal(receiver.memories["kv"].bytes, before)


async def test_a_post_to_a_stranger_is_refused(pair):
    sender, _ = pair
    stranger = type("Stranger", (), {"name": "stranger"})

    post = next(numbers)
    sender.post(post, stranger, [1], [1])

    why = "no sending agent for peer stranger generation 1 is loaded"
    assert await sender.outcome(post) == PostFailed(UNSTAMPED, post, why)


async def test_damaged_metadata_is_refused_and_harms_nothing(pair):
    sender, receiver = pair
    good = receiver.ready.metadata
    flipped = [
        good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        for at in range(0, len(good), 7)
    ]
    damaged = [b"", b"kvdT", good[:-1], good + b"\0", os.urandom(300), *flipped]
    before = len(sender.heard(AgentFailed))

    for blob in damaged:
        sender.transport.order(LoadAgent("damaged", 1, blob))
    await sender.until(lambda: len(sender.heard(AgentFailed)) == before + len(damaged))

    assert not sender.heard(AgentLoaded, incarnation="damaged")
    post = next(numbers)
    sender.post(post, receiver, [1], [1])
    assert isinstance(await sender.outcome(post), PostDone)


async def test_a_repeated_load_is_answered_again(pair):
    sender, receiver = pair
    before = len(sender.heard(AgentLoaded))

    sender.transport.order(LoadAgent(receiver.name, 1, receiver.ready.metadata))

    await sender.until(lambda: len(sender.heard(AgentLoaded)) == before + 1)


async def test_a_generation_is_dropped_alone(pair):
    sender, receiver = pair
    await sender.load(receiver, generation=7)

    dropped = await sender.drop(receiver, generation=7)

    assert dropped == AgentDropped(UNSTAMPED, receiver.name, 7, 0)
    late, other = next(numbers), next(numbers)
    sender.post(late, receiver, [1], [1], generation=7)
    sender.post(other, receiver, [1], [1])
    assert isinstance(await sender.outcome(late), PostFailed)
    assert isinstance(await sender.outcome(other), PostDone)


async def test_a_drop_of_nothing_is_done(pair):
    sender, _ = pair
    sender.transport.order(DropAgent("nobody", 3))

    assert await sender.hears(AgentDropped, incarnation="nobody") == AgentDropped(
        UNSTAMPED, "nobody", 3, 0
    )


async def test_a_drop_overtakes_a_load(pair):
    sender, receiver = pair
    sender.transport.order(LoadAgent("late", 1, receiver.ready.metadata))
    sender.transport.order(DropAgent("late", 1))

    await sender.hears(AgentDropped, incarnation="late")

    late = type("Late", (), {"name": "late"})
    post = next(numbers)
    sender.post(post, late, [1], [1])
    assert isinstance(await sender.outcome(post), PostFailed)


async def test_a_node_without_a_byte_of_its_own_has_peers_all_the_same(rig):
    bare, other = await asyncio.gather(rig.node("bare", shapes={}), rig.node("other"))

    await bare.load(other)
    await other.load(bare)

    other.post(1, bare, [1], [1])
    assert re.search("region 'kv'", (await other.outcome(1)).why)


async def test_quiesce_is_answered(pair):
    _, receiver = pair
    receiver.transport.order(Quiesce(5, Doubt.ARRIVED))

    assert await receiver.hears(Quiet) == Quiet(UNSTAMPED, 5)


async def test_nothing_changes_after_dropped_when_posts_were_under_way(rig):
    sender, receiver = await rig.pair()
    everything = list(range(1, LAST + 1))
    posts = list(range(1, 40))
    for post in posts:
        sender.post(post, receiver, everything, everything)
    await sender.until(lambda: sender.heard(PostDone))

    dropped = await sender.drop(receiver)
    after = receiver.memories["kv"].bytes.copy()

    assert dropped.unconfirmed_bytes == 0
    at = sender.reports.index(dropped)
    ended = [
        report.post for report in sender.reports[:at] if isinstance(report, PostDone | PostFailed)
    ]
    assert sorted(ended) == posts
    assert sender.heard(PostFailed)
    await _settle(receiver)
    assert np.array_equal(receiver.memories["kv"].bytes, after)


async def test_posts_fail_soon_when_the_peer_is_killed(rig):
    sender, receiver = await rig.pair()
    everything = list(range(1, LAST + 1))
    for post in range(1, 200):
        sender.post(post, receiver, everything, everything)
    await sender.until(lambda: sender.heard(PostDone))

    since_s = time.monotonic()
    _kill(receiver)
    await sender.hears(PostFailed)
    assert time.monotonic() - since_s < 1.0

    await sender.drop(receiver)
    again = await rig.node("receiver")
    await sender.load(again, generation=2)
    sender.post(500, again, [1], [2], generation=2)
    assert isinstance(await sender.outcome(500), PostDone)


async def test_a_killed_transport_says_so_once_and_takes_orders_in_silence(rig):
    node = await rig.node("alone")

    since_s = time.monotonic()
    _kill(node)
    await node.until(lambda: node.exits)
    assert time.monotonic() - since_s < 1.0

    node.transport.order(Quiesce(1, Doubt.ARRIVED))
    await node.transport.stop()
    await node.transport.stop()
    assert len(node.exits) == 1
    assert not node.heard(Quiet)


async def test_nothing_is_written_into_a_stopped_transport(rig):
    """The fence: stop is proof for this node, whatever the peer goes on doing."""
    sender, receiver = await rig.pair()
    everything = list(range(1, LAST + 1))
    for post in range(1, 200):
        sender.post(post, receiver, everything, everything)
    await sender.until(lambda: sender.heard(PostDone))

    await receiver.transport.stop()
    after = receiver.memories["kv"].bytes.copy()

    await sender.hears(PostFailed)
    assert np.array_equal(receiver.memories["kv"].bytes, after)
    assert receiver.exits == []


def _kill(node):
    """End a node's transport as a crash would."""
    if isinstance(node.transport, Loopback):
        node.transport.die("killed")
    else:
        os.kill(node.transport.pid, signal.SIGKILL)


async def _settle(node):
    """Give a wrong late byte the time to land: a round trip through the node's own process."""
    ticket = next(numbers)
    node.transport.order(Quiesce(ticket, Doubt.ARRIVED))
    await node.hears(Quiet, lease=ticket)
    await asyncio.sleep(0)
