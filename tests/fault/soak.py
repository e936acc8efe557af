"""``make soak``: every long test within about half an hour.

    python -m tests.fault.soak --seed 1 --json DIRECTORY

Each part is a program of its own that prints its table and says by its exit status whether it found
anything. What measures latencies runs one after the other; what only computes runs beside them, as
the least urgent. At the end stands what ran, for how long, and what became of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.fault.table import Figures, say, show

FINE = "fine"
STOP_S = 60.0
LEAST_URGENT = 19
SIMULATED_SEEDS = 5000
"""So far apart are the first ones of two seeds. How many there are is a matter of the time that the
rest leaves them."""


class Part(NamedTuple):
    """One program.

    ``budget_s``: it is ended after this, and that counts as a finding. So it says that a part hangs
    and not how fast a machine is: several times what the part takes where nothing else runs.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    is_beside: bool = False


def parts(seed: int) -> list[Part]:
    """All of them; another seed makes other faults."""
    first = str((seed - 1) * SIMULATED_SEEDS)
    own = ("--seed", str(seed))
    return [
        Part(
            "simulator",
            ("-m", "kvd", "sim", "--steps", "1000", "--seed", first, "--minutes", "12"),
            1800.0,
            is_beside=True,
        ),
        Part(
            "explorer",
            ("-m", "tests.explore", "--depth", "3", "--faults", "2", "--minutes", "12", *own),
            1800.0,
            is_beside=True,
        ),
        Part(
            "faults",
            ("-m", "tests.fault.campaign", "--faults", "220", "--most-s", "300", *own),
            900.0,
        ),
        Part("sockets", ("-m", "tests.fault.fuzz", *own), 900.0),
        Part("zmtp", ("-m", "tests.fault.fuzz_zmtp", *own), 900.0),
        Part("flood", ("-m", "tests.fault.flood", *own), 1200.0),
        Part("restarts", ("-m", "tests.fault.restarts", "--each", "50", *own), 1200.0),
        Part("kept", ("-m", "tests.fault.restarts", "--kept", "--each", "25", *own), 1200.0),
        Part("deaths", ("-m", "tests.fault.deaths", *own), 400.0),
        Part(
            "late-bytes",
            ("-m", "tests.fault.late_bytes", "--attempts", "28", "--most-s", "200", *own),
            600.0,
        ),
    ]


class Running:
    """A part that runs; its output is kept in a file until it is over."""

    def __init__(self, part: Part, results: Path) -> None:
        self.part = part
        command = [sys.executable, *part.command, "--json", str(results / f"{part.name}.json")]
        self._began_s = time.monotonic()
        self._output = results / f"{part.name}.txt"
        with self._output.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is told to it once, by us
            )
        if part.is_beside:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LEAST_URGENT)

    def end(self) -> tuple[str, str, str]:
        """Wait for it, print what it said; a row for the table."""
        try:
            left_s = self.part.budget_s - (time.monotonic() - self._began_s)
            status = self._process.wait(max(0.0, left_s))
            verdict = FINE if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            self.stop()
            verdict = f"took longer than {self.part.budget_s:g} s"
        took_s = time.monotonic() - self._began_s
        said = self._output.read_text(errors="replace")
        say(f"\n== {self.part.name} ==\n{said.rstrip()}")
        return self.part.name, f"{took_s:.0f}", verdict

    def stop(self) -> None:
        """End it as Ctrl-C would, so that it ends what it has started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def main() -> int:
    words = argparse.ArgumentParser(description="Every long test, within half an hour.")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", nargs="*", choices=[part.name for part in parts(1)])
    words.add_argument("--json", type=Path, help="a directory for what each part says")
    chosen = words.parse_args()
    results = chosen.json or Path(tempfile.mkdtemp(prefix="kvd-soak-"))
    results.mkdir(parents=True, exist_ok=True)
    wanted = [p for p in parts(chosen.seed) if chosen.only is None or p.name in chosen.only]
    began_s = time.monotonic()
    running: list[Running] = []
    rows = []
    try:
        running += [Running(part, results) for part in wanted if part.is_beside]
        for part in wanted:
            if not part.is_beside:
                running.append(Running(part, results))
                rows.append(running[-1].end())
        rows += [one.end() for one in running if one.part.is_beside]
    finally:
        for one in running:
            one.stop()
    title = f"soak, {time.monotonic() - began_s:.0f} s, seed {chosen.seed}"
    say(f"\n{show(Figures(title, ('part', 'took s', 'result'), rows, []))}")
    return int(any(row[2] != FINE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
