"""``benchmarks families``: what a request of each pool family holds, sends and leaves room for.

Two real daemons for each family, handoffs over NIXL, one workload. Beside each measurement stands
its closed form, by arithmetic from the shapes alone (``family_forms``); where one does not agree,
the command fails. Families that are compared take turns, so that whatever else the machine does
falls on all of them.

A prompt's KV is computed in chunks on the prefill side, its windows sliding along, then handed over
and decoded: the decode side slides through the whole answer, and what counts is the most that it
holds at any moment. A handoff is timed from the call of ``finish`` to its answer. Room runs out
when a request is in the daemon's queue instead of answered. That comes first: until both pools have
been written once, handoffs are slower, because the kernel maps their memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec
import numpy as np

import kvd.client
from benchmarks.family_forms import (
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
)
from benchmarks.harness import benchmark
from kvd.bench.engines import DEADLINE_S, EngineSide, OneHandoff
from kvd.bench.report import BenchmarkResult, Goal, ResultColumn, ResultTable, at_least, at_most
from kvd.harness.daemons import DaemonFailed, one_daemon, two_daemons
from kvd.types import NULL_PAGE

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from numpy.typing import NDArray

    from kvd.bench.report import Measured, Told
    from kvd.client import Lease
    from kvd.wire.snapshot import Snapshot

L = TypeVar("L")

AGREE: Final = 0.01
"""How far a measurement may be from its closed form, as a share of that."""


class ComponentSeen(msgspec.Struct, frozen=True):
    """One component of a request as an engine sees it; ``held_pages`` at most, decode side."""

    name: str
    tier: str
    page_bytes: int
    pool_bytes: int
    held_pages: int


class FamilySeen(msgspec.Struct, frozen=True):
    """What was measured of one family. ``figures`` are named as in ``FamilyForm.figures``.

    ``times_s``: of the handoffs; ``fetches_s``: of filling a device buffer, and of wanting the same
    pages again. The first request that had to wait did so for the component ``short_of``.
    """

    parts: tuple[ComponentSeen, ...]
    figures: dict[str, float]
    short_of: str
    times_s: tuple[float, ...] = ()
    fetches_s: tuple[tuple[float, float], ...] = ()

    def held_bytes(self, tier: str) -> int:
        """Bytes of one request in that memory."""
        return sum(part.held_pages * part.page_bytes for part in self.parts if part.tier == tier)

    def pool_bytes(self, tier: str) -> int:
        """Bytes of the whole pool there, null pages included."""
        return sum(part.pool_bytes for part in self.parts if part.tier == tier)

    @property
    def p50_ms(self) -> float | None:
        """Of a handoff; None where there was none."""
        return statistics.median(self.times_s) * 1e3 if self.times_s else None


# ---- one family at work --------------------------------------------------------------------------


class FamilyTurns:
    """The daemons of one family, and its handoffs one after the other; one daemon: leases alone."""

    def __init__(self, family: FamilyForm, work: FamilyWorkload, sides: list[EngineSide]) -> None:
        self.family = family
        self._work = work
        self._sides = sides
        self._prefill, self._decode = sides[0], sides[-1]
        self._parts = self._decode.node.pool("main").memory.components
        self._held = dict.fromkeys((component.name for component in self._parts), 0)
        of_prefill = self._prefill.node.pool("main").memory.components
        self._windows = [component.name for component in of_prefill if component.extent == "tail"]
        self._slid = 0
        """The most window pages that the prefill side's lease had mapped."""
        self._room = 0
        self._short_of = ""
        self._figures: dict[str, float] = {}
        self._times_s: list[float] = []
        self._fetches_s: list[tuple[float, float]] = []

    async def fill(self) -> None:
        """Hold one request after the other, until one has to wait; then let all of them go."""
        kept: list[Lease] = []
        while (lease := await self._one_more()) is not None:
            kept.append(lease)
        full = await self._decode.node.snapshot()
        self._figures = {
            "requests admitted": len(kept),
            "bytes of a placeholder": full.pools[0].placeholder_bytes,
        }
        for name, pages in leased_pages(full).items():
            self._figures[f"pages of {name} by the daemon's count"] = pages
        for held in kept:
            await held.release()

    async def turn(self) -> None:
        """One handoff that is timed, decoded to the end of its answer, and released."""
        handoff = await self._meet()
        if handoff is None:
            raise DaemonFailed(f"{self.family.name}: a prompt has to wait, and nobody has pages")
        began_s, ended_s = await handoff.finish()
        self._times_s.append(ended_s - began_s)
        lease, work = handoff.receive.lease, self._work
        self._look(lease)
        for upto in range(work.prompt_tokens, work.room_tokens, work.step_tokens):
            await lease.slide(upto)
            self._look(lease)
        for buffer in self._parts:
            if buffer.extent == "buffer":
                await self._fetch_twice(lease, range(work.buffer_tokens // buffer.page_size))
        await handoff.end()

    async def seen(self) -> FamilySeen:
        """What came of it all. Nothing is held any more, or it is told.

        Raises:
            DaemonFailed: a handoff has failed.
        """
        figures = self._figures
        if self._windows:
            figures["window pages of a prefill"] = self._slid
            lease = await self._prefill.node.lease(self._fresh())
            figures["the same, computed at once"] = distinct(lease, self._windows[0])
            await lease.release()
        every = [await side.node.snapshot() for side in self._sides]
        if any(snapshot.totals.handoffs_failed for snapshot in every):
            raise DaemonFailed(f"{self.family.name}: a handoff has failed")
        handed_off = max(1, every[-1].totals.handoffs_delivered)
        figures |= {
            "components": len(self._parts),
            "bytes sent": every[0].totals.sent_bytes / handed_off,
            "bytes received": every[-1].totals.received_bytes / handed_off,
            "pages still held at the end": sum(
                sum(leased_pages(snapshot).values()) for snapshot in every
            ),
            "broken invariants": sum(
                snapshot.totals.violations + snapshot.audit.findings for snapshot in every
            ),
        }
        parts = tuple(
            ComponentSeen(
                name=component.name,
                # What is only counted is the device's.
                tier=HOST if component.tier == HOST else DEVICE,
                page_bytes=component.total_bytes // component.pages,
                pool_bytes=component.total_bytes,
                held_pages=self._held[component.name],
            )
            for component in self._parts
        )
        for part in parts:
            figures[f"pages of {part.name} held"] = part.held_pages
            figures[f"bytes of {part.name} held"] = part.held_pages * part.page_bytes
        return FamilySeen(
            parts=parts,
            figures=figures,
            short_of=self._short_of,
            times_s=tuple(self._times_s),
            fetches_s=tuple(self._fetches_s),
        )

    async def _one_more(self) -> Lease | None:
        """A request that is served, and holds what it needs; None when it has to wait."""
        if len(self._sides) > 1:
            handoff = await self._meet()
            if handoff is None:
                return None
            await handoff.finish()
            await handoff.lease.release(())
            return handoff.receive.lease
        reserve = self._work.answer_tokens
        opening = self._decode.node.lease(
            self._fresh(), reserve_tokens=reserve, deadline_s=DEADLINE_S
        )
        lease = await self._unless_waiting(opening)
        if lease is not None:
            self._look(lease)
        return lease

    async def _meet(self) -> OneHandoff | None:
        """A prompt that is computed and received for; None when the receive has to wait."""
        tokens = self._fresh()
        room, chunk = self._room, self._work.chunk_tokens
        lease = await self._prefill.node.lease(tokens, step_tokens=chunk)
        for upto in range(chunk, len(tokens) + 1, chunk) if self._windows else ():
            self._look_at_windows(lease)
            await lease.slide(upto)
        self._look_at_windows(lease)
        receive = await self._unless_waiting(
            self._decode.node.receive(
                room,
                tokens,
                self._prefill.daemon.name,
                reserve_tokens=self._work.answer_tokens,
                step_tokens=self._work.step_tokens,
                deadline_s=DEADLINE_S,
            )
        )
        if receive is None:
            await lease.release()
            return None
        send = await self._prefill.node.send(room, tokens, lease=lease, deadline_s=DEADLINE_S)
        await send.accepted()
        return OneHandoff(lease, receive, send)

    async def _unless_waiting(self, request: Coroutine[object, object, L]) -> L | None:
        """The answer to ``request``; None if it has to wait: then it is withdrawn.

        A daemon takes the requests of a session in order, and answers at once what it does not
        queue: its state after the request shows the request if it waits.
        """
        asked = asyncio.ensure_future(request)
        snapshot = await asyncio.ensure_future(self._decode.node.snapshot())
        short = [request for request in snapshot.waiting if request.missing_pages]
        if not short:
            return await asked
        self._short_of = short[0].budget
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return None

    async def _fetch_twice(self, lease: Lease, wanted: range) -> None:
        """Want the first pages of a prompt in the device buffer, then the same again."""
        began_s = time.perf_counter()
        first = await lease.fetch(wanted)
        middle_s = time.perf_counter()
        again = await lease.fetch(wanted)
        self._fetches_s.append((middle_s - began_s, time.perf_counter() - middle_s))
        self._figures |= {
            "pages copied by a first fetch": first.misses,
            "hits of a second": again.hits,
            "bytes copied by both": first.copied_bytes + again.copied_bytes,
        }

    def _look(self, lease: Lease) -> None:
        """Count the pages of each component that the lease has now, and keep the most."""
        for name in self._held:
            self._held[name] = max(self._held[name], distinct(lease, name))

    def _look_at_windows(self, lease: Lease) -> None:
        self._slid = max([self._slid, *(distinct(lease, name) for name in self._windows)])

    def _fresh(self) -> NDArray[np.int32]:
        """A prompt of which nothing is ever cached; its room is ``self._room``."""
        start = self._room * self._work.prompt_tokens
        self._room += 1
        return np.arange(start, start + self._work.prompt_tokens, dtype=np.int32)


def leased_pages(snapshot: Snapshot) -> dict[str, int]:
    """Pages that leases have, by component: their own, cached ones that they need, quarantined."""
    return {
        pool.component: pool.held_pages + pool.locked_pages + pool.quarantined_pages
        for pool in snapshot.pools
    }


def distinct(lease: Lease, component: str) -> int:
    """How many pages a lease has of a component, the null page not counted."""
    pages = lease.pages_of(component)
    return int(np.unique(pages[pages != NULL_PAGE]).size)


async def _measure_group(
    families: list[FamilyForm], work: FamilyWorkload, directory: Path, told: Told
) -> dict[str, FamilySeen]:
    turns: list[FamilyTurns] = []
    async with contextlib.AsyncExitStack() as stack:
        for number, family in enumerate(families):
            told(f"{family.name}, daemons start")
            place = directory / str(number)
            place.mkdir()
            if family.name == PREFILL_ONLY:
                daemons = [stack.enter_context(one_daemon(place, family.settings))]
            else:
                pair = two_daemons(place, family.settings, prefill=family.prefill)
                both = stack.enter_context(pair)
                daemons = [both.prefill, both.decode]
            sides = []
            for daemon in daemons:
                session = kvd.client.connect(daemon.client, name="bench")
                sides.append(EngineSide(daemon, await stack.enter_async_context(session)))
            turns.append(FamilyTurns(family, work, sides))
        for each in turns:
            told(f"{each.family.name}, until one has to wait")
            await each.fill()
        handing = [each for each in turns if each.family.name != PREFILL_ONLY]
        told(f"{' and '.join(turn.family.name for turn in handing)}, handoffs")
        for _ in range(work.repeats):
            for each in handing:
                await each.turn()
        return {each.family.name: await each.seen() for each in turns}


def measure(
    work: FamilyWorkload, names: Sequence[str], told: Told
) -> list[tuple[FamilyForm, FamilySeen]]:
    """Measure these families.

    Raises:
        DaemonFailed: a daemon, or a handoff, did not do what it should.
    """
    families = families_of(work)
    found: list[tuple[FamilyForm, FamilySeen]] = []
    for group in GROUPS:
        wanted = [families[name] for name in group if name in names]
        if wanted:
            with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
                seen = asyncio.run(_measure_group(wanted, work, Path(directory), told))
            found += [(family, seen[family.name]) for family in wanted]
    return found


# ---- what is said of it --------------------------------------------------------------------------


def disagreements(family: FamilyForm, seen: FamilySeen, work: FamilyWorkload) -> list[str]:
    """What was measured otherwise than arithmetic says: by 1 %; by anything where 0 is due."""
    forms = family.figures(work)
    return [
        f"{family.name}: {what}: measured {measured:g}, closed form {forms[what]:g}"
        for what, measured in seen.figures.items()
        if abs(measured - forms[what]) > AGREE * abs(forms[what])
    ]


def result_of(
    found: Sequence[tuple[FamilyForm, FamilySeen]], work: FamilyWorkload
) -> BenchmarkResult:
    """Tables and goals; wrong is what arithmetic says otherwise."""
    by_name = {family.name: (family, seen) for family, seen in found}
    apart = [each for pair in found for each in disagreements(*pair, work)]
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"Requests of {work.prompt_tokens} + {work.answer_tokens} tokens, pages of "
                f"{work.page_tokens}, {work.device_mib} MiB on the device",
                columns=COLUMNS,
                rows=tuple(row for pair in found for row in _rows(*pair, work)),
            ),
            ResultTable(
                title="The first beside the second, in the same run",
                columns=RATIO_COLUMNS,
                rows=tuple(
                    _ratios(pair, by_name[pair[0].beside])
                    for pair in found
                    if pair[0].beside in by_name
                ),
            ),
        ),
        goals=tuple(_goals({name: seen for name, (_, seen) in by_name.items()}, work)),
        notes=tuple(_notes(found, work)),
        wrong=("what was measured is not what arithmetic says", *apart) if apart else (),
    )


def _rows(family: FamilyForm, seen: FamilySeen, work: FamilyWorkload) -> list[Measured]:
    """What a request holds; with windows, what the prefill side does, in chunks and at once."""
    figures, forms = seen.figures, family.figures(work)
    rows: list[Measured] = [
        {
            "family": family.name,
            "held_pages": " + ".join(f"{part.held_pages} {part.name}" for part in seen.parts),
            "held_pages_form": tuple(part.held_pages for part in family.parts),
            "held": _mib(*(seen.held_bytes(tier) for tier in (DEVICE, HOST))),
            "held_form": _mib(*(family.held_bytes(tier) for tier in (DEVICE, HOST))),
            "sent_mib": figures["bytes sent"] / MIB,
            "sent_form_mib": family.sent_bytes / MIB,
            "admitted": int(figures["requests admitted"]),
            "admitted_form": family.admitted(work),
            "short_of": seen.short_of,
            "p50_ms": seen.p50_ms,
            "p99_ms": float(np.percentile(seen.times_s, 99)) * 1e3 if seen.times_s else None,
        }
    ]
    for how, what in (
        ("chunks", "window pages of a prefill"),
        ("at once", "the same, computed at once"),
    ):
        if what not in figures:
            continue
        kv, windows = family.parts
        got, wanted = int(figures[what]), int(forms[what])
        held, closed = (
            kv.sent_pages * kv.page_bytes + pages * windows.page_bytes for pages in (got, wanted)
        )
        rows.append(
            {
                "family": f"{family.name}, prefill, {how}",
                "held_pages": f"{kv.sent_pages} {kv.name} + {got} {windows.name}",
                "held_pages_form": (kv.sent_pages, wanted),
                "held": _mib(held),
                "held_form": _mib(closed),
            }
        )
    return rows


def _ratios(one: tuple[FamilyForm, FamilySeen], other: tuple[FamilyForm, FamilySeen]) -> Measured:
    """One family beside another one, the first over the second."""
    (family, seen), (beside, of_beside) = one, other
    mine, theirs = seen.figures, of_beside.figures
    return {
        "families": f"{family.name} / {beside.name}",
        "admitted": mine["requests admitted"] / theirs["requests admitted"],
        "held": seen.held_bytes(DEVICE) / of_beside.held_bytes(DEVICE),
        "held_form": family.held_bytes(DEVICE) / beside.held_bytes(DEVICE),
        "sent": mine["bytes sent"] / theirs["bytes sent"],
        "p50": seen.p50_ms / of_beside.p50_ms if seen.p50_ms and of_beside.p50_ms else None,
    }


def _goals(seen: dict[str, FamilySeen], work: FamilyWorkload) -> list[Goal]:
    """What was to be reached, of the families that were measured."""
    largest = max(family.pool_bytes(DEVICE) for family in seen.values())
    goals = [at_most("MiB of the largest pool on the device", work.device_mib, largest / MIB)]
    admitted = {name: family.figures["requests admitted"] for name, family in seen.items()}
    if SWA in seen and MHA in seen:
        ratio = admitted[SWA] / admitted[MHA]
        goals.append(at_least("requests admitted, swa tail / full allocation", 5.0, ratio))
    if HISPARSE in seen and INDEXED in seen:
        more = admitted[HISPARSE] / admitted[INDEXED]
        goals.append(at_least("requests admitted, hisparse / device-only", 1.0, more))
        held = families_of(work)[HISPARSE].held_bytes(HOST)
        used = admitted[HISPARSE] * held / seen[HISPARSE].pool_bytes(HOST)
        goals.append(at_least("host DRAM in use when hisparse is full", 0.9, used))
    return goals


def _mib(device_bytes: float, host_bytes: float = 0) -> str:
    text = f"{device_bytes / MIB:.2f}"
    return f"{text} + {host_bytes / MIB:.2f} host" if host_bytes else text


def _notes(found: Sequence[tuple[FamilyForm, FamilySeen]], work: FamilyWorkload) -> list[str]:
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
    for family, seen in found:
        figures = seen.figures
        if placeholder := figures["bytes of a placeholder"]:
            notes.append(
                f"{family.name}: {figures['requests admitted']:.0f} requests of {work.room_tokens} "
                f"logical tokens, a placeholder of {placeholder:.0f} bytes, no byte else"
            )
        if seen.fetches_s:
            cold_s, warm_s = (statistics.median(each) for each in zip(*seen.fetches_s, strict=True))
            notes.append(
                f"{family.name}: fetch of {figures['pages copied by a first fetch']:.0f} pages "
                f"into the device buffer {cold_s * 1e3:.2f} ms, of the same again, "
                f"{figures['hits of a second']:.0f} hits, {warm_s * 1e3:.2f} ms"
            )
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
    click.option("--repeats", default=40, show_default=True, help="Handoffs per family."),
    click.option(
        "--family",
        "families",
        multiple=True,
        type=click.Choice([name for group in GROUPS for name in group]),
        help="Only this one; may be repeated.",
    ),
)
