"""The file of a recording: who, the node where it begins, the records, and a checksum of it all.

    8 bytes magic | u32 length of the header | header, msgpack | frozen node | records | sha256

It holds the token ids of prompts, so only its owner may read it. A file may be damaged or come from
a stranger: its lengths are checked against what there is before anything is read by them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.recorder.record_layout import HEADER, KIND_AT, LENGTH, InputRecord, padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MAGIC: Final = b"KVDREC\r\n"
FORMAT: Final = 3
"""Grows when the file or its records are laid out in another way."""

MAX_HEADER_BYTES: Final = 64 * 1024
_LENGTH: Final = struct.Struct("<I")
_SUM_BYTES: Final = 32


class Damaged(Exception):
    """The file is no recording, or not a whole one; the message says what is wrong with it."""


class Header(msgspec.Struct, frozen=True):
    """What a recording says about itself.

    ``seconds`` and ``inputs`` are what it covers; ``state_hash`` is of the live node after the last
    input, empty if nobody could take it.
    """

    format: int
    kvd: str
    node: str
    incarnation: str
    why: str
    saved_at: str
    seconds: float
    inputs: int
    base_bytes: int
    record_bytes: int
    state_hash: str = ""


class _AnyHeader(msgspec.Struct, frozen=True):
    """What the header of every format has."""

    format: int
    kvd: str


class Recording(msgspec.Struct, frozen=True):
    """A recording in memory: ``records`` are as they lay in the ring."""

    header: Header
    base: bytes
    records: bytes


def write(path: Path, header: Header, base: bytes, records: Iterable[bytes]) -> None:
    """Write a recording; ``path`` is there as a whole or not at all, for its owner only.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    head = msgspec.msgpack.encode(header)
    digest = hashlib.sha256()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in (MAGIC, _LENGTH.pack(len(head)), head, base):
                digest.update(piece)
                file.write(piece)
            for piece in records:
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> Recording:
    """Read a recording.

    Raises:
        Damaged: it is none, or not whole, or of a format that this kvd does not know.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    start = len(MAGIC) + _LENGTH.size
    if len(data) < start + _SUM_BYTES or not data.startswith(MAGIC):
        raise Damaged(f"{len(data)} bytes that are no recording of kvd")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > MAX_HEADER_BYTES:
        raise Damaged(f"its header would have {length} bytes, at most {MAX_HEADER_BYTES} are read")
    header = _header(data[start : start + length])
    whole = start + length + header.base_bytes + header.record_bytes + _SUM_BYTES
    if min(header.base_bytes, header.record_bytes) < 0 or whole != len(data):
        raise Damaged(
            f"it has {len(data)} bytes where its header says {whole}: it was cut, or put together"
        )
    if hashlib.sha256(memoryview(data)[:-_SUM_BYTES]).digest() != data[-_SUM_BYTES:]:
        raise Damaged(
            "its checksum is not that of its content: it was damaged after it was written"
        )
    middle = start + length + header.base_bytes
    return Recording(header, data[start + length : middle], data[middle:-_SUM_BYTES])


def _header(data: bytes) -> Header:
    try:
        known = msgspec.msgpack.decode(data, type=_AnyHeader)
        if known.format != FORMAT:
            raise Damaged(
                f"it is of format {known.format}, written by kvd {known.kvd}; this kvd reads "
                f"format {FORMAT}: replay it with that version"
            )
        return msgspec.msgpack.decode(data, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read: {error}") from error


def records_in(data: bytes) -> Iterator[InputRecord]:
    """The records, in order.

    Raises:
        Damaged: one ends beyond the data.
    """
    at = 0
    while at < len(data):
        if len(data) - at < HEADER.size:
            raise Damaged(f"{len(data) - at} bytes are left over where a record should begin")
        length, n_tokens, at_s = HEADER.unpack_from(data, at)
        n_message = length & LENGTH
        end = at + padded(n_message + n_tokens)
        if end > len(data):
            raise Damaged(f"a record of {end - at} bytes, {len(data) - at} are left")
        message = at + HEADER.size
        tokens = message + n_message
        rest = data[tokens : tokens + n_tokens]
        yield InputRecord(at_s, data[message:tokens], rest, length >> KIND_AT)
        at = end
