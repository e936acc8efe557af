"""Promotion: pages that lie in a tier come back into the pool before the answer that needs them.

What is asked for is probed in the tree first; where a tier has the pages that follow, a lease of
nobody's session takes room for them, and they are read into it. Whoever asked waits in the side
queue, under the promotion's name, and for a bounded time; who asks for the same meanwhile waits
for the same promotion. What has come joins the tree before that lease ends, and whoever waited is
asked again in between, so it is theirs::

    a claim       probed: 3 pages in the pool, 5 more in the tier
    promotion     a lease: locks 3, holds 5  -- Promote -->  storage process
    the claim     waits for the promotion                         |
                                             <-- Promoted --------+
    promotion     5 pages join the tree; the claim locks 8; the lease ends

Where no index knows the next pages and others may have written them (``probes``), the claim waits
for that answer first, and then as above.

A long prompt comes in several, each as large as may be under way. What is bad, short or not there
is never used: the pages before the first such one count, and it leaves the index with all behind
it. Until the order is over its pages are nobody else's, whoever has stopped waiting.

What must not live here: what is written to a tier (``demotion``), who waits in which order
(``leases.admission``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.cache.lease import PROMOTION, Claim, Shortage
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.tiers.keys import next_key
from kvd.core.tiers.moves import TierMove, joined
from kvd.core.tiers.probes import Probes, TierProbe
from kvd.core.tiers.removed import BAD, side_of
from kvd.errors import Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Tokens
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.inputs import Promoted
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.flushes import Flushes
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.moves import TierMoves
    from kvd.core.tiers.node_keys import KeysAtNodes
    from kvd.core.tiers.tier import StorageTier


UNTOLD = (0, 0, 0.0)
"""What a lease is told of tiers that do not matter to it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPages:
    """What a tier has of a prompt, behind what is in the pool."""

    __slots__ = ("before", "have_tokens", "keys", "tier")

    def __init__(
        self, tier: StorageTier, have_tokens: int, before: bytes, keys: list[bytes]
    ) -> None:
        self.tier = tier
        self.have_tokens = have_tokens
        self.before = before
        self.keys = keys


@mypyc_attr(allow_interpreted_subclasses=True)
class PagePromotion(TierMove):
    """Objects that are being read, each over one page of its lease's own, in their order."""

    __slots__ = ()

    verb: ClassVar[str] = "promotion"

    @property
    def name(self) -> str:
        """What a waiter waits for; no peer has a name with a blank."""
        return f"{self.verb} {self.ticket}"


@mypyc_attr(allow_interpreted_subclasses=True)
class TierWait:
    """A request that waits for pages of its prompt, and what came of that so far."""

    __slots__ = (
        "claim",
        "have_tokens",
        "probed_until_s",
        "promoted_tokens",
        "promotion",
        "tier",
        "until_s",
    )

    def __init__(
        self,
        claim: Claim,
        have_tokens: int,
        promotion: PagePromotion | TierProbe,
        until_s: float,
    ) -> None:
        self.claim = claim
        self.have_tokens = have_tokens
        """What was in the pool when it began to wait."""
        self.promotion: PagePromotion | TierProbe | None = promotion
        """Or the answer what could be promoted. None: it waits for none any more."""
        self.tier = promotion.tier
        """Of which it waited last."""
        self.until_s = until_s
        self.probed_until_s = until_s
        """When it waits for no answer any more what could be promoted."""
        self.promoted_tokens = 0
        """What came of the promotions that it waited for, wanted by it or not."""

    def awaits(self) -> tuple[str, ...]:
        """The name of the promotion, for the side queue."""
        return () if self.promotion is None else (self.promotion.name,)

    def told(self, prefix_tokens: int) -> int:
        """How much of the prefix that a request got in the end came from a tier for it."""
        return min(self.promoted_tokens, max(0, prefix_tokens - self.have_tokens))

    def blocked(self) -> str | None:
        """The same in words."""
        found = self.promotion
        if found is None:
            return None
        if isinstance(found, TierProbe):
            return found.words
        return f"{found.n_objects} pages to be read from tier {found.tier.name}"


@mypyc_attr(allow_interpreted_subclasses=True)
class Promotions:
    """What comes back from the tiers, and who waits for it."""

    def __init__(
        self,
        tiers: tuple[StorageTier, ...],
        leases: LeaseTable,
        admission: Admission,
        keys: KeysAtNodes,
        moves: TierMoves,
        flushes: Flushes,
        out: Outbox,
    ) -> None:
        self._tiers = tiers
        self._leases = leases
        self._admission = admission
        self._keys = keys
        self._moves = moves
        self._out = out
        self._page_bytes = leases.page_size * ID_BYTES
        self.probes = Probes(tiers, self._page_bytes, moves, flushes, out)
        self._coming: dict[bytes, PagePromotion] = {}
        """By key, what is being read."""
        self._hints: dict[int, Claim] = {}
        """By ticket, the prompt that goes on behind what is read, and that nobody waits for."""

    # ---- what is asked -----------------------------------------------------------------------

    def look(
        self, tokens: Tokens, namespace: str, cached_tokens: int | None = None
    ) -> TierPages | None:
        """What of a prompt lies in a tier, behind what is in the pool; nothing is changed.

        ``cached_tokens``: so much of it is known to be in the pool; None: it is probed.
        """
        serving = self._serving(namespace)
        if not serving:
            return None
        # Before any key is worked out: most prompts that go on are here as a whole.
        if cached_tokens is None:
            cached_tokens = self._leases.tree.probe(tokens, namespace)
        if len(tokens) - cached_tokens * ID_BYTES < self._page_bytes:
            return None
        have_tokens, before = self._keys.behind(tokens, namespace)
        return self._known(serving, tokens, namespace, have_tokens, before)

    def _serving(self, namespace: str) -> list[StorageTier]:
        """Those that may be known to have some of it."""
        return [
            tier for tier in self._tiers if tier.is_serving and tier.index.objects_of(namespace)
        ]

    def _known(
        self,
        serving: list[StorageTier],
        tokens: Tokens,
        namespace: str,
        have_tokens: int,
        before: bytes,
    ) -> TierPages | None:
        """What the first of these that has the next page is known to have behind ``before``."""
        page_bytes = self._page_bytes
        found: list[bytes] = []
        first, last, key = have_tokens * ID_BYTES, len(tokens) - page_bytes, before
        for tier in serving:
            for at in range(first, last + 1, page_bytes):
                key = next_key(key, tokens[at : at + page_bytes])
                if not tier.index.has(namespace, key):
                    break
                found.append(key)
            if found:
                return TierPages(tier, have_tokens, before, found)
            key = before
        return None

    def wait_for(self, claim: Claim, deadline_s: float) -> TierWait | None:
        """Have what a tier has of the claim's prompt read, or wait for who does; None: go on."""
        # Pages that an engine names are not looked for, and a lease without a cache shares none.
        if claim.lent is not None or not claim.cache:
            return None
        found, have_tokens = self._find(claim)
        if isinstance(found, TierProbe):
            return self._wait_for_answer(claim, found, have_tokens, deadline_s)
        return None if found is None else self.wait_on(claim, found, deadline_s)

    def wait_in_time(self, claim: Claim, deadline_s: float) -> TierWait | None:
        """The same before another node is asked: for what is known, and expected, to be there.

        Not for what takes longer than the wait, as measured: it may come sooner from elsewhere.
        """
        if claim.lent is not None or not claim.cache:
            return None
        found = self.look(claim.tokens, claim.namespace)
        if found is None:
            return None
        most_ms = 1000.0 * (self._until_s(found.tier, deadline_s) - self._out.at_s)
        if found.tier.ms_for(len(found.keys)) > most_ms:
            return None
        return self.wait_on(claim, found, deadline_s)

    def wait_on(self, claim: Claim, found: TierPages, deadline_s: float) -> TierWait | None:
        """Have what was found of the claim's prompt read, or wait for who does; None: go on."""
        until_s = self._until_s(found.tier, deadline_s)
        if until_s <= self._out.at_s:
            return None
        promotion = self._promotion_of(claim, found)
        if promotion is None:
            return None
        promotion.tier.counts.waits += 1
        return TierWait(claim, found.have_tokens, promotion, until_s)

    def _until_s(self, tier: StorageTier, deadline_s: float) -> float:
        """Half of the time that a request has is left for the room that it waits for then."""
        now_s = self._out.at_s
        return min(now_s + tier.settings.wait_s, now_s + (deadline_s - now_s) / 2)

    def end_tokens(self, found: TierPages) -> int:
        """How far into the prompt that goes."""
        return found.have_tokens + len(found.keys) * self._leases.page_size

    def prefetch(self, session: int, call: int, tokens: Tokens, namespace: str) -> None:
        """Begin to read what a tier has of a prompt that will be asked for; nobody waits for it.

        A long one comes in several, as for who waits; where one of them finds no room, or comes to
        nothing, the rest is read when it is asked for.
        """
        self._read_ahead(
            Claim(
                session=session,
                call=call,
                reason="prefetch",
                room=0,
                namespace=namespace,
                tokens=tokens,
                reserve_tokens=0,
                priority=0,
                cache=True,
            )
        )

    def _read_ahead(self, claim: Claim) -> None:
        found = self.look(claim.tokens, claim.namespace)
        if found is None:
            return
        promotion = self._promotion_of(claim, found)
        if promotion is not None:
            self._hints[promotion.ticket] = claim

    def _wait_for_answer(
        self, claim: Claim, probe: TierProbe, have_tokens: int, deadline_s: float
    ) -> TierWait | None:
        """Wait for what a tier that is shared says of the claim's prompt; None: go on."""
        now_s, until_s = self._out.at_s, self._until_s(probe.tier, deadline_s)
        wait = TierWait(claim, have_tokens, probe, until_s)
        wait.probed_until_s = min(until_s, now_s + probe.tier.settings.probe_s)
        return wait if wait.probed_until_s > now_s else None

    def _find(self, claim: Claim) -> tuple[TierPages | TierProbe | None, int]:
        """The next pages of its prompt, or the question for them; how many tokens of it are here.

        What is in the pool is looked up once for both.
        """
        tokens, namespace = claim.tokens, claim.namespace
        serving = self._serving(namespace)
        if not serving and not self.probes.can_ask(len(tokens)):
            return None, 0
        rest_bytes = len(tokens) - self._leases.tree.probe(tokens, namespace) * ID_BYTES
        can_ask = self.probes.can_ask(rest_bytes)
        if rest_bytes < self._page_bytes or not (serving or can_ask):
            return None, 0
        have_tokens, before = self._keys.behind(tokens, namespace)
        known = self._known(serving, tokens, namespace, have_tokens, before)
        if known is not None or not can_ask:
            return known, have_tokens
        asked = self.probes.want(tokens, namespace, have_tokens * ID_BYTES, before)
        return asked, have_tokens

    def _promotion_of(self, claim: Claim, found: TierPages) -> PagePromotion | None:
        """The one that reads the next page that is wanted, begun if there is none."""
        # Used now, all of it: what is wanted is not the next to be dropped for the bound.
        found.tier.index.add(claim.namespace, found.keys, found.before)
        coming = self._coming.get(found.keys[0])
        if coming is not None:
            return coming
        # Whoever waits for memory was here first.
        if self._admission.line:
            found.tier.counts.no_room += 1
            return None
        return self._begin(claim, found)

    def _begin(self, claim: Claim, found: TierPages) -> PagePromotion | None:
        tier = found.tier
        left = tier.most_moving - self._moves.n_objects(tier, PagePromotion)
        keys = found.keys[:left]
        lease = self._open(claim, found, len(keys)) if keys else None
        # So much of it as there is room for, asked for once more.
        if isinstance(lease, Shortage):
            keys = keys[: lease.obtainable_pages]
            lease = self._open(claim, found, len(keys)) if keys else None
        if not isinstance(lease, LeaseRecord):
            tier.counts.no_room += 1
            return None
        move = PagePromotion(tier, lease, claim.namespace, found.before, keys)
        ticket = self._moves.begin(move)
        for key in keys:
            self._coming[key] = move
        self._out.effects.append(
            effects.Promote(
                ticket=ticket,
                tier=tier.name,
                namespace=tier.stored_as(claim.namespace),
                keys=joined(keys),
                pages=lease.held,
            )
        )
        return move

    def _open(self, claim: Claim, found: TierPages, n_pages: int) -> LeaseRecord | Shortage:
        end_tokens = found.have_tokens + n_pages * self._leases.page_size
        return self._leases.grants.open_lease(
            Claim(
                session=0,
                call=0,
                reason=f"promotion from {found.tier.name}",
                room=0,
                namespace=claim.namespace,
                tokens=Tokens(claim.tokens[: end_tokens * ID_BYTES]),
                reserve_tokens=0,
                priority=claim.priority,
                cache=True,
                holder=PROMOTION,
            )
        )

    def told(self, tokens: Tokens, namespace: str, prefix_tokens: int) -> tuple[int, float]:
        """Tokens behind a prefix that lie in a tier and were not read, and how many ms that is."""
        found = self.look(tokens, namespace, prefix_tokens)
        if found is None:
            return 0, 0.0
        return max(0, self.end_tokens(found) - prefix_tokens), found.tier.ms_for(len(found.keys))

    def told_of(self, lease: LeaseRecord, waited: TierWait | None) -> tuple[int, int, float]:
        """What a new lease is told: of its prefix what was promoted for it; then as ``told``."""
        if not self._tiers:
            return UNTOLD
        promoted = 0 if waited is None else waited.told(lease.prefix_tokens)
        n_tokens, ms = self.told(lease.tokens, lease.namespace, lease.prefix_tokens)
        return promoted, n_tokens, ms

    # ---- how it went -------------------------------------------------------------------------

    def promoted(self, move: PagePromotion, got: Promoted) -> None:
        """The pages are written no more: what is good is cached, and whoever waits goes on."""
        tier, index = move.tier, move.tier.index
        n_good = min([at for at in got.bad if 0 <= at < len(move.keys)], default=len(move.keys))
        # What is void went with its namespace; by these keys others may have come since.
        gone = [] if move.is_void else index.forget(move.namespace, move.keys[n_good:])
        # Where none came it may be the store that is silent: what it has may be as good as ever.
        if tier.writes is not None and len(got.bad) < len(move.keys):
            tier.writes.forget([move.keys[at] for at in got.bad if 0 <= at < len(move.keys)])
        self._moves.drop(tier, move.namespace, gone)
        if tier.writes is None:
            side = side_of(move.namespace, index.share_of(move.namespace))
            index.removed.went(BAD, gone, side, self._out.at_s)
        tier.counts.bad += len(got.bad)
        took_s = self._out.at_s - move.since_s
        tier.measure_read(got.n_bytes, took_s)
        tier.was_read(n_good, got.why or "nothing was read")
        if tier.announcer is not None and not move.is_void and n_good:
            # It may lie there since before this daemon began: only now its tokens are known. Or it
            # has gone for the bound, while it was read.
            keys = move.keys[: index.leading(move.namespace, move.keys[:n_good])]
            end_tokens = move.lease.prefix_tokens + len(keys) * self._leases.page_size
            tokens = Tokens(move.lease.tokens[: end_tokens * ID_BYTES])
            tier.announcer.lie_in_tier(move.namespace, tokens, keys, move.before)
        n_cached = 0 if move.is_void else self._keep(move.lease, n_good)
        tier.counts.read += n_cached
        self._out.emit(
            events.PagesPromoted(
                tier=tier.name,
                lease=move.lease.id,
                pages=n_cached,
                bad=len(move.keys) - n_good,
                n_bytes=got.n_bytes,
                took_s=took_s,
                why=got.why,
            )
        )
        self._end(move, n_cached, "promoted" if n_cached else "not-promoted")

    def probed(self, probe: TierProbe) -> None:
        """It is known what is there, or will not be: whoever waits has it read, or goes on."""
        for wait in self._waiting_for(probe.name):
            wait.promotion = None
            found = self.look(wait.claim.tokens, wait.claim.namespace)
            if found is None or wait.until_s <= self._out.at_s:
                continue
            wait.promotion, wait.tier = self._promotion_of(wait.claim, found), found.tier
            wait.tier.counts.waits += wait.promotion is not None
        self._admission.changed(probe.name)

    def _waiting_for(self, name: str) -> list[TierWait]:
        waiters = self._admission.side_queue.by_name.get(name, {}).values()
        return [waiter.tier for waiter in waiters if isinstance(waiter.tier, TierWait)]

    def cut(self, move: PagePromotion) -> None:
        """Its process is reaped: nothing writes its pages, and nobody knows what is in them."""
        self._end(move, 0, "storage-gone")

    def _keep(self, lease: LeaseRecord, n_good: int) -> int:
        """The first pages of its own join the tree; how many did."""
        # One that was found broken shares nothing any more.
        if not n_good or lease.lost is not None:
            return 0
        before = lease.owned
        upto_tokens = lease.prefix_tokens + n_good * self._leases.page_size
        said = self._leases.commits.commit(lease, NO_TOKENS, upto_tokens)
        return 0 if isinstance(said, Refusal) else lease.owned - before

    def _end(self, move: PagePromotion, n_cached: int, cause: str) -> None:
        for key in move.keys:
            if self._coming.get(key) is move:
                del self._coming[key]
        for wait in self._waiting_for(move.name):
            self._go_on(wait, n_cached)
        # Before the lease ends: what has come is locked by it, and now by them.
        self._admission.changed(move.name)
        self._leases.holders.release(move.lease, PROMOTION, cause)
        hint = self._hints.pop(move.ticket, None)
        if hint is not None and n_cached:
            self._read_ahead(hint)

    def _go_on(self, wait: TierWait, n_cached: int) -> None:
        """Wait for what follows, if there is more of it and time."""
        tier = wait.tier
        if n_cached and not wait.promoted_tokens:
            tier.counts.hits += 1
        wait.promoted_tokens += n_cached * self._leases.page_size
        wait.promotion = None
        if not n_cached or wait.until_s <= self._out.at_s:
            return
        found, _ = self._find(wait.claim)
        if isinstance(found, TierProbe):
            wait.promotion, wait.tier = found, found.tier
            wait.probed_until_s = min(wait.until_s, self._out.at_s + found.tier.settings.probe_s)
        elif found is not None:
            wait.promotion, wait.tier = self._promotion_of(wait.claim, found), found.tier

    def tick(self) -> None:
        """Whoever has waited long enough goes on with what is in the pool."""
        now_s = self._out.at_s
        for move in list(self._moves.under_way.values()):
            if not isinstance(move, PagePromotion):
                continue
            late = [wait for wait in self._waiting_for(move.name) if wait.until_s <= now_s]
            self._go_without(move.name, late)
        for probe in list(self.probes.under_way.values()):
            waits = self._waiting_for(probe.name)
            self._go_without(probe.name, [wait for wait in waits if wait.probed_until_s <= now_s])

    def _go_without(self, name: str, late: list[TierWait]) -> None:
        for wait in late:
            wait.promotion = None
            wait.tier.counts.late += 1
        if late:
            self._admission.changed(name)
