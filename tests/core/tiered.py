"""A side with a tier below its pool: a storage process that does what a test says, step by step."""

from __future__ import annotations

from collections import deque

from typing_extensions import override

from kvd.core import effects, inputs
from kvd.core.settings import TierSettings
from kvd.core.tiers.keys import each_key
from kvd.sim.storage import SimDisk
from kvd.types import Tokens, page_ids
from kvd.wire import client
from tests.core.side import PAGE, Side
from tests.core.world import World, tokens

__all__ = ["DISK", "PAGE", "TieredSide", "TieredWorld", "cached", "disk", "fill", "tokens"]

DISK = "disk"


def disk(objects: int = 64, moving: int = 64, **more: object) -> TierSettings:
    """A tier of so many objects of one byte."""
    fields = {"name": DISK, "capacity_bytes": objects, "object_bytes": 1, **more}
    return TierSettings(max_moving_bytes=moving, **fields)  # type: ignore[arg-type]


class TieredSide(Side):
    """Carries out one order at a time, in order, when the world runs, unless it is held."""

    def __init__(self, world: World, config: object) -> None:
        self.stored: SimDisk[str] | None = None
        super().__init__(world, config)  # type: ignore[arg-type]

    @override
    def begin(self) -> None:
        self.orders: deque[effects.StorageOrder] = deque()
        self.storage = 0
        """The generation of the storage process; negative: it is dead and not reaped."""
        self.hold_storage = False
        self.shares: list[float] = []
        """Of its time, what is written was told to take."""
        self.fails_writing = self.fails_probing = ""
        self.restarted: list[str] = []
        super().begin()

    @property
    def tier(self):
        return self.node.tiers.each[0]

    def start_storage(self, generation: int = 1) -> None:
        """A process begins: it tells what it finds, and serves."""
        if self.stored is None:
            self.stored = SimDisk(self.config.tiers[0])
        self.storage = generation
        found = {} if self.config.tiers[0].is_shared else self.stored.found()
        for namespace, keys in found.items():
            self.feed(inputs.TierFound(self.world.now_s, DISK, namespace, keys))
        self.feed(inputs.TierReady(self.world.now_s, DISK, generation))
        self.world.run()

    def stop_storage(self, why: str = "killed") -> None:
        """It is killed and reaped; what it had not carried out it never will."""
        self.orders.clear()
        generation, self.storage = self.storage, 0
        self.feed(inputs.StorageGone(self.world.now_s, generation, why))
        self.world.run()

    @override
    def order_storage(self, order: effects.StorageOrder) -> None:
        assert self.storage, f"ordered of nobody: {order}"
        if isinstance(order, effects.PaceWrites):
            self.shares.append(order.share)
            return
        self.orders.append(order)

    @override
    def restart_storage(self, why: str) -> None:
        self.restarted.append(why)

    @override
    def report_next(self) -> bool:
        if super().report_next():
            return True
        if self.hold_storage or not self.orders:
            return False
        self.carry_out()
        return True

    def carry_out(self) -> None:
        """The oldest order."""
        order = self.orders.popleft()
        assert self.stored is not None
        match order:
            case effects.Demote():
                self.feed(self.demote(order))
            case effects.Promote():
                self.feed(self.promote(order))
            case effects.DropObjects():
                self.stored.drop(order)
            case effects.AgeObjects():
                self.stored.age(order)
            case effects.DropNamespace() if not self.config.tiers[0].is_shared:
                self.stored.drop_namespace(order.namespace)
            case effects.ProbeTier():
                self.feed(self.probe(order))

    def demote(self, order: effects.Demote) -> inputs.Demoted:
        assert self.stored is not None
        if self.fails_writing:
            return inputs.Demoted(self.world.now_s, order.ticket, (), 0, self.fails_writing)
        pages = page_ids(order.pages)
        assert not set(pages) & set(page_ids(self.free_of("kv"))), "reads a page that is free"
        uses = self.stored.uses(len(pages), order.behind)
        for key, page, use in zip(each_key(order.keys), pages, uses, strict=True):
            self.stored.write(order.namespace, key, self.memory.get(page, "?"), use)
        written = tuple(range(len(pages)))
        return inputs.Demoted(self.world.now_s, order.ticket, written, len(pages))

    def probe(self, order: effects.ProbeTier) -> inputs.TierProbed:
        assert self.stored is not None
        if self.fails_probing:
            return inputs.TierProbed(self.world.now_s, order.ticket, 0, self.fails_probing)
        keys = each_key(order.keys)
        there = [(order.namespace, key) in self.stored.objects for key in keys]
        return inputs.TierProbed(self.world.now_s, order.ticket, [*there, False].index(False))

    def promote(self, order: effects.Promote) -> inputs.Promoted:
        assert self.stored is not None
        pages, bad = page_ids(order.pages), []
        owners = [
            lease
            for lease in self.node.leases.leases.values()
            if set(page_ids(lease.held)) & set(pages)
        ]
        assert [lease.holders for lease in owners] == [{"promotion"}], "writes another's pages"
        uses = self.stored.uses(len(pages))
        for at, (key, page, use) in enumerate(zip(each_key(order.keys), pages, uses, strict=True)):
            content = self.stored.read(order.namespace, key, use)
            self.memory[page] = "garbage" if content is None else content
            bad += [at] if content is None else []
        why = "does not verify" if bad else ""
        n_bytes = len(pages) - len(bad)
        return inputs.Promoted(self.world.now_s, order.ticket, tuple(bad), n_bytes, why)


class TieredWorld(World):
    """A prefill and a decode side with a disk each; the decode side's is looked at."""

    side = TieredSide

    def __init__(self, *, tier: TierSettings | None = None, **more: object) -> None:
        super().__init__(tiers=(tier or disk(),), **more)  # type: ignore[arg-type]
        for side in self.sides.values():
            side.start_storage()


def cached(side: Side, toks: Tokens, namespace: str = "", priority: int = 0) -> None:
    """An engine has computed these tokens, and let go of them."""
    lease = side.lease(toks, namespace=namespace, priority=priority)
    side.write(lease.pages, toks, namespace)
    side.call(client.CommitAndRelease, lease=lease.lease)


def fill(world: World, side: Side, first: int = 50_000, n_pages: int = 0) -> None:
    """Push everything else out of the pool: prompts of one page each, one after the other."""
    for k in range(n_pages or side.node.leases.capacity_pages):
        cached(side, tokens((first + k * PAGE, PAGE)))
        world.pass_time(0.1)
