"""What the verbs of the tree say they have done."""

from __future__ import annotations

import msgspec

from kvd.core.cache.radix_node import RadixNode
from kvd.types import Pages


class Extension(msgspec.Struct, frozen=True, gc=False):
    """What ``extend`` did with the caller's pages."""

    node: RadixNode
    """The node that ends where they end; not locked by this."""
    duplicates: Pages
    """The caller's pages that were not taken, because the tree held these tokens on others."""
    tree_pages: Pages
    """The pages that all those tokens are on now."""
    joined: Pages
    """The caller's pages that were taken: those of ``node``, or none."""


class EvictedNodes(msgspec.Struct, frozen=True, gc=False):
    """What ``evict`` took out of the tree."""

    pages: Pages
    """The caller's now."""
    victims: list[RadixNode]
    """The nodes as they were, children before parents; nothing else refers to them."""


class FlushedNodes(msgspec.Struct, frozen=True):
    """What ``flush`` took out of the tree, and how much a lock kept in it."""

    pages: Pages
    kept_pages: int
    nodes: list[RadixNode]
    """Those that left, parents before children."""
