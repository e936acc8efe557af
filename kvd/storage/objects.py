"""What an object is: a head that says what it should be, and one page of the pool.

    byte 0      head     magic, version, length, key, layout, sum of the page, sum of the head
    byte 4096   page     region by region, of each row by row: the order of a page's bytes

The head says all that can be known of the page without reading it, so an object that was cut short,
is of another layout, or lies under another name is found before a byte of it is in the pool. The
sum is that of ``kvd.core.layout.seal`` with the object's key as its key: the key names the page by
all tokens before it, so a page that lies under another key has another sum.

What does not verify is removed and named by ``BadObject``; nothing of it is ever used.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import xxhash

from kvd.core.layout.seal import Seal, page_sum
from kvd.core.tiers.keys import KEY_BYTES
from kvd.storage.sizes import HEAD_BYTES
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

VERSION: Final = 1
LONGEST_NAME: Final = 200

_MAGIC: Final = b"kvdO"
_FIELDS: Final = struct.Struct(f"<4sHxxQ{KEY_BYTES}s{KEY_BYTES}sQ")
_SUM: Final = struct.Struct("<Q")


class ObjectHead(NamedTuple):
    """What an object says of itself. ``layout`` is the digest of the pool's fingerprint."""

    key: bytes
    layout: bytes
    page_bytes: int
    page_sum: int


class BadObject(NamedTuple):
    """Why an object cannot be used, and whether it is to be removed."""

    why: str
    is_there: bool = True


def packed_head(head: ObjectHead) -> bytes:
    """Its bytes, a whole block."""
    fields = _FIELDS.pack(_MAGIC, VERSION, head.page_bytes, head.key, head.layout, head.page_sum)
    return (fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEAD_BYTES, b"\0")


def read_head(data: bytes, key: bytes, layout: bytes, page_bytes: int) -> ObjectHead | BadObject:
    """The head of the object that should have that key, or what is wrong with it."""
    why = _damage(data)
    if why:
        return BadObject(why)
    _, _, length, its_key, its_layout, its_sum = _FIELDS.unpack_from(data)
    if its_key != key:
        why = f"it is object {its_key.hex()[:12]} under another name"
    elif its_layout != layout:
        why = "it is of a pool with another layout"
    elif length != page_bytes:
        why = f"its page has {length} bytes, and ours have {page_bytes}"
    return BadObject(why) if why else ObjectHead(its_key, its_layout, length, its_sum)


def _damage(data: bytes) -> str:
    """Why these bytes are no head."""
    if len(data) < HEAD_BYTES:
        return f"it ends after {len(data)} bytes, within its head"
    magic, version, *_ = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        return "it does not begin as an object of kvd"
    if version != VERSION:
        return f"it is of version {version}, and this kvd reads {VERSION}"
    # Before what it says is believed: a damaged one would be taken for another object.
    if _SUM.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        return "its head is damaged"
    return ""


def sum_of(key: bytes, pieces: Iterable[Buffer]) -> int:
    """The sum of a page under its key."""
    seal = Seal(integrity=Integrity.FULL, key=key, first=0, end=1)
    return page_sum(seal, 0, pieces)


def escaped(namespace: str) -> str:
    """What stands for a namespace in names of objects."""
    name = f"={quote(namespace, safe='')}"
    if len(name) <= LONGEST_NAME:
        return name
    return blake2b(namespace.encode(), digest_size=KEY_BYTES).hexdigest()
