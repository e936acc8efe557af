"""``make soak``: every long test, one after the other, in fifteen minutes.

    python -m tests.fault.soak --seed 1 --json DIRECTORY

Each part is a program of its own with a seed, prints its table, and says by its exit status whether
it found anything. At the end stands what ran, for how long, and what it found.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.fault.table import Figures, say, show


class Part(NamedTuple):
    """One program. ``budget_s``: it is ended after this, and that counts as a finding."""

    name: str
    command: tuple[str, ...]
    budget_s: float


PARTS = (
    Part("faults", ("-m", "tests.fault.campaign", "--faults", "220", "--most-s", "330"), 420.0),
    Part("restarts", ("-m", "tests.fault.restarts", "--each", "50"), 240.0),
    Part("deaths", ("-m", "tests.fault.deaths", "--repeats", "1"), 60.0),
)
FINE = "fine"
STOP_S = 60.0


def run(part: Part, seed: int, results: Path | None) -> tuple[str, float]:
    """What became of it, and the seconds it took."""
    say(f"\n== {part.name} ==")
    command = [sys.executable, *part.command, "--seed", str(seed)]
    if results is not None:
        command += ["--json", str(results / f"{part.name}.json")]
    began_s = time.monotonic()
    with subprocess.Popen(command) as process:
        try:
            status = process.wait(part.budget_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it stops what it has started
            process.wait(STOP_S)
            return f"took longer than {part.budget_s:g} s", time.monotonic() - began_s
    return FINE if status == 0 else f"exit status {status}", time.monotonic() - began_s


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description="Every long test, in fifteen minutes.")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", nargs="*", choices=[part.name for part in PARTS])
    words.add_argument("--json", type=Path, help="a directory for one file of each part")
    chosen = words.parse_args()
    if chosen.json:
        chosen.json.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in PARTS:
        if chosen.only is None or part.name in chosen.only:
            verdict, took_s = run(part, chosen.seed, chosen.json)
            rows.append((part.name, f"{took_s:.0f}", verdict))
    total_s = sum(float(row[1]) for row in rows)
    say(f"\n{show(Figures(f'soak, {total_s:.0f} s', ('part', 'took s', 'result'), rows, []))}")
    return int(any(row[2] != FINE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
