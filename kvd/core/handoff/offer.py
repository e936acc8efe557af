"""What an Offer must satisfy before a byte is sent: each silent misalignment becomes a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.components.tail import tail_start
from kvd.core.handoff.frames import long_settled
from kvd.core.handoff.payload import parts_of
from kvd.core.handoff.sources import TokenSpan, bad_share, span_of
from kvd.core.layout.spec import PerRequest, Tail
from kvd.errors import Code, Number, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, NULL_PAGE, count

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendingEngine, SendPart
    from kvd.core.handoff.payload import Payload, PayloadPart
    from kvd.core.handoff.rooms import Rooms
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.wire.peer import Grant, Offer


def bad_offer(
    offer: Offer, cargo: Payload, split: tuple[int, ...], page_size: int, side: str
) -> Refusal | None:
    """Why the Offer by itself cannot be served, with the numbers (scenarios B12, B13).

    ``page_size`` is the decode side's, ``split`` how many of its pages each of ours is.
    """
    prompt, prefix = offer.prompt_tokens, offer.decode_prefix_len
    if not 1 <= offer.room <= MAX_ROOM:
        return Refusal(
            Code.BAD_ROOM,
            f"room {offer.room} is not in 1..{MAX_ROOM}",
            side=side,
            numbers={"room": str(offer.room)},
        )
    refusal = bad_share(offer.share, side) or _bad_prefix(prompt, prefix, page_size, side)
    if refusal is not None:
        return refusal
    carried = cargo.carried(offer.share)
    wanted = [freight.component.name for freight in carried]
    granted = [grant.component for grant in offer.grants]
    if granted != wanted:
        return Refusal(
            Code.BAD_PAGES,
            f"pages of {_listed(granted)}, this pool sends {_listed(wanted)}",
            side=side,
        )
    span = span_of(offer.share, prefix, prompt, page_size)
    for freight, grant in zip(carried, offer.grants, strict=True):
        unit = cargo.unit_tokens(freight, split)
        ranges = _ranges(offer, freight, span)
        refusal = _bad_range(grant, ranges, side) or _bad_pages(freight, grant, unit, side)
        if refusal is not None:
            return refusal
    return None


def _bad_prefix(prompt: int, prefix: int, page_size: int, side: str) -> Refusal | None:
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
    return None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:8]) or "nothing"


def _ranges(offer: Offer, freight: PayloadPart, span: TokenSpan) -> set[TokenSpan]:
    """The token ranges that both sides work out for what is sent of one component."""
    prompt, component = offer.prompt_tokens, freight.component
    if not freight.streams and not offer.share.is_authoritative:
        return {TokenSpan(prompt, prompt)}
    match component.extent:
        case Tail(window):
            size = component.page_size
            starts = {tail_start(prompt, window, size, cached=cached) for cached in (True, False)}
            return {TokenSpan(start, prompt) for start in starts}
        case PerRequest():
            return {TokenSpan(0, prompt)}
        case _:
            return {span}


def _bad_range(grant: Grant, ranges: set[TokenSpan], side: str) -> Refusal | None:
    if (grant.start_tokens, grant.end_tokens) in ranges:
        return None
    should = " or ".join(f"[{start}, {end})" for start, end in sorted(ranges))
    return Refusal(
        Code.BAD_PAGES,
        f"pages of {grant.component} for tokens [{grant.start_tokens}, {grant.end_tokens}), "
        f"what is sent of it is {should}",
        side=side,
    )


def _bad_pages(freight: PayloadPart, grant: Grant, unit: int, side: str) -> Refusal | None:
    first, end = freight.units(grant, unit)
    if len(grant.pages) != (end - first) * ID_BYTES:
        return Refusal(
            Code.BAD_PAGES,
            f"{count(grant.pages)} destination pages of {grant.component} for "
            f"{grant.end_tokens - grant.start_tokens} tokens of page_size={unit}: {end - first} "
            "are needed",
            side=side,
            numbers={"pages": count(grant.pages), "needed_pages": end - first},
        )
    if not grant.pages:
        return None
    # A sort of a million takes 3 ms, and np.unique two hundred times that (numpy 2.4).
    ids = np.sort(np.frombuffer(grant.pages, dtype="<i4"))
    if int(ids[0]) <= NULL_PAGE or bool((ids[1:] == ids[:-1]).any()):
        return Refusal(
            Code.BAD_PAGES,
            f"destination pages of {grant.component} must be distinct and above the null page",
            side=side,
        )
    return None


def slid_past(offer: Offer, engine: SendingEngine, cargo: Payload, side: str) -> Refusal | None:
    """Why the prefill engine has no longer all that the decode side is to get."""
    if cargo.is_streamed or not offer.share.is_authoritative:
        return None
    for index, keeper in cargo.windows():
        start = offer.grants[index].start_tokens
        floor, _ = keeper.mapped_tokens(engine.lease)
        if floor > start:
            return Refusal(
                Code.BAD_PAGES,
                f"window pages of {keeper.component.name} are wanted from token {start} on, lease "
                f"{engine.lease.id} has slid and has them from {floor} on: open the send first, "
                "then slide",
                side=side,
                numbers={"wanted_tokens": start, "mapped_tokens": floor},
            )
    return None


def not_reached(engine: SendingEngine, cargo: Payload, side: str) -> Refusal | None:
    """Why what the engine has is not that of the whole prompt and of nothing else.

    Some of it has no window page yet, or a state stands for tokens behind it.
    """
    for _, keeper in () if cargo.is_streamed else cargo.windows():
        _, top = keeper.mapped_tokens(engine.lease)
        if top < engine.prompt_tokens:
            return Refusal(
                Code.BAD_REQUEST,
                f"finish of a prompt of {engine.prompt_tokens} tokens, lease {engine.lease.id} has "
                f"pages of {keeper.component.name} up to {top}: slide it along as it is computed",
                side=side,
                numbers={"prompt_tokens": engine.prompt_tokens, "mapped_tokens": top},
            )
    written = engine.lease.written_tokens
    if written > engine.prompt_tokens and cargo.has_state:
        return Refusal(
            Code.BAD_REQUEST,
            f"finish of a prompt of {engine.prompt_tokens} tokens, the state of lease "
            f"{engine.lease.id} stands for {written}: finish before more is computed",
            side=side,
            numbers={"prompt_tokens": engine.prompt_tokens, "written_tokens": written},
        )
    return None


def disagreement(offer: Offer, engine: SendingEngine, cargo: Payload, side: str) -> Refusal | None:
    """How the two sides' prompts differ; None when they are the same, and there to be sent."""
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
        return slid_past(offer, engine, cargo, side)
    return Refusal(Code.PROMPT_MISMATCH, difference, side=side)


_REPEATED = {
    "room": Code.BAD_ROOM,
    "generation": Code.POST_FAILED,
    "prompt_tokens": Code.PROMPT_MISMATCH,
    "digest": Code.PROMPT_MISMATCH,
    "decode_prefix_len": Code.BAD_PREFIX,
    "integrity": Code.BAD_REQUEST,
    "share": Code.BAD_REQUEST,
    "grants": Code.BAD_PAGES,
}
"""What an Offer is, and how it is refused where that has changed; its times are its own."""


def differs(known: SendPart, offer: Offer, side: str) -> Refusal | None:
    """How an Offer that comes again is another one than the one that was accepted.

    None for one that is over too: what is said of it is not about its pages.
    """
    before = known.offer
    if before is None:
        return None
    changed = [one for one in _REPEATED if getattr(before, one) != getattr(offer, one)]
    if not changed:
        return None
    field = changed[0]
    was, comes = getattr(before, field), getattr(offer, field)
    numbers: dict[str, Number] = {}
    what = f"another {field} than the one that was accepted"
    if isinstance(was, int):
        what = f"{field}={comes}, accepted was {was}"
        numbers = {"accepted": was, "repeated": comes}
    elif field == "grants":
        what = f"other destination pages ({_n_pages(offer)}, accepted were {_n_pages(before)})"
        numbers = {"accepted": _n_pages(before), "repeated": _n_pages(offer)}
    return Refusal(
        _REPEATED[field],
        f"handoff {offer.handoff} of {known.peer} is offered again with {what}",
        side=side,
        numbers=numbers,
    )


def _n_pages(offer: Offer) -> int:
    return sum(count(grant.pages) for grant in offer.grants)


def unacceptable(
    offer: Offer, peer: Peer, rooms: Rooms, cargo: Payload, mine: Settings
) -> Refusal | None:
    """Why the Offer cannot be served here and now, whatever the engine has."""
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
    page_size = mine.spec.components[0].page_size // parts_of(peer.split)
    return (
        rooms.refusal(offer.room, peer.name)
        # Before anything of it is looked at: what is left is bounded by the prompt.
        or (_long_prompt(offer, mine) if offer.prompt_tokens > mine.max_prompt_tokens else None)
        or bad_offer(offer, cargo, peer.split, page_size, side)
        or long_settled(offer, len(peer.outgoing), peer, side)
    )


def _long_prompt(offer: Offer, mine: Settings) -> Refusal:
    n_tokens, limit = offer.prompt_tokens, mine.max_prompt_tokens
    return Refusal(
        Code.TOO_LARGE,
        f"a prompt of {n_tokens} tokens, {mine.name} takes {limit} at most: raise its "
        "limits.max_prompt_tokens",
        side=mine.name,
        numbers={"tokens": n_tokens, "limit": limit},
    )
