"""``benchmarks families``: what a request of each pool family holds, sends and leaves room for.

Two real daemons for each family, handoffs over NIXL, one workload. Beside each measurement stands
its closed form (``family_forms``); where one does not agree, the command fails. Families that are
compared take turns, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import kvd.client
from benchmarks.family_checks import FamiliesResult, compare, goals_of, row_of
from benchmarks.family_forms import (
    DEVICE,
    GROUPS,
    HOST,
    MIB,
    PREFILL_ONLY,
    Workload,
    families_of,
    window_pages,
)
from benchmarks.family_runs import Seen, Turns, count_leases
from kvd.bench.engines import Side
from kvd.bench.report import bar, show_goals, show_notes, show_table, write_json
from kvd.bench.stream import json_option
from kvd.harness.daemons import DaemonFailed, one_daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.family_checks import Beside, Check, FamilyResult
    from benchmarks.family_forms import Family
    from kvd.bench.report import Told
    from kvd.harness.daemons import Daemon


def run(work: Workload, names: Sequence[str], told: Told) -> FamiliesResult:
    """Measure these families.

    Raises:
        DaemonFailed: a daemon, or a handoff, did not do what it should.
    """
    families = families_of(work)
    rows: list[FamilyResult] = []
    for group in GROUPS:
        wanted = [families[name] for name in group if name in names]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
            found = asyncio.run(_measure_group(wanted, work, Path(directory), told))
        rows += [row_of(family, found[family.name], work) for family in wanted]
    by_name = {row.family.name: row for row in rows}
    pairs = [(row, by_name.get(row.family.beside)) for row in rows]
    beside = tuple(compare(row, other) for row, other in pairs if other is not None)
    return FamiliesResult(work, tuple(rows), beside, goals_of(by_name, work))


async def _measure_group(
    families: list[Family], work: Workload, directory: Path, told: Told
) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    turns: list[Turns] = []
    async with contextlib.AsyncExitStack() as stack:
        for number, family in enumerate(families):
            told(f"{family.name}, daemons start")
            place = directory / str(number)
            place.mkdir()
            if family.name == PREFILL_ONLY:
                alone = stack.enter_context(one_daemon(place, family.settings))
                side = await _session(stack, alone)
                found[family.name] = await count_leases(work, side)
                continue
            pair = stack.enter_context(two_daemons(place, family.settings, prefill=family.prefill))
            sides = [await _session(stack, one) for one in (pair.prefill, pair.decode)]
            turns.append(Turns(family, work, *sides))
        for one in turns:
            told(f"{one.family.name}, until one has to wait")
            await one.fill()
        if turns:
            told(f"{' and '.join(one.family.name for one in turns)}, handoffs")
        for _ in range(work.repeats):
            for one in turns:
                await one.turn()
        for one in turns:
            found[one.family.name] = await one.seen()
    return found


async def _session(stack: contextlib.AsyncExitStack, daemon: Daemon) -> Side:
    node = await stack.enter_async_context(kvd.client.connect(daemon.client, name="bench"))
    return Side(daemon, node)


@click.command("families")
@click.option("--repeats", default=40, show_default=True, help="Timed handoffs per family.")
@json_option
def command(repeats: int, file: Path | None) -> None:
    """What a request of each pool family holds, sends and leaves room for.

    Two daemons for each family and prompts of 32,768 tokens; the closed form stands beside each
    measurement, and the command fails where one differs by more than 1 %.
    """
    work = Workload(repeats=repeats)
    names = [name for group in GROUPS for name in group]
    try:
        with bar("families", steps_of(names)) as told:
            result = run(work, names, told)
    except DaemonFailed as failed:
        raise click.ClickException(str(failed)) from failed
    report(result, file)


def report(result: FamiliesResult, file: Path | None) -> None:
    """Print it, write it, and fail where arithmetic says something else.

    Raises:
        ClickException: a measurement is not as its closed form says.
    """
    _show(result)
    if file is not None:
        write_json(file, result)
    if result.disagreements:
        raise click.ClickException(_told_apart(result.disagreements))


def steps_of(names: Sequence[str]) -> int:
    """How often the bar moves: daemons start, handoffs of a group, room runs out."""
    served = [name for name in names if name != PREFILL_ONLY]
    groups = [group for group in GROUPS if any(name in served for name in group)]
    return len(names) + len(groups) + len(served)


def _told_apart(checks: Sequence[Check]) -> str:
    lines = [
        f"{one.family}: {one.what}: measured {one.measured:g}, closed form {one.closed:g}"
        for one in checks
    ]
    return "\n".join(("what was measured is not what arithmetic says", *lines))


HEADERS: Final = (
    "family",
    "pages held",
    "form",
    "MiB held",
    "form",
    "MiB sent",
    "form",
    "admitted",
    "form",
    "short of",
    "handoff p50 ms",
    "p99",
)


def _show(result: FamiliesResult) -> None:
    work = result.workload
    show_table(
        f"Requests of {work.prompt_tokens} + {work.answer_tokens} tokens, pages of "
        f"{work.page_tokens}, {work.device_mib} MiB on the device",
        HEADERS,
        [line for row in result.rows for line in (_row(row, work), *_prefill_rows(row, work))],
    )
    show_table(
        "The first beside the second, in the same run",
        ("", "admitted", "held on the device", "form", "sent", "handoff p50"),
        [_ratios(one) for one in result.beside],
    )
    show_notes(_notes(result))
    show_goals(result.goals)


def _row(row: FamilyResult, work: Workload) -> list[str]:
    family, seen = row.family, row.seen
    handoffs = [f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}"] if seen.times_s else ["-", "-"]
    return [
        family.name,
        " + ".join(f"{one.held_pages} {one.name}" for one in seen.parts),
        "+".join(str(one.held_pages) for one in family.parts),
        _mib(*(seen.held_bytes(tier) for tier in (DEVICE, HOST))),
        _mib(*(family.held_bytes(tier) for tier in (DEVICE, HOST))),
        _mib(row.sent_bytes),
        _mib(family.sent_bytes),
        str(seen.admitted),
        str(family.admitted(work)),
        seen.short_of,
        *handoffs,
    ]


def _prefill_rows(row: FamilyResult, work: Workload) -> list[list[str]]:
    """What the prefill side of a pool with windows holds: chunk after chunk, and all at once."""
    seen, page = row.seen, work.page_tokens
    if not seen.prefill_window_pages:
        return []
    kv, windows = row.family.parts
    form = window_pages(work.window_tokens, work.chunk_tokens, page)
    rows = []
    for how, got, wanted in (
        ("chunks", seen.prefill_window_pages, form),
        ("at once", seen.prefill_window_pages_unslid, kv.sent_pages),
    ):
        held, closed = (
            kv.sent_pages * kv.page_bytes + pages * windows.page_bytes for pages in (got, wanted)
        )
        what = [f"{kv.sent_pages} {kv.name} + {got} {windows.name}", f"{kv.sent_pages}+{wanted}"]
        name = f"{row.family.name}, prefill, {how}"
        rows.append([name, *what, _mib(held), _mib(closed), *(["-"] * (len(HEADERS) - 5))])
    return rows


def _mib(device_bytes: float, host_bytes: float = 0) -> str:
    text = f"{device_bytes / MIB:.2f}"
    return f"{text} + {host_bytes / MIB:.2f} host" if host_bytes else text


def _ratios(one: Beside) -> list[str]:
    return [
        f"{one.name} / {one.other}",
        f"{one.admitted:.2f}",
        f"{one.held:.3f}",
        f"{one.held_closed:.3f}",
        f"{one.sent:.3f}",
        f"{one.p50:.2f}" if one.p50 else "-",
    ]


def _notes(result: FamiliesResult) -> list[str]:
    work = result.workload
    notes = [
        "form: the closed form, from the shapes alone; pages of every token ceil((P+A)/p), of a "
        "window ceil((W+s)/p)+1, of a device buffer B/p, a state is 1; sent ceil(P/p) and, of a "
        "window, ceil(P/p)-floor((P-1-W)/p); admitted floor((memory - null pages) / bytes held)",
        f"P {work.prompt_tokens}, A {work.answer_tokens}, p {work.page_tokens}, W "
        f"{work.window_tokens}, B {work.buffer_tokens}, and s = {work.step_tokens} tokens between "
        "two slides of the decode side",
        "pages held: the most that the decode side's lease has from delivery to the end of the "
        "answer, as its engine sees it; sent: by both daemons' own counts, per handoff",
        "admitted: prompts delivered by handoffs and held, until the next receive had to wait; the "
        "daemon's count of pages must agree with the engine's then, and be 0 when all are released",
        f"handoff: from the call of finish() to its answer, nothing posted before; of "
        f"{work.repeats} each, families that are compared in turns, every page written before",
        "mha is six layers in full; swa has the same, five of them with a window",
        f"prefill: the lease of the prefill side, computed in chunks of {work.chunk_tokens} tokens "
        "with a slide after each, and at once without",
        f"hisparse: {work.host_mib} MiB of host DRAM; what it has on the device is bounded by the "
        "same memory as for the others",
        "recurrent has no attention layer: its kv is counted in tokens and takes no byte",
    ]
    notes += [
        f"{row.family.name}: {row.seen.admitted} requests of {work.room_tokens} logical tokens, a "
        f"placeholder of {row.seen.placeholder_bytes} bytes, no byte else"
        for row in result.rows
        if row.seen.placeholder_bytes
    ]
    notes += [
        f"{row.family.name}: fetch of {fetch.misses} pages into the device buffer "
        f"{fetch.cold_ms:.2f} ms, of the same again, {fetch.hits} hits, {fetch.warm_ms:.2f} ms"
        for row in result.rows
        if (fetch := row.seen.fetch) is not None
    ]
    return notes
