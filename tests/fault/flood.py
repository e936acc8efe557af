"""How much a flood of hostile connections costs an honest engine: ``python -m tests.fault.flood``.

For each socket: so many connections that say what is refused, and so many frames that are, while an
engine beside it leases and releases. Windows without and with the flood follow each other, so that
what else the machine does falls on both. The flood is a process of its own at the lowest priority:
it sends a batch, waits until the daemon has answered the last of it, and sleeps as long as that
took. So what is measured is what the daemon does for it, not who wins a processor. Beside the
latencies stand the processor time of the daemon for each hostile connection and frame, and its
memory before, at most, and after.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import kvd.client
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
from tests.support.daemons import Daemon, two_daemons

if TYPE_CHECKING:
    import socket

SOCKETS = ("peers", "peers, no key", "client", "admin")
CALM_S = 1.0
FLOOD_S = 3.0
BATCH = 128
PAUSE_S = 0.01
MOST_TIMES = 2.0
"""The goal for p99 beside a flood. One that misses it is told; the machine may have few cores."""
STALLED_TIMES = 10.0
"""What no machine explains: somebody waited for the flood."""
FRAMES_EACH = 100
"""Frames of one connection; the daemon may hang up on the first."""


class Spent(msgspec.Struct):
    """What a flooder has done since it was asked last."""

    connections: int = 0
    frames: int = 0
    refused: int = 0
    """Connections that could not be made."""


class Row(msgspec.Struct):
    socket: str
    connections: int = 0
    frames: int = 0
    calm_ms: list[float] = []
    flood_ms: list[float] = []
    connection_us: float = 0.0
    frame_us: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0
    after_bytes: int = 0
    troubles: list[str] = []
    missed: list[str] = []
    """Goals; they fail nothing."""


# ---- the flooder ---------------------------------------------------------------------------------


def flooder(endpoint: str, mechanism: str) -> None:
    """Orders are lines on stdin, ``connections SECONDS`` or ``frames SECONDS``."""
    os.nice(19)
    for line in sys.stdin:
        what, seconds = line.split()
        spent = Spent()
        end_s = time.monotonic() + float(seconds)
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            if what == "connections":
                connect_batch(endpoint, mechanism.encode(), spent)
            else:
                frame_batch(endpoint, mechanism.encode(), spent)
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
    """Frames of one connection that is through the handshake, where there is none without a key."""
    with contextlib.suppress(OSError), connected(endpoint) as raw:
        raw.sendall(greeting(mechanism) + ready(b""))
        hear(raw, 64, 0.5)
        for _ in range(FRAMES_EACH // 10):
            raw.sendall(frame(b"\xc1 nothing that anybody reads") * 10)
            spent.frames += 10


# ---- the measurement -----------------------------------------------------------------------------


class Flood:
    """One socket of a daemon: windows of calm and of flood, until there was enough."""

    def __init__(self, name: str, daemon: Daemon, seconds: float) -> None:
        self.row = Row(name)
        self._daemon = daemon
        self._end_s = time.monotonic() + seconds
        endpoint = {"client": daemon.client, "admin": daemon.admin}.get(name, daemon.peers)
        mechanism = "CURVE" if "key" in name else "NULL"
        self._flooder = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.flood", "--flooder", endpoint, mechanism],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, connections: int, frames: int) -> Row:
        """Until so many were made, or time was up."""
        row = self.row
        with kvd.client.connect_sync(self._daemon.client, name="honest") as node:
            self._window(node, [], CALM_S)
            row.before_bytes = row.peak_bytes = rss(self._daemon.pid)
            row.connection_us = self._many(node, "connections", connections)
            row.frame_us = self._many(node, "frames", frames)
        row.after_bytes = given_back(self._daemon.pid, row.before_bytes + MOST_GROWTH_BYTES)
        return row

    def close(self) -> None:
        self._flooder.kill()
        self._flooder.wait()
        for pipe in (self._flooder.stdin, self._flooder.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _many(self, node, what: str, most: int) -> float:
        """Windows of calm and of flood in turn; processor microseconds for each of what came."""
        spent_s, n_done = 0.0, 0
        share_s = max(0.0, self._end_s - time.monotonic())
        end_s = time.monotonic() + (share_s / 2 if what == "connections" else share_s)
        while n_done < most and time.monotonic() < end_s:
            calm, flood = self.row.calm_ms, self.row.flood_ms
            n_calm, n_flood = len(calm), len(flood)
            calm_s = self._window(node, calm, CALM_S)
            told = self._order(what, FLOOD_S)
            used_s = self._window(node, flood, FLOOD_S)
            # The honest engine has its share: less where the flood leaves it fewer calls.
            share = (len(flood) - n_flood) / max(1, len(calm) - n_calm)
            spent = self._answer(told)
            n_done += spent.connections + spent.frames
            self.row.connections += spent.connections
            self.row.frames += spent.frames
            spent_s += used_s - calm_s * share
        return 1e6 * max(0.0, spent_s) / max(1, n_done)

    def _window(self, node, kept: list[float], for_s: float) -> float:
        """Lease and release, again and again; the processor time that the daemon took."""
        pid, before_s = self._daemon.pid, cpu_s(self._daemon.pid)
        end_s, number = time.monotonic() + for_s, 0
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            node.lease(list(range(number % 50, number % 50 + 64)), cache=False).release()
            kept.append(1e3 * (time.perf_counter() - began_s))
            number += 1
            if number % 50 == 0:
                self.row.peak_bytes = max(self.row.peak_bytes, rss(pid))
            time.sleep(0.001)
        return cpu_s(pid) - before_s

    def _order(self, what: str, for_s: float) -> bool:
        stdin = self._flooder.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{what} {for_s}\n".encode())
            stdin.flush()
            return True
        return False

    def _answer(self, told: bool) -> Spent:
        stdout = self._flooder.stdout
        assert stdout is not None
        line = stdout.readline() if told else b""
        return msgspec.json.decode(line, type=Spent) if line else Spent()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flooded(name: str, directory: Path, connections: int, frames: int, seconds: float) -> Row:
    """One socket from beginning to end; a daemon that ends is a finding, not an end."""
    place = directory / name.replace(", ", "-").replace(" ", "-")
    place.mkdir()
    with two_daemons(place, SETTINGS, with_keys="key" in name) as pair:
        flood = Flood(name, pair.decode, seconds)
        try:
            flood.run(connections, frames)
        except kvd.client.KvdError as error:
            flood.row.troubles.append(f"the honest engine: {error}")
        finally:
            flood.close()
        row = flood.row
        if not pair.decode.is_running:
            row.troubles.append(f"the daemon has ended, {pair.decode._process.wait()}")
    judge(row, connections, frames)
    return row


def judge(row: Row, connections: int, frames: int) -> None:
    """Add what its figures say."""
    if row.connections < connections or row.frames < frames:
        row.missed.append(
            f"only {row.connections:,} connections and {row.frames:,} frames in the time there was"
        )
    if not row.connections or not row.frames:
        row.troubles.append("the daemon answered no flood at all")
    if row.calm_ms and row.flood_ms:
        calm, flood = (percentile(one, 99) for one in (row.calm_ms, row.flood_ms))
        if flood > MOST_TIMES * calm:
            found = row.troubles if flood > STALLED_TIMES * calm else row.missed
            found.append(
                f"p99 of lease and release {flood:.2f} ms, {calm:.2f} without: "
                f"{flood / calm:.1f}x, goal {MOST_TIMES:g}"
            )
    for what, found in (("took", row.peak_bytes), ("keeps", row.after_bytes)):
        grown = found - row.before_bytes
        if grown > MOST_GROWTH_BYTES:
            row.troubles.append(f"the daemon {what} {grown / 2**20:.0f} MB, at most 64 are its due")


def table(rows: list[Row]) -> str:
    """Latencies without and with the flood, what it cost, and what was found."""
    head = ("socket", "connections", "frames", "p50 ms", "flooded", "p99 ms", "flooded")
    head += ("us/conn", "us/frame", "RSS MB", "peak", "after", "")
    lines = [
        (
            row.socket,
            f"{row.connections:,}",
            f"{row.frames:,}",
            *(
                f"{percentile(one, rank) if one else 0:.2f}"
                for rank in (50, 99)
                for one in (row.calm_ms, row.flood_ms)
            ),
            f"{row.connection_us:.0f}",
            f"{row.frame_us:.1f}",
            *(f"{one / 2**20:.0f}" for one in (row.before_bytes, row.peak_bytes, row.after_bytes)),
            _word(row),
        )
        for row in rows
    ]
    found = [f"{row.socket}: {what}" for row in rows for what in (*row.troubles, *row.missed)]
    return show(Figures("Flooded", head, lines, found))


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
    parser.add_argument("--flooder", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.flooder:
        flooder(*chosen.flooder)
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
