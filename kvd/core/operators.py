"""What each request of an operator does: it says what it changed, what it refused, and why.

The report of a verb that changes something is made first, by ``rehearse``, and then made true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import effects
from kvd.core.audit.invariants import faults
from kvd.core.audit.sweep import pools
from kvd.core.inspect import rehearse, why
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code, Refusal
from kvd.wire import admin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.inputs import FromOperator
    from kvd.core.node import Node


class Operators:
    """The verbs of the admin socket that touch the node's state."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._out = node.out
        # One verb per request type: Any, because each takes its own type of message.
        self._verbs: dict[type, Callable[[Any], admin.AdminReply | Refusal]] = {
            admin.ShowStatus: self._status,
            admin.ShowTree: self._tree,
            admin.Why: self._why,
            admin.Flush: self._flush,
            admin.Evict: self._evict,
            admin.AbortRoom: self._abort,
            admin.Fence: self._fence,
            admin.Drain: self._drain,
            admin.Undrain: self._undrain,
            admin.Rehearse: self._rehearse,
            admin.Audit: self._audit,
        }

    def request(self, got: FromOperator) -> None:
        """One request, one answer; where peers are asked first, it comes when they have spoken."""
        if isinstance(got.message, admin.AskOtherEnd):
            self._node.inquiries.ask(got, got.message)
            return
        verb = self._verbs.get(type(got.message))
        answer: admin.AdminReply | Refusal
        if verb is None:
            answer = Refusal(Code.BAD_REQUEST, "this request is served by the shell")
        else:
            answer = verb(got.message)
        if isinstance(answer, Refusal):
            answer = admin.AdminFailed(got.message.call, answer)
        self._out.effects.append(effects.AnswerOperator(got.operator, answer))

    def _status(self, got: admin.ShowStatus) -> admin.Status:
        return admin.Status(got.call, snapshot(self._node))

    def _why(self, got: admin.Why) -> admin.Because | Refusal:
        return why.because(self._node, got)

    def _tree(self, got: admin.ShowTree) -> admin.Tree:
        edges = why.in_display_order(self._node.leases.tree)
        by_edge = why.holders(self._node.leases)
        shown = tuple(
            why.tree_node(self._node, edge, by_edge.get(edge.id, []))
            for edge in edges[: max(0, got.limit)]
        )
        return admin.Tree(got.call, shown, len(edges))

    def _rehearse(self, got: admin.Rehearse) -> admin.Report | Refusal:
        return rehearse.rehearse(self._node, got)

    def _flush(self, got: admin.Flush) -> admin.Report | Refusal:
        told = rehearse.flush(self._node, got)
        if isinstance(told, Refusal) or (got.mode == rehearse.STRICT and told.refused):
            return told
        self._node.leases.flush()
        return told

    def _evict(self, got: admin.Evict) -> admin.Report:
        told = rehearse.evict(self._node, got)
        self._node.leases.evict(max(0, got.pages), "operator")
        return told

    def _abort(self, got: admin.AbortRoom) -> admin.Report | Refusal:
        node = self._node
        told = rehearse.abort(node, got)
        if isinstance(told, Refusal):
            return told
        refusal = Refusal(
            Code.ABORTED, f"an operator aborted it: {got.reason}", side=node.settings.name
        )
        for one in [one for one in node.decoder.receptions.values() if one.room == got.room]:
            node.decoder.cancel(one, refusal)
        for send in node.prefiller.rooms.of(got.room):
            node.prefiller.give_up(send, refusal)
        return told

    def _fence(self, got: admin.Fence) -> admin.Report:
        told = rehearse.fence(self._node, got)
        self._out.effects.append(effects.RestartTransfer("an operator fenced this node"))
        return told

    def _drain(self, got: admin.Drain) -> admin.Report | Refusal:
        told = rehearse.drain(self._node, got)
        if isinstance(told, admin.Report):
            self._node.drainer.begin(got.who, got.why, got.deadline_s)
        return told

    def _undrain(self, got: admin.Undrain) -> admin.Report | Refusal:
        told = rehearse.undrain(self._node, got)
        if isinstance(told, admin.Report):
            self._node.drainer.end()
        return told

    def _audit(self, got: admin.Audit) -> admin.Report:
        found = faults(self._node)
        self._node.audit.looked_at_all(found)
        table = self._node.leases
        return admin.Report(
            call=got.call,
            changed={
                "pages": sum(pool.total_pages for pool in pools(self._node.leases)),
                "leases": len(table.leases),
                "nodes": sum(1 for _ in table.tree.nodes()),
                "violations": len(found),
            },
            refused=tuple(fault.sentence for fault in found),
            standing=self._node.audit.state(),
        )
