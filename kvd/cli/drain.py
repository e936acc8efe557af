"""``kvd drain`` and ``kvd undrain``: take a node out of service without breaking a handoff.

``--wait`` follows the daemon's events, so it ends with the last handoff and not a moment later.
"""

from __future__ import annotations

import getpass
import time
from typing import TYPE_CHECKING, Any

import click

from kvd.cli.change import carry_out, with_rehearsal
from kvd.cli.exits import VerbFailed
from kvd.cli.link import CALL, Target, ask, with_target
from kvd.cli.look import snapshot
from kvd.cli.options import with_format
from kvd.text import clean, duration
from kvd.wire.admin import Drain, EventPage, ListEvents, Undrain

if TYPE_CHECKING:
    from kvd.wire.events import Event
    from kvd.wire.snapshot import DrainState, Snapshot

SETTLE_S = 10.0
"""After the deadline what was given up settles; a node that takes longer is said to."""

LISTEN_S = 1.0
"""So long one look waits for an event."""

TELLING = frozenset({"drain-began", "drained", "drain-ended", "handoff-ended"})
"""Events after which the state is another one."""


@click.command()
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, max=1e9),
    default=0.0,
    metavar="SECONDS",
    help="Give up what is still under way then; without it handoffs have all the time they take.",
)
@click.option("--wait", is_flag=True, help="Return when nothing is under way any more.")
@click.option("--why", default="", metavar="TEXT", help="What those are told who are refused.")
@with_target
@with_format
@with_rehearsal
def drain_command(target: Target, form: str, rehearsal: bool, wait: bool, **asked: Any) -> None:
    """Begin nothing new; let the handoffs under way end.

    New leases, receives and sends are refused with "draining", those who wait are told so at once,
    and peers stop asking. Engines keep their leases. kvd undrain serves again.
    """
    # Any: click gives --why and --deadline by their names, a text and a number.
    request = Drain(CALL, _me(), **asked)
    carry_out(target, request, form, rehearsal=rehearsal)
    if wait and not rehearsal:
        _follow(target, request.deadline_s)


@click.command()
@with_target
@with_format
@with_rehearsal
def undrain_command(target: Target, form: str, rehearsal: bool) -> None:
    """Serve again, after kvd drain."""
    carry_out(target, Undrain(CALL), form, rehearsal=rehearsal)


def _me() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return "an operator"


def _follow(target: Target, deadline_s: float) -> None:
    """Say on the standard error what is left, until nothing is.

    Raises:
        VerbFailed: somebody ended the drain, or what was given up does not settle.
    """
    give_up_s = time.monotonic() + deadline_s + SETTLE_S if deadline_s > 0 else float("inf")
    said = ""
    while True:
        shot = snapshot(target)
        drain = _drain_of(shot)
        now = _left(drain)
        if now != said:
            click.echo(now, err=True)
            said = now
        if drain.is_drained:
            return
        _until_it_changes(target, shot.last_event, give_up_s, now)


def _drain_of(shot: Snapshot) -> DrainState:
    if shot.drain is None:
        raise VerbFailed(f"{clean(shot.node)} is not drained any more: somebody said kvd undrain")
    return shot.drain


def _left(drain: DrainState) -> str:
    if drain.is_drained:
        return f"drained after {duration(drain.since_s)}; engines hold {drain.leases} leases"
    return f"under way: {drain.receives} receives, {drain.sends} sends, {drain.waiting} waiting"


def _until_it_changes(target: Target, after_seq: int, give_up_s: float, left: str) -> None:
    while True:
        if time.monotonic() >= give_up_s:
            raise VerbFailed(
                f"not drained {SETTLE_S:g} s after the deadline, {left}: see kvd rooms"
            )
        page = ask(target, ListEvents(CALL, after_seq, LISTEN_S), EventPage, wait_s=LISTEN_S)
        if page.lost or any(map(_is_telling, page.events)):
            return
        after_seq = page.events[-1].seq if page.events else after_seq


def _is_telling(event: Event) -> bool:
    return event.__struct_config__.tag in TELLING
