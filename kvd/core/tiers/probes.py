"""What others have written to a tier that nodes share: asked for, many pages at a time.

Of such a tier the index knows what this node has written, read or asked for, and no more. So a
prompt that goes on where neither the pool nor any index knows its pages is asked for: one order for
all of its next pages, which its request waits for as for a promotion, and much less long. Whoever
asks for the same meanwhile waits for the same answer. What was not there is not asked for again for
a while, and what is shorter than it is worth never is.

After a flush of a namespace nothing of it is asked for as long as what was there then may be there:
nobody can remove what nodes share.

What must not live here: who waits and what is read then (``promotion``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.tiers.keys import keys_along, next_key
from kvd.core.tiers.moves import joined

if TYPE_CHECKING:
    from kvd.core.inputs import TierProbed
    from kvd.core.leases.flushes import Flushes
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.moves import TierMoves
    from kvd.core.tiers.tier import StorageTier
    from kvd.types import Tokens

MOST_PROBES: Final = 256
"""Under way at a time."""
MOST_KEYS: Final = 256
"""Of one prompt at a time."""
MOST_ABSENT: Final = 65536
"""Keys that are remembered as not there."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierProbe:
    """One question: how many of these objects, which follow each other behind ``before``."""

    __slots__ = ("before", "is_void", "keys", "namespace", "since_s", "ticket", "tier")

    def __init__(
        self, tier: StorageTier, namespace: str, before: bytes, keys: list[bytes], since_s: float
    ) -> None:
        self.tier = tier
        self.namespace = namespace
        self.before = before
        self.keys = keys
        self.since_s = since_s
        self.ticket = 0
        self.is_void = False
        """Whether its namespace was flushed since."""

    @property
    def name(self) -> str:
        """What a waiter waits for; no peer has a name with a blank."""
        return f"probe {self.ticket}"

    @property
    def words(self) -> str:
        """The same for people."""
        return f"tier {self.tier.name} to say what it has of {len(self.keys)} pages"


@mypyc_attr(allow_interpreted_subclasses=True)
class Probes:
    """The questions to the tiers that are shared."""

    def __init__(
        self,
        tiers: tuple[StorageTier, ...],
        page_bytes: int,
        moves: TierMoves,
        flushes: Flushes,
        out: Outbox,
    ) -> None:
        self._tiers = tuple([tier for tier in tiers if tier.writes is not None])
        self._page_bytes = page_bytes
        self._moves = moves
        self._flushes = flushes
        self._out = out
        self.under_way: dict[int, TierProbe] = {}
        """By ticket."""
        self._by_first: dict[bytes, TierProbe] = {}
        self._absent: dict[bytes, float] = {}
        """Until when it is not asked for again; the oldest first."""
        self._forgotten_s = 0.0
        """When all that is known was last forgotten."""

    def can_ask(self, n_bytes: int) -> bool:
        """Whether there is anybody to ask for so many bytes of token ids."""
        for tier in self._tiers:
            if n_bytes >= max(self._page_bytes, tier.settings.least_bytes) and tier.is_serving:
                return True
        return False

    def want(
        self, tokens: Tokens, namespace: str, have_bytes: int, before: bytes
    ) -> TierProbe | None:
        """The question for what follows ``before``, new or under way; None: it is not worth one."""
        page_bytes, now_s = self._page_bytes, self._out.at_s
        for tier in self._tiers:
            least_bytes = max(page_bytes, tier.settings.least_bytes)
            if not tier.is_serving or len(tokens) - have_bytes < least_bytes:
                continue
            first = next_key(before, tokens[have_bytes : have_bytes + page_bytes])
            coming = self._by_first.get(first)
            if coming is not None:
                return coming
            if self._absent.get(first, 0.0) > now_s or self._is_not_asked(tier, namespace):
                tier.counts.unasked += 1
                continue
            if len(self.under_way) >= MOST_PROBES:
                tier.counts.unasked += 1
                continue
            end = have_bytes + MOST_KEYS * page_bytes
            keys = keys_along(before, tokens[have_bytes:end], page_bytes)
            return self._begin(TierProbe(tier, namespace, before, keys, now_s))
        return None

    def _begin(self, probe: TierProbe) -> TierProbe:
        tier = probe.tier
        probe.ticket = ticket = self._moves.take_ticket()
        self.under_way[ticket] = self._by_first[probe.keys[0]] = probe
        tier.counts.probes += 1
        self._out.effects.append(
            effects.ProbeTier(
                ticket=ticket, tier=tier.name, namespace=probe.namespace, keys=joined(probe.keys)
            )
        )
        return probe

    def probed(self, got: TierProbed) -> TierProbe | None:
        """The answer is known from now on; None: nobody waits for it any more."""
        probe = self.under_way.pop(got.ticket, None)
        if probe is None:
            return None
        del self._by_first[probe.keys[0]]
        tier = probe.tier
        n_there = 0 if probe.is_void else max(0, min(got.n_there, len(probe.keys)))
        tier.index.add(probe.namespace, probe.keys[:n_there], probe.before)
        tier.index.shrink()
        if n_there:
            tier.counts.probe_hits += 1
        if got.why:
            tier.failed(got.why)
        elif n_there < len(probe.keys):
            self._note_absent(probe.keys[n_there], tier.settings.absent_s)
        return probe

    def _note_absent(self, key: bytes, for_s: float) -> None:
        absent = self._absent
        absent.pop(key, None)
        absent[key] = self._out.at_s + for_s
        if len(absent) > MOST_ABSENT:
            del absent[next(iter(absent))]

    # ---- what is not asked for -------------------------------------------------------------------

    def _is_not_asked(self, tier: StorageTier, namespace: str) -> bool:
        """Whether what was there before its last flush may be there still."""
        flush, lifetime_s = self._flushes.last(namespace), tier.settings.lifetime_s
        return flush is not None and (not lifetime_s or self._out.at_s - flush.at_s < lifetime_s)

    # ---- what ends -------------------------------------------------------------------------------

    def cut(self) -> list[TierProbe]:
        """The process is reaped: none of them is answered any more."""
        cut = list(self.under_way.values())
        self.under_way, self._by_first = {}, {}
        return cut

    def dues(self) -> list[float]:
        """When what is known of a store is forgotten next."""
        lifetimes = [tier.settings.lifetime_s for tier in self._tiers]
        return [self._forgotten_s + lifetime_s for lifetime_s in lifetimes if lifetime_s]

    def tick(self) -> list[StorageTier]:
        """End a process that answers none, and forget what may not be there any more; of which."""
        now_s = self._out.at_s
        for probe in self.under_way.values():
            silent_s = now_s - probe.since_s
            if silent_s >= probe.tier.settings.deadline_s:
                self._moves.restart(f"{probe.name} of tier {probe.tier.name}", silent_s)
                break
        forgotten: list[StorageTier] = []
        for tier in self._tiers:
            lifetime_s = tier.settings.lifetime_s
            # What is known was learned after the last time: none of it is older than that.
            if lifetime_s and now_s - self._forgotten_s >= lifetime_s:
                self._forgotten_s = now_s
                for namespace in tier.index.namespaces():
                    tier.index.forget_namespace(namespace)
                forgotten.append(tier)
        return forgotten
