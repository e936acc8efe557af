"""Pins: cached prefixes that somebody wants to find again, the last to go and never in the way.

A pin is a lease of nobody's pages: it locks what is cached of a prompt, and **gives way**
(``giving_way``). So nothing of it is evicted or demoted while a request can have other pages. When
one cannot, pins go after all else that gives way, the oldest first, and their pages are cached as
all others are. A pin that a tier below the pool has all of goes on there; any other is over then.

A pin of an engine ends with its session, one of an operator does not. Each ends by its time, too,
and with a new epoch of its namespace. No pin outlives the daemon: pages of before a restart are
cached, and pinned by nobody.

What must not live here: what a prompt is (``engines``), who asks for it (``operators``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvd.core.cache.lease import PIN, Claim, Shortage
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.namespaces import base_of, told
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Tokens
from kvd.wire.cache_events import PinBegan, PinEnded, PinLeftPool

if TYPE_CHECKING:
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.session_table import SessionTable
    from kvd.core.outbox import Outbox

MOST_PINS: Final = 1024
MOST_TTL_S: Final = 30 * 86_400.0

MOST_ENDED: Final = 64
"""Pins that are over and of which it is known why."""


class PinsBelow(Protocol):
    """What keeps them below the pool (``tiers.pins``)."""

    def keep(self, pin: int, lease: LeaseRecord) -> None:
        """What that lease locks is pinned there too."""

    def end(self, pin: int) -> None:
        """It is over."""

    def tier_of(self, pin: int) -> str:
        """The tier that has all of it; empty if none has."""

    def is_lost(self, pin: int) -> bool:
        """Whether it is known that none has."""

    def words(self, pin: int) -> str:
        """What each tier has of it."""


class PinRecord(msgspec.Struct, frozen=True):
    """One pin: who wants it, what it locks, and until when."""

    id: int
    owner: str
    session: int
    """Its end is the pin's; 0: an operator's."""
    namespace: str
    tokens: int
    lease: LeaseRecord | None
    """None: its pages in the pool were needed, and it goes on in a tier."""
    since_s: float
    until_s: float


class EndedPin(msgspec.Struct, frozen=True):
    """Why and when one was over."""

    id: int
    owner: str
    tokens: int
    why: str
    at_s: float


class Pins:
    """The pins of a node, by number."""

    def __init__(
        self,
        name: str,
        leases: LeaseTable,
        sessions: SessionTable,
        below: PinsBelow,
        out: Outbox,
    ) -> None:
        self.by_id: dict[int, PinRecord] = {}
        self.ended: deque[EndedPin] = deque(maxlen=MOST_ENDED)
        """The last one at the end."""
        self.gave_way = 0
        """How many left the pool because their pages were needed."""
        self._below = below
        self._name = name
        self._leases = leases
        self._sessions = sessions
        self._out = out
        self._last = 0

    # ---- begin -------------------------------------------------------------------------------

    def pin(
        self, session: int, owner: str, namespace: str, tokens: Tokens, ttl_s: float
    ) -> PinRecord | Refusal:
        """Pin what is cached of a prompt for so long; a refusal where nothing is, or it cannot."""
        leases = self._leases
        refusal = self.flaw(ttl_s)
        if refusal is not None:
            return refusal
        cached_tokens = leases.tree.probe(tokens, namespace)
        if not cached_tokens:
            return self._refusal(
                Code.BAD_REQUEST,
                f"nothing is cached of this prompt in namespace {told(namespace)!r}: commit it "
                "first, a pin keeps what is there",
            )
        number = self._last + 1
        lease = leases.grants.open_lease(
            Claim(
                session=session,
                call=0,
                reason=f"pin {number} of {owner}",
                room=0,
                namespace=namespace,
                tokens=Tokens(tokens[: cached_tokens * ID_BYTES]),
                reserve_tokens=0,
                priority=0,
                cache=False,
                holder=PIN,
            )
        )
        if isinstance(lease, Shortage):
            return self._refusal(
                Code.NO_ROOM, "all that is cached of it is promised to leases: pin it later"
            )
        leases.giving_way.let_pin_give_way(lease)
        self._last = number
        now_s = self._out.at_s
        pin = PinRecord(
            id=number,
            owner=owner,
            session=session,
            namespace=namespace,
            tokens=cached_tokens,
            lease=lease,
            since_s=now_s,
            until_s=now_s + ttl_s,
        )
        self.by_id[number] = pin
        self._below.keep(number, lease)
        self._out.emit(
            PinBegan(pin=number, owner=owner, lease=lease.id, tokens=cached_tokens, ttl_s=ttl_s)
        )
        return pin

    def flaw(self, ttl_s: float) -> Refusal | None:
        """Why no pin can begin for so long."""
        if not 0 < ttl_s <= MOST_TTL_S:
            return self._refusal(
                Code.BAD_REQUEST, f"ttl_s is {ttl_s:g}: above 0, and at most {MOST_TTL_S:.0f}"
            )
        if len(self.by_id) >= MOST_PINS:
            return self._refusal(
                Code.NO_ROOM, f"there are {len(self.by_id)} pins, the most there may be: unpin one"
            )
        beside = [keeper.component.name for keeper in self._leases.components.each]
        if beside:
            return self._refusal(
                Code.NOT_SUPPORTED,
                f"this pool has {', '.join(beside)} beside {self._leases.pool.name}, which no pin "
                "keeps, and without them what is cached is not found",
            )
        return None

    # ---- end ---------------------------------------------------------------------------------

    def unpin(self, number: int, session: int | None = None) -> Refusal | None:
        """It is over; of ``session`` alone, if that is named."""
        pin = self.by_id.get(number)
        if pin is None or session not in {None, pin.session}:
            whose = "" if session is None else " of this session"
            return self._refusal(
                Code.BAD_REQUEST, f"there is no pin {number}{whose}: over, or never was"
            )
        self._end(pin, "unpinned")
        return None

    def tick(self) -> None:
        """Those end whose time is over, or whose engine is gone."""
        now_s, sessions = self._out.at_s, self._sessions.by_id
        for pin in list(self.by_id.values()):
            if pin.session and pin.session not in sessions:
                self._end(pin, "its engine is gone")
            elif pin.until_s <= now_s:
                self._end(pin, "its time is over")
            elif pin.lease is None and self._below.is_lost(pin.id):
                self._end(pin, "it left the pool, and then its tier")

    def epoch_over(self, base: str) -> None:
        """Of this base and its members nothing is ever found again."""
        for pin in self.of_base(base):
            self._end(pin, "its namespace has new weights")

    def of_base(self, base: str) -> list[PinRecord]:
        """The pins of a base and its members, in the pool or below it."""
        return [pin for pin in self.by_id.values() if base_of(pin.namespace) == base]

    def end_given_way(self, gone: list[LeaseRecord]) -> None:
        """Leases have gone because their pages were needed: some were pins."""
        for pin in [pin for pin in self.by_id.values() if pin.lease in gone]:
            self.gave_way += 1
            tier, why = self._below.tier_of(pin.id), "a request had no other pages"
            if not tier:
                self._over(pin, why)
                continue
            self.by_id[pin.id] = msgspec.structs.replace(pin, lease=None)
            self._out.emit(
                PinLeftPool(pin=pin.id, owner=pin.owner, tokens=pin.tokens, tier=tier, why=why)
            )

    def _end(self, pin: PinRecord, why: str) -> None:
        if pin.lease is not None:
            self._leases.holders.release(pin.lease, PIN, "unpinned")
        self._over(pin, why)

    def _over(self, pin: PinRecord, why: str) -> None:
        del self.by_id[pin.id]
        self._below.end(pin.id)
        tokens, now_s = pin.tokens, self._out.at_s
        self.ended.append(EndedPin(id=pin.id, owner=pin.owner, tokens=tokens, why=why, at_s=now_s))
        self._out.emit(
            PinEnded(pin=pin.id, owner=pin.owner, tokens=tokens, age_s=now_s - pin.since_s, why=why)
        )

    def tier_of(self, pin: PinRecord) -> str:
        """The tier below the pool that has all of it; empty if none has."""
        return self._below.tier_of(pin.id)

    # ---- asked about -------------------------------------------------------------------------

    def of_lease(self, lease: LeaseRecord) -> PinRecord | None:
        """The pin that this lease is."""
        return next((pin for pin in self.by_id.values() if pin.lease is lease), None)

    def words(self, lease: LeaseRecord) -> str:
        """What would end the lease of a pin."""
        pin = self.of_lease(lease)
        if pin is None:
            return "a pin that nobody knows"
        ends = "" if not pin.session else ", its engine to end"
        left_s = pin.until_s - self._out.at_s
        below = self._below.words(pin.id)
        return (
            f"its time to be over in {left_s:.1f} s, kvd unpin {pin.id}{ends}, or a request that "
            f"has no other pages: it gives way{'; ' if below else ''}{below}"
        )

    def _refusal(self, code: Code, why: str) -> Refusal:
        return Refusal(code, why, side=self._name)
