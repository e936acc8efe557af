"""Demotion: pages are written to a tier before they leave the pool, so that eviction never waits.

Handoffs go first: while bytes of them move, what is written takes a share of its time and no more
(``PaceWrites``), the orders under way too. So nothing starves, and as soon as the oldest order is
late against its deadline (``LATE``) all of it goes on as fast as it can, until that is answered.

The next victims of the order of eviction are looked at, a few at a time, as far ahead as the pool
may need pages soon (``AHEAD``). What a policy wants of them and the tier has not is ordered to be
written; while it is read a lease of nobody's session keeps it, under a lock that is no use of it
(``QuietLocks``). A page that is evicted before its turn is lost to the tier, and counted.

Of a node the tier has all pages if it has the last: of a prompt the last goes first.

What must not live here: what comes back (``promotion``).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core import effects
from kvd.core.cache.eviction import path_of
from kvd.core.cache.lease import DEMOTION, Claim
from kvd.core.settings import Demotion
from kvd.core.tiers.moves import TierMove, joined
from kvd.types import ID_BYTES, NO_TOKENS, Pages, Tokens
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.quiet_locks import QuietLocks
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inputs import Demoted
    from kvd.core.kv_events.announcer import BlockAnnouncer
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.index import ObjectShare, TierIndex
    from kvd.core.tiers.moves import TierMoves
    from kvd.core.tiers.node_keys import KeysAtNodes
    from kvd.core.tiers.tier import StorageTier

AHEAD: Final = 4
"""One page in so many of the pool is free or written, or is being written."""

LOCKED: Final = 8
"""At most one page in so many of the pool is locked for being written."""

LATE: Final = 4
"""An order that has taken one part in so many of its deadline gives way to nobody."""

MOST_LOOKS: Final = 512
"""At nodes, in one turn; of which so many pages are hashed, or one node:"""
MOST_HASHED: Final = 1024

USED_TWICE: Final = 2
"""Hits of a node that somebody has found; whoever put it there was the first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeDemotion(TierMove):
    """Pages of one node that are being written; ``keys`` are all of the node as far as that goes.

    ``places``: which of them were ordered; ``start_tokens``: where in its prompt the node began
    then; ``share``: by what a store counts them.
    """

    __slots__ = ("places", "share", "start_tokens")

    verb: ClassVar[str] = "demotion"

    def __init__(
        self,
        tier: StorageTier,
        lease: LeaseRecord,
        namespace: str,
        before: bytes,
        keys: list[bytes],
        places: list[int],
    ) -> None:
        super().__init__(tier, lease, namespace, before, keys)
        self.places = places
        assert lease.anchor is not None
        assert lease.anchor.parent is not None
        self.start_tokens = lease.anchor.parent.end_tokens
        writes = tier.writes
        self.share = writes.ordered(namespace, len(places)) if writes is not None else None

    @property
    @override
    def n_objects(self) -> int:
        """How many were ordered."""
        return len(self.places)


@mypyc_attr(allow_interpreted_subclasses=True)
class WriteRoom:
    """How much of the nodes that are looked at may be written, of a tier or of a share of it.

    No more than half of what it holds, nor with all that is before it more than that: what is
    written last would push out the first, which would be written again, for ever.
    """

    __slots__ = ("fits", "room")

    def __init__(self, n_objects: int) -> None:
        self.fits = n_objects // 2 or 1
        self.room = n_objects

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be written."""
        return self.fits <= 0 or self.room <= 0

    def take(self, above: int, n_pages: int, own: int) -> int:
        """For a node of ``n_pages``: how many of its first pages fit.

        ``above`` and ``own``: pages of its path, and of itself, that nobody has counted yet.
        """
        self.room -= above
        within = min(self.fits, self.room)
        self.fits -= n_pages
        self.room -= own
        return within


@mypyc_attr(allow_interpreted_subclasses=True)
class WriteRooms:
    """The room of a whole tier, and that of each share of it that a look comes upon."""

    __slots__ = ("_by_share", "_counted", "_index", "whole")

    def __init__(self, index: TierIndex) -> None:
        self.whole = WriteRoom(index.capacity)
        self._by_share: dict[ObjectShare, WriteRoom] = {}
        self._counted: set[int] = set()
        self._index = index

    def take(self, node: RadixNode) -> int:
        """How many of its first pages may be written; at most 0: none."""
        above = _uncounted_pages(node.parent, self._counted)
        own = _uncounted_pages(node, self._counted)
        within = self.whole.take(above, node.n_pages, own)
        index = self._index
        if not index.has_quotas:
            return within
        share = index.share_of(node.namespace)
        room = self._by_share.get(share)
        if room is None:
            room = self._by_share[share] = WriteRoom(index.room_of(share))
        return min(within, room.take(above, node.n_pages, own))


@mypyc_attr(allow_interpreted_subclasses=True)
class Demoter:
    """What of the pool is written to one tier, and when."""

    def __init__(
        self,
        tier: StorageTier,
        leases: LeaseTable,
        keys: KeysAtNodes,
        quiet: QuietLocks,
        moves: TierMoves,
        out: Outbox,
    ) -> None:
        self.tier = tier
        self._leases = leases
        self._keys = keys
        self._quiet = quiet
        self._moves = moves
        self._out = out
        self._seen = (-1, -1, -1)
        """What the pool and the tier were like when there was nothing to do."""
        self._half: tuple[int, list[bytes]] = (0, [])
        """A node that takes several orders, and its keys."""

    def wants(self, node: RadixNode) -> bool:
        """Whether the policy would have it written."""
        match self.tier.settings.demotion:
            case Demotion.ALWAYS:
                return True
            case Demotion.SECOND_USE:
                return node.hits >= USED_TWICE
            case Demotion.PRIORITY:
                return node.priority > 0
            case Demotion.NEVER:
                return False

    @property
    def writes_at_stop(self) -> bool:
        """Whether what is cached is written when the pool ends."""
        settings = self.tier.settings
        return settings.stop_s > 0 and settings.demotion is not Demotion.NEVER

    def evicted(self, nodes: Iterable[tuple[RadixNode, bytes, str]]) -> None:
        """These have left the pool, with their keys where these were known: what is lost by it."""
        index, in_tier = self.tier.index, self._leases.evictor.evictions.in_tier
        counts, writes = self.tier.counts, self.tier.writes
        for node, key, namespace in nodes:
            if key and index.has(namespace, key):
                in_tier.setdefault(node.id, self.tier.name)
                self.tier.note_left(node.id, key)
            elif self.wants(node):
                n_pages = len(node.pages) // ID_BYTES
                if writes is not None and writes.kept_out(namespace, n_pages):
                    counts.over_ceiling += n_pages
                else:
                    counts.evicted_unwritten += n_pages

    # ---- what is ordered ---------------------------------------------------------------------

    def look(self) -> None:
        """See whether what was written to a store is old enough that there is more room."""
        if self.tier.writes is not None and self.tier.writes.look():
            self._seen = (-1, -1, -1)

    def dues(self) -> list[float]:
        """When a turn has something to do, if nothing else happens; in the past while one has."""
        tier, writes = self.tier, self.tier.writes
        if tier.settings.demotion is Demotion.NEVER:
            return []
        dues = []
        if writes is not None:
            counted = [share for share in writes.shares if share.slots]
            dues = [self._out.at_s + writes.room_in_s(share) for share in counted]
        # Without a process it is the next one's word that has it go on.
        if self._seen != self._now() and tier.generation:
            dues.append(max(tier.health.away_until_s, tier.writing.away_until_s))
        return dues

    def _now(self) -> tuple[int, int, int]:
        """What a turn that has found nothing to write need not look at twice."""
        leases = self._leases
        return leases.growth, leases.releases, leases.evictor.evicted_pages

    def turn(self) -> None:
        """Order what is to be written now."""
        tier, leases = self.tier, self._leases
        if tier.settings.demotion is Demotion.NEVER or not tier.is_written:
            return
        now = self._now()
        if now == self._seen:
            return
        ahead = leases.capacity_pages // AHEAD - leases.pool.free_pages
        left = self.room()
        if left <= 0:
            return
        chosen, is_all = self._choose(ahead, left)
        for node, places in chosen:
            if self.can_lock(node):
                self.begin(node, places)
        if is_all and not chosen and not self._moves.n_objects(tier, NodeDemotion):
            self._seen = now

    def can_lock(self, node: RadixNode) -> bool:
        """Whether what others are promised stays evictable then."""
        leases = self._leases
        return not leases.promises.n_pages or _unlocked_pages(node) <= leases.headroom_pages

    def room(self) -> int:
        """How many more pages may be under way now."""
        tier, n_pages = self.tier, self._leases.capacity_pages
        most = min(tier.most_moving, n_pages // LOCKED or 1, tier.index.capacity)
        return most - self._moves.n_objects(tier, NodeDemotion)

    def under_way(self) -> Iterator[tuple[int, int]]:
        """Of each node that is being written its number, and how far."""
        for move in self._writing():
            assert move.lease.anchor is not None
            yield move.lease.anchor.id, len(move.keys)

    def keys_on_their_way(self) -> set[bytes]:
        """Of all pages that are being written."""
        return {move.keys[place] for move in self._writing() for place in move.places}

    def _choose(self, ahead: int, left: int) -> tuple[list[tuple[RadixNode, list[int]]], bool]:
        """The next victims that lack something, up to ``left`` pages of it, and whether all were.

        Nothing is locked before the last was looked at: that would change the order.
        """
        chosen: list[tuple[RadixNode, list[int]]] = []
        hashed = 0
        rooms = WriteRooms(self.tier.index)
        for node in islice(self._leases.tree.order.ahead(), MOST_LOOKS):
            if ahead <= 0 or rooms.whole.is_full:
                return chosen, True
            if left <= 0 or hashed >= MOST_HASHED:
                return chosen, False
            if node is None or (node.lock_ref and node not in self._quiet.by_node):
                continue
            ahead -= node.n_pages
            if not self.wants(node):
                continue
            within = rooms.take(node)
            if node.lock_ref or within <= 0:
                continue  # it is being written, or what is before it fills the tier
            for step in self._before(node):
                if all(step is not before for before, _ in chosen):
                    hashed += 0 if self._keys.is_known(step) else step.n_pages
                    left -= self._take(chosen, step, step.n_pages, left)
            hashed += 0 if self._keys.is_known(node) else node.n_pages
            left -= self._take(chosen, node, min(within, node.n_pages), left)
        return chosen, True

    def _take(
        self, chosen: list[tuple[RadixNode, list[int]]], node: RadixNode, within: int, left: int
    ) -> int:
        """Choose up to ``left`` of its first pages; how many."""
        places = self.lacking(node, range(within), left)
        if places:
            chosen.append((node, places))
        return len(places)

    def _before(self, node: RadixNode) -> list[RadixNode]:
        """What is written before it: under a ceiling all that leads there, the first page first.

        Else what is found by nobody would take the room of what it is found by.
        """
        writes = self.tier.writes
        if writes is None or node.parent is None or not writes.is_bounded(node.namespace):
            return []
        moving = {node_id for node_id, _ in self.under_way()}
        return [step for step in reversed([*path_of(node.parent)]) if step.id not in moving]

    def lacking(self, node: RadixNode, places: range, most: int) -> list[int]:
        """The first ``most`` of its pages at ``places`` that the tier has not."""
        namespace, index, writes = node.namespace, self.tier.index, self.tier.writes
        if writes is not None and writes.is_full(namespace):
            return []
        if index.has(namespace, self._keys.end_of(node)):
            return []
        keys = self.keys_of(node)
        lacking = (place for place in places if not index.has(namespace, keys[place]))
        return list(islice(lacking, most))

    def age(self, node: RadixNode, places: Sequence[int], behind: int) -> None:
        """These of its pages lie in the tier, or are on their way: a stop has come to them."""
        if self.tier.writes is None:
            keys = self.keys_of(node)
            aged = joined([keys[place] for place in places])
            self._out.effects.append(
                effects.AgeObjects(
                    tier=self.tier.name,
                    namespace=self.tier.stored_as(node.namespace),
                    keys=aged,
                    behind=behind,
                )
            )

    def touch(self, node: RadixNode) -> None:
        """What lies in the tier up to its end is used now."""
        self.tier.index.touch(node.namespace, self._keys.end_of(node))

    def keys_of(self, node: RadixNode) -> list[bytes]:
        """Of all its pages."""
        number, keys = self._half
        # By its end too: the upper half of a split has another number, the lower one fewer pages.
        if number == node.id and len(keys) == node.n_pages:
            return keys
        keys = self._keys.of(node)
        self._half = (node.id, keys)
        return keys

    def begin(self, node: RadixNode, places: list[int], when: str = "", behind: int = 0) -> int:
        """Order these pages of it, or the first of them that a ceiling leaves room for; how many.

        ``when``, in words, is behind what their lease is for.
        """
        leases, tier = self._leases, self.tier
        assert node.parent is not None
        namespace, before = node.namespace, self._keys.end_of(node.parent)
        keys = self.keys_of(node)
        if tier.writes is not None:
            places = places[: tier.writes.allowed(namespace, [keys[at] for at in places])]
            if not places:
                return 0
        keys = keys[: places[-1] + 1]
        claim = Claim(
            session=0,
            call=0,
            reason=f"demotion to {tier.name}{when}",
            room=0,
            namespace=namespace,
            # It is no prompt's: it counts as nobody's hit.
            tokens=NO_TOKENS,
            reserve_tokens=0,
            priority=0,
            cache=False,
            holder=DEMOTION,
        )
        self._quiet.lock(node)
        lease = leases.grants.add_lease(claim, node, leases.tree.path_pages(node), 0)
        move = NodeDemotion(tier, lease, namespace, before, keys, places)
        # Before the order, so that the tier has room for it.
        needed_by = None if tier.writes is not None else namespace
        for name, gone in tier.index.reserve(len(places), needed_by, self._out.at_s).items():
            tier.counts.dropped += len(gone)
            self._moves.drop(tier, name, gone)
        ids = node.pages
        pages = b"".join([ids[at * ID_BYTES : (at + 1) * ID_BYTES] for at in places])
        self._out.effects.append(
            effects.Demote(
                ticket=self._moves.begin(move),
                tier=tier.name,
                namespace=tier.stored_as(namespace),
                keys=joined([keys[at] for at in places]),
                pages=Pages(pages),
                behind=behind,
            )
        )
        return len(places)

    # ---- beside handoffs ---------------------------------------------------------------------

    def give_way(self) -> None:
        """Bytes of handoffs move now: what is being written goes slowly, unless it is late."""
        tier, now_s = self.tier, self._out.at_s
        oldest = next(self._writing(), None)
        is_late = oldest is not None and (now_s - oldest.since_s >= tier.settings.deadline_s / LATE)
        if is_late:
            self.go_on()
        elif oldest is not None and tier.gives_way_since_s is None:
            share = tier.settings.share_beside_handoffs
            if share < 1:
                tier.gives_way_since_s = now_s
                self._out.effects.append(effects.PaceWrites(tier.name, share))

    def go_on(self) -> None:
        """What is being written goes as fast as it can."""
        tier = self.tier
        if tier.gives_way_since_s is not None:
            tier.end_way()
            self._out.effects.append(effects.PaceWrites(tier.name, 1.0))

    def _writing(self) -> Iterator[NodeDemotion]:
        """The orders under way, the oldest first."""
        for move in self._moves.under_way.values():
            if move.tier is self.tier and isinstance(move, NodeDemotion):
                yield move

    # ---- how it went -------------------------------------------------------------------------

    def demoted(self, move: NodeDemotion, got: Demoted) -> None:
        """The pages are read no more."""
        tier, index = self.tier, self.tier.index
        index.release(move.n_objects)
        written = {move.places[at] for at in got.written if 0 <= at < len(move.places)}
        n_there = 0 if move.is_void else self._n_there(move, written)
        index.add(move.namespace, move.keys[:n_there], move.before)
        if tier.announcer is not None and n_there:
            self._tell(tier.announcer, move, n_there)
        # Behind one that is not there nobody looks for it. What is void went with its namespace.
        if not move.is_void:
            vain = [move.keys[place] for place in sorted(written) if place >= n_there]
            self._moves.drop(tier, move.namespace, vain)
        if tier.writes is not None and move.share is not None:
            there = [move.keys[place] for place in sorted(written)]
            tier.writes.written(move.share, move.n_objects, there)
            if move.is_void:
                tier.writes.forget(there)
        tier.counts.written += len(written)
        tier.counts.unwritten += move.n_objects - len(written)
        took_s = self._out.at_s - move.since_s
        tier.measure_written(got.n_bytes, took_s)
        tier.was_written(len(written), got.why or "nothing was written")
        self._out.emit(
            events.PagesDemoted(
                tier=tier.name,
                lease=move.lease.id,
                pages=len(written),
                lost=move.n_objects - len(written),
                n_bytes=got.n_bytes,
                took_s=took_s,
                why=got.why,
            )
        )
        self._end(move, "demoted" if written else "not-written")
        self._seen = (-1, -1, -1)

    def _tell(self, announcer: BlockAnnouncer, move: NodeDemotion, n_there: int) -> None:
        """Routers are told that the first of them lie there."""
        leases, anchor = self._leases, move.lease.anchor
        assert anchor is not None
        end_tokens = move.start_tokens + n_there * leases.tree.match_page_tokens
        tokens = Tokens(leases.tree.path_tokens(anchor)[: end_tokens * ID_BYTES])
        announcer.lie_in_tier(move.namespace, tokens, move.keys[:n_there], move.before)

    def _n_there(self, move: NodeDemotion, written: set[int]) -> int:
        """How many of the node's first pages are in the tier now."""
        index = self.tier.index
        for place, key in enumerate(move.keys):
            # One that was there when this was ordered may have gone for the bound.
            if place not in written and not index.has(move.namespace, key):
                return place
        return len(move.keys)

    def cut(self, move: NodeDemotion) -> None:
        """Its process is reaped: what it wrote is found when the next one looks."""
        if self.tier.writes is not None and move.share is not None:
            self.tier.writes.cut(move.share, move.n_objects)
        self._end(move, "storage-gone")
        self._seen = (-1, -1, -1)

    def _end(self, move: NodeDemotion, cause: str) -> None:
        lease = move.lease
        anchor, lease.anchor, lease.holders = lease.anchor, None, set()
        assert anchor is not None
        self._quiet.unlock(anchor)
        self._leases.ends.forget(lease, cause, 0, anchor.id)


def _uncounted_pages(node: RadixNode | None, counted: set[int]) -> int:
    """Pages of its path that are not ``counted`` yet, and are from now on."""
    n_pages = 0
    while node is not None and node.id not in counted:
        counted.add(node.id)
        n_pages += node.n_pages
        node = node.parent
    return n_pages


def _unlocked_pages(node: RadixNode) -> int:
    """Pages of its path that nobody locks."""
    n_pages = 0
    step: RadixNode | None = node
    while step is not None and not step.lock_ref:
        n_pages += step.n_pages
        step = step.parent
    return n_pages
