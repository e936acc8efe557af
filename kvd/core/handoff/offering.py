"""From the sources that an engine names to an Offer for each of them.

What must not live here: transitions, and what becomes of the parts (``decode``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.handoff.frames import is_short, long_offer, long_settled
from kvd.core.handoff.payload import legs_of
from kvd.core.handoff.prompt import prompt_digest
from kvd.core.handoff.refusals import of_source
from kvd.core.handoff.sources import PrefillSource, is_whole, shares, span_of
from kvd.core.layout.spec import shards_of
from kvd.core.leases.admission import OWN_TRANSFER
from kvd.core.peers.peer import peer_drains
from kvd.errors import Code, Refusal
from kvd.wire.bounds import MAX_SOURCES
from kvd.wire.peer import ALL, Offer

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.effects import Outbox
    from kvd.core.handoff.parts import ReceiveAttempt
    from kvd.core.handoff.payload import Payload
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.wire.peer import Share


class Offering:
    """Who sends what, and the Offers that say so."""

    def __init__(self, settings: Settings, cargo: Payload, peers: Peers, out: Outbox) -> None:
        self._settings = settings
        self._shards = shards_of(settings.spec)
        self._cargo = cargo
        self._peers = peers
        self._out = out

    def unfit(self, sources: tuple[str, ...], n_tokens: int) -> Refusal | None:
        """Why a prompt of so many tokens cannot come from these sources, each once."""
        if not 1 <= len(sources) <= MAX_SOURCES:
            return self._wrong(f"receive from {len(sources)} sources, of 1 to {MAX_SOURCES}")
        for source in sources:
            refusal = self._unfit(source, n_tokens)
            if refusal is not None:
                return refusal
        peers = self._peers
        names = [peers.find(source) or source for source in sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            return self._wrong(
                f"receive from {', '.join(sources)}: {twice} is named {names.count(twice)} times, "
                "and each source sends its part once"
            )
        if not all(name in peers.by_name for name in names):
            return None
        found = self.shares(names)
        return found if isinstance(found, Refusal) else None

    def _unfit(self, source: str, n_tokens: int) -> Refusal | None:
        peers, side = self._peers, self._settings.name
        name = peers.find(source)
        if name is None:
            known = ", ".join(peers.names()) or "none"
            return Refusal(
                Code.PEER_UNKNOWN,
                f"no peer is called {source!r} (known: {known}): add it to peers.connect",
                side=side,
            )
        peer = peers.by_name.get(name)
        if peer is None:
            return None
        if peer.max_prompt_tokens and n_tokens > peer.max_prompt_tokens:
            return Refusal(
                Code.TOO_LARGE,
                f"{n_tokens} tokens, {peer.name} takes prompts of {peer.max_prompt_tokens} at "
                "most: raise its limits.max_prompt_tokens",
                side=side,
                numbers={"tokens": n_tokens, "limit": peer.max_prompt_tokens},
            )
        return peer.source_refusal or peer_drains(peer, self._out.at_s, side)

    def _wrong(self, what: str) -> Refusal:
        return Refusal(Code.BAD_REQUEST, what, side=self._settings.name)

    def blocked(self, reception: ReceiveAttempt) -> str | None:
        """What it waits for apart from memory: a source, or sources that have all of it."""
        for part in reception.parts:
            why = self._peers.not_ready(part.peer)
            if why is not None:
                return why
        found = self.shares([part.peer for part in reception.parts])
        return found.message if isinstance(found, Refusal) else None

    def awaits(self, reception: ReceiveAttempt) -> tuple[str, ...]:
        """The same as names: of the source, of all of them, of our own transfer process."""
        peers, names = self._peers, [part.peer for part in reception.parts]
        for name in names:
            if peers.not_ready(name) is not None:
                return (name,) if peers.generation else (name, OWN_TRANSFER)
        return tuple(names) if isinstance(self.shares(names), Refusal) else ()

    def shares(self, names: list[str]) -> tuple[Share, ...] | Refusal:
        """What each of these peers, all of which have said Hello, sends of a prompt."""
        by_name = self._peers.by_name
        if len(names) == 1 and is_whole(by_name[names[0]].incoming, len(self._shards)):
            return (ALL,)
        # Of one with other page sizes no shards are known: neither side has any then.
        sources = [PrefillSource(name, by_name[name].shards or self._shards) for name in names]
        found = shares(self._shards, tuple(sources))
        if isinstance(found, Refusal):
            return msgspec.structs.replace(found, side=self._settings.name)
        return found

    def too_long(self, reception: ReceiveAttempt) -> Refusal | None:
        """Why a message that a part needs would be too long for who is to read it."""
        mine = self._settings
        for part in reception.parts:
            offer, peer = part.unanswered, self._peers.by_name[part.peer]
            assert isinstance(offer, Offer)
            n_shards, least = len(peer.incoming), min(mine.max_frame_bytes, peer.max_frame_bytes)
            if is_short(offer, n_shards + 1, mine.max_aux_bytes, least):
                continue
            refusal = long_offer(offer, peer, mine.name)
            refusal = refusal or long_settled(offer, n_shards, mine, mine.name)
            if refusal is not None:
                return of_source(part, refusal)
        return None

    def prepare(self, reception: ReceiveAttempt, lease: Lease) -> None:
        """Give each part its share and its Offer; their handoff ids are there already."""
        shared = self.shares([part.peer for part in reception.parts])
        assert not isinstance(shared, Refusal)  # or it had been blocked
        mine, now_s = self._settings, self._out.at_s
        digest = prompt_digest(lease.tokens, lease.namespace)
        for part, share in zip(reception.parts, shared, strict=True):
            part.share = share
            span = span_of(
                share,
                reception.prefix_tokens,
                reception.prompt_tokens,
                mine.spec.components[0].page_size,
            )
            grants = self._cargo.grants(lease, reception.prompt_tokens, share, span)
            part.unanswered = offer = Offer(
                source=mine.incarnation,
                target=part.incarnation,
                handoff=part.handoff,
                room=reception.room,
                generation=self._peers.generation,
                prompt_tokens=reception.prompt_tokens,
                decode_prefix_len=reception.prefix_tokens,
                digest=digest,
                grants=grants,
                deadline_s=reception.deadline_s - now_s,
                integrity=mine.integrity,
                waited_s=now_s - reception.since_s,
                share=share,
            )
            part.legs = legs_of(offer, self._peers.by_name[part.peer].incoming)
            part.total_bytes = self._cargo.granted_bytes(grants, part.legs)
            part.seals = self._cargo.seals(offer, part.legs)
