"""What an operator should look at of engines: what they hold too long, and where they are.

As in ``concerns``, which asks these too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.concern import HIGH, LOW, MEDIUM, Concern, first_seen, pages_of
from kvd.core.cache.lease import ENGINE
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.rows import client_rows
from kvd.core.inspect.schema import session_name
from kvd.core.inspect.words import mark_words
from kvd.core.leases import arenas
from kvd.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.mark_waits import MarkWait

OLD_S = 60.0
"""A lease of an engine that works is extended or committed more often than this."""
OLD_UNCACHED_S = 600.0
"""One that is not cached is not committed page by page: only a long time says anything."""
LINGERS_S = 2.0
AWAITED_S = 10.0
LATE_MARK_S = 1.0
"""Processes say of a mark that it is late after so long."""


def old_leases(context: Context) -> Iterator[Concern]:
    """Leases that a living engine holds and has not touched for long, once for each engine."""
    now_s, node = context.now_s, context.node
    groups: dict[int, list[LeaseRecord]] = {}
    kept: set[int] | None = None
    for lease in node.leases.leases.values():  # in the order in which they were opened
        if now_s - lease.since_s <= OLD_S:
            break
        untouched_s = now_s - lease.touched_s
        if untouched_s <= OLD_S or lease.state is not LeaseStage.RUNNING:
            continue
        if lease.reason == arenas.REASON:
            continue  # its engine places what is in it, and tells nobody
        if (lease.cache or untouched_s > OLD_UNCACHED_S) and ENGINE in lease.holders:
            kept = _kept_leases(node) if kept is None else kept
            if lease.id not in kept and lease.holders == {ENGINE}:
                groups.setdefault(lease.session, []).append(lease)
    for session, group in groups.items():
        client = node.sessions.by_id.get(session)
        if client is None or client.is_outlived:
            continue  # told of what outlives it
        first = min(group, key=lambda lease: lease.touched_s)
        ref = f"lease:{first.id}" if len(group) == 1 else f"client:{session}"
        yield Concern(
            severity=MEDIUM if node.admission.queue else LOW,
            kind="old-lease",
            subject=ref,
            evidence=f"{client.name} {client.pids[0]} is there, and has neither extended nor "
            f"committed {pages_of(group)}; longest lease {first.id} ({first.reason})",
            since_s=first.touched_s,
            rule=f"an engine touches a lease every {OLD_S:g} s, or releases it; one that waits "
            "for its user may mean it, one that has forgotten it leaks",
            action=f"open lease:{first.id}",
        )


def _kept_leases(node: NodeView) -> set[int]:
    """Of rooms that are kept on purpose: their engines hold them for whoever receives them."""
    parts = node.prefiller.rooms.by_room.values()
    return {
        part.engine.lease.id
        for part in parts
        if part.keeping is not None and part.engine is not None
    }


def lingering(context: Context) -> Iterator[Concern]:
    """Leases whose engine let go, and whose pages are still read."""
    for part in context.node.prefiller.rooms.by_room.values():
        lease = part.engine.lease if part.engine is not None else None
        # A room that is kept is to be there.
        if lease is None or ENGINE in lease.holders or part.keeping is not None:
            continue
        ref = f"lease:{lease.id}"
        since_s = first_seen(context, "lingering", ref)
        if context.now_s - since_s > LINGERS_S:
            yield Concern(
                severity=LOW,
                kind="lingering",
                subject=ref,
                evidence=f"{counted(lease.held_pages, 'page')}, released by "
                f"{session_name(context.node, lease.session)} and still read by send {part.id} "
                f"of room {part.room}",
                since_s=since_s,
                rule=f"a released lease is free within {LINGERS_S:g} s",
                action=f"open send:{part.id}",
            )


def gone_clients(context: Context) -> Iterator[Concern]:
    """Sessions that still hold something, and whose opener is gone: others keep them."""
    node = context.node
    suspects = [session for session in node.sessions.by_id.values() if session.is_outlived]
    held = client_rows(node) if suspects else {}
    for session in suspects:
        has = held[session.id]
        if not (has.leases or has.receives or has.sends):
            continue
        pids = " ".join(map(str, session.pids))
        is_seen = session.opener not in session.pids
        yield Concern(
            severity=HIGH if node.admission.queue else MEDIUM,
            kind="client-gone",
            subject=f"client:{session.id}",
            evidence=f"{session.name} is kept by {session.told_keeper(context.now_s)}: "
            f"{pages_of(has.leases)}, {counted(has.receives + has.sends, 'handoff')}",
            since_s=session.ended[session.opener],
            rule="what a dead engine held is released when its last process hangs up",
            action=f"kill {pids}: what the session holds is released at once"
            if is_seen
            else f"{session.told_stop()}: all is released at once",
        )


def awaited_clients(context: Context) -> Iterator[Concern]:
    """Engines of before the restart that have not come back, and whose pages are kept for them."""
    node = context.node
    if not node.former_leases.leases:
        return
    for session in node.sessions.by_id.values():
        leases = node.former_leases.of_session(session.id) if session.is_former else []
        if leases and context.now_s - session.since_s > AWAITED_S:
            yield Concern(
                severity=MEDIUM if node.admission.queue else LOW,
                kind="awaited",
                subject=f"client:{session.id}",
                evidence=f"{session.name} {session.pids[0]} was there before the restart and has "
                f"not come back: {pages_of(leases)} wait for it",
                since_s=session.since_s,
                rule=f"an engine that lives comes back within {AWAITED_S:g} s; what it held is "
                "released when it does, or ends",
                action=f"open client:{session.id}",
            )


def late_marks(context: Context) -> Iterator[Concern]:
    """Engines whose copies wait for what they compute first, once for each engine."""
    node = context.node
    groups: dict[int, list[MarkWait]] = {}
    for wait in node.engine_copies.marks:
        groups.setdefault(wait.session, []).append(wait)
    for session, (wait, *others) in groups.items():
        more = f", and {len(others)} more" if others else ""
        yield Concern(
            severity=MEDIUM if context.now_s > wait.until_s else LOW,
            kind="late-mark",
            subject=f"client:{session}",
            evidence=f"{mark_words(node, wait)}{more}",
            since_s=wait.since_s,
            rule=f"what an engine computes before a copy is done within {LATE_MARK_S:g} s",
            action=f"open client:{session}: its device computes for long, or hangs",
        )


def hung_up_clients(context: Context) -> Iterator[Concern]:
    """Engines that kvd hung up on, which live and may write what they hold."""
    node = context.node
    for session in node.sessions.by_id.values():
        if session.hang_up is None:
            continue
        leases = [lease for lease in node.leases.leases.values() if lease.session == session.id]
        pids = " ".join(map(str, session.pids))
        yield Concern(
            severity=MEDIUM,
            kind="hung-up-on",
            subject=f"client:{session.id}",
            evidence=f"kvd hung up on {session.name} {pids}: {session.hang_up.why.message}; "
            f"{pages_of(leases)} stay held",
            since_s=session.hang_up.since_s,
            rule="a process that lives may write its pages, so they come back when it ends",
            action=f"kill {pids}: what the session holds is released within 1 s",
        )
