"""The verbs that change something, and the audit: each says what changed and what it refused.

A refusal ends with 1 unless skipping is what the verb is for: ``flush`` without ``--strict``.
``--dry-run`` asks for the same report, ends in the same way, and changes nothing.

``kvd drain --wait`` follows the daemon's events, so it ends with the last handoff and not a moment
later.
"""

from __future__ import annotations

import getpass
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvd.cli import render
from kvd.cli.exits import VerbFailed
from kvd.cli.link import CALL, Target, ask, with_target
from kvd.cli.look import snapshot
from kvd.cli.options import config_errors, with_format
from kvd.text import clean, counted, duration
from kvd.wire import admin
from kvd.wire.admin import Drain, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.wire.snapshot import DrainState


def with_rehearsal(verb: Callable[..., None]) -> Callable[..., None]:
    """Add ``--dry-run``, which the verb gets as ``rehearsal``."""
    option: Callable[[Any], Callable[..., None]] = click.option(
        "--dry-run", "rehearsal", is_flag=True, help="Say what it would do; change nothing."
    )
    return option(verb)


def operator_name() -> str:
    """Who asks for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return "an operator"


def carry_out(
    target: Target,
    request: admin.Plannable,
    form: str,
    *,
    rehearsal: bool,
) -> Report:
    """Ask for a change, or what it would be, and print the answer."""
    report = ask(target, admin.Rehearse(CALL, request) if rehearsal else request, Report)
    outcome = {
        "changed": report.changed,
        "refused": report.refused,
        "notes": report.notes,
        "dry_run": rehearsal,
    }
    head = ["dry run: nothing was changed; it would be"] if rehearsal else []
    render.answer(form, outcome, *head, render.report(report))
    return report


def must_not_refuse(report: Report, advice: str) -> None:
    """End the verb with 1 if anything was refused."""
    if report.refused:
        raise VerbFailed(f"{counted(len(report.refused), 'refusal')}; {advice}")


@click.command()
@click.option("--strict", is_flag=True, help="Change nothing at all if any cached page is locked.")
@click.option("--namespace", help="Of this one and its members, NAME#...; without, all of them.")
@with_target
@with_format
@with_rehearsal
def flush_command(
    target: Target, form: str, rehearsal: bool, strict: bool, namespace: str | None
) -> None:
    """Drop every cached page that nobody locks; says who holds the others."""
    flush = admin.Flush(CALL, "strict" if strict else "unlocked", namespace)
    report = carry_out(target, flush, form, rehearsal=rehearsal)
    if strict:
        must_not_refuse(report, "wait for the holders (kvd locks), or flush without --strict")


@click.command()
@click.argument("namespace")
@click.argument("epoch", type=click.IntRange(0, 2**53 - 1), required=False)
@with_target
@with_format
@with_rehearsal
def epoch_command(
    target: Target, form: str, rehearsal: bool, namespace: str, epoch: int | None
) -> None:
    """Say that the weights behind NAMESPACE are number EPOCH: nothing of before is found again.

    Without EPOCH they are the next ones. It is of a base and its members: llama, and every
    llama#... An epoch goes up only, and the next daemon begins in it. Leases of before keep their
    pages until they are released; sends that nobody has begun to receive end.
    """
    carry_out(target, admin.RaiseEpoch(CALL, namespace, epoch), form, rehearsal=rehearsal)


@click.command()
@click.argument("pages", type=click.IntRange(1, 2**31 - 1))
@with_target
@with_format
@with_rehearsal
def evict_command(target: Target, form: str, rehearsal: bool, pages: int) -> None:
    """Evict at least PAGES cached pages, in the order in which they would go anyway."""
    report = carry_out(target, admin.Evict(CALL, pages), form, rehearsal=rehearsal)
    must_not_refuse(report, "kvd locks names who holds or locks pages, if anybody does")


@click.command()
@click.argument("room", type=click.IntRange(1, 2**63 - 1))
@click.option("--reason", default="operator", show_default=True, help="What the engine is told.")
@with_target
@with_format
@with_rehearsal
def abort_command(target: Target, form: str, rehearsal: bool, room: int, reason: str) -> None:
    """Give up every part of ROOM on this node; its pages go when the writer is proven gone."""
    report = carry_out(target, admin.AbortRoom(CALL, room, reason), form, rehearsal=rehearsal)
    must_not_refuse(report, "kvd rooms lists what is under way")


@click.command()
@with_target
@with_format
@with_rehearsal
def fence_command(target: Target, form: str, rehearsal: bool) -> None:
    """Restart the transfer process, so that no peer can write through the old one.

    Handoffs in flight fail; quarantined pages become free. A pool on a device (pool.device =
    cuda:N) is memory of that process: with such a pool the daemon ends too, with status 1, its
    service starts it with an empty pool, and engines come back to that one.
    """
    report = carry_out(target, admin.Fence(CALL), form, rehearsal=rehearsal)
    must_not_refuse(report, "see kvd events for what the transfer process reported")


@click.command()
@with_target
@with_format
def audit_command(target: Target, form: str) -> None:
    """Check every invariant now, and say what the standing audit found; 1 if one is broken."""
    report = ask(target, admin.Audit(CALL), Report)
    found = {"changed": report.changed, "refused": report.refused, "standing": report.standing}
    render.answer(form, found, render.audit(report))
    if render.is_broken(report):
        standing = report.standing.findings if report.standing is not None else 0
        raise VerbFailed(
            f"{max(len(report.refused), standing)} rules are broken, which is a bug of kvd: "
            "keep what kvd status --format json and kvd events --format json print, and report it"
        )


# ---- drain ---------------------------------------------------------------------------------------


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
    request = Drain(CALL, operator_name(), **asked)
    carry_out(target, request, form, rehearsal=rehearsal)
    if wait and not rehearsal:
        _follow(target, request.deadline_s)


@click.command()
@with_target
@with_format
@with_rehearsal
def undrain_command(target: Target, form: str, rehearsal: bool) -> None:
    """Serve again, after kvd drain."""
    carry_out(target, admin.Undrain(CALL), form, rehearsal=rehearsal)


def _follow(target: Target, deadline_s: float) -> None:
    """Say on the standard error what is left, until nothing is.

    Raises:
        VerbFailed: somebody ended the drain, or what was given up does not settle.
    """
    give_up_s = time.monotonic() + deadline_s + SETTLE_S if deadline_s > 0 else float("inf")
    said = ""
    while True:
        shot = snapshot(target)
        if (drain := shot.drain) is None:
            raise VerbFailed(
                f"{clean(shot.node)} is not drained any more: somebody said kvd undrain"
            )
        now = _left(drain)
        if now != said:
            click.echo(now, err=True)
            said = now
        if drain.is_drained:
            return
        _until_it_changes(target, shot.last_event, give_up_s, now)


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
        page = ask(
            target, admin.ListEvents(CALL, after_seq, LISTEN_S), admin.EventPage, wait_s=LISTEN_S
        )
        if page.lost or TELLING & {event.__struct_config__.tag for event in page.events}:
            return
        after_seq = page.events[-1].seq if page.events else after_seq


# ---- reload --------------------------------------------------------------------------------------


@click.command()
@with_target
@with_format
def reload_command(target: Target, form: str) -> None:
    """Have the daemon read its configuration again: files, conf.d and its own environment.

    What can change while it runs holds when this returns; what needs a restart is named. An invalid
    configuration changes nothing: its errors are printed, and the exit status is 1.
    """
    reloaded = ask(target, admin.Reload(CALL), admin.Reloaded)
    outcome = {
        "changed": [msgspec.structs.asdict(change) for change in reloaded.changed],
        "needs_restart": [msgspec.structs.asdict(change) for change in reloaded.needs_restart],
        "errors": reloaded.errors,
    }
    words = [
        *_listed("changed:", reloaded.changed),
        *_listed("needs a restart, and is still as before:", reloaded.needs_restart),
    ]
    if form == "json":
        render.print_json(outcome)
    elif not reloaded.errors:
        click.echo("\n".join(words or ["nothing has changed"]))
    if reloaded.errors:
        head = f"nothing was changed: {config_errors(len(reloaded.errors))}"
        raise VerbFailed("\n".join([head, *map(clean, reloaded.errors)]))


def _listed(head: str, changes: Sequence[admin.Changed]) -> list[str]:
    lines = [
        f"  {clean(change.key)}: {clean(change.before) or 'none'}"
        f" -> {clean(change.after) or 'none'}"
        for change in changes
    ]
    return [head, *lines] if lines else []
