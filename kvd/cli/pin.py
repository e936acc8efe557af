"""The verbs about what is kept in the cache: ``kvd pin`` and ``kvd unpin``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvd.cli import render
from kvd.cli.change import carry_out, must_not_refuse, operator_name, with_rehearsal
from kvd.cli.link import CALL, Target, with_target
from kvd.cli.look import snapshot
from kvd.cli.options import with_format
from kvd.text import duration
from kvd.wire import admin

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvd.wire.snapshot import PinState

HOUR_S = 3600.0


@click.command()
@click.argument("kind", type=click.Choice(["node", "page"]), required=False)
@click.argument("number", metavar="ID", type=click.IntRange(0, 2**53 - 1), required=False)
@click.option("--ttl", "ttl_s", type=float, default=HOUR_S, show_default=True, metavar="SECONDS")
@click.option("--owner", help="Who wants it; without, the name of this user.")
@with_target
@with_format
@with_rehearsal
def pin_command(
    target: Target,
    form: str,
    rehearsal: bool,
    kind: str | None,
    number: int | None,
    ttl_s: float,
    owner: str | None,
) -> None:
    """Keep a cached prefix, softly: what leads to a node of the tree, or to a page.

    It is the last to be evicted, and never in the way of a request that can have no other pages:
    then the pin is over, or goes on in a tier that has all of it. It ends after its time, too, with
    a new epoch of its namespace, and with the daemon. kvd tree has the numbers of nodes.
    Without a node: show the pins.
    """
    if kind is None:
        pins = snapshot(target).pins
        render.answer(form, pins, pins_table(pins))
        return
    if number is None:
        msg = f"which {kind}? kvd pin {kind} ID"
        raise click.UsageError(msg)
    who = owner or operator_name()
    request = admin.Pin(call=CALL, kind=kind, id=number, ttl_s=ttl_s, who=who)
    report = carry_out(target, request, form, rehearsal=rehearsal)
    must_not_refuse(report, "kvd pin shows the pins")


@click.command()
@click.argument("pin", type=click.IntRange(1, 2**53 - 1))
@with_target
@with_format
@with_rehearsal
def unpin_command(target: Target, form: str, rehearsal: bool, pin: int) -> None:
    """End a pin, whosever it is: what it kept stays cached as all else."""
    report = carry_out(target, admin.Unpin(CALL, pin), form, rehearsal=rehearsal)
    must_not_refuse(report, "kvd pin shows the pins")


def pins_table(pins: tuple[PinState, ...]) -> RenderableType:
    """Each with who wants it and for how long."""
    if not pins:
        return render.nothing("pins")
    out = render.TextTable(
        "PIN>", "OWNER", "NAMESPACE", "TOKENS>", "PAGES>", "TIER", "AGE>", "ENDS IN>"
    )
    for pin in pins:
        out.row(
            str(pin.pin),
            pin.owner if pin.session else f"{pin.owner} (operator)",
            pin.namespace,
            str(pin.tokens),
            str(pin.pages),
            ", ".join([kept.tier for kept in pin.kept if kept.pages == kept.of_pages]) or "-",
            duration(pin.age_s),
            duration(pin.ttl_s),
            prose="\n".join([kept.words for kept in pin.kept]),
        )
    return out
