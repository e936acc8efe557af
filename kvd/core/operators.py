"""What each request of an operator does: it says what it changed, what it refused, and why.

A verb that changes something is a plan, made by one function: its report, and what makes that
true. The verb carries its plan out in the step in which it was made; ``--dry-run`` (``Rehearse``)
only shows the report. So what is told is what is done: there is no second reckoning.

To add a verb: its message in ``wire.admin``, in ``AdminRequest`` and in ``Plannable`` there; a
function below and its line in ``PLANS`` (or in ``ANSWERS`` where it only reads); its command in
``kvd.cli.change``, with a row in ``VERBS``. A verb that
the shell serves (``Look``, ``ListEvents``, ``Record``, ``Reload``) is in ``daemon.admins``.

Pages in reports are those of the first component, as in every figure about leases. What follows
later, as when a peer settles, is not in the figures; a note says what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.core import effects
from kvd.core.audit.invariants import faults
from kvd.core.cache.eviction import victims
from kvd.core.cache.lease import ENGINE
from kvd.core.cache.namespaces import bad_name, base_of, keys_meant, quoted
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.handoff.receive import ASKING
from kvd.core.handoff.send import WRITING
from kvd.core.inspect import why
from kvd.core.inspect.page_states import pools_of
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import holders
from kvd.core.layout.spec import device_number, has_bytes
from kvd.core.leases.epochs import begin_epoch
from kvd.core.leases.kept_answers import EpochAnswer, FlushAnswer
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NULL_PAGE, amount, pack_ids, short
from kvd.wire import admin

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inputs import FromOperator
    from kvd.core.inspect.view import NodeView
    from kvd.core.node_parts import NodeParts

UNLOCKED = "unlocked"
STRICT = "strict"
"""The flush mode that changes nothing when anything is locked."""

MAX_NOTES = 16
"""Of what would happen, in words: a screen of them; the figures count everything."""


class Operators:
    """The verbs of the admin socket that touch the node's state."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._out = node.out

    def request(self, got: FromOperator) -> None:
        """One request, one answer; where peers are asked first, it comes when they have spoken."""
        if isinstance(got.message, admin.AskOtherEnd):
            self._node.inquiries.ask(got, got.message)
            return
        answer = self._answer(got.message)
        if isinstance(answer, Refusal):
            answer = admin.AdminFailed(got.message.call, answer)
        elif isinstance(answer, admin.Report):
            self._tell_when_kept(got, answer)
            return
        self._out.effects.append(effects.AnswerOperator(got.operator, answer))

    def _tell_when_kept(self, got: FromOperator, report: admin.Report) -> None:
        """What holds over a restart is told when it is on disk, all else at once."""
        message, operator, now_s = got.message, got.operator, self._out.at_s
        answers = self._node.kept_answers
        if isinstance(message, admin.RaiseEpoch):
            base = base_of(message.namespace)
            answers.answer(EpochAnswer(base, now_s, report=report, operator=operator))
        elif isinstance(message, admin.Flush):
            namespace = message.namespace
            answers.answer(FlushAnswer(namespace, now_s, report=report, operator=operator))
        else:
            self._out.effects.append(effects.AnswerOperator(operator, report))

    def _answer(self, message: Any) -> admin.AdminReply | Refusal:
        """Any: each verb takes its own type of message."""
        node = self._node
        if type(message) in PLANS:
            plan = PLANS[type(message)](node, message)
            if isinstance(plan, Refusal):
                return plan
            # In the same step, so nothing has come between what is told and what is done.
            plan.carry_out()
            return plan.report
        answer = ANSWERS.get(type(message))
        if answer is None:
            return Refusal(Code.BAD_REQUEST, "this request is served by the shell")
        return answer(node, message)


# ---- verbs that only read ------------------------------------------------------------------------


def status(node: NodeParts, got: admin.ShowStatus) -> admin.Status:
    """Everything there is to see."""
    return admin.Status(got.call, snapshot(node))


def tree(node: NodeParts, got: admin.ShowTree) -> admin.Tree:
    """The first nodes in display order, and how many there are."""
    edges = why.in_display_order(node.leases.tree)
    by_edge = holders(node.leases)
    shown = tuple(
        why.tree_node(node, edge, by_edge.get(edge.id, [])) for edge in edges[: max(0, got.limit)]
    )
    return admin.Tree(got.call, shown, len(edges))


def audit(node: NodeParts, got: admin.Audit) -> admin.Report:
    """Every rule at once; as good as a sweep of the standing audit, which hears of it."""
    found = faults(node)
    node.audit.looked_at_all(found)
    table = node.leases
    return admin.Report(
        call=got.call,
        changed={
            "pages": sum(places.pool.total_pages for places in pools_of(table)),
            "leases": len(table.leases),
            "nodes": sum(1 for _ in table.tree.nodes()),
            "violations": len(found),
        },
        refused=tuple(fault.sentence for fault in found),
        standing=node.audit.state(),
    )


# ---- plans -----------------------------------------------------------------------------------


class VerbPlan(msgspec.Struct, frozen=True):
    """What a verb would report now, and what makes it true; it must not outlive its step."""

    report: admin.Report
    carry_out: Callable[[], object]


def _nothing() -> None:
    """What is refused as a whole."""


def rehearse(node: NodeView, got: admin.Rehearse) -> admin.Report | Refusal:
    """What ``got.verb`` would answer now; nothing is changed, not even an order."""
    plan = PLANS[type(got.verb)](node, got.verb)
    if isinstance(plan, Refusal):
        return plan
    told = plan.report
    return admin.Report(got.call, told.changed, told.refused, notes=told.notes)


def flush(node: NodeView, got: admin.Flush) -> VerbPlan | Refusal:
    """Drop what nobody locks; what is locked is refused, with its holders."""
    if got.mode not in {UNLOCKED, STRICT}:
        return Refusal(
            Code.BAD_REQUEST,
            f"flush mode {got.mode!r} is none of {UNLOCKED}, {STRICT}",
            side=node.settings.name,
        )
    keys, namespace = None, got.namespace
    if namespace is not None:
        refusal = bad_name(namespace, node.settings.name)
        if refusal is not None:
            return refusal
        keys = keys_meant(namespace, node.leases.tree.roots)
    kept = why.locked_words(node, keys)
    if got.mode == STRICT and kept:
        return VerbPlan(admin.Report(got.call, {"freed_pages": 0}, kept), _nothing)
    changed = _flushed_pages(node, keys)
    return VerbPlan(
        admin.Report(got.call, changed, kept), lambda: node.tiers.flush(keys, namespace)
    )


def raise_epoch(node: NodeView, got: admin.RaiseEpoch) -> VerbPlan | Refusal:
    """What is cached of a base is never found again, and dropped as far as nobody locks it."""
    epochs = node.epochs
    refusal = epochs.flaw(got.namespace, got.epoch)
    if refusal is not None:
        return refusal
    base, epoch = base_of(got.namespace), epochs.after(got.namespace, got.epoch)
    before = epochs.now(base)
    if epoch == before:
        note = f"{base!r} is in epoch {before} already"
        return VerbPlan(admin.Report(got.call, {"freed_pages": 0}, (), notes=(note,)), _nothing)
    keys = keys_meant(base, node.leases.tree.roots)
    sends = node.prefiller.waiting_of_base(base)
    notes = [f"{base!r} and its members ({base}#...) go from epoch {before} to {epoch}"]
    notes += [f"{_said_of_send(part, _freed_by_sender(part))}: it ends" for part in sends]
    # Of these a lease ends that nobody else has, and what it locks is dropped.
    ending = {f"send {part.id}" for part in sends}
    over = {lease.id for lease in node.leases.leases.values() if lease.holders <= ending}
    over |= {pin.lease.id for pin in node.pins.of_base(base) if pin.lease is not None}
    notes += why.locked_words(node, keys, over)
    report = admin.Report(
        got.call, _flushed_pages(node, keys, over), (), notes=_bounded(notes, len(notes))
    )

    def begin() -> None:
        who = "an operator"
        begin_epoch(epochs, node.prefiller, node.out, base=base, epoch=epoch, who=who)
        node.pins.epoch_over(base)
        node.tiers.end_epochs(keys, base)

    return VerbPlan(report, begin)


def _flushed_pages(
    node: NodeView, keys: Collection[str] | None, over: Collection[int] = ()
) -> dict[str, int]:
    """Pages that a flush drops and keeps; ``over``: the leases that have ended by then."""
    tree = node.leases.tree
    if keys is None:
        return {"freed_pages": tree.evictable_pages, "locked_pages": tree.protected_pages}
    by_edge = holders(node.leases) if over else {}
    edges = list(tree.nodes(keys))
    locked = 0
    for edge in edges:
        left = [lease for lease in by_edge.get(edge.id, []) if lease.id not in over]
        if edge.lock_ref if not over else left:
            locked += edge.n_pages
    return {"freed_pages": sum([edge.n_pages for edge in edges]) - locked, "locked_pages": locked}


def pin(node: NodeView, got: admin.Pin) -> VerbPlan | Refusal:
    """Keep the path to a node of the tree, or to the one that a page is in."""
    tree, edge = node.leases.tree, _pinnable(node, got)
    if edge is None:
        return Refusal(Code.BAD_REQUEST, f"there is no cached {got.kind} {got.id}: kvd tree")
    refusal = node.pins.flaw(got.ttl_s)
    if refusal is not None:
        return refusal
    tokens, pages = tree.path_tokens(edge), len(tree.path_pages(edge)) // ID_BYTES
    report = admin.Report(
        got.call,
        {"pinned_tokens": edge.end_tokens, "pinned_pages": pages},
        (),
        notes=(f"for {got.ttl_s:g} s, as {got.who}, all that leads to node {edge.id}",),
    )
    return VerbPlan(report, lambda: node.pins.pin(0, got.who, edge.namespace, tokens, got.ttl_s))


def _pinnable(node: NodeView, got: admin.Pin) -> RadixNode | None:
    """The node of the tree that is named, if there is one."""
    leases = node.leases
    if got.kind == "node":
        return next((edge for edge in leases.tree.nodes() if edge.id == got.id), None)
    # The number is an operator's: what is no page of the pool need not even fit into a page id.
    if got.kind != "page" or not NULL_PAGE < got.id < leases.pool.total_pages:
        return None
    wanted = pack_ids([got.id])
    return next((edge for edge in leases.tree.nodes() if why.has_page(edge.pages, wanted)), None)


def unpin(node: NodeView, got: admin.Unpin) -> VerbPlan | Refusal:
    """It is over, whosever it is."""
    known = node.pins.by_id.get(got.pin)
    if known is None:
        return Refusal(Code.BAD_REQUEST, f"there is no pin {got.pin}: kvd pin shows all")
    note = f"pin {known.id} of {known.owner}, {known.tokens} tokens"
    report = admin.Report(got.call, {"unpinned": 1}, (), notes=(note,))
    return VerbPlan(report, lambda: node.pins.unpin(got.pin))


def evict(node: NodeView, got: admin.Evict) -> VerbPlan:
    """Whole unlocked leaves, in the order of eviction, until so many pages are out."""
    tree = node.leases.tree
    wanted = max(0, got.pages)
    going = victims(tree.order, min(wanted, tree.evictable_pages) * ID_BYTES)
    freed = sum(len(edge.pages) for edge in going) // ID_BYTES
    refused: tuple[str, ...] = ()
    if freed < wanted:
        locked = tree.protected_pages
        rest = f"is locked ({locked} pages)" if locked else "is empty"
        refused = (f"{wanted - freed} of {wanted} pages: the rest of the cache {rest}",)
    notes = _bounded([_said_of_victim(node, edge) for edge in going[:MAX_NOTES]], len(going))
    report = admin.Report(got.call, {"evicted_pages": freed}, refused, notes=notes)
    # By the pages of these victims, not by dropping them one by one: the order also puts behind
    # them the locked nodes that it passes, and stays the one that evicts for a lease.
    return VerbPlan(report, lambda: node.leases.evictor.evict(freed, "operator"))


def _said_of_victim(node: NodeView, edge: RadixNode) -> str:
    return (
        f"node {edge.id} goes, {edge.n_pages} pages, tokens to {edge.end_tokens}"
        f"{f' of namespace {quoted(edge.namespace)}' if edge.namespace else ''}, "
        f"last used {node.out.at_s - edge.touched_at:.1f} s ago"
    )


# ---- handoffs --------------------------------------------------------------------------------


def abort(node: NodeView, got: admin.AbortRoom) -> VerbPlan | Refusal:
    """Give up every part of the room; pages that a remote may write go to quarantine."""
    receives = [part for part in node.decoder.open.parts.values() if part.room == got.room]
    sends = node.prefiller.rooms.parts_of(got.room)
    if not receives and not sends:
        return Refusal(Code.BAD_REQUEST, f"no open handoff in room {got.room} on this node")
    drained = {
        part.lease.id: part.lease
        for part in receives
        if part.lease is not None and _would_drain(part)
    }
    notes = [_said_of_receive(part) for part in receives]
    notes += [_said_of_send(part, _freed_by_sender(part)) for part in sends]
    changed = {
        "receives": len(receives),
        "sends": len(sends),
        "freed_pages": sum(map(_freed_by_sender, sends)),
        "quarantined_pages": sum(lease.held_pages for lease in drained.values()),
    }
    # By attempt and not by part: giving up one source gives up the others.
    attempts = [
        attempt for attempt in node.decoder.open.attempts.values() if attempt.room == got.room
    ]
    refusal = Refusal(
        Code.ABORTED, f"an operator aborted it: {got.reason}", side=node.settings.name
    )

    def give_up() -> None:
        for attempt in attempts:
            node.decoder.cancel_attempt(attempt, refusal)
        for send in sends:
            node.prefiller.give_up_send(send, refusal)

    report = admin.Report(got.call, changed, (), notes=_bounded(notes, len(notes)))
    return VerbPlan(report, give_up)


def _would_drain(part: ReceivePart) -> bool:
    """Whether the writer may still write when the part is given up now."""
    return part.state in ASKING and part.ended is None


def _said_of_receive(part: ReceivePart) -> str:
    lease = part.lease
    if lease is None:
        return f"receive {part.id} leaves the queue: it holds nothing"
    what = f"receive {part.id}, {lease.held_pages} pages of lease {lease.id}"
    writer = f"{part.peer} ({short(part.incarnation)})"
    if _would_drain(part):
        return f"{what}: in quarantine until {writer} settles or restarts, or a fence"
    if part.state is Decode.DRAINING:
        return f"{what}: given up already, in quarantine until {writer} settles or restarts"
    if any(_would_drain(each) for each in part.attempt.parts):
        return f"{what}: {part.peer} has sent all of its part, which is dropped"
    return f"{what}: everything has arrived; they are verified first, and then let go"


def _freed_by_sender(part: SendPart) -> int:
    """Pages that nobody needs when the send is given up now."""
    if part.engine is None or part.outstanding or part.state is Prefill.DRAINING:
        return 0
    lease: LeaseRecord = part.engine.lease
    return lease.held_pages if lease.holders == {f"send {part.id}"} else 0


def _said_of_send(part: SendPart, freed: int) -> str:
    who = f"send {part.id} to {part.peer or 'nobody yet'}"
    if part.engine is None:
        return f"{who}: no engine has opened it, it holds nothing"
    lease = part.engine.lease
    if part.outstanding:
        posts = f"{len(part.outstanding)} posts that read them are over"
        return f"{who}: the pages of lease {lease.id} stay until {posts}"
    if freed:
        return f"{who}: {freed} pages of lease {lease.id} are free"
    others = ", ".join(sorted(lease.holders - {f"send {part.id}"}))
    return f"{who}: lease {lease.id} stays with {others or 'nobody, and has no pages of its own'}"


def fence(node: NodeView, got: admin.Fence) -> VerbPlan:
    """Restart the transfer process: what is under way through it ends, no quarantine outlives it.

    A receive is cut because its pages cannot be reached any more; the peer says so when it hears
    of the new generation. A send is cut if one of its posts is under way.
    """
    draining = [lease for lease in node.leases.leases.values() if lease.quarantine is not None]
    receives = [part for part in node.decoder.open.parts.values() if part.state in ASKING]
    sends = [
        part for part in node.prefiller.rooms.live() if part.state in WRITING and part.outstanding
    ]
    notes = [
        f"room {part.room}: receive {part.id} from {part.peer} is cut, "
        f"{amount(part.moved_bytes)} of {amount(part.total_bytes)} had arrived"
        for part in receives[:MAX_NOTES]
    ]
    notes += [
        f"room {part.room}: send {part.id} to {part.peer} is cut, {len(part.outstanding)} posts "
        "under way"
        for part in sends[:MAX_NOTES]
    ]
    parts = node.settings.spec.components
    if any(has_bytes(part) and device_number(part) is not None for part in parts):
        ends = (
            "the pool lies on a device, in memory of the transfer process: this daemon ends with "
            "it (status 1), and the next one has an empty pool"
        )
        notes.insert(0, ends)
    changed = {
        "quarantined_leases": len(draining),
        "quarantined_pages": sum(lease.held_pages for lease in draining),
        "receives_cut": len(receives),
        "sends_cut": len(sends),
    }
    told = _bounded(notes, len(receives) + len(sends))
    # An order and nothing else: what it ends, ends when ``TransferGone`` says that it is reaped.
    restart = effects.RestartTransfer("an operator fenced this node")
    return VerbPlan(
        admin.Report(got.call, changed, (), notes=told), lambda: node.out.effects.append(restart)
    )


# ---- the node --------------------------------------------------------------------------------


def drain(node: NodeView, got: admin.Drain) -> VerbPlan | Refusal:
    """Refuse those who wait for something new; what is under way goes on, leases stay."""
    refusal = _is_stopping(node)
    if refusal is not None:
        return refusal
    drainer = node.drainer
    waiting, waiting_sends = drainer.would_refuse()
    receives, sends = drainer.under_way()
    notes = [f"room {part.room}: receive {part.id} from {part.peer} goes on" for part in receives]
    notes += [f"room {part.room}: send {part.id} to {part.peer} goes on" for part in sends]
    notes = notes[:MAX_NOTES]
    leases = [lease for lease in node.leases.leases.values() if ENGINE in lease.holders]
    changed = {
        "refused_waiting": len(waiting),
        "refused_sends": len(waiting_sends),
        "receives_under_way": len(receives),
        "sends_under_way": len(sends),
        "leases_kept": len(leases),
    }
    until = f"given up after {got.deadline_s:g} s" if got.deadline_s > 0 else "never given up"
    told = _bounded(notes, len(receives) + len(sends))
    report = admin.Report(got.call, changed, (), notes=(*told, f"what is under way is {until}"))
    return VerbPlan(report, lambda: drainer.begin_drain(got.who, got.why, got.deadline_s))


def undrain(node: NodeView, got: admin.Undrain) -> VerbPlan | Refusal:
    """Begin new things again."""
    refusal = _is_stopping(node)
    if refusal is not None:
        return refusal
    drainer = node.drainer
    note = f"{drainer.words()}, and serves again" if drainer.drain else "nothing was drained here"
    changed = {"drains_ended": int(drainer.drain is not None)}
    return VerbPlan(admin.Report(got.call, changed, (), notes=(note,)), drainer.end_drain)


def _is_stopping(node: NodeView) -> Refusal | None:
    drainer = node.drainer
    if drainer.drain is None or not drainer.drain.is_stop:
        return None
    return Refusal(
        Code.WRONG_STATE,
        f"{drainer.words()}: that cannot be taken back, start it again",
        side=node.settings.name,
    )


def _bounded(notes: list[str], total: int) -> tuple[str, ...]:
    """The first of ``total`` notes, and how many more there are."""
    if total <= MAX_NOTES:
        return tuple(notes)
    return (*notes[:MAX_NOTES], f"and {total - MAX_NOTES} more")


# One function per verb: Any, because each takes its own type of message.
PLANS: dict[type, Callable[[NodeView, Any], VerbPlan | Refusal]] = {
    admin.Flush: flush,
    admin.RaiseEpoch: raise_epoch,
    admin.Evict: evict,
    admin.Pin: pin,
    admin.Unpin: unpin,
    admin.AbortRoom: abort,
    admin.Fence: fence,
    admin.Drain: drain,
    admin.Undrain: undrain,
}

ANSWERS: dict[type, Callable[[NodeParts, Any], admin.AdminReply | Refusal]] = {
    admin.ShowStatus: status,
    admin.ShowTree: tree,
    admin.Why: why.because,
    admin.Rehearse: rehearse,
    admin.Audit: audit,
}
