"""Plain records of what has left the tree: which prefix, for whom, and who missed it since.

Sessions are numbers here: their names are found when somebody asks.
"""

from __future__ import annotations

import msgspec


class QuotaReason(msgspec.Struct, frozen=True, gc=False):
    """Why something went out of its turn."""

    namespace: str
    """Of the quota."""
    limit_pages: int
    """Its ceiling, or its floor."""
    beyond_pages: int
    """Above 0: its ceiling, by so much. Below 0: so many pages of its floor went with it."""


class LeftPrefix(msgspec.Struct, frozen=True, gc=False):
    """One node that has left: the tokens from ``start_tokens`` to ``end_tokens`` of a prompt.

    ``digest`` is of its namespace, of where it begins, and of its first page of tokens; together
    with the node ``above`` it is of all tokens up to the end of that page (0: it began a prompt).
    """

    number: int
    """Of those that left, which."""
    digest: int
    node: int
    above: int
    writer: int
    """The session that brought it into the tree; 0: none did (``RadixNode.writer``)."""
    session: int
    """Of whoever needed its pages; 0: kvd itself."""
    namespace: bytes
    """As the tree has it, with its epoch."""
    start_tokens: int
    end_tokens: int
    n_pages: int
    hits: int
    need: str
    """What for: the reason of a lease, or ``operator`` or ``flush``."""
    tier: str
    """Where it lay when it left; empty: nowhere, it was dropped."""
    at_s: float
    touched_at: float
    quota: str = ""
    """For whose quota it went out of its turn, where ``beyond_pages`` is not 0; then as in
    ``QuotaReason``."""
    limit_pages: int = 0
    beyond_pages: int = 0


class MissedPrefix(msgspec.Struct, frozen=True, gc=False):
    """A request missed exactly what had left."""

    left: LeftPrefix
    session: int
    """Who missed it."""
    at_s: float


class EvictionRound(msgspec.Struct, frozen=True, gc=False):
    """How often a prefix was evicted and asked for again soon, without a longer rest between."""

    digest: int
    n: int
    node: int
    """That left last, so that one eviction counts once, however many ask."""
    missed_s: float


class Thrashing(msgspec.Struct, frozen=True, gc=False):
    """Prefixes are evicted for ``session``, asked for again by ``hurt``, and evicted again."""

    session: int
    hurt: int
    rounds: int
    """Of all their prefixes, since it began."""
    since_s: float
    last: MissedPrefix
