"""One tier: what lies there, whether it serves, how fast it is, and what was counted of it.

A tier that fails is left alone for a while: after ``FAILURES`` orders in a row that came to nothing
it is *away*, nothing is ordered of it and no request waits for it, for a time that doubles until an
order succeeds again. So a disk that is gone costs hits, and no request more than a few times the
time that it may wait.

Where it is writing that fails, only writing is left alone: a disk that is full or read-only has all
that lies there still. What was written could have been read, so that ends both; what was read says
nothing of writing.

What must not live here: leases and pages (``demotion``, ``promotion``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.evictions import MOST_LEFT
from kvd.core.tiers.index import TierIndex
from kvd.core.tiers.store_writes import StoreWrites
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.cache.quotas import QuotaShare
    from kvd.core.kv_events.announcer import BlockAnnouncer
    from kvd.core.leases.flushes import Flushes
    from kvd.core.outbox import Outbox
    from kvd.core.settings import TierSettings

FAILURES: Final = 3
"""Orders in a row that came to nothing, until a tier is away."""

STAMP: Final = "\x1e"
"""Between a namespace and the stamp of a flush; no name has it (``cache.namespaces``)."""

AWAY_S: Final = 1.0
MOST_AWAY_S: Final = 60.0
"""For so long first, and at most."""

WEIGHT: Final = 0.25
"""Of the last order in what is told of a tier's speed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierCounts:
    """What a tier has done since this daemon began, in objects unless it says otherwise."""

    __slots__ = (
        "bad",
        "cut",
        "dropped",
        "evicted_unwritten",
        "failed_orders",
        "gave_way_s",
        "hits",
        "late",
        "no_room",
        "over_ceiling",
        "probe_hits",
        "probes",
        "read",
        "read_bytes",
        "unasked",
        "unwritten",
        "waits",
        "written",
        "written_bytes",
    )

    def __init__(self) -> None:
        self.written = 0
        self.written_bytes = 0
        self.unwritten = 0
        """Ordered, and not there in the end."""
        self.read = 0
        self.read_bytes = 0
        self.bad = 0
        """Not there, short, or not what their key names: dropped, never used."""
        self.dropped = 0
        """The oldest, for the bound."""
        self.evicted_unwritten = 0
        """Pages that left the pool before they were written, of those that should have been."""
        self.over_ceiling = 0
        """The same where their namespace was at its ceiling in a store."""
        self.hits = 0
        """Requests for which pages came from here."""
        self.waits = 0
        """Requests that waited."""
        self.late = 0
        """Of these, those that went on without because it took too long."""
        self.no_room = 0
        """Requests whose pages were here, and the pool had no room for them."""
        self.failed_orders = 0
        self.cut = 0
        """Orders that ended with their storage process."""
        self.gave_way_s = 0.0
        """How long what is written has made way for handoffs; not counting now."""
        self.probes = 0
        """Questions for what others have written; ``probe_hits`` found some of it."""
        self.probe_hits = 0
        self.unasked = 0
        """Prompts of which it is known that nothing is there, or too many are asked for already."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierHealth:
    """Of one way, to a tier or from it: whether anything is ordered."""

    __slots__ = ("away_s", "away_until_s", "failures", "why")

    def __init__(self) -> None:
        self.failures = 0
        """Orders in a row that came to nothing."""
        self.away_s = 0.0
        """For how long it was left alone last; 0 since an order has succeeded."""
        self.away_until_s = 0.0
        self.why = ""

    def failed(self, why: str, now_s: float) -> bool:
        """An order has come to nothing; whether it is left alone from now on."""
        self.failures += 1
        # One that fails after it was left alone goes at once, and for longer.
        if self.failures < FAILURES and not self.away_s:
            return False
        if now_s < self.away_until_s:
            return False  # ordered before it went
        self.away_s = min(MOST_AWAY_S, 2 * self.away_s) if self.away_s else AWAY_S
        self.away_until_s = now_s + self.away_s
        self.why = why
        return True

    def succeeded(self) -> bool:
        """An order has come to something; whether it had been left alone before."""
        was_away = self.away_s > 0
        self.failures, self.away_s, self.why = 0, 0.0, ""
        return was_away


@mypyc_attr(allow_interpreted_subclasses=True)
class StorageEnding:
    """Of the process of all tiers: why it is being killed, as long as it is not reaped."""

    __slots__ = ("why",)

    def __init__(self) -> None:
        self.why = ""


def parted(stored: str) -> tuple[str, str]:
    """A namespace as a tier has it: as the tree has it, and the stamp of the flush before."""
    namespace, _, stamp = stored.partition(STAMP)
    return namespace, stamp


@mypyc_attr(allow_interpreted_subclasses=True)
class StorageTier:
    """One of them, by its name. Read it; the parts of this room write it."""

    __slots__ = (
        "_ending",
        "_flushes",
        "_out",
        "announcer",
        "counts",
        "down_why",
        "generation",
        "gives_way_since_s",
        "health",
        "index",
        "left",
        "name",
        "of_before",
        "read_rate",
        "settings",
        "shared_out_s",
        "writes",
        "writing",
        "written_rate",
    )

    def __init__(
        self,
        settings: TierSettings,
        flushes: Flushes,
        ending: StorageEnding,
        out: Outbox,
        announcer: BlockAnnouncer | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        n_objects = max(1, settings.capacity_bytes // settings.object_bytes)
        is_shared, quotas = settings.is_shared, settings.quotas
        self.index = TierIndex(n_objects, () if is_shared else quotas)
        self.shared_out_s: float | None = None
        """When it had other quotas than before; None: it has those of the start."""
        self.writes = StoreWrites(settings.lifetime_s, quotas, out) if is_shared else None
        """What is known of one that nodes share beside the index; None: it is this node's alone."""
        self.announcer = None if is_shared else announcer
        """Who tells routers what lies there; nobody of what others may remove."""
        if self.announcer is not None:
            self.index.watch = self.announcer.in_tiers
        self.counts = TierCounts()
        self.left: OrderedDict[int, bytes] = OrderedDict()
        """By the number of a node that has left the pool, the key of its last page, which lay here
        then; of the last ones."""
        self.generation = 0
        """Of the storage process that serves it; 0: none does."""
        self.down_why = ""
        """Why none does, once that is known."""
        self.health = TierHealth()
        """Of all but writing; without it nothing is written either."""
        self.writing = TierHealth()
        self.read_rate = 0.0
        """Bytes per second of a promotion, as measured; 0: there was none yet."""
        self.written_rate = 0.0
        self.gives_way_since_s: float | None = None
        """Since when what is written goes slowly, beside handoffs; None: it does not."""
        self.of_before: dict[str, int] = {}
        """Namespaces as they are stored that a process has met and nobody wants, and how many
        objects of each: they are ordered away when it serves."""
        self._flushes = flushes
        self._ending = ending
        self._out = out

    @property
    def is_serving(self) -> bool:
        """Whether anything is read from it now."""
        # A process that is being killed answers nothing, however long the kernel takes to end it.
        if not self.generation or self._ending.why:
            return False
        return self._out.at_s >= self.health.away_until_s

    @property
    def is_written(self) -> bool:
        """Whether anything is written to it now."""
        return self.is_serving and self._out.at_s >= self.writing.away_until_s

    @property
    def word(self) -> str:
        """``serving``, ``away`` or ``down``."""
        if not self.generation:
            return "down"
        return "serving" if self.is_serving else "away"

    @property
    def why(self) -> str:
        """Why it does not serve, or why nothing is written there while it does."""
        if not self.generation:
            return self.down_why
        if self._ending.why:
            return f"its process is being killed: {self._ending.why}"
        if self.health.why or not self.writing.why:
            return self.health.why
        return f"nothing is written: {self.writing.why}"

    def room_by_share(self) -> dict[QuotaShare, int]:
        """Objects that may be there of each share, whatever the others have."""
        index, writes = self.index, self.writes
        if writes is not None:
            return {share: writes.room_of(share) for share in writes.shares}
        return {share: index.room_of(share) for share in index.shares}

    @property
    def gives_way_s(self) -> float | None:
        """For how long what is written makes way for handoffs now; None: it does not."""
        since_s = self.gives_way_since_s
        return None if since_s is None else self._out.at_s - since_s

    def end_way(self) -> None:
        """What is written makes way for nobody from now on."""
        self.counts.gave_way_s += self.gives_way_s or 0.0
        self.gives_way_since_s = None

    @property
    def most_moving(self) -> int:
        """Objects that may be under way at a time, each way."""
        return max(1, self.settings.max_moving_bytes // self.settings.object_bytes)

    def ms_for(self, n_objects: int) -> float:
        """How long it takes to have so many in the pool, as measured; 0: nothing was measured."""
        if not self.read_rate:
            return 0.0
        return 1000.0 * n_objects * self.settings.object_bytes / self.read_rate

    # ---- what it is called there -------------------------------------------------------------

    def stored_as(self, namespace: str) -> str:
        """A namespace as this tier has it: nothing of before a flush bears that name."""
        # What nodes share has the names that all of them use.
        stamp = "" if self.writes is not None else self._flushes.stamp_of(namespace)
        return f"{namespace}{STAMP}{stamp}" if stamp else namespace

    def met_before(self, stored: str, n_objects: int) -> None:
        """So many objects lie there that are of before a flush, or of an epoch that is over."""
        self.of_before[stored] = self.of_before.get(stored, 0) + n_objects

    def note_left(self, node: int, key: bytes) -> None:
        """A node has left the pool, and its last page lies here."""
        self.left[node] = key
        if len(self.left) > MOST_LEFT:
            self.left.popitem(last=False)

    # ---- how an order went -------------------------------------------------------------------

    def was_read(self, n_objects: int, why: str) -> None:
        """An order to read is over: so many of its objects came."""
        if not n_objects:
            self.failed(why)
        elif self.health.succeeded():
            self._out.emit(events.TierBack(tier=self.name))

    def was_written(self, n_objects: int, why: str) -> None:
        """The same of an order to write: so many of its objects are there."""
        if not n_objects:
            self.counts.failed_orders += 1
            if self.writing.failed(why, self._out.at_s):
                self._tell_away(self.writing)
            return
        was_away = self.health.succeeded()
        if self.writing.succeeded() or was_away:
            self._out.emit(events.TierBack(tier=self.name))

    def failed(self, why: str) -> None:
        """An order that was none to write has come to nothing, or the process of any is gone."""
        self.counts.failed_orders += 1
        if self.health.failed(why, self._out.at_s):
            self._tell_away(self.health)

    def _tell_away(self, health: TierHealth) -> None:
        self._out.emit(events.TierAway(tier=self.name, for_s=health.away_s, why=self.why))

    def measure_read(self, n_bytes: int, took_s: float) -> None:
        """So much was read in that time."""
        self.counts.read_bytes += n_bytes
        if n_bytes and took_s > 0:
            self.read_rate = _mean(self.read_rate, n_bytes / took_s)

    def measure_written(self, n_bytes: int, took_s: float) -> None:
        """So much was written in that time."""
        self.counts.written_bytes += n_bytes
        if n_bytes and took_s > 0:
            self.written_rate = _mean(self.written_rate, n_bytes / took_s)


def _mean(before: float, now: float) -> float:
    return now if not before else (1 - WEIGHT) * before + WEIGHT * now
