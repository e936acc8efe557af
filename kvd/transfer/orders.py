"""What the daemon tells the transfer process, and what it hears back.

Orders go one way and reports the other over one stream socket (``frames``). Nothing here moves a
byte of a page or knows NIXL.

Invariants:
  - Each ``Post`` is answered by one ``Posted``, ``PostFailed`` or ``Unposted``; ``Moved`` may come
    before.
  - Each ``Load`` is answered by one ``Loaded`` or ``LoadFailed``, unless a ``Drop`` overtakes it.
  - Each ``Verify`` is answered by one ``Verified``.
  - Each ``Quiesce`` is answered by one ``Quiet``, and no ``Awaiting`` of it follows that.
  - Each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``.
  - ``Dropped`` follows every ``PostFailed`` of the posts that were outstanding through its sender.
"""

from __future__ import annotations

import enum

import msgspec

from kvd.core.effects import Doubt
from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.seal import UNSEALED, Seal
from kvd.core.layout.shards import PageWindow, ShardCopy, Straight
from kvd.types import Pages


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
    rows: tuple[PieceRow, ...]
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
    making: ShardCopy = Straight()
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
    window: PageWindow | None = None


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    """Sum our ``pages`` of ``region``, each bound to its own number, and say ``Summed``."""

    ticket: int
    region: str
    pages: Pages


class Quiesce(msgspec.Struct, frozen=True, tag="quiesce"):
    """Say when nothing of what is in doubt is on its way into our pages any more.

    ``ARRIVED``: what has reached this host. ``SENT``: and whatever can still come on a connection
    that there is now.
    """

    ticket: int
    doubt: Doubt


class Exempt(msgspec.Struct, frozen=True, tag="exempt"):
    """These connections, as the far end names them, are not to be waited for; once said, for good.

    Of a ticket that is not waited for any more it says nothing.
    """

    tickets: tuple[int, ...]
    streams: tuple[str, ...]


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


Order = Begin | Load | Drop | Post | Forget | Verify | Sum | Quiesce | Exempt | Copy | Probe


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
    """The sending agent exists and a first write through it has arrived, by ``path``.

    ``streams``: its connections with that peer, ``sender>receiver``.
    """

    peer: str
    generation: int
    path: Path
    streams: tuple[str, ...] = ()


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
    no late byte can land. Above zero, bytes may be in the network or in the peer's socket buffers,
    where only the peer can tell: its ``Quiet``, or the end of its transfer process, proves the
    rest.
    """

    peer: str
    generation: int
    unacknowledged_bytes: int


class Quiet(msgspec.Struct, frozen=True, tag="quiet"):
    """What was in doubt when ``Quiesce`` was ordered is in the pages or discarded."""

    ticket: int


class Awaiting(msgspec.Struct, frozen=True, tag="awaiting"):
    """What these tickets wait for beside what has arrived: the ends of ``streams``.

    Said when they are looked for first, unless there are none, and whenever some have ended.
    """

    tickets: tuple[int, ...]
    streams: tuple[str, ...]


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
    | Awaiting
    | Copied
    | CopyFailed
    | Alive
    | Collapsed
)
