"""Window pages: the component of layers that look back only so far.

A lease has window pages for one part of its sequence; they are its own while it lives. As it
slides, what falls behind the window is used again further on: a fixed number of pages, admitted
once, turns along the sequence, so that a slide never waits. Who computes everything at once has all
of them mapped, and gives them back as it slides.

When a lease ends, its window pages of cached tokens join the tree at their nodes; that is how a
tombstone comes to life again. Room is made by dropping the windows used longest ago, whose nodes
stay: the tokens are cached for whoever has the window sent anyway.

A sequence goes on from a page boundary when one ``span`` before it is live, or all of it. A node
either has a window page for each of its pages, or none. A lease that computes locks one window
behind its prefix, exactly: the node in which that begins is cut there, so that a lock is undone at
the same place whatever was split since.

Invariants: a lock crosses live nodes only; a node has as many window pages as pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core.cache.lease import PageSpan
from kvd.core.components.component_pages import ComponentPages, PagesAtNode
from kvd.core.components.tail import most_pages, slid_start, span, tail_start
from kvd.core.layout.spec import Tail
from kvd.errors import Code, Refusal
from kvd.types import NO_PAGES, Pages, count, null_pages, slice_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease import Claim
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import Component
    from kvd.core.outbox import Outbox


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseWindow:
    """The window pages of one lease, counted in pages of its page table.

    It has them for the mapped part of its sequence, and the null page everywhere else::

        table    | 0 0 0 0 | tree | own own own own | 0 0 0 |    one id per page of tokens
                 0       floor   start            top      room
        spare    pages of its own that stand nowhere in the table now

    The window behind its prefix is the tree's and locked (``fence`` to ``start``); the rest is its
    own.

    Invariant: fence <= start, floor <= top <= room; ``pages`` has an id, and never the null page,
    for each page of ``[floor, top)``.
    """

    __slots__ = ("fence", "floor", "pages", "room", "spare", "start", "step", "top", "upto")

    def __init__(self, start: int, fence: int, room: int, step: int, upto: int) -> None:
        self.floor = fence
        """First page that is mapped."""
        self.fence = fence
        """First page of the tree that it locks; equal to ``start`` where it locks none."""
        self.start = start
        """First page that is its own."""
        self.top = start
        """End of what is mapped."""
        self.room = room
        """Pages of the table."""
        self.step = step
        """Tokens that are computed between two slides; 0: no limit."""
        self.upto = upto
        """Token that is computed next."""
        self.pages = NO_PAGES
        """Those of ``[floor, top)``."""
        self.spare = NO_PAGES

    @property
    def n_own_pages(self) -> int:
        """How many pages are its own."""
        return self.top - max(self.floor, self.start) + count(self.spare)

    def page_table(self) -> Pages:
        """One id per page of the sequence, the null page where there is none."""
        before, after = null_pages(self.floor), null_pages(self.room - self.top)
        return Pages(before + self.pages + after)

    def mapped(self, first: int, last: int) -> Pages:
        """Those of ``[first, last)``, which is mapped."""
        return slice_pages(self.pages, first - self.floor, last - self.floor)

    def own_mapped(self) -> Pages:
        """Its own that are mapped."""
        return self.mapped(max(self.floor, self.start), self.top)

    def map_up_to(self, top: int) -> None:
        """Put spare pages behind what is mapped; there are as many."""
        n_pages = top - self.top
        self.pages = Pages(self.pages + slice_pages(self.spare, 0, n_pages))
        self.spare = slice_pages(self.spare, n_pages)
        self.top = top

    def unmap_below(self, floor: int) -> None:
        """Begin at ``floor``; what was its own below is spare now."""
        first_own = max(self.floor, self.start)
        # What was the tree's below is not spare: it goes back with its lock.
        if floor > first_own:
            self.spare = Pages(self.spare + self.mapped(first_own, floor))
        self.pages = slice_pages(self.pages, floor - self.floor)
        self.floor = floor


@mypyc_attr(allow_interpreted_subclasses=True)
class WindowPages(ComponentPages):
    """The pages of one windowed component."""

    def __init__(
        self, component: Component, total_pages: int, out: Outbox, tree: RadixTree
    ) -> None:
        super().__init__(component, total_pages, out)
        assert isinstance(component.extent, Tail)
        self.held: dict[int, LeaseWindow] = {}
        self.slides = 0
        self._tree = tree
        self._window = component.extent.window_tokens
        self._page = component.page_size
        self._span = span(self._window, self._page)

    @property
    @override
    def held_pages(self) -> int:
        """Window pages that are some lease's own."""
        return sum([held.n_own_pages for held in self.held.values()])

    # ---- a claim -----------------------------------------------------------------------------

    @override
    def limit_tokens(self, claim: Claim) -> int | None:
        """A receive's window is always sent; who computes needs one more token to compute."""
        if claim.resumes or claim.goes_on:
            return None
        if claim.fresh_tokens is not None:
            return claim.fresh_tokens
        return max(0, count(claim.tokens) - 1)

    @override
    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """Where the tail begins."""
        return tail_start(prompt_tokens, self._window, self._page, cached=cached)

    @override
    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """The nearest node with one span of its path live before it, or all."""
        if claim.fresh_tokens is not None:
            return node
        best = node
        start = node.end_tokens  # from here to the end of ``best`` everything is live
        step: RadixNode | None = node
        while step is not None and step.parent is not None:
            parent = step.parent
            if step in self.at:
                start = parent.end_tokens
                if best.end_tokens - start >= self._span:
                    return best
            else:
                # A tombstone: nobody can go on across it, so all that was found live below is of no
                # use.
                best, start = parent, parent.end_tokens
            step = parent
        return best

    @override
    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Keep the window behind ``anchor``, exactly: the node that it begins in is cut there."""
        fence_tokens = self._fence_tokens(anchor, claim)
        step = anchor
        while step.parent is not None and step.end_tokens > fence_tokens:
            if step.parent.end_tokens < fence_tokens:
                # Cut first: whoever unlocks finds the same end here, whatever was split meanwhile.
                self._tree.cut(step, fence_tokens)
            self._lock_at(step)
            step = step.parent

    @override
    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""
        self._unlock_path(anchor, anchor.end_tokens, self._fence_tokens(anchor, claim))

    def _unlock_path(self, below: RadixNode, end_tokens: int, fence_tokens: int) -> None:
        """Undo one lock of ``[fence, end)``; ``below`` is on the path, at its end or deeper."""
        for step in _path(below, fence_tokens):
            # The anchor moves down with every commit: what is behind the prefix was never locked
            # for it.
            if step.end_tokens <= end_tokens:
                self._unlock_at(step)

    @override
    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """What is computed or received, or as much of it as is ever mapped at once."""
        start = prefix_tokens if claim.fresh_tokens is None else claim.fresh_tokens
        room = self._pages(claim.room_tokens)
        return self._budget(max(0, room - start // self._page), claim.step_tokens)

    @override
    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """The window behind ``anchor``."""
        return (anchor.end_tokens - self._fence_tokens(anchor, claim)) // self._page

    @override
    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the pages and map as many as the lease computes next."""
        fresh = claim.fresh_tokens
        start = (anchor.end_tokens if fresh is None else fresh) // self._page
        # What is written by somebody else needs no window of the tree: nothing is computed from it.
        fence = self._fence_tokens(anchor, claim) // self._page
        first_tokens = anchor.end_tokens if fresh is None else count(claim.tokens)
        room = self._pages(claim.room_tokens)
        if fresh is not None:
            fence = start
        held = LeaseWindow(start, fence, room, claim.step_tokens, first_tokens)
        if fence < start:
            # Locked since the claim: what lies at them is still there.
            path = [self.at[step].pages for step in _path(anchor, fence * self._page)]
            held.pages = Pages(b"".join(reversed(path)))
        # Before anything is mapped: what is mapped comes out of these.
        held.spare = self.pool.take_pages(n_pages)
        held.map_up_to(self._top(held, first_tokens))
        self.held[lease.id] = held

    # ---- a lease that lives ------------------------------------------------------------------

    @override
    def unslidable(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """Fewer pages fall behind, or are spare, than are needed ahead."""
        held = self.held[lease.id]
        floor = self._slid_floor(held, lease, upto_tokens)
        top = max(held.top, self._top(held, max(held.upto, upto_tokens)))
        given = max(0, floor - max(held.floor, held.start))
        if top - held.top <= given + count(held.spare):
            return None
        return Refusal(
            Code.WRONG_STATE,
            f"slide of lease {lease.id} to {upto_tokens}: its window pages are still needed "
            f"from token {floor * self._page} on, for a send or for a step longer than its "
            f"step_tokens={held.step}; it has {held.n_own_pages} pages of {self.component.name}",
            numbers={"upto_tokens": upto_tokens, "pages": held.n_own_pages},
        )

    def _slid_floor(self, held: LeaseWindow, lease: LeaseRecord, upto_tokens: int) -> int:
        """First page that stays mapped when ``upto_tokens`` is computed next."""
        behind = slid_start(upto_tokens, self._window, self._page, cached=lease.cache)
        sends = lease.sends
        if sends is not None and sends.window_from is not None:
            # A send of its prompt still reads the windows from there on.
            behind = min(behind, sends.window_from)
        return min(max(held.floor, behind // self._page), held.top)

    @override
    def slide(self, lease: LeaseRecord, upto_tokens: int) -> None:
        """``upto_tokens`` is computed next: give back what is behind, map what is ahead."""
        held = self.held[lease.id]
        floor = self._slid_floor(held, lease, upto_tokens)
        top = max(held.top, self._top(held, max(held.upto, upto_tokens)))
        self.slides += 1
        held.unmap_below(floor)
        if floor >= held.start:
            self._release_fence(held, lease)
        # After the unmapping: what fell behind is spare now, and is what is mapped ahead.
        held.upto = max(held.upto, upto_tokens)
        held.map_up_to(top)
        self._trim(held)

    def _trim(self, held: LeaseWindow) -> None:
        """Give back what the rest of the sequence can never need at once."""
        # By what is still to come: near its end a sequence needs fewer at once than when it was
        # admitted.
        needed = self._budget(held.room - max(held.floor, held.start), held.step)
        kept = max(0, count(held.spare) - (held.n_own_pages - needed))
        if kept < count(held.spare):
            self.pool.return_pages(slice_pages(held.spare, kept))
            held.spare = slice_pages(held.spare, 0, kept)

    @override
    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """Pages beyond those it has."""
        held = self.held[lease.id]
        rest = self._pages(room_tokens) - max(held.floor, held.start)
        return max(0, self._budget(rest, held.step) - held.n_own_pages)

    @override
    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """More room: more of it is mapped, as far as the step goes."""
        held = self.held[lease.id]
        held.spare = Pages(held.spare + self.pool.take_pages(self.growth(lease, room_tokens)))
        held.room = max(held.room, self._pages(room_tokens))
        top = min(self._top(held, held.upto), held.top + count(held.spare))
        held.map_up_to(max(held.top, top))

    @override
    def shorten(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Pages behind it, and those that were spare for what would have been computed."""
        held = self.held[lease.id]
        held.room = room = self._pages(room_tokens)
        if held.top > room:
            first_own = max(held.floor, held.start, room)
            held.spare = Pages(held.spare + held.mapped(first_own, held.top))
            held.top = max(room, held.start)
            held.floor = min(held.floor, held.top)
            held.pages = slice_pages(held.pages, 0, held.top - held.floor)
        self.pool.return_pages(held.spare)
        held.spare = NO_PAGES

    @override
    def page_table(self, lease: LeaseRecord) -> Pages:
        """One id per page of the lease's page table, the null page where there is none."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else held.page_table()

    def start_tokens(self, lease: LeaseRecord) -> int:
        """The first token that has a window page of the lease's own."""
        held = self.held[lease.id]
        return max(held.floor, held.start) * self._page

    def mapped_tokens(self, lease: LeaseRecord) -> tuple[int, int]:
        """The tokens ``[first, end)`` that have a window page."""
        held = self.held[lease.id]
        return held.floor * self._page, held.top * self._page

    @override
    def own_pages(self, lease: LeaseRecord) -> Pages:
        """Mapped or spare, not the tree's."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else Pages(held.own_mapped() + held.spare)

    @override
    def pages_beside(self, lease: LeaseRecord, begin: int, end: int) -> PageSpan:
        """Those of its own that are mapped there."""
        held = self.held[lease.id]
        first = max(held.floor, held.start, begin // self._page)
        last = max(first, min(held.top, self._pages(end)))
        return PageSpan(first, held.mapped(first, last))

    @override
    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """What a slide to ``n_tokens`` leaves, as far as these go."""
        held, last = self.held[lease.id], self._pages(n_tokens)
        behind = slid_start(n_tokens, self._window, self._page, cached=lease.cache)
        first = max(held.floor, behind // self._page)
        # Two measures: as much is kept as whoever comes after could go on from, but it is only
        # refused where this lease itself could not.
        needed = slid_start(n_tokens, self._window, self._page, cached=False)
        begin, end = self.mapped_tokens(lease)
        # Refused and not saved in part: a window with a hole could not be gone on from.
        if begin > needed or end < n_tokens:
            return Refusal(
                Code.WRONG_STATE,
                f"lease {lease.id} has {self.component.name} pages of tokens [{begin}, {end}), to "
                f"go on behind {n_tokens} it needs those of [{needed}, {n_tokens}): slide it to "
                "the token that it computes next, and name all before that",
                numbers={"tokens": n_tokens, "mapped_tokens": end, "mapped_from_tokens": begin},
            )
        return PageSpan(first, held.mapped(first, last))

    # ---- and one that ends -------------------------------------------------------------------

    @override
    def end_lease(self, lease: LeaseRecord) -> None:
        """Window pages of cached tokens join the tree where it has none, the rest is free."""
        held = self.held.pop(lease.id, None)
        if held is None:
            return
        # Before anything of it joins the tree: what it joins at is then not locked by itself.
        self._release_fence(held, lease)
        first, own = max(held.floor, held.start), held.own_mapped()
        kept = 0
        freed = [held.spare]
        # A lease that is still to be restored has pages in which nothing of its tokens stands yet.
        may_keep = lease.anchor is not None and lease.cache and not lease.is_blank
        if lease.anchor is not None and may_keep and lease.owned > first:
            kept = min(lease.owned, held.top) - first
            # All up to the anchor or nothing: a window with a hole in it is of no use to anybody.
            if kept == lease.owned - first:
                freed.append(self._join_tree(lease.anchor, first, own))
            else:
                kept = 0
        freed.append(slice_pages(own, kept))
        pages = Pages(b"".join(freed))
        if pages:
            self.pool.return_pages(pages)

    def _join_tree(self, anchor: RadixNode, first: int, own: Pages) -> Pages:
        """Pages from page ``first`` to ``anchor`` bring tombstones to life; returns the others."""
        others: list[Pages] = []
        step = anchor
        while step.parent is not None and step.end_tokens > first * self._page:
            begin = step.parent.end_tokens // self._page
            # Its pages begin within this node: cut there, or leave what lies there already as it
            # is.
            if begin < first:
                if step in self.at:
                    others.append(slice_pages(own, 0, step.end_tokens // self._page - first))
                    break
                self._tree.cut(step, first * self._page)
                begin = first
            end = step.end_tokens // self._page
            pages = slice_pages(own, begin - first, end - first)
            # Somebody else has brought it to life meanwhile: equal tokens, so one window is enough.
            if step in self.at:
                others.append(pages)
            else:
                self._put_at(step, pages)
            step = step.parent
        return Pages(b"".join(others))

    @override
    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """Keep its own pages, unlock the tree's."""
        held = self.held[lease.id]
        # While it has an anchor: the path to what it locks is found from there.
        self._release_fence(held, lease)
        own = self.own_pages(lease)
        held.pages, held.spare = NO_PAGES, own
        held.floor = held.top = held.start = held.fence = held.room = 0

    def _release_fence(self, held: LeaseWindow, lease: LeaseRecord) -> None:
        # Once: a slide past it, the end and a quarantine all come here, and the lock is one.
        if held.fence < held.start and lease.anchor is not None:
            self._unlock_path(lease.anchor, held.start * self._page, held.fence * self._page)
            held.fence = held.start

    # ---- the tree moves ----------------------------------------------------------------------

    @override
    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Both halves are as live and as locked as the whole was."""
        window = self.at.get(lower)
        if window is None:
            return
        self.pool.moved.log.append(window.pages)
        size = len(upper.pages)  # as many window pages as pages, so the bytes are cut alike
        self.at[upper] = PagesAtNode(Pages(window.pages[:size]), window.locks)
        window.pages = Pages(window.pages[size:])
        # The sum of what may be dropped stays as it is: the halves have what the whole had.
        if not window.locks:
            self.unlocked[upper] = None

    # ---- arithmetic --------------------------------------------------------------------------

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page)

    def _fence_tokens(self, anchor: RadixNode, claim: Claim) -> int:
        """Where the window behind ``anchor`` begins; at ``anchor`` where none is needed."""
        if claim.fresh_tokens is not None:
            return anchor.end_tokens
        return max(0, anchor.end_tokens - self._span)

    def _budget(self, rest: int, step: int) -> int:
        """Pages of its own for ``rest`` pages of tokens still to come."""
        if not step:
            return max(0, rest)
        return max(0, min(rest, most_pages(self._window, step, self._page)))

    def _top(self, held: LeaseWindow, upto_tokens: int) -> int:
        """End of what must be mapped to compute from ``upto_tokens``."""
        # With pages of one token no slide gives anything back, so all of it is mapped at once.
        if not held.step or self._page == 1:
            return held.room
        return min(held.room, self._pages(upto_tokens + held.step))


def _path(node: RadixNode, fence_tokens: int) -> Iterator[RadixNode]:
    """From ``node`` up, those that end behind the fence."""
    step: RadixNode | None = node
    while step is not None and step.end_tokens > fence_tokens:
        yield step
        step = step.parent
