"""Counting the values of a frame without reading them."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvd.wire.codec import has_more_values

SIZES = (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536)


def values(one: object) -> int:
    if isinstance(one, list):
        return 1 + sum(map(values, one))
    if isinstance(one, dict):
        return 1 + sum(values(key) + values(value) for key, value in one.items())
    return 1


def some(rng: random.Random, depth: int) -> object:
    """A value of any kind and size of head."""
    if depth and rng.random() < 0.5:
        n = rng.choice((0, 1, 3, 15, 16, 40))
        if rng.random() < 0.5:
            return [some(rng, depth - 1) for _ in range(n)]
        return {str(key): some(rng, depth - 1) for key in range(n)}
    size = rng.choice(SIZES)
    return rng.choice(
        (
            None, True, 0, -1, 127, -33, 200, -200, 2**15, 2**16, 2**31, 2**32, 2**63, -(2**40),
            1.5, "x" * size, b"y" * size, msgspec.msgpack.Ext(5, b"z" * size),
        )
    )  # fmt: skip


def test_every_kind_of_value_counts_once():
    rng = random.Random(20261122)
    for _ in range(300):
        one = some(rng, 3)
        frame, n = msgspec.msgpack.encode(one), values(one)
        assert not has_more_values(frame, n), one
        assert has_more_values(frame, n - 1), one


@pytest.mark.parametrize("head", range(256))
def test_bytes_that_are_no_message_end_too(head):
    for more in (b"", b"\xff", b"\xff" * 8, b"\0" * 300):
        frame = bytes([head]) + more
        assert not has_more_values(frame, len(frame))
