"""What the audit has found, and for how long it has been so.

A fault is told once, as an event that names lease, node, owner and the last transitions; again when
it changes, but not more often than an operator can read. What the next whole look does not see any
more is healed, and stays listed as such.

What must not live here: what is a fault (``rules``, ``component_rules``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.core import effects
from kvd.core.audit.containment import Containment
from kvd.core.inspect.why import holders
from kvd.core.leases.owners import describe_holder, owner_of
from kvd.types import count, page_ids
from kvd.wire import events, snapshot

if TYPE_CHECKING:
    from kvd.core.audit.rules import Fault, Key
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inspect.view import NodeView

MAX_FINDINGS = 64
"""Kept; further ones are counted. One bug breaks many things, and the first ones say which."""

TELL_AGAIN_S = 10.0
"""A finding whose figures change with every look is told this often."""

PAGES_NAMED = 8
HOLDERS_NAMED = 3


@dataclass(slots=True, eq=False, repr=False)
class AuditFinding:
    """One fault over time. ``story`` is what the core knows, ``recalled`` what the shell heard.

    ``done`` is what was done about it when it was first seen: empty where it was only told.
    """

    id: int
    fault: Fault
    first_seen_s: float
    last_seen_s: float
    told_s: float
    is_broken: bool = True
    done: str = ""
    look: int = 0
    """The last whole look that saw it."""
    owner: str = ""
    pid: int = 0
    room: int = 0
    story: tuple[str, ...] = ()
    recalled: tuple[str, ...] = ()


class Findings:
    """By fault. Invariant: at most ``MAX_FINDINGS``, and a broken one never gives way."""

    def __init__(self, node: NodeView) -> None:
        self.by_key: dict[Key, AuditFinding] = {}
        self.containment = Containment(node)
        self._node = node
        self._out = node.out
        self._last_id = 0
        self.violations = 0
        """Told since the incarnation began; must stay 0."""
        self._untold: dict[Key, int] = {}
        """Those beyond ``MAX_FINDINGS``, by the look that saw them last."""

    @property
    def broken(self) -> int:
        """How many are there now; must stay 0."""
        return sum(finding.is_broken for finding in self.by_key.values()) + len(self._untold)

    def saw(self, fault: Fault, look: int) -> None:
        """This does not hold."""
        now_s = self._out.at_s
        found = self.by_key.get(fault.key)
        # Counted, so that the number of what is broken is right where the list of it is full.
        if found is None and not self._has_room():
            self._untold[fault.key] = look
            return
        is_news = found is None or not found.is_broken
        if found is None:
            self._last_id += 1
            found = self.by_key[fault.key] = AuditFinding(self._last_id, fault, now_s, now_s, now_s)
        # By its sentence: the key is the same while figures in it grow.
        has_changed = fault.what != found.fault.what and now_s >= found.told_s + TELL_AGAIN_S
        found.fault = fault
        found.is_broken = True
        found.last_seen_s = now_s
        found.look = look
        if is_news:
            # Whose it is first: containment may take the lease or the part off its registers.
            self._describe(found)
            found.done = self.containment.contain(fault)
        # Told after it is contained, so that the event says what was done.
        if is_news or has_changed:
            self._tell(found)

    def looked(self, look: int) -> None:
        """That look is over: what it did not see is healed."""
        self._untold = {key: seen for key, seen in self._untold.items() if seen >= look}
        for found in self.by_key.values():
            # Only a whole look heals: a part of one did not see most things.
            if found.is_broken and found.look < look:
                found.is_broken = False
                lasted_s = self._out.at_s - found.first_seen_s
                what = found.fault.sentence
                self._out.emit(events.ViolationHealed(what=what, lasted_s=lasted_s))

    def recalled(self, finding_id: int, lines: tuple[str, ...]) -> None:
        """The last events about it, as the shell remembers them."""
        for found in self.by_key.values():
            if found.id == finding_id:
                found.recalled = lines

    def states(self) -> tuple[snapshot.Finding, ...]:
        """All of them, the broken ones first."""
        kept = sorted(self.by_key.values(), key=lambda one: (not one.is_broken, one.id))
        return tuple(self._state(found) for found in kept)

    def _has_room(self) -> bool:
        if len(self.by_key) >= MAX_FINDINGS:
            # A broken one never gives way: forgotten, it would be told as news with every look.
            healed = next(
                (key for key, finding in self.by_key.items() if not finding.is_broken), None
            )
            if healed is None:
                return False
            del self.by_key[healed]
        return True

    def _tell(self, found: AuditFinding) -> None:
        """Who it is about, and what was done, for everybody."""
        out, fault = self._out, found.fault
        found.told_s = out.at_s
        self.violations += 1
        out.emit(
            events.Violation(
                what=fault.sentence,
                rule=fault.rule,
                lease=fault.lease,
                tree_node=fault.node,
                owner=found.owner,
                pid=found.pid,
                room=found.room,
                pages=count(fault.pages),
                transitions=found.story,
                done=found.done,
            )
        )
        out.effects.append(
            effects.Recall(finding=found.id, lease=fault.lease, node=fault.node, room=found.room)
        )

    def _describe(self, found: AuditFinding) -> None:
        node, fault = self._node, found.fault
        lease = node.leases.leases.get(fault.lease)
        part = self._part(fault)
        session = fault.session
        lines: list[str] = []
        if lease is not None:
            session, found.room = lease.session, lease.room
            lines.append(describe_holder(node, lease))
        elif fault.node:
            crossing = holders(node.leases).get(fault.node, [])
            session = crossing[0].session if crossing else 0
            lines += [
                f"locked by {describe_holder(node, holder)}" for holder in crossing[:HOLDERS_NAMED]
            ]
        if part is not None:
            session, found.room = part.session or session, part.room
            lines += part.history.lines(self._out.at_s)
        if session:
            found.owner, found.pid = owner_of(node, session)
        found.story = tuple(lines)

    def _part(self, fault: Fault) -> ReceivePart | SendPart | None:
        """The part that it is about, or that its lease belongs to."""
        decoder, prefiller = self._node.decoder, self._node.prefiller
        prefill = prefiller.known()
        for receive in decoder.open.known():
            if fault.side != "prefill" and _is_about(fault, receive.id, receive.lease):
                return receive
        for send in prefill:
            lease = send.engine.lease if send.engine is not None else None
            if fault.side != "decode" and _is_about(fault, send.id, lease):
                return send
        return None

    def _state(self, found: AuditFinding) -> snapshot.Finding:
        fault, now_s = found.fault, self._out.at_s
        return snapshot.Finding(
            rule=fault.rule,
            check=fault.check,
            what=fault.what,
            state="broken" if found.is_broken else "healed",
            lease=fault.lease,
            node=fault.node,
            owner=found.owner,
            pid=found.pid,
            room=found.room,
            pages=count(fault.pages),
            first_pages=tuple(page_ids(fault.pages)[:PAGES_NAMED]),
            first_seen_ago_s=now_s - found.first_seen_s,
            last_seen_ago_s=now_s - found.last_seen_s,
            transitions=(*found.story, *found.recalled),
            component=fault.component,
            done=found.done,
        )


def _is_about(fault: Fault, part: int, lease: LeaseRecord | None) -> bool:
    if fault.side:
        return fault.part == part
    return lease is not None and lease.id == fault.lease
