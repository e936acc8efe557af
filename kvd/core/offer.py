"""What an Offer must satisfy before a byte is sent: each silent misalignment becomes a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.tables import Prefill
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, NULL_PAGE, count

if TYPE_CHECKING:
    from kvd.core.parts import Engine, PrefillPart
    from kvd.core.peer import Peer
    from kvd.core.settings import Settings
    from kvd.core.spec import Component
    from kvd.wire.peer import Offer


def bad_offer(offer: Offer, component: Component, side: str) -> Refusal | None:
    """Why the Offer by itself cannot be served, with the numbers (scenarios B12, B13)."""
    prompt, prefix, page_size = offer.prompt_tokens, offer.decode_prefix_len, component.page_size
    if not 1 <= offer.room <= MAX_ROOM:
        return Refusal(
            Code.BAD_ROOM,
            f"room {offer.room} is not in 1..{MAX_ROOM}",
            side=side,
            numbers={"room": str(offer.room)},
        )
    if prompt < 1 or not 0 <= prefix <= prompt:
        return Refusal(
            Code.BAD_PREFIX,
            f"decode_prefix_len={prefix} of a prompt of {prompt} tokens",
            side=side,
            numbers={"decode_prefix_len": prefix, "prompt_tokens": prompt},
        )
    if prefix % page_size:
        return Refusal(
            Code.BAD_PREFIX,
            f"decode_prefix_len={prefix} is not a multiple of page_size={page_size}; "
            f"nearest valid is {prefix // page_size * page_size}",
            side=side,
            numbers={"decode_prefix_len": prefix, "page_size": page_size},
        )
    if len(offer.grants) != 1:
        return Refusal(
            Code.BAD_PAGES, f"{len(offer.grants)} grants for a pool of one component", side=side
        )
    return _bad_grant(offer, component, side)


def _bad_grant(offer: Offer, component: Component, side: str) -> Refusal | None:
    grant, page_size = offer.grants[0], component.page_size
    if grant.component != component.name:
        return Refusal(
            Code.BAD_PAGES,
            f"pages of component {grant.component!r}, this pool has {component.name!r}",
            side=side,
        )
    wanted = (offer.decode_prefix_len, offer.prompt_tokens)
    if (grant.start_tokens, grant.end_tokens) != wanted:
        return Refusal(
            Code.BAD_PAGES,
            f"pages for tokens [{grant.start_tokens}, {grant.end_tokens}), "
            f"the delta is [{wanted[0]}, {wanted[1]})",
            side=side,
        )
    needed = -(-(wanted[1] - wanted[0]) // page_size)
    if len(grant.pages) != needed * ID_BYTES:
        return Refusal(
            Code.BAD_PAGES,
            f"{count(grant.pages)} destination pages for {wanted[1] - wanted[0]} tokens of "
            f"page_size={page_size}: {needed} are needed",
            side=side,
            numbers={"pages": count(grant.pages), "needed_pages": needed},
        )
    ids = np.frombuffer(grant.pages, dtype="<i4")
    if ids.size and (int(ids.min()) <= NULL_PAGE or np.unique(ids).size != ids.size):
        return Refusal(
            Code.BAD_PAGES, "destination pages must be distinct and above the null page", side=side
        )
    return None


def disagreement(offer: Offer, engine: Engine, side: str) -> Refusal | None:
    """How the two sides' prompts differ; None when they are the same."""
    if offer.prompt_tokens != engine.prompt_tokens:
        difference = (
            f"the decode side has a prompt of {offer.prompt_tokens} tokens, "
            f"the prefill engine one of {engine.prompt_tokens}"
        )
    elif offer.digest != engine.digest:
        difference = (
            f"both prompts have {offer.prompt_tokens} tokens, but the digests differ "
            f"({offer.digest.hex()[:8]} and {engine.digest.hex()[:8]}): the tokens or the "
            "namespaces are not the same"
        )
    else:
        return None
    return Refusal(Code.PROMPT_MISMATCH, difference, side=side)


def unacceptable(
    offer: Offer, peer: Peer, other: PrefillPart | None, mine: Settings
) -> Refusal | None:
    """Why the Offer cannot be served here and now; ``other`` is the part that has its room."""
    side = mine.name
    if offer.handoff < peer.offer_floor:
        return Refusal(
            Code.PEER_STALE, f"handoff {offer.handoff} is over on {peer.name}", side=side
        )
    if peer.refusal is not None:
        return peer.refusal
    if offer.generation < peer.generation:
        return Refusal(
            Code.POST_FAILED,
            f"generation {offer.generation} of {peer.name} is over, {peer.generation} serves",
            side=side,
        )
    if other is not None and other.state is not Prefill.AWAIT_OFFER:
        return Refusal(
            Code.DUPLICATE_ROOM,
            f"room {offer.room} is already open here ({other.state.value}, "
            f"handoff {other.handoff} of {other.peer})",
            side=side,
        )
    refusal = bad_offer(offer, mine.spec.components[0], side)
    if refusal is None and other is not None and other.engine is not None:
        refusal = disagreement(offer, other.engine, side)
    return refusal
