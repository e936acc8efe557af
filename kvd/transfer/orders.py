"""What the daemon tells the transfer process, and what it hears back.

Orders go one way and reports the other over one stream socket (``frames``). Nearly all of them are
the node's own: an order is an effect of a step, as it stands, and a report becomes an input once
the daemon has stamped it with its time. What is declared here passes between the two processes
alone. Nothing here moves a byte of a page or knows NIXL.

Invariants:
  - Each ``Post`` is answered by one ``PostDone``, ``PostFailed`` or ``Unposted``; ``PostMoved`` may
    come before.
  - Each ``LoadAgent`` is answered by one ``AgentLoaded`` or ``AgentFailed``, unless a ``DropAgent``
    overtakes it.
  - Each ``Verify`` is answered by one ``Verified``, each ``Sum`` by one ``Summed``.
  - Each ``Quiesce`` is answered by one ``Quiet``, and no ``Awaiting`` of it follows that.
  - Each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``.
  - ``AgentDropped`` follows every ``PostFailed`` of the posts that were outstanding through its
    agent.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvd.core.effects import TransferOrder
from kvd.core.inputs import TransferReport
from kvd.core.layout.geometry import PieceRow
from kvd.types import Pages

UNSTAMPED: Final = 0.0
"""The time of a report until the daemon has it: the node's time is that of its own loop."""


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


class BeginTransfer(msgspec.Struct, frozen=True, tag="begin"):
    """The first order: who this process is and what it maps.

    ``name`` is unique to one life of one transfer process: the node's incarnation and the transport
    generation. ``kept`` are descriptors to keep mapped to the end (see ``map_lifetime``).
    """

    name: str
    kept: tuple[int, ...]
    regions: tuple[RegionPlan, ...]


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    """Sum our ``pages`` of ``region``, each bound to its own number, and say ``Summed``."""

    ticket: int
    region: str
    pages: Pages


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Say that the loop of the transfer process runs."""

    number: int


Order = BeginTransfer | Sum | Probe | TransferOrder


class SharedRegion(msgspec.Struct, frozen=True):
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
    shared: tuple[SharedRegion, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag="start-failed"):
    """The process cannot serve and is about to exit."""

    why: str


class Dying(msgspec.Struct, frozen=True, tag="dying"):
    """The last report of a process that met a bug of its own and is about to exit."""

    why: str


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    """The sums that a ``Sum`` asked for, 8 bytes each, in the order of its pages.

    ``why`` is given, and no sums, where nothing could be summed.
    """

    ticket: int
    sums: bytes
    why: str = ""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The loop has come to this ``Probe``."""

    number: int


class Collapsed(msgspec.Struct, frozen=True, tag="collapsed"):
    """Huge pages were made of ``huge_bytes`` of the region; ``why`` if that is not all of it."""

    region: str
    huge_bytes: int
    why: str


Report = Ready | StartFailed | Dying | Summed | Alive | Collapsed | TransferReport
