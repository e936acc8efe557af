"""``kvd events``: the stream of typed events, one line each; a gap is said, never skipped."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click
import msgspec

from kvd.cli.exits import Unreachable
from kvd.cli.link import CALL, Target, ask, until_somebody_listens, with_target
from kvd.cli.look import snapshot
from kvd.cli.options import with_format
from kvd.text import event_line
from kvd.types import short
from kvd.wire.admin import EventPage, ListEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.wire.events import Event

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
    out = _json_line if form == "json" else _text_line
    shot = snapshot(target)
    start = max(0, shot.last_event - last) if after_seq is None else after_seq
    if follow:
        # An exception that comes while a destructor runs is dropped, and nothing would end.
        signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    for line in (
        coming(target, start, shot.incarnation) if follow else known(target, start, shot.last_event)
    ):
        click.echo(out(line))


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


def _json_line(line: Event | Gap | Restarted) -> str:
    return msgspec.json.encode(line).decode()
