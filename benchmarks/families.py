"""``benchmarks families``: what a request of each pool family holds, sends and leaves room for.

Two real daemons for each family, handoffs over NIXL (``family_runs``), one workload. Beside each
measurement stands its closed form (``family_forms``); where one does not agree, the command fails.
Families that are compared take turns, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

import kvd.client
from benchmarks.family_forms import (
    BUFFER,
    DEVICE,
    GROUPS,
    HISPARSE,
    HOST,
    INDEXED,
    MHA,
    MIB,
    PREFILL_ONLY,
    SWA,
    FamilyForm,
    FamilyWorkload,
    families_of,
    pages_of,
    window_pages,
)
from benchmarks.family_runs import FamilySeen, FamilyTurns, count_leases
from benchmarks.harness import BenchmarkResult, ResultColumn, ResultTable, benchmark
from kvd.bench.engines import EngineSide
from kvd.bench.report import Goal, at_least, at_most
from kvd.harness.daemons import one_daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Measured
    from kvd.bench.report import Told
    from kvd.harness.daemons import DaemonProcess

AGREE: Final = 0.01
"""How far a measurement may be from its closed form, as a share of that."""


class FormCheck(msgspec.Struct, frozen=True):
    """One measurement beside its closed form."""

    family: str
    what: str
    measured: float
    closed: float

    @property
    def agrees(self) -> bool:
        """To 1 %; exactly where nothing is expected."""
        return abs(self.measured - self.closed) <= AGREE * abs(self.closed)


class FamilyResult(msgspec.Struct, frozen=True):
    """One row: what was measured, what should have been, and how long handoffs took."""

    family: FamilyForm
    seen: FamilySeen
    checks: tuple[FormCheck, ...]
    p50_ms: float
    p99_ms: float

    @property
    def sent_bytes(self) -> float:
        """Of one handoff."""
        return self.seen.sent_bytes / max(1, self.seen.handed_off)


def row_of(family: FamilyForm, seen: FamilySeen, work: FamilyWorkload) -> FamilyResult:
    """One family's measurements beside their closed forms."""
    p50_s, p99_s = np.percentile(seen.times_s, [50, 99]) if seen.times_s else (0.0, 0.0)
    checks = checks_of(family, seen, work)
    return FamilyResult(
        family=family,
        seen=seen,
        checks=checks,
        p50_ms=float(p50_s) * 1e3,
        p99_ms=float(p99_s) * 1e3,
    )


def checks_of(family: FamilyForm, seen: FamilySeen, work: FamilyWorkload) -> tuple[FormCheck, ...]:
    """Everything that arithmetic can tell beforehand."""
    named = {one.name: one for one in seen.parts}
    pairs: list[tuple[str, float, float]] = [
        ("components", len(seen.parts), len(family.parts)),
        ("requests admitted", seen.admitted, family.admitted(work)),
        ("bytes sent", seen.sent_bytes, seen.handed_off * family.sent_bytes),
        ("bytes received", seen.received_bytes, seen.handed_off * family.sent_bytes),
        ("bytes of a placeholder", seen.placeholder_bytes, family.counted_page_bytes),
        ("pages still held at the end", seen.left_pages, 0),
        ("broken invariants", seen.violations, 0),
    ]
    for part in family.parts:
        got = named[part.name]
        pairs += [
            (f"pages of {part.name} held", got.held_pages, part.held_pages),
            (f"bytes of {part.name} held", got.held_pages * got.page_bytes, part.held_bytes),
        ]
        if part.name in seen.counted_pages:
            counted, wanted = seen.counted_pages[part.name], seen.admitted * part.held_pages
            pairs.append((f"pages of {part.name} by the daemon's count", counted, wanted))
        if part.name == BUFFER and seen.fetch is not None:
            fetched = (seen.fetch.misses, seen.fetch.hits, seen.fetch.copied_bytes)
            wanted_pages = (part.held_pages, part.held_pages, part.held_bytes)
            what = ("pages copied by a first fetch", "hits of a second", "bytes copied by both")
            pairs += zip(what, fetched, wanted_pages, strict=True)
    if family.name == SWA:
        page, window, chunk = work.page_tokens, work.window_tokens, work.chunk_tokens
        slid, unslid = seen.prefill_window_pages, seen.prefill_window_pages_unslid
        pairs += [
            ("window pages of a prefill", slid, window_pages(window, chunk, page)),
            ("the same, computed at once", unslid, pages_of(work.prompt_tokens, page)),
        ]
    return tuple(FormCheck(family.name, *pair) for pair in pairs)


def ratios_of(row: FamilyResult, other: FamilyResult) -> Measured:
    """One family beside another one, the first over the second."""
    p50 = row.p50_ms / other.p50_ms if other.p50_ms else 0.0
    return {
        "families": f"{row.family.name} / {other.family.name}",
        "admitted": row.seen.admitted / other.seen.admitted,
        "held": row.seen.held_bytes(DEVICE) / other.seen.held_bytes(DEVICE),
        "held_form": row.family.held_bytes(DEVICE) / other.family.held_bytes(DEVICE),
        "sent": row.sent_bytes / other.sent_bytes,
        "p50": p50 or None,
    }


def goals_of(rows: dict[str, FamilyResult], work: FamilyWorkload) -> tuple[Goal, ...]:
    """What was to be reached, of the families that were measured."""
    largest = max(row.seen.pool_bytes(DEVICE) for row in rows.values())
    goals = [at_most("MiB of the largest pool on the device", work.device_mib, largest / MIB)]
    if SWA in rows and MHA in rows:
        ratio = rows[SWA].seen.admitted / rows[MHA].seen.admitted
        goals.append(at_least("requests admitted, swa tail / full allocation", 5.0, ratio))
    if HISPARSE in rows and INDEXED in rows:
        more = rows[HISPARSE].seen.admitted / rows[INDEXED].seen.admitted
        held = rows[HISPARSE].family.held_bytes(HOST)
        goals.append(at_least("requests admitted, hisparse / device-only", 1.0, more))
        used = rows[HISPARSE].seen.admitted * held / rows[HISPARSE].seen.pool_bytes(HOST)
        goals.append(at_least("host DRAM in use when hisparse is full", 0.9, used))
    return tuple(goals)


def measure(work: FamilyWorkload, names: Sequence[str], told: Told) -> list[FamilyResult]:
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
    return rows


async def _measure_group(
    families: list[FamilyForm], work: FamilyWorkload, directory: Path, told: Told
) -> dict[str, FamilySeen]:
    found: dict[str, FamilySeen] = {}
    turns: list[FamilyTurns] = []
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
            turns.append(FamilyTurns(family, work, *sides))
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


async def _session(stack: contextlib.AsyncExitStack, daemon: DaemonProcess) -> EngineSide:
    node = await stack.enter_async_context(kvd.client.connect(daemon.client, name="bench"))
    return EngineSide(daemon, node)


def result_of(rows: Sequence[FamilyResult], work: FamilyWorkload) -> BenchmarkResult:
    """Tables and goals; wrong is what arithmetic says otherwise."""
    by_name = {row.family.name: row for row in rows}
    pairs = [(row, by_name.get(row.family.beside)) for row in rows]
    apart = [
        f"{one.family}: {one.what}: measured {one.measured:g}, closed form {one.closed:g}"
        for row in rows
        for one in row.checks
        if not one.agrees
    ]
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"Requests of {work.prompt_tokens} + {work.answer_tokens} tokens, pages of "
                f"{work.page_tokens}, {work.device_mib} MiB on the device",
                columns=COLUMNS,
                rows=tuple(
                    line
                    for row in rows
                    for line in (_held_row(row, work), *_prefill_rows(row, work))
                ),
            ),
            ResultTable(
                title="The first beside the second, in the same run",
                columns=RATIO_COLUMNS,
                rows=tuple(ratios_of(row, other) for row, other in pairs if other is not None),
            ),
        ),
        goals=goals_of(by_name, work),
        notes=tuple(_notes(rows, work)),
        wrong=("what was measured is not what arithmetic says", *apart) if apart else (),
    )


def _held_row(row: FamilyResult, work: FamilyWorkload) -> Measured:
    family, seen = row.family, row.seen
    return {
        "family": family.name,
        "held_pages": " + ".join(f"{one.held_pages} {one.name}" for one in seen.parts),
        "held_pages_form": tuple(one.held_pages for one in family.parts),
        "held": _mib(*(seen.held_bytes(tier) for tier in (DEVICE, HOST))),
        "held_form": _mib(*(family.held_bytes(tier) for tier in (DEVICE, HOST))),
        "sent_mib": row.sent_bytes / MIB,
        "sent_form_mib": family.sent_bytes / MIB,
        "admitted": seen.admitted,
        "admitted_form": family.admitted(work),
        "short_of": seen.short_of,
        "p50_ms": row.p50_ms or None,
        "p99_ms": row.p99_ms or None,
    }


def _prefill_rows(row: FamilyResult, work: FamilyWorkload) -> list[Measured]:
    """What the prefill side of a pool with windows holds: chunk after chunk, and all at once."""
    seen, page = row.seen, work.page_tokens
    if not seen.prefill_window_pages:
        return []
    kv, windows = row.family.parts
    form = window_pages(work.window_tokens, work.chunk_tokens, page)
    rows: list[Measured] = []
    for how, got, wanted in (
        ("chunks", seen.prefill_window_pages, form),
        ("at once", seen.prefill_window_pages_unslid, kv.sent_pages),
    ):
        held, closed = (
            kv.sent_pages * kv.page_bytes + pages * windows.page_bytes for pages in (got, wanted)
        )
        rows.append(
            {
                "family": f"{row.family.name}, prefill, {how}",
                "held_pages": f"{kv.sent_pages} {kv.name} + {got} {windows.name}",
                "held_pages_form": (kv.sent_pages, wanted),
                "held": _mib(held),
                "held_form": _mib(closed),
            }
        )
    return rows


def _mib(device_bytes: float, host_bytes: float = 0) -> str:
    text = f"{device_bytes / MIB:.2f}"
    return f"{text} + {host_bytes / MIB:.2f} host" if host_bytes else text


def _notes(rows: Sequence[FamilyResult], work: FamilyWorkload) -> list[str]:
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
        for row in rows
        if row.seen.placeholder_bytes
    ]
    notes += [
        f"{row.family.name}: fetch of {fetch.misses} pages into the device buffer "
        f"{fetch.cold_ms:.2f} ms, of the same again, {fetch.hits} hits, {fetch.warm_ms:.2f} ms"
        for row in rows
        if (fetch := row.seen.fetch) is not None
    ]
    return notes


COLUMNS: Final = (
    ResultColumn("family", "family"),
    ResultColumn("held_pages", "pages held"),
    ResultColumn("held_pages_form", "form"),
    ResultColumn("held", "MiB held"),
    ResultColumn("held_form", "form"),
    ResultColumn("sent_mib", "MiB sent", ".2f"),
    ResultColumn("sent_form_mib", "form", ".2f"),
    ResultColumn("admitted", "admitted"),
    ResultColumn("admitted_form", "form"),
    ResultColumn("short_of", "short of"),
    ResultColumn("p50_ms", "handoff p50 ms", ".1f"),
    ResultColumn("p99_ms", "p99", ".1f"),
)
RATIO_COLUMNS: Final = (
    ResultColumn("families", ""),
    ResultColumn("admitted", "admitted", ".2f"),
    ResultColumn("held", "held on the device", ".3f"),
    ResultColumn("held_form", "form", ".3f"),
    ResultColumn("sent", "sent", ".3f"),
    ResultColumn("p50", "handoff p50", ".2f"),
)


def run(told: Told, *, repeats: int, families: tuple[str, ...]) -> BenchmarkResult:
    """What a request of each pool family holds, sends and leaves room for.

    Two daemons for each family and prompts of 32,768 tokens; the closed form stands beside each
    measurement, and the command fails where one differs by more than 1 %.
    """
    work = FamilyWorkload(repeats=repeats)
    names = families or tuple(name for group in GROUPS for name in group)
    return result_of(measure(work, names, told), work)


command = benchmark(
    "families",
    run,
    (
        click.option("--repeats", default=40, show_default=True, help="Handoffs per family."),
        click.option(
            "--family",
            "families",
            multiple=True,
            type=click.Choice([name for group in GROUPS for name in group]),
            help="Only this one; may be repeated.",
        ),
    ),
)
