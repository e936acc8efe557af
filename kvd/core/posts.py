"""Posts of the prefill side: which pages of a part go out now, and which are still under way.

A page is posted once, when it is whole and lies beyond ``decode_prefix_len``; the last page goes
when the engine has finished, whole or not. Work is per call, not per page: one ``advance`` makes
at most one post, and the transfer process cuts it as the hardware likes.

    tokens   0 ... decode_prefix_len ... posted ... cursor ... prompt_tokens
             | the decode side has it | posted | written | not yet computed |

Invariant: decode_prefix_len <= posted <= prompt_tokens, and posted never shrinks (I5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects
from kvd.core.agents import Agent
from kvd.core.seal import UNSEALED, seal_of
from kvd.core.tables import Prefill
from kvd.types import ID_BYTES, Pages
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from kvd.core.lease_table import LeaseTable
    from kvd.core.parts import Engine, PrefillPart
    from kvd.core.peer import Peers
    from kvd.wire.peer import Offer


class Posts:
    """The posts that are under way, by id."""

    def __init__(self, leases: LeaseTable, peers: Peers, out: effects.Outbox) -> None:
        self.parts: dict[int, PrefillPart] = {}
        self.sent_bytes = 0
        self._moved: dict[int, int] = {}
        """Of each post under way, as last reported."""
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last = 0

    def push(self, part: PrefillPart) -> None:
        """Post what has become whole, if there is an agent to post through."""
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is None or peer.agent is not Agent.LOADED:
            return
        size = self._leases.page_size
        upto = part.prompt_tokens
        if part.state is Prefill.STREAMING:
            upto = part.cursor_tokens // size * size
        if upto > part.posted_tokens and part.engine is not None and part.offer is not None:
            self._post(part, part.engine, part.offer, upto)

    def _post(self, part: PrefillPart, engine: Engine, offer: Offer, upto: int) -> None:
        size = self._leases.page_size
        first, last = part.posted_tokens // size, -(-upto // size)
        base = part.decode_prefix_len // size
        grant = offer.grants[0]
        self._last += 1
        if not part.outstanding:
            part.flow.restart(self._out.at_s)
        part.outstanding.add(self._last)
        self.parts[self._last] = part
        self._leases.begin_read(engine.lease)
        is_open = offer.integrity is Integrity.OFF
        self._out.effects.append(
            effects.Post(
                self._last,
                part.incarnation,
                part.generation,
                grant.component,
                Pages(engine.lease.row[first * ID_BYTES : last * ID_BYTES]),
                Pages(grant.pages[(first - base) * ID_BYTES : (last - base) * ID_BYTES]),
                UNSEALED if is_open else seal_of(offer, size),
                0 if is_open else first,
            )
        )
        part.posted_tokens = upto
        part.posted_pages += last - first

    def moved(self, post: int, moved_bytes: int) -> PrefillPart | None:
        """A running post has moved so much."""
        part = self.parts.get(post)
        if part is not None:
            part.flow.moved_bytes += max(0, moved_bytes - self._moved.get(post, 0))
            self._moved[post] = moved_bytes
        return part

    def over(self, post: int, moved_bytes: int, sums: bytes = b"") -> PrefillPart | None:
        """The post can write no more: it is done, or its agent is destroyed."""
        part = self.moved(post, moved_bytes)
        if part is None:
            return None
        del self.parts[post], self._moved[post]
        part.outstanding.discard(post)
        part.moved_bytes += moved_bytes
        if sums:
            part.sums[post] = sums
        self.sent_bytes += moved_bytes
        if part.engine is not None:
            self._leases.end_read(part.engine.lease)
        return part

    def through(self, incarnation: str, generation: int) -> list[int]:
        """The posts that went through this agent."""
        return [
            post
            for post, part in self.parts.items()
            if part.incarnation == incarnation and part.generation == generation
        ]
