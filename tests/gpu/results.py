"""What a run on a GPU has found: a file that ``docs/benchmarks`` keeps and shows.

A figure that was measured is a float; what was set (a size, a count) is an int or a text. A
rehearsal checks that every figure is one, and writes none of them down.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from benchmarks.harness import machine
from kvd.bench.report import BenchmarkResult
from kvd.device.cuda import Runtime
from tests.gpu.face import Face

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.device.cuda_library import NoCuda

T = TypeVar("T")

PACKAGES = ("kvd", "torch", "transformers", "vllm", "nixl", "nixl-cu12", "nixl-cu13", "numpy")
DRIVER = Path("/proc/driver/nvidia/version")


class Setting(NamedTuple):
    """On what a part is run."""

    is_rehearsal: bool

    def of(self, measured: T, rehearsed: T) -> T:
        """A size, of a device or of its double."""
        return rehearsed if self.is_rehearsal else measured


class PartSkipped(Exception):
    """This host cannot show it; the message says why."""


class PartOutcome(msgspec.Struct, frozen=True):
    """What one part has found, or why it could not."""

    found: BenchmarkResult | None = None
    skipped: str = ""
    failed: str = ""
    seconds: float = 0.0


class GpuRun(msgspec.Struct, frozen=True, kw_only=True):
    """The file. ``parts`` says of each how long it took, and why it has no figures."""

    name: str
    date: str
    machine: str
    is_rehearsal: bool
    versions: dict[str, str]
    seconds: float
    parts: dict[str, str]
    found: BenchmarkResult


def flaws(found: BenchmarkResult) -> Iterator[str]:
    """What is no figure in it, and which columns nobody fills."""
    for table in found.tables:
        if not table.rows:
            yield f"{table.title}: no row"
        for column in table.columns:
            if not any(row.get(column.key) is not None for row in table.rows):
                yield f"{table.title}: no {column.key} in any row"
        for row in table.rows:
            for key, value in row.items():
                if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                    yield f"{table.title}: {key} is {value}"
    for goal in found.goals:
        if not (math.isfinite(goal.got) and goal.got > 0):
            yield f"{goal.name}: {goal.got}"


def without_figures(found: BenchmarkResult) -> BenchmarkResult:
    """The same with nothing that was measured: a double's figures are nobody's."""
    tables = tuple(
        msgspec.structs.replace(
            table,
            rows=tuple(
                {key: None if isinstance(one, float) else one for key, one in row.items()}
                for row in table.rows
            ),
        )
        for table in found.tables
    )
    return msgspec.structs.replace(found, tables=tables, goals=())


def merged(found: Sequence[BenchmarkResult]) -> BenchmarkResult:
    """All of them, one behind the other."""
    return BenchmarkResult(
        tables=tuple(table for one in found for table in one.tables),
        goals=tuple(goal for one in found for goal in one.goals),
        notes=tuple(note for one in found for note in one.notes),
        wrong=tuple(wrong for one in found for wrong in one.wrong),
    )


def file_of(
    name: str, where: str, outcomes: dict[str, PartOutcome], *, is_rehearsal: bool, seconds: float
) -> GpuRun:
    """What to write of a run."""
    found = merged([one.found for one in outcomes.values() if one.found is not None])
    return GpuRun(
        name=name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=where,
        is_rehearsal=is_rehearsal,
        versions=versions(),
        seconds=round(seconds, 1),
        parts={part: said(outcome) for part, outcome in outcomes.items()},
        found=without_figures(found) if is_rehearsal else found,
    )


def said(outcome: PartOutcome) -> str:
    """How a part ended, in a few words."""
    if outcome.failed:
        return f"failed: {outcome.failed}"
    if outcome.skipped:
        return f"skipped: {outcome.skipped}"
    return f"{outcome.seconds:.0f} s"


def device_told(runtime: Runtime | NoCuda) -> str:
    """The devices, driver and CUDA of this host, in a line."""
    if not isinstance(runtime, Runtime):
        return "no GPU"
    face, count = Face(runtime.path), runtime.device_count()
    if face.is_double:
        return f"{count} devices of the double of CUDA {runtime.version()}"
    names = sorted({face.name_of(device) for device in range(count)})
    driver = runtime.driver_version()
    if DRIVER.exists():
        words = DRIVER.read_text().split()
        driver = next((word for word in words if word[:1].isdigit() and "." in word), driver)
    return f"{count} {' and '.join(names)}, driver {driver}, CUDA {runtime.version()}"


def place_told(runtime: Runtime | NoCuda) -> str:
    """Where this is measured."""
    return f"{device_told(runtime)}; {machine()}"


def versions() -> dict[str, str]:
    """Of the packages that matter here, as far as they are installed."""
    found = {"python": platform.python_version()}
    for one in PACKAGES:
        try:
            found[one] = metadata.version(one)
        except metadata.PackageNotFoundError:
            found[one] = ""
    return {name: version for name, version in found.items() if version}


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))
