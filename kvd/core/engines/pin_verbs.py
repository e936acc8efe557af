"""What an engine asks of pins: a prefix is kept, softly, when what a tier has of it is in the pool.

A pin keeps what is cached in the pool. After a restart that may be nothing, while a disk or a store
has all of it: so whoever pins waits for that as a lease does, takes no page meanwhile, and stands
in front of nobody.

What must not live here: when a pin ends (``leases.pins``), where else it is kept (``tiers.pins``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import PIN, Claim
from kvd.core.engines.verbs import Verbs
from kvd.core.leases.admission import MemoryAsker, Waiter
from kvd.core.tiers.words import NOW, bad_word
from kvd.errors import Refusal
from kvd.wire import client
from kvd.wire.pins import PinPrefix, PrefixPinned, UnpinPrefix

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.node_parts import NodeParts
    from kvd.types import Tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class PinAsker(MemoryAsker):
    """An engine whose prompt is pinned when a tier has been waited for."""

    __slots__ = ("_message", "_session", "_tokens", "_verbs")

    def __init__(self, verbs: PinVerbs, session: int, message: PinPrefix, tokens: Tokens) -> None:
        self._verbs = verbs
        self._session = session
        self._message = message
        self._tokens = tokens

    def admitted(self, lease: LeaseRecord) -> None:
        """Nothing of it can go before it is pinned."""
        self._verbs.pin_now(self._session, self._message, self._tokens)
        self._verbs.let_go(lease)

    def refused(self, refusal: Refusal) -> None:
        """Answer with the reason."""
        self._verbs.refuse(self._session, self._message, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class PinVerbs(Verbs):
    """Pins of engines."""

    def __init__(self, node: NodeParts) -> None:
        super().__init__(node)
        self._pins = node.pins
        self._admission = node.admission
        self._promotions = node.tiers.promotions
        self._max_deadline_s = node.settings.max_deadline_s

    def pin(self, session: int, message: PinPrefix, tokens: Tokens) -> Refusal | None:
        """Keep what is cached of a prompt, and what a tier has of it."""
        refusal = bad_word(message.tiers, self._name) or self._pins.flaw(message.ttl_s)
        if refusal is not None:
            return refusal
        claim = Claim(
            session=session,
            call=message.call,
            reason="a pin",
            room=0,
            namespace=message.namespace,
            tokens=tokens,
            reserve_tokens=0,
            priority=0,
            cache=True,
            holder=PIN,
            only_cached=True,
        )
        deadline_s = self._out.at_s + self._max_deadline_s
        waited = None
        if message.tiers != NOW:
            waited = self._promotions.wait_for(claim, deadline_s)
        if waited is None:
            self.pin_now(session, message, tokens)
        else:
            asker = PinAsker(self, session, message, tokens)
            self._admission.enter(Waiter(claim, deadline_s, asker, waited))
        return None

    def pin_now(self, session: int, message: PinPrefix, tokens: Tokens) -> None:
        """What is in the pool is pinned; the engine is told."""
        owner = message.owner or self._sessions.by_id[session].name
        pin = self._pins.pin(session, owner, message.namespace, tokens, message.ttl_s)
        if isinstance(pin, Refusal):
            self.refuse(session, message, pin)
            return
        answer = PrefixPinned(call=message.call, pin=pin.id, tokens=pin.tokens)
        self._out.answer(session, answer)

    def let_go(self, lease: LeaseRecord) -> None:
        """What kept the prefix until it was pinned."""
        self._leases.holders.release(lease, PIN, "pinned")

    def refuse(self, session: int, message: PinPrefix, refusal: Refusal) -> None:
        """Nothing is pinned."""
        self._out.answer(session, client.Failed(message.call, refusal))

    def unpin(self, session: int, message: UnpinPrefix, _: Tokens) -> Refusal | None:
        """A pin of the session is over."""
        refusal = self._pins.unpin(message.pin, session)
        if refusal is None:
            self._out.answer(session, client.Done(message.call))
        return refusal
