"""What is remembered from look to look, of what happened lately, and of a node's locks.

``LastMoved``, ``Biggest`` and ``Since`` compare looks; they are bounded by what the node has open
now, and found out again after a restart. ``Recent`` is a subscriber of the bus: bounded, and 0.4 us
a lease. ``lock_changes`` tells from events how a node of the tree came to its locks.

A lease that locks anything in a node's subtree locks the node. Events name the node at whose end a
lease's lock is, so those that name one of the present subtree are about this node, and the changes
add up to its ``lock_ref``, as far back as events go. Of nodes evicted since no event is known to be
about it any more; who locked them has let go, so a gain and a loss are missing together.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.console.holders import biggest_owners
from kvd.types import amount
from kvd.wire import events
from kvd.wire.admin import AdminFailed, Because, Mark, Why
from kvd.wire.console import Latency, Sources
from kvd.wire.events import DELIVERED, WORK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.handoff.parts import SendPart
    from kvd.core.inspect.view import NodeView
    from kvd.wire.admin import AdminReply
    from kvd.wire.console import Holder
    from kvd.wire.events import Event, HandoffEnded, MessageRefused


LOOK_EVERY_S = 0.2
"""How often bytes are compared: a part that moves is never called still for longer."""
RANK_EVERY_S = 2.0
"""Ranking takes a look at all leases, some 5 ms for ten thousand."""

Seen = tuple[int, float]
"""Bytes of a part, and when they, or its state, last changed."""


class LastMoved:
    """When each open handoff last moved: by its own record, and by what looks have seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], Seen] = {}
        """By side and part."""
        self._at_s = float("-inf")

    def look(self, node: NodeView, now_s: float) -> None:
        """Compare with the last look, unless that was just now; one look at all open parts."""
        prefiller = node.prefiller
        if now_s - self._at_s < LOOK_EVERY_S:
            return
        self._at_s = now_s
        before, self._seen = self._seen, {}
        for receive in node.decoder.open.parts.values():
            known = before.get(("decode", receive.id))
            last_s, n_bytes = receive.history.last_s, receive.moved_bytes
            if known is None:
                known = n_bytes, now_s if n_bytes else last_s
            self._seen["decode", receive.id] = _next(known, n_bytes, last_s, now_s)
        live_bytes = prefiller.posts.live_bytes
        for send in prefiller.known():
            known = before.get(("prefill", send.id))
            last_s, n_bytes = send.history.last_s, live_bytes(send)
            if known is None:
                known = n_bytes, _first_seen(send, n_bytes, last_s, now_s)
            self._seen["prefill", send.id] = _next(known, n_bytes, last_s, now_s)

    def moved_s(self, side: str, part: int) -> float | None:
        """When that part last moved; None for one that was not looked at."""
        found = self._seen.get((side, part))
        return found[1] if found is not None else None


def _next(known: Seen, n_bytes: int, last_s: float, now_s: float) -> Seen:
    before, moved_s = known
    if n_bytes != before:
        return n_bytes, now_s
    return known if last_s <= moved_s else (n_bytes, last_s)


def _first_seen(send: SendPart, n_bytes: int, last_s: float, now_s: float) -> float:
    """Posts know since when not a byte of theirs has moved."""
    flow = send.flow
    if send.outstanding and not flow.moved_bytes:
        return max(last_s, flow.since_s)
    return now_s if n_bytes else last_s


class Biggest:
    """Who holds the most pages of each component, ranked now and then."""

    def __init__(self, is_alive: Callable[[int], bool]) -> None:
        self._is_alive = is_alive
        self._found: dict[str, tuple[float, tuple[Holder, ...]]] = {}

    def of(self, node: NodeView, now_s: float, budget: str) -> tuple[Holder, ...]:
        """As of ``RANK_EVERY_S`` ago at most."""
        at_s, holders = self._found.get(budget, (float("-inf"), ()))
        if now_s - at_s >= RANK_EVERY_S:
            holders = tuple(biggest_owners(node, budget, self._is_alive))
            self._found[budget] = now_s, holders
        return holders


class Since:
    """Since when something has been so, for what the node itself does not date.

    Who looks asks for all that is so, and says when that was all.
    """

    def __init__(self) -> None:
        self._first_s: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def of(self, key: str, now_s: float) -> float:
        """When it was first seen: now, if the last look did not see it."""
        found = self._asked[key] = self._first_s.get(key, now_s)
        return found

    def end_look(self) -> None:
        """Whatever was not asked for is no longer so."""
        self._first_s, self._asked = self._asked, {}


WINDOW_S = 60.0
MAX_ENDED = 4096
MAX_PEERS = 256
MAX_FAILED = 200
MAX_STORIES = 4096
"""Parts whose transitions are remembered while they are under way."""
MAX_MOVES = 32
"""Of one part."""
MAX_REFUSED = 64
"""Refused messages that are remembered: enough to tell a flood from a mistake."""
MAX_KEPT = 128
"""Of each other kind: a flood of one leaves the others where they are."""
RECEIVE = "receive from "
"""How the reason of a lease begins whose tokens come from a peer."""
TIERS = ("demotion to ", "promotion from ")
"""The same of a lease that keeps pages while they move between the pool and a tier."""
GIVEN_UP = frozenset({"aborted", "cancelled", "client-gone"})
"""Codes of handoffs that somebody did not want any more: their tokens are not lost."""
ENDING = frozenset({"ready", "settled"})
"""States of parts whose end was told, or is about to be."""


class EndedHandoff(NamedTuple):
    """A handoff that is over; of one that was not delivered its transitions, too."""

    end: HandoffEnded
    moves: Sequence[events.Moved] = ()

    def told(self, call: int, now_s: float) -> Because:
        """What is said of it to who asks."""
        end = self.end
        way = f"from {end.peer}" if end.side == "decode" else f"to {end.peer or 'nobody'}"
        why = f"{end.code}: {end.reason}" if end.code else end.outcome
        how = "was delivered" if end.outcome in DELIVERED else "failed"
        marks = [Mark(now_s - end.at_s + end.took_s, "asked for")]
        for move in self.moves:
            words = f"{move.trigger}: {move.why}" if move.why else move.trigger
            what = f"{move.before} -> {move.after} ({words})"
            marks.append(Mark(now_s - move.at_s, what))
        return Because(
            call=call,
            sentence=f"{part_ref(end)} of room {end.room} {way} {how} "
            f"{now_s - end.at_s:.1f} s ago, after {end.took_s:.3f} s: {why}",
            facts=(
                f"{amount(end.moved_bytes)} had moved",
                f"prompt {end.prompt_tokens} tokens, {end.decode_prefix_len} cached before",
            ),
            links=(f"room:{end.room}", *([f"peer:{end.peer}"] if end.peer else [])),
            marks=tuple(sorted(marks, key=lambda mark: -mark.ago_s)),
        )


def part_ref(end: HandoffEnded) -> str:
    """What to open for a part that has ended."""
    return f"{'receive' if end.side == 'decode' else 'send'}:{end.part}"


class PeerTraffic:
    """Handoffs with one peer that have ended."""

    __slots__ = ("delivered", "failed", "in_bytes", "out_bytes")

    def __init__(self) -> None:
        self.delivered = self.failed = self.in_bytes = self.out_bytes = 0


class Recent:
    """The last minute, and counters since the incarnation began."""

    def __init__(self) -> None:
        self.ended: deque[HandoffEnded] = deque(maxlen=MAX_ENDED)
        """Handoffs by their end, the newest last."""
        self.failed: deque[EndedHandoff] = deque(maxlen=MAX_FAILED)
        """Those that were not delivered, however long ago; the newest last."""
        self._stories: dict[tuple[str, int], list[events.Moved]] = {}
        self.by_peer: dict[str, PeerTraffic] = {}
        self.cached = self.received = self.restored = 0
        self.new = self.evicted = self.lost = self.unaligned = 0
        """Tokens: see ``Sources``."""
        self.quarantined: dict[int, float] = {}
        """By lease: since when, the oldest first."""
        self.refused: deque[MessageRefused] = deque(maxlen=MAX_REFUSED)
        """The newest last."""
        self._kept: dict[type[Event], deque[Event]] = {}
        """By kind, whatever is no work."""
        self._takers: dict[type, Callable[..., None]] = {
            events.HandoffEnded: self._handoff_ended,
            events.Moved: self._moved,
            events.LeaseOpened: self._lease_opened,
            events.LeaseResumed: self._resumed,
            events.Quarantined: self._lease_quarantined,
            events.QuarantineEnded: self._quarantine_ended,
            events.MessageRefused: self.refused.append,
        }

    def wants(self, kind: type[Event]) -> bool:
        """Whether events of this kind are looked at."""
        return kind in self._takers or kind not in WORK

    def take(self, event: Event) -> None:
        """One event, in order."""
        kind = type(event)
        if kind not in WORK:
            self._kept.setdefault(kind, deque(maxlen=MAX_KEPT)).append(event)
        taker = self._takers.get(kind)
        if taker is not None:
            taker(event)

    def between(self, after: int, before: int) -> list[Event]:
        """What is kept of those numbered between these: changes, and what became of failures."""
        kept: list[Event] = list(chain.from_iterable(self._kept.values()))
        for ending in self.failed:
            kept += (*ending.moves, ending.end)
        return sorted([e for e in kept if after < e.seq < before], key=lambda event: event.seq)

    def sources(self) -> Sources:
        """Where the tokens of all leases came from."""
        return Sources(
            cached=self.cached,
            received=self.received,
            restored=self.restored,
            new=self.new,
            evicted=self.evicted,
            lost=self.lost,
            unaligned=self.unaligned,
        )

    def latency(self, now_s: float) -> Latency:
        """Of the handoffs that ended in the last minute, as far as they are remembered."""
        lately = []
        for handoff in reversed(self.ended):
            if now_s - handoff.at_s > WINDOW_S:
                break
            lately.append(handoff)
        took = sorted(handoff.took_s for handoff in lately if handoff.outcome in DELIVERED)
        failed = len(lately) - len(took)
        if not took:
            return Latency(len(lately), failed)
        last = len(took) - 1
        return Latency(
            ended=len(lately),
            failed=failed,
            p50_s=took[len(took) // 2],
            p99_s=took[min(last, len(took) * 99 // 100)],
        )

    def traffic(self, peer: str) -> PeerTraffic:
        """With one peer; a stranger's is nothing."""
        return self.by_peer.get(peer) or PeerTraffic()

    def ending(self, kind: str, number: int) -> EndedHandoff | None:
        """The last one of that room, receive or send; a failure where there is one."""
        ref = f"{kind}:{number}"
        found = chain(reversed(self.failed), map(EndedHandoff, reversed(self.ended)))
        return next((e for e in found if ref in {f"room:{e.end.room}", part_ref(e.end)}), None)

    def _moved(self, event: events.Moved) -> None:
        stories, part = self._stories, (event.side, event.part)
        story = stories.get(part)
        if story is None:
            if event.before in ENDING:
                return
            if len(stories) >= MAX_STORIES:
                del stories[next(iter(stories))]
            story = stories[part] = []
        if len(story) < MAX_MOVES:
            story.append(event)

    def _handoff_ended(self, event: HandoffEnded) -> None:
        self.ended.append(event)
        is_delivered = event.outcome in DELIVERED
        story = self._stories.pop((event.side, event.part), [])
        if not is_delivered:
            self.failed.append(EndedHandoff(event, story))
        is_receive = event.side == "decode"
        # Without a lease it was never admitted, and no LeaseOpened has counted its prompt.
        if is_receive and event.lease:
            delta_tokens = event.prompt_tokens - event.decode_prefix_len
            if is_delivered:
                self.received += delta_tokens
            elif event.code not in GIVEN_UP:
                self.lost += delta_tokens
        traffic = self.by_peer.get(event.peer)
        if traffic is None:
            if len(self.by_peer) >= MAX_PEERS:
                return
            traffic = self.by_peer[event.peer] = PeerTraffic()
        traffic.delivered += is_delivered
        traffic.failed += not is_delivered
        traffic.in_bytes += event.moved_bytes * is_receive
        traffic.out_bytes += event.moved_bytes * (not is_receive)

    def _lease_quarantined(self, event: events.Quarantined) -> None:
        self.quarantined[event.lease] = event.at_s

    def _quarantine_ended(self, event: events.QuarantineEnded) -> None:
        self.quarantined.pop(event.lease, None)

    def _lease_opened(self, event: events.LeaseOpened) -> None:
        if event.reason.startswith(TIERS):
            return  # a page on its way, and no prompt
        self.cached += event.prefix_tokens
        if event.reason.startswith(RECEIVE):
            return  # what it misses is on its way: its handoff tells what became of it
        missed = event.missed_tokens
        self.unaligned += event.prompt_tokens - event.prefix_tokens - missed
        if event.why_missed == "new":
            self.new += missed
        else:
            self.evicted += missed

    def _resumed(self, event: events.LeaseResumed) -> None:
        self.restored += event.restored_tokens


MARKS = 32


class LockChange(NamedTuple):
    """One lock more, or one less."""

    at_s: float
    by: int
    what: str


def recalled(
    asked: Why,
    reply: AdminReply,
    node: NodeView,
    recent: Recent,
    happened: Callable[[], Sequence[Event]],
    now_s: float,
) -> AdminReply:
    """The core's answer with what only those know who remember.

    How a node came to its locks, which is in the ring of events, and how a handoff has ended.
    """
    match asked, reply:
        case Why(kind="node", id=number), Because():
            return with_lock_history(reply, node, number, happened(), now_s)
        case Why(kind="room" | "receive" | "send"), AdminFailed(refusal=refusal):
            ending = recent.ending(asked.kind, asked.id)
            if ending is not None:
                return ending.told(asked.call, now_s)
            first = next(iter(happened()), None)
            if first is None or first.seq == 1:
                return reply
            gone = f"; events of more than {now_s - first.at_s:.0f} s ago are no longer kept"
            told = msgspec.structs.replace(refusal, message=refusal.message + gone)
            return msgspec.structs.replace(reply, refusal=told)
        case _:
            return reply


def with_lock_history(
    said: Because, node: NodeView, number: int, happened: Sequence[Event], now_s: float
) -> Because:
    """What was said of node ``number``, with its last lock changes, oldest first."""
    tree = node.leases.tree
    edges = chain(tree.roots.values(), tree.nodes())
    edge = next((edge for edge in edges if edge.id == number), None)
    if edge is None:
        return said
    changes = lock_changes(node, edge, happened)
    shown = changes[-MARKS:]
    first = happened[0].seq if happened else node.out.seq + 1
    fact = (
        f"lock changes: {len(shown)} of {len(changes)} since event {first}, of it and of what is "
        "below it now; nodes evicted since are not in it"
    )
    return msgspec.structs.replace(
        said,
        facts=(*said.facts, fact),
        marks=tuple([Mark(now_s - change.at_s, change.what) for change in shown]),
    )


def lock_changes(node: NodeView, edge: RadixNode, happened: Iterable[Event]) -> list[LockChange]:
    """All of them in the order in which they happened."""
    story = _Story(node, edge)
    for event in happened:
        story.take(event)
    story.end()
    return story.changes


class _Story:
    """Which leases lock the node, event by event."""

    def __init__(self, node: NodeView, edge: RadixNode) -> None:
        self.changes: list[LockChange] = []
        self._node = node
        self._below = _ids_below(edge)
        self._names = {session.id: session.name for session in node.sessions.by_id.values()}
        self._owners: dict[int, str] = {}
        """By lease, as far as its beginning is remembered."""
        self._inside: dict[int, float] = {}
        """Leases that lock the node, and when that was last told."""

    def take(self, event: Event) -> None:
        """One event, in order."""
        match event:
            case events.ClientAttached(session=session, name=name):
                self._names[session] = name
            case events.LeaseOpened(lease=lease, session=session, reason=reason):
                name = self._names.get(session, f"session {session}")
                self._owners[lease] = f"of {name} ({reason})"
                self._enters(event, "")
            case events.LeaseExtended():
                self._enters(event, ", resumed")
            case events.LeaseCommitted(lease=lease):
                if lease not in self._owners and event.locked_node in self._below:
                    # It began before anything that is remembered, most likely in here.
                    self._inside.setdefault(lease, event.at_s)
                self._enters(event, ", committed")
            case events.LeaseReleased(cause=cause):
                self._leaves(event, "released" if cause == "normal" else f"released: {cause}")
            case events.Quarantined():
                self._leaves(event, "in quarantine")
            case events.LeaseRetracted(lease=lease) if lease in self._inside:
                del self._inside[lease]
                self.changes.append(LockChange(event.at_s, -1, f"-1 lease {lease} retracted"))
            case _:
                pass

    def end(self) -> None:
        """What gave its lock up without an event: its pages came, and could not be used."""
        leases = self._node.leases.leases
        for number, at_s in self._inside.items():
            lease = leases.get(number)
            if lease is None or lease.anchor is None or lease.anchor.id not in self._below:
                self.changes.append(LockChange(at_s, -1, f"-1 lease {number} was not resumed"))

    def _enters(
        self, event: events.LeaseOpened | events.LeaseExtended | events.LeaseCommitted, how: str
    ) -> None:
        if event.locked_node not in self._below:
            return
        if event.lease not in self._inside:
            owner = self._owners.get(event.lease, "")
            self.changes.append(LockChange(event.at_s, 1, f"+1 lease {event.lease} {owner}{how}"))
        self._inside[event.lease] = event.at_s

    def _leaves(self, event: events.LeaseReleased | events.Quarantined, how: str) -> None:
        was_inside = self._inside.pop(event.lease, None) is not None
        if was_inside or event.locked_node in self._below:
            self.changes.append(LockChange(event.at_s, -1, f"-1 lease {event.lease} {how}"))


def _ids_below(edge: RadixNode) -> set[int]:
    """Of a node and its subtree."""
    ids: set[int] = set()
    stack = [edge]
    while stack:
        node = stack.pop()
        ids.add(node.id)
        stack.extend(node.children.values())
    return ids
