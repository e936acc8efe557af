"""The campaign: rounds of faults that overlap, under load, and what must be true after each.

    python -m tests.fault.campaign --faults 200 --seed 1 --json out.json

After each fault handoffs of the victims are delivered again within a bound; after each round, with
no room open, nothing is held on any node. Every delivered page is right by digest, and rooms that
share no victim never fail.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.errors import KvdError
from kvd.wire import admin, events
from tests.fault.cluster import VICTIMS, Cluster, cluster
from tests.fault.faults import KINDS, Planned, plan_round, possible
from tests.fault.load import Broken, Room
from tests.fault.table import Figures, percentile, say, show
from tests.support.daemons import DaemonFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

RECOVERY_S = 15.0
CALM_S = 10.0
MOST_FAULTS = 5


class Recovered(msgspec.Struct, frozen=True):
    """One fault and how long it took until a room of the victims was delivered again."""

    kind: str
    side: str
    recovery_s: float


class Outcome(msgspec.Struct):
    """All that a campaign has seen."""

    seed: int
    rounds: int = 0
    recovered: list[Recovered] = []
    conclusions: dict[str, int] = {}
    proofs: dict[str, int] = {}
    longest_quarantine_s: float = 0.0
    calm: list[float] = []
    healthy: list[float] = []
    healthy_rooms: int = 0
    rooms: int = 0
    pages_checked: int = 0
    longest_overrun_s: float = 0.0
    took_s: float = 0.0
    left_out: str = ""


class Campaign:
    def __init__(self, made: Cluster, seed: int, kinds: Sequence[str] = ()) -> None:
        self.cluster = made
        self.kinds = list(kinds) or possible(has_network=made.network is not None)
        self.outcome = Outcome(seed)
        self._source = random.Random(seed)
        self._touched: dict[str, list[list[float]]] = {name: [] for name in VICTIMS}
        self._judged = 0
        self._calm_ends_s = 0.0

    async def calm(self, for_s: float) -> None:
        """Load without faults: what the latencies are compared with."""
        await asyncio.sleep(for_s)
        self._calm_ends_s = time.monotonic()
        self._check_ledger()

    async def round(self, planned: list[Planned]) -> None:
        """Faults, recovery, rest.

        Raises:
            Broken: a promise was not kept.
        """
        load = self.cluster.load
        await asyncio.gather(*(self._suffer(fault) for fault in planned))
        load.pause()
        await load.idle()
        for spans in self._touched.values():
            for span in spans:
                span[1] = min(span[1], time.monotonic())
        self._check_ledger()
        await self.cluster.at_rest()
        await self._hear()
        self.outcome.rounds += 1
        load.resume()

    def plan(self, most: int = MOST_FAULTS) -> list[Planned]:
        """The next round of this seed."""
        return plan_round(self._source, self.kinds, most)

    async def _suffer(self, fault: Planned) -> None:
        kind = KINDS[fault.kind]
        await asyncio.sleep(fault.start_s)
        if kind.harms:
            self._touched[fault.side].append([time.monotonic(), float("inf")])
        await kind.run(self.cluster, fault, random.Random(fault.seed))
        over_s = time.monotonic()
        while (seen := self._first_delivery(over_s)) is None:
            # How long a process takes to start is the machine's, and has a bound where it starts.
            if time.monotonic() - over_s - self.cluster.absences.since(over_s) > RECOVERY_S:
                raise Broken(f"no room was delivered for {RECOVERY_S:g} s after: {fault}")
            await asyncio.sleep(0.02)
        self.outcome.recovered.append(Recovered(fault.kind, fault.side, seen - over_s))
        for name in VICTIMS:
            if self.cluster.servers[name].daemon.is_running:
                await self._audit_under_load(name)

    async def _audit_under_load(self, name: str) -> None:
        try:
            await self.cluster.audited(name)
        except KvdError:
            return  # the next fault has it already: the end of the round looks again

    def _first_delivery(self, since_s: float) -> float | None:
        good = [
            room.ended_s for room in self.cluster.load.since(since_s, "p-d") if room.is_delivered
        ]
        return min(good, default=None)

    # ---- what must be true -------------------------------------------------------------------

    def _check_ledger(self) -> None:
        load, out = self.cluster.load, self.outcome
        new, self._judged = load.ledger[self._judged :], len(load.ledger)
        for room in new:
            out.rooms += 1
            out.pages_checked += room.sent.checked + room.received.checked
            late_s = room.ended_s - room.opened_s - room.deadline_s
            late_s -= self.cluster.stops.since(room.opened_s) if late_s > 0 else 0
            out.longest_overrun_s = max(out.longest_overrun_s, late_s)
            if room.route == "p-d":
                out.conclusions[room.conclusion] = out.conclusions.get(room.conclusion, 0) + 1
            elif not self._was_touched(room):
                self._check_healthy(room)
        if load.broken:
            raise Broken("\n".join(load.broken))

    def _check_healthy(self, room: Room) -> None:
        if not room.is_delivered or room.sent.code:
            self.cluster.load.broken.append(
                f"healthy room {room.room} ({room.route}) failed: {room.received} / {room.sent}"
            )
            return
        self.outcome.healthy_rooms += 1
        is_calm = room.ended_s < self._calm_ends_s or not self._calm_ends_s
        (self.outcome.calm if is_calm else self.outcome.healthy).append(room.latency_s)

    def _was_touched(self, room: Room) -> bool:
        nodes = {"p-h": "p", "g-h": ""}[room.route]
        return any(
            begin < room.ended_s and room.opened_s < end
            for name in nodes
            for begin, end in self._touched[name]
        )

    async def _hear(self) -> None:
        """What ended each quarantine."""
        proofs = Counter(self.outcome.proofs)
        for server in self.cluster.servers.values():
            page = await server.ask(admin.ListEvents(1, server.last_event))
            while isinstance(page, admin.EventPage) and page.events:
                for event in page.events:
                    server.last_event = event.seq
                    if isinstance(event, events.QuarantineEnded):
                        proofs[_kind_of(event.proof)] += 1
                        self.outcome.longest_quarantine_s = max(
                            self.outcome.longest_quarantine_s, event.age_s
                        )
                page = await server.ask(admin.ListEvents(1, server.last_event))
        self.outcome.proofs = dict(proofs)


def _kind_of(proof: str) -> str:
    """A proof without the names and numbers in it."""
    return " ".join(word for word in proof.split() if word.isalpha())[:60]


class Plan(NamedTuple):
    """``faults`` of them at least, or as many as ``most_s`` has room for; of all kinds if empty."""

    seed: int
    faults: int
    most_s: float
    kinds: tuple[str, ...] = ()
    overlap: int = MOST_FAULTS


async def run(directory: Path, plan: Plan) -> Outcome:
    """A whole campaign.

    Raises:
        Broken: a promise was not kept; the message holds the schedule of its round.
    """
    began_s = time.monotonic()
    async with cluster(directory, plan.seed) as made:
        campaign = Campaign(made, plan.seed, plan.kinds)
        if made.network is None:
            campaign.outcome.left_out = "links: no network namespaces here"
        await campaign.calm(CALM_S)
        while len(campaign.outcome.recovered) < plan.faults and (
            time.monotonic() - began_s < plan.most_s
        ):
            await one_round(campaign, campaign.plan(plan.overlap))
        await made.load.stop()
        campaign.outcome.took_s = time.monotonic() - began_s
        return campaign.outcome


async def one_round(campaign: Campaign, planned: list[Planned]) -> None:
    """A round; what goes wrong is told with its schedule.

    Raises:
        Broken: a promise was not kept.
    """
    try:
        await campaign.round(planned)
    except (Broken, DaemonFailed, KvdError) as why:
        schedule = "\n".join(f"    {fault}" for fault in planned)
        number = campaign.outcome.rounds + 1
        raise Broken(
            f"seed {campaign.outcome.seed}, round {number}: {why}\n  its faults:\n{schedule}"
        ) from why


def main() -> int:
    words = argparse.ArgumentParser(description="Faults in real daemons, under load.")
    words.add_argument("--faults", type=int, default=200)
    words.add_argument("--most-s", type=float, default=420.0)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", nargs="*", default=(), choices=KINDS, metavar="KIND")
    words.add_argument("--overlap", type=int, default=MOST_FAULTS, help="most faults at a time")
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    plan = Plan(chosen.seed, chosen.faults, chosen.most_s, tuple(chosen.only), chosen.overlap)
    directory = Path(tempfile.mkdtemp(prefix="kvd-fault-"))
    try:
        outcome = asyncio.run(run(directory, plan))
    except Broken as why:
        say(f"{why}\n  logs of all nodes: {directory}")
        return 1
    shutil.rmtree(directory)
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    say(show(figures(outcome)))
    return 0


def figures(outcome: Outcome) -> Figures:
    """What a reader wants to see, as rows."""
    kinds: dict[str, list[float]] = {}
    for one in outcome.recovered:
        kinds.setdefault(one.kind, []).append(one.recovery_s)
    return Figures(
        title=f"{len(outcome.recovered)} faults in {outcome.rounds} rounds, seed {outcome.seed}, "
        f"{outcome.took_s:.0f} s",
        headers=("fault", "count", "recovery p50 s", "max s"),
        rows=[
            (kind, str(len(took)), f"{percentile(took, 50):.2f}", f"{max(took):.2f}")
            for kind, took in sorted(kinds.items())
        ],
        notes=[
            f"{outcome.rooms} rooms, {outcome.pages_checked} pages compared by digest, "
            f"latest end {max(0.0, outcome.longest_overrun_s):.2f} s after the deadline",
            f"rooms of the victims: {outcome.conclusions}",
            f"quarantines ended by: {outcome.proofs}, longest {outcome.longest_quarantine_s:.1f} s",
            f"healthy rooms: {outcome.healthy_rooms}, none failed; p50/p99 "
            f"{_ms(outcome.calm, 50)}/{_ms(outcome.calm, 99)} ms without faults, "
            f"{_ms(outcome.healthy, 50)}/{_ms(outcome.healthy, 99)} ms with them",
            *([f"left out: {outcome.left_out}"] if outcome.left_out else []),
        ],
    )


def _ms(values: list[float], rank: int) -> str:
    return f"{1e3 * percentile(values, rank):.0f}" if values else "-"


if __name__ == "__main__":
    sys.exit(main())
