"""The parts of a node: what is made when it begins, each with what it reads of the others.

What lives here: which parts there are, and the order in which they are made. What must not: which
input goes to which of them (``node``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.audit.audit import StandingAudit
from kvd.core.audit.containment import one_list
from kvd.core.handoff.drain import Drainer
from kvd.core.handoff.kept import KeptRooms
from kvd.core.handoff.offered import OfferReader
from kvd.core.handoff.payload import Payload
from kvd.core.handoff.pull import Pulls
from kvd.core.handoff.pull_source import PullSource
from kvd.core.handoff.receive import Decoder
from kvd.core.handoff.receive_requests import ReceiveRequests
from kvd.core.handoff.send import Prefiller
from kvd.core.handoff.send_requests import SendRequests
from kvd.core.handoff.transfers import Transfers
from kvd.core.inspect.inquiries import Inquiries
from kvd.core.kv_events.announcer import announcer_of
from kvd.core.leases.admission import Admission
from kvd.core.leases.copies import Copies
from kvd.core.leases.engine_copies import EngineCopies
from kvd.core.leases.epochs import Epochs
from kvd.core.leases.fetch import Fetcher
from kvd.core.leases.flushes import Flushes
from kvd.core.leases.former_leases import FormerLeases
from kvd.core.leases.kept_answers import KeptAnswers
from kvd.core.leases.lease_table import LeaseTable
from kvd.core.leases.owners import Owners
from kvd.core.leases.pins import Pins
from kvd.core.leases.retraction import Retractor
from kvd.core.leases.session_table import SessionTable
from kvd.core.leases.sessions import HandoffSides, Sessions
from kvd.core.outbox import Outbox
from kvd.core.peers.registry import Peers
from kvd.core.peers.ways import Ways
from kvd.core.recorded import RecorderFacts
from kvd.core.tiers.tiers import Tiers

if TYPE_CHECKING:
    from kvd.core.settings import Settings


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeParts:
    """Everything that one daemon knows, by the noun that keeps it."""

    def __init__(self, settings: Settings, at_s: float) -> None:
        self.settings = settings
        self.started_s = at_s
        self.steps = 0
        self.refused = 0
        self.transport = ""
        self.out = Outbox()
        self.out.at_s = at_s
        self.leases = LeaseTable(
            settings.spec,
            settings.policy,
            self.out,
            is_journaled=settings.is_journaled,
            quotas=settings.quotas,
        )
        # Each is made with what it reads, so their order is given, and nothing is set afterwards.
        out, leases = self.out, self.leases
        open_sessions = SessionTable(
            settings.name, settings.max_told_bytes, leases.commits.by_word, out
        )
        self.former_leases = FormerLeases(settings, leases, open_sessions, out)
        self.owners = Owners(settings.name, leases, open_sessions, self.former_leases, out)
        self.admission = Admission(settings, leases, self.owners, out)
        self.epochs = Epochs(settings.name)
        self.flushes = Flushes(settings.incarnation, settings.tiers)
        told = self.announcer = announcer_of(settings.kv_events, leases.tree, self.epochs, out)
        self.tiers = Tiers(settings, leases, self.admission, self.epochs, self.flushes, out, told)
        self.pins = Pins(settings.name, leases, open_sessions, self.tiers.pins, out)
        self.peers = Peers(settings, out)
        self.ways = Ways(out)
        self.copies = Copies(out)
        self.retractor = Retractor(
            settings, leases, self.owners, self.admission, self.peers, self.copies, out
        )
        self.fetcher = Fetcher(
            settings, leases, self.owners, self.retractor, self.peers, self.copies, out
        )
        self.engine_copies = EngineCopies(settings.name, settings.spec, leases, self.owners, out)
        self._make_handoffs(Payload(settings.spec, leases))
        self.transfers = Transfers(settings, self.prefiller, self.peers, self.ways, out)
        # Their types are named: who reads them may be compiled before this file is understood.
        self.sessions: Sessions = Sessions(
            owners=self.owners,
            leases=leases,
            admission=self.admission,
            retractor=self.retractor,
            fetcher=self.fetcher,
            copies=self.engine_copies,
            sides=HandoffSides(self.decoder, self.pulls, self.prefiller),
            out=out,
        )
        parts = (self.admission, self.sessions, self.peers, self.decoder, self.prefiller)
        self.drainer: Drainer = Drainer(settings, *parts, self.tiers, out)
        self.kept_answers = KeptAnswers(settings.name, self.epochs, self.flushes, out)
        self.inquiries = Inquiries(self)
        self.audit = StandingAudit(self)
        self.misgiven = one_list(self.leases)
        self.recorded = RecorderFacts(self.out)

    def _make_handoffs(self, payload: Payload) -> None:
        """Both sides of handoffs: what is open, then who asks for it."""
        settings, leases, peers, out = self.settings, self.leases, self.peers, self.out
        admission = self.admission
        fetcher, copies = self.fetcher, self.engine_copies
        self.decoder = Decoder(settings, payload, leases, admission, peers, fetcher, copies, out)
        self.receives = ReceiveRequests(
            settings, leases, admission, self.tiers.promotions, peers, self.decoder, out
        )
        self.pulls = Pulls(
            settings,
            leases,
            admission,
            self.tiers.promotions,
            peers,
            self.decoder,
            self.receives,
            out,
        )
        self.prefiller = Prefiller(settings, payload, leases, peers, out)
        self.kept_rooms = KeptRooms(settings, payload, leases, self.prefiller, out)
        self.sends = SendRequests(
            settings, payload, leases, peers, self.prefiller, self.kept_rooms, out
        )
        self.offers = OfferReader(settings, payload, peers, self.prefiller, self.kept_rooms, out)
        self.pull_source = PullSource(
            settings, leases, admission, self.tiers.promotions, self.prefiller, out
        )
