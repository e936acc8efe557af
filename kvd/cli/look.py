"""The verbs that read: status, pools, tree, locks, rooms, peers, why; and the stream of events.

Of events a gap is said, never skipped.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click
import msgspec

from kvd.cli import render
from kvd.cli.exits import Unreachable
from kvd.cli.link import CALL, Target, ask, until_somebody_listens, with_target
from kvd.cli.options import with_format
from kvd.text import event_line
from kvd.types import short
from kvd.wire.admin import (
    AskOtherEnd,
    Because,
    EventPage,
    ListEvents,
    OtherEnd,
    OtherEnds,
    ShowStatus,
    ShowTree,
    Status,
    Tree,
    Why,
)
from kvd.wire.snapshot import IN_POOL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.wire.events import Event
    from kvd.wire.snapshot import Snapshot


OTHER_END_S = 1.0
"""How long a daemon waits for its peers before it answers."""


def snapshot(target: Target) -> Snapshot:
    """The daemon's state now."""
    return ask(target, ShowStatus(CALL), Status).snapshot


@click.command()
@with_target
@with_format
def status_command(target: Target, form: str) -> None:
    """Show the whole node on one screen: pools, leases, rooms, peers, and what is wrong."""
    shot = snapshot(target)
    render.answer(form, shot, render.status(shot))


@click.command()
@with_target
@with_format
def pools_command(target: Target, form: str) -> None:
    """Show the pages of each component by state, and whether they add up to the total."""
    shot = snapshot(target)
    quotas = [quota for quota in shot.quotas if quota.place == IN_POOL]
    render.answer(form, shot.pools, render.with_quotas(render.pools(shot.pools), quotas))


@click.command()
@click.option("--limit", type=click.IntRange(1, 20_000), default=200, show_default=True)
@with_target
@with_format
def tree_command(target: Target, form: str, limit: int) -> None:
    """Show the radix tree: tokens, pages, hits, and the leases that lock each node."""
    tree = ask(target, ShowTree(CALL, limit), Tree)
    render.answer(form, {"nodes": tree.nodes, "total": tree.total}, render.tree(tree))


@click.command()
@with_target
@with_format
def locks_command(target: Target, form: str) -> None:
    """Show every lease: owner, reason, room, pages, age; and who waits for room."""
    shot = snapshot(target)
    queue = (render.waiting(shot.waiting),) if shot.waiting else ()
    locks = {"leases": shot.leases, "waiting": shot.waiting}
    render.answer(form, locks, render.leases(shot.leases), *queue)


@click.command()
@click.option("-v", "--verbose", is_flag=True, help="Also show the story of each room.")
@with_target
@with_format
def rooms_command(target: Target, form: str, verbose: bool) -> None:
    """Show the handoffs under way: state, progress, deadline, and what each waits for."""
    rooms = snapshot(target).rooms
    story = (render.stories(rooms),) if verbose and rooms else ()
    render.answer(form, rooms, render.rooms(rooms), *story)


@click.command()
@with_target
@with_format
def peers_command(target: Target, form: str) -> None:
    """Show the other daemons as this one knows them."""
    peers = snapshot(target).peers
    render.answer(form, peers, render.peers(peers))


EVICTED = "evicted"
"""What is asked about as a whole."""

NUMBERED = ("page", "node", "room", "lease", "receive", "send", "client")


def _named(kind: str, one: str) -> Why:
    """What is asked: ``17`` or ``swa:17``, and for a peer its name."""
    if kind == EVICTED:
        return Why(CALL, kind, 0)
    if kind == "peer":
        return Why(CALL, kind, 0, name=one)
    component, _colon, digits = one.rpartition(":")
    if not (digits.isascii() and digits.isdigit() and int(digits) < 2**63):
        msg = f"{one!r} is no number; a page of another component than the first is swa:17"
        raise click.BadParameter(msg, param_hint="ID")
    if component and kind != "page":
        msg = f"a {kind} has no component: kvd why {kind} {digits}"
        raise click.UsageError(msg)
    return Why(call=CALL, kind=kind, id=int(digits), component=component)


@click.command()
@click.argument("kind", type=click.Choice([*NUMBERED, "peer", EVICTED]))
@click.argument("one", metavar="ID", default="")
@with_target
@with_format
def why_command(target: Target, form: str, kind: str, one: str) -> None:
    """Say who holds a page, node, room or lease, why, and since when.

    A page of a component beside the first is named with it: kvd why page swa:17

    A handoff is a room, or one part of it: kvd why receive 4, kvd why send 4. Who takes part is
    asked for with kvd why client 3 and kvd why peer NAME.

    What left the pool lately, for whom, and who missed it since: kvd why evicted
    """
    if bool(one) is (kind == EVICTED):
        msg = "kvd why evicted takes no ID" if one else f"which {kind}? kvd why {kind} ID"
        raise click.UsageError(msg)
    asked = _named(kind, one)
    because = ask(target, asked, Because)
    ends: tuple[OtherEnd, ...] = ()
    trouble = ""
    if kind == "room":
        try:
            told = ask(target, AskOtherEnd(CALL, asked.id), OtherEnds, wait_s=OTHER_END_S)
            ends = told.ends
        except click.ClickException as error:
            trouble = error.message
    answer = {
        "sentence": because.sentence,
        "facts": because.facts,
        "links": because.links,
        "marks": [msgspec.structs.asdict(mark) for mark in because.marks],
        "other_ends": [_by_name(end) for end in ends],
        "not_asked": trouble,
    }
    not_asked = [render.said(f"the other end was not asked: {trouble}")] if trouble else []
    render.answer(form, answer, render.because(because), render.other_ends(ends), *not_asked)


def _by_name(end: OtherEnd) -> dict[str, object]:
    """An end with the names of its fields, which the wire has not."""
    marks = [msgspec.structs.asdict(mark) for mark in end.marks]
    return {**msgspec.structs.asdict(end), "marks": marks}


# ---- events --------------------------------------------------------------------------------------

WAIT_S = 2.0
"""How long one question of ``--follow`` waits at the daemon before it is asked again."""


class Gap(msgspec.Struct, frozen=True, tag="gap"):
    """``lost`` events had left the daemon's ring before they were asked for."""

    lost: int


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """Another incarnation answers now: numbering starts again at 1.

    What the former one did after its event ``last_seen`` is lost.
    """

    incarnation: str
    last_seen: int


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until interrupted.")
@click.option("--after", "after_seq", type=click.IntRange(0), help="Only events above this number.")
@click.option("--last", type=click.IntRange(0), default=50, show_default=True, metavar="N")
@with_target
@with_format
def events_command(
    target: Target, form: str, follow: bool, after_seq: int | None, last: int
) -> None:
    """Print what happened, oldest first: the last N events, or those after a number.

    With --follow a daemon that is down is waited for. With --format json each line is one JSON
    object with its "type"; gaps and restarts are lines too.
    """
    shot = snapshot(target)
    start = max(0, shot.last_event - last) if after_seq is None else after_seq
    if follow:
        # An exception that comes while a destructor runs is dropped, and nothing would end.
        signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    for line in (
        coming(target, start, shot.incarnation) if follow else known(target, start, shot.last_event)
    ):
        click.echo(msgspec.json.encode(line) if form == "json" else _text_line(line))


def known(target: Target, after_seq: int, last_event: int) -> Iterator[Event | Gap]:
    """The events in ``(after_seq, last_event]``; the daemon may answer in pages."""
    while after_seq < last_event:
        page = ask(target, ListEvents(CALL, after_seq), EventPage)
        if page.lost:
            yield Gap(page.lost)
        if not page.events:
            return
        for event in page.events:
            if event.seq <= last_event:
                yield event
        after_seq = page.events[-1].seq


def coming(target: Target, after_seq: int, incarnation: str) -> Iterator[Event | Gap | Restarted]:
    """The events after ``after_seq`` as they happen, over restarts of the daemon."""
    is_away = False
    while True:
        try:
            page = ask(target, ListEvents(CALL, after_seq, WAIT_S), EventPage, wait_s=WAIT_S)
            # Numbers alone do not tell incarnations apart: the next one counts from 1 as well.
            is_known = page.events and not is_away
            now = incarnation if is_known else snapshot(target).incarnation
        except Unreachable as exc:
            if not is_away:
                click.echo(f"{exc.message}\nwaiting until one answers; Ctrl-C ends it", err=True)
            until_somebody_listens(target)
            is_away = True
            continue
        is_away = False
        if now != incarnation:
            yield Restarted(now, after_seq)
            incarnation, after_seq = now, 0
            continue
        if page.lost:
            yield Gap(page.lost)
        if page.events:
            yield from page.events
            after_seq = page.events[-1].seq


def _text_line(line: Event | Gap | Restarted) -> str:
    match line:
        case Gap(lost=lost):
            return f"-- {lost} events are lost: they had left the daemon's ring"
        case Restarted(incarnation=incarnation, last_seen=last_seen):
            return (
                f"-- the daemon was restarted: what happened before that and after event "
                f"{last_seen} is lost; now incarnation {short(incarnation)}"
            )
        case event:
            return event_line(event)
