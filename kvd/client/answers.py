"""What a node answers to questions that are about no lease."""

from __future__ import annotations

import msgspec


class Matched(msgspec.Struct, frozen=True):
    """What a router asks of a node.

    ``tokens`` are cached, ``load`` handoffs are open or requests wait, ``free`` pages can be had.
    ``tier_tokens`` that follow lie in a tier below the pool: ``tier_ms`` to have them, 0: unknown.
    """

    tokens: int
    load: int
    free: int
    tier_tokens: int = 0
    tier_ms: float = 0.0


class FlushResult(msgspec.Struct, frozen=True):
    """Pages that a flush dropped, pages that it kept since they are locked, and who has those.

    ``kept`` is a sentence for each of the first locked nodes of the tree. ``epoch`` is that in
    which the namespace is now.
    """

    freed_pages: int
    kept_pages: int
    kept: tuple[str, ...]
    epoch: int = 0


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A pin: its number, and how many tokens of the prompt it keeps."""

    pin: int
    tokens: int
