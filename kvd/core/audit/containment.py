"""What is done where a rule does not hold, so that a bug of ours costs what it touched and no more.

The rule: nothing is freed on a violation. What cannot be trusted is kept out of circulation until
the next process, whoever uses it is told, it is counted, and ``kvd why page`` says so.

    a page in two places     it is condemned; leases that have it are lost; a tree node that has it
                             is found by no prompt any more, and the leases that lock it are lost
    a page free and held     the free copy is taken out of the free list, who has it keeps it
    given back twice, ...    the pages of the whole call are condemned, the same for who has them
    a page that is none      the lease that names it is lost, the node that has it is found no more
    row, lock, what is       the lease is lost: its row is not what its engine computes on
      beside it is wrong
    too few locks on a node  raised to the leases that end there; too many are left as they are
    a node that does not fit found by no prompt any more, dropped when nobody locks it; who locks
      its tokens             it is lost
    wrong sums of the tree   counted again, or more would be given out than there is
    more promised than       the youngest promises end, until the rest can be kept; so it is after
      there is                 anything else of this table that has cost pages
    wrong sums of promises   counted again
    a node nobody evicts     put in the order of eviction again
    too few reads counted    raised to the posts and copies under way
    a receive, a send that   its engine is told that it failed; a post that its send does not know
      cannot go on             makes its last word say that bytes are in doubt
    a waiter of nobody       leaves the queue; one that is forgotten is asked again

*Lost* is a lease whose engine hears ``condemned``: its own pages are condemned, its sends and its
receive have failed, and all that is left to do with it is to release it, which frees nothing.

Only told of, because to act would be worse:

- a page in no place (``page-lost``): nobody has it, nobody will, and it is to be seen that one is
  lost for as long as it is;
- a lease without a holder, of a session or send that is gone (``holder-none``, ``holder-gone``,
  ``deferred``), a quarantine that nothing ends (``nameless``, ``lock-kept``, ``quarantine-leaked``,
  ``settling``), pages too many locked or read: they are out of circulation already, and to free
  them would be to believe the very register that is wrong;
- a post that is counted and not under way (``post-lost``) and handoffs that registers do not know
  of (``records``, ``by-handoff``, ``by-send``, ``failed``, ``former``, ``unproven``): to end them
  would need the register that lacks them; their deadlines and their peers' fences end them;
- what lies beside a node, where it is the node's and no lease's (``beside-order``,
  ``beside-evictable``, ``beside-gone``), a pool out of step (``lockstep``), and counts of the saved
  area (``saved-count``): nobody is given anything by them that is somebody else's.

It writes leases, which otherwise only the lease table does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.audit.backrefs import Backrefs
from kvd.core.audit.rules import Fault, missing_locks
from kvd.core.cache.lease import ARRIVAL, ENGINE
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.radix import add_locks, drop, hide, recount, subtree
from kvd.core.inspect.page_states import has_any, pool_named, pools_of, saved_pools_of
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_PAGES, Pages
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.cache.pages import Misgiven
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inspect.page_states import PoolPlaces
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable

MAX_REASONS = 256
"""Kept: one bug breaks many things, and the first ones say which."""

TOLD = ""
"""Nothing is done but to tell."""


class Condemned(msgspec.Struct, frozen=True):
    """Pages that were condemned together; ``component`` is empty for the first one."""

    component: str
    pages: Pages
    why: str


class Containment:
    """What to do about each check; ``contain`` says what was done."""

    def __init__(self, node: NodeView) -> None:
        self.condemned: list[Condemned] = []
        """Why, for whoever asks about a page; the first of them."""
        self._node = node

    def contain(self, fault: Fault) -> str:
        """Keep what is broken from everybody; in words what was done, empty if nothing was."""
        # Some checks carry the number of what they are about, so that each is a fault of its own.
        does = self._deeds().get(fault.check.rstrip("0123456789-"))
        done = TOLD if does is None else does(fault)
        # Pages that nobody gets any more may have been those that a lease was sure of.
        return "; ".join([said for said in (done, *self._node.leases.promises.cut()) if said])

    def _deeds(self) -> dict[str, Callable[[Fault], str]]:
        return {
            **dict.fromkeys(("page-double", "page-twice"), self._condemn_shared),
            "misgiven": self._condemn_misgiven,
            **dict.fromkeys(("page-stray", "null-page"), self._distrust),
            **dict.fromkeys(("unlocked", "owned", "row", "standing"), self._lose_named),
            **dict.fromkeys(("null-mapped", "stretch", "beside-row", "state"), self._lose_named),
            **dict.fromkeys(("buffer", "slots", "filling", "beside-record"), self._lose_named),
            **dict.fromkeys(("beside-locks", "beside-length"), self._distrust),
            **dict.fromkeys(("child-key", "end", "edge", "edge-pages"), self._distrust),
            "lock-count": self._raise_locks,
            **dict.fromkeys(("locks-grow", "lock-below-zero"), self._raise_locks),
            "totals": self._count_again,
            "promises": self._count_promises,
            "quotas": self._count_quotas,
            "not-in-order": self._put_in_order,
            "reads": self._raise_reads,
            **dict.fromkeys(("receive", "verify", "prefix", "ready"), self._fail_receive),
            **dict.fromkeys(("send", "cursor", "late-post", "post"), self._fail_send),
            "waiter": self._strike_waiters,
            "forgotten": self._ask_again,
            "queue-order": self._sort_queue,
        }

    # ---- pages -------------------------------------------------------------------------------

    def _condemn_shared(self, fault: Fault) -> str:
        """Whoever has one of these pages beside somebody else cannot trust it."""
        ids = np.frombuffer(fault.pages, "<u4")
        where = self._pool(fault.component)
        leases = [lease for lease, own in where.owned() if has_any(own, ids)]
        nodes = [edge for edge, own in where.cached() if has_any(own, ids)]
        # Free and once in use: to take it off the free list makes it true again, and costs nobody a
        # lease.
        if fault.check == "page-double" and self._is_sole(leases, nodes, fault):
            return f"{where.pool.withdraw(fault.pages)} pages no longer free"
        done = [f"{self._condemn(fault.component, fault.pages, fault)} pages condemned"]
        in_tree = np.isin(np.frombuffer(b"".join(where.at(nodes)), "<u4"), ids).sum()
        # What the tree still has of them counts as evictable, and must not be promised to anybody.
        where.pool.doomed_pages += int(in_tree)
        done += [self._lose(lease, fault) for lease in leases]
        done += [self._hide(edge, fault) for edge in nodes]
        return "; ".join([words for words in done if words])

    def _is_sole(self, leases: list[LeaseRecord], nodes: list[RadixNode], fault: Fault) -> bool:
        """Whether they are in the free list too, and otherwise once in one place."""
        if len(leases) + len(nodes) != 1:
            return False
        ids = np.frombuffer(fault.pages, "<u4")
        where = self._pool(fault.component)
        named = np.frombuffer(
            b"".join([own for _, own in (*where.owned(), *where.cached())]), "<u4"
        )
        return int(np.isin(named, ids).sum()) == ids.size

    def _condemn_misgiven(self, fault: Fault) -> str:
        """Whoever gave them is as doubtful as whoever else has them."""
        done = [self._condemn_shared(fault), self._lose_named(fault)]
        return "; ".join([words for words in done if words])

    def _distrust(self, fault: Fault) -> str:
        """The lease or the node that it names."""
        lease = self._node.leases.leases.get(fault.lease)
        edge = self._edge(fault.node) if lease is None else None
        if lease is not None:
            return self._lose(lease, fault)
        return self._hide(edge, fault) if edge is not None else TOLD

    def _condemn(self, component: str, pages: Pages, fault: Fault) -> int:
        if pages and len(self.condemned) < MAX_REASONS:
            self.condemned.append(Condemned(component, pages, fault.sentence))
        return self._pool(component).pool.condemn(pages)

    def why(self, component: str, page: int) -> str:
        """Why nobody gets this page, as far as it is still known."""
        wanted = np.array([page], "<u4")
        for condemned in self.condemned:
            if condemned.component == component and has_any(condemned.pages, wanted):
                return condemned.why
        return "one of many violations; the log has them all"

    def _pool(self, component: str) -> PoolPlaces:
        found = pool_named(self._node.leases, component)
        assert found is not None
        return found

    # ---- leases ------------------------------------------------------------------------------

    def _lose_named(self, fault: Fault) -> str:
        lease = self._node.leases.leases.get(fault.lease)
        return self._lose(lease, fault) if lease is not None else TOLD

    def _lose(self, lease: LeaseRecord, fault: Fault) -> str:
        """Nobody uses what it has any more, and nobody else ever gets it."""
        if lease.lost is not None:
            return TOLD
        node = self._node
        table = node.leases
        lease.lost = refusal = Refusal(
            Code.CONDEMNED,
            f"lease {lease.id} was found broken ({fault.sentence}): a bug of the daemon, its log "
            "has more, please report it. What its pages hold may be somebody else's; nobody gets "
            "them again; release it and open a new one",
            side=node.settings.name,
            numbers={"lease": lease.id},
        )
        # While its row says which pages are its own: below it is cut.
        n_pages = self._condemn("", lease.held, fault)
        for keeper in table.components.each:
            n_pages += self._condemn(keeper.component.name, keeper.own_pages(lease), fault)
        if ARRIVAL not in lease.holders and lease.quarantine is None:
            # Nobody has them; but where a remote may write, that it is this lease's has to be seen.
            lease.page_table = Pages(lease.page_table[: lease.owned * ID_BYTES])
            lease.deferred, lease.unswapped_from = NO_PAGES, None
        # Before its users hear of it: what they do next may end the lease.
        lease.cache = lease.is_whole = False  # nothing of it joins the tree as it ends
        table.promises.end(lease)
        # Nobody uses what is in quarantine: only its writer is waited for.
        if lease.quarantine is None:
            self._fail_users(lease, refusal)
        return f"lease {lease.id} is lost, {n_pages} pages condemned"

    def _fail_users(self, lease: LeaseRecord, refusal: Refusal) -> None:
        """Its engine, its sends, its receive and its place in the queue."""
        node = self._node
        if ENGINE in lease.holders and lease.session in node.sessions.by_id:
            node.out.answer(lease.session, client.LeaseLost(lease.id, refusal))
        # A list first: a send that is given up may leave its room at once.
        sends = [send for send in node.prefiller.rooms.live() if send.engine is not None]
        for send in [send for send in sends if send.engine and send.engine.lease is lease]:
            node.prefiller.give_up_send(send, refusal)
        if ARRIVAL in lease.holders:
            for attempt in list(node.decoder.open.attempts.values()):
                if attempt.lease is lease:
                    node.decoder.cancel_attempt(attempt, refusal)
        # Last: who is turned away lets others past, which are admitted in this call.
        queue = node.admission.queue
        resumes = [waiter for waiter in queue if waiter.claim.resumes == lease.id]
        node.admission.turn_away(resumes, refusal)

    def _raise_reads(self, fault: Fault) -> str:
        lease = self._node.leases.leases.get(fault.lease)
        under_way = Backrefs(self._node).reads[fault.lease]
        if lease is None or lease.reads >= under_way:
            return TOLD
        lease.reads = under_way
        return f"lease {lease.id} counts {under_way} reads now"

    # ---- the tree ----------------------------------------------------------------------------

    def _edge(self, number: int) -> RadixNode | None:
        tree = self._node.leases.tree
        known = [*tree.roots.values(), *tree.nodes()]
        return next((edge for edge in known if edge.id == number), None)

    def _hide(self, edge: RadixNode, fault: Fault) -> str:
        """No prompt finds it or what is below; whoever goes on from there is lost."""
        table = self._node.leases
        below = set(subtree(edge))
        # All that end below it too: their rows go through it.
        leases = [lease for lease in table.leases.values() if lease.anchor in below]
        done = [self._lose(lease, fault) for lease in leases]
        if edge.parent is None:
            return "; ".join(words for words in done if words)
        hide(table.tree, edge)
        # One that is locked stays where it is: whoever unlocks it walks up by its parents.
        if not any(edge.lock_ref for edge in below):
            pages = drop(table.tree, edge)
            table.return_pages(pages)
            done.append(f"{len(below)} nodes dropped")
        else:
            done.append(f"node {edge.id} is found by no prompt any more")
        # Less is found now than a waiter was matched with: it has to be matched again.
        table.growth += 1
        return "; ".join(words for words in done if words)

    def _raise_locks(self, fault: Fault) -> str:
        tree, refs = self._node.leases.tree, Backrefs(self._node)
        raised = 0
        edge = self._edge(fault.node)
        while edge is not None:
            missing = missing_locks(edge, refs.anchored)
            if missing > 0:
                add_locks(edge, missing)
                raised += missing
            # Up to the root, or a node would have more locks than the one above it (I2).
            edge = edge.parent
        if not raised:
            return TOLD
        recount(tree)
        return f"{raised} locks added"

    def _count_again(self, _: Fault) -> str:
        recount(self._node.leases.tree)
        return "counted again"

    def _count_promises(self, _: Fault) -> str:
        self._node.leases.promises.recount()
        return "counted again"

    def _count_quotas(self, _: Fault) -> str:
        quotas = self._node.leases.evictor.quotas
        if quotas is None:
            return TOLD
        quotas.count_again()
        return "counted again"

    def _put_in_order(self, fault: Fault) -> str:
        edge = self._edge(fault.node)
        if edge is None:
            return TOLD
        # A locked one too: its last unlock looks for it there.
        self._node.leases.tree.order.restore(edge)
        return "in the order of eviction again"

    # ---- handoffs and the queue --------------------------------------------------------------

    def _fail_receive(self, fault: Fault) -> str:
        decoder = self._node.decoder
        part = next((part for part in decoder.open.known() if part.id == fault.part), None)
        if part is None or part.ended is not None or part.waiter is not None:
            return TOLD
        decoder.fail_attempt(part.attempt, self._failed(fault))
        return f"receive {part.id} has failed for its engine"

    def _fail_send(self, fault: Fault) -> str:
        prefiller = self._node.prefiller
        part = next((send for send in prefiller.rooms.live() if send.id == fault.part), None)
        if part is None:
            return TOLD
        # Before it is given up: its last word must say so, or the peer would free pages at once
        # that a post unknown to us may still write.
        part.in_doubt = True
        prefiller.give_up_send(part, self._failed(fault))
        return f"send {part.id} is given up, its bytes are in doubt"

    def _failed(self, fault: Fault) -> Refusal:
        what = f"a bug of the daemon broke this handoff ({fault.sentence}); please report it"
        return Refusal(Code.CONDEMNED, what, side=self._node.settings.name)

    def _strike_waiters(self, _: Fault) -> str:
        node = self._node
        # Asked of the sessions and not of the fault, which names one of maybe many.
        refs = Backrefs(node)
        gone = [waiter for waiter in node.admission.queue if not refs.is_asked(waiter)]
        refusal = Refusal(Code.CLIENT_GONE, "its session is gone", side=node.settings.name)
        node.admission.turn_away(gone, refusal)
        return f"{len(gone)} requests left the queue"

    def _ask_again(self, _: Fault) -> str:
        admission = self._node.admission
        for name in list(admission.side_queue.by_name):
            admission.changed(name)
        return "asked again"

    def _sort_queue(self, _: Fault) -> str:
        self._node.admission.sort()
        return "sorted again"


def one_list(table: LeaseTable) -> list[Misgiven]:
    """Where all pools say from now on what was given back wrongly."""
    for places in (*pools_of(table), *saved_pools_of(table)):
        # One list, so that a step asks one place whether anything was given back wrongly.
        places.pool.misgiven = table.pool.misgiven
    return table.pool.misgiven


def misgiven_fault(table: LeaseTable, one: Misgiven) -> Fault:
    """I1 at the moment when it would have been broken."""
    giver = one.giver
    number, session = (giver.id, giver.session) if isinstance(giver, LeaseRecord) else (0, 0)
    who = f"lease {number}" if number else "a lease or the tree"
    component = "" if one.pool == table.pool.name else one.pool
    what = f"{who} gave back {one.why}{f' of {component}' if component else ''}"
    return Fault(
        rule="I1",
        check="misgiven",
        what=what,
        lease=number,
        pages=one.pages,
        component=component,
        session=session,
    )
