"""What an engine asks of the cache beside leases, on the wire: pins, and hints."""

from __future__ import annotations

import msgspec

from kvd.wire.bounds import Call, Figure, Name, Namespace


class PinPrefix(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Keep what is cached of the tokens frame, softly, for ``ttl_s``. Answer: ``PrefixPinned``.

    It ends with the session. ``owner``: as it is shown; empty: the name of the session. ``tiers``:
    whether what a tier has of it is waited for, as for a lease.
    """

    call: Call
    namespace: Namespace = ""
    ttl_s: float = 0.0
    owner: Name = ""
    tiers: Name = ""


class UnpinPrefix(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """That pin of the session is over. Answer: ``Done``."""

    call: Call
    pin: Figure


class PrefetchPrompt(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """The tokens frame will be asked for: read what a tier has of it. Answer: ``MatchReply``.

    The answer is of now, and does not wait: what it tells of a tier is on its way as far as there
    is room for it.
    """

    call: Call
    namespace: Namespace = ""


class PrefixPinned(msgspec.Struct, frozen=True, array_like=True, tag="pinned-prefix"):
    """The pin, and how many tokens of the prompt it keeps."""

    call: int
    pin: int
    tokens: int
