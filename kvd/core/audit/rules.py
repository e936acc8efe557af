"""What must be true of one page, tree node, lease, handoff or waiter, and in words where it is not.

Each rule looks at one thing and at what it names, is exact at any moment between two steps, and
gives ``Fault``s. ``invariants`` asks all of them at once, ``sweep`` piece by piece. Of a tree node
``is_sound`` is the quick question; ``node_faults`` is the answer in words, asked where it is not.

I9, beside those of the design: what is held is held for somebody. Every holder of a lease, every
quarantine, post, part and waiter names something that lives and that knows of it; else nothing
would ever give it back.

What must not live here: what a fault means over time (``findings``), components beside the first
(``component_rules``), any change of state.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from kvd.core.audit.backrefs import UNDER_WAY
from kvd.core.cache.lease import (
    ARRIVAL,
    COPY,
    ENGINE,
    FORMER_COPY,
    RESTORE,
    SAVE,
    UNPROVEN,
)
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.handoff.message_sizes import page_id_bytes
from kvd.core.handoff.parts import waits_for_others
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.handoff.receive import ASKING
from kvd.core.handoff.send import LIVE, WRITING
from kvd.core.inspect.page_states import Place, saved_pools_of
from kvd.core.leases.admission import OWN_TRANSFER
from kvd.types import ID_BYTES, NO_PAGES, NULL_PAGE, Pages, count, short

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from kvd.core.audit.backrefs import Backrefs
    from kvd.core.cache.eviction import EvictionOrder
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, SendPart
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.send import Prefiller
    from kvd.core.inspect.page_states import PoolPlaces
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.admission import Waiter
    from kvd.core.leases.lease_table import LeaseTable


INVARIANTS = {
    "I1": "every page is in exactly one place: free, held, cached or in quarantine",
    "I2": "a node of the tree is locked as often as leases cross it",
    "I3": "what can be evicted is exactly what nobody locks",
    "I4": "the tree, and what is sent of a prompt, is whole pages",
    "I5": "nothing is posted twice, or outside of what was asked for",
    "I6": "nothing is under way for what has settled, and no page in quarantine is another's",
    "I7": "every quarantine names who may still write",
    "I8": "events are numbered without a gap",
    "I9": "what is held is held for somebody",
    "I10": "what is promised is there: free and evictable pages cover it",
}
"""What each of them says, in a sentence; ``invariants`` has the formulas."""

Key = tuple[str, str, int, int, str, int]
"""What makes two faults the same one: the check, and what it is about."""


class Fault(msgspec.Struct, frozen=True):
    """One broken rule, and what it is about; 0 and empty where it is about no such thing.

    ``rule`` is one of I1 to I10, ``check`` says which part of it in a word, ``what`` in a sentence.
    ``side`` and ``part`` name one part of a handoff, ``node`` a node of the tree; ``component`` is
    empty for the first one, which is meant where none is said.
    """

    rule: str
    check: str
    what: str
    lease: int = 0
    node: int = 0
    side: str = ""
    part: int = 0
    pages: Pages = NO_PAGES
    component: str = ""
    session: int = 0
    """Whose lease it was, where that is gone."""

    @property
    def key(self) -> Key:
        """Equal for the same fault seen twice."""
        return self.check, self.component, self.lease, self.node, self.side, self.part

    @property
    def sentence(self) -> str:
        """The rule, and what is wrong."""
        return f"{self.rule}: {self.what}"


_PAGES = attrgetter("pages")


def tree_faults(tree: RadixTree) -> list[Fault]:
    """Every violation of I2, I3 and I4 that a tree alone can tell."""
    nodes = list(tree.nodes())
    page_bytes = tree.match_page_tokens * ID_BYTES
    found = [
        fault
        for node in nodes
        if not is_sound(node, tree.order, page_bytes)
        for fault in node_faults(node, tree.order, page_bytes)
    ]
    if len(nodes) != len(tree.order):
        found.append(
            Fault(
                "I3",
                "order-size",
                f"{len(nodes)} nodes are in the tree, {len(tree.order)} in the eviction order",
            )
        )
    return found + total_faults(tree) + _page_faults(nodes)


def total_faults(tree: RadixTree) -> list[Fault]:
    """I3: the counters are the sums over the nodes in the eviction order, which are all."""
    # In one piece, so as fast as it goes: 0.1 us a node.
    # By the eviction order and not by the tree: it is the order that hands pages out.
    nodes = list(tree.order)
    cached = sum(map(len, map(_PAGES, nodes)))
    locked = sum([len(node.pages) for node in nodes if node.lock_ref])
    evictable, protected = (cached - locked) // ID_BYTES, locked // ID_BYTES
    if (evictable, protected) == (tree.evictable_pages, tree.protected_pages):
        return []
    return [
        Fault(
            "I3",
            "totals",
            f"{tree.evictable_pages} evictable and {tree.protected_pages} protected pages are "
            f"counted, {evictable} and {protected} are in the eviction order",
        )
    ]


def promise_faults(table: LeaseTable) -> list[Fault]:
    """I10, of every component; and that nothing is promised to a lease that is gone."""
    found = []
    promises = table.promises
    gone = [number for number in promises.of_leases if number not in table.leases]
    if gone or not promises.is_counted():
        what = f"{promises.n_pages} pages are counted as promised, which is not what leases lack"
        if gone:
            what = f"pages are promised to lease {gone[0]}, which is gone"
        found.append(Fault("I10", "promises", what))
    for name, pages in zip(table.budgets.names, promises.uncovered(), strict=True):
        if pages:
            what = (
                f"{table.budgets.promised(name)} pages of {name} are promised, {pages} of them are "
                f"neither free nor evictable"
            )
            component = "" if name == table.pool.name else name
            found.append(Fault("I10", "promised", what, component=component))
    return found


def quota_faults(table: LeaseTable) -> list[Fault]:
    """I3: what is counted of the namespaces with quotas is what the tree has of them."""
    if table.evictor.quotas is None:
        return []
    return [
        Fault(
            "I3",
            "quotas",
            f"{counted} pages are counted of {'what has no quota' if name is None else repr(name)},"
            f" {there} are in the tree",
        )
        for name, (counted, there) in table.evictor.quotas.counted().items()
        if counted != there
    ][:1]


def is_sound(node: RadixNode, order: EvictionOrder, page_bytes: int) -> bool:
    """Whether ``node_faults`` has nothing to say; ``node`` is no root."""
    parent, edge, key = node.parent, node.edge, node.key
    n_bytes = len(edge)
    return (
        parent is not None
        and parent.children.get(key) is node
        and len(key) == page_bytes <= n_bytes
        and edge.startswith(key)
        and n_bytes % page_bytes == 0
        and len(node.pages) * page_bytes == n_bytes * ID_BYTES
        and node.end_tokens == parent.end_tokens + n_bytes // ID_BYTES
        and 0 <= node.lock_ref <= parent.lock_ref
        and node in order
    )


def is_linked(node: RadixNode) -> bool:
    """Whether its parent knows it: what was evicted or flushed no longer is."""
    return node.parent is not None and node.parent.children.get(node.key) is node


def node_faults(node: RadixNode, order: EvictionOrder, page_bytes: int) -> list[Fault]:
    """Every violation of I2, I3 and I4 at one node that is no root."""
    parent, edge, name = node.parent, node.edge, node.describe()
    n_tokens = len(edge) // ID_BYTES
    found = []
    if parent is None or node.key != edge[:page_bytes] or not is_linked(node):
        found.append(("I4", "child-key", f"{name} is not its parent's child under its first page"))
    elif node.end_tokens != parent.end_tokens + n_tokens:
        found.append(("I4", "end", f"{name} has {n_tokens} tokens after {parent.describe()}"))
    elif parent.lock_ref < node.lock_ref:
        found.append(("I2", "locks-grow", f"{name} has more locks than {parent.describe()} above"))
    if node.lock_ref < 0:
        found.append(("I2", "lock-below-zero", f"{name} has less than no lock"))
    if node not in order:
        found.append(("I3", "not-in-order", f"{name} is not in the eviction order"))
    if not edge or len(edge) % page_bytes:
        found.append(("I4", "edge", f"{name} has {n_tokens} tokens, not whole pages"))
    if len(node.pages) * page_bytes != len(edge) * ID_BYTES:
        found.append(("I4", "edge-pages", f"{name} has {n_tokens} tokens on its pages"))
    return [Fault(rule, check, what, node=node.id) for rule, check, what in found]


def _page_faults(nodes: list[RadixNode]) -> list[Fault]:
    pages = np.frombuffer(b"".join(node.pages for node in nodes), "<i4")
    ids, times = np.unique(pages, return_counts=True)
    twice = ids[times > 1]
    found = [
        Fault(
            "I4",
            "page-twice",
            f"page {page} is in the tree more than once",
            pages=Pages(np.int32(page).tobytes()),
        )
        for page in twice[:1].tolist()
    ]
    if ids.size and ids[0] <= NULL_PAGE:
        what = f"page {ids[0]} is in the tree; page ids start at {NULL_PAGE + 1}"
        found.append(Fault("I4", "null-page", what))
    return found


AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING}
"""Neither lock nor page of the pool."""

COPYING = {SAVE: LeaseStage.SAVING, RESTORE: LeaseStage.RESTORING}
"""The standing in which each of these holds a lease."""


def saved_faults(table: LeaseTable) -> list[Fault]:
    """I1 of the saved area: null + free + saved = total, per component; each page in one place."""
    return [fault for pool in saved_pools_of(table) for fault in tile_faults(pool)]


def saved_count_faults(table: LeaseTable) -> Iterator[Fault]:
    """I1 of the saved area by the numbers alone: cheap, for the standing audit."""
    for places in saved_pools_of(table):
        taken = table.saved.used_pages(places.saves)
        saved = sum([count(pages) for _, pages in places.owned()])
        if saved != taken and not places.pool.condemned_pages:
            what = f"{taken} pages of {places.pool.name} are taken, leases have {saved}"
            yield Fault("I1", "saved-count", what, component=places.pool.name)


def broken_standing(node: NodeView, lease: LeaseRecord) -> Iterator[str]:
    """What a lease has that its standing does not allow, or lacks."""
    standing = lease.state
    if standing in AWAY and (lease.anchor is not None or lease.page_table):
        yield "it has a lock or pages"
    if standing is LeaseStage.RUNNING and lease.saved is not None:
        yield f"it has {lease.saved_pages} saved pages"
    wanted = {holder for holder, when in COPYING.items() if when is standing}
    if lease.holders & COPYING.keys() != wanted:
        yield f"it is held by {sorted(lease.holders)}"
    if lease.saved is not None:
        table, pages = node.leases, node.leases.pages_for(count(lease.saved.tokens))
        for part in lease.saved.parts:
            if part.component == table.pool.name and count(part.slots) != pages:
                yield f"{count(part.slots)} pages are saved of {pages}"


ARRIVING = ASKING | {Decode.VERIFYING}
"""States of a part whose lease waits for its KV."""


def missing_locks(edge: RadixNode, anchored: Counter[RadixNode | None]) -> int:
    """I2: the locks of a node are those of its children, and of the leases that end at it.

    Returns by how many it has too few, negative where it has too many.
    """
    below = sum([child.lock_ref for child in edge.children.values()])
    return below + anchored[edge] + (edge.parent is None) - edge.lock_ref


def lock_faults(edge: RadixNode, refs: Backrefs) -> Iterator[Fault]:
    """I2 at one node, in words."""
    missing = missing_locks(edge, refs.anchored)
    if missing:
        anchored, own = refs.anchored[edge], edge.parent is None
        below = edge.lock_ref + missing - anchored - own
        yield Fault(
            "I2",
            "lock-count",
            f"{edge.describe()}: {anchored} leases end at it and its children have {below} locks"
            f"{', a root has one of its own' if own else ''}, which is not {edge.lock_ref}",
            node=edge.id,
        )


# ---- pages -----

PAGE_LOST = "page-lost"
"""The check that tells which pages nobody has."""

MAX_PLACES = 8
"""Different sets of places named in one answer; a broken free list would name thousands."""


def tile_faults(where: PoolPlaces) -> list[Fault]:
    """I1 of any pool: which of its pages are in no place, in two, or none of its own.

    A condemned page is in its own place and in no other, whoever still names it.
    """
    pool, component, everything = where.pool, where.component, list(where.places())
    total = pool.total_pages
    if pool.condemned_pages:
        # Each would be in two places at least, which is told already and cannot be mended.
        everything = _apart_from(everything, pool.condemned_ids())
    ids = np.frombuffer(b"".join([place.pages for place in everything]), dtype="<i4")
    # Mostly so: then nobody has to say where each of them is.
    if ids.size == total - 1 and np.array_equal(np.sort(ids), np.arange(1, total)):
        return []
    return [
        *_strays(everything, total, component),
        *_doubles(everything, ids, total, component),
        *_missing(ids, total, component),
    ]


def is_uncounted(where: PoolPlaces) -> bool:
    """I1 by the numbers alone: cheap, and blind to a page lost while another is double."""
    table, keeper = where.table, where.keeper
    if keeper is None:
        # A quarantined lease is among them: what it holds is neither free nor anybody else's.
        held = sum([lease.held_pages for lease in table.leases.values()])
        cached = table.tree.cached_pages
    else:
        held, cached = keeper.held_pages, keeper.cached_pages
    counted = 1 + where.pool.free_pages + cached + held
    # How many of those condemned are still named is not counted.
    return counted != where.pool.total_pages and not where.pool.condemned_pages


def _apart_from(everything: list[Place], condemned: Pages) -> list[Place]:
    gone = np.frombuffer(condemned, "<i4")
    found = [Place("condemned", condemned)]
    for place in everything:
        ids = np.frombuffer(place.pages, "<i4")
        left = ids[~np.isin(ids, gone)]
        is_same = left.size == ids.size
        found.append(place if is_same else replace(place, pages=Pages(left.tobytes())))
    return found


def _strays(everything: list[Place], total: int, component: str) -> Iterator[Fault]:
    """Ids that are no page of this pool, the null page included."""
    for place in everything:
        ids = np.frombuffer(place.pages, dtype="<i4")
        wrong = ids[(ids < 1) | (ids >= total)]
        if wrong.size:
            what = (
                f"{place.name} has page {wrong[0]}{_of(component)}; "
                f"this pool hands out 1 to {total - 1}"
            )
            yield Fault(
                rule="I1",
                check="page-stray",
                what=what,
                lease=place.lease,
                node=place.node,
                pages=Pages(wrong.tobytes()),
                component=component,
            )


def _doubles(
    everything: list[Place], ids: np.ndarray, total: int, component: str
) -> Iterator[Fault]:
    """Pages in two places, or twice in one, by where they are."""
    # Strays are told apart: as places in the array they would be somebody else's pages.
    known = (ids >= 1) & (ids < total)
    times = np.bincount(ids[known], minlength=total)
    at = np.flatnonzero(known)
    at = at[times[ids[at]] > 1]
    ends = np.cumsum([len(place.pages) // ID_BYTES for place in everything])
    in_which = np.searchsorted(ends, at, "right")
    where: dict[int, list[int]] = {}
    for page, index in zip(ids[at].tolist(), in_which.tolist(), strict=True):
        where.setdefault(page, []).append(index)
    groups: dict[tuple[int, ...], list[int]] = {}
    for page, found in where.items():
        groups.setdefault(tuple(found), []).append(page)
    # By the set of places, not by page: one bug makes many pages double in the same two.
    for indexes, pages in list(groups.items())[:MAX_PLACES]:
        named = [everything[index] for index in indexes]
        yield Fault(
            "I1",
            "page-double",
            f"{_these(pages, component)} in {' and in '.join(place.name for place in named)}",
            lease=max(place.lease for place in named),
            node=max(place.node for place in named),
            pages=Pages(np.asarray(pages, dtype="<i4").tobytes()),
            component=component,
        )


def _missing(ids: np.ndarray, total: int, component: str) -> Iterator[Fault]:
    """Pages in no place at all: nobody will ever have them again."""
    is_there = np.zeros(total, dtype=bool)
    is_there[ids[(ids >= 1) & (ids < total)]] = True
    lost = np.flatnonzero(~is_there[1:]) + 1
    if lost.size:
        pages = Pages(lost.astype("<i4").tobytes())
        what = f"{_these(lost.tolist(), component)} nowhere"
        yield Fault("I1", PAGE_LOST, what, pages=pages, component=component)


def _these(pages: list[int], component: str) -> str:
    """``page 7 is``, or how many they are and the first."""
    of = _of(component)
    if len(pages) == 1:
        return f"page {pages[0]}{of} is"
    return f"{len(pages)} pages{of}, the first is {pages[0]}, are"


def _of(component: str) -> str:
    return f" of {component}" if component else ""


# ---- leases --------------------------------------------------------------------------------------


def lease_faults(node: NodeView, lease: LeaseRecord, refs: Backrefs) -> Iterator[Fault]:
    """I1, I2, I4, I6, I7 and I9 at one lease."""

    def fault(rule: str, check: str, what: str) -> Fault:
        at = lease.anchor.id if lease.anchor is not None else 0
        return Fault(rule, check, what, lease=lease.id, node=at)

    is_quarantined = lease.quarantine is not None
    broken = _broken_quarantine if is_quarantined else _broken_claim
    for rule, check, what in broken(node, lease, refs):
        yield fault(rule, check, what)
    # What is kept for a post goes with the last of them; what an engine still uses, when it is
    # told.
    if lease.reads < 0 or (lease.deferred and not lease.reads and lease.unswapped_from is None):
        what = f"lease {lease.id} keeps replaced pages that no post reads"
        yield fault("I1", "deferred", what)
    if lease.reads != refs.reads[lease.id]:
        what = f"lease {lease.id} counts {lease.reads} posts and copies that read it, "
        yield fault("I6", "reads", f"{what}{refs.reads[lease.id]} are under way")
    under_way = refs.engine_copies[lease.id]
    known = len(lease.copying.under_way) if lease.copying is not None else 0
    if (under_way > 0) is not (COPY in lease.holders) or under_way != known:
        what = f"lease {lease.id} knows of {known} copies of its engine, {under_way} are under way"
        yield fault("I6", "engine-copies", f"{what}; it is held by {sorted(lease.holders)}")
    if node.leases.leases.get(lease.id) is not lease:
        yield fault("I9", "lease-name", f"lease {lease.id} is known under another number")


def _broken_quarantine(
    _: NodeView, lease: LeaseRecord, refs: Backrefs
) -> Iterator[tuple[str, str, str]]:
    """I6, I7 and I9 of pages that a remote may still write."""
    writers = lease.quarantine.writers if lease.quarantine is not None else ()
    if not writers or not all(writer.incarnation for writer in writers):
        yield "I7", "nameless", f"quarantined lease {lease.id} names no incarnation"
    if lease.anchor is not None or lease.owned:
        yield "I6", "lock-kept", f"quarantined lease {lease.id} still locks a prefix"
    if not refs.is_draining(lease.id):
        what = f"nothing would ever end the quarantine of lease {lease.id}: no part drains it"
        yield "I9", "quarantine-leaked", what


def _broken_claim(
    node: NodeView, lease: LeaseRecord, refs: Backrefs
) -> Iterator[tuple[str, str, str]]:
    """Row, lock and holders of a lease that is somebody's."""
    # The row of a lost one was cut on purpose when it was lost.
    if lease.state not in AWAY and lease.lost is None:
        for check, what in _broken_row(node, lease):
            yield "I2" if check == "unlocked" else "I4", check, what
    for what in broken_standing(node, lease):
        yield "I1", "standing", f"lease {lease.id} is {lease.state.value}, but {what}"
    for check, what in _missing_holders(lease, refs):
        yield "I9", check, what


def _broken_row(node: NodeView, lease: LeaseRecord) -> Iterator[tuple[str, str]]:
    """Anchor, ``owned`` and row of a lease that locks a prefix."""
    table, anchor = node.leases, lease.anchor
    if anchor is None:
        yield "unlocked", f"lease {lease.id} is neither locked nor quarantined"
        return
    is_root = table.tree.roots.get(lease.namespace) is anchor
    if not (is_root or is_linked(anchor)) or anchor.lock_ref < 1:
        yield "unlocked", f"lease {lease.id} locks {anchor.describe()}, which is not locked there"
    elif anchor.end_tokens != lease.owned * table.page_size:
        yield (
            "owned",
            f"lease {lease.id} owns from page {lease.owned}, its lock ends at token "
            f"{anchor.end_tokens}",
        )
    elif table.tree.path_pages(anchor) != lease.page_table[: lease.owned * ID_BYTES]:
        yield "row", f"the row of lease {lease.id} is not the tree's path that it locks"


def _is_holder_there(holder: str, lease: LeaseRecord, refs: Backrefs) -> bool:
    """Whether what it is held for is there, and knows of it."""
    if holder == ENGINE:
        return refs.is_alive(lease.session)
    if holder == ARRIVAL:
        receive = refs.receives.get(lease.id)
        return receive is not None and receive.state in ARRIVING
    if holder in COPYING:
        # Both: a copy without the state would be reported to nobody, the state without a copy
        # never ends.
        return lease.state is COPYING[holder] and refs.copies[lease.id] > 0
    if holder in {UNPROVEN, FORMER_COPY}:
        is_awaited = holder == UNPROVEN or refs.is_awaited(lease.session)
        return is_awaited and refs.may_read_former
    if holder in UNDER_WAY:
        return refs.under_way(holder)[lease.id] > 0
    send = refs.sends.get(int(holder.removeprefix("send ")))
    return send is not None and send.engine is not None and send.engine.lease is lease


def _missing_holders(lease: LeaseRecord, refs: Backrefs) -> Iterator[tuple[str, str]]:
    """Holders that are gone, or do not know of this lease."""
    if not lease.holders:
        yield "holder-none", f"lease {lease.id} has no holder: nobody would ever release it"
    for holder in sorted(lease.holders):
        is_there = _is_holder_there(holder, lease, refs)
        if not is_there:
            what = f"session {lease.session}" if holder == ENGINE else holder
            yield "holder-gone", f"lease {lease.id} is held for {what}, which is gone"


# ---- parts ---------------------------------------------------------------------------------------


def receive_faults(node: NodeView, part: ReceivePart, refs: Backrefs) -> Iterator[Fault]:
    """I4 and I9 at one part of the decode side that is not over."""
    wrong = _unqueued(part, refs) if part.state is Decode.QUEUED else _unclaimed(node, part, refs)
    if node.decoder.open.parts.get(part.id) is not part:
        wrong = "is known under another number"
    if wrong:
        yield _receive_fault("I9", "receive", part, wrong)
    # Its sums are known and it stands still: right only while other parts, or a buffer, are waited
    # for.
    looks_done = part.state is Decode.VERIFYING and not part.sums
    if looks_done and not waits_for_others(part) and not _is_preloading(node, part):
        yield _receive_fault(
            "I9", "verify", part, "waits for a look at its pages that nobody takes"
        )
    if part.prefix_tokens % node.leases.page_size:
        yield _receive_fault("I4", "prefix", part, f"begins at token {part.prefix_tokens}")


def _is_preloading(node: NodeView, part: ReceivePart) -> bool:
    """Whether it waits for its device buffer, after it was verified."""
    return part.lease is not None and part.lease.id in node.fetcher.turns


def _unqueued(part: ReceivePart, refs: Backrefs) -> str:
    """Why nobody would ever admit it; empty where somebody will."""
    if part.waiter is None or id(part.waiter) not in refs.queued or part.lease is not None:
        return "is queued, and not in the queue"
    return ""


def _unclaimed(node: NodeView, part: ReceivePart, refs: Backrefs) -> str:
    """Why its pages are not kept for it as its state demands; empty where they are."""
    lease, state = part.lease, part.state
    if lease is None or node.leases.leases.get(lease.id) is not lease:
        return "has no lease, or one that is gone"
    if state not in ARRIVING and state is not Decode.DRAINING:
        return "is over, and still among the open ones"
    is_kept = lease.quarantine is not None if state is Decode.DRAINING else ARRIVAL in lease.holders
    if not is_kept or not _is_named(part, lease):
        return f"is not what lease {lease.id} is kept for"
    return _unfound(node.decoder, part, refs) or _unjoined(node.decoder, part)


def _unfound(decoder: Decoder, part: ReceivePart, refs: Backrefs) -> str:
    """Why nobody would hear of it; empty where somebody does."""
    if decoder.open.by_handoff.get(part.handoff) is not part:
        return f"is not found by its handoff {part.handoff}"
    if part.state in ASKING and not refs.is_alive(part.session):
        return f"goes on for session {part.session}, which is gone"
    return ""


def _unjoined(decoder: Decoder, part: ReceivePart) -> str:
    """Why it does not go together with the other parts of its receive; empty where it does."""
    attempt = part.attempt
    if part not in attempt.parts or decoder.open.attempts.get(attempt.id) is not attempt:
        return f"is no part of receive {attempt.id}"
    if part.state in ASKING and part.ended is not None:
        return "goes on, and its receive has ended"
    return ""


def _is_named(part: ReceivePart, lease: LeaseRecord) -> bool:
    """I7 of one of several: whether a quarantine names its writer, while that may write."""
    held = lease.quarantine
    if held is None:
        return True
    return any(writer.incarnation == part.incarnation for writer in held.writers)


def ready_faults(table: LeaseTable, lease_id: int, attempt: ReceiveAttempt) -> Iterator[Fault]:
    """I9 at a delivered receive, which stays until its lease is released."""
    lease = table.leases.get(lease_id)
    for part in attempt.parts:
        if lease is None or part.lease is not lease or part.state is not Decode.READY:
            what = f"is delivered as lease {lease_id}, which is not"
            yield _receive_fault("I9", "ready", part, what)
        elif ENGINE not in lease.holders:
            wrong = f"is delivered, and no engine holds lease {lease_id}"
            yield _receive_fault("I9", "ready", part, wrong)


def _receive_fault(rule: str, check: str, part: ReceivePart, wrong: str) -> Fault:
    return Fault(
        rule,
        check,
        f"receive {part.id} (room {part.room}, {part.state.value}) {wrong}",
        lease=part.lease.id if part.lease is not None else 0,
        side="decode",
        part=part.id,
    )


def send_faults(node: NodeView, part: SendPart, refs: Backrefs) -> Iterator[Fault]:
    """I4, I5, I6 and I9 at one part of the prefill side that is not CLOSED."""

    def fault(rule: str, check: str, what: str) -> Fault:
        lease = part.engine.lease.id if part.engine is not None else 0
        about = f"send {part.id} (room {part.room}, {part.state.value}) {what}"
        return Fault(rule, check, about, lease=lease, side="prefill", part=part.id)

    start, end = part.start_tokens, part.end_tokens
    is_within = part.decode_prefix_len <= start <= part.posted_tokens <= end <= part.prompt_tokens
    if part.offer and not is_within:
        bounds = f"[{start}, {end}]"
        yield fault("I5", "cursor", f"posted to {part.posted_tokens}, outside {bounds}")
    page_tokens = node.prefiller.posts.page_tokens(part)
    # A settled one may have been refused for just this.
    if part.decode_prefix_len % page_tokens and part.state is not Prefill.SETTLED:
        yield fault("I4", "prefix", f"begins at token {part.decode_prefix_len}")
    if part.state is Prefill.SETTLED and part.outstanding:
        yield fault("I6", "late-post", f"is settled with posts {sorted(part.outstanding)}")
    posts = node.prefiller.posts.parts
    if any(posts.get(post) is not part for post in part.outstanding):
        yield fault("I9", "post-lost", f"waits for a post of {sorted(part.outstanding)} in vain")
    wrong = _misfiled(node.prefiller, part) or _unowned(node.leases, part, refs)
    if wrong:
        yield fault("I9", "send", wrong)


def _misfiled(prefiller: Prefiller, part: SendPart) -> str:
    """Why a part of this state cannot be found where it should be; empty where it can."""
    settled_sends = prefiller.settled_sends
    if part.state in LIVE:
        if not prefiller.rooms.has(part):
            return "is not one that its room knows"
    elif part.state is not Prefill.SETTLED or settled_sends.settled.get(part.id) is not part:
        return "is over, and still among the open ones"
    # One that no Offer has come for has no other end yet.
    if part.incarnation and settled_sends.find_part(part.incarnation, part.handoff) is not part:
        return f"is not found by its handoff {part.handoff}"
    return ""


def _unowned(table: LeaseTable, part: SendPart, refs: Backrefs) -> str:
    """Why the lease that it reads, or the engine it works for, is not there; empty: they are."""
    engine = part.engine
    if engine is None:
        return "writes without an engine" if part.state in WRITING else ""
    lease = engine.lease
    if part.state is Prefill.SETTLED:
        return f"is settled, and keeps lease {lease.id}"
    if table.leases.get(lease.id) is not lease or f"send {part.id}" not in lease.holders:
        return f"reads lease {lease.id}, which is not held for it"
    # What a peer pulls is sent for no session.
    is_over = bool(engine.session) and not refs.is_alive(engine.session)
    if part.state is not Prefill.DRAINING and is_over:
        return f"goes on for session {engine.session}, which is gone"
    return ""


def post_faults(prefiller: Prefiller, post: int, part: SendPart) -> Iterator[Fault]:
    """I6 and I9 at one post under way."""
    # By its room and not by its state alone: one that has settled is not there any more.
    is_live = prefiller.rooms.has(part)
    if post not in part.outstanding or not is_live:
        what = f"post {post} is under way for send {part.id} (room {part.room}), which "
        what += "does not wait for it" if is_live else f"is {part.state.value}"
        yield Fault("I9", f"post-{post}", what, side="prefill", part=part.id)


# ---- the queue and the registers -----------------------------------------------------------------


def queue_faults(node: NodeView, refs: Backrefs) -> Iterator[Fault]:
    """The queue is in order, and everybody in it lives."""
    ranks = [waiter.rank for waiter in node.admission.line]
    if ranks != sorted(ranks):
        yield Fault("I9", "queue-order", "the admission queue is not sorted by priority and time")
    yield from _forgotten(node)
    for waiter in node.admission.queue:
        yield from _waiter_faults(waiter, refs)


def _forgotten(node: NodeView) -> Iterator[Fault]:
    """Who stands apart and waits for nothing but memory: nobody would look at it again.

    Those who wait for one peer wait for the same thing: whether that is there is asked once.
    """
    peers = node.peers
    for name, waiters in node.admission.side_queue.by_name.items():
        # Asked once for a name: a thousand may wait for it, and the answer is the same.
        if name == OWN_TRANSFER or peers.not_ready(name) is not None:
            continue
        for waiter in waiters.values():
            if not waiter.waits_for():
                session, call = waiter.claim.session, waiter.claim.call
                what = f"a request of session {session} (call {call}) waits for {name}, which is up"
                yield Fault("I9", f"forgotten-{session}-{call}", what)


def _waiter_faults(waiter: Waiter, refs: Backrefs) -> Iterator[Fault]:
    session = waiter.claim.session
    if not refs.is_asked(waiter):
        what = f"a request of session {session} (call {waiter.claim.call}) waits, and that is gone"
        yield Fault("I9", f"waiter-{session}-{waiter.claim.call}", what)


def register_faults(node: NodeView) -> Iterator[Fault]:
    """I9: the registers that are kept beside the parts say what the parts say."""
    decoder, prefiller, leases = node.decoder, node.prefiller, node.leases.leases
    for lease_id, lease in decoder.quarantines.leases.items():
        if leases.get(lease_id) is not lease or lease.quarantine is None:
            what = f"lease {lease_id} waits for this host to be quiet, and is not in quarantine"
            yield Fault("I9", "settling", what, lease=lease_id)
    offered = sum(part.state is not Decode.QUEUED for part in decoder.open.parts.values())
    if offered != len(decoder.open.by_handoff):
        what = (
            f"{offered} receives are offered, {len(decoder.open.by_handoff)} are found by handoff"
        )
        yield Fault("I9", "by-handoff", what)
    for send, part in prefiller.by_send.items():
        if prefiller.rooms.by_room.get(part.room) is not part or part.engine is None:
            what = f"send {send} (room {part.room}) is open to its engine, and is over"
            yield Fault("I9", "by-send", what, side="prefill", part=send)
    for part in prefiller.handed_over.values():
        if prefiller.by_send.get(part.id) is not part:
            what = f"send {part.id} (room {part.room}) is found by its call, and is over"
            yield Fault("I9", "by-send", what, side="prefill", part=part.id)
    for send, failed in prefiller.failed.items():
        if failed.session not in node.sessions.by_id:
            what = f"send {send} has failed for session {failed.session}, which is gone"
            yield Fault("I9", "failed", what, side="prefill", part=send)
    yield from _engine_copy_faults(node)
    yield from _former_faults(node)
    yield from _record_faults(node.prefiller)
    # By numbers always; page by page only where the area is small, see ``sweep``.
    yield from saved_count_faults(node.leases)


def _engine_copy_faults(node: NodeView) -> Iterator[Fault]:
    for copy in node.engine_copies:
        if copy.lease not in node.leases.leases:
            what = f"a copy of worker {copy.worker} is under way on lease {copy.lease}, "
            yield Fault("I9", "engine-copy", f"{what}which is gone", lease=copy.lease)


def _former_faults(node: NodeView) -> Iterator[Fault]:
    former = node.former_leases
    # One that its engine let go of stays while a process that is away may copy it.
    standing = [
        lease
        for lease in node.leases.leases.values()
        if lease.state is LeaseStage.FORMER and lease.holders != {FORMER_COPY}
    ]
    registered = [*former.leases.values(), *([former.unproven] if former.unproven else [])]
    if {lease.id for lease in standing} != {lease.id for lease in registered}:
        what = (
            f"{len(standing)} leases are of before the restart, {len(registered)} are known as it"
        )
        yield Fault("I9", "former", what)
    if former.unproven is not None and not former.may_read():
        what = f"lease {former.unproven.id} keeps pages that nobody of before the restart reads"
        yield Fault("I9", "unproven", what, lease=former.unproven.id)


def _record_faults(prefiller: Prefiller) -> Iterator[Fault]:
    for incarnation, records in prefiller.settled_sends.records.items():
        parts = records.parts.items()
        is_open = sorted([handoff for handoff, part in parts if part.state is not Prefill.CLOSED])
        closed = sorted(records.parts.keys() - set(is_open))
        kept_bytes = sum(page_id_bytes(part.offer) for _, part in parts if part.offer is not None)
        if (is_open, closed, kept_bytes) != (records.open, records.closed, records.kept_bytes):
            what = (
                f"{len(records.open)} handoffs of {short(incarnation)} are counted as open, "
                f"{len(records.closed)} as closed, with {records.kept_bytes} bytes of page ids; "
                f"{len(is_open)} are, {len(closed)}, and {kept_bytes}"
            )
            yield Fault("I9", "records", what)
