"""``benchmarks tier_peers``: kvd's disk tier beside those of LMCache and of vLLM, on one disk.

The same objects of the same size, in turns: kvd's storage process, LMCache's ``fs`` (Python) and
``fs_native`` (C++), and the ``fs`` tier of vLLM's offloading, each as it is configured by default
and in the process that runs it, without an engine, at the low priority of kvd's. What a peer needs
is in an environment that ``KVD_LMCACHE_PYTHON`` or ``KVD_VLLM_PYTHON`` names; one that is not there
is left out, and told.
Processor time is of all threads of the process that moves the bytes, and for kvd also of the one
that orders it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import click
import msgspec

from benchmarks.disk_tier import TIER, WAYS, TierSite, forget
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from kvd.core.effects import Demote, Promote
from kvd.storage.orders import DirectoryPlan
from kvd.storage.worker import NICENESS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.bench.report import Measured, Told

ROOT: Final = Path(__file__).parents[1]
PEERS: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("LMCache fs", "lmcache", {"type": "fs"}),
    ("LMCache fs_native", "lmcache", {"type": "fs_native"}),
    ("vLLM fs", "vllm", {}),
)
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

COLUMNS: Final = (
    ResultColumn("tier", "tier"),
    *(ResultColumn(way, way, ".2f") for way in WAYS),
    *(ResultColumn(f"{way} cpu", f"CPU {way}", ".2f") for way in WAYS),
    ResultColumn("found", "found", ".0%"),
    ResultColumn("disk", "disk", ".3f"),
    ResultColumn("checks", "checks"),
)
NOTES: Final = (
    "GB/s, and CPU in seconds a GB; disk: bytes there for each byte that was written",
    "found: of the objects that were asked for after they were written; read cached: vLLM opens "
    "its files with O_DIRECT where that works, so its reads are never cached",
    "checks: whether an object that was damaged on disk is refused when it is read",
    "who bounds what lies there: kvd always; LMCache's fs_native if it is told to "
    "(max_capacity_gb with eviction); LMCache's fs and vLLM's do not",
)


class MoveTime(NamedTuple):
    """One way, once: seconds of the wall and of processors, and how many objects came."""

    s: float
    processor_s: float
    found: int
    is_right: bool


class PeerAnswer(msgspec.Struct, frozen=True):
    """What ``peer_calls`` writes of one call."""

    s: float
    processor_s: float
    found: int
    right: bool


class PeerDisk(Protocol):
    """What writes and reads the objects of a round."""

    def store(self, number: int) -> MoveTime:
        """Write them."""

    def load(self, number: int) -> MoveTime:
        """Read them."""


class KvdProcessors:
    """Time of processors of the storage process, and of the one that orders it."""

    def __init__(self, site: TierSite) -> None:
        self._site = site
        self._begun_s = 0.0
        self._ticks = self._of_storage()

    def _of_storage(self) -> int:
        words = Path(f"/proc/{self._site.process.pid}/stat").read_text("ascii").rpartition(")")[2]
        user, system = words.split()[11:13]
        return int(user) + int(system)

    def begin(self) -> None:
        """From now on what this process does is counted."""
        self._begun_s = time.process_time()

    def spent_s(self) -> float:
        """By this one since ``begin``, by the other since it was last asked, in whole ticks."""
        here_s, ticks = time.process_time() - self._begun_s, self._of_storage()
        spent_s = here_s + TICK_S * (ticks - self._ticks)
        self._ticks = ticks
        return spent_s


def python_of(library: str) -> tuple[str, str]:
    """The interpreter that has it, or nothing, and the variable that names it."""
    variable = f"KVD_{library.upper()}_PYTHON"
    return os.environ.get(variable, "").partition(":")[0], variable


class KvdDisk:
    """kvd's storage process."""

    def __init__(self, site: TierSite, run: asyncio.Runner) -> None:
        self._site = site
        self._run = run
        self._processors = KvdProcessors(site)

    def store(self, number: int) -> MoveTime:
        """Write them."""
        return self._moved(Demote, number)

    def load(self, number: int) -> MoveTime:
        """Read them."""
        return self._moved(Promote, number)

    def _moved(self, order: type[Demote | Promote], number: int) -> MoveTime:
        self._site.name_for(number)
        self._processors.begin()
        try:
            took_s = self._run.run(self._site.move(order))
        except AssertionError:  # not all of them came
            return MoveTime(0.0, 0.0, 0, is_right=True)
        return MoveTime(took_s, self._processors.spent_s(), self._site.n_pages, is_right=True)


class DrivenDisk:
    """A peer's, in a process of its own (``peer_calls``)."""

    def __init__(
        self, python: str, library: str, spec: Mapping[str, object], shape: tuple[int, int]
    ) -> None:
        quiet = {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        arguments = [library, json.dumps(spec), *map(str, shape)]
        # -P: the folder of the script has a transformers.py too.
        self._process = subprocess.Popen(
            ["nice", "-n", str(NICENESS), python, "-P", "benchmarks/peer_calls.py", *arguments],
            cwd=ROOT,
            env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def store(self, number: int) -> MoveTime:
        """Write them."""
        return self._call("store", number)

    def load(self, number: int) -> MoveTime:
        """Read them."""
        return self._call("load", number)

    def serve(self, second: float, keys: Sequence[bytes]) -> MoveTime:
        """Find, read and write the objects of a request."""
        return self._call("serve", second, *[key.hex() for key in keys])

    def _call(self, call: str, *words: object) -> MoveTime:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(call, *words, file=process.stdin, flush=True)
        # What a library says while it is imported stands before.
        for line in process.stdout:
            if line.startswith("{"):
                answer = msgspec.json.decode(line, type=PeerAnswer)
                return MoveTime(
                    s=answer.s,
                    processor_s=answer.processor_s,
                    found=answer.found,
                    is_right=answer.right,
                )
        raise click.ClickException(f"it ended with {process.wait()}: see above")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # threads that nobody ends
            self._process.kill()
            self._process.wait()


def _objects(directory: Path, n_bytes: int) -> list[Path]:
    return [
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size >= n_bytes
    ]


def measure(disk: PeerDisk, directory: Path, shape: tuple[int, int], rounds: int) -> Measured:
    """One tier: medians over the rounds, without the first."""
    objects, n_bytes = shape
    times: dict[str, list[MoveTime]] = {way: [] for way in WAYS}
    taken = 0
    for number in range(rounds + 1):
        times["write"].append(disk.store(number))
        times["read, cached"].append(disk.load(number))
        forget(directory)
        times["read from disk"].append(disk.load(number))
        if not number:
            files = _objects(directory, n_bytes)
            taken = sum(512 * path.stat().st_blocks for path in files)
    for path in _objects(directory, n_bytes):
        # The last byte of a page: heads are before it.
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 255]))
    damaged = disk.load(rounds)
    row: Measured = {}
    for way, found in times.items():
        row[way] = objects * n_bytes / statistics.median(one.s for one in found[1:]) / 1e9
        spent_s = statistics.median(one.processor_s for one in found[1:])
        row[f"{way} cpu"] = spent_s / (objects * n_bytes / 1e9)
    reads = [*times["read, cached"], *times["read from disk"]]
    row["found"] = sum(one.found for one in reads if one.is_right) / (objects * len(reads))
    row["disk"] = taken / (objects * n_bytes)
    row["checks"] = "no" if damaged.found else "yes"
    return row


def run(
    told: Told, *, objects: int, kib: int, rounds: int, directory: str | None
) -> BenchmarkResult:
    """All tiers that are here, one after the other."""
    shape = objects, kib << 10
    rows: list[Measured] = []
    notes = list(NOTES)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name:
        top = Path(name)
        with asyncio.Runner() as runner:
            told("kvd")
            site = TierSite(DirectoryPlan(TIER, str(top / "kvd")), *shape)
            runner.run(site.start())
            rows.append(
                {"tier": "kvd", **measure(KvdDisk(site, runner), top / "kvd", shape, rounds)}
            )
            runner.run(site.process.stop())
        shutil.rmtree(top / "kvd")
        for number, (tier, library, spec) in enumerate(PEERS):
            python, variable = python_of(library)
            if not python:
                notes.append(f"{tier} was left out: {variable} names no environment that has it")
                continue
            told(tier)
            base = top / str(number)
            base.mkdir()
            disk = DrivenDisk(python, library, {**spec, "base_path": str(base)}, shape)
            try:
                rows.append({"tier": tier, **measure(disk, base, shape, rounds)})
            finally:
                disk.close()
            shutil.rmtree(base)
    title = f"{objects} objects of {kib} KiB, the median of {rounds} rounds"
    ours = rows[0]
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=tuple(
            at_least(
                f"{way}, over the fastest of the others",
                1.0,
                figure(ours, way) / max(figure(row, way) for row in rows[1:]),
            )
            for way in WAYS
            if rows[1:]
        ),
        notes=tuple(notes),
    )


command = benchmark(
    "tier_peers",
    run,
    click.option("--objects", default=128, show_default=True, help="Of a round."),
    click.option("--kib", default=2048, show_default=True, help="Of an object."),
    click.option("--rounds", default=3, show_default=True, help="To take medians of."),
    click.option("--directory", help="On the disk to measure; the usual temporary one if not."),
)
