"""What a handoff moves of a pool: its components that have bytes, each in pages of the receiver.

    kv, companions   [decode_prefix_len, prompt)   stream while the engine computes
    windows          [start of the tail, prompt)   with the last chunk
    states           one page, for all tokens      with the last chunk

An Offer has one grant for each, in this order; where a source of several sends a share, the ranges
are those of its share, and of length 0 for what it does not send. A **unit** is a page of the
decode side; where the prefill side's is larger, each of its pages is several units, cut by tokens
(``split``). Units are numbered from the start of the prompt, so both sides name the same one by the
same number.

Where a node has shards, each grant goes along one ``ShardRoute`` for each shard of the decode side.
A grant along one of them is a ``PayloadRoute``: it has posts, a seal and sums of its own. Both
sides work out the same routes in the same order, grant by grant and shard by shard.

What must not live here: whether an Offer is accepted (``offer``), when something is posted
(``posts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.components.windows import WindowPages
from kvd.core.layout.seal import Seal, seal_of
from kvd.core.layout.shards import ShardRoute, Straight
from kvd.core.layout.spec import (
    Buffer,
    Component,
    PerRequest,
    Whole,
    companion_factor,
    companion_pages,
    has_bytes,
    heads_of,
    page_bytes,
    shard_region,
)
from kvd.types import ID_BYTES, NO_PAGES, Pages, slice_pages
from kvd.wire.peer import Grant, Integrity, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.handoff.parts import SendingEngine
    from kvd.core.handoff.payload_route import PayloadRoute
    from kvd.core.handoff.sources import TokenSpan
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.wire.peer import Offer, SourceShare


NO_KEY = bytes(16)
"""Of the seal of no pages."""


def pieces_of(split: tuple[int, ...], place: int = 0) -> int:
    """Into how many of a peer's pages one of ours is cut; an empty split: all are equal."""
    return split[place] if split else 1


@mypyc_attr(allow_interpreted_subclasses=True)
class UnitRange:
    """Units ``[first, end)`` of one component, counted from the start of the prompt."""

    __slots__ = ("end", "first")

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end


@mypyc_attr(allow_interpreted_subclasses=True)
class PayloadPart:
    """One component that travels. ``place`` is its place among those that peers compare."""

    __slots__ = ("component", "factor", "kept", "page_bytes", "place", "streams")

    def __init__(
        self, component: Component, factor: int, place: int, kept: ComponentPages | None
    ) -> None:
        self.component = component
        self.factor = factor
        """Of its pages to one of the first component, where it is in lockstep with it."""
        self.kept = kept
        """Who has its pages; None where they are the first component's, or follow from those."""
        self.page_bytes = page_bytes(component)
        """Of one of our shards."""
        self.place = place
        self.streams = isinstance(component.extent, Whole)
        """Whether it is posted as it is computed; otherwise with the last chunk."""

    def bytes_per_page(self, shard_route: ShardRoute) -> int:
        """Bytes of each page that go along a route; less than a page where the shards differ."""
        first = shard_route.copies[0]
        # Pieces of a page differ in bytes by shard, whole pages do not.
        if isinstance(first, Straight):
            return self.page_bytes
        cells = self.component.layers * heads_of(self.component.layout)
        return self.page_bytes // cells * first.window.cells

    def units(self, grant: Grant, unit_tokens: int) -> UnitRange:
        """The units ``[first, end)`` that a grant of it covers; none where its range is empty."""
        # A source of several that does not send this component has a grant of length 0 for it.
        if grant.start_tokens == grant.end_tokens:
            first = grant.start_tokens // unit_tokens
            return UnitRange(first, first)
        if isinstance(self.component.extent, PerRequest):
            return UnitRange(0, 1)
        return UnitRange(grant.start_tokens // unit_tokens, -(-grant.end_tokens // unit_tokens))


@mypyc_attr(allow_interpreted_subclasses=True)
class Payload:
    """The components of one pool that travel, in the order of the grants."""

    def __init__(self, spec: PoolSpec, table: LeaseTable) -> None:
        # Buffers are a node's own: peers neither compare nor send them.
        # First without buffers, then without those that have no bytes: ``place`` counts what both
        # sides compare, also where nothing of it is sent.
        compared = [
            component for component in spec.components if not isinstance(component.extent, Buffer)
        ]
        self.parts = tuple(
            PayloadPart(
                component,
                companion_factor(spec, component),
                place,
                table.components.named(component.name),
            )
            for place, component in enumerate(compared)
            if has_bytes(component)
        )
        self.has_kv = bool(self.parts) and self.parts[0].place == 0
        """Whether pages of tokens travel at all; not where only states have bytes."""
        self.is_streamed = all(part.streams for part in self.parts)
        """Whether nothing goes with the last chunk: no windows, no states."""
        self.has_state = any(isinstance(component.extent, PerRequest) for component in compared)
        self._table = table

    def unit_tokens(self, payload_part: PayloadPart, split: tuple[int, ...]) -> int:
        """Tokens of one unit towards a peer with that split of our pages."""
        return payload_part.component.page_size // pieces_of(split, payload_part.place)

    # ---- the decode side ---------------------------------------------------------------------

    def grants(
        self, lease: LeaseRecord, prompt_tokens: int, share: SourceShare, span: TokenSpan
    ) -> tuple[Grant, ...]:
        """The pages of a lease that one source's share of the prompt lands on: ``span`` of it."""
        grants = []
        for part in self.carried(share):
            # Only the authoritative source has what belongs to the whole prompt: it goes once.
            if part.streams:
                grant = self._streamed(part, lease, span)
            elif share.is_authoritative:
                grant = self._last(part, lease, prompt_tokens)
            else:
                grant = Grant(
                    component=part.component.name,
                    start_tokens=prompt_tokens,
                    end_tokens=prompt_tokens,
                    pages=NO_PAGES,
                )
            grants.append(grant)
        return tuple(grants)

    def _streamed(self, payload_part: PayloadPart, lease: LeaseRecord, span: TokenSpan) -> Grant:
        """Of what is posted as it is computed; a span begins with a page of the first component."""
        size, table = payload_part.component.page_size, self._table
        skip = lease.lent.first_page if lease.lent is not None else 0
        first, last = span.start // table.page_size - skip, table.pages_for(span.end) - skip
        own = slice_pages(lease.page_table, first, last)
        # Fewer than those of the row: a prompt may end before the last page of a companion begins.
        n_pages = -(-span.end // size) - span.start // size
        pages = Pages(companion_pages(own, payload_part.factor)[: n_pages * ID_BYTES])
        return Grant(
            component=payload_part.component.name,
            start_tokens=span.start,
            end_tokens=span.end,
            pages=pages,
        )

    def _last(self, payload_part: PayloadPart, lease: LeaseRecord, prompt_tokens: int) -> Grant:
        """Of what goes with the last chunk: the tail's windows, or the one page of a state."""
        component, kept = payload_part.component, payload_part.kept
        assert kept is not None
        start, pages = 0, kept.own_pages(lease)
        if isinstance(kept, WindowPages):
            start = kept.start_tokens(lease)
            # Rounded up: the last page goes though the prompt may end within it.
            first, last = start // component.page_size, -(-prompt_tokens // component.page_size)
            pages = Pages(kept.page_table(lease)[first * ID_BYTES : last * ID_BYTES])
        return Grant(
            component=component.name, start_tokens=start, end_tokens=prompt_tokens, pages=pages
        )

    def granted_bytes(
        self,
        grants: tuple[Grant, ...],
        routes: tuple[PayloadRoute, ...],
        split: tuple[int, ...] = (),
    ) -> int:
        """Bytes that land on the granted pages, in all shards of the decode side."""
        total = 0
        for route in routes:
            payload_part, grant = self.parts[route.grant], grants[route.grant]
            pieces = pieces_of(split, payload_part.place)
            n_bytes = payload_part.bytes_per_page(route.shard_route) // pieces
            total += len(grant.pages) // ID_BYTES * n_bytes
        return total

    # ---- both sides --------------------------------------------------------------------------

    def carried(self, share: SourceShare) -> tuple[PayloadPart, ...]:
        """What an Offer of that share has grants for."""
        return () if share.role is Role.DUMMY else self.parts

    def seals(
        self, offer: Offer, routes: tuple[PayloadRoute, ...], split: tuple[int, ...] = ()
    ) -> tuple[Seal, ...]:
        """One per route; none where nothing is summed."""
        if offer.integrity is Integrity.OFF:
            return ()
        seals = []
        for route in routes:
            payload_part, grant = self.parts[route.grant], offer.grants[route.grant]
            units = payload_part.units(grant, self.unit_tokens(payload_part, split))
            if units.first < units.end:
                region = shard_region(grant.component, route.shard_route.peer_shard)
                seals.append(seal_of(offer, region, (units.first, units.end)))
            else:  # of a full hit: no page is chosen by its key, which takes a hash
                seals.append(
                    Seal(integrity=offer.integrity, key=NO_KEY, first=units.first, end=units.end)
                )
        return tuple(seals)

    def windows(self) -> Iterator[tuple[int, WindowPages]]:
        """The windows of each windowed component, with the number of its grant."""
        for index, payload_part in enumerate(self.parts):
            if isinstance(payload_part.kept, WindowPages):
                yield index, payload_part.kept

    # ---- the prefill side --------------------------------------------------------------------

    def source(
        self, payload_part: PayloadPart, engine: SendingEngine, units: UnitRange, pieces: int
    ) -> Pages:
        """Our pages behind these units; where a page is cut, the ids of its pieces.

        Piece ``s`` of page ``p`` has the id ``p * pieces + s``.
        """
        kept, lease = payload_part.kept, engine.lease
        if isinstance(kept, WindowPages):
            return Pages(kept.page_table(lease)[units.first * ID_BYTES : units.end * ID_BYTES])
        if kept is not None:
            return kept.own_pages(lease)
        # Cut out of the row by whole pages of ours, and then by units: numbers of units need not
        # begin with a page.
        # Each page of the row is ``factor`` pages of the component, of ``pieces`` pieces each.
        factor = payload_part.factor
        each = factor * pieces
        row_first = units.first // each
        row = slice_pages(engine.row, row_first, -(-units.end // each))
        if each == 1:
            return row
        # The rows are whole pages of ours, and the units may begin within the first of them.
        skip = units.first - row_first * each
        ids = companion_pages(companion_pages(row, factor), pieces)
        return Pages(ids[skip * ID_BYTES : (skip + units.end - units.first) * ID_BYTES])
