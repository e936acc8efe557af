"""What an operator should look at, the gravest first; and the view of the standing audit.

Each concern is a function of the node's state and of what looks remember: none on a healthy node.
They are about who holds what, about what should move, and about the daemon itself, in this order.

They must cost little while all is well: of the leases only those are looked at that were opened a
minute ago or longer, a session's are added up only where one of its processes is gone, and a part
that waits for its own node alone costs two comparisons, so that a thousand take a millisecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.console.concern import (
    GRAVEST,
    HIGH,
    LOW,
    MEDIUM,
    Concern,
    first_seen,
    held_by,
    open_biggest,
)
from kvd.console.engine_concerns import (
    awaited_clients,
    gone_clients,
    hung_up_clients,
    late_marks,
    lingering,
    old_leases,
)
from kvd.console.view import View
from kvd.core.audit.rules import INVARIANTS
from kvd.core.cache.evictions import SOON_S
from kvd.core.handoff.parts import ReceivePart
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.inspect.evicted import thrash_state, thrash_words
from kvd.core.inspect.quota_states import quota_states
from kvd.core.inspect.removed import tier_thrash_words
from kvd.core.inspect.rows import waiting_rows
from kvd.core.inspect.schema import StateField, client_ref
from kvd.core.inspect.words import SHORT, asked_word, asker_name, epochs_words, is_nearly_full
from kvd.core.peers.peer import Agent, Life
from kvd.text import counted
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.core.cache.lease import Writer
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import SendPart
    from kvd.core.inspect.rows import WaitingRow
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.admission import Waiter
    from kvd.core.peers.peer import Peer
    from kvd.wire.console import Query
    from kvd.wire.snapshot import AuditState


WAITS_S = 1.0
LATE = 0.2
"""The last fifth of the time that a request has."""
QUARANTINE_S = 2.0
LONG_QUARANTINE_S = 5.0


def violations(context: Context) -> Iterator[Concern]:
    """Each finding of the audit that is broken now: always a bug of the daemon."""
    for found in context.node.audit.findings.by_key.values():
        if not found.is_broken:
            continue
        fault = found.fault
        refs = (("lease", fault.lease), ("node", fault.node))
        ref = next((f"{kind}:{number}" for kind, number in refs if number), "")
        whose = f"; {found.owner} {found.pid}" if found.owner else ""
        room = f", room {found.room}" if found.room else ""
        yield Concern(
            severity=HIGH,
            kind="violation",
            subject=ref or f"pool:{fault.component or context.node.leases.pool.name}",
            evidence=f"{fault.sentence}{whose}{room}",
            since_s=found.first_seen_s,
            rule=INVARIANTS.get(fault.rule, fault.rule),
            action=f"open {ref}" if ref else "audit",
            apart=str(found.id),
        )


def short_pools(context: Context) -> Iterator[Concern]:
    """Components that can give nearly nothing, or that requests wait for: with who has them."""
    budgets = context.node.leases.budgets
    waiting: dict[str, list[WaitingRow]] = {name: [] for name in budgets.names}
    behind = 0
    for row in waiting_rows(context.node):
        if row.lacks_pages:
            waiting.setdefault(row.waiter.budget, []).append(row)
        else:
            behind += not row.is_blocked
    for name in budgets.names:
        rows, headroom = waiting[name], budgets.headroom(name)
        # One waiter may go and the next one come: what counts is that there always is one.
        if rows and context.now_s - first_seen(context, "waits", name) <= WAITS_S:
            rows = []
        if not rows and not is_nearly_full(budgets, name):
            continue
        waits, is_late = "", False
        if rows:
            oldest = min(rows, key=lambda row: row.waiter.since_s).waiter
            verb = "requests wait" if len(rows) > 1 else "request waits"
            behind_it = f" and {behind} behind" if behind else ""
            who = f"{_asked(context, oldest)} needs {oldest.needed_pages}"
            waits = f", {len(rows)} {verb}{behind_it}: {who}"
            is_late = any(_is_late(context, row) for row in rows)
        holders = held_by(context, name)
        yield Concern(
            severity=HIGH if is_late else MEDIUM if rows or not headroom else LOW,
            kind="pool-short",
            subject=f"pool:{name}",
            evidence=f"{name} can give {headroom} of {budgets.capacity(name)} pages{waits}; "
            f"most is held by {holders or 'nobody'}",
            since_s=first_seen(context, "pool-short", name),
            rule=f"a component can give {SHORT:.0%} of its pages: free, or cached and not in use; "
            "kvd takes none from a living engine",
            action=open_biggest(context, name),
        )


def waiting(context: Context) -> Iterator[Concern]:
    """The queue, once for each peer that is waited for; pages are told with their component."""
    if not len(context.node.admission):
        return
    groups: dict[str, list[WaitingRow]] = {}
    for row in waiting_rows(context.node):
        blocked = row.waiter.blocked()
        if context.now_s - row.waiter.since_s > WAITS_S and blocked is not None:
            groups.setdefault(blocked, []).append(row)
    for blocked, group in groups.items():
        oldest = min(group, key=lambda row: row.waiter.since_s)
        waiter = oldest.waiter
        asker = client_ref(waiter.claim.session) or f"peer:{asker_name(context.node, waiter)}"
        others = f", and {len(group) - 1} more" if len(group) > 1 else ""
        yield Concern(
            severity=HIGH if _is_late(context, oldest) else MEDIUM,
            kind="waiting",
            subject=f"receive:{oldest.receive}" if oldest.receive else asker,
            evidence=f"{_asked(context, waiter)} {blocked}{others}",
            since_s=waiter.since_s,
            rule=f"a request is served within {WAITS_S:g} s",
            action=f"open {asker}",
        )


def _is_late(context: Context, row: WaitingRow) -> bool:
    waiter = row.waiter
    return waiter.deadline_s - context.now_s < LATE * (waiter.deadline_s - waiter.since_s)


def _asked(context: Context, waiter: Waiter) -> str:
    """``receive of engine for room 7``."""
    claim = waiter.claim
    who = asker_name(context.node, waiter)
    return f"{asked_word(waiter)} of {who}{f' for room {claim.room}' if claim.room else ''}"


def quarantines(context: Context) -> Iterator[Concern]:
    """Pages that a remote may still write, once for each writer."""
    groups: dict[tuple[Writer, ...], list[LeaseRecord]] = {}
    leases, decoder = context.node.leases.leases, context.node.decoder
    for number, since_s in context.recent.quarantined.items():
        lease = leases.get(number)
        if context.now_s - since_s <= QUARANTINE_S:
            break
        if lease is not None and lease.quarantine is not None:
            groups.setdefault(lease.quarantine.writers, []).append(lease)
    for group in groups.values():
        first = group[0]
        held = first.quarantine
        if held is None:
            continue
        pages = counted(sum(row.held_pages for row in group), "page")
        is_long = context.now_s - held.since_s > LONG_QUARANTINE_S
        others = f" and {counted(len(group) - 1, 'more lease')}" if len(group) > 1 else ""
        yield Concern(
            severity=MEDIUM if is_long else LOW,
            kind="quarantine",
            subject=f"lease:{first.id}",
            evidence=f"{pages} of lease {first.id}{others}: {held.peers} may still "
            f"write them ({held.why}); waits for {decoder.quarantines.waits_for(first)}",
            since_s=held.since_s,
            rule=f"a writer says within {QUARANTINE_S:g} s that it is done",
            action="fence" if is_long else f"open lease:{first.id}",
        )


STUCK_S = 2.0
"""A handoff under way moves at least this often."""
LONG_S = 5.0
"""Waiting for an engine longer than this is more than its turn to compute."""
LATE_HANDOFF = 0.2
"""The last fifth of the time that a handoff has."""
DIAL_S = 2.0
"""A configured peer answers within this, if it is there."""

_RECEIVING = {Decode.OFFERED, Decode.RECEIVING, Decode.VERIFYING}
_SENDING = {Prefill.AWAIT_ENGINE, Prefill.AWAIT_OFFER, Prefill.STREAMING, Prefill.FLUSHING}


def handoffs(context: Context) -> Iterator[Concern]:
    """Those that do not move, that will be late, and sends that their receiver does not end."""
    decoder, prefiller = context.node.decoder, context.node.prefiller
    for receive in decoder.open.parts.values():
        if receive.state in _RECEIVING:
            yield from _handoff(context, receive, receive.moved_bytes, may_be_late=True)
    for send in prefiller.known():
        if send.keeping is not None:
            continue  # it waits on purpose, and ends by itself; who receives it has a part
        done_bytes = prefiller.posts.live_bytes(send)
        yield from _handoff(context, send, done_bytes, may_be_late=send.state in _SENDING)


def _handoff(
    context: Context, part: ReceivePart | SendPart, done_bytes: int, *, may_be_late: bool
) -> Iterator[Concern]:
    side = "decode" if isinstance(part, ReceivePart) else "prefill"
    moved_s = context.progress.moved_s(side, part.id)
    if moved_s is not None and context.now_s - moved_s > STUCK_S:
        yield _still(context, part, moved_s)
    last_s = LATE_HANDOFF * (part.deadline_s - part.since_s)
    if may_be_late and part.deadline_s - context.now_s < last_s:
        whole = f" of {amount(part.total_bytes)}" if part.total_bytes else ""
        yield Concern(
            severity=MEDIUM,
            kind="late-handoff",
            subject=_ref(part),
            evidence=f"room {part.room} with {part.peer or 'nobody yet'}: "
            f"{part.state.value}, {amount(done_bytes)}{whole}",
            since_s=part.deadline_s - last_s,
            rule="a handoff is done before the last fifth of its time",
            action=f"open {_ref(part)}",
        )


def peers(context: Context) -> Iterator[Concern]:
    """Those that are silent, differ, or cannot be sent to."""
    known = context.node.peers
    for peer in known.by_name.values():
        ref = f"peer:{peer.name}"
        if peer.life is not Life.UP:
            kind, grave = ("peer-lost", HIGH) if peer.life is Life.LOST else ("peer-silent", MEDIUM)
            why = known.trouble(peer.name)
            parts = [*context.node.decoder.open.parts.values(), *context.node.prefiller.known()]
            stand = sum([part.peer == peer.name for part in parts])
            hurt = f"; {counted(stand, 'handoff')} with it under way" if stand else ""
            yield Concern(
                severity=grave,
                kind=kind,
                subject=ref,
                evidence=f"{peer.name} is {peer.life.value}{f': {why}' if why else ''}{hurt}",
                since_s=peer.heard_s,
                rule=f"a peer is heard every {context.node.settings.heartbeat_s:g} s",
                action=f"look whether kvd runs on {peer.name}, and at the network between the two",
            )
        elif peer.refusal is not None and peer.source_refusal is not None:
            yield Concern(
                severity=MEDIUM,
                kind="peer-refused",
                subject=ref,
                evidence=peer.refusal.message,
                since_s=first_seen(context, "peer-refused", ref),
                rule="peers that exchange KV have the same layout of their pools",
                action="compare kvd config show on both nodes",
            )
        elif peer.agent is Agent.FAILED:
            yield Concern(
                severity=HIGH,
                kind="peer-refused",
                subject=ref,
                evidence=f"no sending agent: {peer.agent_why}",
                since_s=peer.agent_since_s,
                rule="there is a sending agent towards every peer that lives",
                action=f"open {ref}",
            )
        yield from _slow_ways(context, peer)
        apart = epochs_words(context.node, peer)
        if apart and peer.life is Life.UP:
            what, _, action = apart.partition("; ")
            yield Concern(
                severity=MEDIUM,
                kind="peer-refused",
                subject=ref,
                evidence=what,
                since_s=first_seen(context, "peer-refused", f"epochs:{peer.name}"),
                rule="nodes that hand each other KV of a model are in the same epoch of it",
                action=action,
                apart=f"epochs:{peer.name}",
            )
    yield from _unanswered(context)


def _slow_ways(context: Context, peer: Peer) -> Iterator[Concern]:
    """What UCX emulates on the way to a peer."""
    for way in peer.ways:
        if way.is_slow:
            ref = f"peer:{peer.name}"
            what, _, action = way.advice.partition(": ")
            yield Concern(
                severity=MEDIUM,
                kind="slow-path",
                subject=ref,
                evidence=f"{way.words}: {what}",
                since_s=first_seen(context, "slow-path", f"{ref}:{way.words}"),
                rule="bytes of a device travel by copy engines, cuda_ipc or RDMA",
                action=action,
                apart=f"{ref}:{way.words}",
            )


def _unanswered(context: Context) -> Iterator[Concern]:
    known = context.node.peers
    if context.now_s - context.node.started_s < DIAL_S:
        return
    for dialed in known.dialed.values():
        if dialed.name in known.by_name:
            continue
        ref = f"peer:{dialed.name}"
        why = dialed.trouble or "nobody answers"
        yield Concern(
            severity=MEDIUM,
            kind="peer-refused" if dialed.trouble else "peer-silent",
            subject=ref,
            evidence=f"{dialed.name} at {dialed.address} has not said Hello: {why}",
            since_s=dialed.trouble_s or context.node.started_s,
            rule="a configured peer is there, and its keys are those we know",
            action=f"look whether kvd runs on {dialed.name} as configured in peers.connect",
        )


# ---- one handoff ---------------------------------------------------------------------------------


def _ref(part: ReceivePart | SendPart) -> str:
    return f"{'receive' if isinstance(part, ReceivePart) else 'send'}:{part.id}"


def _silence(context: Context, incarnation: str) -> str:
    """Its peer, if that is what is wrong with it."""
    peer = context.node.peers.by_incarnation.get(incarnation)
    return f"; {peer.name} is {peer.life.value}" if peer and peer.life is not Life.UP else ""


def _still(context: Context, part: ReceivePart | SendPart, moved_s: float) -> Concern:
    silence = _silence(context, part.incarnation)
    is_long = context.now_s - moved_s > LONG_S
    if isinstance(part, ReceivePart):
        way, (grave, what, action) = f"from {part.peer}", _keeps_receive(part, is_long=is_long)
    else:
        way = f"to {part.peer or 'nobody yet'}"
        grave, what, action = _keeps_send(context, part, is_long=is_long)
    return Concern(
        severity=HIGH if silence else grave,
        kind="stuck-handoff",
        subject=_ref(part),
        evidence=f"room {part.room} {way}: {what}{silence}",
        since_s=moved_s,
        rule=f"a handoff under way moves at least every {STUCK_S:g} s",
        action=f"open peer:{part.peer}" if silence else action,
    )


def _keeps_receive(part: ReceivePart, *, is_long: bool) -> tuple[str, str, str]:
    """How grave it is, what is wrong, and what to do."""
    grave = MEDIUM if is_long else LOW
    writer = "its source" if part.attempt.is_pulled else "the prefill engine"
    match part.state:
        case Decode.OFFERED:
            what = f"its pages are offered, and {writer} has not begun"
        case Decode.VERIFYING:
            what, grave = "its pages are verified by our transfer process", MEDIUM
        case _:
            what = (
                f"{amount(part.moved_bytes)} of {amount(part.total_bytes)}, and nothing since: "
                f"{writer} does not go on, or bytes have stopped"
            )
    return grave, what, f"open {_ref(part)}"


def _keeps_send(context: Context, part: SendPart, *, is_long: bool) -> tuple[str, str, str]:
    """The same of a send."""
    after_its_turn = MEDIUM if is_long else LOW
    engine, peer = f"open client:{part.session}", f"open peer:{part.peer}"
    if part.outstanding:
        moved = context.node.prefiller.posts.live_bytes(part)
        what = (
            f"{counted(len(part.outstanding), 'post')} under way, "
            f"{amount(moved)} of {amount(part.total_bytes)}, and nothing since: bytes have stopped"
        )
        return HIGH, what, peer
    match part.state:
        case Prefill.AWAIT_ENGINE:
            what = "its pages are offered, and no engine here has begun to send"
            return after_its_turn, what, f"open send:{part.id}"
        case Prefill.AWAIT_OFFER:
            what = "the engine here sends, and no decode side has offered pages"
            return after_its_turn, what, f"open send:{part.id}"
        case Prefill.SETTLED:
            return MEDIUM, "all is sent, and the decode side does not end it", peer
        case _:
            pass
    found = context.node.peers.by_incarnation.get(part.incarnation)
    if found is not None and found.agent is not Agent.LOADED:
        return MEDIUM, f"there is no sending agent yet ({found.agent.value})", peer
    what = (
        f"{part.cursor_tokens} of {part.prompt_tokens} tokens computed, and nothing since: the "
        "engine does not compute"
    )
    return after_its_turn, what, engine


REFUSED_OVER_S = 10.0
MANY_REFUSED = 10
"""So many messages refused in that time are more than a restart or a mistake."""
LAG_S = 0.1
LONG_LAG_S = 0.5


def transfer(context: Context) -> Iterator[Concern]:
    """Without a transfer process nothing can be sent or received."""
    if not context.node.peers.generation:
        yield Concern(
            severity=HIGH,
            kind="transfer-down",
            subject="",
            evidence="the transfer process of this node does not serve",
            since_s=first_seen(context, "transfer-down"),
            rule="there is a transfer process; one that ends is started again at once",
            action="look at the daemon's log: it says why the last one ended",
        )


def floors(context: Context) -> Iterator[Concern]:
    """Pages that were to stay for a namespace went, as nothing else could be evicted."""
    for quota in quota_states(context.node):
        if quota.taken_ago_s is None or quota.taken_ago_s > SOON_S:
            continue
        name = quota.namespace
        yield Concern(
            severity=LOW,
            kind="floor-broken",
            subject=f"pool:{context.node.leases.pool.name}",
            evidence=f"{name} has {quota.pages} pages in the {quota.place}, its floor is "
            f"{quota.floor_pages}; {quota.taken_pages} of it went since the daemon began",
            since_s=first_seen(context, "floor-broken", name),
            rule="a floor is evicted only where nothing else can be: leases hold what is above all "
            "floors",
            action="kvd why evicted says for whom",
            apart=name,
        )


def thrash(context: Context) -> Iterator[Concern]:
    """Engines that evict what is asked for again soon: the pair that did so most, and how many."""
    pairs = context.node.leases.evictor.evictions.thrashing_at(context.now_s)
    if not pairs:
        return
    worst = max(pairs, key=lambda pair: pair.rounds)
    more = f"; and {counted(len(pairs) - 1, 'more pair')} of engines" if len(pairs) > 1 else ""
    yield Concern(
        severity=MEDIUM,
        kind="cache-thrashing",
        subject=f"pool:{context.node.leases.pool.name}",
        evidence=f"{thrash_words(thrash_state(context.node, worst))}{more}",
        since_s=min([pair.since_s for pair in pairs]),
        rule=f"what has left the pool is not asked for again within {SOON_S:.0f} s",
        action="kvd why evicted says what left last, and whom it hurt",
    )


def tier_thrash(context: Context) -> Iterator[Concern]:
    """Namespaces whose writes push out of a disk what is asked for again: the worst pair."""
    node = context.node
    for tier in node.tiers.each:
        pairs = tier.index.removed.thrashing_at(context.now_s)
        if not pairs:
            continue
        worst = max(pairs, key=lambda pair: pair.n_objects)
        more = f"; and {counted(len(pairs) - 1, 'more pair')} of namespaces" if pairs[1:] else ""
        yield Concern(
            severity=MEDIUM,
            kind="cache-thrashing",
            subject=f"pool:{node.leases.pool.name}",
            evidence=f"tier {tier.name}: "
            f"{tier_thrash_words(tier, worst, node.leases.page_size, context.now_s)}{more}",
            since_s=min([pair.since_s for pair in pairs]),
            rule="what was removed from a tier is not asked for again before as much as it holds "
            "has gone",
            action="kvd why evicted says what left last, and whom it hurt",
            apart=f"tier:{tier.name}",
        )


def draining(context: Context) -> Iterator[Concern]:
    """A node that was taken out of service, and may have been forgotten so."""
    drainer = context.node.drainer
    if drainer.drain is not None:
        receives, sends = drainer.under_way()
        yield Concern(
            severity=LOW,
            kind="draining",
            subject="",
            evidence=f"{drainer.words()}: {counted(len(receives), 'receive')} and "
            f"{counted(len(sends), 'send')} under way",
            since_s=drainer.drain.since_s,
            rule="a node serves; one that drains refuses every new lease, receive and send",
            action="undrain",
        )


def refused(context: Context) -> Iterator[Concern]:
    """Somebody keeps sending what cannot be acted on."""
    lately = []
    for refusal in reversed(context.recent.refused):
        if context.now_s - refusal.at_s > REFUSED_OVER_S:
            break
        lately.append(refusal)
    if len(lately) < MANY_REFUSED:
        return
    last = lately[0]
    more = " or more" if len(lately) == context.recent.refused.maxlen else ""
    yield Concern(
        severity=LOW,
        kind="refused-messages",
        subject="",
        evidence=f"{len(lately)}{more} messages refused within {REFUSED_OVER_S:g} s; the last on "
        f"{last.socket} from {last.sender}: {last.code}, {last.why}",
        since_s=lately[-1].at_s,
        rule="engines, operators and peers send what the daemon can read and act on",
        action="look for message-refused among the events: each says who sent it, and why it was "
        "refused",
    )


def recorder(context: Context) -> Iterator[Concern]:
    """A flight recorder that has lost the thread."""
    state = context.node.recorded.state
    if state.state == "ended":
        yield Concern(
            severity=LOW,
            kind="recorder-ended",
            subject="",
            evidence=state.why or "the flight recorder has ended",
            since_s=context.node.recorded.since_s,
            rule="where the recorder is enabled, every input is recorded",
            action="restart the daemon when it is idle, to record again",
        )


def loop(context: Context) -> Iterator[Concern]:
    """Everybody waits when the loop does."""
    if context.lag_s >= LAG_S:
        yield Concern(
            severity=MEDIUM if context.lag_s >= LONG_LAG_S else LOW,
            kind="loop-lag",
            subject="",
            evidence=f"its timer was late by {context.lag_s * 1e3:.0f} ms, at worst in the last "
            "second",
            since_s=first_seen(context, "loop-lag"),
            rule=f"the daemon answers within {LAG_S * 1e3:.0f} ms",
            action="look at the processor of this host: pin the daemon, or give it a core of its "
            "own",
        )


def _states(context: Context, _: Query) -> list[AuditState]:
    return [context.node.audit.state()]


def _state(_: NodeView, audit: AuditState) -> str:
    if audit.findings:
        return "broken"
    return "ok" if audit.sweeps else "waiting"


def _ended(node: NodeView, audit: AuditState) -> float | None:
    """When the last sweep ended; None before any has."""
    return node.out.at_s - audit.last_sweep_ago_s if audit.sweeps else None


def _looked_at(audit: AuditState, figure: float) -> float | None:
    return figure if audit.sweeps else None


AUDIT: View[AuditState] = View(
    "audit",
    (
        StateField("state", "state", _state),
        StateField("findings", "count", "", "rules that are broken now"),
        StateField("sweeps", "count", "", "counter"),
        StateField("ended", "since", _ended, "of the last sweep"),
        StateField("took_s", "seconds", lambda _, audit: _looked_at(audit, audit.sweep_s)),
        StateField("objects", "count", lambda _, audit: _looked_at(audit, audit.objects)),
        StateField("pages", "pages", lambda _, audit: _looked_at(audit, audit.pages)),
        StateField("spent_s", "seconds", "", "of processor time, in all"),
        StateField("core", "share", "share", "of a core, between the last two sweeps"),
    ),
    objects=_states,
    key=lambda _: "audit:standing",
)


_LOOKS = (
    violations,
    transfer,
    short_pools,
    floors,
    thrash,
    tier_thrash,
    peers,
    handoffs,
    waiting,
    gone_clients,
    hung_up_clients,
    late_marks,
    quarantines,
    awaited_clients,
    lingering,
    old_leases,
    draining,
    refused,
    recorder,
    loop,
)
"""In the order of whom they hurt: everybody, many, one, nobody yet."""


class Worry(msgspec.Struct, frozen=True):
    """How many concerns there are, and how grave the gravest is: empty where there is none."""

    count: int = 0
    worst: str = ""


def concerns(context: Context) -> list[Concern]:
    """All there are: the gravest first, of those what hurts most, of one kind the oldest."""
    context.progress.look(context.node, context.now_s)
    found = [
        concern
        for look in _LOOKS
        for concern in sorted(look(context), key=lambda concern: concern.since_s)
    ]
    # Only now: what no look asked for since the last time is over, and begins anew if it returns.
    context.since.end_look()
    found.sort(key=lambda concern: GRAVEST.index(concern.severity))
    return found


def worry(context: Context) -> Worry:
    """What the head of a frame says of them."""
    found = concerns(context)
    return Worry(len(found), found[0].severity if found else "")


CONCERNS: View[Concern] = View(
    "concerns",
    (
        StateField("severity", "state"),
        StateField("kind", "text"),
        StateField("subject", "ref", lambda _, concern: concern.subject or None),
        StateField("evidence", "text"),
        StateField("since", "since", "since_s"),
        StateField("rule", "text", "", "what should be so"),
        StateField("action", "text", "", "what to do about it"),
    ),
    objects=lambda context, _: concerns(context),
    key=lambda concern: concern.key,
)
