"""What a receive waits for, apart from its writer: room in the pool, and its device buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.handoff.parts import ReceiveAttempt
    from kvd.core.handoff.receive import Decoder
    from kvd.core.leases.fetch import Fetch
    from kvd.errors import Refusal
    from kvd.types import Pages


class ReceiveAsker:
    """A receive in the queue: it waits for memory, and for its sources."""

    __slots__ = ("_call", "_decoder", "_reception")

    def __init__(self, decoder: Decoder, reception: ReceiveAttempt, call: int) -> None:
        self._decoder = decoder
        self._reception = reception
        self._call = call

    def admitted(self, lease: Lease) -> None:
        """QUEUED -> OFFERED."""
        self._decoder.admitted(self._reception, lease, self._call)

    def refused(self, refusal: Refusal) -> None:
        """QUEUED -> CLOSED."""
        self._decoder.not_admitted(self._reception, refusal, self._call)

    def blocked(self) -> str | None:
        """A source of it, unless the Offers can go out."""
        return self._decoder.offering.blocked(self._reception)

    def awaits(self) -> tuple[str, ...]:
        """The names of the same."""
        return self._decoder.offering.awaits(self._reception)


class PreloadAsker:
    """A verified receive whose prompt is copied to its buffer before its engine hears of it."""

    __slots__ = ("_decoder", "_reception")

    def __init__(self, decoder: Decoder, reception: ReceiveAttempt) -> None:
        self._decoder = decoder
        self._reception = reception

    def fetched(self, fetch: Fetch, pages: Pages) -> None:
        """VERIFYING -> READY."""
        self._decoder.preloaded(self._reception, None)

    def refused(self, refusal: Refusal) -> None:
        """VERIFYING -> READY and released: the engine asked for more than can be had."""
        self._decoder.preloaded(self._reception, refusal)
