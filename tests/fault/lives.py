"""What became of a cluster over many lives of one side: how soon it served, who grew old by it."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

import msgspec

from tests.fault.fleet import descriptors, rss_bytes
from tests.fault.load import Broken

if TYPE_CHECKING:
    from tests.fault.cluster import Cluster
    from tests.fault.load import Room

DELIVERED_S = 15.0
WARM_UP = 10
"""Lives of the other side before memory counts: caches fill, allocators settle."""
WINDOW = 10
MOST_GROWTH = 0.10
MOST_NEW_DESCRIPTORS = 3


class Age(msgspec.Struct, frozen=True):
    """What a surviving process had after each restart of the other side."""

    process: str
    rss_bytes: list[int]
    descriptors: list[int]

    @property
    def is_old_enough(self) -> bool:
        """Whether there were enough lives to speak of growth."""
        return len(self.rss_bytes) >= WARM_UP + 2 * WINDOW

    def growth(self) -> float:
        """Of the median of the last ten lives over that of the ten after warming up."""
        young = statistics.median(self.rss_bytes[WARM_UP : WARM_UP + WINDOW])
        return statistics.median(self.rss_bytes[-WINDOW:]) / young - 1

    def new_descriptors(self) -> int:
        """More of them open at the end than after warming up."""
        young = statistics.median(self.descriptors[WARM_UP : WARM_UP + WINDOW])
        return round(statistics.median(self.descriptors[-WINDOW:]) - young)


class Restarted(msgspec.Struct):
    """All restarts of one side. ``back_s``: from the kill to the next delivered room."""

    side: str
    restarts: int = 0
    back_s: list[float] = []
    ages: list[Age] = []
    rooms: int = 0
    delivered: int = 0
    pages_checked: int = 0

    def measure(self, made: Cluster) -> None:
        """One more life: what the survivors have now.

        Raises:
            Broken: the load has found something.
        """
        self.restarts += 1
        ages = {age.process: age for age in self.ages}
        for name, pid in survivors(made, self.side).items():
            if name not in ages:
                self.ages.append(Age(name, [], []))
                ages[name] = self.ages[-1]
            ages[name].rss_bytes.append(rss_bytes(pid))
            ages[name].descriptors.append(descriptors(pid))
        if made.load.broken:
            raise Broken("\n".join(made.load.broken))

    def conclude(self, rooms: list[Room]) -> None:
        """After the last life; ``rooms`` are those of all of them.

        Raises:
            Broken: a survivor has grown.
        """
        self.rooms = len(rooms)
        self.delivered = sum(room.is_delivered for room in rooms)
        self.pages_checked = sum(room.received.checked + room.sent.checked for room in rooms)
        for age in self.ages:
            if not age.is_old_enough:
                continue
            if age.growth() > MOST_GROWTH:
                raise Broken(f"{age.process} grew by {age.growth():.0%}: {age.rss_bytes}")
            if age.new_descriptors() > MOST_NEW_DESCRIPTORS:
                raise Broken(f"{age.process} keeps descriptors open: {age.descriptors}")

    def told_ages(self) -> list[str]:
        """A line for each survivor."""
        return [
            f"{self.side} restarted: {age.process} {age.rss_bytes[-1] / 2**20:.0f} MiB "
            f"({age.growth():+.1%}), {age.descriptors[-1]} descriptors "
            f"({age.new_descriptors():+d})"
            for age in self.ages
            if age.is_old_enough
        ]


def survivors(made: Cluster, side: str) -> dict[str, int]:
    """Processes that know the restarted node and stay, by name."""
    found = {}
    for name, server in made.servers.items():
        transfer = server.transfer_pid()
        if name != side and transfer is not None:
            found[f"{name} daemon"] = server.daemon.pid
            found[f"{name} transfer process"] = transfer
    return found


async def next_delivery(made: Cluster, since_s: float) -> float:
    """When the first room was delivered that was opened after ``since_s``.

    Raises:
        Broken: none was, for long.
    """
    while True:
        good = [r.ended_s for r in made.load.since(since_s, "p-d") if r.is_delivered]
        if good:
            return min(good)
        if time.monotonic() - since_s > DELIVERED_S:
            raise Broken(f"no room was delivered for {DELIVERED_S:g} s after a restart")
        await asyncio.sleep(0.02)
