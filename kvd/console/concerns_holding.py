"""Concerns about who holds what: broken rules, leases, quarantines, the queue and full pools.

Nothing here looks at all leases while all is well: only those are that were opened a minute ago or
longer, and a session's are added up only where one of its processes is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.clients import sessions_held
from kvd.console.concern import HIGH, LOW, MEDIUM, Concern, amount, first_seen, kept_by
from kvd.console.named import owner
from kvd.console.waiting import turns
from kvd.core.cache.lease import ENGINE
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.snapshot import kind_of, lacks_pages, why_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.console.waiting import Turn
    from kvd.core.cache.lease import Lease, Writer

WAITS_S = 1.0
LATE = 0.2
"""The last fifth of the time that a request has."""
QUARANTINE_S = 2.0
LONG_QUARANTINE_S = 5.0
OLD_S = 60.0
"""A lease of an engine that works is extended or committed more often than this."""
OLD_UNCACHED_S = 600.0
"""One that is not cached is not committed page by page: only a long time says anything."""
LINGERS_S = 2.0
AWAITED_S = 10.0

RULES = {
    "I1": "every page is in exactly one place: free, held, cached or in quarantine",
    "I2": "a node of the tree is locked as often as leases cross it",
    "I3": "what can be evicted is exactly what nobody locks",
    "I4": "the tree, and what is sent of a prompt, is whole pages",
    "I5": "nothing is posted twice, or outside of what was asked for",
    "I6": "nothing is under way for what has settled, and no page in quarantine is another's",
    "I7": "every quarantine names who may still write",
    "I8": "events are numbered without a gap",
    "I9": "what is held is held for somebody",
}


def violations(scene: Scene) -> Iterator[Concern]:
    """Each finding of the audit that is broken now: always a bug of the daemon."""
    for found in scene.node.audit.findings.by_key.values():
        if not found.is_broken:
            continue
        fault = found.fault
        refs = (("lease", fault.lease), ("node", fault.node))
        ref = next((f"{kind}:{number}" for kind, number in refs if number), "")
        whose = f"; {found.owner} {found.pid}" if found.owner else ""
        room = f", room {found.room}" if found.room else ""
        yield Concern(
            HIGH,
            "violation",
            ref or f"pool:{fault.component or scene.node.leases.pool.name}",
            f"{fault.sentence}{whose}{room}",
            found.first_seen_s,
            RULES.get(fault.rule, fault.rule),
            f"open {ref}" if ref else "audit",
            apart=str(found.id),
        )


def waiting(scene: Scene) -> Iterator[Concern]:
    """The queue, once for each component that is short and each peer that is waited for.

    Whoever waits for its turn only waits for those.
    """
    if not len(scene.node.admission):
        return
    groups: dict[str, list[Turn]] = {}
    for one in turns(scene):
        if scene.now_s - one.waiter.since_s <= WAITS_S:
            continue
        if lacks_pages(one.waiter):
            groups.setdefault(one.waiter.budget, []).append(one)
        elif (blocked := one.waiter.asker.blocked()) is not None:
            groups.setdefault(blocked, []).append(one)
    for group in groups.values():
        yield _waiting(scene, min(group, key=lambda one: one.waiter.since_s), len(group))


def _waiting(scene: Scene, oldest: Turn, n_waiting: int) -> Concern:
    waiter = oldest.waiter
    claim = waiter.claim
    has_s = waiter.deadline_s - waiter.since_s
    is_late = waiter.deadline_s - scene.now_s < LATE * has_s
    who = owner(scene, claim.session)
    what = f"{kind_of(waiter)} of {who}{f' for room {claim.room}' if claim.room else ''}"
    others = f", and {n_waiting - 1} more" if n_waiting > 1 else ""
    why = why_waits(scene.node, waiter, oldest.ahead)
    action, by = f"open client:{claim.session}", ""
    if lacks_pages(waiter):
        holders = scene.biggest.of(scene, waiter.budget)
        by = f"; most is kept by {kept_by(scene, waiter.budget)}"
        action = f"open {holders[0].ref}" if holders else f"open pool:{waiter.budget}"
    return Concern(
        HIGH if is_late else MEDIUM,
        "waiting",
        f"receive:{oldest.receive}" if oldest.receive else f"client:{claim.session}",
        f"{what} {why}{others}{by}",
        waiter.since_s,
        f"a request has its pages within {WAITS_S:g} s",
        action,
    )


def quarantines(scene: Scene) -> Iterator[Concern]:
    """Pages that a remote may still write, once for each writer."""
    groups: dict[tuple[Writer, ...], list[Lease]] = {}
    leases = scene.node.leases.leases
    for number, since_s in scene.recent.quarantined.items():
        lease = leases.get(number)
        if scene.now_s - since_s <= QUARANTINE_S:
            break
        if lease is not None and lease.quarantine is not None:
            groups.setdefault(lease.quarantine.writers, []).append(lease)
    for group in groups.values():
        first = group[0]
        held = first.quarantine
        if held is None:
            continue
        pages = sum(one.held_pages for one in group)
        is_long = scene.now_s - held.since_s > LONG_QUARANTINE_S
        others = f" and {amount(len(group) - 1, 'more lease')}" if len(group) > 1 else ""
        yield Concern(
            MEDIUM if is_long else LOW,
            "quarantine",
            f"lease:{first.id}",
            f"{amount(pages, 'page')} of lease {first.id}{others}: {held.peers} may still write "
            f"them ({held.why}); waits for {scene.node.decoder.settling.waits_for(first)}",
            held.since_s,
            f"a writer says within {QUARANTINE_S:g} s that it is done",
            "fence" if is_long else f"open lease:{first.id}",
        )


def old_leases(scene: Scene) -> Iterator[Concern]:
    """Leases that a living engine holds and has not touched for long, once for each engine."""
    now_s, node = scene.now_s, scene.node
    groups: dict[int, list[Lease]] = {}
    for lease in node.leases.leases.values():  # in the order in which they were opened
        if now_s - lease.since_s <= OLD_S:
            break
        untouched_s = now_s - lease.touched_s
        if untouched_s <= OLD_S or lease.state is not LeaseStage.RUNNING:
            continue
        if (lease.cache or untouched_s > OLD_UNCACHED_S) and lease.holders == {ENGINE}:
            groups.setdefault(lease.session, []).append(lease)
    for session, group in groups.items():
        client = node.sessions.by_id.get(session)
        if client is None:
            continue
        first = min(group, key=lambda lease: lease.touched_s)
        pages = sum(lease.held_pages for lease in group)
        ref = f"lease:{first.id}" if len(group) == 1 else f"client:{session}"
        yield Concern(
            MEDIUM if node.admission.queue else LOW,
            "old-lease",
            ref,
            f"{client.name} {client.pids[0]} is there, and has neither extended nor committed "
            f"{amount(len(group), 'lease')} with {amount(pages, 'page')}; longest "
            f"lease {first.id} ({first.reason})",
            first.touched_s,
            f"an engine touches a lease every {OLD_S:g} s, or releases it; one that waits for its "
            "user may mean it, one that has forgotten it leaks",
            f"open lease:{first.id}",
        )


def lingering(scene: Scene) -> Iterator[Concern]:
    """Leases whose engine let go, and whose pages are still read."""
    for part in scene.node.prefiller.by_room.values():
        lease = part.engine.lease if part.engine is not None else None
        if lease is None or ENGINE in lease.holders:
            continue
        ref = f"lease:{lease.id}"
        since_s = first_seen(scene, "lingering", ref)
        if scene.now_s - since_s > LINGERS_S:
            yield Concern(
                LOW,
                "lingering",
                ref,
                f"{amount(lease.held_pages, 'page')}, released by "
                f"{owner(scene, lease.session)} and still read by send {part.id} of room "
                f"{part.room}",
                since_s,
                f"a released lease is free within {LINGERS_S:g} s",
                f"open send:{part.id}",
            )


def gone_clients(scene: Scene) -> Iterator[Concern]:
    """Sessions with a dead process that still hold something."""
    alive = scene.engines.is_alive
    suspects = [
        one
        for one in scene.node.sessions.by_id.values()
        if not (one.is_former or one.hang_up) and not all(map(alive, one.pids))
    ]
    held = sessions_held(scene) if suspects else {}
    for session in suspects:
        has = held[session.id]
        if not (has.leases or has.receives or has.sends):
            continue
        gone = [pid for pid in session.pids if not alive(pid)]
        living = [pid for pid in session.pids if pid not in gone]
        by = f"pid {living[0]}" if living else "a process that inherited it"
        pages = sum(lease.held_pages for lease in has.leases)
        ref = f"client:{session.id}"
        yield Concern(
            MEDIUM if living else HIGH,
            "client-gone",
            ref,
            f"pid {gone[0]} of {session.name} is gone, its connection is kept open by {by}: "
            f"{amount(len(has.leases), 'lease')} with {amount(pages, 'page')}, "
            f"{amount(has.receives + has.sends, 'handoff')}",
            first_seen(scene, "client-gone", ref),
            "what a dead engine held is released when its last process hangs up",
            f"stop {by}: what the session holds is released at once",
        )


def awaited_clients(scene: Scene) -> Iterator[Concern]:
    """Engines of before the restart that have not come back, and whose pages are kept for them."""
    node = scene.node
    if not node.former_leases.leases:
        return
    for session in node.sessions.by_id.values():
        leases = node.former_leases.of_session(session.id) if session.is_former else []
        if leases and scene.now_s - session.since_s > AWAITED_S:
            pages = sum(lease.held_pages for lease in leases)
            yield Concern(
                MEDIUM if node.admission.queue else LOW,
                "awaited",
                f"client:{session.id}",
                f"{session.name} {session.pids[0]} was there before the restart and has not come "
                f"back: {amount(len(leases), 'lease')} with {amount(pages, 'page')} wait for it",
                session.since_s,
                f"an engine that lives comes back within {AWAITED_S:g} s; what it held is released "
                "when it does, or ends",
                f"open client:{session.id}",
            )


def hung_up_clients(scene: Scene) -> Iterator[Concern]:
    """Engines that kvd hung up on, which live and may write what they hold."""
    node = scene.node
    for session in node.sessions.by_id.values():
        if session.hang_up is None:
            continue
        leases = [one for one in node.leases.leases.values() if one.session == session.id]
        pages = sum(lease.held_pages for lease in leases)
        pids = " ".join(map(str, session.pids))
        yield Concern(
            MEDIUM,
            "hung-up-on",
            f"client:{session.id}",
            f"kvd hung up on {session.name} {pids}: {session.hang_up.why.message}; "
            f"{amount(len(leases), 'lease')} with {amount(pages, 'page')} stay held",
            session.hang_up.since_s,
            "a process that lives may write its pages, so they come back when it ends",
            f"stop pid {pids}: what the session holds is released within 1 s",
        )


def full_pools(scene: Scene) -> Iterator[Concern]:
    """Components of which not a page can be had: none is free, none can be evicted."""
    budgets = scene.node.leases.budgets
    for name in budgets.names:
        if budgets.headroom(name):
            continue
        holders = scene.biggest.of(scene, name)
        yield Concern(
            MEDIUM,
            "pool-full",
            f"pool:{name}",
            f"{name}: {budgets.told(name)}; most is kept by {kept_by(scene, name)}",
            first_seen(scene, "pool-full", f"pool:{name}"),
            "a page of each component can be had: it is free, or cached and not in use",
            f"open {holders[0].ref}" if holders else f"open pool:{name}",
        )
