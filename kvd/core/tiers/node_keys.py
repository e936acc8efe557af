"""The keys of what the tree has: at each node that of its last page, worked out when it is wanted.

A key needs all keys before it. So that a prompt which goes on costs no more than what is new of it,
the one at the end of a node is kept for as long as the node is in the tree.

What must not live here: which of them lie in a tier (``index``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.radix import shared_bytes
from kvd.core.tiers.keys import keys_along, layout_digest, root_key
from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import PoolSpec


@mypyc_attr(allow_interpreted_subclasses=True)
class KeysAtNodes:
    """The key of the last page of each node that was asked for."""

    __slots__ = ("_ends", "_layout", "_page_bytes", "_tree")

    def __init__(self, spec: PoolSpec, tree: RadixTree) -> None:
        self._layout = layout_digest(spec)
        self._tree = tree
        self._page_bytes = tree.match_page_tokens * ID_BYTES
        self._ends: dict[int, bytes] = {}
        """By node id."""

    def forget(self, node: RadixNode) -> bytes:
        """It has left the tree; its key, if it was asked for."""
        return self._ends.pop(node.id, b"")

    def end_of(self, node: RadixNode) -> bytes:
        """The key of its last page; of a root what stands before the first page."""
        ends = self._ends
        found = ends.get(node.id)
        if found is not None:
            return found
        path, step = [], node
        while step.parent is not None and step.id not in ends:
            path.append(step)
            step = step.parent
        key = ends[step.id] if step.parent is not None else self._root(step)
        for step in reversed(path):
            key = ends[step.id] = keys_along(key, step.edge, self._page_bytes)[-1]
        return key

    def is_known(self, node: RadixNode) -> bool:
        """Whether ``end_of`` costs nothing."""
        return node.id in self._ends

    def of(self, node: RadixNode) -> list[bytes]:
        """Of all its pages."""
        assert node.parent is not None
        keys = keys_along(self.end_of(node.parent), node.edge, self._page_bytes)
        self._ends[node.id] = keys[-1]
        return keys

    def behind(self, tokens: Tokens, namespace: str) -> tuple[int, bytes]:
        """How far ``tokens`` are cached, as ``RadixTree.probe``, and the key of the last such page.

        Changes nothing of the tree.
        """
        root = self._tree.roots.get(namespace)
        if root is None:
            return 0, root_key(self._layout, namespace)
        node, page_bytes = root, self._page_bytes
        pos, end = 0, len(tokens) - len(tokens) % page_bytes
        while pos < end:
            child = node.children.get(tokens[pos : pos + page_bytes])
            if child is None:
                break
            stop = pos + len(child.edge)
            if stop <= end and tokens.startswith(child.edge, pos):
                node, pos = child, stop
                continue
            shared = shared_bytes(child.edge, tokens, pos, end)
            shared -= shared % page_bytes
            key = keys_along(self.end_of(node), child.edge[:shared], page_bytes)[-1]
            return (pos + shared) // ID_BYTES, key
        return pos // ID_BYTES, self.end_of(node)

    def along(self, tokens: Tokens, namespace: str) -> list[RadixNode]:
        """The nodes that have any page of ``tokens``, the first page first; changes nothing.

        The last one may go on with other pages.
        """
        found: list[RadixNode] = []
        node, page_bytes = self._tree.roots.get(namespace), self._page_bytes
        while node is not None:
            pos = node.end_tokens * ID_BYTES
            node = node.children.get(tokens[pos : pos + page_bytes])
            if node is not None:
                found.append(node)
        return found

    def _root(self, root: RadixNode) -> bytes:
        # Not kept: nobody says when a root is swept.
        return root_key(self._layout, root.key.decode())
