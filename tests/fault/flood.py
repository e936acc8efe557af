"""How much a flood of hostile connections costs an honest engine: ``python -m tests.fault.flood``.

For each socket: so many connections that say what is refused, and so many frames that are, while an
engine beside it leases and releases. Windows without and with the flood follow each other, so that
what else the machine does falls on both. The flood is a process of its own at the lowest priority:
it sends a batch, waits until the daemon has answered the last of it, and sleeps as long as that
took. So what is measured is what the daemon does for it, not who wins a processor. Beside the
latencies stand the processor time of the daemon for each hostile connection and frame, and its
memory before, at most, and after.

A machine has other work, and may have two cores. So where that is allowed, engine and daemon run
before the flood, and the flood before everything else. And each round has the same windows with an
echo server in the place of the daemon, which does for a caller and for a stranger the least that a
server on this loop can do: what the flood adds to its calls, and what a connection costs it, is
what this machine asks of anybody.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import uvloop

import kvd.client
from kvd.zmtp.listener import BACKLOG
from tests.fault.fuzz_target import SETTINGS
from tests.fault.fuzz_zmtp import MOST_GROWTH_BYTES, given_back, rss
from tests.fault.table import Figures, percentile, say, show
from tests.fault.zmtp_raw import (
    COMMAND,
    announced,
    command,
    connected,
    frame,
    greeting,
    hear,
    ready,
    reset,
)
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

SOCKETS = ("peers", "peers, no key", "client", "admin")
CALM_S = 1.0
FLOOD_S = 2.0
BATCH = 128
PAUSE_S = 0.01
MOST_TIMES = 2.0
"""The goal for p99 beside a flood; or else it adds no more to a call than to one of the echo."""
STALLED_TIMES = 10.0
"""What no machine explains: somebody waited for the flood."""
FRAMES_EACH = 100
"""Frames of one connection; the daemon may hang up on the first."""
FRAMES_AT_ONCE = 10
HONEST, HOSTILE = 2, 1
"""Who runs first, of those who run before everything else."""
NOTHING = b"\xc1 nothing that anybody reads"
CALL_BYTES = 300
"""Of one call of the echo: what a lease of 64 tokens has."""
CALLS = 2
"""Of the echo, for a lease and its release."""


class Spent(msgspec.Struct):
    """What a flooder has done since it was asked last."""

    connections: int = 0
    frames: int = 0
    refused: int = 0
    """Connections that could not be made."""


class Beside(msgspec.Struct):
    """What a server did for its caller, and for a flood beside it."""

    calm_ms: list[float] = []
    flood_ms: list[float] = []
    connections: int = 0
    frames: int = 0
    connections_s: float = 0.0
    """Processor time."""
    frames_s: float = 0.0

    @property
    def connection_us(self) -> float:
        """Of one connection."""
        return 1e6 * max(0.0, self.connections_s) / max(1, self.connections)

    @property
    def frame_us(self) -> float:
        """Of one frame."""
        return 1e6 * max(0.0, self.frames_s) / max(1, self.frames)

    def p99_ms(self) -> tuple[float, float]:
        """Without the flood, and with it."""
        return percentile(self.calm_ms, 99), percentile(self.flood_ms, 99)


class Row(msgspec.Struct):
    socket: str
    daemon: Beside
    echo: Beside
    before_bytes: int = 0
    peak_bytes: int = 0
    after_bytes: int = 0
    is_alone: bool = False
    """Whether it ran before whatever else this machine did."""
    troubles: list[str] = []
    missed: list[str] = []
    """Goals; they fail nothing."""


# ---- the flooder ---------------------------------------------------------------------------------


def flooder() -> None:
    """Orders are lines on stdin: ``connections`` or ``frames``, seconds, endpoint, mechanism."""
    os.nice(19)
    run_first(0, HOSTILE)
    for line in sys.stdin:
        what, seconds, endpoint, mechanism = line.split()
        batch = connect_batch if what == "connections" else frame_batch
        spent = Spent()
        end_s = time.monotonic() + float(seconds)
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            batch(endpoint, mechanism.encode(), spent)
            time.sleep(max(PAUSE_S, time.monotonic() - began_s))
        sys.stdout.write(f"{msgspec.json.encode(spent).decode()}\n")
        sys.stdout.flush()


def connect_batch(endpoint: str, mechanism: bytes, spent: Spent) -> None:
    """So many connections at once; each says something that is refused, or nothing, and goes."""
    said = (  # the last of a batch are the first of these, and are answered at least a greeting
        greeting(mechanism) + command(b"ERROR", b"\x00"),
        greeting(mechanism) + ready(b"x" * 255) + frame(b"\xc1"),
        greeting(mechanism) + announced(2**63 - 1, COMMAND),
        greeting(mechanism)[:30],
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    )
    opened: list[socket.socket] = []
    for number in range(BATCH):
        # Other source addresses, so that the ports of one are not used up.
        source = f"127.0.{spent.connections // 20_000 % 200}.{2 + number}"
        try:
            raw = connected(endpoint, source=source)
        except OSError:
            spent.refused += 1
            continue
        with contextlib.suppress(OSError):
            raw.sendall(said[(BATCH - 1 - number) % len(said)])
        opened.append(raw)
        spent.connections += 1
    wait_for_some(opened)
    for raw in opened:
        reset(raw)


def wait_for_some(opened: list[socket.socket]) -> None:
    """Until the daemon has answered one of them: it has taken those before."""
    with selectors.DefaultSelector() as ready_ones:
        for raw in opened[-2:]:
            ready_ones.register(raw, selectors.EVENT_READ)
        ready_ones.select(0.5)


def frame_batch(endpoint: str, mechanism: bytes, spent: Spent) -> None:
    """Frames of one connection that is through the handshake.

    Where there is none without a key, of so many that say HELLO in a box that is for nobody: the
    daemon has to compute a key to find out.
    """
    if mechanism == b"NULL":
        with contextlib.suppress(OSError), connected(endpoint) as raw:
            raw.sendall(greeting(mechanism) + ready(b""))
            hear(raw, 64, 0.5)
            for _ in range(FRAMES_EACH // FRAMES_AT_ONCE):
                raw.sendall(frame(NOTHING) * FRAMES_AT_ONCE)
                spent.frames += FRAMES_AT_ONCE
        return
    hello = command(b"HELLO", b"\x01\x00" + bytes(72) + os.urandom(32) + bytes(7) + b"\x01" * 81)
    opened: list[socket.socket] = []
    for _ in range(FRAMES_EACH // FRAMES_AT_ONCE):
        with contextlib.suppress(OSError):
            raw = connected(endpoint)
            opened.append(raw)
            raw.sendall(greeting(mechanism) + hello + frame(NOTHING) * (FRAMES_AT_ONCE - 1))
            spent.frames += FRAMES_AT_ONCE
    wait_for_some(opened)
    for raw in opened:
        reset(raw)


# ---- the echo ------------------------------------------------------------------------------------


class Echo(asyncio.Protocol):
    """The least that a server can do: it says what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def serve_echo(path: str) -> None:
    """At a path, and at a port of loopback, which it says; until the process is stopped."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0, backlog=BACKLOG)
    await loop.create_unix_server(Echo, path, backlog=BACKLOG)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextlib.contextmanager
def echo_server(path: Path, *, at_path: bool) -> Iterator[Besieged]:
    """An echo in a process of its own, with its caller; the flood comes as the caller or by TCP."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fault.flood", "--echo", str(path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        tcp = f"tcp://127.0.0.1:{int(process.stdout.readline())}"
        with connected(f"ipc://{path}") as caller:

            def call(_: int) -> None:
                for _ in range(CALLS):
                    caller.sendall(bytes(CALL_BYTES))
                    hear(caller, CALL_BYTES)

            yield Besieged(f"ipc://{path}" if at_path else tcp, process.pid, call)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# ---- the measurement -----------------------------------------------------------------------------


class Besieged(NamedTuple):
    """A server, where the flood comes to it, and how the honest caller beside it calls it."""

    endpoint: str
    pid: int
    call: Callable[[int], None]
    """Takes the number of the call."""


class Flood:
    """One socket of a daemon: windows of calm and of flood, until there was enough."""

    def __init__(self, name: str, seconds: float) -> None:
        self.row = Row(name, Beside(), Beside())
        self._mechanism = "CURVE" if "key" in name else "NULL"
        self._end_s = time.monotonic() + seconds
        self._flooder = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.flood", "--flooder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, daemon: Besieged, echo: Besieged, connections: int, frames: int) -> None:
        """Until so many were made, or time was up."""
        row = self.row
        row.is_alone = all(run_first(pid, HONEST) for pid in (0, daemon.pid, echo.pid))
        self._window(daemon, [], CALM_S)
        row.before_bytes = row.peak_bytes = rss(daemon.pid)
        half_s = (self._end_s - time.monotonic()) / 2
        end_s = time.monotonic() + half_s
        while row.daemon.connections < connections and time.monotonic() < end_s:
            self._round("connections", daemon, row.daemon)
            self._round("connections", echo, row.echo)
        while row.daemon.frames < frames and time.monotonic() < self._end_s:
            self._round("frames", daemon, row.daemon)
            self._round("frames", echo, row.echo)
        row.after_bytes = given_back(daemon.pid, row.before_bytes + MOST_GROWTH_BYTES)

    def close(self) -> None:
        self._flooder.kill()
        self._flooder.wait()
        for pipe in (self._flooder.stdin, self._flooder.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _round(self, what: str, server: Besieged, beside: Beside) -> None:
        """A window of calm and one of flood."""
        n_calm, n_flood = len(beside.calm_ms), len(beside.flood_ms)
        calm_s = self._window(server, beside.calm_ms, CALM_S)
        told = self._order(what, FLOOD_S, server.endpoint)
        used_s = self._window(server, beside.flood_ms, FLOOD_S)
        # The honest engine has its share: less where the flood leaves it fewer calls.
        share = (len(beside.flood_ms) - n_flood) / max(1, len(beside.calm_ms) - n_calm)
        spent = self._answer(told)
        beside.connections += spent.connections
        beside.frames += spent.frames
        if what == "connections":
            beside.connections_s += used_s - calm_s * share
        else:
            beside.frames_s += used_s - calm_s * share

    def _window(self, server: Besieged, kept: list[float], for_s: float) -> float:
        """The honest call, again and again; the processor time that the server took."""
        before_s = cpu_s(server.pid)
        end_s, number = time.monotonic() + for_s, 0
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            server.call(number)
            kept.append(1e3 * (time.perf_counter() - began_s))
            number += 1
            time.sleep(0.001)
        return cpu_s(server.pid) - before_s

    def _order(self, what: str, for_s: float, endpoint: str) -> bool:
        stdin = self._flooder.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{what} {for_s} {endpoint} {self._mechanism}\n".encode())
            stdin.flush()
            return True
        return False

    def _answer(self, told: bool) -> Spent:
        stdout = self._flooder.stdout
        assert stdout is not None
        line = stdout.readline() if told else b""
        return msgspec.json.decode(line, type=Spent) if line else Spent()


def run_first(pid: int, priority: int) -> bool:
    """Whether a process runs before all others but those of a higher priority, from now on.

    Not its children. It takes a right that root has.
    """
    with contextlib.suppress(PermissionError):
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(pid, policy, os.sched_param(priority))
        return True
    return False


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flooded(name: str, directory: Path, connections: int, frames: int, seconds: float) -> Row:
    """One socket from beginning to end; a daemon that ends is a finding, not an end."""
    place = directory / name.replace(", ", "-").replace(" ", "-")
    place.mkdir()
    with contextlib.ExitStack() as up:
        pair = up.enter_context(two_daemons(place, SETTINGS, with_keys="key" in name))
        at_path = name in {"client", "admin"}
        echo = up.enter_context(echo_server(place / "echo.sock", at_path=at_path))
        flood = Flood(name, seconds)
        up.callback(flood.close)
        up.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        row, daemon = flood.row, pair.decode
        endpoint = {"client": daemon.client, "admin": daemon.admin}.get(name, daemon.peers)
        try:
            with kvd.client.connect_sync(daemon.client, name="honest") as node:

                def call(number: int) -> None:
                    if number % 50 == 0:
                        row.peak_bytes = max(row.peak_bytes, rss(daemon.pid))
                    first = number % 50
                    node.lease(list(range(first, first + 64)), cache=False).release()

                flood.run(Besieged(endpoint, daemon.pid, call), echo, connections, frames)
        except kvd.client.KvdError as error:
            row.troubles.append(f"the honest engine: {error}")
        if not daemon.is_running:
            row.troubles.append(f"the daemon has ended, {daemon._process.wait()}")
    judge(row, connections, frames)
    return row


def judge(row: Row, connections: int, frames: int) -> None:
    """Add what its figures say."""
    daemon, echo = row.daemon, row.echo
    if daemon.connections < connections or daemon.frames < frames:
        row.missed.append(
            f"only {daemon.connections:,} connections and {daemon.frames:,} frames in the time "
            "there was"
        )
    if not daemon.connections or not daemon.frames:
        row.troubles.append("the daemon answered no flood at all")
    if daemon.calm_ms and daemon.flood_ms and echo.calm_ms and echo.flood_ms:
        calm, flood = daemon.p99_ms()
        echo_calm, echo_flood = echo.p99_ms()
        if flood > MOST_TIMES * calm and flood - calm > echo_flood - echo_calm:
            found = row.troubles if flood > STALLED_TIMES * calm else row.missed
            found.append(
                f"p99 of lease and release {flood:.2f} ms, {calm:.2f} without: "
                f"{flood / calm:.1f}x, goal {MOST_TIMES:g}, and it adds "
                f"{echo_flood - echo_calm:.2f} ms to calls of an echo"
            )
    for what, found_bytes in (("took", row.peak_bytes), ("keeps", row.after_bytes)):
        grown = found_bytes - row.before_bytes
        if grown > MOST_GROWTH_BYTES:
            row.troubles.append(f"the daemon {what} {grown / 2**20:.0f} MB, at most 64 are its due")


def table(rows: list[Row]) -> str:
    """Latencies without and with the flood, what it cost, and what was found."""
    head = ("socket", "connections", "frames", "p50 ms", "flooded", "p99 ms", "flooded", "times")
    head += ("us/conn", "us/frame", "RSS MB", "peak", "after", "")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        for name, beside in ((row.socket, row.daemon), ("  an echo", row.echo)):
            line: tuple[str, ...] = (
                name,
                f"{beside.connections:,}",
                f"{beside.frames:,}",
                *(
                    f"{percentile(spent_ms, rank) if spent_ms else 0:.2f}"
                    for rank in (50, 99)
                    for spent_ms in (beside.calm_ms, beside.flood_ms)
                ),
                f"{_times(beside):.1f}",
                f"{beside.connection_us:.0f}",
                f"{beside.frame_us:.1f}",
            )
            if beside is row.daemon:
                sizes = (row.before_bytes, row.peak_bytes, row.after_bytes)
                line += (*(f"{size / 2**20:.0f}" for size in sizes), _word(row))
            else:
                line += ("",) * 4
            lines.append(line)
    found = [f"{row.socket}: {what}" for row in rows for what in (*row.troubles, *row.missed)]
    if not all(row.is_alone for row in rows):
        found.append("Nobody may run first here: what else this machine does counts as the flood.")
    return show(Figures("Flooded", head, lines, found))


def _times(beside: Beside) -> float:
    if not beside.calm_ms or not beside.flood_ms:
        return 0.0
    calm, flood = beside.p99_ms()
    return flood / calm


def _word(row: Row) -> str:
    if row.troubles:
        return "FAILED"
    return "goal MISSED" if row.missed else "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description="Flood each socket beside an honest engine.")
    parser.add_argument("--connections", type=int, default=100_000, help="for each socket")
    parser.add_argument("--frames", type=int, default=100_000, help="for each socket")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each socket, at most")
    parser.add_argument("--socket", default="", help="only those whose name begins so")
    parser.add_argument("--seed", type=int, default=1, help="nothing here is drawn")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--flooder", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.flooder:
        flooder()
        return 0
    if chosen.echo:
        uvloop.run(serve_echo(chosen.echo))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in SOCKETS:
            if name.startswith(chosen.socket):
                place, most_s = Path(directory), chosen.seconds
                rows.append(flooded(name, place, chosen.connections, chosen.frames, most_s))
                say(f"{name}: {_word(rows[-1])}")
    say(table(rows))
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.encode(rows))
    return int(any(row.troubles for row in rows))


if __name__ == "__main__":
    sys.exit(main())
