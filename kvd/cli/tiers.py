"""The verb that shows what lies below the pool: ``kvd tiers``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvd.cli import render
from kvd.cli.link import Target, with_target
from kvd.cli.look import snapshot
from kvd.cli.options import with_format
from kvd.core.tiers.words import way_made
from kvd.text import counted
from kvd.types import amount
from kvd.wire.snapshot import IN_POOL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from kvd.wire.snapshot import ThrashState, TierState


@click.command()
@with_target
@with_format
def tiers_command(target: Target, form: str) -> None:
    """Show what lies in each tier below the pool, what moves, and what came of it."""
    shot = snapshot(target)
    quotas = [quota for quota in shot.quotas if quota.place != IN_POOL]
    table = tiers(shot.tiers, shot.evictions.thrashing)
    render.answer(form, shot.tiers, render.with_quotas(table, quotas))


def tiers(states: tuple[TierState, ...], thrashing: tuple[ThrashState, ...] = ()) -> RenderableType:
    """What lies in each, and what was found there; below it what was moved, and what failed."""
    if not states:
        return render.nothing("tiers")
    out = render.TextTable("TIER", "STATE", "PAGES>", "USED>", "SIZE>", "HITS>", "WAITED>", "BAD>")
    for tier in states:
        out.row(
            tier.tier,
            render.state(tier.state),
            str(tier.objects),
            amount(tier.objects * tier.object_bytes),
            "shared" if tier.is_shared else amount(tier.capacity_objects * tier.object_bytes),
            str(tier.hits),
            str(tier.waits),
            str(tier.bad),
            prose="\n".join([*_thrash(tier, thrashing), *_prose(tier)]),
        )
    return out


def _thrash(tier: TierState, thrashing: tuple[ThrashState, ...]) -> Iterator[str]:
    for pair in thrashing:
        if pair.place == tier.tier:
            yield f"{pair.why}: kvd why evicted"


def _prose(tier: TierState) -> Iterator[str]:
    if tier.why:
        yield f"{tier.state}: {tier.why}"
    yield (
        f"written {counted(tier.written, 'page')}{_speed(tier.written_bytes_per_s)}, "
        f"read {tier.read}{_speed(tier.read_bytes_per_s)}"
    )
    yield (
        f"{tier.writing} being written, {tier.reading} being read, "
        f"{counted(tier.waiting, 'request')} waiting"
    )
    if tier.gives_way_s is not None:
        yield f"{way_made(tier.gives_way_s)}, {tier.gave_way_s:.1f} s since the daemon began"
    if tier.is_shared:
        yield (
            f"asked for what others wrote {counted(tier.probes, 'time')}, found some of it "
            f"{tier.probe_hits}, not asked as it was known {tier.unasked}"
        )
    yield (
        f"left the pool unwritten {tier.evicted_unwritten}, removed as the oldest "
        f"{tier.dropped}, could not be written {tier.unwritten}"
    )
    if tier.missed:
        yield f"asked for again after that {tier.missed}, soon {tier.missed_soon}"
    troubles = {
        "waited too long": tier.late,
        "found no room in the pool": tier.no_room,
        "orders failed": tier.failed_orders,
        "orders ended with their process": tier.cut,
        "left the pool unwritten at a ceiling": tier.over_ceiling,
    }
    told = [f"{what} {number}" for what, number in troubles.items() if number]
    if told:
        yield ", ".join(told)


def _speed(bytes_per_s: float) -> str:
    return f" at {amount(round(bytes_per_s))}/s" if bytes_per_s else ""
