"""What may be read of a node: the parts that inspection, the audit and the consoles look at.

A node is one; so is any stand-in with these parts. Whoever takes a ``NodeView`` reads: what changes
a node is in ``node``, ``engines`` and ``operators``, and in the parts themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvd.core.handoff.drain import Drainer
    from kvd.core.handoff.pull_source import PullSource
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.send import Prefiller
    from kvd.core.kv_events.announcer import BlockAnnouncer
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.engine_copies import EngineCopies
    from kvd.core.leases.epochs import Epochs
    from kvd.core.leases.fetch import Fetcher
    from kvd.core.leases.former_leases import FormerLeases
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.leases.pins import Pins
    from kvd.core.leases.retraction import Retractor
    from kvd.core.leases.sessions import Sessions
    from kvd.core.outbox import Outbox
    from kvd.core.peers.registry import Peers
    from kvd.core.peers.ways import Ways
    from kvd.core.settings import Settings
    from kvd.core.tiers.tiers import Tiers
    from kvd.wire.snapshot import AuditState, RecorderState


class RecorderView(Protocol):
    """The flight recorder's last word."""

    @property
    def state(self) -> RecorderState:
        """As the snapshot shows it."""

    @property
    def since_s(self) -> float:
        """When it began to be as it is."""


class AuditView(Protocol):
    """The standing audit, as far as others than consoles ask it."""

    def state(self) -> AuditState:
        """As the snapshot shows it."""

    @property
    def violations(self) -> int:
        """Told since the incarnation began; must stay 0."""

    def why_condemned(self, component: str, page: int) -> str:
        """Why nobody gets this page."""


class NodeView(Protocol):
    """The parts of a node. Attributes, because each is of exactly that type."""

    settings: Settings
    started_s: float
    steps: int
    refused: int
    transport: str
    out: Outbox
    leases: LeaseTable
    owners: Owners
    admission: Admission
    tiers: Tiers
    peers: Peers
    ways: Ways
    decoder: Decoder
    prefiller: Prefiller
    pull_source: PullSource
    sessions: Sessions
    former_leases: FormerLeases
    engine_copies: EngineCopies
    retractor: Retractor
    fetcher: Fetcher
    drainer: Drainer
    epochs: Epochs
    pins: Pins
    announcer: BlockAnnouncer | None

    # These two rank above this room, so only what is read of them is known here.
    @property
    def recorded(self) -> RecorderView:
        """The flight recorder."""

    @property
    def audit(self) -> AuditView:
        """The standing audit."""
