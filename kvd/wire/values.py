"""How many values a MessagePack frame has, counted without reading them.

A long message is long because of the bytes in it: page ids, sums, metadata. One that is long
because of many small values, be it in fields that are not even known here, costs a hundred times as
much to read. It is told apart by jumping from head to head.
"""

from __future__ import annotations

_SIZES = {
    0xCA: 5, 0xCB: 9,
    0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9,
    0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,
    0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18,
    0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5,
}  # fmt: skip
"""Of a whole value by its first byte, of an array or a map its head; 1 where it is not here."""

_LENGTHS = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
"""Bytes of the length of a text or of bytes, and bytes between it and those."""


def has_more_values(frame: bytes, limit: int) -> bool:
    """Whether there are more than ``limit`` values, in arrays and maps too, before the frame ends.

    Of a frame that is no MessagePack nothing is promised, but that it takes no longer.
    """
    at, end = 0, len(frame)
    for _ in range(limit):
        if at >= end:
            return False
        head = frame[at]
        if head in _LENGTHS:
            n_bytes, more = _LENGTHS[head]
            at += 1 + n_bytes + more + int.from_bytes(frame[at + 1 : at + 1 + n_bytes])
        elif 0xA0 <= head < 0xC0:
            at += 1 + (head & 0x1F)
        else:
            at += _SIZES.get(head, 1)
    return at < end
