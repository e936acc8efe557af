"""``benchmarks console``: what consoles cost the daemon, and what the console costs itself.

One daemon with a million pages, tens of thousands of tree nodes and ten thousand leases, under
requests that come and go. Rounds without consoles and rounds with ``--links`` of
them alternate; the difference is theirs. A link asks for what one screen shows, and decodes it, but
paints nothing. Then one real console runs on a pseudo-terminal of 180 x 50, screen by screen, and
at last it is stopped (SIGSTOP), which must cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np
import uvloop
import zmq
import zmq.asyncio

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.memory import busy_s
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.harness.daemons import one_daemon
from kvd.wire.admin import Frame, Look, ShowTree, Tree
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from kvd.wire.console import EventQuery, MapQuery, PageMap, Query, Table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import numpy.typing as npt

    from kvd.bench.report import Measured, Told
    from kvd.client.api import Node
    from kvd.harness.daemons import DaemonProcess

    TokenArray = npt.NDArray[np.int32]

# ---- the load ------------------------------------------------------------------------------------

PAGE_SIZE: Final = 16
LONG_PROMPTS: Final = 600
LONG_PAGES: Final = 1000
BRANCHES: Final = 8000
AT_ONCE: Final = 32
CHURN_PER_S: Final = 200

SETTINGS: Final = {
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "1",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_SIZE),
}
"""One byte of KV per token: what is looked at is the bookkeeping."""


async def fill(node: Node, leases: int) -> None:
    """Long prompts, branches off them, and ``leases`` small ones that stay."""
    rng = np.random.default_rng(7)
    prompts = [
        rng.integers(0, 2**31, LONG_PAGES * PAGE_SIZE, dtype="<i4") for _ in range(LONG_PROMPTS)
    ]
    await _all_of(len(prompts), lambda number: _cache(node, prompts[number]))

    async def branch(number: int) -> None:
        stem = prompts[number % LONG_PROMPTS]
        at = (1 + number // LONG_PROMPTS) * 8 * PAGE_SIZE
        await _cache(node, np.concatenate([stem[:at], _tokens(number, 2 * PAGE_SIZE)]))

    async def hold(number: int) -> None:
        await node.lease(_tokens(10**6 + number, PAGE_SIZE), cache=False, deadline_s=60)

    await _all_of(BRANCHES, branch)
    await _all_of(leases, hold)


@contextlib.asynccontextmanager
async def churn(node: Node) -> AsyncIterator[None]:
    """Leases that come, commit and go, ``CHURN_PER_S`` of them, for as long as the block lasts."""

    async def run() -> None:
        number = 0
        while True:
            number += 1
            await _cache(node, _tokens(2 * 10**6 + number % 5000, 4 * PAGE_SIZE))
            await asyncio.sleep(1 / CHURN_PER_S)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _cache(node: Node, tokens: TokenArray) -> None:
    lease = await node.lease(tokens, deadline_s=60)
    await lease.release(new_tokens=())


def _tokens(number: int, count: int) -> TokenArray:
    return ((np.arange(count, dtype=np.int64) + number * 4096) % 2**31).astype("<i4")


async def _all_of(count: int, call: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


# ---- consoles without a screen -------------------------------------------------------------------

TABLE_LINES: Final = 45
FRAMES_ASKED: Final = 20
ASKED: Final[tuple[tuple[Query | MapQuery, ...], ...]] = (
    (Query("pools"), Query("concerns", limit=6)),
    (Query("pools"), MapQuery("", "state", pages_each=128, cells=8000)),
    (Query("tree", limit=TABLE_LINES),),
    (Query("rooms", limit=TABLE_LINES, sort="since"),),
    (Query("peers", limit=TABLE_LINES),),
    (Query("concerns", limit=TABLE_LINES),),
    (Query("clients", limit=TABLE_LINES), Query("leases", limit=TABLE_LINES, sort="-held")),
    (Query("locked", limit=TABLE_LINES),),
)
"""One link after the other takes the next of these."""


class ConsoleLink:
    """One link. ``ages_s`` are of the tables when they arrived; ``waits_s`` of the frames."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, number: int) -> None:
        self.frames = self.received_bytes = 0
        self.ages_s: list[float] = []
        self.waits_s: list[float] = []
        self._queries = ASKED[number % len(ASKED)]
        self._have = [0] * len(self._queries)
        self._after = self._call = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    async def run(self, hz: float) -> None:
        """Ask for frames at that rate, and for more before they are used up."""
        try:
            while True:
                await self._ask(1 / hz)
                for _ in range(FRAMES_ASKED // 2):
                    self._take(await self._socket.recv())
        finally:
            self._socket.close(linger=0)

    async def _ask(self, every_s: float) -> None:
        queries = tuple(
            msgspec.structs.replace(query, have=have)
            for query, have in zip(self._queries, self._have, strict=True)
        )
        self._call += 1
        look = Look(
            call=self._call,
            queries=queries,
            events=EventQuery(self._after, limit=100),
            frames=FRAMES_ASKED,
            every_s=every_s,
        )
        begun_s = time.monotonic()
        await self._socket.send(ADMIN_REQUESTS.encode(look))
        while self._take(await self._socket.recv()) != self._call:
            pass
        self.waits_s.append(time.monotonic() - begun_s)

    def _take(self, answer: bytes) -> int:
        """One frame; returns the call that it answers. Those of an older look are only counted."""
        frame = ADMIN_REPLIES.decode(answer)
        assert isinstance(frame, Frame), frame
        self.frames += 1
        self.received_bytes += len(answer)
        if frame.call == self._call:
            self._after = frame.upto
            for place, part in enumerate(frame.answers):
                table = msgspec.msgpack.decode(part, type=Table | PageMap)
                self._have[place] = table.revision
                if table.revision:
                    self.ages_s.append(max(0.0, frame.vitals.at_s - table.at_s))
        return frame.call


@contextlib.asynccontextmanager
async def consoles(endpoint: str, count: int, hz: float) -> AsyncIterator[list[ConsoleLink]]:
    """So many links that ask, for as long as the block lasts."""
    context = zmq.asyncio.Context()
    links = [ConsoleLink(context, endpoint, number) for number in range(count)]
    tasks = [asyncio.create_task(link.run(hz)) for link in links]
    try:
        yield links
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


# ---- one real console ----------------------------------------------------------------------------

TERMINAL_COLUMNS: Final = 180
TERMINAL_LINES: Final = 50
FPS: Final = 10
SCREENS: Final = {
    "overview": "1",
    "pools": "2",
    "engines": "2e",
    "radix": "3",
    "handoffs": "4",
    "peers": "5",
    "events": "6",
}
"""Each with the keys that lead to it."""
START_S: Final = 30.0
SETTLE_S: Final = 1.5


class ConsoleTerminal:
    """A terminal with a console on it, for as long as the block lasts."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen = 0

    def __enter__(self) -> ConsoleTerminal:
        self._began_s = time.monotonic()
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            command = ["-m", "tui", "--connect", self._endpoint, "--fps", str(FPS)]
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execve(sys.executable, [sys.executable, *command], environment)
        size = struct.pack("HHHH", TERMINAL_LINES, TERMINAL_COLUMNS, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)
        os.set_blocking(self._fd, False)
        self._text = b""
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    async def first_frame(self) -> Measured:
        """Until the node's state is on the screen: seconds that passed, and of its processor time.

        Raises:
            TimeoutError: it never was; the message has what was shown.
        """
        while b"serving" not in self._text and b"LIVE" not in self._text:
            if time.monotonic() - self._began_s > START_S:
                raise TimeoutError(f"no frame in {START_S:g} s: {self._text[-2000:]!r}")
            await asyncio.sleep(0.005)
        passed_s = time.monotonic() - self._began_s
        return {"first_frame_s": passed_s, "first_frame_cpu_s": busy_s(self._pid)}

    async def screens(self, seconds: float) -> list[Measured]:
        """Each of them for so long: a row of the table."""
        rows: list[Measured] = []
        for name, keys in SCREENS.items():
            os.write(self._fd, keys.encode())
            await asyncio.sleep(SETTLE_S)
            seen, busy, began_s = self._seen, busy_s(self._pid), time.monotonic()
            await asyncio.sleep(seconds)
            frames = FPS * (time.monotonic() - began_s)
            rows.append(
                {
                    "screen": name,
                    "frame_ms": 1e3 * (busy_s(self._pid) - busy) / frames,
                    "frames": round(frames),
                    "terminal_kb": (self._seen - seen) / frames / 1e3,
                }
            )
        os.write(self._fd, b"1")
        await asyncio.sleep(SETTLE_S)
        return rows

    def pause(self) -> None:
        """Stop it as Ctrl-Z would."""
        os.kill(self._pid, signal.SIGSTOP)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            data = os.read(self._fd, 1 << 16)
            self._seen += len(data)
            if len(self._text) < 1 << 20:
                self._text += data


# ---- both, on one daemon -------------------------------------------------------------------------

ROUNDS: Final = 3
HZ: Final = 10.0


class ConsoleLoad(msgspec.Struct, frozen=True):
    """How much there is to look at, and for how long each thing is measured."""

    pages: int
    leases: int
    links: int
    seconds: float


async def measure(load: ConsoleLoad, told: Told) -> BenchmarkResult:
    """Fill a daemon, then measure it with and without consoles."""
    settings = {**SETTINGS, "pool.pages": str(load.pages)}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
        one_daemon(Path(directory), settings) as daemon,
    ):
        async with kvd.client.connect(daemon.client, name="load") as node:
            told("filling")
            await fill(node, load.leases)
            async with churn(node):
                told(f"{load.links} links")
                links, quiet = await measure_links(daemon, load)
                terminal, screens = await measure_terminal(daemon, load, told)
                quiet.append(await core_share(daemon, load.seconds))
                nodes = daemon.ask(ShowTree(1, 0), Tree).total
                held = len(daemon.snapshot().leases)
    rest = statistics.median(quiet)
    percents = {
        "without consoles": 100 * rest,
        f"{load.links} links at {HZ:g} Hz": figure(links, "percent"),
        "one real console": figure(terminal, "working") - 100 * rest,
        "a stopped console": figure(terminal, "stopped") - 100 * rest,
    }
    shares: list[Measured] = [
        {"what": what, "percent": percent} for what, percent in percents.items()
    ]
    size = f"{load.pages:,} pages, {nodes:,} nodes, {held:,} leases"
    return result_of(shares, {**links, **terminal}, screens, size)


async def measure_links(daemon: DaemonProcess, load: ConsoleLoad) -> tuple[Measured, list[float]]:
    """Consoles without a screen: what they cost and what they get; and the shares without any."""
    quiet, busy = [], []
    rounds = []
    for _ in range(ROUNDS):
        quiet.append(await core_share(daemon, load.seconds))
        async with consoles(daemon.admin, load.links, HZ) as links:
            rounds.append(links)
            await asyncio.sleep(1.0)
            busy.append(await core_share(daemon, load.seconds))
    asked = rounds[-1]
    frames = sum(link.frames for link in asked)
    waits = sorted(wait for link in asked for wait in link.waits_s)
    ages = sorted(age for link in asked for age in link.ages_s)
    return {
        "percent": 100 * (statistics.median(busy) - statistics.median(quiet)),
        "frames_per_s": frames / (load.seconds + 1.0),
        "frame_kb": sum(link.received_bytes for link in asked) / frames / 1e3,
        "wait_p50_ms": 1e3 * waits[len(waits) // 2],
        "wait_p99_ms": 1e3 * waits[len(waits) * 99 // 100],
        "age_p50_s": ages[len(ages) // 2],
        "age_p99_s": ages[len(ages) * 99 // 100],
    }, quiet


async def measure_terminal(
    daemon: DaemonProcess, load: ConsoleLoad, told: Told
) -> tuple[Measured, list[Measured]]:
    """A real console at work and stopped, and a row for each of its screens."""
    told("a real console, screen by screen")
    with ConsoleTerminal(daemon.admin) as terminal:
        first_frame = await terminal.first_frame()
        screens = await terminal.screens(load.seconds)
        told("a real console at work")
        working = await core_share(daemon, load.seconds)
        terminal.pause()
        await asyncio.sleep(1.0)
        told("a stopped console")
        stopped = await core_share(daemon, load.seconds)
    return {**first_frame, "working": 100 * working, "stopped": 100 * stopped}, screens


async def core_share(daemon: DaemonProcess, seconds: float) -> float:
    """Of one core that the daemon's process takes now."""
    before, began_s = busy_s(daemon.pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (busy_s(daemon.pid) - before) / (time.monotonic() - began_s)


def result_of(
    shares: list[Measured], seen: Measured, screens: list[Measured], size: str
) -> BenchmarkResult:
    """Tables and goals of what was measured."""
    worst = max(screens, key=lambda row: figure(row, "frame_ms"))
    wanted = (5.0, 5.0, 0.5)
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"kvd-tui, {size}, 180 x 50", columns=SCREEN_COLUMNS, rows=tuple(screens)
            ),
            ResultTable(
                title="The daemon: more than without consoles",
                columns=SHARE_COLUMNS,
                rows=tuple(shares),
            ),
            ResultTable(title="What links and console see", columns=SEEN_COLUMNS, rows=(seen,)),
        ),
        goals=(
            *(
                at_most(f"{row['what']}, % of a core of the daemon", most, figure(row, "percent"))
                for row, most in zip(shares[1:], wanted, strict=True)
            ),
            at_most(
                f"CPU per frame of the console in ms, {worst['screen']}",
                8.0,
                figure(worst, "frame_ms"),
            ),
            at_most("CPU of its first frame in s", 1.0, figure(seen, "first_frame_cpu_s")),
        ),
    )


SCREEN_COLUMNS: Final = (
    ResultColumn("screen", "screen"),
    ResultColumn("frame_ms", "CPU ms/frame", ".1f"),
    ResultColumn("frames", "frames"),
    ResultColumn("terminal_kb", "kB/frame to the terminal", ".1f"),
)
SHARE_COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("percent", "% of a core", ".1f"),
)
SEEN_COLUMNS: Final = (
    ResultColumn("frames_per_s", "frames/s", ".0f"),
    ResultColumn("frame_kb", "kB each", ".1f"),
    ResultColumn("wait_p50_ms", "answered in ms p50", ".1f"),
    ResultColumn("wait_p99_ms", "p99", ".1f"),
    ResultColumn("age_p50_s", "tables are old s p50", ".2f"),
    ResultColumn("age_p99_s", "p99", ".2f"),
    ResultColumn("first_frame_s", "first frame s", ".2f"),
    ResultColumn("first_frame_cpu_s", "of its CPU", ".2f"),
)


def run(told: Told, *, pages: int, leases: int, links: int, seconds: float) -> BenchmarkResult:
    """What consoles cost the daemon, and what a console costs itself, screen by screen."""
    return uvloop.run(
        measure(ConsoleLoad(pages=pages, leases=leases, links=links, seconds=seconds), told)
    )


command = benchmark(
    "console",
    run,
    click.option("--pages", default=1_000_001, show_default=True, help="Of the pool."),
    click.option("--leases", default=10_000, show_default=True, help="Leases that stay."),
    click.option("--links", default=20, show_default=True, help="Consoles without a screen."),
    click.option("--seconds", default=5.0, show_default=True, help="Of each measurement."),
)
