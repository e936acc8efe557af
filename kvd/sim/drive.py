"""A tier below the pool of a node that replays a load: a drive with one rate, which never fails.

It does one order after the other, reads before writes, as fast as its rate. What it holds is
``SimDisk``; the storage process of a world with faults is in ``storage``.

A store that nodes share is a drive at each of them, over the same objects: so the rate is that of a
node's way there, and the store itself keeps up with all of them. It is asked what it has meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.core import effects, inputs
from kvd.core.settings import Demotion, TierSettings
from kvd.core.tiers.keys import each_key
from kvd.sim.storage import SimDisk, Use
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.sim.agenda import Agenda

GENERATION = 1

PROBE_S = 0.01
"""From a question what a store has to its answer; it waits behind nothing."""

KNOWN_OBJECTS = 2**17
"""Of a store, at each node; as many as a daemon remembers."""

LEAST_TOKENS = 256
"""What of a prompt is shorter is not asked for; as ``tiers.store.min_tokens``."""


class DriveShape(msgspec.Struct, frozen=True):
    """How much it holds, how fast it is, and what is written to it."""

    tokens: int
    tokens_per_s: float
    """Read or written; one at a time."""
    demotion: Demotion = Demotion.ALWAYS
    wait_s: float = 2.0
    """How long a request waits for its pages from here at most."""
    is_shared: bool = False
    """By all nodes: what one has written the others find."""

    def settings(self, page_tokens: int) -> TierSettings:
        """The tier for a node; sizes are in tokens, for nothing here knows bytes."""
        return TierSettings(
            name="store" if self.is_shared else "disk",
            # What a node knows of a store has no bound that matters here.
            capacity_bytes=KNOWN_OBJECTS * page_tokens if self.is_shared else self.tokens,
            object_bytes=page_tokens,
            demotion=self.demotion,
            wait_s=self.wait_s,
            max_moving_bytes=max(page_tokens, int(self.tokens_per_s)),  # of one second
            is_shared=self.is_shared,
            least_bytes=LEAST_TOKENS * ID_BYTES if self.is_shared else 0,
        )

    def objects(self, page_tokens: int) -> SimDisk[bool]:
        """Nothing lies there yet."""
        settings = self.settings(page_tokens)
        if self.is_shared:
            return SimStore(settings, self.tokens // page_tokens)
        return SimDisk(settings)


class SimStore(SimDisk[bool]):
    """What all nodes have written, bounded by rules that no node knows: the oldest goes.

    Not the least recently used: a store counts the age of an object from its writing on.
    """

    def __init__(self, settings: TierSettings, n_objects: int) -> None:
        super().__init__(settings)
        self._bound = n_objects

    @override
    def write(self, namespace: str, key: bytes, content: bool, use: Use) -> None:
        super().write(namespace, key, content, use)
        if len(self.objects) > self._bound:
            self.remove(*next(iter(self.objects)))


class Drive:
    """What carries out the storage orders of one node; ``report`` is told how each went."""

    def __init__(
        self,
        shape: DriveShape,
        page_tokens: int,
        objects: SimDisk[bool],
        agenda: Agenda,
        report: Callable[[inputs.StorageReport], None],
    ) -> None:
        self.name = objects.name
        self.read_tokens = 0
        self.written_tokens = 0
        self._page_tokens = page_tokens
        self._page_s = page_tokens / shape.tokens_per_s
        self._agenda = agenda
        self._report = report
        self._disk = objects
        self._reads: deque[effects.Promote] = deque()
        self._writes: deque[effects.Demote] = deque()
        self._is_busy = False

    def order(self, order: effects.StorageOrder) -> None:
        """Take one; what is dropped is gone at once, for it is named by none that comes before."""
        match order:
            case effects.Promote():
                self._reads.append(order)
            case effects.Demote():
                self._writes.append(order)
            case effects.DropObjects():
                self._disk.drop(order)
            case effects.AgeObjects():
                self._disk.age(order)
            case effects.DropNamespace():
                self._disk.drop_namespace(order.namespace)
            case effects.PaceWrites():
                pass  # there are no handoffs here
            case effects.ProbeTier():
                self._agenda.after(PROBE_S, self._answer, order)
        self._begin()

    def _answer(self, order: effects.ProbeTier) -> None:
        n_there, now_s = self._disk.leading(order), self._agenda.now_s
        self._report(inputs.TierProbed(at_s=now_s, ticket=order.ticket, n_there=n_there))

    def _begin(self) -> None:
        queue = self._reads or self._writes
        if queue and not self._is_busy:
            self._is_busy = True
            order = queue.popleft()
            self._agenda.after(len(each_key(order.keys)) * self._page_s, self._done, order)

    def _done(self, order: effects.Promote | effects.Demote) -> None:
        self._is_busy = False
        keys, now_s = each_key(order.keys), self._agenda.now_s
        n_bytes = len(keys) * self._page_tokens
        uses = self._disk.uses(len(keys))
        if isinstance(order, effects.Demote):
            for key, use in zip(keys, uses, strict=True):
                self._disk.write(order.namespace, key, content=True, use=use)
            self.written_tokens += n_bytes
            every = tuple(range(len(keys)))
            self._report(
                inputs.Demoted(at_s=now_s, ticket=order.ticket, written=every, n_bytes=n_bytes)
            )
        else:
            self.read_tokens += n_bytes
            found = [
                self._disk.read(order.namespace, key, use)
                for key, use in zip(keys, uses, strict=True)
            ]
            gone = [at for at, content in enumerate(found) if not content]
            why = "not there" if gone else ""
            self._report(
                inputs.Promoted(
                    at_s=now_s, ticket=order.ticket, bad=tuple(gone), n_bytes=n_bytes, why=why
                )
            )
        self._begin()
