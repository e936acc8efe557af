"""``benchmarks compare``: this checkout beside another one, in turns, figure by figure.

Each side is a copy under ``build`` of the kvd of a checkout, with the benches of this one: the same
measurement of two implementations. Both run in the same interpreter with its packages. In a round
each bench runs once on each side, in the other order each time; the ratio of a figure is taken
within the round, so that what the machine does besides falls on both.

A figure is a number in what a bench writes with ``--json``; its row is named by the texts in it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable
from kvd.bench.report import figure as figure_of
from kvd.harness.child import ChildFailed
from kvd.trace import BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.bench.report import Measured, Told

ROOT: Final = Path(__file__).parents[1]
PLACE: Final = ROOT / "build" / "compare"
BASE, HERE = "base", "here"
PACKAGES: Final = ("kvd", "tui", "benchmarks")
BENCHES: Final = (Path("kvd/bench"), Path("benchmarks"))
"""What is of this checkout on both sides."""

OPERATORS: Final = ("stream", "control", "restart", "footprint")
"""Benches that are verbs of ``kvd bench``."""

NOT_MEASURED: Final = {"goals", "counted_by", "columns", "versions", "parameters", "cpus"}
WHICH: Final = {"in_flight", "ways", "prompt_tokens"}
"""Numbers that say which row it is."""

FIGURES: Final = (
    r"(p50_us|mean_us|per_s|ratio|ratio_p50|ratio_mean|switches|bytes_per_token"
    r"|(client|prefill|decode)_(us|calls|from_engines|to_engines|to_peers))$"
)
"""What says most of radix and control."""

REQUESTS: Final = 3000
TALKS: Final = 200

Figures = dict[str, float]


def lay_out(side: str, source: str, *, own_benches: bool) -> Path:
    """A copy of the packages of a checkout, a directory or a revision of git.

    Raises:
        ChildFailed: it is neither.
    """
    place = PLACE / side
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if Path(source).is_dir():
        for name in PACKAGES:
            _copy(Path(source) / name, place / name)
    else:
        _unpack(source, place)
    if not own_benches:
        for bench in BENCHES:
            shutil.rmtree(place / bench, ignore_errors=True)
            _copy(ROOT / bench, place / bench)
    return place


def _copy(source: Path, to: Path) -> None:
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))


def _unpack(revision: str, place: Path) -> None:
    command = ["git", "-C", str(ROOT), "archive", revision, *PACKAGES]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        said = packed.stderr.decode(errors="replace").strip()
        raise ChildFailed(f"{revision} is no directory and no revision: {said}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")


def measured(place: Path, bench: str) -> Figures:
    """Run a bench, with its options as they are written, on the kvd of ``place``.

    Raises:
        ChildFailed: it failed; its last words are quoted.
    """
    words = bench.split()
    module = ["kvd", "bench"] if words[0] in OPERATORS else ["benchmarks"]
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        file = Path(directory) / "result.json"
        ran = subprocess.run(
            [sys.executable, "-m", *module, *words, "--json", str(file)],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
        if not file.exists():
            said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-5:]
            raise ChildFailed(f"`{bench}` in {place.name} failed:\n" + "\n".join(said))
        found = msgspec.json.decode(file.read_bytes())
    return {f"{words[0]}: {name}": value for name, value in figures_in(found)}


def figures_in(found: object, row: str = "") -> Iterator[tuple[str, float]]:
    """Every number in it, named by its key and the texts of its row."""
    if isinstance(found, list):
        for item in found:
            yield from figures_in(item, row)
    if not isinstance(found, dict):
        return
    said = [
        str(value) if isinstance(value, str) else f"{key} {value}"
        for key, value in found.items()
        if key in WHICH or (_is_text(key, value) and not _is_head(found))
    ]
    named = ", ".join([row, *said] if row else said)
    for key, value in found.items():
        if key in NOT_MEASURED or key in WHICH or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield f"{named}: {key}", float(value)
        else:
            yield from figures_in(value, named)


def _is_text(key: str, value: object) -> bool:
    return isinstance(value, str) and key not in NOT_MEASURED


def _is_head(found: dict[str, object]) -> bool:
    """Whether it says where and when it was measured, or heads a table: no row."""
    return any(isinstance(value, list | dict) for value in found.values())


def compared(rounds: Sequence[tuple[Figures, Figures]], figures: str = ".") -> list[Measured]:
    """A row for each of these figures on both sides: the medians, and the ratios of the rounds."""
    rows: list[Measured] = []
    for name in rounds[0][0]:
        if not re.search(figures, name):
            continue
        pairs = [(base[name], here[name]) for base, here in rounds if name in base and name in here]
        if not pairs:
            continue
        ratios = [here / base for base, here in pairs if base]
        row: Measured = {
            "figure": name,
            BASE: statistics.median(base for base, _ in pairs),
            HERE: statistics.median(here for _, here in pairs),
        }
        if ratios:
            quartiles = np.percentile(ratios, [0, 25, 50, 75, 100]).tolist()
            names = ("ratio_min", "ratio_low", "ratio", "ratio_high", "ratio_max")
            row |= dict(zip(names, quartiles, strict=True))
        rows.append(row)
    return rows


def slower(row: Measured) -> float:
    """How many times more a figure costs here; 1 where it is no cost."""
    key = str(row["figure"]).rpartition(": ")[2]
    if "ratio" not in row or key.startswith(("ratio", "hit", "echo", "floor")):
        return 1.0
    ratio = figure_of(row, "ratio")
    if key.endswith("per_s"):
        return 1 / ratio if ratio else float("inf")
    return ratio if key.endswith(("_us", "_ms", "_calls", "switches")) else 1.0


def make_trace(file: Path) -> None:
    """Conversations that go on by turns, for who has no recorded ones; the same each time."""
    rng = np.random.default_rng(1)
    talks: list[list[int]] = [[0] for _ in range(TALKS)]
    block = 1
    lines = []
    for number in range(REQUESTS):
        talk = int(rng.integers(TALKS))
        more = 1 + int(rng.integers(12))
        talks[talk] += range(block, block + more)
        block += more
        n_tokens = len(talks[talk]) * BLOCK_TOKENS - int(rng.integers(BLOCK_TOKENS))
        request = TraceRequest(
            timestamp=number, input_length=n_tokens, output_length=1, hash_ids=talks[talk]
        )
        lines.append(msgspec.json.encode(request))
        if len(talks[talk]) > 64:
            talks[talk] = [0]
    file.write_bytes(b"\n".join(lines) + b"\n")


def run(
    told: Told,
    *,
    base: str,
    bench: tuple[str, ...],
    trace: Path | None,
    rounds: int,
    figures: str,
    fail_above: float | None,
    own_benches: bool,
) -> BenchmarkResult:
    """This checkout beside BASE, a directory or a revision of git."""
    told("copying")
    sides = {
        BASE: lay_out(BASE, base, own_benches=own_benches),
        HERE: lay_out(HERE, str(ROOT), own_benches=False),
    }
    if trace is None:
        trace = PLACE / "trace.jsonl"
        make_trace(trace)
    replayed = f" --trace {trace.resolve()}"  # the one option that a bench cannot do without
    benches = [command + replayed * (command.split()[0] == "radix") for command in bench]
    played: list[tuple[Figures, Figures]] = []
    for number in range(rounds):
        found: dict[str, Figures] = {BASE: {}, HERE: {}}
        for command in benches:
            for side in list(sides)[:: 1 if number % 2 else -1]:
                told(f"round {number + 1} of {rounds}, {side}: {command.split()[0]}")
                found[side] |= measured(sides[side], command)
        played.append((found[BASE], found[HERE]))
    rows = compared(played, figures)
    wrong = [
        f"{row['figure']}: {slower(row):.2f} times what it takes in {base}"
        for row in rows
        if fail_above is not None and slower(row) > fail_above
    ]
    return BenchmarkResult(
        tables=(ResultTable(f"{base} and this checkout", COLUMNS, tuple(rows)),),
        notes=(
            f"medians of {rounds} rounds; ratio: here / {base}, taken within each round; from its "
            "least to its greatest, and the middle half",
        ),
        wrong=tuple(wrong),
    )


COLUMNS: Final = (
    ResultColumn("figure", "figure"),
    ResultColumn(BASE, BASE, ".5g"),
    ResultColumn(HERE, HERE, ".5g"),
    ResultColumn("ratio", "ratio", ".3f"),
    ResultColumn("ratio_min", "min", ".3f"),
    ResultColumn("ratio_low", "25 %", ".3f"),
    ResultColumn("ratio_high", "75 %", ".3f"),
    ResultColumn("ratio_max", "max", ".3f"),
)

command = benchmark(
    "compare",
    run,
    click.argument("base"),
    click.option(
        "--bench",
        multiple=True,
        default=("radix", "control --rounds 3 --no-calls"),
        show_default=True,
        help="A bench and its options, as words; repeatable.",
    ),
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="What radix replays; made-up conversations by default.",
    ),
    click.option("--rounds", default=9, show_default=True, help="To take medians of."),
    click.option(
        "--figures", default=FIGURES, help="Those whose names match; `.` for all that are written."
    ),
    click.option(
        "--fail-above", type=float, help="Fail if any figure costs so many times more here."
    ),
    click.option("--own-benches", is_flag=True, help="Run BASE with the benches that it has."),
)
