"""The Offer: how the decode side writes one for each source, how the prefill side checks it.

An Offer says which pages of the decode side the KV of a prompt is to land on, and which prompt that
is. Nothing was moved before it, and nothing is moved that it does not name: so every way in which
two nodes could silently mean different things is compared here first, and is refused with a
sentence and the numbers.

Who sends what of a prompt is ``sources``; which pages that is, ``payload``; what fits into a
message, ``message_sizes``.

What must not live here: transitions, and what becomes of the parts (``receive``, ``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash
from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import SEPARATOR, epoch_in, name_in
from kvd.core.components.tail import tail_start
from kvd.core.handoff.message_sizes import is_surely_read, long_offer, long_settled
from kvd.core.handoff.payload import pieces_of
from kvd.core.handoff.payload_route import routes_of
from kvd.core.handoff.refusals import of_source
from kvd.core.handoff.sources import PrefillSource, TokenSpan, bad_share, is_whole, shares, span_of
from kvd.core.layout.spec import PerRequest, Tail, shards_of
from kvd.core.leases.admission import OWN_TRANSFER
from kvd.core.leases.epochs import other_epoch
from kvd.core.peers.peer import peer_drains
from kvd.errors import Code, Number, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, NULL_PAGE, count
from kvd.wire.bounds import MAX_SOURCES
from kvd.wire.peer import ALL, Offer

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceiveAttempt, SendingEngine, SendPart
    from kvd.core.handoff.payload import Payload, PayloadPart
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.types import Tokens
    from kvd.wire.peer import Grant, SourceShare

MARKS_PER_ID = 8
"""Up to this many bytes are marked for a page id of an Offer; beyond that its ids are sorted."""


def prompt_digest(tokens: Tokens, key: str) -> bytes:
    """128 bits over the namespace and the epoch that ``key`` means, and every token.

    Both daemons are trusted, so a fast hash is enough: it finds misalignment, not malice (xxh3
    takes 2 us for 32k tokens where sha256 takes 73).
    """
    # In epoch 0 the key is the name alone.
    head = f"{epoch_in(key)}\0{name_in(key)}\0" if SEPARATOR in key else f"0\0{key}\0"
    digest = xxhash.xxh3_128(head.encode())
    digest.update(tokens)
    return digest.digest()


# ---- the decode side -------------------------------------------------------------------------


@mypyc_attr(allow_interpreted_subclasses=True)
class OfferWriter:
    """The decode side: which sources can serve a receive, and an Offer for each of them."""

    def __init__(self, settings: Settings, payload: Payload, peers: Peers, out: Outbox) -> None:
        self._settings = settings
        self._shards = shards_of(settings.spec)
        self._payload = payload
        self._peers = peers
        self._out = out

    def unfit_sources(self, sources: tuple[str, ...], n_tokens: int) -> Refusal | None:
        """Why a prompt of so many tokens cannot come from these sources, each once."""
        if not 1 <= len(sources) <= MAX_SOURCES:
            return self._wrong(f"receive from {len(sources)} sources, of 1 to {MAX_SOURCES}")
        for source in sources:
            # Which part each of several sends is worked out by names, and this one has none yet.
            if len(sources) > 1 and self._peers.find(source) is None and "://" in source:
                return self._wrong(
                    f"receive from {', '.join(sources)}: {source} is no address of peers.connect, "
                    "and such a one is received from alone"
                )
            refusal = self._unfit_source(source, n_tokens)
            if refusal is not None:
                return refusal
        # Each was found above, so every name is a known one.
        peers = self._peers
        names = [peers.find(source) or source for source in sources]
        # By their node names: two addresses of one node would write the same pages twice.
        for name in names if len(names) > 1 else ():
            if names.count(name) > 1:
                return self._wrong(
                    f"receive from {', '.join(sources)}: {name} is named {names.count(name)} "
                    "times, and each source sends its part once"
                )
        # Who has not said Hello may fit or not: the receive waits for that, and ``blocked`` asks
        # again.
        for name in names:
            if name not in peers.by_name:
                return None
        found = self.shares_of(names)
        return found if isinstance(found, Refusal) else None

    def _unfit_source(self, source: str, n_tokens: int) -> Refusal | None:
        peers, side = self._peers, self._settings.name
        name = peers.find(source)
        if name is None:
            return peers.dial_address(source)
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

    def blocked(self, attempt: ReceiveAttempt) -> str | None:
        """What it waits for apart from memory: a source, or sources that have all of it."""
        for part in attempt.parts:
            why = self._peers.not_ready(part.peer)
            if why is not None:
                return why
        found = self.shares_of([part.peer for part in attempt.parts])
        return found.message if isinstance(found, Refusal) else None

    def awaits(self, attempt: ReceiveAttempt) -> tuple[str, ...]:
        """The same as names: of the source, of all of them, of our own transfer process."""
        peers, names = self._peers, [part.peer for part in attempt.parts]
        for name in names:
            if peers.not_ready(name) is not None:
                return (name,) if peers.generation else (name, OWN_TRANSFER)
        return tuple(names) if isinstance(self.shares_of(names), Refusal) else ()

    def shares_of(self, names: list[str]) -> tuple[SourceShare, ...] | Refusal:
        """What each of these peers, all of which have said Hello, sends of a prompt."""
        by_name = self._peers.by_name
        # The case of nearly every receive, without a look at layers and heads.
        if len(names) == 1 and is_whole(by_name[names[0]].incoming, len(self._shards)):
            return (ALL,)
        # A peer with other page sizes names no shards, and is only accepted where neither side has
        # any; then what it has is what we have.
        sources = [PrefillSource(name, by_name[name].shards or self._shards) for name in names]
        found = shares(self._shards, tuple(sources))
        if isinstance(found, Refusal):
            return msgspec.structs.replace(found, side=self._settings.name)
        return found

    def unsendable(self, attempt: ReceiveAttempt) -> Refusal | None:
        """Why a message that a part needs would be too long for who is to read it."""
        mine = self._settings
        for part in attempt.parts:
            offer, peer = part.unanswered, self._peers.by_name[part.peer]
            assert isinstance(offer, Offer)
            n_shards, least = len(peer.incoming), min(mine.max_frame_bytes, peer.max_frame_bytes)
            # One multiplication for nearly all receives; the exact sums below walk every grant.
            if is_surely_read(offer, n_shards + 1, mine.max_aux_bytes, least):
                continue
            refusal = long_offer(offer, peer, mine.name)
            refusal = refusal or long_settled(offer, n_shards, mine, mine.name)
            if refusal is not None:
                return of_source(part, refusal)
        return None

    def write_offers(self, attempt: ReceiveAttempt, lease: LeaseRecord) -> None:
        """Give each part its share and its Offer; their handoff ids are there already."""
        shared = self.shares_of([part.peer for part in attempt.parts])
        # ``blocked`` asked the same in this step, and admission takes nobody who is blocked.
        assert not isinstance(shared, Refusal)
        mine, now_s = self._settings, self._out.at_s
        # What a request id names was summed up when it was asked for.
        named = attempt.request
        digest = prompt_digest(lease.tokens, lease.namespace) if named is None else named.digest
        for part, share in zip(attempt.parts, shared, strict=True):
            part.share = share
            span = span_of(
                share,
                attempt.prefix_tokens,
                attempt.prompt_tokens,
                mine.spec.components[0].page_size,
            )
            grants = self._payload.grants(lease, attempt.prompt_tokens, share, span)
            # Kept, as it is what is repeated, and what its answer and its sums are checked against.
            part.unanswered = offer = Offer(
                source=mine.incarnation,
                target=part.incarnation,
                handoff=part.handoff,
                room=attempt.room,
                generation=self._peers.generation,
                prompt_tokens=attempt.prompt_tokens,
                decode_prefix_len=attempt.prefix_tokens,
                digest=digest,
                grants=grants,
                # What is left of it, because two hosts have two clocks.
                deadline_s=attempt.deadline_s - now_s,
                integrity=mine.integrity,
                waited_s=now_s - attempt.since_s,
                share=share,
                epoch=epoch_in(lease.namespace),
                is_open=attempt.is_open,
                as_it_comes=attempt.as_it_comes,
            )
            part.routes = routes_of(offer, self._peers.by_name[part.peer].incoming)
            part.total_bytes = self._payload.granted_bytes(grants, part.routes)
            part.seals = self._payload.seals(offer, part.routes)


# ---- the prefill side ------------------------------------------------------------------------


def bad_offer(
    offer: Offer, payload: Payload, split: tuple[int, ...], page_size: int, side: str
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
    # Before the grants: their ranges are worked out from share and prefix.
    refusal = bad_share(offer.share, side) or _bad_prefix(prompt, prefix, page_size, side)
    if refusal is not None:
        return refusal
    carried = payload.carried(offer.share)
    wanted = [payload_part.component.name for payload_part in carried]
    granted = [grant.component for grant in offer.grants]
    # By name and in order: routes, posts and sums go by a grant's place among them.
    if granted != wanted:
        return Refusal(
            Code.BAD_PAGES,
            f"pages of {_listed(granted)}, this pool sends {_listed(wanted)}",
            side=side,
        )
    span = span_of(offer.share, prefix, prompt, page_size)
    for payload_part, grant in zip(carried, offer.grants, strict=True):
        unit = payload.unit_tokens(payload_part, split)
        # What is posted as it is computed has one range, which is that of nearly every grant.
        is_right = (
            payload_part.streams
            and grant.start_tokens == span.start
            and grant.end_tokens == span.end
        )
        refusal = None if is_right else _bad_range(offer, payload_part, grant, span, side)
        refusal = refusal or _bad_pages(payload_part, grant, unit, side)
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


def _ranges(offer: Offer, payload_part: PayloadPart, span: TokenSpan) -> set[TokenSpan]:
    """The token ranges that both sides work out for what is sent of one component."""
    prompt, component = offer.prompt_tokens, payload_part.component
    if not payload_part.streams and not offer.share.is_authoritative:
        return {TokenSpan(prompt, prompt)}
    match component.extent:
        case Tail(window):
            size = component.page_size
            # Both are right: whether its prompt will be cached is the decode side's own affair, and
            # not in the Offer.
            starts = {tail_start(prompt, window, size, cached=cached) for cached in (True, False)}
            return {TokenSpan(start, prompt) for start in starts}
        case PerRequest():
            return {TokenSpan(0, prompt)}
        case _:
            return {span}


def _bad_range(
    offer: Offer, payload_part: PayloadPart, grant: Grant, span: TokenSpan, side: str
) -> Refusal | None:
    ranges = _ranges(offer, payload_part, span)
    if (grant.start_tokens, grant.end_tokens) in ranges:
        return None
    should = " or ".join(f"[{start}, {end})" for start, end in sorted(ranges))
    return Refusal(
        Code.BAD_PAGES,
        f"pages of {grant.component} for tokens [{grant.start_tokens}, {grant.end_tokens}), "
        f"what is sent of it is {should}",
        side=side,
    )


def _bad_pages(payload_part: PayloadPart, grant: Grant, unit: int, side: str) -> Refusal | None:
    units = payload_part.units(grant, unit)
    first, end = units.first, units.end
    # Before the ids are read: a million of them for a short prompt would cost what they like.
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
    # Two units on one page would overwrite each other without a trace.
    ids = np.frombuffer(grant.pages, dtype="<i4")
    if int(ids.min()) <= NULL_PAGE or not _are_distinct(ids):
        return Refusal(
            Code.BAD_PAGES,
            f"destination pages of {grant.component} must be distinct and above the null page",
            side=side,
        )
    return None


def _are_distinct(ids: npt.NDArray[np.int32]) -> bool:
    """Of ids above zero. For a million of a pool: 3 ms, up to 10 if the pool has 8 million."""
    top = int(ids.max())
    if top < MARKS_PER_ID * len(ids):
        marks = np.zeros(top + 1, dtype=np.bool_)
        marks[ids] = True
        return int(np.count_nonzero(marks)) == len(ids)
    # Few ids of a huge pool. A sort of a million takes 3 to 35 ms, as the processor's instructions
    # are; np.unique takes two hundred times the 3 (numpy 2.4).
    ordered = np.sort(ids)
    return not bool((ordered[1:] == ordered[:-1]).any())


def slid_past(offer: Offer, engine: SendingEngine, payload: Payload, side: str) -> Refusal | None:
    """Why the prefill engine has no longer all that the decode side is to get."""
    if payload.is_streamed or not offer.share.is_authoritative:
        return None
    for index, windows in payload.windows():
        start = offer.grants[index].start_tokens
        floor, _ = windows.mapped_tokens(engine.lease)
        # The pages in front have been given back, or turned to tokens further on: what would be
        # sent is not the KV of these.
        if floor > start:
            return Refusal(
                Code.BAD_PAGES,
                f"window pages of {windows.component.name} are wanted from token {start} on, lease "
                f"{engine.lease.id} has slid and has them from {floor} on: open the send first, "
                "then slide",
                side=side,
                numbers={"wanted_tokens": start, "mapped_tokens": floor},
            )
    return None


def not_reached(engine: SendingEngine, payload: Payload, side: str) -> Refusal | None:
    """Why what the engine has is not that of the whole prompt and of nothing else.

    Some of it has no window page yet, or a state stands for tokens behind it.
    """
    for _, windows in () if payload.is_streamed else payload.windows():
        _, top = windows.mapped_tokens(engine.lease)
        if top < engine.prompt_tokens:
            return Refusal(
                Code.BAD_REQUEST,
                f"finish of a prompt of {engine.prompt_tokens} tokens, lease {engine.lease.id} has "
                f"pages of {windows.component.name} up to {top}: slide it along as it is computed",
                side=side,
                numbers={"prompt_tokens": engine.prompt_tokens, "mapped_tokens": top},
            )
    written = engine.lease.written_tokens
    # A state cannot be wound back: one that has seen a token more is the state of another prompt.
    if written > engine.prompt_tokens and payload.has_state:
        return Refusal(
            Code.BAD_REQUEST,
            f"finish of a prompt of {engine.prompt_tokens} tokens, the state of lease "
            f"{engine.lease.id} stands for {written}: finish before more is computed",
            side=side,
            numbers={"prompt_tokens": engine.prompt_tokens, "written_tokens": written},
        )
    return None


def disagreement(
    offer: Offer, peer: str, engine: SendingEngine, payload: Payload, side: str
) -> Refusal | None:
    """How the two sides' prompts differ; None when they are the same, and there to be sent."""
    if offer.epoch != epoch_in(engine.namespace):
        return other_epoch(engine.namespace, peer, offer.epoch, side)
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
        return slid_past(offer, engine, payload, side)
    return Refusal(Code.PROMPT_MISMATCH, difference, side=side)


_REPEATED = {
    "room": Code.BAD_ROOM,
    "generation": Code.POST_FAILED,
    "prompt_tokens": Code.PROMPT_MISMATCH,
    "digest": Code.PROMPT_MISMATCH,
    "epoch": Code.PROMPT_MISMATCH,
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
    # Field by field and not as a whole: deadlines and waits differ with each repetition.
    changed = [field for field in _REPEATED if getattr(before, field) != getattr(offer, field)]
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


def outdated(offer: Offer, peer: Peer, side: str) -> Refusal | None:
    """Why the Offer is of a time that is over, or of a peer to which nothing is sent."""
    if offer.handoff < peer.offer_floor:
        return Refusal(
            Code.PEER_STALE, f"handoff {offer.handoff} is over on {peer.name}", side=side
        )
    if peer.refusal is not None:
        return peer.refusal
    # Its pages were registered with a transfer process that is gone: no agent reaches them, and a
    # post that nobody ends would keep the part from ever being settled.
    if offer.generation < peer.generation:
        return Refusal(
            Code.POST_FAILED,
            f"generation {offer.generation} of {peer.name} is over, {peer.generation} serves",
            side=side,
        )
    return None


def unacceptable(offer: Offer, peer: Peer, payload: Payload, mine: Settings) -> Refusal | None:
    """Why the Offer cannot be served here, whatever the engine has."""
    # Before anything of it is looked at: the cost of the checks below is bounded by the prompt.
    n_tokens, limit = offer.prompt_tokens, mine.max_prompt_tokens
    if n_tokens > limit:
        return Refusal(
            Code.TOO_LARGE,
            f"a prompt of {n_tokens} tokens, {mine.name} takes {limit} at most: raise its "
            "limits.max_prompt_tokens",
            side=mine.name,
            numbers={"tokens": n_tokens, "limit": limit},
        )
    # What the receiver has: its prefix ends on one of its own borders, which need not be one of
    # ours.
    page_size = mine.spec.components[0].page_size // pieces_of(peer.split)
    refusal = bad_offer(offer, payload, peer.split, page_size, mine.name)
    n_shards = len(peer.outgoing)
    if refusal is None and not is_surely_read(
        offer, n_shards, peer.max_aux_bytes, peer.max_frame_bytes
    ):
        refusal = long_settled(offer, n_shards, peer, mine.name)
    return refusal
