"""Who holds it, why, and since when: one sentence for anything that has a number or a name.

``because`` answers for pages and nodes of the tree first, then for components beside the first,
leases, clients, handoffs and peers. An ``Explanation`` is a sentence, facts, and what to ask next.

What must not live here: what a field of the snapshot is (``schema``), states in a word (``words``).
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kvd.core.cache.lease_state import LeaseStage
from kvd.core.cache.namespaces import quoted, told
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.inspect.evicted import of_evictions, of_free_page, told_of_node
from kvd.core.inspect.explanation import (
    MAX_LINKS,
    Explanation,
    holder_refs,
    lease_refs,
    links_of,
    node_refs,
    plain_facts,
)
from kvd.core.inspect.page_states import needed_nodes, pool_named
from kvd.core.inspect.rows import client_rows, peer_rows, receive_row, send_row
from kvd.core.inspect.schema import CLIENT, LEASE, PEER, ROOM
from kvd.core.inspect.snapshot import waiting_states
from kvd.core.inspect.words import (
    agent_words,
    death_of,
    epochs_words,
    layout_words,
    lease_waits_for,
    lease_word,
    mark_words,
    pulls_waiting,
    some_words,
    told_copies,
)
from kvd.core.layout.shards import lacking, listed
from kvd.core.layout.spec import companion_factor, is_companion, shards_of
from kvd.core.leases.owners import describe_holder
from kvd.core.peers.peer import Life, drain_words
from kvd.core.peers.ways import slow_words, way_words
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NULL_PAGE, amount, count, pack_ids, page_ids, short
from kvd.wire.admin import Because, Beside, TreeNode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inspect.page_states import PoolPlaces
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.session_table import Session
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.wire.admin import Why
    from kvd.wire.snapshot import RoomState


FIRST_TOKENS_SHOWN = 8
"""Enough of an edge to recognise a prompt by, few enough for a line."""

CHILDREN_LINKED = 8


def because(node: NodeView, got: Why) -> Because | Refusal:
    """Answer for any kind of thing; a Refusal when there is no such thing.

    A page or a node is looked for in the whole tree, once: some 0.5 us for each node.
    """
    answers: dict[str, Callable[[], Explanation | Refusal]] = {
        "page": lambda: _page_of(node, got.component, got.id),
        "node": lambda: _node(node, got.id),
        "room": lambda: of_handoff(node, "room", got.id),
        "lease": lambda: of_lease(node, got.id),
        "receive": lambda: of_handoff(node, "receive", got.id),
        "send": lambda: of_handoff(node, "send", got.id),
        "client": lambda: of_client(node, got.id),
        "peer": lambda: of_peer(node, got.name),
        "evicted": lambda: of_evictions(node),
    }
    answer = answers.get(got.kind)
    if answer is None:
        return Refusal(Code.BAD_REQUEST, f"{got.kind!r} is none of {', '.join(answers)}")
    said = answer()
    if isinstance(said, Refusal):
        return said
    return Because(
        call=got.call, sentence=said.sentence, facts=said.facts, links=said.links, marks=said.marks
    )


def holders(table: LeaseTable) -> dict[int, list[LeaseRecord]]:
    """By node id, the leases whose path crosses it; their number is its lock_ref (I2).

    One walk up from each lease, whatever the size of the tree.
    """
    found: dict[int, list[LeaseRecord]] = {}
    for lease in table.leases.values():
        step = lease.anchor
        while step is not None:
            found.setdefault(step.id, []).append(lease)
            step = step.parent
    return found


def locked_words(
    node: NodeView, keys: Collection[str] | None = None, over: Collection[int] = ()
) -> tuple[str, ...]:
    """What a flush keeps, a sentence for each locked node: whose lease it is under.

    Args:
        node: to look at.
        keys: of the tree; None: all of them.
        over: leases that have ended by then.
    """
    by_edge = holders(node.leases)
    said = []
    for edge in node.leases.tree.nodes(keys):
        left = [lease for lease in by_edge.get(edge.id, []) if lease.id not in over]
        if left or (edge.lock_ref and not over):
            by = "; ".join(describe_holder(node, lease) for lease in left)
            said.append(f"node {edge.id} kept, {edge.n_pages} pages: {by}")
    return tuple(said)


def in_display_order(tree: RadixTree) -> list[RadixNode]:
    """All nodes, parents first, and among siblings the biggest subtree first."""
    edges = list(tree.nodes())
    below: Counter[int] = Counter()
    # Children before their parents, so that one pass adds up every subtree.
    for edge in reversed(edges):
        below[edge.id] += len(edge.pages)
        if edge.parent is not None:
            below[edge.parent.id] += below[edge.id]
    tops = [edge for edge in edges if edge.parent is not None and edge.parent.parent is None]
    shown = []
    stack = sorted(tops, key=lambda edge: below[edge.id])
    while stack:
        edge = stack.pop()
        shown.append(edge)
        stack.extend(sorted(edge.children.values(), key=lambda child: below[child.id]))
    return shown


def tree_node(node: NodeView, edge: RadixNode, crossing: list[LeaseRecord]) -> TreeNode:
    """One node of the tree with its holders, which are ``crossing``."""
    parent = edge.parent
    tokens = np.frombuffer(edge.edge, dtype="<i4")
    return TreeNode(
        id=edge.id,
        parent=parent.id if parent is not None and parent.parent is not None else 0,
        namespace=told(edge.namespace),
        start_tokens=edge.end_tokens - tokens.size,
        end_tokens=edge.end_tokens,
        pages=len(edge.pages) // 4,
        lock_ref=edge.lock_ref,
        hits=edge.hits,
        holders=tuple(describe_holder(node, lease) for lease in crossing),
        first_tokens=tuple(tokens[:FIRST_TOKENS_SHOWN].tolist()),
        beside=beside(node.leases, edge),
    )


def _page_of(node: NodeView, component: str, page: int) -> Explanation | Refusal:
    """A page of any component: one in lockstep with the first is where that one's page is."""
    first = first_page(node.settings, component, page)
    where = pool_named(node.leases, component if first is None else "")
    if where is None:
        names = ", ".join(component.name for component in node.settings.spec.components)
        return Refusal(Code.BAD_REQUEST, f"this pool has no component {component!r}: {names}")
    said = _page(node, where, page if first is None else first)
    if isinstance(said, Refusal) or first is None or component in {"", node.leases.pool.name}:
        return said
    goes_with = f"page {page} of {component} goes with page {first}: {said.sentence}"
    return replace(said, sentence=goes_with)


def _page(node: NodeView, where: PoolPlaces, page: int) -> Explanation | Refusal:
    """Who has this page of a pool, or of a saved area: a lease, a node of the tree, nobody."""
    component, total_pages = where.component, where.pool.total_pages
    what = f"page {page}{f' of {component}' if component else ''}"
    if not NULL_PAGE <= page < total_pages:
        return Refusal(Code.BAD_REQUEST, f"{what}: this pool has pages 0..{total_pages - 1}")
    if page == NULL_PAGE:
        in_row = "; in a row it means none" if component else ""
        return Explanation(f"{what} is the null page: never handed out, never freed{in_row}")
    if where.pool.is_condemned(page):
        # Nobody has it, or nobody should: it was in two places, or its lease was broken.
        why = node.audit.why_condemned(component, page)
        said = f"{what} is condemned: nobody gets it before the daemon is started again"
        return Explanation(said, (f"because {why}",))
    wanted = pack_ids([page])
    for lease, own in where.owned():
        if has_page(own, wanted):
            return _held(node, where, lease, page)
    for edge, pages in where.cached():
        if has_page(pages, wanted):
            return _cached(node, where, edge, page)
    return of_free_page(node, what, page if where.keeper is None and not where.saves else NULL_PAGE)


def _held(node: NodeView, where: PoolPlaces, lease: LeaseRecord, page: int) -> Explanation:
    """By which lease, what it is there, and what would give it back."""
    held = lease.quarantine
    verb = "in quarantine under" if held else "held by"
    away = f", which is {lease.state.value}" if where.saves else ""
    waits_for = lease_waits_for(node, lease)
    waits = [f"waits for {waits_for}"] if waits_for else []
    facts = [*waits, *([f"because {held.why}"] if held else [])]
    if where.saves:
        facts = [_in_area(where.saves, lease, page)]
    elif where.keeper is not None:
        facts = [_in_lease(where.keeper, lease, page), *waits]
    facts += [] if where.saves else told_copies(node, lease)
    return Explanation(
        f"page {page}{f' of {where.component}' if where.component else ''} is {verb} "
        f"{describe_holder(node, lease)}{away}",
        tuple(facts),
        links_of(*holder_refs(lease)),
    )


def _cached(node: NodeView, where: PoolPlaces, edge: RadixNode, page: int) -> Explanation:
    """At which node, and who keeps it there."""
    keeper = where.keeper
    if keeper is None:
        said = _edge(node, edge)
        sentence = f"page {page} is cached in {said.sentence}"
        return replace(said, sentence=sentence, links=links_of(f"node:{edge.id}", *said.links))
    needing = [
        lease for lease in node.leases.leases.values() if edge in needed_nodes(keeper, lease)
    ]
    return Explanation(
        f"page {page} of {where.component} is cached {_at(keeper, edge, page)}",
        tuple(_needing(node, needing)),
        links_of(f"node:{edge.id}", *lease_refs(needing)),
    )


def _node(node: NodeView, number: int) -> Explanation | Refusal:
    roots = node.leases.tree.roots.items()
    namespace = next((name for name, root in roots if root.id == number), None)
    if namespace is not None:
        return _root(node, namespace)
    edge = next((edge for edge in node.leases.tree.nodes() if edge.id == number), None)
    if edge is None:
        return Refusal(Code.BAD_REQUEST, f"the tree has no node {number}: evicted, or never was")
    return _edge(node, edge)


def _root(node: NodeView, namespace: str) -> Explanation:
    """A root has no pages; every lease of its namespace locks it, cached or not."""
    root = node.leases.tree.roots[namespace]
    crossing = holders(node.leases).get(root.id, [])
    first = [describe_holder(node, lease) for lease in crossing[:MAX_LINKS]]
    of = f"namespace {quoted(namespace)}" if namespace else "no namespace"
    by = f"{len(crossing)} leases" if crossing else "nobody"
    return Explanation(
        f"node {root.id} (the root of {of}, {len(root.children)} children), locked by {by}",
        (*first, *_more(len(crossing) - len(first))),
        links_of(
            *lease_refs(crossing), *node_refs(islice(root.children.values(), CHILDREN_LINKED))
        ),
    )


def _more(n_leases: int) -> list[str]:
    return [f"and {n_leases} more leases"] if n_leases > 0 else []


def _edge(node: NodeView, edge: RadixNode) -> Explanation:
    crossing = holders(node.leases).get(edge.id, [])
    shown = tree_node(node, edge, crossing[:MAX_LINKS])
    of = f" of namespace {quoted(edge.namespace)}" if edge.namespace else ""
    where = (
        f"node {edge.id} (tokens {shown.start_tokens} to {shown.end_tokens}{of}, "
        f"{shown.pages} pages)"
    )
    used = f"hits: {edge.hits}, last used {node.out.at_s - edge.touched_at:.1f} s ago"
    if edge.lock_ref:
        others = f" and {len(crossing) - 1} more" if len(crossing) > 1 else ""
        first = f": {shown.holders[0]}{others}" if shown.holders else ""
        said = [f"{where}, lock_ref {edge.lock_ref}{first}", *shown.holders]
        said += _more(len(crossing) - len(shown.holders))
    else:
        said = [f"{where}, locked by nobody: it can be evicted", used]
    said += [*told_of_node(node, edge), *said_of_node(node, edge)]
    parent = [edge.parent] if edge.parent is not None and edge.parent.parent is not None else []
    around = node_refs([*parent, *islice(edge.children.values(), CHILDREN_LINKED)])
    return Explanation(said[0], tuple(said[1:]), links_of(*lease_refs(crossing), *around))


def has_page(pages: bytes, wanted: bytes, first: int = 0) -> bool:
    """Whether this page, as its id is packed, is among ``pages`` from index ``first`` on.

    A search for its bytes, which is right where it begins at an id: 0.1 us for a short row, where
    a look at every id would take 2 us.
    """
    at = pages.find(wanted, first * ID_BYTES)
    while at >= 0 and at % ID_BYTES:
        at = pages.find(wanted, at + 1)
    return at >= 0


def first_page(settings: Settings, component: str, page: int) -> int | None:
    """The page of the first component that a page of ``component`` belongs to.

    That is the page itself for the first one (also where none is named), and follows from the
    lockstep for a companion; None where the component has page ids of its own.
    """
    spec = settings.spec
    if component in {"", spec.components[0].name}:
        return page
    for one in spec.components:
        if one.name == component and is_companion(spec, one):
            return page // companion_factor(spec, one)
    return None


def _in_area(component: str, lease: LeaseRecord, page: int) -> str:
    """Which page of a retracted lease is kept there."""
    parts = () if lease.saved is None else lease.saved.parts
    part = next(part for part in parts if part.component == component)
    return f"it keeps page {part.first + page_ids(part.slots).index(page)} of its row"


def _in_lease(keeper: ComponentPages, lease: LeaseRecord, page: int) -> str:
    """Where in the lease it is, and what keeps it there."""
    size = keeper.component.page_size
    match keeper:
        case _ if lease.quarantine is not None:
            return f"because {lease.quarantine.why}"
        case WindowPages() if has_page(keeper.page_table(lease), pack_ids([page])):
            at = page_ids(keeper.page_table(lease)).index(page)
            return f"it is the window of tokens {at * size} to {(at + 1) * size}"
        case WindowPages():
            return "it is spare: the lease maps it further on when it slides"
        case StatePages():
            return "it is the state that the lease writes"
        case Buffers():
            return _in_slot(keeper, lease, page_ids(keeper.own_pages(lease)).index(page))
        case _:
            return ""


def _in_slot(keeper: Buffers, lease: LeaseRecord, slot: int) -> str:
    """Which page of the lease is copied there."""
    size = keeper.component.page_size
    where = f"it is slot {slot} of its {count(keeper.own_pages(lease))}"
    for logical, taken in keeper.resident[lease.id].slots.items():
        if taken == slot:
            return f"{where}, for tokens {logical * size} to {(logical + 1) * size}"
    return f"{where}, and free"


def _at(keeper: ComponentPages, edge: RadixNode, page: int) -> str:
    """Where in the tree it is: a window stands for tokens, a snapshot for all before a token."""
    if isinstance(keeper, StatePages):
        return f"at node {edge.id}: the state behind its last token, {edge.end_tokens}"
    size = keeper.component.page_size
    start = edge.end_tokens - count(edge.edge) + page_ids(keeper.pages_at(edge)).index(page) * size
    return f"beside node {edge.id}: the window of tokens {start} to {start + size}"


def _needing(node: NodeView, leases: list[LeaseRecord]) -> list[str]:
    """The leases that need what lies there."""
    found = [f"needed by {describe_holder(node, lease)}" for lease in leases]
    return found or ["needed by nobody: it can be evicted"]


# ---- nodes and leases ----------------------------------------------------------------------------


def beside(table: LeaseTable, edge: RadixNode) -> tuple[Beside, ...]:
    """What lies beside a node, of each component that can; a window that is gone has no pages."""
    return tuple(
        Beside(keeper.component.name, count(keeper.pages_at(edge)), keeper.locks_at(edge))
        for keeper in table.components.each
        if isinstance(keeper, WindowPages) or edge in keeper.nodes
    )


def said_of_node(node: NodeView, edge: RadixNode) -> list[str]:
    """The same in words, with the leases that need it."""
    said = []
    for keeper in node.leases.components.each:
        name = keeper.component.name
        if edge in keeper.nodes:
            n_pages = count(keeper.pages_at(edge))
            what = "a snapshot" if isinstance(keeper, StatePages) else f"{n_pages} pages"
            needing = [
                lease
                for lease in node.leases.leases.values()
                if edge in needed_nodes(keeper, lease)
            ]
            said += [f"{name}: {what}, {words}" for words in _needing(node, needing)]
        elif isinstance(keeper, WindowPages):
            said.append(f"{name}: a tombstone, its tokens are cached and their window is gone")
    return said


def said_of_lease(table: LeaseTable, lease: LeaseRecord) -> list[str]:
    """Where in its row a lease has pages, and what of the tree it needs."""
    said = []
    for keeper in table.components.each:
        name, size = keeper.component.name, keeper.component.page_size
        needed = [edge.id for edge in needed_nodes(keeper, lease)]
        if isinstance(keeper, WindowPages) and lease.id in keeper.leases:
            held = keeper.held[lease.id]
            said.append(
                f"{name}: mapped at tokens {held.floor * size} to {held.top * size}, its own from "
                f"token {held.start * size} on, {count(held.spare)} pages spare"
            )
        if needed:
            nodes = f"node {needed[0]}" if len(needed) == 1 else f"nodes {_listed(needed)}"
            said.append(f"{name}: needs what lies at {nodes}")
    return said


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def of_lease(node: NodeView, number: int) -> Explanation | Refusal:
    """What it holds and locks, for whom, and what it waits for."""
    lease = node.leases.leases.get(number)
    if lease is None:
        return Refusal(Code.BAD_REQUEST, f"there is no lease {number}: released, or never was")
    state = LEASE.state(node, lease)
    said = [f"holders: {', '.join(state.holders) or 'none'}"]
    said += [
        f"of {row.component}: {row.held_pages} pages held, {row.mapped_pages} in its row"
        for row in state.beside
    ]
    said += said_of_lease(node.leases, lease)
    promise = lease.promise
    if promise is not None and any(promise.pages):
        pages = zip(node.leases.budgets.names, promise.pages, strict=True)
        each = ", ".join([f"{n_pages} of {name}" for name, n_pages in pages if n_pages])
        said.append(f"promised pages for its first {promise.upto_tokens} tokens: {each} to come")
    if lease.quarantine:
        said.append(f"in quarantine for {state.quarantined_s:.1f} s, because {state.because}")
    if lease.state not in {LeaseStage.RUNNING, LeaseStage.FORMER}:
        since = f" for {state.retracted_s:.1f} s" if state.retracted_s else ""
        said.append(
            f"{state.state}{since}: {state.saved_pages} pages ({amount(state.saved_bytes)}) of "
            f"{state.prompt_tokens} tokens saved"
        )
    if state.waiting_for:
        said.append(f"waits for {state.waiting_for}")
    said += told_copies(node, lease)
    if lease.said:
        ranks = f", by rank {', '.join(map(str, lease.said))}" if len(lease.said) > 1 else ""
        said.append(f"KV of {lease.written_tokens} tokens is said to be written{ranks}")
    said += plain_facts(node, LEASE, lease)
    parts = list(_parts_of(node, lease))
    refs = [f"client:{lease.session}"] if lease.session else []
    if lease.anchor is not None and lease.anchor.parent is not None:
        refs.append(f"node:{lease.anchor.id}")
    refs += [ref for ref, _ in parts]
    if lease.room:
        refs.append(f"room:{lease.room}")
    peers = [part.peer for _, part in parts]
    peers += [writer.peer for writer in lease.quarantine.writers] if lease.quarantine else []
    refs += [f"peer:{name}" for name in peers if name]
    return Explanation(
        sentence=f"{describe_holder(node, lease)}: {state.state}, {state.held_pages} pages held, "
        f"{state.quarantined_pages} in quarantine, prefix of {state.prefix_tokens} tokens locked",
        facts=tuple(said),
        links=links_of(*refs),
        marks=tuple(mark for _, part in parts for mark in part.history.marks(node.out.at_s)),
    )


def _parts_of(node: NodeView, lease: LeaseRecord) -> Iterator[tuple[str, ReceivePart | SendPart]]:
    """The handoffs that fill it, have filled it, or read it, as links."""
    decoder, prefiller = node.decoder, node.prefiller
    for receive in decoder.open.known():
        if receive.lease is lease:
            yield f"receive:{receive.id}", receive
    for send in prefiller.rooms.live():
        if send.engine is not None and send.engine.lease is lease:
            yield f"send:{send.id}", send


def of_client(node: NodeView, number: int) -> Explanation | Refusal:
    """Who it is and what it holds; one that is gone may have left leases behind."""
    session = node.sessions.by_id.get(number)
    leases = [lease for lease in node.leases.leases.values() if lease.session == number]
    if session is None and not leases:
        return Refusal(Code.BAD_REQUEST, f"there is no client {number}: gone, or never was")
    receives = [part for part in node.decoder.open.parts.values() if part.session == number]
    sends = [part for part in node.prefiller.rooms.live() if part.session == number]
    biggest = heapq.nlargest(MAX_LINKS, leases, key=lambda one: one.held_pages)
    pages = sum(lease.held_pages for lease in leases)
    has = (
        f"{len(leases)} leases with {pages} pages of their own, {len(receives)} receives and "
        f"{len(sends)} sends under way"
    )
    sentence = f"client {number} is gone and has left {has}"
    if session is not None:
        sentence = f"client {number} is {session.name}{_stands(session, node.out.at_s)}: {has}"
    waiting = [waiter for waiter in node.admission.queue if waiter.claim.session == number]
    facts = [_lease_fact(node, lease) for lease in biggest]
    if session is not None and session.hang_up is not None:
        facts.insert(0, f"waits for {death_of(node, session)}")
    if number in node.leases.commits.by_word:
        facts.append(_counts_by_word(session))
    late = node.engine_copies.marks.of_session(number)
    facts += some_words([mark_words(node, wait) for wait in late], "copies wait for marks")
    if len(leases) > len(biggest):
        facts.append(f"and {len(leases) - len(biggest)} leases more")
    if waiting:
        oldest_s = node.out.at_s - min(waiter.since_s for waiter in waiting)
        facts.append(f"{len(waiting)} requests of it wait for room, the first for {oldest_s:.1f} s")
    row = client_rows(node).get(number)
    facts += plain_facts(node, CLIENT, row) if row is not None else []
    under_way = [f"receive:{receive.id}" for receive in receives] + [
        f"send:{send.id}" for send in sends
    ]
    return Explanation(
        sentence, tuple(facts), links_of(*lease_refs(biggest), *under_way[:MAX_LINKS])
    )


def _counts_by_word(session: Session | None) -> str:
    """Why a commit of it shares less than the tokens that it names."""
    counts = "a commit counts what was saved or said to be written, and no more"
    if session is not None and session.keeps_blocks:
        return f"its KV is in blocks of its own first: {counts}"
    return f"a process of it is not back after the restart, and may be saving blocks: {counts}"


def _stands(session: Session, now_s: float) -> str:
    """Whether it is served, and since when."""
    held, age_s = session.hang_up, now_s - session.since_s
    if held is not None:
        return f", hung up on for {now_s - held.since_s:.1f} s ({held.why.code.value})"
    pids = ", ".join(map(str, session.pids))
    if session.is_former:
        return f" (pid {pids}) of before the restart, and has not come back for {age_s:.1f} s"
    if session.is_outlived:
        return f", kept by {session.told_outlived(now_s)}"
    return f" (pid {pids}), attached for {age_s:.1f} s"


def _lease_fact(node: NodeView, lease: LeaseRecord) -> str:
    n_locked = lease.anchor.end_tokens if lease.anchor is not None else 0
    locked = f", locks {n_locked} cached tokens" if n_locked else ""
    said = describe_holder(node, lease)
    return f"{said}: {lease_word(lease)}, {lease.held_pages} pages{locked}"


def of_handoff(node: NodeView, kind: str, number: int) -> Explanation | Refusal:
    """A ``receive`` or a ``send``, or every part of a ``room``; delivered ones while they are."""

    def is_asked(part: ReceivePart | SendPart) -> bool:
        return number == (part.room if kind == "room" else part.id)

    receives = [part for part in node.decoder.open.known() if kind != "send" and is_asked(part)]
    sends = [send for send in node.prefiller.known() if kind != "receive" and is_asked(send)]
    if receives or sends:
        return _handoff(node, receives, sends, f"{kind}:{number}")
    why = f"there is no {kind} {number}: over, or never was; see its events"
    if kind == "room":
        served = node.prefiller.served_rooms.served(number, node.out.at_s)
        why = served.message if served else f"no open handoff in room {number} on this node"
    return Refusal(Code.BAD_REQUEST, why)


def _handoff(
    node: NodeView, receives: list[ReceivePart], sends: list[SendPart], asked: str
) -> Explanation:
    """Parts of one room: what each is at, for whom, and what it waits for."""
    parts: list[ReceivePart | SendPart] = [*receives, *sends]
    rows = [receive_row(node.leases, part) for part in receives]
    rows += [send_row(node.leases, part) for part in sends]
    states = [ROOM.state(node, row) for row in rows]
    room = states[0].room
    said: list[str] = []
    for part, row in zip(states, rows, strict=True):
        said += [_sentence(node, part), *_figures(part), *plain_facts(node, ROOM, row), *part.story]
    said += _slow_facts(node, sends)
    for waiting in waiting_states(node) if any(part.waiter for part in receives) else ():
        if waiting.room == room:
            said.append(f"in the queue: {waiting.why}")
            said += [f"held by {holder}" for holder in waiting.held_by]
    refs = [f"receive:{receive.id}" for receive in receives] + [f"send:{send.id}" for send in sends]
    refs = [ref for ref in (*refs, f"room:{room}") if ref != asked]
    leases = [part.lease for part in states if part.lease]
    sessions = [part.session for part in parts if part.session]
    peers = [part.peer for part in states if part.peer]
    marks = [mark for part in parts for mark in part.history.marks(node.out.at_s)]
    return Explanation(
        sentence=said[0],
        facts=tuple(said[1:]),
        links=links_of(
            *refs,
            *[f"lease:{number}" for number in leases],
            *[f"client:{number}" for number in sessions],
            *[f"peer:{name}" for name in peers],
        ),
        marks=tuple(sorted(marks, key=lambda mark: -mark.ago_s)),
    )


def _slow_facts(node: NodeView, sends: list[SendPart]) -> list[str]:
    """What of the ways that these take is slow, and what to do."""
    peers = [node.peers.by_name.get(name) for name in {send.peer: 0 for send in sends}]
    said = [slow_words(peer) for peer in peers if peer is not None]
    return [f"slow: {words}" for words in said if words]


def _sentence(node: NodeView, part: RoomState) -> str:
    direction = "from" if part.side == "decode" else "to"
    owner = f" by {part.owner}" if part.owner else ""
    return (
        f"room {part.room}: {part.state} on the {part.side} side{owner}, "
        f"{direction} {part.peer or 'nobody yet'}, "
        f"for {part.age_s:.1f} s; waits for {part.waiting_for or 'nothing'}"
    )


def _figures(part: RoomState) -> list[str]:
    said = [
        f"prompt {part.prompt_tokens} tokens, decode_prefix_len {part.decode_prefix_len}, "
        f"{amount(part.moved_bytes)} of {amount(part.total_bytes)} moved"
    ]
    if part.share:
        said.insert(0, part.share)
    if part.side == "prefill":
        said.append(
            f"{part.written_tokens} tokens computed, {part.posted_pages} of {part.total_pages} "
            f"pages posted, {part.outstanding_posts} posts under way"
        )
    return said


# ---- peers ---------------------------------------------------------------------------------------


RECENT_S = 60.0
"""So long it is told that a peer was refused, or refused something."""


def of_peer(node: NodeView, name: str) -> Explanation | Refusal:
    """One other daemon: how it is, since when, and what is open with it."""
    peers = node.peers
    dialed = next((dialed for dialed in peers.dialed.values() if dialed.name == name), None)
    peer = peers.by_name.get(name)
    if peer is None and dialed is None:
        known = ", ".join(peers.names()) or "nobody"
        return Refusal(Code.BAD_REQUEST, f"there is no peer {name!r}: this node knows {known}")
    receives = [part for part in node.decoder.open.parts.values() if part.peer == name]
    sends = [send for send in node.prefiller.known() if send.peer == name]
    trouble = peers.trouble(name)
    now_s = node.out.at_s
    facts = [f"its address is {dialed.address}" if dialed is not None else "it has dialed us"]
    facts += [f"nothing is heard of it: {trouble}"] if trouble else []
    if peer is not None:
        for said, what in (
            (peer.refused, "a Hello in its name was refused"),
            (peer.refuses, "it refused a message of ours"),
        ):
            if said.why != trouble and now_s - said.at_s < RECENT_S:
                facts.append(f"{what} {now_s - said.at_s:.1f} s ago: {said.why}")
    facts += _peer_facts(node, peer) if peer is not None else []
    facts += plain_facts(node, PEER, peer_rows(node)[name])
    quarantined = [
        lease
        for lease in node.leases.leases.values()
        if lease.quarantine is not None
        and any(writer.peer == name for writer in lease.quarantine.writers)
    ]
    if quarantined:
        pages = sum(lease.held_pages for lease in quarantined)
        facts.append(f"{pages} pages of {len(quarantined)} leases wait for it to settle")
    open_now = f"{len(receives)} receives and {len(sends)} sends under way"
    under_way = [f"receive:{receive.id}" for receive in receives] + [
        f"send:{send.id}" for send in sends
    ]
    return Explanation(
        f"{_how(node, name, peer)}, {open_now}",
        tuple(facts),
        links_of(
            *under_way[:MAX_LINKS], *[f"lease:{lease.id}" for lease in quarantined[:MAX_LINKS]]
        ),
    )


def _how(node: NodeView, name: str, peer: Peer | None) -> str:
    if peer is None:
        waited_s = node.out.at_s - node.started_s
        return f"peer {name} has not said Hello in the {waited_s:.1f} s that we have been here"
    silent_s = node.out.at_s - peer.heard_s
    was = "heard" if peer.life is Life.UP else "silent: last heard"
    return (
        f"peer {name} ({short(peer.incarnation)}) is {peer.life.value}, {was} {silent_s:.1f} s ago"
    )


def _shard_facts(settings: Settings, peer: Peer) -> list[str]:
    """What of the model it has, where that is not what we have, in one shard."""
    ours = shards_of(settings.spec)
    # Of one that is laid out otherwise no shards are known.
    if not peer.shards or (len(ours) == 1 and peer.shards == ours):
        return []
    return [
        f"shards: {len(peer.shards)} there, of {listed(lacking(peer.shards, ()))}, and {len(ours)} "
        f"here, of {listed(lacking(ours, ()))}; ours fill {len(peer.outgoing)} of theirs, theirs "
        f"{len(peer.incoming)} of ours"
    ]


def _way_facts(peer: Peer) -> list[str]:
    """How bytes travel to it, and what to do where that is slow."""
    if not peer.ways:
        return []
    slow = slow_words(peer)
    return [f"bytes to it: {way_words(peer)}", *([f"slow: {slow}"] if slow else [])]


def _peer_facts(node: NodeView, peer: Peer) -> list[str]:
    since_s = node.out.at_s - peer.agent_since_s
    agent = f" for {since_s:.1f} s" if peer.agent_since_s else ""
    said = epochs_words(node, peer), drain_words(peer, node.out.at_s)
    return [
        *filter(None, said),
        *pulls_waiting(node, peer),
        f"generation {peer.generation} of its transfer process; our agent: {agent_words(peer)}"
        f"{agent}",
        f"layout: {layout_words(peer)}",
        *_way_facts(peer),
        *_shard_facts(node.settings, peer),
        f"round trip {peer.round_trip_s * 1e3:.2f} ms",
    ]
