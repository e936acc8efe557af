"""What one transfer process tells the others so that they can write into its regions.

Damaged NIXL metadata can crash the process that loads it, so the blob travels in a frame with a
length and a checksum, and nothing of it reaches NIXL before both are right. The frame proves that
the bytes are whole, not who made them or that they make sense: it crosses the authenticated
control socket only, and every number in it is checked, for the loop computes addresses with them.

    magic "kvdT" | uint32 body length | uint64 xxh3 of the body | body (MessagePack)
"""

from __future__ import annotations

import enum
import itertools
import struct

import msgspec
import xxhash

from kvd.core.layout.geometry import PieceRow

VERSION = 1

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"kvdT"
Rows = tuple[PieceRow, ...]

_TOP = 2**63
"""Above every address and every sum of them, so that none overflows 64 bits."""
_MOST_PAGES = 2**31
_LONGEST_NAME = 256
_LARGEST_BLOB_BYTES = 16 * 2**20
_MOST_REGIONS = 4096
_MOST_ROWS = 2**16
_HIGHEST_DEVICE = 2**16


class MemoryKind(enum.Enum):
    """Kinds of memory, by the names that NIXL has for them."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class MemorySite(msgspec.Struct, frozen=True):
    """Where memory lies: of which kind it is, and of which device; host memory has device 0."""

    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0


HOST = MemorySite()


class RegionNote(msgspec.Struct, frozen=True):
    """A registered region: ``address`` is where its process mapped byte 0 of the rows.

    ``strips`` are the bytes of each tensor in one page, as they follow each other through the rows;
    empty: each row is one. ``page_tokens`` are the slots of every strip, which is what a page can
    be cut by; 1: those of a head lie together; 0: it cannot be cut. ``layers`` and ``heads`` are
    what windows of a page are counted in: the strips of a layer follow each other (K, then V), all
    layers are alike and evenly spaced, and each slot of a strip is ``heads`` equal parts; 0: a page
    has no windows.
    """

    name: str
    address: int
    region_bytes: int
    pages: int
    page_bytes: int
    rows: tuple[PieceRow, ...]
    page_tokens: int = 0
    strips: tuple[int, ...] = ()
    layers: int = 0
    heads: int = 0
    place: MemorySite = HOST


def strips(note: RegionNote) -> Rows:
    """Where each tensor of a page lies: strip ``i`` of page p is the p-th piece of the i-th row."""
    if not note.strips:
        return note.rows
    rows = iter(note.rows)
    row, inside = next(rows), 0
    found = []
    for size in note.strips:
        if inside == row.piece_bytes:
            row, inside = next(rows), 0
        found.append(PieceRow(row.offset_bytes + inside, row.stride_bytes, size))
        inside += size
    return tuple(found)


class Metadata(msgspec.Struct, frozen=True):
    """Everything a sender needs; ``scratch`` is an address where its first write may land."""

    version: int
    agent: str
    blob: bytes
    scratch: int
    scratch_bytes: int
    regions: tuple[RegionNote, ...]


class BadMetadata(Exception):
    """The bytes are not metadata of this version; the message says what is wrong with them."""


def pack(metadata: Metadata) -> bytes:
    """Frame ``metadata``."""
    body = msgspec.msgpack.encode(metadata)
    return _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def unpack(framed: bytes) -> Metadata:
    """Read a frame back.

    Raises:
        BadMetadata: damaged, truncated, another version, or fields that make no sense.
    """
    if len(framed) < _HEAD.size:
        raise BadMetadata(
            f"{len(framed)} bytes of transport metadata; even the head takes {_HEAD.size}"
        )
    magic, length, checksum = _HEAD.unpack_from(framed)
    body = framed[_HEAD.size :]
    # Length, sum, shape, version, numbers: in this order, because each makes the next safe to look
    # at.
    if magic != _MAGIC or length != len(body):
        raise BadMetadata(f"transport metadata announces {length} bytes and brings {len(body)}")
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise BadMetadata(f"transport metadata of {length} bytes does not match its checksum")
    try:
        metadata = msgspec.msgpack.decode(body, type=Metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadMetadata(f"transport metadata is whole but not understood: {exc}") from exc
    if metadata.version != VERSION:
        raise BadMetadata(
            f"transport metadata has version {metadata.version}; this node speaks {VERSION}"
        )
    _check_head(metadata)
    for region in metadata.regions:
        _check(region)
    return metadata


def extent_bytes(pages: int, rows: tuple[PieceRow, ...]) -> int:
    """Bytes from the region's start to the end of the last piece of the last page."""
    return max(
        (row.offset_bytes + (pages - 1) * row.stride_bytes + row.piece_bytes for row in rows),
        default=0,
    )


def _check_head(metadata: Metadata) -> None:
    """Refuse what is wrong outside the regions, or with how many there are."""
    names = [region.name for region in metadata.regions]
    if not all(0 < len(name) <= _LONGEST_NAME for name in (metadata.agent, *names)):
        longest = max(len(name) for name in (metadata.agent, *names))
        raise BadMetadata(
            f"transport metadata holds an empty name or one of {longest} characters; "
            f"names have 1 to {_LONGEST_NAME}"
        )
    if len(metadata.blob) > _LARGEST_BLOB_BYTES:
        raise BadMetadata(
            f"transport metadata holds {len(metadata.blob)} bytes of NIXL's; that cannot be"
        )
    if not (
        metadata.scratch >= 0
        and metadata.scratch_bytes > 0
        and metadata.scratch + metadata.scratch_bytes < _TOP
    ):
        raise BadMetadata(
            f"scratch memory of {metadata.scratch_bytes} bytes at address {metadata.scratch} "
            "is no memory to write to"
        )
    # Posts name regions: of two with one name a post would reach either.
    if len(names) > _MOST_REGIONS or len(set(names)) != len(names):
        raise BadMetadata(
            f"{len(names)} regions of {len(set(names))} names; each needs a name of its own"
        )


def _check(region: RegionNote) -> None:
    """Refuse numbers that would address memory outside the region."""
    sane = (
        0 < region.pages <= _MOST_PAGES
        and region.address >= 0
        and region.region_bytes > 0
        and region.address + region.region_bytes < _TOP
        and 0 < len(region.rows) <= _MOST_ROWS
        and all(r.offset_bytes >= 0 and r.piece_bytes > 0 for r in region.rows)
        and all(r.piece_bytes <= r.stride_bytes < _TOP for r in region.rows)
        and sum(r.piece_bytes for r in region.rows) == region.page_bytes
        and extent_bytes(region.pages, region.rows) <= region.region_bytes
    )
    if not sane:
        raise BadMetadata(
            f"region {region.name!r} of {region.region_bytes} bytes cannot hold {region.pages} "
            f"pages of {region.page_bytes} bytes in {len(region.rows)} rows "
            f"ending at {extent_bytes(region.pages, region.rows)}"
        )
    place = region.place
    if not 0 <= place.device <= _HIGHEST_DEVICE or (place.device and place.kind is MemoryKind.DRAM):
        raise BadMetadata(
            f"region {region.name!r} lies in {place.kind.value} of device {place.device}: no place"
        )
    if not _is_tiled(region):
        raise BadMetadata(
            f"region {region.name!r} says that the {region.page_bytes} bytes of a page are "
            f"{len(region.strips)} tensors of {region.page_tokens} slots; they are not"
        )
    if not _has_windows(region):
        raise BadMetadata(
            f"region {region.name!r} says that the {len(region.strips)} tensors of a page are "
            f"those of {region.layers} layers, all alike, and that each of their "
            f"{region.page_tokens} slots is {region.heads} heads; they are not"
        )


def _has_windows(region: RegionNote) -> bool:
    """Whether layers and heads, if they are given, divide the strips evenly."""
    layers, heads, tokens = region.layers, region.heads, region.page_tokens
    if not layers and not heads:
        return True
    if not (0 < layers <= len(region.strips) and 0 < heads < _TOP and tokens > 0):
        return False
    each, rest = divmod(len(region.strips), layers)
    if rest or any(size % (tokens * heads) for size in region.strips):
        return False
    rows = strips(region)
    return all(_is_even(rows[tensor::each]) for tensor in range(each))


def _is_even(rows: tuple[PieceRow, ...]) -> bool:
    """Whether the strips of one tensor are alike and evenly spaced."""
    sizes = {(row.stride_bytes, row.piece_bytes) for row in rows}
    steps = {b.offset_bytes - a.offset_bytes for a, b in itertools.pairwise(rows)}
    return len(sizes) == 1 and len(steps) <= 1


def _is_tiled(region: RegionNote) -> bool:
    """Whether the strips, if there are any, tile each row in turn, in whole slots."""
    if len(region.strips) > _MOST_ROWS or not 0 <= region.page_tokens < _TOP:
        return False
    if any(size <= 0 for size in region.strips):
        return False
    sizes = region.strips or tuple(row.piece_bytes for row in region.rows)
    ends = set(itertools.accumulate(sizes))
    rows = list(itertools.accumulate(row.piece_bytes for row in region.rows))
    is_whole = not region.page_tokens or all(size % region.page_tokens == 0 for size in sizes)
    return is_whole and sum(sizes) == rows[-1] and ends.issuperset(rows)
