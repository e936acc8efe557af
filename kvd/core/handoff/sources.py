"""Which source of a receive sends what: from their shards and ours, a share for each of them.

Sources that have the same of what we keep are **ranks** of one class (context parallel, or replicas
of a latent): the pages of the delta are cut among them. Classes have different layers or heads
(pipeline stages, tensor-parallel ranks on several nodes), and together all that we keep, nothing
twice::

    prefill-0  layers  0..16     rank 0 of 2: pages 0 1
    prefill-1  layers  0..16     rank 1 of 2: page 2
    prefill-2  layers 16..32     rank 0 of 1: pages 0 1 2, and the aux

A source that has nothing that we keep is a dummy: nothing is asked of it but to conclude.

Invariants: the ranges of a class tile ``[decode_prefix_len, prompt)``; one source is authoritative.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.core.layout.shards import Shard, ShardRoute, heads_on, lacking, listed, page_share
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.client import SentShare
from kvd.wire.peer import Role, SourceShare

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.handoff.parts import SendPart


class PrefillSource(msgspec.Struct, frozen=True):
    """One source of a receive, and what it has of the model."""

    name: str
    shards: tuple[Shard, ...]


class TokenSpan(NamedTuple):
    """Tokens ``[start, end)`` of a prompt."""

    start: int
    end: int


Area = tuple[int, ...]
"""By layer of the model, a bit for each head."""


def is_whole(shard_routes: tuple[ShardRoute, ...], n_shards: int) -> bool:
    """Whether these routes fill every page of each of so many shards."""
    if len(shard_routes) != n_shards:
        return False
    # No generator: it is asked several times a handoff.
    for shard_route in shard_routes:  # noqa: SIM110
        if shard_route.window is not None:
            return False
    return True


@lru_cache(maxsize=1024)
def shares(
    ours: tuple[Shard, ...], sources: tuple[PrefillSource, ...]
) -> tuple[SourceShare, ...] | Refusal:
    """What each source sends of what we keep, in their order; or what is missing, or there twice.

    A refusal has no side: the caller is it.
    """
    n_layers = max(shard.end_layer for shard in (*ours, *_all_shards(sources)))
    wanted = _area(ours, n_layers)
    kept = [_both(_area(source.shards, n_layers), wanted) for source in sources]
    classes: dict[Area, list[int]] = {}
    # Where only states have bytes nobody has pages, and none is a dummy for that.
    writers = [index for index, area in enumerate(kept) if any(area) or not any(wanted)]
    for index, area in enumerate(kept):
        if index in writers:
            classes.setdefault(area, []).append(index)
    refusal = _missing(ours, sources) or _doubled(classes, sources)
    if refusal is not None:
        return refusal
    # The one with the last layers: it computes the last token, and so has the aux. Of equal ones
    # the first.
    chief = max(writers, key=lambda index: (_end_layer(sources[index]), -index))
    found = []
    for index, area in enumerate(kept):
        if index not in writers:
            share = SourceShare(index, len(sources), role=Role.DUMMY, is_authoritative=False)
        else:
            ranks = classes[area]
            share = SourceShare(
                part=index,
                parts=len(sources),
                rank=ranks.index(index),
                ranks=len(ranks),
                is_authoritative=index == chief,
            )
        found.append(share)
    return tuple(found)


def span_of(
    share: SourceShare, prefix_tokens: int, prompt_tokens: int, page_tokens: int
) -> TokenSpan:
    """The tokens whose KV a source sends, in whole pages but for the prompt's last one.

    With more ranks than pages the last ones have none: their range has length 0, as a dummy's has.
    """
    if share.role is Role.DUMMY:
        return TokenSpan(prefix_tokens, prefix_tokens)
    if share.ranks == 1:
        return TokenSpan(prefix_tokens, prompt_tokens)
    first, last = prefix_tokens // page_tokens, -(-prompt_tokens // page_tokens)
    start, end = page_share(first, last, share.rank, share.ranks)
    # At the prefix and not where its turn would be: both sides must name the same empty range.
    if start == end:
        return TokenSpan(prefix_tokens, prefix_tokens)
    return TokenSpan(start * page_tokens, min(end * page_tokens, prompt_tokens))


def bad_share(share: SourceShare, side: str) -> Refusal | None:
    """Why a share that a peer names is none."""
    what = ""
    if share.part >= share.parts:
        what = f"it is source {share.part} of {share.parts}, counted from 0"
    elif share.rank >= share.ranks or share.ranks > share.parts:
        what = f"it is rank {share.rank} of {share.ranks} among {share.parts} sources"
    elif share.role is Role.DUMMY and share.is_authoritative:
        what = "who sends nothing cannot be the one that sends the aux"
    elif share.parts == 1 and not share.is_authoritative:
        what = "the only source sends the aux"
    if not what:
        return None
    return Refusal(Code.BAD_REQUEST, f"a share that is none: {what}", side=side)


def share_words(share: SourceShare, span: TokenSpan, page_tokens: int) -> str:
    """Which part of a handoff this is: ``part 2 of 3, pages 4..8``; empty for the only one."""
    if share.parts == 1:
        return ""
    what = f"pages {span.start // page_tokens}..{-(-span.end // page_tokens)}"
    if share.role is Role.DUMMY:
        what = "nothing: it has no part of what is kept"
    elif span.start == span.end:
        what = "no pages: there are fewer than ranks"
    aux = ", aux" if share.is_authoritative else ""
    return f"part {share.part + 1} of {share.parts}, {what}{aux}"


def accepted(part: SendPart) -> client.Accepted:
    """What the engine of a source hears when both sides have met."""
    share = part.share
    return client.Accepted(
        part.id,
        part.decode_prefix_len,
        SentShare(
            rank=share.rank,
            ranks=share.ranks,
            start_tokens=part.start_tokens,
            end_tokens=part.end_tokens,
            is_dummy=share.role is Role.DUMMY,
            is_authoritative=share.is_authoritative,
        ),
    )


def _all_shards(sources: Iterable[PrefillSource]) -> Iterable[Shard]:
    return (shard for source in sources for shard in source.shards)


def _area(shards: tuple[Shard, ...], n_layers: int) -> Area:
    """What is on any of them."""
    return tuple(heads_on(shards, layer) for layer in range(n_layers))


def _both(one: Area, other: Area) -> Area:
    return tuple(mine & theirs for mine, theirs in zip(one, other, strict=True))


def _end_layer(source: PrefillSource) -> int:
    return max((shard.end_layer for shard in source.shards), default=0)


def _missing(ours: tuple[Shard, ...], sources: tuple[PrefillSource, ...]) -> Refusal | None:
    """Together they must have all that we keep."""
    missing = lacking(ours, tuple(_all_shards(sources)))
    if not missing:
        return None
    has = "; ".join([f"{source.name} has {_has(source)}" for source in sources])
    return Refusal(
        Code.LAYOUT_MISMATCH,
        f"{has}, which is not all that is kept here: {listed(missing)} must come from elsewhere "
        "too; name every source",
    )


def _doubled(classes: dict[Area, list[int]], sources: tuple[PrefillSource, ...]) -> Refusal | None:
    """They must have the same of what we keep, or nothing in common."""
    areas = list(classes)
    for index, area in enumerate(areas):
        for other in areas[index + 1 :]:
            if any(_both(area, other)):
                first, second = sources[classes[area][0]], sources[classes[other][0]]
                return Refusal(
                    Code.LAYOUT_MISMATCH,
                    f"{first.name} has {_has(first)}, {second.name} has "
                    f"{_has(second)}: sources have the same of what is kept here, or "
                    "nothing in common",
                )
    return None


def _has(source: PrefillSource) -> str:
    return listed(lacking(source.shards, ()))
