"""What a handoff moves of a pool: its components that have bytes, each in pages of the receiver.

    kv, companions   [decode_prefix_len, prompt)   stream while the engine computes
    windows          [start of the tail, prompt)   with the last chunk
    states           one page, for all tokens      with the last chunk

An Offer has one grant for each, in this order; where a source of several sends a share, the ranges
are those of its share, and of length 0 for what it does not send. A **unit** is a page of the
decode side; where the prefill side's is larger, each of its pages is several units, cut by tokens
(``split``). Units are numbered from the start of the prompt, so both sides name the same one by the
same number.

Where a node has shards, each grant goes along **lanes**, one to each shard of the decode side. A
**leg** is one grant along one lane: it has posts, a seal and sums of its own. Both sides work out
the same legs in the same order, grant by grant and shard by shard.

What must not live here: whether an Offer is accepted (``offer``), when something is posted
(``posts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from kvd.core.components.windows import WindowPages
from kvd.core.layout.seal import Seal, seal_of
from kvd.core.layout.shards import ShardRoute, Straight
from kvd.core.layout.spec import (
    Buffer,
    Component,
    PerRequest,
    Tail,
    Whole,
    companion_factor,
    companion_pages,
    has_bytes,
    heads_of,
    page_bytes,
    shard_region,
)
from kvd.types import ID_BYTES, NO_PAGES, Pages
from kvd.wire.peer import Grant, Integrity, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease import Lease
    from kvd.core.handoff.sources import TokenSpan
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.wire.peer import Offer, Share


def parts_of(split: tuple[int, ...], place: int = 0) -> int:
    """How many of a peer's pages one of ours is; an empty split means that all are equal."""
    return split[place] if split else 1


class PayloadRoute(msgspec.Struct, frozen=True):
    """One grant of an Offer along one lane; ``grant`` is its place among the grants."""

    grant: int
    lane: ShardRoute


def legs_of(offer: Offer, lanes: tuple[ShardRoute, ...]) -> tuple[PayloadRoute, ...]:
    """The legs of what an Offer grants, along the lanes between the two nodes."""
    return tuple(
        [PayloadRoute(grant, lane) for grant in range(len(offer.grants)) for lane in lanes]
    )


class PayloadPart:
    """One component that travels. ``place`` is its place among those that peers compare."""

    __slots__ = ("component", "factor", "page_bytes", "place", "streams")

    def __init__(self, component: Component, factor: int, place: int) -> None:
        self.component = component
        self.factor = factor
        """Of its pages to one of the first component, where it is in lockstep with it."""
        self.page_bytes = page_bytes(component)
        """Of one of our shards."""
        self.place = place
        self.streams = isinstance(component.extent, Whole)
        """Whether it is posted as it is computed; otherwise with the last chunk."""

    def lane_bytes(self, lane: ShardRoute) -> int:
        """Bytes that go along a lane for each page, wherever the two shards are of another size."""
        making = lane.copies[0]
        if isinstance(making, Straight):
            return self.page_bytes
        cells = self.component.layers * heads_of(self.component.layout)
        return self.page_bytes // cells * making.window.cells

    def units(self, grant: Grant, unit_tokens: int) -> tuple[int, int]:
        """The units ``[first, end)`` that a grant of it covers; none where its range is empty."""
        if grant.start_tokens == grant.end_tokens:
            first = grant.start_tokens // unit_tokens
            return first, first
        if isinstance(self.component.extent, PerRequest):
            return 0, 1
        return grant.start_tokens // unit_tokens, -(-grant.end_tokens // unit_tokens)


class Payload:
    """The components of one pool that travel, in the order of the grants."""

    def __init__(self, spec: PoolSpec, table: LeaseTable) -> None:
        compared = [one for one in spec.components if not isinstance(one.extent, Buffer)]
        self.freights = tuple(
            PayloadPart(one, companion_factor(spec, one), place)
            for place, one in enumerate(compared)
            if has_bytes(one)
        )
        self.has_kv = bool(self.freights) and self.freights[0].place == 0
        """Whether pages of tokens travel at all; not where only states have bytes."""
        self.is_streamed = all(one.streams for one in self.freights)
        """Whether nothing goes with the last chunk: no windows, no states."""
        self.has_state = any(isinstance(one.extent, PerRequest) for one in compared)
        self._table = table

    def unit_tokens(self, freight: PayloadPart, split: tuple[int, ...]) -> int:
        """Tokens of one unit towards a peer with that split of our pages."""
        return freight.component.page_size // parts_of(split, freight.place)

    # ---- the decode side ---------------------------------------------------------------------

    def grants(
        self, lease: Lease, prompt_tokens: int, share: Share, span: TokenSpan
    ) -> tuple[Grant, ...]:
        """The pages of a lease that one source's share of the prompt lands on: ``span`` of it."""
        grants = []
        for one in self.carried(share):
            if one.streams:
                grant = self._streamed(one, lease, span)
            elif share.is_authoritative:
                grant = self._last(one, lease, prompt_tokens)
            else:
                grant = Grant(
                    component=one.component.name,
                    start_tokens=prompt_tokens,
                    end_tokens=prompt_tokens,
                    pages=NO_PAGES,
                )
            grants.append(grant)
        return tuple(grants)

    def _streamed(self, freight: PayloadPart, lease: Lease, span: TokenSpan) -> Grant:
        """Of what is posted as it is computed; a span begins with a page of the first component."""
        size, table = freight.component.page_size, self._table
        own = Pages(
            lease.page_table[
                span.start // table.page_size * ID_BYTES : table.pages_for(span.end) * ID_BYTES
            ]
        )
        n_pages = -(-span.end // size) - span.start // size
        pages = Pages(companion_pages(own, freight.factor)[: n_pages * ID_BYTES])
        return Grant(
            component=freight.component.name,
            start_tokens=span.start,
            end_tokens=span.end,
            pages=pages,
        )

    def _last(self, freight: PayloadPart, lease: Lease, prompt_tokens: int) -> Grant:
        """Of what goes with the last chunk."""
        component, table = freight.component, self._table
        size = component.page_size
        match component.extent:
            case Tail():
                keeper = table.components.named(component.name)
                assert isinstance(keeper, WindowPages)
                start = keeper.start_tokens(lease)
                last = -(-prompt_tokens // size)
                row = keeper.page_table(lease)
                pages = Pages(row[start // size * ID_BYTES : last * ID_BYTES])
            case PerRequest():
                start, pages = 0, self._own(component, lease)
            case Whole() | Buffer():
                raise AssertionError(component.name)
            case _:
                assert_never(component.extent)
        return Grant(
            component=component.name, start_tokens=start, end_tokens=prompt_tokens, pages=pages
        )

    def _own(self, component: Component, lease: Lease) -> Pages:
        keeper = self._table.components.named(component.name)
        return NO_PAGES if keeper is None else keeper.own_pages(lease)

    def granted_bytes(
        self, grants: tuple[Grant, ...], legs: tuple[PayloadRoute, ...], split: tuple[int, ...] = ()
    ) -> int:
        """Bytes that land on the granted pages, in all shards of the decode side."""
        total = 0
        for leg in legs:
            freight, grant = self.freights[leg.grant], grants[leg.grant]
            parts = parts_of(split, freight.place)
            total += len(grant.pages) // ID_BYTES * (freight.lane_bytes(leg.lane) // parts)
        return total

    # ---- both sides --------------------------------------------------------------------------

    def carried(self, share: Share) -> tuple[PayloadPart, ...]:
        """What an Offer of that share has grants for."""
        return () if share.role is Role.DUMMY else self.freights

    def seals(
        self, offer: Offer, legs: tuple[PayloadRoute, ...], split: tuple[int, ...] = ()
    ) -> tuple[Seal, ...]:
        """One per leg; none where nothing is summed."""
        if offer.integrity is Integrity.OFF:
            return ()
        seals = []
        for leg in legs:
            freight, grant = self.freights[leg.grant], offer.grants[leg.grant]
            units = freight.units(grant, self.unit_tokens(freight, split))
            region = shard_region(grant.component, leg.lane.peer_shard)
            seals.append(seal_of(offer, region, units))
        return tuple(seals)

    def windows(self) -> Iterator[tuple[int, WindowPages]]:
        """The keeper of each windowed component, with the number of its grant."""
        for index, freight in enumerate(self.freights):
            keeper = self._table.components.named(freight.component.name)
            if isinstance(keeper, WindowPages):
                yield index, keeper

    # ---- the prefill side --------------------------------------------------------------------

    def source(
        self, freight: PayloadPart, lease: Lease, units: tuple[int, int], parts: int
    ) -> Pages:
        """Our pages behind the units ``[first, end)``; for several parts, the ids of parts.

        Part ``s`` of page ``p`` has the id ``p * parts + s``.
        """
        first, end = units
        component = freight.component
        match component.extent:
            case Whole():
                return self._parts(lease, first, end, (freight.factor, parts))
            case Tail():
                keeper = self._table.components.named(component.name)
                row = NO_PAGES if keeper is None else keeper.page_table(lease)
                return Pages(row[first * ID_BYTES : end * ID_BYTES])
            case PerRequest():
                return self._own(component, lease)
            case Buffer():
                raise AssertionError(component.name)
            case _:
                assert_never(component.extent)

    def _parts(self, lease: Lease, first: int, end: int, cut: tuple[int, int]) -> Pages:
        """Of the row's pages, each ``factor`` pages of the component of ``parts`` parts."""
        factor, parts = cut
        each = factor * parts
        row_first = first // each
        row = Pages(lease.page_table[row_first * ID_BYTES : -(-end // each) * ID_BYTES])
        if each == 1:
            return row
        skip = first - row_first * each
        ids = companion_pages(companion_pages(row, factor), parts)
        return Pages(ids[skip * ID_BYTES : (skip + end - first) * ID_BYTES])
