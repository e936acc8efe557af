"""All tiers of a node: what the storage process says, what a flush takes, what the tree lets go.

A node without tiers has this too, with nothing in it: then nothing here costs a step anything.

A namespace that was flushed must not come back from a disk, whatever becomes of a process. So what
is written since bears the stamp of the flush (``leases.flushes``), and what bears another one, or
is of an epoch that is over, is *of before*: it is not found, and ordered away, in the step of the
flush and wherever a storage process meets it. What is under way of it is void.

What must not live here: what one order is (``demotion``, ``promotion``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.cache.namespaces import NO_NAMESPACE, keys_meant
from kvd.core.cache.quiet_locks import QuietLocks
from kvd.core.settings import CacheMode
from kvd.core.tiers.at_stop import StopDemotion, hottest_first
from kvd.core.tiers.demotion import Demoter, NodeDemotion
from kvd.core.tiers.keys import each_key, next_key
from kvd.core.tiers.moves import TierMoves
from kvd.core.tiers.node_keys import KeysAtNodes
from kvd.core.tiers.pins import TierPins
from kvd.core.tiers.promotion import PagePromotion, Promotions
from kvd.core.tiers.removed import BEYOND, EPOCH, FLUSH, FOREIGN, MissedObjects, Removal, side_of
from kvd.core.tiers.tier import StorageEnding, StorageTier, parted
from kvd.types import ID_BYTES
from kvd.wire import events
from kvd.wire.cache_events import CacheThrashing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kvd.core.cache.lease import Claim
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inputs import Demoted, Promoted, StorageGone, TierFound, TierProbed, TierReady
    from kvd.core.kv_events.announcer import BlockAnnouncer
    from kvd.core.layout.quota import Quota
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.epochs import Epochs
    from kvd.core.leases.flushes import Flushes
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings

MOST_ASKED: Final = 1024
"""Pages of a prompt that are looked for among those that were removed: a millisecond."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Tiers:
    """The tiers of a pool, the nearest first, and what moves to and from them."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        epochs: Epochs,
        flushes: Flushes,
        out: Outbox,
        announcer: BlockAnnouncer | None = None,
    ) -> None:
        """``announcer``: who tells routers what lies in tiers of this node alone."""
        # What lies beside the first component has pages of its own at the nodes, which no object
        # has; and without a tree nothing would ever be found.
        is_fit = not leases.components.each and settings.cache_mode is CacheMode.RADIX
        ending = StorageEnding()
        self.moves = TierMoves(ending, out)
        self.each = tuple(
            [
                StorageTier(tier, flushes, ending, out, announcer)
                for tier in settings.tiers
                if is_fit
            ]
        )
        self.keys = KeysAtNodes(settings.spec, leases.tree)
        self.quiet = QuietLocks(leases.tree)
        self.demoters = tuple(
            [Demoter(tier, leases, self.keys, self.quiet, self.moves, out) for tier in self.each]
        )
        self.promotions = Promotions(
            self.each, leases, admission, self.keys, self.moves, flushes, out
        )
        self.pins = TierPins(self.demoters, self.promotions, self.keys, out)
        self._leases = leases
        self._epochs = epochs
        self._flushes = flushes
        self._out = out
        self._is_flushing = False
        self.at_stop: tuple[StopDemotion, ...] = ()
        """What is still written when the node has left, and its pool ends with it."""
        if self.each:
            leases.tree.components.append(self)
            leases.grants.below = self

    def named(self, name: str) -> StorageTier | None:
        """The tier of that name."""
        return next((tier for tier in self.each if tier.name == name), None)

    def set_quotas(self, of_disk: tuple[Quota, ...], of_store: tuple[Quota, ...]) -> None:
        """These hold from now on; nothing goes for it alone."""
        for tier in self.each:
            if tier.writes is not None:
                tier.writes.share_out(of_store)
            elif of_disk != tier.index.quotas:
                tier.index.share_out(of_disk)
                tier.shared_out_s = self._out.at_s

    # ---- told by the tree --------------------------------------------------------------------

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Nothing: the lower half ends where the whole did, and so does its key."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """They have left the pool."""
        left = [(node, self.keys.forget(node), node.namespace) for node in nodes]
        if not self._is_flushing:
            for demoter in self.demoters:
                demoter.evicted(left)

    # ---- told by the leases ------------------------------------------------------------------

    def missed(self, claim: Claim, anchor: RadixNode) -> None:
        """An engine's prompt goes on behind ``anchor``, and nothing of that is in the pool."""
        tokens, start = claim.tokens, anchor.end_tokens * ID_BYTES
        page = tokens[start : start + self._leases.tree.match_page_tokens * ID_BYTES]
        # There is more of it, which this lease may not take.
        if claim.lent is not None or page in anchor.children:
            return
        for tier in self.each:
            index = tier.index
            side = side_of(claim.namespace, index.share_of(claim.namespace))
            if tier.writes is None and index.removed.has_hurt(side):
                self._missed_in(tier, claim, anchor)

    def _missed_in(self, tier: StorageTier, claim: Claim, anchor: RadixNode) -> None:
        """The request is hurt by what of it was removed from that tier."""
        page_size, removed = self._leases.tree.match_page_tokens, tier.index.removed
        start, found = self._asked_in(tier, claim, anchor)
        for removals in found.values():
            missed = MissedObjects(
                removal=removals[0],
                namespace=claim.namespace,
                session=claim.session,
                start_tokens=start * page_size,
                n_objects=len(removals),
                at_s=self._out.at_s,
            )
            began = removed.hurt(missed)
            if began is not None:
                self._out.emit(
                    CacheThrashing(
                        session=0,
                        hurt=claim.session,
                        writer=0,
                        need=f"writes of {began.needed_by or NO_NAMESPACE}",
                        namespace=began.hurt,
                        pages=missed.n_objects,
                        after_s=missed.at_s - missed.removal.at_s,
                        tier=tier.name,
                    )
                )

    def _asked_in(
        self, tier: StorageTier, claim: Claim, anchor: RadixNode
    ) -> tuple[int, dict[str, list[Removal]]]:
        """The first page that is in no tier, and the removals of it and of those behind it.

        By whose writes they went; none where the first one did not leave that tier lately.
        """
        tokens, namespace, index = claim.tokens, claim.namespace, tier.index
        page_bytes = self._leases.tree.match_page_tokens * ID_BYTES
        key, first = self.keys.end_of(anchor), -1
        found: dict[str, list[Removal]] = {}
        end = min(len(tokens), anchor.end_tokens * ID_BYTES + MOST_ASKED * page_bytes)
        for at in range(anchor.end_tokens * ID_BYTES, end - page_bytes + 1, page_bytes):
            key = next_key(key, tokens[at : at + page_bytes])
            if not found and any(other.index.has(namespace, key) for other in self.each):
                continue
            removal = index.removed.ask(key, namespace)
            if removal is None:
                break
            first = first if found else at // page_bytes
            found.setdefault(removal.needed_by, []).append(removal)
        return first, found

    def flush(self, keys: Collection[str] | None, namespace: str | None) -> tuple[int, int]:
        """Drop these namespaces of the tree, or all, in the pool and in every tier.

        Args:
            keys: of the tree; None: all of them.
            namespace: what these are called, in whatever epoch; a tier may have more of them.

        Returns:
            As ``Evictor.flush``.
        """
        now_s = self._out.at_s
        # Rather hits are lost than that what was flushed is found.
        meant = namespace if self._flushes.has_room(namespace, now_s) else None
        self._drop_below(lambda known: known if meant is None else keys_meant(meant, known))
        for tier in self.each:
            tier.index.removed.note_flush(meant)
        if self.each:
            self._flushes.note(meant, now_s)
        return self._flush_tree(keys, namespace)

    def end_epochs(self, keys: Collection[str], base: str | None = None) -> tuple[int, int]:
        """Drop these of the tree, whose epochs are over, and all of such epochs in every tier.

        As ``flush``; that they are over is kept with the epochs.
        """
        self._drop_below(self._epochs.over)
        return self._flush_tree(keys, base)

    def _flush_tree(self, keys: Collection[str] | None, namespace: str | None) -> tuple[int, int]:
        self._is_flushing = True
        flushed = self._leases.evictor.flush(keys, namespace)
        self._is_flushing = False
        return flushed

    def _drop_below(self, dropped: Callable[[Collection[str]], Iterable[str]]) -> None:
        """Nothing of these is found in a tier any more: ``dropped`` of those that are known."""
        for tier in self.each:
            for namespace in sorted(dropped(self._known(tier))):
                self._drop_namespace(tier, namespace)
        for probe in self.promotions.probes.under_way.values():
            probe.is_void = probe.is_void or bool([*dropped([probe.namespace])])

    def _known(self, tier: StorageTier) -> set[str]:
        """The namespaces of which anything is known to lie there, or moves."""
        moving = [
            move.namespace
            for move in self.moves.under_way.values()
            if move.tier is tier and isinstance(move, (NodeDemotion, PagePromotion))
        ]
        # Of a store it is forgotten what lies there, and pins know it still.
        return {*tier.index.namespaces(), *moving, *self.pins.namespaces()}

    def _drop_namespace(self, tier: StorageTier, namespace: str) -> None:
        n_objects = tier.index.forget_namespace(namespace)
        self.pins.forget_namespace(tier, namespace)
        for move in self.moves.under_way.values():
            if move.tier is tier and isinstance(move, (NodeDemotion, PagePromotion)):
                move.is_void = move.is_void or move.namespace == namespace
        tier.met_before(tier.stored_as(namespace), n_objects)
        if tier.generation:
            self._remove_of_before(tier)

    def _remove_of_before(self, tier: StorageTier) -> None:
        """Have all of it removed that is of before a flush, or of an epoch that is over."""
        for stored, n_objects in sorted(tier.of_before.items()):
            namespace, _ = parted(stored)
            why = EPOCH if self._epochs.over([namespace]) else FLUSH
            if tier.writes is None:
                removed = tier.index.removed
                removed.went_as_a_whole(why, namespace, n_objects, self._out.at_s)
            self._out.effects.append(effects.DropNamespace(tier.name, stored))
        tier.of_before = {}

    # ---- told by the storage process ---------------------------------------------------------

    def found(self, got: TierFound) -> None:
        """Objects of before, which nobody has to write again."""
        tier = self.named(got.tier)
        if tier is None:
            return
        namespace, stamp = parted(got.namespace)
        keys = each_key(got.keys)
        if stamp == self._flushes.stamp_of(namespace) and not self._epochs.over([namespace]):
            tier.index.found(namespace, keys)
        else:
            tier.met_before(got.namespace, len(keys))

    def ready(self, got: TierReady) -> None:
        """It serves; what it found and nobody wants goes first."""
        tier = self.named(got.tier)
        if tier is None:
            return
        tier.generation, tier.down_why = got.generation, ""
        self._remove_of_before(tier)
        self.pins.link(tier)
        removed, at_s = tier.index.removed, self._out.at_s
        removed.went_as_a_whole(FOREIGN, "", got.n_removed, at_s, got.removed_why)
        for name, gone in tier.index.shrink().items():
            tier.counts.dropped += len(gone)
            self.moves.drop(tier, name, gone)
            removed.went(BEYOND, gone, side_of(name, tier.index.share_of(name)), at_s)
        self._out.emit(
            events.TierUp(tier=tier.name, generation=got.generation, objects=tier.index.n_objects)
        )

    def demoted(self, got: Demoted) -> None:
        """One order to write is over."""
        move = self.moves.end(got.ticket, NodeDemotion)
        if move is None:
            return  # of a process that is gone
        demoter = self._demoter_of(move)
        demoter.demoted(move, got)
        self._write_ahead(demoter)

    def promoted(self, got: Promoted) -> None:
        """One order to read is over."""
        move = self.moves.end(got.ticket, PagePromotion)
        if move is not None:
            self.promotions.promoted(move, got)

    def probed(self, got: TierProbed) -> None:
        """One question is answered."""
        probe = self.promotions.probes.probed(got)
        if probe is not None:
            self.promotions.probed(probe)

    def gone(self, got: StorageGone) -> None:
        """The process is reaped: nothing is under way, and nobody knows what lies in a tier.

        One that could not begin is told of too: its tier may be another daemon's.
        """
        if any(tier.generation > got.generation for tier in self.each):
            return
        # All tiers first: who waited is asked again below, and must not be told to wait once more.
        moves, probes = self.moves.cut(), self.promotions.probes.cut()
        for tier in self.each:
            tier.generation, tier.down_why = 0, got.why
            tier.end_way()  # nor does the next process make way, until it is told
            cut = [move for move in moves if move.tier is tier]
            tier.index.clear()
            tier.of_before = {}
            tier.counts.cut += len(cut)
            if cut:
                tier.failed(got.why)
            self._out.emit(events.TierDown(tier=tier.name, cut=len(cut), why=got.why))
        for probe in probes:
            self.promotions.probed(probe)
        for move in moves:
            if isinstance(move, PagePromotion):
                self.promotions.cut(move)
            elif isinstance(move, NodeDemotion):
                self._demoter_of(move).cut(move)

    def _demoter_of(self, move: NodeDemotion) -> Demoter:
        return self.demoters[self.each.index(move.tier)]

    def tick(self) -> None:
        """Deadlines, who has waited long enough, and what is to be written."""
        self.moves.restart_if_silent()
        for tier in self.promotions.probes.tick():
            # What this node wrote for its pins lies there, however much else is forgotten.
            self.pins.link(tier)
        self.promotions.tick()
        for demoter in self.demoters:
            demoter.look()
        # Before all else, which would take the room below a ceiling first.
        if not self.at_stop:
            self.pins.turn()
        for demoter in self.demoters:
            self._write_ahead(demoter)

    def dues(self) -> list[float]:
        """When a tick has something to do, if nothing is under way; in the past while one has."""
        writes = [due for demoter in self.demoters for due in demoter.dues()]
        return [*self.pins.dues(), *self.promotions.probes.dues(), *writes]

    def give_way(self) -> None:
        """Bytes of handoffs move: what is written makes way, but for what a stop waits for."""
        if not self.at_stop:
            for demoter in self.demoters:
                demoter.give_way()

    def go_on(self) -> None:
        """No bytes of handoffs move."""
        for demoter in self.demoters:
            demoter.go_on()

    def _write_ahead(self, demoter: Demoter) -> None:
        # At a stop nothing is evicted any more, and the last pages to go are written first.
        if not self.at_stop:
            demoter.turn()

    # ---- the end of the pool -----------------------------------------------------------------

    @property
    def stop_s(self) -> float:
        """How long that may take."""
        tiers = [demoter.tier for demoter in self.demoters if demoter.writes_at_stop]
        return max([tier.settings.stop_s for tier in tiers], default=0.0)

    def begin_stop(self) -> None:
        """The node has left, and its pool ends: write what is in no tier."""
        self.go_on()
        order, moves, out = self._leases.tree.order, self.moves, self._out
        wanting = [demoter for demoter in self.demoters if demoter.writes_at_stop]
        nodes = hottest_first(order, self.quiet) if wanting else []
        self.at_stop = tuple(
            [
                StopDemotion(demoter, nodes, order, moves, out, self.pins.alone_in(demoter.tier))
                for demoter in wanting
                if nodes
            ]
        )

    def is_written(self) -> bool:
        """Go on with that; whether there is nothing more to wait for."""
        # A list: each of them goes on, whatever the one before it says.
        return False not in [stop.turn() for stop in self.at_stop]
