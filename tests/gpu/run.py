"""Everything that needs a GPU, by one command: python -m tests.gpu.run [--rehearse].

Sets up nothing: it runs in the interpreter that it is started by, with the libraries that are
there. First what was found, then the tests (pytest -m gpu), then short measurements; under eight
minutes in all. ``--rehearse`` does all of it with the double of the CUDA runtime that tests/cuda
compiles, which says that this script and the tests themselves work, and nothing of a GPU.

Ends with 0 where nothing failed, also on a host without a GPU, where everything is skipped and
said to be; with 1 where something did.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvd.client import KvdError
from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import NoCuda, load
from tests.gpu import measures
from tests.support.daemons import DaemonFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTS_WITHIN_S = 300.0
MIB, REHEARSED_MIB = 512, 32
PACKAGES = ("torch", "nixl", "nixl-cu12", "nixl-cu13")
NOT_SHOWN = (
    "several devices: pools of several shards, NVLink between devices (one test, if there are two)",
    "collectives over NCCL and symmetric memory: their tests need a device for each rank",
    "two hosts: GPUDirect RDMA; everything here is one host",
)

FAILURES = (CudaError, DaemonFailed, KvdError, RuntimeError, OSError, subprocess.TimeoutExpired)

_out = Console(width=110)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--rehearse", action="store_true", help="with a double, without a GPU")
    is_rehearsal = words.parse_args().rehearse
    with tempfile.TemporaryDirectory(prefix="kvd-double-") as directory:
        if is_rehearsal:
            from tests.cuda.double import compiled  # noqa: PLC0415 - needs a compiler

            # Reachable, because torch without CUDA and the real NIXL stand for those of a GPU.
            settings = {"DOUBLE_BYTES": str(2**30), "DOUBLE_MEMORY": "reachable"}
            os.environ |= {**compiled(Path(directory)).environment, **settings}
        return run(REHEARSED_MIB if is_rehearsal else MIB)


def run(mib: int) -> int:
    """All of it; the exit status."""
    began_s = time.monotonic()
    runtime = load()
    show_host(runtime)
    have_failed = [] if tested() else ["tests"]
    if isinstance(runtime, Runtime):
        have_failed += measured(runtime, mib)
    else:
        _out.print("\nNothing was measured: there is no device.", style="yellow")
    _out.print("\nNot shown by any of this:")
    for one in NOT_SHOWN:
        _out.print(f"  - {one}")
    verdict = f"failed: {', '.join(have_failed)}" if have_failed else "nothing failed"
    _out.print(f"\n{verdict}; {time.monotonic() - began_s:.0f} s")
    return 1 if have_failed else 0


def show_host(runtime: Runtime | NoCuda) -> None:
    """What this is run on."""
    _out.print(f"python {platform.python_version()}, {versions()}")
    if not isinstance(runtime, Runtime):
        _out.print(runtime.sentence, style="yellow", markup=False)
        return
    _out.print(f"CUDA {runtime.version()}, driver for {runtime.driver_version()}: {runtime.path}")
    for device in range(runtime.device_count()):
        room = runtime.room(device)
        sizes = f"{room.free_bytes / 2**30:.1f} of {room.total_bytes / 2**30:.1f} GiB free"
        _out.print(f"  cuda:{device} at {runtime.bus_id(device)}: {sizes}")


def versions() -> str:
    """Of the packages that matter here."""
    found = []
    for one in PACKAGES:
        try:
            found.append(f"{one} {metadata.version(one)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {one}")
    return ", ".join(found)


def tested() -> bool:
    """Whether no test failed; what was skipped, and why, is printed by pytest."""
    _out.print()
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", str(here)]
    try:
        done = subprocess.run(command, cwd=here.parents[1], timeout=TESTS_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        _out.print(f"the tests took longer than {TESTS_WITHIN_S:.0f} s", style="red")
        return False
    return done.returncode == 0


def measured(runtime: Runtime, mib: int) -> list[str]:
    """Measure and print; the names of what failed."""
    table = Table("", "best GB/s", "median", title=f"{mib} MiB each, {measures.ROUNDS} rounds")
    failed = []
    ways: dict[str, Callable[[], Iterator[measures.Row]]] = {
        "cudaMemcpy": lambda: measures.copies(runtime, mib),
        "bare NIXL": lambda: measures.bare(mib),
        "handoffs": lambda: measures.handoffs(mib),
    }
    for name, measure in ways.items():
        try:
            for row in measure():
                table.add_row(row.what, f"{row.best:.1f}", f"{row.median:.1f}")
        except FAILURES as exc:
            _out.print(f"{name}: {exc}", style="red", markup=False)
            failed.append(name)
    _out.print()
    _out.print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main())
