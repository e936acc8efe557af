"""What is done to a tree that is broken: hide what no prompt may find, drop it, count again.

What must not live here: what is broken (``radix_audit``), and what follows for leases.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvd.core.radix_node import NO_CHILDREN
from kvd.types import ID_BYTES, Pages, Tokens

if TYPE_CHECKING:
    from kvd.core.radix import RadixTree
    from kvd.core.radix_node import Node


def subtree(node: Node) -> list[Node]:
    """``node`` and all below, parents first."""
    found = [node]
    for one in found:  # grows while it is walked
        found.extend(one.children.values())
    return found


def hide(tree: RadixTree, node: Node) -> None:
    """No prompt finds ``node`` or what is below it any more; whoever locks it keeps it.

    Its first page of tokens becomes one that no engine has: negative, and nobody can guess it.
    """
    parent = node.parent
    assert parent is not None
    page_bytes = tree.match_page_tokens * ID_BYTES
    _unlink(node, parent)
    digest = hashlib.shake_256(b"%d %b" % (node.id, bytes(node.edge[:page_bytes])))
    key = bytearray(digest.digest(page_bytes))
    for last in range(ID_BYTES - 1, page_bytes, ID_BYTES):
        key[last] |= 0x80
    node.key = bytes(key)
    node.edge = Tokens(node.key + node.edge[page_bytes:])
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[node.key] = node


def drop(tree: RadixTree, node: Node) -> Pages:
    """Takes ``node`` and all below, which nobody locks, out of the tree; returns their pages."""
    gone = subtree(node)
    for one in gone:
        if one in tree.order:
            tree.order.remove(one)
    if node.parent is not None:
        _unlink(node, node.parent)
    for one in gone:
        one.children = NO_CHILDREN
    for keeper in tree.beside:
        keeper.dropped(gone)
    recount(tree)
    return Pages(b"".join([one.pages for one in gone]))


def recount(tree: RadixTree) -> None:
    """The sums over the nodes, as they are."""
    evictable = protected = 0
    for node in tree.nodes():
        if node.lock_ref:
            protected += len(node.pages)
        else:
            evictable += len(node.pages)
    tree.evictable_bytes, tree.protected_bytes = evictable, protected


def _unlink(node: Node, parent: Node) -> None:
    """Under whatever key its parent knows it."""
    for key in [key for key, child in parent.children.items() if child is node]:
        del parent.children[key]
