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
from kvd.bench.raw_nixl import (
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.bench.daemons import Place
    from kvd.bench.raw_nixl import Command

TRIES: Final = 3


class Tuning(NamedTuple):
    """How raw NIXL is driven: descriptors of 512 KiB per handle, handles in flight."""

    handle_rows: int
    in_flight: int


TUNINGS: Final = (Tuning(8, 8), Tuning(16, 1), Tuning(16, 4), Tuning(64, 4), Tuning(100_000, 1))


class RawPair:
    """Two bare processes that can write to each other; ``huge_bytes`` of each are in huge pages."""

    def __init__(self, processes: tuple[RawProcess, RawProcess], made: tuple[Made, Made]) -> None:
        self._processes = processes
        self.huge_bytes = tuple(one.huge_bytes for one in made)
        self.binding = made[0].agent
        self.tuning = TUNINGS[0]

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
def raw_pair(
    places: tuple[Place, Place], environment: Mapping[str, str], *, pages: int, page_bytes: int
) -> Iterator[RawPair]:
    """Two bare processes with regions of this size, connected, for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        processes = []
        for place in places:
            one = RawProcess(place.prefix, environment)
            stack.callback(one.stop)
            processes.append(one)
        first, second = processes
        for name, one in zip("ab", processes, strict=True):
            one.tell(Shape(name, pages, page_bytes))
        made = (first.hear(Made), second.hear(Made))
        first.do(Connect(made[1].metadata), Did)
        second.do(Connect(made[0].metadata), Did)
        yield RawPair((first, second), made)
