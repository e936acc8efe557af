"""The verbs that change something, and the audit: each says what changed and what it refused.

A refusal ends with 1 unless skipping is what the verb is for: ``flush`` without ``--strict``.
``--dry-run`` asks for the same report, ends in the same way, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvd.cli import audited, render
from kvd.cli.exits import VerbFailed
from kvd.cli.link import CALL, Target, ask, with_target
from kvd.cli.options import with_format
from kvd.wire.admin import (
    AbortRoom,
    Audit,
    Drain,
    Evict,
    Fence,
    Flush,
    Rehearse,
    Report,
    Undrain,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def with_rehearsal(verb: Callable[..., None]) -> Callable[..., None]:
    """Add ``--dry-run``, which the verb gets as ``rehearsal``."""
    option: Callable[[Any], Callable[..., None]] = click.option(
        "--dry-run", "rehearsal", is_flag=True, help="Say what it would do; change nothing."
    )
    return option(verb)


def carry_out(
    target: Target,
    request: Flush | Evict | AbortRoom | Fence | Drain | Undrain,
    form: str,
    *,
    rehearsal: bool,
) -> Report:
    """Ask for a change, or what it would be, and print the answer."""
    report = ask(target, Rehearse(CALL, request) if rehearsal else request, Report)
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
        count = len(report.refused)
        raise VerbFailed(f"{count} refusal{'s' if count > 1 else ''}; {advice}")


@click.command()
@click.option("--strict", is_flag=True, help="Change nothing at all if any cached page is locked.")
@with_target
@with_format
@with_rehearsal
def flush_command(target: Target, form: str, rehearsal: bool, strict: bool) -> None:
    """Drop every cached page that nobody locks; says who holds the others."""
    report = carry_out(
        target, Flush(CALL, "strict" if strict else "unlocked"), form, rehearsal=rehearsal
    )
    if strict:
        must_not_refuse(report, "wait for the holders (kvd locks), or flush without --strict")


@click.command()
@click.argument("pages", type=click.IntRange(1, 2**31 - 1))
@with_target
@with_format
@with_rehearsal
def evict_command(target: Target, form: str, rehearsal: bool, pages: int) -> None:
    """Evict at least PAGES cached pages, in the order in which they would go anyway."""
    report = carry_out(target, Evict(CALL, pages), form, rehearsal=rehearsal)
    must_not_refuse(report, "what is left is locked or held: kvd locks names the holders")


@click.command()
@click.argument("room", type=click.IntRange(1, 2**63 - 1))
@click.option("--reason", default="operator", show_default=True, help="What the engine is told.")
@with_target
@with_format
@with_rehearsal
def abort_command(target: Target, form: str, rehearsal: bool, room: int, reason: str) -> None:
    """Give up every part of ROOM on this node; its pages go when the writer is proven gone."""
    report = carry_out(target, AbortRoom(CALL, room, reason), form, rehearsal=rehearsal)
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
    report = carry_out(target, Fence(CALL), form, rehearsal=rehearsal)
    must_not_refuse(report, "see kvd events for what the transfer process reported")


@click.command()
@with_target
@with_format
def audit_command(target: Target, form: str) -> None:
    """Check every invariant now, and say what the standing audit found; 1 if one is broken."""
    report = ask(target, Audit(CALL), Report)
    found = {"changed": report.changed, "refused": report.refused, "standing": report.standing}
    render.answer(form, found, audited.audit(report))
    if audited.is_broken(report):
        standing = report.standing.findings if report.standing is not None else 0
        raise VerbFailed(
            f"{max(len(report.refused), standing)} rules are broken, which is a bug of kvd: "
            "keep what kvd status --format json and kvd events --format json print, and report it"
        )
