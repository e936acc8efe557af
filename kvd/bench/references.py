"""What a handoff is compared with: two bare processes that do the same work and nothing else.

What lives here: pairs of ``raw_nixl`` processes and what they are asked to do together. What must
not: daemons.

Raw NIXL is measured in its best configuration, found on the spot: several sizes of handles and
numbers of them in flight are tried, and the fastest is the reference for the whole run.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.bench.engines import Took
from kvd.bench.memory import huge_bytes
from kvd.bench.raw_nixl import (
    REGION,
    Connect,
    Copy,
    Did,
    Give,
    Listening,
    Made,
    RawProcess,
    Shape,
    Take,
    Write,
)
from kvd.client.blocking import attach
from kvd.wire.attach import Attach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.raw_nixl import Command
    from kvd.bench.sites import Site
    from kvd.harness.daemons import Daemon, Pair

POOL: Final = "main"
TRIES: Final = 3


class Tuning(NamedTuple):
    """How raw NIXL is driven: descriptors of 512 KiB per handle, handles in flight, longest nap."""

    handle_rows: int
    in_flight: int
    sleep_s: float


NAP_S: Final = 0.02
ALL: Final = 1_000_000
TUNINGS: Final = (
    Tuning(16, 1, 0),
    Tuning(16, 4, 0),
    Tuning(64, 4, 0),
    Tuning(ALL, 1, 0),
    Tuning(16, 4, NAP_S),
    Tuning(16, 8, NAP_S),
    Tuning(ALL, 1, NAP_S),
)


class RawPair:
    """Two bare processes, over the pools of two daemons, that can write to each other."""

    def __init__(self, first: RawProcess, second: RawProcess) -> None:
        self._processes = (first, second)
        self.tuning = TUNINGS[0]

    @property
    def huge_bytes(self) -> tuple[int, ...]:
        """Bytes of the pools that each of them has mapped as 2 MiB pages so far."""
        return tuple(huge_bytes(one.pid) for one in self._processes)

    def tune(self, source: bytes, destination: bytes) -> None:
        """Find the fastest way to write these pages, one way."""
        times: dict[Tuning, float] = {}
        for tuning in TUNINGS:
            self.tuning = tuning
            took = [self.write(source, destination, ways=1).seconds for _ in range(TRIES)]
            times[tuning] = statistics.median(took)
        self.tuning = min(times, key=lambda tuning: times[tuning])

    def write(self, source: bytes, destination: bytes, *, ways: int) -> Took:
        """Write pages of the first process over pages of the second; two ways: and back."""
        return self._both(Write(source, destination, *self.tuning), ways)

    def copy(self, source: bytes, destination: bytes, *, ways: int, piece_bytes: int) -> Took:
        """As many bytes by memcpy within a process; two ways: in both processes at once."""
        return self._both(Copy(source, destination, piece_bytes), ways)

    def stream(self, host: str, size_bytes: int, *, ways: int) -> Took:
        """As many bytes over one plain TCP connection; two ways: in both directions at once."""
        giver, taker = self._processes
        back_bytes = size_bytes * (ways - 1)
        port = taker.do(Take(host, size_bytes, back_bytes), Listening).port
        gave = giver.do(Give(host, port, back_bytes, size_bytes), Did)
        took = taker.hear(Did)
        spans = ((gave.began_s, took.ended_s), (took.began_s, gave.ended_s))
        return Took(spans[:ways])

    def _both(self, command: Command, ways: int) -> Took:
        active = self._processes[:ways]
        for one in active:
            one.tell(command)
        done = [one.hear(Did) for one in active]
        return Took(tuple((one.began_s, one.ended_s) for one in done))


@contextlib.contextmanager
def raw_pair(pair: Pair, site: Site, *, pages: int, page_bytes: int) -> Iterator[RawPair]:
    """A bare process beside each daemon, over its pool, for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        processes = []
        for daemon, place in zip((pair.prefill, pair.decode), site.places, strict=True):
            descriptor = stack.enter_context(_pool_memory(daemon))
            one = RawProcess(descriptor, place.prefix, site.environment)
            stack.callback(one.stop)
            one.tell(Shape(daemon.name, descriptor, pages, page_bytes))
            processes.append(one)
        first, second = processes
        made = (first.hear(Made), second.hear(Made))
        first.do(Connect(made[1].metadata), Did)
        second.do(Connect(made[0].metadata), Did)
        yield RawPair(first, second)


@contextlib.contextmanager
def _pool_memory(daemon: Daemon) -> Iterator[int]:
    """The descriptor of a daemon's pool, from a session that lasts as long as the block."""
    attachment = attach(daemon.client, Attach("bench-raw"))
    try:
        yield attachment.memory_fd(POOL, REGION)
    finally:
        attachment.close()
