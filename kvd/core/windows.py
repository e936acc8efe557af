"""Window pages: the component of layers that look back only so far.

A lease has window pages for one stretch of its row (``stretch``); they are its own while it lives.
As it slides, what falls behind the window is used again further on: a fixed number of pages,
admitted once, turns along the sequence, so that a slide never waits. Who computes everything at
once has all of them mapped, and gives them back as it slides.

When a lease ends, its window pages of cached tokens join the tree at their nodes; that is how a
tombstone comes to life again. Room is made by dropping the windows used longest ago, whose nodes
stay: the tokens are cached for whoever has the window sent anyway.

A sequence goes on from a page boundary when one ``span`` before it is live, or all of it.

Invariants: a lock crosses live nodes only; a node has as many window pages as pages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvd.core.lease import Rows
from kvd.core.pages import PagePool
from kvd.core.spec import Tail
from kvd.core.stretch import Stretch, Window
from kvd.core.tail import most_pages, slid_start, span, tail_start
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_PAGES, Pages, count
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

    from kvd.core.effects import Outbox
    from kvd.core.lease import Claim, Lease
    from kvd.core.radix import RadixTree
    from kvd.core.radix_node import Node
    from kvd.core.spec import Component


class Windows:
    """The keeper of one windowed component. ``live``: by node, the window pages beside it."""

    def __init__(
        self, component: Component, total_pages: int, tree: RadixTree, out: Outbox
    ) -> None:
        assert isinstance(component.extent, Tail)
        self.component = component
        self.pool = PagePool(component.name, total_pages)
        self.live: dict[Node, Window] = {}
        self.held: dict[int, Stretch] = {}
        """By lease."""
        self.slides = 0
        self._window = component.extent.window_tokens
        self._page = component.page_size
        self._span = span(self._window, self._page)
        self._unlocked: OrderedDict[Node, None] = OrderedDict()
        """Live nodes without a lock, used longest ago first."""
        self._evictable_bytes = 0
        self._tree = tree
        self._out = out

    @property
    def evictable_pages(self) -> int:
        """Window pages at nodes that no lease needs."""
        return self._evictable_bytes // ID_BYTES

    @property
    def cached_pages(self) -> int:
        """Window pages at nodes."""
        return sum([len(window.pages) for window in self.live.values()]) // ID_BYTES

    @property
    def held_pages(self) -> int:
        """Window pages that are some lease's own."""
        return sum([held.own_pages for held in self.held.values()])

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now."""
        return self.pool.free_pages + self.evictable_pages

    # ---- what there is -----------------------------------------------------------------------

    @property
    def nodes(self) -> KeysView[Node]:
        """Nodes with a live window."""
        return self.live.keys()

    @property
    def unlocked(self) -> KeysView[Node]:
        """Live nodes that no lease needs."""
        return self._unlocked.keys()

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for."""
        return self.held.keys()

    def pages_at(self, node: Node) -> Pages:
        """The window pages of that node."""
        return self.live[node].pages if node in self.live else NO_PAGES

    def locks_at(self, node: Node) -> int:
        """Leases whose window crosses that node."""
        return self.live[node].locks if node in self.live else 0

    # ---- a claim -----------------------------------------------------------------------------

    def limit_tokens(self, claim: Claim) -> int | None:
        """A receive's window is always sent; who computes needs one more token to compute."""
        if claim.resumes:
            return None
        if claim.fresh_tokens is not None:
            return claim.fresh_tokens
        return max(0, count(claim.tokens) - 1)

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """Where the tail begins."""
        return tail_start(prompt_tokens, self._window, self._page, cached=cached)

    def usable(self, node: Node, claim: Claim) -> Node:
        """The nearest node with a live window behind it."""
        if claim.fresh_tokens is not None:
            return node
        best = node
        start = node.end_tokens
        """Everything from here to the end of ``best`` is live."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            parent = step.parent
            if step in self.live:
                start = parent.end_tokens
                if best.end_tokens - start >= self._span:
                    return best
            else:
                best, start = parent, parent.end_tokens
            step = parent
        return best

    def lock(self, anchor: Node, claim: Claim) -> None:
        """Keep the window behind ``anchor``, exactly: the node that it begins in is cut there."""
        fence = self._fence_tokens(anchor, claim)
        step = anchor
        while step.parent is not None and step.end_tokens > fence:
            if step.parent.end_tokens < fence:
                self._tree.cut(step, fence)
            window = self.live[step]
            if not window.locks:
                self._evictable_bytes -= len(window.pages)
                del self._unlocked[step]
            window.locks += 1
            step = step.parent

    def unlock(self, anchor: Node, claim: Claim) -> None:
        """The claim came to nothing."""
        self._unlock(anchor, anchor.end_tokens, self._fence_tokens(anchor, claim))

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """What is computed or received, or as much of it as is ever mapped at once."""
        start = prefix_tokens if claim.fresh_tokens is None else claim.fresh_tokens
        room = self._pages(claim.room_tokens)
        return self._budget(max(0, room - start // self._page), claim.step_tokens)

    def kept(self, anchor: Node, claim: Claim) -> int:
        """The window behind ``anchor``."""
        return (anchor.end_tokens - self._fence_tokens(anchor, claim)) // self._page

    def make_room(self, n_pages: int) -> None:
        """Drop the windows used longest ago; their nodes stay, as tombstones."""
        short = (n_pages - self.pool.free_pages) * ID_BYTES
        pieces: list[Pages] = []
        while short > 0:
            node, _ = self._unlocked.popitem(last=False)
            window = self.live.pop(node)
            short -= len(window.pages)
            pieces.append(window.pages)
        if pieces:
            freed = Pages(b"".join(pieces))
            self._evictable_bytes -= len(freed)
            self.pool.give(freed)
            out, name = self._out, self.component.name
            out.emit(
                events.Evicted(out.next_seq(), out.at_s, count(freed), len(pieces), "room", name)
            )

    def grant(self, lease: Lease, claim: Claim, anchor: Node, n_pages: int) -> None:
        """Take the pages and map as many as the lease computes next."""
        fresh = claim.fresh_tokens
        start = (anchor.end_tokens if fresh is None else fresh) // self._page
        fence = self._fence_tokens(anchor, claim) // self._page
        first_tokens = anchor.end_tokens if fresh is None else count(claim.tokens)
        room = self._pages(claim.room_tokens)
        if fresh is not None:
            fence = start
        held = Stretch(start, fence, room, claim.step_tokens, first_tokens)
        held.pages += self._behind(anchor, fence, start)
        held.spare = self.pool.take(n_pages)
        held.map_up_to(self._top(held, first_tokens))
        self.held[lease.id] = held

    def _behind(self, anchor: Node, fence: int, start: int) -> bytes:
        """The tree's window pages of ``[fence, start)``, which ends at ``anchor``."""
        pieces: list[Pages] = []
        step: Node | None = anchor
        while step is not None and step.end_tokens > fence * self._page and fence < start:
            pieces.append(self.live[step].pages)
            step = step.parent
        return b"".join(reversed(pieces))

    # ---- a lease that lives ------------------------------------------------------------------

    def slide(self, lease: Lease, upto_tokens: int) -> Refusal | None:
        """``upto_tokens`` is computed next: give back what is behind, map what is ahead."""
        held = self.held[lease.id]
        behind = slid_start(upto_tokens, self._window, self._page, cached=lease.cache)
        if lease.sent_from is not None:
            behind = min(behind, lease.sent_from)
        floor = min(max(held.floor, behind // self._page), held.top)
        top = max(held.top, self._top(held, max(held.upto, upto_tokens)))
        given = max(0, floor - max(held.floor, held.start))
        if top - held.top > given + count(held.spare):
            return Refusal(
                Code.WRONG_STATE,
                f"slide of lease {lease.id} to {upto_tokens}: its window pages are still needed "
                f"from token {floor * self._page} on, for a send or for a step longer than its "
                f"step_tokens={held.step}; it has {held.own_pages} pages of {self.component.name}",
                numbers={"upto_tokens": upto_tokens, "pages": held.own_pages},
            )
        self.slides += 1
        held.unmap_below(floor)
        if floor >= held.start:
            self._release_fence(held, lease)
        held.upto = max(held.upto, upto_tokens)
        held.map_up_to(top)
        self._trim(held)
        return None

    def _trim(self, held: Stretch) -> None:
        """Give back what the rest of the sequence can never need at once."""
        needed = self._budget(held.room - max(held.floor, held.start), held.step)
        kept = len(held.spare) - min(len(held.spare), (held.own_pages - needed) * ID_BYTES)
        if kept < len(held.spare):
            self.pool.give(Pages(held.spare[kept:]))
            held.spare = Pages(held.spare[:kept])

    def growth(self, lease: Lease, room_tokens: int) -> int:
        """Pages beyond those it has."""
        held = self.held[lease.id]
        rest = self._pages(room_tokens) - max(held.floor, held.start)
        return max(0, self._budget(rest, held.step) - held.own_pages)

    def extend(self, lease: Lease, room_tokens: int) -> None:
        """More room: more of it is mapped, as far as the step goes."""
        held = self.held[lease.id]
        held.spare = Pages(held.spare + self.pool.take(self.growth(lease, room_tokens)))
        held.room = max(held.room, self._pages(room_tokens))
        top = min(self._top(held, held.upto), held.top + count(held.spare))
        held.map_up_to(max(held.top, top))

    def row(self, lease: Lease) -> Pages:
        """One id per page of the lease's row, the null page where there is none."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else held.row()

    def start_tokens(self, lease: Lease) -> int:
        """The first token that has a window page of the lease's own."""
        held = self.held[lease.id]
        return max(held.floor, held.start) * self._page

    def mapped_tokens(self, lease: Lease) -> tuple[int, int]:
        """The tokens ``[first, end)`` that have a window page."""
        held = self.held[lease.id]
        return held.floor * self._page, held.top * self._page

    def own(self, lease: Lease) -> Pages:
        """Mapped or spare, not the tree's."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else Pages(held.own() + held.spare)

    def content(self, lease: Lease, n_tokens: int) -> Rows | Refusal:
        """What a slide to ``n_tokens`` leaves, as far as these go."""
        held, last = self.held[lease.id], self._pages(n_tokens)
        behind = slid_start(n_tokens, self._window, self._page, cached=lease.cache)
        first = max(held.floor, behind // self._page)
        needed = slid_start(n_tokens, self._window, self._page, cached=False)
        begin, end = self.mapped_tokens(lease)
        if begin > needed or end < n_tokens:
            return Refusal(
                Code.WRONG_STATE,
                f"lease {lease.id} has {self.component.name} pages of tokens [{begin}, {end}), to "
                f"go on behind {n_tokens} it needs those of [{needed}, {n_tokens}): slide it to "
                "the token that it computes next, and name all before that",
                numbers={"tokens": n_tokens, "mapped_tokens": end, "mapped_from_tokens": begin},
            )
        return Rows(first, held.mapped(first, last))

    # ---- and one that ends -------------------------------------------------------------------

    def end(self, lease: Lease) -> None:
        """Window pages of cached tokens join the tree where it has none, the rest is free."""
        held = self.held.pop(lease.id, None)
        if held is None:
            return
        self._release_fence(held, lease)
        first, own = max(held.floor, held.start), held.own()
        kept = 0
        freed = [held.spare]
        may_keep = lease.anchor is not None and lease.cache and not lease.is_blank
        if lease.anchor is not None and may_keep and lease.owned > first:
            kept = min(lease.owned, held.top) - first
            if kept == lease.owned - first:
                freed.append(self._adopt(lease.anchor, first, own))
            else:
                kept = 0
        freed.append(Pages(own[kept * ID_BYTES :]))
        pages = Pages(b"".join(freed))
        if pages:
            self.pool.give(pages)

    def _adopt(self, anchor: Node, first: int, own: Pages) -> Pages:
        """Pages of ``[first, anchor)`` go to the nodes that have none; returns the others."""
        others: list[Pages] = []
        step = anchor
        while step.parent is not None and step.end_tokens > first * self._page:
            begin = step.parent.end_tokens // self._page
            if begin < first:
                if step in self.live:
                    others.append(Pages(own[: (step.end_tokens // self._page - first) * ID_BYTES]))
                    break
                self._tree.cut(step, first * self._page)
                begin = first
            end = step.end_tokens // self._page
            pages = Pages(own[(begin - first) * ID_BYTES : (end - first) * ID_BYTES])
            if step in self.live:
                others.append(pages)
            else:
                self.pool.moves.log.append(pages)
                self.live[step] = Window(pages, 0)
                self._unlocked[step] = None
                self._evictable_bytes += len(pages)
            step = step.parent
        return Pages(b"".join(others))

    def quarantine(self, lease: Lease) -> None:
        """Keep its own pages, unlock the tree's."""
        held = self.held[lease.id]
        self._release_fence(held, lease)
        own = self.own(lease)
        held.pages, held.spare = bytearray(), own
        held.floor = held.top = held.start = held.fence = held.room = 0

    def _release_fence(self, held: Stretch, lease: Lease) -> None:
        if held.fence < held.start and lease.anchor is not None:
            self._unlock(lease.anchor, held.start * self._page, held.fence * self._page)
            held.fence = held.start

    def _unlock(self, below: Node, end_tokens: int, fence_tokens: int) -> None:
        """Undo one lock of ``[fence, end)``; ``below`` is on the path, at its end or deeper."""
        step: Node | None = below
        while step is not None and step.end_tokens > fence_tokens:
            if step.end_tokens <= end_tokens:
                window = self.live[step]
                window.locks -= 1
                if not window.locks:
                    self._unlocked[step] = None
                    self._evictable_bytes += len(window.pages)
            step = step.parent

    # ---- the tree moves ----------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Both halves are as live and as locked as the whole was."""
        window = self.live.get(lower)
        if window is None:
            return
        self.pool.moves.log.append(window.pages)
        size = len(upper.pages)
        self.live[upper] = Window(Pages(window.pages[:size]), window.locks)
        window.pages = Pages(window.pages[size:])
        if not window.locks:
            self._unlocked[upper] = None

    def dropped(self, nodes: Iterable[Node]) -> None:
        """Their tokens are no longer cached, so their windows are free."""
        pieces: list[Pages] = []
        for node in nodes:
            window = self.live.pop(node, None)
            if window is not None:
                del self._unlocked[node]
                pieces.append(window.pages)
        freed = Pages(b"".join(pieces))
        if freed:
            self._evictable_bytes -= len(freed)
            self.pool.give(freed)

    # ---- arithmetic --------------------------------------------------------------------------

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page)

    def _fence_tokens(self, anchor: Node, claim: Claim) -> int:
        """Where the window behind ``anchor`` begins; at ``anchor`` where none is needed."""
        if claim.fresh_tokens is not None:
            return anchor.end_tokens
        return max(0, anchor.end_tokens - self._span)

    def _budget(self, rest: int, step: int) -> int:
        """Pages of its own for ``rest`` pages of tokens still to come."""
        if not step:
            return max(0, rest)
        return max(0, min(rest, most_pages(self._window, step, self._page)))

    def _top(self, held: Stretch, upto_tokens: int) -> int:
        """End of what must be mapped to compute from ``upto_tokens``."""
        if not held.step or self._page == 1:
            return held.room
        return min(held.room, self._pages(upto_tokens + held.step))
