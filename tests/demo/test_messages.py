"""Frames between the demo and its engines."""

from __future__ import annotations

import io

from kvd.demo.messages import (
    LENGTH_BYTES,
    EngineFailed,
    Generate,
    PrefillPrompt,
    decode_reply,
    frame,
    read_request,
)


def test_requests_come_out_as_they_went_in_until_the_stream_ends() -> None:
    orders = [PrefillPrompt(7, (1, 2, 3), "decode"), Generate(())]
    stream = io.BytesIO(b"".join(frame(order) for order in orders))

    assert [read_request(stream) for _ in range(3)] == [*orders, None]


def test_reply_comes_out_as_it_went_in() -> None:
    assert decode_reply(frame(EngineFailed("no"))[LENGTH_BYTES:]) == EngineFailed("no")
