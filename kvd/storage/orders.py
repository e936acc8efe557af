"""What the daemon tells the storage process, and what it hears back.

As with the transfer process (``kvd.transfer.orders``): an order is an effect of a step, as it
stands, and a report becomes an input once the daemon has stamped it. What is declared here passes
between the two processes alone.

Invariants:
  - ``StorageReady`` is the first report; then ``Found`` of what lies in a tier, then one
    ``Searched`` of it.
  - Each ``Demote`` is answered by one ``Demoted``, each ``Promote`` by one ``Promoted``,
    each ``ProbeTier`` by one ``TierProbed``.
  - What is written or dropped is so in the order of the orders; what is read waits for none of it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from kvd.core.effects import StorageOrder
from kvd.core.inputs import StorageReport
from kvd.transfer.orders import Dying, OrderStream, RegionPlan


class ObjectPart(msgspec.Struct, frozen=True):
    """What an object has of one region: ``factor`` pages of it for each page of the pool."""

    region: str
    factor: int = 1


class DirectoryPlan(msgspec.Struct, frozen=True, tag="directory"):
    """A tier in a directory of this host. ``max_rate``: bytes a second each way; 0: any."""

    tier: str
    directory: str
    max_rate: int = 0


class StorePlan(msgspec.Struct, frozen=True, tag="store"):
    """A tier in a store that speaks S3.

    ``credentials_file`` is read by NIXL in the storage process, and by nothing of kvd.
    ``answer_s``: silence of the store after which what was asked of it is given up;
    ``deadline_s``: that of the core, which ends the process. ``max_bytes``: of memory, each way.
    ``max_rate``: bytes a second each way; 0: any.
    """

    tier: str
    endpoint: str
    bucket: str
    prefix: str
    region: str
    credentials_file: str | None
    profile: str | None
    ca_file: str | None
    answer_s: float
    deadline_s: float
    max_bytes: int
    max_rate: int = 0


TierPlan = DirectoryPlan | StorePlan


class BeginStorage(msgspec.Struct, frozen=True, tag="begin"):
    """The first order: what this process maps, what an object is made of, and where objects lie.

    ``kept`` and ``regions`` have descriptors of the sender, which travel beside the order.
    ``layout`` is the fingerprint of the pool: objects of another one are of no use to it.
    """

    name: str
    kept: tuple[int, ...]
    regions: tuple[RegionPlan, ...]
    parts: tuple[ObjectPart, ...]
    layout: str
    tiers: tuple[TierPlan, ...]


class StorageReady(msgspec.Struct, frozen=True, tag="storage-ready"):
    """The pool is mapped, and every tier can be used; what lies in them is looked for now."""

    transport: str


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Objects of a namespace that lie in a tier, ``KEY_BYTES`` of each, the oldest used first."""

    tier: str
    namespace: str
    keys: bytes


class Searched(msgspec.Struct, frozen=True, tag="searched"):
    """All that lies in a tier has been told; ``removed`` of what lay there was no object of it."""

    tier: str
    removed: int
    why: str = ""
    """Of the first one that was removed."""


StorageOrders = BeginStorage | StorageOrder
StorageReports = StorageReady | Dying | Found | Searched | StorageReport

STORAGE_STREAM: Final[OrderStream[StorageOrders, StorageReports]] = OrderStream(
    msgspec.msgpack.Decoder(StorageOrders), msgspec.msgpack.Decoder(list[StorageReports])
)


def with_received(begin: BeginStorage, received: list[int]) -> BeginStorage:
    """The order with the numbers that its descriptors have where they arrived."""
    kept, mapped = received[: len(begin.kept)], received[len(begin.kept) :]
    regions = tuple(
        replace(region, fd=fd) for region, fd in zip(begin.regions, mapped, strict=True)
    )
    return replace(begin, kept=tuple(kept), regions=regions)
