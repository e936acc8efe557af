"""Which part of a model's KV lies where: arithmetic of layers, heads and pages, and nothing else.

A **shard** is what one rank keeps: some layers of the model, and of each some heads::

    tensor parallel, 4 heads on 2 ranks    rank 0: heads 0 1     rank 1: heads 2 3
    the same on 8 ranks                    ranks 0 1: head 0     ranks 2 3: head 1 ...   (replicas)
    pipeline, 32 layers in 2 stages        stage 0: layers 0..16     stage 1: layers 16..32

All shards of one node have the same page ids: page 7 of a lease is page 7 of each of them. Sharding
cuts a page across layers and heads; a **share** cuts the pages of a prompt among replicas, so that
each of them sends a part.

A **lane** is what goes to one shard of a peer: the window of its pages that this node fills, and
the pieces of our shards that fill it. Both sides work out the same lanes from both sides' shards.

Invariant: the pieces of each copy of a lane tile its window; the lanes of a node, one per shard of
the peer at most, never overlap.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SHARDS = 128
"""Of one node: their descriptors travel in one message, which holds 253; and a peer that told of
more would cost time at its Hello."""

MAX_PAIRS = 2048
"""Shards of one node times those of another: 32 and 64, or 16 and 128. Each pair may be a piece,
and one is made in a microsecond or two."""

SHOWN = 4
"""Of the shards that a sentence names."""


class Shard(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Layers ``[first_layer, end_layer)`` and heads ``[first_head, end_head)`` of the model."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def cells(self) -> int:
        """Heads of all its layers; 0 or less: it is empty."""
        layers, heads = self.end_layer - self.first_layer, self.end_head - self.first_head
        return layers * heads if layers > 0 and heads > 0 else 0


class PageWindow(msgspec.Struct, frozen=True, array_like=True):
    """A part of each page of one shard, in that shard's own numbers, which begin at 0."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def cells(self) -> int:
        """Heads of all its layers."""
        return (self.end_layer - self.first_layer) * (self.end_head - self.first_head)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """``ours`` of the pages of our ``shard`` goes over ``theirs`` of the peer's pages."""

    shard: int
    ours: PageWindow
    theirs: PageWindow


class Straight(msgspec.Struct, frozen=True, tag="straight"):
    """Whole pages of our ``shard`` are whole pages of the peer's."""

    shard: int = 0


class Pieced(msgspec.Struct, frozen=True, tag="pieced"):
    """``window`` of each of the peer's pages is made of pieces of ours, which tile it."""

    window: PageWindow
    pieces: tuple[Piece, ...]


ShardCopy = Straight | Pieced
"""How a page of a peer's shard is made of pages of ours."""


class ShardRoute(msgspec.Struct, frozen=True):
    """What this node sends to one shard of a peer.

    ``window``: which part of each of the peer's pages it fills; None is all of it. ``copies`` are
    equal ways to make it, one for each replica that we have.
    """

    peer_shard: int
    window: PageWindow | None
    copies: tuple[ShardCopy, ...]


def tp_shards(
    heads: int, tp_size: int, ranks: tuple[int, int], layers: tuple[int, int]
) -> tuple[Shard, ...]:
    """The shards of tensor-parallel ranks ``[ranks[0], ranks[1])`` of ``tp_size``.

    With more ranks than heads each head is on ``tp_size // heads`` neighbouring ranks (integer
    division: rank r has head ``r // replicas``). A latent counts as one head, so every rank has it.

    Raises:
        ValueError: neither number divides the other.
    """
    if heads % tp_size and tp_size % heads:
        msg = f"{heads} heads on {tp_size} ranks: one number must divide the other"
        raise ValueError(msg)
    each, replicas = max(1, heads // tp_size), max(1, tp_size // heads)
    return tuple(
        Shard(*layers, rank // replicas * each, (rank // replicas + 1) * each)
        for rank in range(*ranks)
    )


def span(noun: str, first: int, end: int) -> str:
    """``layer 3``, or ``layers 0-15``: what lies in ``[first, end)``."""
    return f"{noun} {first}" if end - first == 1 else f"{noun}s {first}-{end - 1}"


def said(shard: Shard) -> str:
    """A shard in a sentence: ``layers 0-15 of heads 0-3``."""
    layers = span("layer", shard.first_layer, shard.end_layer)
    return f"{layers} of {span('head', shard.first_head, shard.end_head)}"


def flaw(shards: tuple[Shard, ...], layers: int, heads: int) -> str:
    """Why these cannot be the shards of a node, of a model so large; empty where they can."""
    first = shards[0]
    size = (first.end_layer - first.first_layer, first.end_head - first.first_head)
    for shard in shards:
        if (
            not shard.cells
            or _common(shard, Shard(first_layer=0, end_layer=layers, first_head=0, end_head=heads))
            != shard
        ):
            return f"a shard of {said(shard)}, of a model with {layers} layers of {heads} heads"
        if size != (shard.end_layer - shard.first_layer, shard.end_head - shard.first_head):
            return f"shards of different sizes, like {said(first)} and {said(shard)}"
    return ""


def lacking(wanted: tuple[Shard, ...], found: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """What of ``wanted`` none of ``found`` has, as rectangles that do not overlap.

    Each has neighbouring layers that lack the same heads. With nothing found, it is all of
    ``wanted`` in few words.
    """
    n_layers = max(shard.end_layer for shard in wanted)
    rows = groupby(range(n_layers), lambda layer: heads_on(wanted, layer) & ~heads_on(found, layer))
    return tuple(
        Shard(layers[0], layers[-1] + 1, *run)
        for heads, layers in ((heads, list(row)) for heads, row in rows)
        for run in _runs(heads)
    )


def _runs(heads: int) -> Iterator[tuple[int, int]]:
    """The bits that are set, as ``[first, end)`` of each run of them."""
    end = 0
    while rest := heads >> end:
        first = end + (rest & -rest).bit_length() - 1
        past = ~(heads >> first)
        end = first + (past & -past).bit_length() - 1
        yield first, end


def heads_on(shards: tuple[Shard, ...], layer: int) -> int:
    """A bit for each head of the layer that one of the shards has."""
    found = 0
    for shard in shards:
        if shard.first_layer <= layer < shard.end_layer:
            found |= (1 << shard.end_head) - (1 << shard.first_head)
    return found


def listed(shards: tuple[Shard, ...]) -> str:
    """Shards in a sentence, the first few kinds of them."""
    kinds = [said(shard) for shard in dict.fromkeys(shards)]
    more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
    return ", ".join(kinds[:SHOWN]) + more


def lanes(ours: tuple[Shard, ...], theirs: tuple[Shard, ...]) -> tuple[ShardRoute, ...]:
    """What a node with ``ours`` can send to one with ``theirs``, a lane for each shard it can.

    Raises:
        ValueError: what we have of one of their shards is no rectangle of layers and heads.
    """
    replicas: dict[Shard, list[int]] = {}
    for at, shard in enumerate(ours):
        replicas.setdefault(shard, []).append(at)
    kinds = dict(sorted(replicas.items()))
    return tuple(
        lane
        for index, their in enumerate(theirs)
        if (lane := _lane(index, their, kinds)) is not None
    )


def _lane(index: int, their: Shard, replicas: dict[Shard, list[int]]) -> ShardRoute | None:
    """``replicas``: the places of each of our shards, in the order of the shards."""
    found = [
        (kind, _common(kind, their))
        for kind in replicas
        # Asked first, for most have nothing in common, and to work out what they have costs more.
        if kind.first_layer < their.end_layer
        and their.first_layer < kind.end_layer
        and kind.first_head < their.end_head
        and their.first_head < kind.end_head
    ]
    if not found:
        return None
    union = Shard(
        first_layer=min([both.first_layer for _, both in found]),
        end_layer=max([both.end_layer for _, both in found]),
        first_head=min([both.first_head for _, both in found]),
        end_head=max([both.end_head for _, both in found]),
    )
    if union.cells != sum([both.cells for _, both in found]):
        ours = listed(tuple(replicas))
        msg = f"what {ours} have of {said(their)} is no rectangle of layers and heads"
        raise ValueError(msg)
    n_copies = min([len(replicas[kind]) for kind, _ in found])
    if found[0][0] == their:
        window = None
        copies: list[ShardCopy] = [Straight(number) for number in replicas[their][:n_copies]]
        return ShardRoute(index, window, tuple(copies))
    filled = _within(union, their)
    # Of all copies alike: which part of a page it is does not depend on whose page.
    parts = [(replicas[kind], _within(both, kind), _within(both, their)) for kind, both in found]
    copies = [
        Pieced(filled, tuple([Piece(at[copy], ours, theirs) for at, ours, theirs in parts]))
        for copy in range(n_copies)
    ]
    return ShardRoute(index, None if union == their else filled, tuple(copies))


def _common(one: Shard, other: Shard) -> Shard:
    return Shard(
        first_layer=max(one.first_layer, other.first_layer),
        end_layer=min(one.end_layer, other.end_layer),
        first_head=max(one.first_head, other.first_head),
        end_head=min(one.end_head, other.end_head),
    )


def _within(part: Shard, whole: Shard) -> PageWindow:
    """A part of a shard in the shard's own numbers."""
    return PageWindow(
        first_layer=part.first_layer - whole.first_layer,
        end_layer=part.end_layer - whole.first_layer,
        first_head=part.first_head - whole.first_head,
        end_head=part.end_head - whole.first_head,
    )


def page_share(first: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """The pages of ``[first, end)`` that are ``rank``'s among ``ranks``: neighbours, evenly cut.

    The first ranks have one more where it does not come out even; with fewer pages than ranks the
    last ranks have none::

        7 pages, 4 ranks    0 1 | 2 3 | 4 5 | 6
        3 pages, 4 ranks    0 | 1 | 2 | -
    """
    each, more = divmod(end - first, ranks)
    start = first + rank * each + min(rank, more)
    return start, start + each + (rank < more)
