"""What each request of an operator does: it says what it changed, what it refused, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import effects, why
from kvd.core.invariants import faults
from kvd.core.owners import describe_holder
from kvd.core.report import snapshot
from kvd.core.sweep import pools
from kvd.errors import Code, Refusal
from kvd.wire import admin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.inputs import FromOperator
    from kvd.core.node import Node

UNLOCKED = "unlocked"
STRICT = "strict"
"""The flush mode that changes nothing when anything is locked."""


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
            admin.Audit: self._audit,
        }

    def request(self, got: FromOperator) -> None:
        """One request, one answer."""
        verb = self._verbs.get(type(got.message))
        answer: admin.AdminReply | Refusal
        if verb is None:
            answer = Refusal(Code.BAD_REQUEST, "this request is served by the shell")
        else:
            answer = verb(got.message)
        if isinstance(answer, Refusal):
            answer = admin.AdminFailed(got.message.call, answer)
        self._out.effects.append(effects.Report(got.operator, answer))

    def _status(self, got: admin.ShowStatus) -> admin.Status:
        return admin.Status(got.call, snapshot(self._node))

    def _why(self, got: admin.Why) -> admin.Because | Refusal:
        return why.because(self._node, got)

    def _tree(self, got: admin.ShowTree) -> admin.Tree:
        edges = why.in_display_order(self._node.leases.tree)
        by_edge = why.holders(self._node)
        shown = tuple(
            why.tree_node(self._node, edge, by_edge.get(edge.id, []))
            for edge in edges[: max(0, got.limit)]
        )
        return admin.Tree(got.call, shown, len(edges))

    def _flush(self, got: admin.Flush) -> admin.Report | Refusal:
        node = self._node
        if got.mode not in {UNLOCKED, STRICT}:
            return Refusal(
                Code.BAD_REQUEST,
                f"flush mode {got.mode!r} is none of {UNLOCKED}, {STRICT}",
                side=node.settings.name,
            )
        locked = [edge for edge in node.leases.tree.nodes() if edge.lock_ref]
        by_edge = why.holders(node)
        kept = tuple(
            f"node {edge.id} kept, {len(edge.pages) // 4} pages: "
            + "; ".join(describe_holder(node, lease) for lease in by_edge.get(edge.id, []))
            for edge in locked
        )
        if got.mode == STRICT and locked:
            return admin.Report(got.call, {"freed_pages": 0}, kept)
        freed, kept_pages = node.leases.flush()
        return admin.Report(got.call, {"freed_pages": freed, "locked_pages": kept_pages}, kept)

    def _evict(self, got: admin.Evict) -> admin.Report:
        node = self._node
        wanted = max(0, got.pages)
        freed = node.leases.evict(wanted, "operator")
        refused: tuple[str, ...] = ()
        if freed < wanted:
            locked = node.leases.tree.protected_pages
            rest = f"is locked ({locked} pages)" if locked else "is empty"
            refused = (f"{wanted - freed} of {wanted} pages: the rest of the cache {rest}",)
        return admin.Report(got.call, {"evicted_pages": freed}, refused)

    def _abort(self, got: admin.AbortRoom) -> admin.Report | Refusal:
        node = self._node
        refusal = Refusal(
            Code.ABORTED, f"an operator aborted it: {got.reason}", side=node.settings.name
        )
        receives = [part for part in node.decoder.parts.values() if part.room == got.room]
        send = node.prefiller.by_room.get(got.room)
        if not receives and send is None:
            return Refusal(Code.BAD_REQUEST, f"no open handoff in room {got.room} on this node")
        for part in receives:
            node.decoder.cancel(part, refusal)
        if send is not None:
            node.prefiller.give_up(send, refusal)
        return admin.Report(
            got.call, {"receives": len(receives), "sends": int(send is not None)}, ()
        )

    def _fence(self, got: admin.Fence) -> admin.Report:
        node = self._node
        draining = [one for one in node.leases.leases.values() if one.quarantine is not None]
        self._out.effects.append(effects.RestartTransfer("an operator fenced this node"))
        return admin.Report(
            got.call,
            {
                "quarantined_leases": len(draining),
                "quarantined_pages": sum(one.held_pages for one in draining),
            },
            (),
        )

    def _audit(self, got: admin.Audit) -> admin.Report:
        found = faults(self._node)
        self._node.audit.looked_at_all(found)
        table = self._node.leases
        return admin.Report(
            got.call,
            {
                "pages": sum(pool.total_pages for pool in pools(self._node)),
                "leases": len(table.leases),
                "nodes": sum(1 for _ in table.tree.nodes()),
                "violations": len(found),
            },
            tuple(fault.sentence for fault in found),
            self._node.audit.state(),
        )
