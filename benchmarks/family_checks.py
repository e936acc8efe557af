"""Measurements of pool families beside their closed forms: where they differ, and by how much.

What lives here: judging. What must not: measuring (``family_runs``), arithmetic (``family_forms``).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from benchmarks.family_forms import (
    BUFFER,
    DEVICE,
    HISPARSE,
    HOST,
    INDEXED,
    MHA,
    MIB,
    SWA,
    Family,
    Workload,
    pages_of,
    window_pages,
)
from benchmarks.family_runs import Seen
from kvd.bench.report import Goal, at_least, at_most

AGREE: Final = 0.01
"""How far a measurement may be from its closed form, as a share of that."""


class Check(msgspec.Struct, frozen=True):
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

    family: Family
    seen: Seen
    checks: tuple[Check, ...]
    p50_ms: float
    p99_ms: float

    @property
    def sent_bytes(self) -> float:
        """Of one handoff."""
        return self.seen.sent_bytes / max(1, self.seen.handed_off)


class Beside(msgspec.Struct, frozen=True):
    """One family beside another one: ratios, the first over the second."""

    name: str
    other: str
    admitted: float
    held: float
    held_closed: float
    sent: float
    p50: float


class FamiliesResult(msgspec.Struct, frozen=True):
    """What ``benchmarks families`` reports."""

    workload: Workload
    rows: tuple[FamilyResult, ...]
    beside: tuple[Beside, ...]
    goals: tuple[Goal, ...]

    @property
    def disagreements(self) -> tuple[Check, ...]:
        """What is not as its closed form says."""
        return tuple(one for row in self.rows for one in row.checks if not one.agrees)


def row_of(family: Family, seen: Seen, work: Workload) -> FamilyResult:
    """One family's measurements beside their closed forms."""
    p50_s, p99_s = np.percentile(seen.times_s, [50, 99]) if seen.times_s else (0.0, 0.0)
    checks = checks_of(family, seen, work)
    return FamilyResult(family, seen, checks, float(p50_s) * 1e3, float(p99_s) * 1e3)


def checks_of(family: Family, seen: Seen, work: Workload) -> tuple[Check, ...]:
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
    return tuple(Check(family.name, *pair) for pair in pairs)


def compare(row: FamilyResult, other: FamilyResult) -> Beside:
    """Their ratios."""
    held = row.seen.held_bytes(DEVICE) / other.seen.held_bytes(DEVICE)
    return Beside(
        name=row.family.name,
        other=other.family.name,
        admitted=row.seen.admitted / other.seen.admitted,
        held=held,
        held_closed=row.family.held_bytes(DEVICE) / other.family.held_bytes(DEVICE),
        sent=row.sent_bytes / other.sent_bytes,
        p50=row.p50_ms / other.p50_ms,
    )


def goals_of(rows: dict[str, FamilyResult], work: Workload) -> tuple[Goal, ...]:
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
