"""What lies below a simulated pool: objects on a disk that outlives every process, and the process.

An object is what was written under its key, until a fault makes it short, another one's, or gone.
The disk is bounded, and whoever writes beyond the bound is found out. The process obeys in order,
each order in its time: some are slow, some are never done, some fail. When it is killed what it
was reading into is torn, and what it was writing is there or not.

A store that nodes share has no bound, and is worse: what it says it has written it may have lost,
what it says it has may not be there, and an object of a process that was killed may be half there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from kvd.core import effects, inputs
from kvd.core.leases.flushes import last_flush
from kvd.core.tiers.keys import each_key
from kvd.core.tiers.tier import parted
from kvd.sim.contents import TORN
from kvd.sim.violation import require
from kvd.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.settings import TierSettings
    from kvd.sim.host import SimHost

C = TypeVar("C")
"""What a page holds, as the world has it."""

Use = tuple[int, int]
"""When an object counts as used: the order, and within it or within a stop the first one last."""


class SimDisk(Generic[C]):
    """The objects of one tier, by namespace and key."""

    def __init__(self, settings: TierSettings) -> None:
        self.name = settings.name
        self.most = settings.capacity_bytes // settings.object_bytes
        if settings.is_shared:
            self.most = sys.maxsize
        self.objects: dict[tuple[str, bytes], C] = {}
        """In the order in which they were written."""
        self.damaged: set[tuple[str, bytes]] = set()
        """Those that will not verify."""
        self._used: dict[tuple[str, bytes], Use] = {}
        """Of each that is there."""
        self.ordered_s: dict[tuple[str, bytes], float] = {}
        """When it was ordered to be written."""
        self._clock = self._stop = 0
        """Of orders, and of the first one of a stop."""

    def serve_anew(self) -> None:
        """Another process serves it from now on: its stop is another one."""
        self._stop = 0

    def uses(self, n_objects: int, behind: int = 0) -> list[Use]:
        """When the objects of an order that is carried out now count as used."""
        self._clock += 1
        if behind and not self._stop:
            self._stop = self._clock
        clock = self._stop if behind else self._clock
        return [(clock, -place) for place in range(behind, behind + n_objects)]

    def leading(self, order: effects.ProbeTier) -> int:
        """How many of the first that are asked for are there."""
        there = [(order.namespace, key) in self.objects for key in each_key(order.keys)]
        return [*there, False].index(False)

    def write(self, namespace: str, key: bytes, content: C, use: Use) -> None:
        """An object is there, whole."""
        self.remove(namespace, key)
        self.objects[namespace, key] = content
        self._used[namespace, key] = use
        require(
            len(self.objects) <= self.most,
            f"tier {self.name}: {len(self.objects)} objects, it holds {self.most}",
        )

    def read(self, namespace: str, key: bytes, use: Use) -> C | None:
        """What it holds; None where it is not there or does not verify."""
        if (namespace, key) in self.damaged or (namespace, key) not in self.objects:
            return None
        self._used[namespace, key] = use
        return self.objects[namespace, key]

    def remove(self, namespace: str, key: bytes) -> None:
        """It is gone, if it was there."""
        self.objects.pop((namespace, key), None)
        self.ordered_s.pop((namespace, key), None)
        self._used.pop((namespace, key), None)
        self.damaged.discard((namespace, key))

    def drop(self, order: effects.DropObjects) -> None:
        """These are gone."""
        for key in each_key(order.keys):
            self.remove(order.namespace, key)

    def age(self, order: effects.AgeObjects) -> None:
        """A stop has come to these."""
        keys = each_key(order.keys)
        for key, use in zip(keys, self.uses(len(keys), order.behind), strict=True):
            if (order.namespace, key) in self.objects:
                self._used[order.namespace, key] = use

    def drop_namespace(self, namespace: str) -> None:
        """All of it is gone."""
        for named in [named for named in self.objects if named[0] == namespace]:
            self.remove(*named)

    def found(self) -> dict[str, bytes]:
        """By namespace the keys of what lies there, the least recently used first.

        What is damaged looks like the rest until it is read.
        """
        keys: dict[str, list[bytes]] = {}
        for namespace, key in sorted(self.objects, key=self._used.__getitem__):
            keys.setdefault(namespace, []).append(key)
        return {namespace: b"".join(found) for namespace, found in keys.items()}

    def damage(self, place: int) -> None:
        """One of its objects is short or another's from now on, or is gone."""
        named = list(self.objects)
        if not named:
            return
        if place % 3:
            self.damaged.add(named[place % len(named)])
        else:
            self.remove(*named[place % len(named)])


START_S = 0.2
ORDER_S, SLOW_S = 0.05, 1.5
SLOW, NEVER, FAILS = 0.1, 0.01, 0.03
"""Shares of orders in a storm."""
LOST, LIES = 0.05, 0.1
"""Of a store that is shared: objects that were said to be written, and answers what is there."""


class SimStorageProcess:
    """One storage process, from its start to its death: a lane for each tier."""

    def __init__(self, host: SimHost, disks: dict[str, SimDisk[int]], generation: int) -> None:
        self.host = host
        self.generation = generation
        self.is_alive = True
        self.lanes = {
            tier.name: SimTierLane(self, disks[tier.name], is_shared=tier.is_shared)
            for tier in host.settings.tiers
        }
        agenda, rng = host.world.agenda, host.world.rng
        agenda.after(START_S * rng.random(), self.told, self._ready)

    def die(self) -> None:
        """Killed, each lane in the middle of its first order."""
        self.is_alive = False
        for lane in self.lanes.values():
            lane.cut()

    def order(self, order: effects.StorageOrder) -> None:
        """Take an order; a dead process takes none."""
        if self.is_alive:
            self.lanes[order.tier].order(order)

    def told(self, what: Callable[[], None]) -> None:
        """Once its daemon is awake."""
        host, agenda = self.host, self.host.world.agenda
        if not self.is_alive:
            return
        if host.asleep_until_s > agenda.now_s:
            agenda.at(host.asleep_until_s, self.told, what)
        else:
            what()

    def _ready(self) -> None:
        for lane in self.lanes.values():
            lane.ready()


class LaneOrder(msgspec.Struct, frozen=True):
    """One order, when it was given, and what the pages of one that writes objects held then."""

    order: effects.StorageOrder
    held: list[int]
    at_s: float


class SimTierLane:
    """What one storage process does with one tier, an order after the other."""

    def __init__(self, process: SimStorageProcess, disk: SimDisk[int], *, is_shared: bool) -> None:
        self.host = process.host
        self.disk = disk
        self.orders: list[LaneOrder] = []
        self._process = process
        self._is_shared = is_shared
        self._agenda = process.host.world.agenda
        self._random = process.host.world.rng.random
        self._is_busy = False
        self._write_share = 1.0
        disk.serve_anew()

    def cut(self) -> None:
        """Its process was killed."""
        for taken in self.orders[:1]:
            order = taken.order
            if isinstance(order, effects.Promote) and self._is_busy:
                self._check_owner(order)
                pages = page_ids(order.pages)
                self.host.memory.first[pages[int(len(pages) * self._random())]] = TORN
            elif isinstance(order, effects.Demote) and self._is_busy:
                n_whole = int(len(each_key(order.keys)) * self._random())
                self._write(order, n_whole, taken.at_s)
                if self._is_shared:
                    self.disk.damaged.add((order.namespace, each_key(order.keys)[n_whole]))
        self.orders.clear()

    def order(self, order: effects.StorageOrder) -> None:
        """Take an order."""
        if isinstance(order, effects.PaceWrites):
            self._write_share = order.share
            return
        if isinstance(order, effects.Promote):
            self._check_flush(order)
        memory = self.host.memory.first
        is_demotion = isinstance(order, effects.Demote)
        pages = page_ids(order.pages) if isinstance(order, effects.Demote) else []
        held = [memory[page] for page in pages] if is_demotion else []
        self.orders.append(LaneOrder(order, held, self._agenda.now_s))
        self._begin()

    def _begin(self) -> None:
        if self._is_busy or not self.orders:
            return
        self._is_busy = True
        is_stormy, dice = self.host.world.is_stormy, self._random()
        if is_stormy and dice < NEVER:
            return
        longest_s = SLOW_S if is_stormy and dice < NEVER + SLOW else ORDER_S
        if isinstance(self.orders[0].order, effects.Demote):
            longest_s /= self._write_share
        self._agenda.after(longest_s * self._random(), self._process.told, self._carry_out)

    def ready(self) -> None:
        """Say what lies there."""
        now_s, name = self._agenda.now_s, self.disk.name
        found = {} if self._is_shared else self.disk.found()
        for namespace, keys in found.items():
            self.host.feed(inputs.TierFound(at_s=now_s, tier=name, namespace=namespace, keys=keys))
        self.host.feed(inputs.TierReady(now_s, name, self._process.generation))

    def _carry_out(self) -> None:
        taken = self.orders.pop(0)
        self._is_busy = False
        report = self._carried_out(taken)
        if report is not None:
            self.host.feed(report)
        if self._process.is_alive:
            self._begin()

    def _carried_out(self, taken: LaneOrder) -> inputs.StorageReport | None:
        """Do it; what is said of it."""
        match taken.order:
            case effects.Demote() as order:
                return self._demote(order, taken)
            case effects.Promote() as order:
                return self._promote(order)
            case effects.DropObjects() as order:
                self.disk.drop(order)
            case effects.AgeObjects() as order:
                self.disk.age(order)
            case effects.DropNamespace() as order:
                if not self._is_shared:
                    self.disk.drop_namespace(order.namespace)
            case effects.ProbeTier() as order:
                return self._probe(order)
            case effects.PaceWrites():
                pass  # since it was ordered
        return None

    def _probe(self, order: effects.ProbeTier) -> inputs.TierProbed:
        require(self._is_shared, f"{self.host.name}: no tier here is shared: {order}")
        n_there, why = self.disk.leading(order), ""
        if self.host.world.is_stormy and self._random() < LIES:
            n_there, why = self._lie(len(each_key(order.keys)))
        now_s = self._agenda.now_s
        return inputs.TierProbed(at_s=now_s, ticket=order.ticket, n_there=n_there, why=why)

    def _lie(self, n_keys: int) -> tuple[int, str]:
        """What it says instead: some number of them, or nothing and why."""
        if self._random() < FAILS:
            return 0, "the store is silent"
        return int((n_keys + 1) * self._random()), ""

    def _demote(self, order: effects.Demote, taken: LaneOrder) -> inputs.Demoted:
        self._check_owner(order)
        memory, pages = self.host.memory.first, page_ids(order.pages)
        name = self.host.name
        require(
            [memory[page] for page in pages] == taken.held,
            f"{name}: pages {pages} were overwritten while order {order.ticket} read them",
        )
        n_written = len(pages)
        if self.host.world.is_stormy and self._random() < FAILS:
            n_written = int(n_written * self._random())
        self._write(order, n_written, taken.at_s)
        why = "" if n_written == len(pages) else "no space left on device"
        written = tuple(range(n_written))
        return inputs.Demoted(
            at_s=self._agenda.now_s,
            ticket=order.ticket,
            written=written,
            n_bytes=n_written,
            why=why,
        )

    def _write(self, order: effects.Demote, n_objects: int, ordered_s: float) -> None:
        memory = self.host.memory.first
        keys = each_key(order.keys)
        uses = self.disk.uses(len(keys), order.behind)
        may_lose = self._is_shared and self.host.world.is_stormy
        moves = list(zip(keys, page_ids(order.pages), uses, strict=True))
        for key, page, use in moves[:n_objects]:
            if not (may_lose and self._random() < LOST):
                self.disk.write(order.namespace, key, memory[page], use)
                self.disk.ordered_s[order.namespace, key] = ordered_s

    def _promote(self, order: effects.Promote) -> inputs.Promoted:
        self._check_owner(order)
        bad = []
        keys = each_key(order.keys)
        moves = zip(keys, page_ids(order.pages), self.disk.uses(len(keys)), strict=True)
        for at, (key, page, use) in enumerate(moves):
            content = self.disk.read(order.namespace, key, use)
            if content is None and self._is_shared:
                # It is written over: nobody reads it again.
                self.disk.remove(order.namespace, key)
            self.host.memory.first[page] = TORN if content is None else content
            bad += [at] if content is None else []
        n_bytes = len(page_ids(order.pages)) - len(bad)
        why = "does not verify" if bad else ""
        return inputs.Promoted(
            at_s=self._agenda.now_s,
            ticket=order.ticket,
            bad=tuple(bad),
            n_bytes=n_bytes,
            why=why,
        )

    def _check_flush(self, order: effects.Promote) -> None:
        """Nothing is asked for that was there before a flush which this host was told is kept.

        Of a store that is so until what was there is as old as it may get.
        """
        host, now_s = self.host, self._agenda.now_s
        flush = last_flush(host.epochs.flushed, parted(order.namespace)[0])
        lifetime_s = max([tier.lifetime_s for tier in host.settings.tiers])
        if flush is None or (self._is_shared and now_s - flush.at_s >= lifetime_s):
            return
        for key in each_key(order.keys):
            written_s = self.disk.ordered_s.get((order.namespace, key), now_s)
            require(
                written_s >= flush.at_s,
                f"{host.name}: an object of {written_s:.3f} is asked for, and all of "
                f"{order.namespace!r} was flushed at {flush.at_s:.3f}",
            )

    def _check_owner(self, order: effects.Demote | effects.Promote) -> None:
        """Its pages are kept for it, now: nobody else writes or reads them meanwhile."""
        node, name = self.host.node, self.host.name
        move = node.tiers.moves.under_way.get(order.ticket)
        lease = move.lease if move is not None else None
        is_kept = lease is not None and node.leases.leases.get(lease.id) is lease
        require(is_kept, f"{name}: order {order.ticket} is carried out, and nobody keeps its pages")
        assert lease is not None
        kept = lease.held if isinstance(order, effects.Promote) else lease.page_table
        require(
            set(page_ids(kept)).issuperset(page_ids(order.pages)),
            f"{name}: order {order.ticket} has pages that lease {lease.id} does not keep for it",
        )
