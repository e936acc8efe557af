"""Window pages at the nodes of the tree: which are live, who needs them, which give way first.

A node either has a window page for each of its pages, or none: then it is a tombstone, cached for
whoever has the window sent. A lease that computes locks one window behind its prefix, exactly: the
node in which that begins is cut there, so that a lock is undone at the same place whatever was
split since.

Invariants: a lock crosses live nodes only; a node has as many window pages as pages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvd.types import Pages, count, slice_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.moved_pages import MovedPages
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode


class NodeWindow:
    """The window pages at one node, and the leases that need them."""

    __slots__ = ("locks", "pages")

    def __init__(self, pages: Pages, locks: int) -> None:
        self.pages = pages
        self.locks = locks


class LiveWindows:
    """The live nodes of one windowed component. Where pages come from and go is the caller's."""

    __slots__ = ("_moved", "_page", "_tree", "at", "evictable_pages", "unlocked")

    def __init__(self, page_tokens: int, tree: RadixTree, moved: MovedPages) -> None:
        self.at: dict[RadixNode, NodeWindow] = {}
        self.unlocked: OrderedDict[RadixNode, None] = OrderedDict()
        """Live nodes without a lock, used longest ago first."""
        self.evictable_pages = 0
        self._page = page_tokens
        self._tree = tree
        self._moved = moved

    @property
    def cached_pages(self) -> int:
        """All of them."""
        return sum([count(window.pages) for window in self.at.values()])

    def nearest(self, node: RadixNode, span_tokens: int) -> RadixNode:
        """``node``, or the nearest above it, with so much of its path live before it, or all."""
        best = node
        start = node.end_tokens
        """Everything from here to the end of ``best`` is live."""
        step: RadixNode | None = node
        while step is not None and step.parent is not None:
            parent = step.parent
            if step in self.at:
                start = parent.end_tokens
                if best.end_tokens - start >= span_tokens:
                    return best
            else:
                best, start = parent, parent.end_tokens
            step = parent
        return best

    def behind(self, anchor: RadixNode, fence_tokens: int) -> Pages:
        """The window pages of the path from ``fence_tokens`` to the end of ``anchor``."""
        pieces: list[Pages] = []
        step: RadixNode | None = anchor
        while step is not None and step.end_tokens > fence_tokens:
            pieces.append(self.at[step].pages)
            step = step.parent
        return Pages(b"".join(reversed(pieces)))

    # ---- locks -------------------------------------------------------------------------------

    def lock(self, anchor: RadixNode, fence_tokens: int) -> None:
        """Keep what is between ``fence_tokens`` and the end of ``anchor``."""
        step = anchor
        while step.parent is not None and step.end_tokens > fence_tokens:
            if step.parent.end_tokens < fence_tokens:
                # Cut first: whoever unlocks finds the same end here, whatever was split meanwhile.
                self._tree.cut(step, fence_tokens)
            window = self.at[step]
            if not window.locks:
                self.evictable_pages -= count(window.pages)
                del self.unlocked[step]
            window.locks += 1
            step = step.parent

    def unlock(self, below: RadixNode, end_tokens: int, fence_tokens: int) -> None:
        """Undo one lock of ``[fence, end)``; ``below`` is on the path, at its end or deeper."""
        step: RadixNode | None = below
        while step is not None and step.end_tokens > fence_tokens:
            if step.end_tokens <= end_tokens:
                window = self.at[step]
                window.locks -= 1
                if not window.locks:
                    self._let_go(step, window)
            step = step.parent

    def _let_go(self, node: RadixNode, window: NodeWindow) -> None:
        self.unlocked[node] = None
        self.evictable_pages += count(window.pages)

    # ---- coming and going --------------------------------------------------------------------

    def join_tree(self, anchor: RadixNode, first: int, own: Pages) -> Pages:
        """Pages from page ``first`` to ``anchor`` bring tombstones to life; returns the others."""
        others: list[Pages] = []
        step = anchor
        while step.parent is not None and step.end_tokens > first * self._page:
            begin = step.parent.end_tokens // self._page
            if begin < first:
                if step in self.at:
                    others.append(slice_pages(own, 0, step.end_tokens // self._page - first))
                    break
                self._tree.cut(step, first * self._page)
                begin = first
            end = step.end_tokens // self._page
            pages = slice_pages(own, begin - first, end - first)
            if step in self.at:
                others.append(pages)
            else:
                self._moved.log.append(pages)
                window = self.at[step] = NodeWindow(pages, 0)
                self._let_go(step, window)
            step = step.parent
        return Pages(b"".join(others))

    def drop_oldest(self, n_pages: int) -> tuple[Pages, int]:
        """Make tombstones until so many pages are out; the pages, and of how many nodes."""
        pieces: list[Pages] = []
        while n_pages > 0:
            node, _ = self.unlocked.popitem(last=False)
            pages = self.at.pop(node).pages
            n_pages -= count(pages)
            pieces.append(pages)
        freed = Pages(b"".join(pieces))
        self.evictable_pages -= count(freed)
        return freed, len(pieces)

    def forget(self, nodes: Iterable[RadixNode]) -> Pages:
        """``nodes``, which nobody locks, left the tree; returns their pages."""
        pieces: list[Pages] = []
        for node in nodes:
            window = self.at.pop(node, None)
            if window is not None:
                del self.unlocked[node]
                pieces.append(window.pages)
        freed = Pages(b"".join(pieces))
        self.evictable_pages -= count(freed)
        return freed

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Both halves are as live and as locked as the whole was."""
        window = self.at.get(lower)
        if window is None:
            return
        self._moved.log.append(window.pages)
        size = len(upper.pages)  # as many window pages as pages, so the bytes are cut alike
        self.at[upper] = NodeWindow(Pages(window.pages[:size]), window.locks)
        window.pages = Pages(window.pages[size:])
        if not window.locks:
            self.unlocked[upper] = None
