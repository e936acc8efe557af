"""Whose journal it is, and why one is not taken over. The head of the file says it, and is checked.

magic, version, sizes | fingerprint | memory | node | check        written once, magic last
generation, last lease, last session, pid namespace                one sealed word each
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from kvd.core.layout.spec import Whole, fingerprint

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec

MAGIC: Final = b"kvd-jrnl"
VERSION: Final = 2
HEAD_BYTES: Final = 4096

_HEAD: Final = struct.Struct("<8sIIQQ32s16s128s")
_CHECK: Final = struct.Struct("<Q")
STATIC_BYTES: Final = _HEAD.size + _CHECK.size


class Identity(msgspec.Struct, frozen=True):
    """What a journal is the journal of.

    ``layout``: digest of the pool's fingerprint, 32 bytes. ``memory``: 16 bytes that whoever keeps
    the arena beside it knows that by, so that neither is ever read with another one's partner.
    """

    layout: bytes
    pages: int
    page_size: int
    node: str
    memory: bytes = bytes(16)


class IdentityFlaw(enum.Enum):
    """Why a journal is not taken over."""

    BLANK = "blank"
    FOREIGN = "foreign"
    TORN = "torn"
    VERSION = "version"
    RESIZED = "resized"
    LAYOUT = "layout"
    NODE = "node"
    MEMORY = "memory"


class RefusedJournal(msgspec.Struct, frozen=True):
    """A journal that is not ours to read; ``why`` has the numbers."""

    flaw: IdentityFlaw
    why: str


def can_keep(spec: PoolSpec) -> bool:
    """Whether such a pool can be journaled: one component, which every token of a sequence has."""
    return len(spec.components) == 1 and isinstance(spec.components[0].extent, Whole)


def identity_of(spec: PoolSpec, node: str, memory: bytes = bytes(16)) -> Identity:
    """The identity of the journal of ``node``'s pool.

    Raises:
        ValueError: such a pool cannot be journaled.
    """
    if not can_keep(spec):
        raise ValueError(f"pools of family {spec.family} have no journal yet")
    layout = hashlib.sha256(f"{spec.name}\0{spec.family}\0{fingerprint(spec)}".encode()).digest()
    return Identity(
        layout=layout,
        pages=spec.pages[0],
        page_size=spec.components[0].page_size,
        node=node,
        memory=memory,
    )


def head_of(identity: Identity) -> bytes:
    """The part of the head that never changes."""
    said = _packed(identity, VERSION)
    return said + _CHECK.pack(xxhash.xxh3_64_intdigest(said))


def flaw_of(head: bytes, ours: Identity) -> RefusedJournal | None:
    """Why the journal with this head is not ours; None where it is."""
    magic, version, head_bytes, pages, page_size, layout, memory, node = _HEAD.unpack_from(head)
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    is_whole = head_bytes == HEAD_BYTES and check == xxhash.xxh3_64_intdigest(head[: _HEAD.size])
    name = node.rstrip(b"\0").decode(errors="replace")
    rules = (
        (any(head), IdentityFlaw.BLANK, "it has never been written"),
        (
            magic == MAGIC,
            IdentityFlaw.FOREIGN,
            f"it begins with {magic!r}, a journal with {MAGIC!r}",
        ),
        (
            version == VERSION,
            IdentityFlaw.VERSION,
            f"it has version {version}, this program writes {VERSION}",
        ),
        (is_whole, IdentityFlaw.TORN, "its head is damaged"),
        (
            (pages, page_size) == (ours.pages, ours.page_size),
            IdentityFlaw.RESIZED,
            f"it is of {pages} pages of {page_size} tokens, the pool has {ours.pages} of "
            f"{ours.page_size}",
        ),
        (
            layout == ours.layout,
            IdentityFlaw.LAYOUT,
            "it is of a pool whose pages are laid out in another way",
        ),
        (
            node == _padded(ours.node),
            IdentityFlaw.NODE,
            f"it is of node {name!r}, this is {ours.node!r}",
        ),
        (
            memory == ours.memory,
            IdentityFlaw.MEMORY,
            f"it is of memory {memory.hex()}, the pool's is {ours.memory.hex()}",
        ),
    )
    # In this order: a journal of another version may have its check elsewhere, so that is asked
    # first.
    return next((RefusedJournal(flaw, why) for is_kept, flaw, why in rules if not is_kept), None)


def _packed(identity: Identity, version: int) -> bytes:
    return _HEAD.pack(
        MAGIC,
        version,
        HEAD_BYTES,
        identity.pages,
        identity.page_size,
        identity.layout,
        identity.memory,
        _padded(identity.node),
    )


def _padded(node: str) -> bytes:
    """The name in the head's room; of a longer one a digest."""
    said = node.encode()
    if len(said) > 128:
        said = hashlib.sha256(said).digest()
    return said.ljust(128, b"\0")
