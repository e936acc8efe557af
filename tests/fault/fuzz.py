"""Besiege every socket of a running daemon: ``python -m tests.fault.fuzz``.

Each siege sends so many hostile frames while a healthy engine works with the same daemon and hands
prompts over between two of them. The first fifth warms up; what the daemon takes may not grow
afterwards. The table says what was sent, what was answered, what the daemon counted as refused, and
how the healthy engine fared; a siege that found something prints it and fails the run. A run is
repeated by its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec

from tests.fault.fuzz_memory import POOLS, besiege_core, besiege_metadata, besiege_orders
from tests.fault.fuzz_peers import Peers
from tests.fault.fuzz_streams import Attachers, Browsers, Streams
from tests.fault.fuzz_target import (
    MOST_FDS,
    MOST_GROWTH_BYTES,
    SLOWEST_MS,
    Size,
    Target,
    besieged,
    percentile,
)
from tests.fault.fuzz_wire import Clients, Operators, Strangers

ROUNDS = 2
"""A daemon keeps what its largest moment took, which may come late. What leaks is taken again by as
many frames more."""
WARM_FRAMES = 50_000
"""A fifth of fewer does not fill the rings and tables that a daemon bounds."""
SIEGES = (Clients, Strangers, Attachers, Operators, Peers, Browsers, Streams)


IN_MEMORY = {
    "core": besiege_core,
    "core, every component": partial(besiege_core, pool=POOLS["everything"]),
    "order socket": besiege_orders,
    "metadata": besiege_metadata,
}


class Row(msgspec.Struct):
    """One siege, as the table shows it."""

    socket: str
    frames: int
    seconds: float
    answered: int
    counted: int
    """Refusals that /metrics of the daemon counted."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    handoffs: int
    retried: int
    daemon_growth_bytes: int
    transfer_growth_bytes: int
    fds_growth: int
    codes: dict[str, int]
    troubles: list[str]


def besiege(target: Target, siege_type, frames: int, seed: int) -> Row:
    """One siege from beginning to end."""
    target.healthy()
    refused = target.refused(siege_type.counter)
    siege = siege_type(target, seed)
    began_s = time.monotonic()
    siege.storm(frames // 5)
    siege.calm()
    troubles = target.wait_at_rest()
    grown, before = (0, 0, 0), target.sizes()
    for _ in range(ROUNDS):
        siege.again()
        siege.storm(frames - frames // 5)
        siege.calm()
        troubles += target.wait_at_rest()
        grown, before = growth(before, after := target.sizes()), after
        if not grew(grown, frames):
            break
    seconds = time.monotonic() - began_s
    seen = target.healthy_until_handoff()
    troubles += siege.tally.troubles + seen.troubles + target.faults()
    row = Row(
        siege.name,
        siege.tally.frames,
        seconds,
        siege.tally.answered,
        target.refused(siege_type.counter) - refused,
        percentile(seen.calls_ms, 0.5),
        percentile(seen.calls_ms, 0.99),
        max(seen.calls_ms, default=0.0),
        len(seen.handoffs_ms),
        len(seen.retried),
        *grown,
        dict(siege.tally.codes),
        troubles,
    )
    judge(row, seen.retried)
    return row


def growth(before: tuple[Size, Size], after: tuple[Size, Size]) -> tuple[int, int, int]:
    """What either daemon took more of: own bytes, bytes of its transfer process, descriptors.

    A transfer process that was fenced meanwhile is another one, and not compared.
    """
    pairs = list(zip(before, after, strict=True))
    return (
        max(new.daemon_bytes - old.daemon_bytes for old, new in pairs),
        max(
            (
                new.transfer_bytes - old.transfer_bytes
                for old, new in pairs
                if new.transfer_pid == old.transfer_pid
            ),
            default=0,
        ),
        max(new.fds - old.fds for old, new in pairs),
    )


def grew(grown: tuple[int, int, int], frames: int) -> list[str]:
    """Which of these is too much, in words."""
    daemon_bytes, transfer_bytes, fds = grown
    most_bytes = MOST_GROWTH_BYTES if frames >= WARM_FRAMES else 4 * MOST_GROWTH_BYTES
    found = []
    if daemon_bytes > most_bytes:
        found.append(f"the daemon grew by {daemon_bytes} bytes")
    if transfer_bytes > most_bytes:
        found.append(f"the transfer process grew by {transfer_bytes} bytes")
    if fds > MOST_FDS:
        found.append(f"{fds} more descriptors are open")
    return found


def besiege_in_memory(name: str, frames: int, seed: int) -> Row:
    """A siege of what needs no daemon: whatever it raises ends the run."""
    began_s = time.monotonic()
    answered = IN_MEMORY[name](frames, seed)
    seconds = time.monotonic() - began_s
    return Row(name, frames, seconds, answered, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, [])


def judge(row: Row, retried: list[str]) -> None:
    """Add to the troubles of a row what its figures say."""
    if row.max_ms > SLOWEST_MS:
        row.troubles.append(f"a call of the healthy engine took {row.max_ms:.0f} ms")
    if not row.handoffs:
        row.troubles.append("no handoff between the daemons was delivered meanwhile")
    grown = row.daemon_growth_bytes, row.transfer_growth_bytes, row.fds_growth
    row.troubles += grew(grown, row.frames)
    if retried and row.socket != "admin":
        row.troubles += retried


def show(rows: list[Row]) -> str:
    """The table, and under it what was found."""
    head = ("socket", "frames", "s", "frames/s", "answered", "counted", "p50 ms", "p99 ms")
    head += ("max ms", "handoffs", "MB", "MB xfer", "fds", "verdict")
    lines = [head, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    found = [f"{row.socket}: {what}" for row in rows for what in row.troubles]
    return "\n".join([*table, *found])


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    return (
        row.socket,
        f"{row.frames:,}",
        f"{row.seconds:.1f}",
        f"{row.frames / row.seconds:,.0f}",
        f"{row.answered:,}",
        f"{row.counted:,}",
        f"{row.p50_ms:.2f}",
        f"{row.p99_ms:.1f}",
        f"{row.max_ms:.0f}",
        f"{row.handoffs}" + f" (+{row.retried} again)" * bool(row.retried),
        f"{row.daemon_growth_bytes / 2**20:+.1f}",
        f"{row.transfer_growth_bytes / 2**20:+.1f}",
        f"{row.fds_growth:+d}",
        "FAILED" if row.troubles else "ok",
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Besiege every socket of a running daemon.")
    parser.add_argument("--frames", type=int, default=100_000, help="for each socket")
    parser.add_argument("--seed", type=int, default=20_261)
    parser.add_argument("--socket", default="", help="only those whose name begins so")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    chosen = parser.parse_args()
    say(f"seed {chosen.seed}")
    rows = []
    rows += [
        besiege_in_memory(name, chosen.frames, chosen.seed)
        for name in IN_MEMORY
        if name.startswith(chosen.socket)
    ]
    sieges = [siege for siege in SIEGES if siege.name.startswith(chosen.socket)]
    if sieges:
        with tempfile.TemporaryDirectory() as directory, besieged(Path(directory)) as target:
            for siege in sieges:
                rows.append(besiege(target, siege, chosen.frames, chosen.seed))
                say(show(rows[-1:]).splitlines()[1])
    say(show(rows))
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.encode(rows))
    return int(any(row.troubles for row in rows))


if __name__ == "__main__":
    sys.exit(main())
