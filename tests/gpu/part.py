"""One part of a run on a GPU, in a process of its own: python -m tests.gpu.part NAME FILE.

What poisons a device, or hangs in it, ends with that process, and the other parts go on.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvd.client import KvdError
from kvd.device.cuda import CudaError
from tests.gpu.results import PartOutcome, PartSkipped, Setting, flaws
from tests.support.daemons import DaemonFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.bench.report import BenchmarkResult

FAILURES: Final = (
    CudaError,
    DaemonFailed,
    KvdError,
    RuntimeError,
    OSError,
    subprocess.SubprocessError,
)


class Part(NamedTuple):
    """``is_reachable``: a rehearsal needs device memory that the processor reaches."""

    about: str
    measure: str
    within_s: float
    is_reachable: bool = False


PARTS: Final = {
    "rules": Part("what the runtime does", "tests.gpu.suite:rules", 60.0),
    "copies": Part("saves and loads by the size of a piece", "tests.gpu.moves:copies", 75.0),
    "compute": Part("what computes beside copies", "tests.gpu.compute:beside", 60.0),
    "prompt": Part("a prompt found beside computed", "tests.gpu.prompt:found", 75.0),
    "demo": Part("kvd demo", "tests.gpu.suite:demo", 75.0),
    "tests": Part("pytest -m gpu", "tests.gpu.suite:everything", 150.0, is_reachable=True),
    "pools": Part("pools on a device", "tests.gpu.handoffs:pools", 45.0, is_reachable=True),
    "handoffs": Part("handoffs, by NIXL", "tests.gpu.handoffs:handoffs", 75.0, is_reachable=True),
}
"""In the order in which they are run: what was never measured comes first."""


def outcome_of(name: str, setting: Setting) -> PartOutcome:
    """Run it."""
    module, _, function = PARTS[name].measure.partition(":")
    began_s = time.monotonic()
    try:
        measure: Callable[[Setting], BenchmarkResult] = getattr(
            importlib.import_module(module), function
        )
        found = measure(setting)
    except PartSkipped as why:
        return PartOutcome(skipped=str(why), seconds=time.monotonic() - began_s)
    except FAILURES as error:
        why = f"{type(error).__name__}: {error}"
        return PartOutcome(failed=why, seconds=time.monotonic() - began_s)
    wrong = [*found.wrong, *flaws(found)]
    return PartOutcome(found, failed="; ".join(wrong), seconds=time.monotonic() - began_s)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("name", choices=PARTS)
    words.add_argument("file", type=Path)
    words.add_argument("--rehearse", action="store_true")
    asked = words.parse_args()
    # Whoever asks this process to end has its daemons ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    outcome = outcome_of(asked.name, Setting(asked.rehearse))
    asked.file.write_bytes(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
