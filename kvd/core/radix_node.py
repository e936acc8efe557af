"""One node of the prefix index, and what the tree's verbs return.

What must not live here: behaviour. ``RadixTree`` and its eviction order write a node, everybody
else reads it.
"""

from __future__ import annotations

import msgspec

from kvd.types import ID_BYTES, Pages, Tokens


class LockUnderflow(Exception):
    """A node was unlocked more often than it was locked; nothing was changed."""


class Node:
    """One edge of the tree and its end. Read it; only ``RadixTree`` and its order write it."""

    __slots__ = (
        "children",
        "created_at",
        "edge",
        "end_tokens",
        "grown",
        "hits",
        "id",
        "lock_ref",
        "namespace",
        "pages",
        "parent",
        "priority",
        "touched_at",
        "used",
    )

    def __init__(
        self, node_id: int, namespace: str, parent: Node | None, edge: bytes, pages: bytes
    ) -> None:
        self.id = node_id
        """Never reused while the tree lives; the half of a split that keeps its end keeps it."""
        self.namespace = namespace
        self.parent = parent
        # Plain bytes come in because calling a NewType costs as much as comparing 1000 tokens.
        self.edge: Tokens = edge  # type: ignore[assignment]
        self.pages: Pages = pages  # type: ignore[assignment]
        self.end_tokens: int = len(edge) // ID_BYTES + (parent.end_tokens if parent else 0)
        self.created_at = 0.0
        self.touched_at = 0.0
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.hits = 0
        """Locks ever taken across this node: how many leases have used it."""
        self.priority = 0
        self.used = 0
        self.grown = 0

    def describe(self) -> str:
        """The node in words, for messages: id, namespace, end, pages, locks."""
        return (
            f"node {self.id} ({self.namespace!r}, ends at token {self.end_tokens}, "
            f"{len(self.pages) // ID_BYTES} pages, lock_ref {self.lock_ref})"
        )


class Extension(msgspec.Struct, frozen=True, gc=False):
    """What ``extend`` did with the caller's pages."""

    node: Node
    """The node that ends where the stretch ends."""
    duplicates: Pages
    """The caller's pages that were not taken, because the tree held these tokens on others."""
    tree_pages: Pages
    """The pages the whole stretch is on now."""


class Victim(msgspec.Struct, frozen=True, gc=False):
    """One node that was evicted, whole."""

    node_id: int
    namespace: str
    end_tokens: int
    n_pages: int


class Evicted(msgspec.Struct, frozen=True):
    """What ``evict`` took out of the tree: the pages are the caller's now."""

    pages: Pages
    victims: tuple[Victim, ...]


class Flushed(msgspec.Struct, frozen=True):
    """What ``flush`` took out of the tree, and how much a lock kept in it."""

    pages: Pages
    kept_pages: int
