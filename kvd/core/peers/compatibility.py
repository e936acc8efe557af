"""Whether the pages of two nodes are the same, and in which direction they may be sent.

Equal layouts exchange both ways. Where only the page sizes differ, the larger pages can be sent to
the node with the smaller ones, if that takes them into host memory; never the other way round,
because nobody puts pages together.

Which shards of the model either node has is no difference: what goes from which to which are
*routes* (``ShardRoute``), worked out here once for each Hello. A node that has nothing, or not all,
of what the other keeps may still be one of several sources.

Only what lies token by token can be cut into smaller pages: opaque bytes, windows and states must
be equal on both sides. What can be cut between shards is decided by the interior of a page, which
must be equal too, and so must the tag that says who packs it::

    what differs       nhd           hnd           opaque
    heads of a shard   cut           cut           refused
    layers of a shard  cut           cut           refused
    tokens of a page   cut           refused       refused

Whether such a peer is accepted is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from kvd.core.layout.page_sizes import pages_in
from kvd.core.layout.shards import (
    MAX_PAIRS,
    MAX_SHARDS,
    Shard,
    ShardRoute,
    Straight,
    flaw,
    lanes,
    listed,
)
from kvd.core.layout.spec import (
    MAX_TAG_CHARS,
    Exchanged,
    Host,
    Interior,
    PageOrder,
    PoolSpec,
    Raw,
    Whole,
    exchanged,
    heads_of,
    layout_difference,
    read_shards,
    shards_of,
)
from kvd.core.peers.peer import Layout
from kvd.errors import Code, Number, Refusal

if TYPE_CHECKING:
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings


class PageSplit(msgspec.Struct, frozen=True):
    """How the pages of two nodes relate.

    ``parts`` is parallel to the components that both have, buffers left out: how many of the
    smaller page hold one of the larger; the larger is on the same side in all of them.
    """

    ours_tokens: int
    theirs_tokens: int
    parts: tuple[int, ...]


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a peer says of its pool, without its shards."""

    order: PageOrder
    components: tuple[Exchanged, ...]
    tag: str = ""


def read_fingerprint(theirs: str) -> Fingerprint | None:
    """What a peer says of its pool, its shards left out; None when that is no fingerprint."""
    try:
        return msgspec.json.decode(theirs, type=Fingerprint)
    except (msgspec.DecodeError, RecursionError):
        return None


def page_split(ours: PoolSpec, theirs: str) -> PageSplit | None:
    """How our pages relate to those of a peer's fingerprint when nothing but page sizes differs.

    None when anything else differs, or one size is no whole multiple of the other. Equal sizes are
    a split into 1 part.
    """
    read = read_fingerprint(theirs)
    if read is None:
        return None
    others, mine = read.components, exchanged(ours)
    if (read.order, read.tag) != (ours.order, ours.tag) or len(others) != len(mine):
        return None
    is_ours_larger = mine[0].page_size >= others[0].page_size
    parts: list[int] = []
    for own, other in zip(mine, others, strict=True):
        # Everything but the size must be equal: pages are cut by tokens, and by nothing else.
        if msgspec.structs.replace(other, page_size=own.page_size) != own:
            return None
        large, small = own.page_size, other.page_size
        if not is_ours_larger:
            large, small = small, large
        part = pages_in(large, small)
        # Opaque bytes, windows and states are one piece: no border of tokens is known within them.
        if part is None or (part > 1 and not _is_token_by_token(own)):
            return None
        parts.append(part)
    return PageSplit(mine[0].page_size, others[0].page_size, tuple(parts))


def _is_token_by_token(component: Exchanged) -> bool:
    is_cut = component.interior is Interior.NHD and not isinstance(component.layout, Raw)
    return is_cut and isinstance(component.extent, Whole)


WHOLE = (ShardRoute(0, None, (Straight(),)),)
"""Between two pools that have all of the model in one shard."""


class LayoutMatch(msgspec.Struct, frozen=True):
    """Why nothing is sent to a peer and taken from it, each None where something is.

    ``split``: how many of its pages each of ours is, for each component that peers compare.
    ``shards`` are the peer's; ``outgoing`` go to them from ours, ``incoming`` from them to ours.
    """

    sending: Refusal | None
    receiving: Refusal | None
    split: tuple[int, ...]
    difference: str
    shards: tuple[Shard, ...] = ()
    outgoing: tuple[ShardRoute, ...] = WHOLE
    incoming: tuple[ShardRoute, ...] = WHOLE


def read_layout(peer: Peer, text: str, mine: Settings) -> None:
    """What ``peer`` says of its pool, and what follows; once for each text, not for each Hello."""
    # The digest is kept and not the text, which may have 64 KiB for each of thousands of peers.
    digest = hashlib.sha256(text.encode()).digest()
    if peer.layout.digest == digest:
        return
    match = layout_match(mine.spec, text, mine.name, peer.name)
    peer.refusal, peer.source_refusal, peer.split = match.sending, match.receiving, match.split
    peer.shards, peer.outgoing, peer.incoming = match.shards, match.outgoing, match.incoming
    peer.layout = Layout(digest, match.difference)


def layout_match(ours: PoolSpec, theirs: str, here: str, there: str) -> LayoutMatch:
    """Compare our pool with the fingerprint that ``there`` has sent to ``here``."""
    difference = layout_difference(ours, theirs)
    theirs, shards = read_shards(theirs)
    if difference is None:
        return _between_shards(ours, shards, here, there)
    # Not both at once: routes between shards count on equal pages.
    is_cut = bool(shards) or ours.held is not None
    found = None if is_cut else page_split(ours, theirs)
    read = read_fingerprint(theirs)
    if found is None and (refusal := _packed_otherwise(ours, read, here, there)) is not None:
        return LayoutMatch(sending=refusal, receiving=refusal, split=(), difference=difference)
    bare = _without_kv(ours, read, here, there)
    why = (
        f"{here} and {there} lay out their pools differently: {difference}; configure [pool] "
        "alike on both"
        if bare is None
        else f'{bare} has no KV to exchange: cache.mode is "prefill-only" there; set cache.mode = '
        '"radix"'
    )
    if found is None:
        refusal = Refusal(Code.LAYOUT_MISMATCH, why, side=here)
        return LayoutMatch(sending=refusal, receiving=refusal, split=(), difference=difference)
    our_tokens, their_tokens = found.ours_tokens, found.theirs_tokens
    is_cut_here = isinstance(ours.components[0].tier, Host)
    if our_tokens >= their_tokens:
        why = (
            f"pages of {here} have {our_tokens} tokens, those of {there} only {their_tokens}: ours "
            "can be cut on the way there, theirs are not put together here; to receive from there "
            "too, make pool.page_size equal on both"
        )
    elif is_cut_here:
        why = (
            f"pages of {there} have {their_tokens} tokens, those of {here} {our_tokens}: theirs "
            "are cut on the way here, ours are not put together there; to send there too, make "
            "pool.page_size equal on both"
        )
    else:
        why = (
            f"pages of {there} have {their_tokens} tokens, those of {here} {our_tokens}: they are "
            "cut only where they land in host memory (family hisparse); make pool.page_size equal "
            "on both"
        )
    numbers: dict[str, Number] = {"ours": our_tokens, "theirs": their_tokens}
    refusal = Refusal(Code.LAYOUT_MISMATCH, why, side=here, numbers=numbers)
    can_send, can_receive = our_tokens >= their_tokens, our_tokens < their_tokens and is_cut_here
    return LayoutMatch(
        sending=None if can_send else refusal,
        receiving=None if can_receive else refusal,
        split=found.parts if can_send else (),
        difference=difference,
    )


def _between_shards(
    ours: PoolSpec, theirs: tuple[Shard, ...], here: str, there: str
) -> LayoutMatch:
    """What goes from which shard to which, between two pools of the same model."""
    first = exchanged(ours)[0]
    whole = Shard(
        first_layer=0, end_layer=first.layers, first_head=0, end_head=heads_of(first.layout)
    )
    if ours.held is None and not theirs:
        return LayoutMatch(sending=None, receiving=None, split=(), difference="", shards=(whole,))
    mine, theirs = shards_of(ours), theirs or (whole,)
    if len(theirs) > MAX_SHARDS:
        why = f"{len(theirs)} shards, of which {MAX_SHARDS} are read at most"
    elif len(mine) * len(theirs) > MAX_PAIRS:
        why = (
            f"{len(theirs)} shards, and {here} has {len(mine)}: at most {MAX_PAIRS} pairs of them "
            "are looked at"
        )
    else:
        why = flaw(theirs, first.layers, whole.end_head)
    if why:
        wrong = Refusal(
            Code.LAYOUT_MISMATCH,
            f"{there} tells {here} of {why}; run the same version of kvd on both",
            side=here,
        )
        return LayoutMatch(
            sending=wrong,
            receiving=wrong,
            split=(),
            difference=f"its shards: {why}",
            shards=(),
            outgoing=(),
            incoming=(),
        )
    sending, out = _routes(mine, theirs, here, there)
    receiving, incoming = _routes(theirs, mine, here, there)
    if first.interior is Interior.OPAQUE and any(map(_is_cut, (*out, *incoming))):
        sending = receiving = _uncut(mine, theirs, here, there)
        out = incoming = ()
    difference = ""
    if sending is not None and receiving is not None:
        difference = sending.message
    return LayoutMatch(
        sending=sending,
        receiving=receiving,
        split=(),
        difference=difference,
        shards=theirs,
        outgoing=out,
        incoming=incoming,
    )


def _routes(
    source: tuple[Shard, ...], target: tuple[Shard, ...], here: str, there: str
) -> tuple[Refusal | None, tuple[ShardRoute, ...]]:
    try:
        return None, lanes(source, target)
    except ValueError as exc:
        why = (
            f"the shards of {here} and {there} do not fit: {exc}; let each node hold "
            "neighbouring ranks of one stage (pool.tp_ranks, pool.stage)"
        )
        return Refusal(Code.LAYOUT_MISMATCH, why, side=here), ()


def _is_cut(route: ShardRoute) -> bool:
    """Whether it takes less than whole pages, or puts some together."""
    return not all(isinstance(copy, Straight) for copy in route.copies)


def _uncut(mine: tuple[Shard, ...], theirs: tuple[Shard, ...], here: str, there: str) -> Refusal:
    """Opaque pages travel whole, and these shards would need parts of them."""
    why = (
        f"pages of {here} and {there} are opaque, so none is cut on its way, and their shards "
        f"differ: {here} has {listed(mine)}, {there} has {listed(theirs)}; keep equal shards on "
        "both (pool.tp_size, pool.tp_ranks, pool.stage), or have both engines pack pages by token "
        'or by head, and say so (pool.interior = "nhd" or "hnd")'
    )
    return Refusal(Code.LAYOUT_MISMATCH, why, side=here)


def _packed_otherwise(
    ours: PoolSpec, read: Fingerprint | None, here: str, there: str
) -> Refusal | None:
    """Why, where the inside of a page is all that differs: its bytes are as many, and others."""
    mine = exchanged(ours)
    if read is None or read.order is not ours.order or len(read.components) != len(mine):
        return None
    differ = [
        (own.interior.value, other.interior.value)
        for own, other in zip(mine, read.components, strict=True)
        if own.interior is not other.interior
    ]
    for own, other in zip(mine, read.components, strict=True):
        if msgspec.structs.replace(other, interior=own.interior) != own:
            return None
    if differ:
        interior, other_interior = differ[0]
        why = (
            f"pages of {here} are {interior} inside, those of {there} {other_interior} "
            "(pool.interior): either engine would take the bytes of the other for other heads; "
            "have both engines pack pages alike, and say so on both nodes"
        )
        numbers: dict[str, Number] = {"ours": interior, "theirs": other_interior}
    elif read.tag == ours.tag:
        return None
    else:
        why = (
            f"pool.tag of {here} is {_tag(ours.tag)}, of {there} {_tag(read.tag)}: nobody knows "
            "whether equal bytes mean the same to both engines; run engines of one build on both, "
            "and give both nodes one pool.tag"
        )
        numbers = {"ours": ours.tag, "theirs": read.tag[:MAX_TAG_CHARS]}
    return Refusal(Code.LAYOUT_MISMATCH, why, side=here, numbers=numbers)


def _tag(tag: str) -> str:
    return repr(tag[:MAX_TAG_CHARS]) if tag else "not set"


def _without_kv(ours: PoolSpec, read: Fingerprint | None, here: str, there: str) -> str | None:
    """Which of the two nodes only counts its pages; None where neither does, or both do."""
    counts_there = read is not None and _only_counts(read.components)
    if counts_there == _only_counts(exchanged(ours)):
        return None
    return there if counts_there else here


def _only_counts(components: tuple[Exchanged, ...]) -> bool:
    return bool(components) and not any(component.layers for component in components)
