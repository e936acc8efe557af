"""What the daemon tells the transfer process, and what it hears back.

Orders go one way and reports the other over one stream socket, in frames: a little-endian uint32
length and that many bytes of MessagePack, one order or one list of reports. Nearly all of them are
the node's own: an order is an effect of a step, as it stands, and a report becomes an input once
the daemon has stamped it with its time. What is declared here passes between the two processes
alone. Nothing here moves a byte of a page or knows NIXL.

Invariants:
  - Each ``Post`` is answered by one ``PostDone``, ``PostFailed`` or ``Unposted``; ``PostMoved`` may
    come before.
  - Each ``LoadAgent`` is answered by one ``AgentLoaded`` or ``AgentFailed``, unless a ``DropAgent``
    overtakes it.
  - Each ``Verify`` is answered by one ``Verified``, each ``Sum`` by one ``Summed``. ``LandedGood``
    of a ticket comes before that, or never.
  - Each ``Quiesce`` is answered by one ``Quiet``, and no ``Awaiting`` of it follows that.
  - Each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``.
  - ``AgentDropped`` follows every ``PostFailed`` of the posts that were outstanding through its
    agent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from kvd.core.effects import TransferOrder
from kvd.core.inputs import TransferReport
from kvd.core.layout.geometry import Geometry
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSTAMPED: Final = 0.0
"""The time of a report until the daemon has it: the node's time is that of its own loop."""


NO_FD: Final = -1
"""Of a region on a device."""


class RegionPlan(msgspec.Struct, frozen=True):
    """One region: a file descriptor to map, or a CUDA device to allocate on; where its pages lie.

    ``in_huge_pages``: collapse it to 2 MiB pages. ``is_registered``: peers write into it and posts
    read it; otherwise only a ``Copy`` of this process touches it. ``meets_device``: copies go
    between it and a region on a device, so it is host memory for CUDA to pin.
    """

    name: str
    fd: int
    geometry: Geometry
    in_huge_pages: bool = True
    is_registered: bool = True
    device: int | None = None
    """The number of a CUDA device, where there is no descriptor; None: it is host memory."""
    meets_device: bool = False


class BeginTransfer(msgspec.Struct, frozen=True, tag="begin"):
    """The first order: who this process is and what it maps.

    ``name`` is unique to one life of one transfer process: the node's incarnation and the transport
    generation. ``kept`` are descriptors to keep mapped to the end (see ``mapping``). Descriptors
    travel beside the order, as ``descriptors_of`` it: in it they have the numbers of the sender.
    ``environment`` is set before NIXL is loaded.
    """

    name: str
    kept: tuple[int, ...]
    regions: tuple[RegionPlan, ...]
    environment: dict[str, str] = {}


def descriptors_of(begin: BeginTransfer) -> list[int]:
    """Every descriptor that the order names, in the order in which they travel."""
    return [*begin.kept, *(region.fd for region in begin.regions if region.device is None)]


def with_descriptors(begin: BeginTransfer, received: list[int]) -> BeginTransfer:
    """The order with the numbers that its descriptors have where they arrived."""
    kept, mapped = received[: len(begin.kept)], iter(received[len(begin.kept) :])
    regions = (
        region if region.device is not None else replace(region, fd=next(mapped))
        for region in begin.regions
    )
    return replace(begin, kept=tuple(kept), regions=tuple(regions))


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
    """Every region is registered; ``metadata`` is for a peer's ``LoadAgent``.

    ``shared``: those on devices. Their memory is this process's own and ends with it.
    """

    metadata: bytes
    transport: str
    shared: tuple[SharedRegion, ...] = ()


class Dying(msgspec.Struct, frozen=True, tag="dying"):
    """The last report of a process that cannot serve, or has met a bug, and is about to exit."""

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


Report = Ready | Dying | Summed | Alive | Collapsed | TransferReport

# ---- how they cross the socket ------------------------------------------------------------------

T = TypeVar("T")

MAX_WHY = 300
"""Characters of a flaw that are told."""

MAX_FRAME_BYTES = 256 * 2**20
"""A post of 32 million pages; anything longer is a damaged stream, not an order."""

_LENGTH = struct.Struct("<I")


class BadStream(Exception):
    """The other end of the order socket sent what is no frame of it; the message says what."""


OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT")

_ENCODER = msgspec.msgpack.Encoder()


class OrderStream(Generic[OrderT, ReportT]):
    """What goes each way between a daemon and one of its processes, as the bytes of frames."""

    def __init__(
        self,
        orders: msgspec.msgpack.Decoder[OrderT],
        reports: msgspec.msgpack.Decoder[list[ReportT]],
    ) -> None:
        self._orders = orders
        self._reports = reports

    def frame_of(self, message: OrderT | list[ReportT]) -> bytes:
        """The bytes of one frame."""
        body = _ENCODER.encode(message)
        return _LENGTH.pack(len(body)) + body

    def order_of(self, body: bytes) -> OrderT:
        """Decode the body of a frame on the child's side.

        Raises:
            BadStream: it is no order.
        """
        return _read(self._orders, body)

    def reports_of(self, body: bytes) -> list[ReportT]:
        """Decode the body of a frame on the daemon's side.

        Raises:
            BadStream: it is no list of reports.
        """
        return _read(self._reports, body)


TRANSFER_STREAM: Final[OrderStream[Order, Report]] = OrderStream(
    msgspec.msgpack.Decoder(Order), msgspec.msgpack.Decoder(list[Report])
)
frame_of = TRANSFER_STREAM.frame_of
order_of = TRANSFER_STREAM.order_of
reports_of = TRANSFER_STREAM.reports_of


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadStream(f"{len(body)} bytes that cannot be read: {str(exc)[:MAX_WHY]}") from exc


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
            # Before the rest is waited for: a damaged length would have all that follows collected
            # for nothing.
            if length > MAX_FRAME_BYTES:
                raise BadStream(
                    f"frame of {length} bytes on the order socket; the limit is {MAX_FRAME_BYTES}"
                )
            if len(self._pending) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            yield bytes(self._pending[at : at + length])
            at += length
        # Once for all frames of one read: each cut would move what is behind it.
        del self._pending[:at]
