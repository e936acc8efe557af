"""Pages that a remote may still write: who may, and what gives them back.

A part that ends gives its delta back at once where nothing can land any more. Otherwise the pages
go into quarantine, and come back when the writer has settled, is proven gone, or was fenced. No
timer gives a page back.

A writer that is over may have left bytes behind. The system of a dead process goes on sending what
its sockets hold, and a reset may be late; what the writer says itself, or who comes after it, does
not travel behind them. So the pages come back when our transfer process says Quiet: every
connection there was when we heard of the end has ended too, which on TCP follows the data, and
what was read has come to rest. Only connections that a living peer claims (``pulse``), in an echo
of a ping that left later, are not waited for: they are of no writer whose end was known then.

What must not live here: transitions (``receive``), and whose turn it is then (``admission``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core import effects
from kvd.core.cache.lease import ARRIVAL, Quarantine, Writer
from kvd.core.effects import Doubt
from kvd.core.peers.pulse import claimed
from kvd.types import short

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceivePart
    from kvd.core.inputs import Awaiting, Quiet
    from kvd.core.leases.engine_copies import EngineCopies
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings

MAX_NAMED = 3
"""Connections that a sentence names."""


class AwaitedStreams(msgspec.Struct, frozen=True):
    """Connections that a lease waits for, since when, and the last ping that left before."""

    streams: tuple[str, ...]
    since_s: float
    last_ping: int

    def is_of_living(self, stream: str, owners: dict[str, Peer]) -> bool:
        """Whether its owner said so when it knew of every end that this lease waits for."""
        owner = owners.get(stream)
        return owner is not None and owner.claim.number > self.last_ping


class Quarantines:
    """Quarantined leases whose writers are over, until this host is quiet; and the way there."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        copies: EngineCopies,
        peers: Peers,
        out: Outbox,
    ) -> None:
        self.leases: dict[int, LeaseRecord] = {}
        """By lease id."""
        self.awaited: dict[int, AwaitedStreams] = {}
        """Of these leases: which connections they wait for, where it is not done at once."""
        self._settings = settings
        self._table = leases
        self._copies = copies
        self._peers = peers
        self._out = out
        self._fenced_generation = self._claims = 0

    def begin_quarantine(self, lease: LeaseRecord, parts: list[ReceivePart], why: str) -> None:
        """The writers of these parts may still write its pages: keep them from everybody."""
        writers = tuple([Writer(part.peer, part.incarnation) for part in parts])
        self._copies.receive_failed(lease)
        # Since now, also where it is doubt that begins it: ``fence_after_s`` counts from when
        # somebody began to wait.
        self._table.ends.quarantine(lease, Quarantine(writers, self._out.at_s, why))

    def narrow_writers(self, lease: LeaseRecord, parts: list[ReceivePart]) -> None:
        """Of the writers of a quarantined lease, those of these parts are left."""
        self._table.ends.narrow_quarantine(
            lease, tuple([Writer(part.peer, part.incarnation) for part in parts])
        )

    def release_or_quarantine(
        self, part: ReceivePart, lease: LeaseRecord, cause: str, doubt: Doubt
    ) -> None:
        """Give the delta back, at once or when the bytes in doubt have come to rest."""
        # Released, and not unquarantined: there never was a quarantine, the arrival just ends.
        if doubt is Doubt.NONE:
            self._table.holders.release(lease, ARRIVAL, cause)
        else:
            self.begin_quarantine(lease, [part], cause)
            self._await_quiet(lease, doubt)

    def end_quarantine(self, lease: LeaseRecord, proof: str, doubt: Doubt) -> None:
        """The last writer of a quarantined lease is over."""
        if doubt is Doubt.NONE:
            self._table.ends.end_quarantine(lease, proof)
        else:
            self._await_quiet(lease, doubt)

    def awaiting(self, got: Awaiting) -> None:
        """Our transfer process has looked, and waits for these connections."""
        for lease_id in got.leases:
            if not got.streams:
                self.awaited.pop(lease_id, None)
            elif lease_id in self.leases:
                # A later look at the same lease keeps the first ping: a claim counts only if it was
                # made after we began to wait, and looking again must not move that.
                known = self.awaited.get(lease_id)
                since_s = known.since_s if known else got.at_s
                last_ping = known.last_ping if known else self._peers.pulse.last_ping
                self.awaited[lease_id] = AwaitedStreams(got.streams, since_s, last_ping)

    def exempt(self) -> None:
        """Wait no more for what living peers have claimed since."""
        # Claims are counted, not compared: one that repeats the same streams is newer all the same,
        # and it is the newness that proves something.
        claims, self._claims = self._claims, self._peers.pulse.claims
        # Every tick comes here: without a new claim nothing can have changed.
        if not self.awaited or claims == self._claims:
            return
        owners = claimed(self._peers.by_name.values())
        groups: dict[tuple[str, ...], list[int]] = {}
        for lease_id, awaited in self.awaited.items():
            streams = tuple(
                [stream for stream in awaited.streams if awaited.is_of_living(stream, owners)]
            )
            if streams:
                # Leases that wait for the same connections are exempted in one order.
                groups.setdefault(streams, []).append(lease_id)
        for streams, leases in groups.items():
            self._out.effects.append(effects.Exempt(tuple(leases), streams))

    def quiet(self, got: Quiet) -> None:
        """Nothing that was in doubt for the lease's pages can land any more."""
        self._free_quiet(got.lease)

    def _free_quiet(self, lease_id: int) -> None:
        # A fence may have freed it while the report about it was under way: then there is none.
        lease = self.leases.pop(lease_id, None)
        self.awaited.pop(lease_id, None)
        if lease is not None:
            self._table.ends.end_quarantine(lease, "quiet")

    def fenced(self) -> None:
        """Our receiving transfer process is reaped: nothing can land through it any more."""
        # Quiet was asked of the process that is gone: nobody else would ever answer.
        for lease_id in list(self.leases):
            self._free_quiet(lease_id)

    def fence_if_due(self) -> None:
        """The configured policy: a quarantine that outlives ``fence_after_s`` costs a restart."""
        limit_s = self._settings.fence_after_s
        generation = self._peers.generation
        # Once for a generation: a restart takes a while, and each tick would order another one.
        if not limit_s or generation <= self._fenced_generation:
            return
        late = [
            lease
            for lease in self._table.leases.values()
            if lease.quarantine is not None and self._out.at_s - lease.quarantine.since_s >= limit_s
        ]
        if late:
            # Noted when it is ordered and not when it is done: until then this generation still
            # serves.
            self._fenced_generation = generation
            why = f"{len(late)} leases in quarantine for {limit_s:g} s (transfer.fence_after_s)"
            self._out.effects.append(effects.RestartTransfer(why))

    def waits_for(self, lease: LeaseRecord) -> str:
        """What would give a quarantined lease's pages back, in words."""
        held = lease.quarantine
        awaited = self.awaited.get(lease.id)
        # Quiesce is ordered and nothing is known to be waited for: the transfer process only lets
        # what it has read come to rest.
        if held is None or (awaited is None and lease.id in self.leases):
            return "what had reached this host to come to rest"
        by_itself = ""
        if self._settings.fence_after_s:
            rest_s = held.since_s + self._settings.fence_after_s - self._out.at_s
            by_itself = f", which comes by itself in {max(0.0, rest_s):.1f} s"
        if awaited is not None:
            return f"{self._ends(awaited)}, or a fence{by_itself}"
        writers = " and ".join(
            [f"{writer.peer} ({short(writer.incarnation)})" for writer in held.writers]
        )
        return f"{writers} to settle, to restart, or a fence{by_itself}"

    def _ends(self, awaited: AwaitedStreams) -> str:
        """Which connections have to end, whose they are, and what ends them."""
        owners = claimed(self._peers.by_name.values())
        names = []
        for stream in awaited.streams[:MAX_NAMED]:
            owner = owners.get(stream)
            names.append(f"{stream} (claimed by {owner.name if owner else 'nobody'})")
        if len(awaited.streams) > MAX_NAMED:
            names.append(f"{len(awaited.streams) - MAX_NAMED} more")
        waited_s = self._out.at_s - awaited.since_s
        return (
            f"the end of what may still bring bytes of a writer that is over: {', '.join(names)}, "
            f"for {waited_s:.1f} s now (a silent host is given up after about 10 s), "
            "the claim of a living peer"
        )

    def _await_quiet(self, lease: LeaseRecord, doubt: Doubt) -> None:
        """The writers are gone, but what they have sent may still come."""
        # First, because without a transfer process it is free at once, and ``_free_quiet`` looks
        # here.
        self.leases[lease.id] = lease
        # None serves: the last one is reaped, so nothing can land through it any more.
        if self._peers.generation:
            self._out.effects.append(effects.Quiesce(lease.id, doubt))
        else:
            self._free_quiet(lease.id)
