"""What is recorded: every input of the node, and now and then a mark of the state it led to.

By its kind, a record's message is::

    INPUT         an input, msgpack
    MARK          a mark, msgpack
    CLIENT_FRAME  u64 session, and the frame of its request as it came
    PEER_FRAME    u8 length, u8 length, link, proven name, and the frame as it came

What came in a frame is not spelled again: the one who replays reads the frame, as the daemon did.
Tokens stand beside their message: they are nearly all of what is recorded.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.inputs import FromClient, FromPeer, Input
from kvd.errors import Refusal
from kvd.recorder.record_layout import (
    ALIGNMENT,
    CLIENT_FRAME,
    HEADER,
    KIND_AT,
    MARK,
    PEER_FRAME,
    InputRecord,
)
from kvd.types import Tokens
from kvd.wire.codec import CLIENT_REQUESTS, PEER_MESSAGES

if TYPE_CHECKING:
    from kvd.core.node import NodeState

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


_INPUT: msgspec.msgpack.Decoder[Input] = msgspec.msgpack.Decoder(Input)
_MARK = msgspec.msgpack.Decoder(StateMark)


_CLIENT: Final = struct.Struct("<IIdQ")
"""A header, and the session with which the message behind it begins."""
_SESSION: Final = struct.Struct("<Q")
_CLIENT_HEAD: Final = _SESSION.size | CLIENT_FRAME << KIND_AT
_PEER_KIND: Final = PEER_FRAME << KIND_AT


def headed_request(request: FromClient, frame: bytes) -> bytes:
    """Header and message of a request that came in ``frame``."""
    # Of the quickest way there is: every request of an engine comes by here.
    n_message = len(frame) + _CLIENT_HEAD
    return _CLIENT.pack(n_message, len(request.tokens), request.at_s, request.session) + frame


def headed_message(message: FromPeer, frame: bytes) -> bytes:
    """Header and message of what a peer said in ``frame``."""
    link, proven = message.link.encode(), message.proven.encode()
    said = b"".join((bytes((len(link), len(proven))), link, proven, frame))
    return HEADER.pack(len(said) | _PEER_KIND, 0, message.at_s) + said


def record_of(happened: Input) -> InputRecord:
    """The input as a record, where there is no frame that it came in."""
    if type(happened) is FromClient and happened.tokens:
        bare = FromClient(happened.at_s, happened.session, happened.message)
        return InputRecord(happened.at_s, _ENCODE(bare), happened.tokens)
    return InputRecord(happened.at_s, _ENCODE(happened))


def record_of_mark(mark: StateMark, at_s: float) -> InputRecord:
    """The mark as a record."""
    return InputRecord(at_s, _ENCODE(mark), kind=MARK)


def input_of(record: InputRecord) -> Input:
    """The input that was recorded.

    Raises:
        Unknown: it is none.
    """
    if record.kind == CLIENT_FRAME:
        return _request_in(record)
    if record.kind == PEER_FRAME:
        return _peer_message_in(record)
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


def _request_in(record: InputRecord) -> FromClient:
    if len(record.message) < _SESSION.size:
        raise Unknown("a request without a session")
    (session,) = _SESSION.unpack_from(record.message)
    message = CLIENT_REQUESTS.decode(bytes(record.message[_SESSION.size :]))
    if isinstance(message, Refusal):
        raise Unknown(message.message)
    return FromClient(
        at_s=record.at_s, session=session, message=message, tokens=Tokens(bytes(record.tokens))
    )


def _peer_message_in(record: InputRecord) -> FromPeer:
    names = bytes(record.message[:2])
    if len(names) < 2 or record.tokens:
        raise Unknown("a message of a peer that nobody sent")
    link_end = 2 + names[0]
    proven_end = link_end + names[1]
    message = PEER_MESSAGES.decode(bytes(record.message[proven_end:]))
    if isinstance(message, Refusal):
        raise Unknown(message.message)
    try:
        link = bytes(record.message[2:link_end]).decode()
        proven = bytes(record.message[link_end:proven_end]).decode()
    except UnicodeDecodeError as error:
        raise Unknown(str(error)) from error
    return FromPeer(at_s=record.at_s, link=link, message=message, proven=proven)


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
            (
                component.pool.free_ids()[-_TOP_BYTES:],
                component.pool.free_pages,
                component.evictable_pages,
            )
            for component in table.components.each
        ),
        (table.opened, table.released, table.evictor.evicted_pages),
        (len(table.leases), len(node.admission)),
        (decoder.delivered, decoder.failed, decoder.received_bytes, decoder.saved_bytes),
        (settled_sends.delivered, settled_sends.failed, len(settled_sends.settled)),
        (len(node.peers.by_name), node.peers.generation, len(node.sessions.by_id)),
    )
    digest = hashlib.sha256(_ENCODE(figures)).digest()[:ALIGNMENT]
    return StateMark(node.steps, node.out.seq, digest)
