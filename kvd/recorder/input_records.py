"""What is recorded: every input of the node, and now and then a mark of the state it led to.

A record is a header of 16 bytes and its data, padded so that the next header is aligned too::

    u32 length of the message, top bit: it is a mark | u32 length of the tokens | f64 at_s
    message, msgpack | tokens, as they came | padding

Tokens stand beside their message and are copied once: they are nearly all of what is recorded.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvd.core.inputs import FromClient, Input
from kvd.types import Tokens

if TYPE_CHECKING:
    from kvd.core.node import NodeState

HEADER: Final = struct.Struct("<IId")
ALIGNMENT: Final = 16
MARKED: Final = 1 << 31
_TOP_BYTES: Final = 1024
"""Of each free stack in a mark: the pages that were given and taken last."""

_ENCODE = msgspec.msgpack.Encoder().encode


class Unknown(Exception):
    """A record is no input that this version of kvd knows."""


class StateMark(msgspec.Struct, frozen=True, array_like=True):
    """The node after ``steps`` steps, in figures that are quickly read; ``seq``: its last event."""

    steps: int
    seq: int
    digest: bytes


class InputRecord(NamedTuple):
    """One record as bytes: a message or a mark, and the tokens that came with the message."""

    at_s: float
    message: bytes
    tokens: bytes = b""
    is_mark: bool = False


_INPUT: msgspec.msgpack.Decoder[Input] = msgspec.msgpack.Decoder(Input)
_MARK = msgspec.msgpack.Decoder(StateMark)


def padded(n_bytes: int) -> int:
    """The length of a record with ``n_bytes`` of data, header and padding included."""
    return HEADER.size + (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def record_of(happened: Input) -> InputRecord:
    """The input as a record."""
    if type(happened) is FromClient and happened.tokens:
        bare = FromClient(happened.at_s, happened.session, happened.message)
        return InputRecord(happened.at_s, _ENCODE(bare), happened.tokens)
    return InputRecord(happened.at_s, _ENCODE(happened))


def record_of_mark(mark: StateMark, at_s: float) -> InputRecord:
    """The mark as a record."""
    return InputRecord(at_s, _ENCODE(mark), is_mark=True)


def input_of(record: InputRecord) -> Input:
    """The input that was recorded.

    Raises:
        Unknown: it is none.
    """
    try:
        happened = _INPUT.decode(record.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unknown(str(error)) from error
    if not record.tokens:
        return happened
    if type(happened) is not FromClient:
        raise Unknown(f"tokens came with {type(happened).__name__}")
    return FromClient(
        at_s=happened.at_s,
        session=happened.session,
        message=happened.message,
        tokens=Tokens(bytes(record.tokens)),
    )


def mark_in(record: InputRecord) -> StateMark:
    """The mark that was recorded.

    Raises:
        Unknown: it is none.
    """
    try:
        return _MARK.decode(record.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unknown(str(error)) from error


def mark_of(node: NodeState) -> StateMark:
    """The mark of a node between two steps; takes some 20 us, however large it is."""
    table, decoder, settled_sends = node.leases, node.decoder, node.prefiller.settled_sends
    figures = (
        node.steps,
        node.refused,
        node.out.seq,
        node.out.at_s,
        table.pool.free_ids()[-_TOP_BYTES:],
        table.pool.free_pages,
        table.tree.evictable_pages,
        table.tree.protected_pages,
        *(
            (one.pool.free_ids()[-_TOP_BYTES:], one.pool.free_pages, one.evictable_pages)
            for one in table.components.each
        ),
        (table.opened, table.released, table.evicted_pages),
        (len(table.leases), len(node.admission)),
        (decoder.delivered, decoder.failed, decoder.received_bytes, decoder.saved_bytes),
        (settled_sends.delivered, settled_sends.failed, len(settled_sends.settled)),
        (len(node.peers.by_name), node.peers.generation, len(node.sessions.by_id)),
    )
    digest = hashlib.sha256(_ENCODE(figures)).digest()[:ALIGNMENT]
    return StateMark(node.steps, node.out.seq, digest)
