"""What the daemon tells the transfer process, and what it hears back.

Orders go one way and reports the other over one stream socket. A frame is a little-endian uint32
length and that many bytes of MessagePack: one order, or one list of reports. Nothing here moves a
byte of a page or knows NIXL.

Invariants:
  - Each ``Post`` is answered by one ``Posted``, ``PostFailed`` or ``Unposted``; ``Moved`` may come
    before.
  - Each ``Load`` is answered by one ``Loaded`` or ``LoadFailed``, unless a ``Drop`` overtakes it.
  - Each ``Verify`` is answered by one ``Verified``.
  - Each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``.
  - ``Dropped`` follows every ``PostFailed`` of the posts that were outstanding through its sender.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.core.geometry import Row
from kvd.core.seal import UNSEALED, Seal
from kvd.core.shards import Making, Straight, Window
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

MAX_WHY = 300
"""Characters of a flaw that are told."""

MAX_FRAME_BYTES = 256 * 2**20
"""A post of 32 million pages; anything longer is a damaged stream, not an order."""

_LENGTH = struct.Struct("<I")


class BadStream(Exception):
    """The other end of the order socket sent what is no frame of it; the message says what."""


class Path(enum.Enum):
    """How the bytes of a peer travel, found out by the first write."""

    SAME_HOST = "same-host"  # one process copies into the other: nothing is ever in between
    NETWORK = "network"


class RegionPlan(msgspec.Struct, frozen=True):
    """One region: to map, with an inherited file ``descriptor``, or to allocate on a ``device``."""

    name: str
    descriptor: int
    pages: int
    page_bytes: int
    rows: tuple[Row, ...]
    in_huge_pages: bool = True
    is_registered: bool = True
    """Peers may write into it and posts read it; otherwise only a ``Copy`` touches it."""
    page_tokens: int = 0
    strips: tuple[int, ...] = ()
    layers: int = 0
    heads: int = 0
    """These four as in ``RegionNote``."""
    device: int | None = None
    """The number of a CUDA device; None: it is host memory. One on a device has no descriptor."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first order: who this process is and what it maps.

    ``name`` is unique to one life of one transfer process: the node's incarnation and the transport
    generation. ``kept`` are descriptors to keep mapped to the end (see ``kvd.transfer.witness``).
    """

    name: str
    kept: tuple[int, ...]
    regions: tuple[RegionPlan, ...]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Create the sending agent for one transport generation of one peer and try it."""

    peer: str
    generation: int
    metadata: bytes


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Destroy that sending agent; its outstanding posts fail."""

    peer: str
    generation: int


class Post(msgspec.Struct, frozen=True, tag="post"):
    """Write our pages ``source[i]`` of ``region`` over the peer's pages ``destination[i]``.

    ``source[i]`` is logical page ``first_page + i`` of its handoff; ``seal`` says which are summed.
    With ``split`` above 1 the peer's page is that part of ours, and everything is counted in its
    pages: ``source[i]`` is ``page * split + s``, piece ``s`` of our page, its slots in order.
    ``region`` is a component; which shards of it ``making`` says for ours, ``peer_shard`` for the
    peer's. Nothing is read before the CUDA event behind ``after`` (an IPC handle) has come.
    """

    post: int
    peer: str
    generation: int
    region: str
    source: Pages
    destination: Pages
    seal: Seal = UNSEALED
    first_page: int = 0
    split: int = 1
    peer_shard: int = 0
    making: Making = Straight()
    after: bytes = b""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody wants this post any more: ``Unposted``, if it still waits for its event."""

    post: int


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Sum our ``pages`` of ``region``, logical pages ``[seal.first, seal.end)``, and compare.

    ``sums`` are what the pages that the seal chooses must have, 8 bytes each, ascending. Only
    ``window`` of each page of our ``shard`` is summed; None is all of it.
    """

    ticket: int
    region: str
    seal: Seal
    pages: Pages
    sums: bytes
    shard: int = 0
    window: Window | None = None


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    """Sum our ``pages`` of ``region``, each bound to its own number, and say ``Summed``."""

    ticket: int
    region: str
    pages: Pages


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """Say when nothing that has already reached this host is still on its way into our pages."""

    ticket: int


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Copy pages ``source[i]`` of one of our regions over pages ``destination[i]`` of another."""

    ticket: int
    source_region: str
    source: Pages
    destination_region: str
    destination: Pages


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Say that the loop of the transfer process runs."""

    number: int


Order = Begin | Load | Drop | Post | Forget | Verify | Sum | Quiesce | Copy | Probe


class Shared(msgspec.Struct, frozen=True):
    """A region on a device, for engines to open: where the device sits, and an IPC handle."""

    region: str
    bus_id: str
    handle: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Every region is registered; ``metadata`` is for the peers' ``Load``.

    ``shared``: those on devices. Their memory is this process's own and ends with it.
    """

    metadata: bytes
    transport: str
    shared: tuple[Shared, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag="start-failed"):
    """The process cannot serve and is about to exit."""

    why: str


class Dying(msgspec.Struct, frozen=True, tag="dying"):
    """The last report of a process that met a bug of its own and is about to exit."""

    why: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The sending agent exists and a first write through it has arrived, by ``path``."""

    peer: str
    generation: int
    path: Path


class LoadFailed(msgspec.Struct, frozen=True, tag="load-failed"):
    """There is no sending agent for this peer and generation."""

    peer: str
    generation: int
    why: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Bytes of a running post that are known to have arrived."""

    post: int
    moved_bytes: int


class Posted(msgspec.Struct, frozen=True, tag="posted"):
    """Every byte of the post has arrived; ``active_s`` counts from its first write.

    ``sums``: of the pages of ours that its seal chose, 8 bytes each, ascending.
    """

    post: int
    moved_bytes: int
    active_s: float
    sums: bytes = b""


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """What a ``Verify`` found: the logical pages whose sums differ, ascending.

    ``why`` is given where nothing could be summed.
    """

    ticket: int
    bad_pages: tuple[int, ...]
    why: str = ""


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    """The sums that a ``Sum`` asked for, 8 bytes each, in the order of its pages.

    ``why`` is given, and no sums, where nothing could be summed.
    """

    ticket: int
    sums: bytes
    why: str = ""


class PostFailed(msgspec.Struct, frozen=True, tag="post-failed"):
    """The post writes nothing new, yet late bytes may land until its agent is ``Dropped``.

    A post refused before its first write names a reason and never touched the peer.
    """

    post: int
    why: str


class Unposted(msgspec.Struct, frozen=True, tag="unposted"):
    """The post waited for its event; nothing of it was written, and nothing will be."""

    post: int
    why: str


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The sending agent is destroyed: this process sends nothing more through it.

    ``unacknowledged_bytes`` is what it had sent and the peer had not confirmed. Zero proves that
    no late byte can land. Above zero, bytes may sit in the peer's socket buffers, where only the
    peer can tell: its ``Quiet``, or the end of its transfer process, proves the rest.
    """

    peer: str
    generation: int
    unacknowledged_bytes: int


class Quiet(msgspec.Struct, frozen=True, tag="quiet"):
    """What had reached this host when ``Quiesce`` was ordered is in the pages or discarded."""

    ticket: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """Every byte of the copy is in its place."""

    ticket: int
    n_bytes: int


class CopyFailed(msgspec.Struct, frozen=True, tag="copy-failed"):
    """The copy was refused and wrote nothing."""

    ticket: int
    why: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The loop has come to this ``Probe``."""

    number: int


class Collapsed(msgspec.Struct, frozen=True, tag="collapsed"):
    """Huge pages were made of ``huge_bytes`` of the region; ``why`` if that is not all of it."""

    region: str
    huge_bytes: int
    why: str


Report = (
    Ready
    | StartFailed
    | Dying
    | Loaded
    | LoadFailed
    | Moved
    | Posted
    | PostFailed
    | Unposted
    | Verified
    | Summed
    | Dropped
    | Quiet
    | Copied
    | CopyFailed
    | Alive
    | Collapsed
)

_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_REPORTS = msgspec.msgpack.Decoder(list[Report])


def frame_of(message: Order | list[Report]) -> bytes:
    """The bytes of one frame."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def order_of(body: bytes) -> Order:
    """Decode the body of a frame on the child's side.

    Raises:
        BadStream: it is no order.
    """
    return _read(_ORDER, body)


def reports_of(body: bytes) -> list[Report]:
    """Decode the body of a frame on the daemon's side.

    Raises:
        BadStream: it is no list of reports.
    """
    return _read(_REPORTS, body)


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{len(body)} bytes that cannot be read: {str(exc)[:MAX_WHY]}"
        raise BadStream(msg) from exc


class Frames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was read; yield each body that is now whole.

        Raises:
            BadStream: a length above ``MAX_FRAME_BYTES``: the stream is damaged for good.
        """
        self._pending += data
        at = 0
        while len(self._pending) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending, at)
            if length > MAX_FRAME_BYTES:
                msg = f"frame of {length} bytes on the order socket; the limit is {MAX_FRAME_BYTES}"
                raise BadStream(msg)
            if len(self._pending) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            yield bytes(self._pending[at : at + length])
            at += length
        del self._pending[:at]
