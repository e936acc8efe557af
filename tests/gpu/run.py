"""Everything that needs a GPU, by one command: python -m tests.gpu.run [--json FILE] [--rehearse].

Sets up nothing: it runs in the interpreter that it is started by, with the libraries that are
there, on the first device. Each part runs in a process of its own, within its time and what is left
of five minutes; the file is written anew after each, so that what was found is there whatever
happens next. ``python -m benchmarks store gpu --json FILE`` keeps it for the documentation.

``--rehearse`` does all of it with the double of the CUDA runtime that tests/cuda compiles, which
says that this command works, and nothing of a GPU: no figure of it is written.

Ends with 0 where nothing failed, also on a host without a GPU, where parts are skipped and said to
be; with 1 where something did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.bench.report import show
from kvd.device.cuda_library import load
from tests.gpu.part import PARTS
from tests.gpu.results import PartOutcome, file_of, place_told, said, without_figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WITHIN_S: Final = 300.0
LEAST_S: Final = 10.0
"""A part that has less is not begun."""
END_S: Final = 15.0
"""For what a part has started to be ended."""
REHEARSED_LONGER: Final = 4.0
DOUBLE_BYTES: Final = str(2**30)

NOT_SHOWN: Final = (
    "several devices: pools of several shards, NVLink between devices (one test, if there are two)",
    "collectives over NCCL and symmetric memory: their tests need a device for each rank",
    "two hosts: GPUDirect RDMA; everything here is one host",
    "MIG and MPS",
)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    words.add_argument("--rehearse", action="store_true", help="with a double, without a GPU")
    words.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART")
    words.add_argument("--within", type=float, default=WITHIN_S, metavar="SECONDS")
    asked = words.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-run-") as directory:
        if asked.rehearse:
            from tests.cuda.double import compiled  # noqa: PLC0415 - needs a compiler

            os.environ |= {**compiled(Path(directory)).environment, "DOUBLE_BYTES": DOUBLE_BYTES}
        within_s = asked.within * (REHEARSED_LONGER if asked.rehearse else 1)
        outcomes = run(
            asked.only, asked.json, Path(directory), within_s, is_rehearsal=asked.rehearse
        )
    failed = [name for name, outcome in outcomes.items() if outcome.failed]
    say("\nNot shown by any of this:", *(f"  - {one}" for one in NOT_SHOWN))
    say(f"\n{'failed: ' + ', '.join(failed) if failed else 'nothing failed'}")
    return 1 if failed else 0


def run(
    names: Sequence[str],
    file: Path | None,
    directory: Path,
    within_s: float,
    *,
    is_rehearsal: bool,
) -> Mapping[str, PartOutcome]:
    """These parts, one after the other."""
    began_s = time.monotonic()
    where = place_told(load())
    say(where)
    outcomes: dict[str, PartOutcome] = {}
    for name in names:
        left_s = within_s - (time.monotonic() - began_s)
        say(f"\n== {name}: {PARTS[name].about}")
        if left_s < LEAST_S:
            outcomes[name] = PartOutcome(skipped=f"{left_s:.0f} s were left of {within_s:.0f}")
        else:
            outcomes[name] = part(name, directory, left_s, is_rehearsal=is_rehearsal)
        tell(outcomes[name], is_rehearsal=is_rehearsal)
        if file is not None:
            seconds = time.monotonic() - began_s
            content = file_of("gpu", where, outcomes, is_rehearsal=is_rehearsal, seconds=seconds)
            file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return outcomes


def part(name: str, directory: Path, left_s: float, *, is_rehearsal: bool) -> PartOutcome:
    """One, in a process of its own that is ended when its time is over."""
    chosen = PARTS[name]
    within_s = min(left_s, chosen.within_s * (REHEARSED_LONGER if is_rehearsal else 1))
    file = directory / f"{name}.json"
    command = [sys.executable, "-m", "tests.gpu.part", name, str(file)]
    environment = dict(os.environ)
    if is_rehearsal:
        command.append("--rehearse")
        # Torch without CUDA and the real NIXL stand for those of a GPU.
        environment["DOUBLE_MEMORY"] = "reachable" if chosen.is_reachable else ""
    began_s = time.monotonic()
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            status = process.wait(within_s)
        except BaseException as ended:
            end(process)
            if not isinstance(ended, subprocess.TimeoutExpired):
                raise
            seconds = time.monotonic() - began_s
            return PartOutcome(failed=f"it took longer than {within_s:.0f} s", seconds=seconds)
    if not file.exists():
        why = f"its process ended with {status} and said nothing"
        return PartOutcome(failed=why, seconds=time.monotonic() - began_s)
    return msgspec.json.decode(file.read_bytes(), type=PartOutcome)


def end(process: subprocess.Popen[bytes]) -> None:
    """First asked, so that it ends what it has started; then it and its group at once."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tell(outcome: PartOutcome, *, is_rehearsal: bool) -> None:
    """What a part has found, as people read it."""
    if outcome.found is not None:
        show(without_figures(outcome.found) if is_rehearsal else outcome.found)
    say(said(outcome))


def say(*lines: str) -> None:
    """At once: a machine may be taken away."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
