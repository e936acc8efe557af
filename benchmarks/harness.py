"""One harness for all benchmarks: what their JSON file says beside the figures.

What lives here: date, machine, versions and parameters of a result; how it is run and shown is
``kvd.bench.report``. What must not: anything that is measured. A benchmark is a function of its
parameters that measures kvd and its reference in the same run.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.bench.report import BenchmarkResult, measurement

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from kvd.bench.report import Told

Parameter = str | int | float | bool | tuple[int | str, ...] | None

PACKAGES: Final = ("kvd", "numpy", "torch", "nixl", "pyzmq", "uvloop", "msgspec")


class BenchmarkFile(msgspec.Struct, frozen=True):
    """The JSON file: what was found, of what, where, when, with what."""

    name: str
    date: str
    machine: str
    cpus: int
    python: str
    versions: dict[str, str]
    parameters: dict[str, Parameter]
    found: BenchmarkResult


def benchmark(
    name: str,
    run: Callable[..., BenchmarkResult],
    *options: Callable[[click.Command], click.Command],
) -> click.Command:
    """The command that runs it: ``run`` gets ``told`` to say what it does, and the options."""

    @functools.wraps(run)
    def found_and_file(
        told: Told, **given: Parameter | Path
    ) -> tuple[BenchmarkResult, BenchmarkFile]:
        found = run(told, **given)
        parameters = {
            k: value.name if isinstance(value, Path) else value for k, value in given.items()
        }
        return found, BenchmarkFile(
            name=name,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=machine(),
            cpus=len(os.sched_getaffinity(0)),
            python=platform.python_version(),
            versions={package: metadata.version(package) for package in PACKAGES},
            parameters=parameters,
            found=found,
        )

    return measurement(name, found_and_file, options)


def machine() -> str:
    """What this measures on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(iter(names), platform.machine())
    return f"{len(os.sched_getaffinity(0))} cores ({name}), {platform.platform(terse=True)}"
