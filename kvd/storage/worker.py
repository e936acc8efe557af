"""The storage process; how it is started is said in ``kvd.transfer.child``.

The loop only takes orders: it hands each to the lanes of its tier, whose threads write, read and
report. So an order never waits behind a disk before it is read, and a report goes out when it is
made. What lies in a tier is looked for before its lanes have anything to do, on this thread.

An exception on a thread of a lane, a bug or a ``StorageLost``, ends the process, which says so
last: what it had under way is over with it. The process ends with its parent too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from itertools import groupby
from typing import TYPE_CHECKING, Final, NoReturn

from kvd.core.effects import Demote, ProbeTier, Promote
from kvd.core.tiers.keys import KEY_BYTES
from kvd.storage.backend import StorageLost
from kvd.storage.lane import TierLanes, refusal
from kvd.storage.nixl_objects import CUDA_MAJOR
from kvd.storage.orders import (
    STORAGE_STREAM,
    BeginStorage,
    DirectoryPlan,
    Found,
    Searched,
    StorageReady,
    StorePlan,
    with_received,
)
from kvd.storage.pages import ObjectPages
from kvd.storage.posix import DirectoryTier
from kvd.storage.store import StoreTier
from kvd.transfer.child import first_orders
from kvd.transfer.mapping import RegionUnusable, keep_map, map_region
from kvd.transfer.nixl import Binding, MemorySpan, NixlUnusable
from kvd.transfer.orders import Dying, Frames

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from kvd.storage.backend import Backend, SearchOutcome
    from kvd.storage.orders import StorageOrders, StorageReports, TierPlan

READ_BYTES: Final = 2**20
LAST_WORDS_S: Final = 2.0
FOUND_KEYS: Final = 512
"""Told at a time: the node takes them in one step."""
AGE_SLICES: Final = 64
"""What was found is told by age, and what is of one namespace together within each of these."""
NICENESS: Final = 5
"""Handoffs and requests go first."""


class StorageWorker:
    """The loop of the storage process."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._frames = Frames()
        self._lanes: dict[str, TierLanes] = {}
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the end of the order socket.

        Raises:
            NixlUnusable: NIXL is missing or refuses.
            RegionUnusable: a region cannot be mapped.
            StorageLost: a tier cannot be used.
        """
        orders, received = first_orders(self._orders, self._frames, STORAGE_STREAM)
        if not isinstance(orders[0], BeginStorage):
            raise StorageLost(f"the first order is {type(orders[0]).__name__}, not Begin")
        self._begin(with_received(orders[0], received))
        for order in orders[1:]:
            self._obey(order)
        while data := self._orders.recv(READ_BYTES):
            for body in self._frames.feed(data):
                self._obey(STORAGE_STREAM.order_of(body))

    def fail(self, why: str) -> NoReturn:
        """Say the last words, and end."""
        # Whoever holds the lock may be stuck in a send to a daemon that is gone.
        self._sending.acquire(timeout=LAST_WORDS_S)
        self._orders.settimeout(LAST_WORDS_S)
        with contextlib.suppress(OSError):
            self._orders.sendall(STORAGE_STREAM.frame_of([Dying(why)]))
        os._exit(1)

    def _begin(self, begin: BeginStorage) -> None:
        threading.excepthook = self._broke  # before there is a thread that others wait for
        for descriptor in begin.kept:
            keep_map(descriptor)
        notes = {plan.name: map_region(plan) for plan in begin.regions}
        for plan in begin.regions:
            os.close(plan.fd)
        pages = ObjectPages(notes, begin.parts)
        layout = bytes.fromhex(begin.layout)
        spans = [MemorySpan(note.address, note.region_bytes) for note in notes.values()]
        stores = [plan for plan in begin.tiers if isinstance(plan, StorePlan)]
        # Their locks first: two processes of one directory would remove each other's objects.
        directories = {
            plan.tier: DirectoryTier(plan.directory, layout, pages)
            for plan in begin.tiers
            if isinstance(plan, DirectoryPlan)
        }
        for store in stores:
            _show_credentials(store)
        binding = Binding(CUDA_MAJOR if stores else 0)
        for name, directory in directories.items():
            directory.begin(binding, f"{begin.name}-{name}", spans)
        tiers: dict[str, Backend] = dict(directories)
        for store in stores:
            tiers[store.tier] = shared = StoreTier(store, layout, pages)
            shared.begin(binding, f"{begin.name}-{store.tier}")
        transports = sorted({tier.capabilities.transport for tier in tiers.values()})
        self._report(StorageReady(f"{binding.module}: {', '.join(transports)}"))
        plans = {plan.tier: plan for plan in begin.tiers}
        for name, tier in tiers.items():
            self._serve(plans[name], tier, pages, layout)

    def _serve(self, plan: TierPlan, tier: Backend, pages: ObjectPages, layout: bytes) -> None:
        """Say what lies there; then its lanes have work."""
        found = tier.search()
        name = plan.tier
        for report in _told(name, found):
            self._report(report)
        self._report(Searched(name, found.removed, found.why))
        self._lanes[name] = lanes = TierLanes(
            name, tier, pages, layout, self._report, plan.max_rate
        )
        lanes.start()

    def _obey(self, order: StorageOrders) -> None:
        if isinstance(order, BeginStorage):
            raise StorageLost("it was begun twice")
        lanes = self._lanes.get(order.tier)
        if lanes is not None:
            lanes.want(order)
        elif isinstance(order, Demote | Promote | ProbeTier):
            self._report(refusal(order, f"there is no tier {order.tier!r} here"))

    def _report(self, report: StorageReports) -> None:
        """Send it, from any thread."""
        frame = STORAGE_STREAM.frame_of([report])
        with self._sending:
            try:
                self._orders.sendall(frame)
            except OSError:
                os._exit(0)  # the daemon is gone

    def _broke(self, args: threading.ExceptHookArgs) -> None:
        """A thread has ended by an exception: others wait for it."""
        if isinstance(args.exc_value, StorageLost):
            self.fail(str(args.exc_value))
        threading.__excepthook__(args)
        name = "" if args.thread is None else args.thread.name
        self.fail(f"thread {name} ended by {args.exc_type.__name__}: {args.exc_value}")


def _show_credentials(plan: StorePlan) -> None:
    """Tell NIXL, before it is loaded, where AWS's chain of credentials looks first."""
    # That an object is not there is its answer to a probe, and no line of the log.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    if plan.credentials_file is not None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        os.environ["AWS_SHARED_CREDENTIALS_FILE"] = plan.credentials_file
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    if plan.profile is not None:
        os.environ["AWS_PROFILE"] = plan.profile


def _told(tier: str, found: SearchOutcome) -> Iterator[Found]:
    """What lies there: roughly by age, and some of one namespace at a time."""
    stride = max(1, -(-len(found.objects) // AGE_SLICES))
    for first in range(0, len(found.objects), stride):
        names = [stored.name for stored in found.objects[first : first + stride]]
        # Stable: by age within each namespace.
        names.sort(key=lambda name: name.namespace)
        for namespace, same in groupby(names, key=lambda name: name.namespace):
            keys = b"".join(name.key for name in same)
            for start in range(0, len(keys), FOUND_KEYS * KEY_BYTES):
                yield Found(tier, namespace, keys[start : start + FOUND_KEYS * KEY_BYTES])


def main(orders: socket.socket) -> None:
    """Serve that socket."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(NICENESS)
    worker = StorageWorker(orders)
    try:
        worker.run()
    except (NixlUnusable, RegionUnusable, StorageLost) as exc:
        worker.fail(str(exc))
