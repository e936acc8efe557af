"""What a receive waits for, apart from its writer: room in the pool, and its device buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.decode import Decoder
    from kvd.core.fetch import Fetch
    from kvd.core.lease import Lease
    from kvd.core.parts import DecodePart
    from kvd.errors import Refusal
    from kvd.types import Pages


class ReceiveAsker:
    """A part in the queue: it waits for memory, and for its peer."""

    __slots__ = ("_call", "_decoder", "_part")

    def __init__(self, decoder: Decoder, part: DecodePart, call: int) -> None:
        self._decoder = decoder
        self._part = part
        self._call = call

    def admitted(self, lease: Lease) -> None:
        """QUEUED -> OFFERED."""
        self._decoder.admitted(self._part, lease, self._call)

    def refused(self, refusal: Refusal) -> None:
        """QUEUED -> CLOSED."""
        self._decoder.not_admitted(self._part, refusal, self._call)

    def blocked(self) -> str | None:
        """Its peer, unless an Offer can go out."""
        return self._decoder.not_ready(self._part.peer)


class PreloadAsker:
    """A verified part whose prompt is copied to its device buffer before its engine hears of it."""

    __slots__ = ("_decoder", "_part")

    def __init__(self, decoder: Decoder, part: DecodePart) -> None:
        self._decoder = decoder
        self._part = part

    def fetched(self, fetch: Fetch, pages: Pages) -> None:
        """VERIFYING -> READY."""
        self._decoder.preloaded(self._part, None)

    def refused(self, refusal: Refusal) -> None:
        """VERIFYING -> READY and released: the engine asked for more than can be had."""
        self._decoder.preloaded(self._part, refusal)
