"""One node of the prefix index.

What must not live here: behaviour. ``RadixTree`` and its eviction order write a node, everybody
else reads it.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import quoted
from kvd.types import ID_BYTES, Pages, Tokens


class LockUnderflow(Exception):
    """A node was unlocked more often than it was locked; nothing was changed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixNode:
    """One edge of the tree and its end. Read it; only ``RadixTree`` and its order write it.

    Attributes:
        id: Never reused while the tree lives; the half of a split that keeps its end keeps it.
        parent: None for the root of a namespace.
        key: The first page of ``edge``: its name among the parent's children. Of a root, the
            namespace.
        edge: The tokens between the parent's end and this node's, whole pages of them.
        pages: One page id per page of ``edge``.
        end_tokens: Tokens from the root to the end of this node.
        children: By their ``key``.
        lock_ref: Locks that cross this node now; a root has one more, its own.
        hits: Locks that ever crossed it: how many leases have used it.
        priority: The highest of those that committed it or what is below it.
        touched_at: When it was last the end of a match or of an insertion, in seconds.
        writer: The session whose lease brought it; 0: a tier, or of before a restart.
    """

    __slots__ = (
        "children",
        "edge",
        "end_tokens",
        "hits",
        "id",
        "key",
        "lock_ref",
        "pages",
        "parent",
        "priority",
        "touched_at",
        "writer",
    )

    def __init__(
        self,
        node_id: int,
        parent: RadixNode | None,
        key: bytes,
        edge: bytes,
        pages: bytes,
        writer: int = 0,
        touched_at: float = 0.0,
    ) -> None:
        self.id = node_id
        self.parent = parent
        # Kept and not counted from the root each time: a split never changes where an edge ends.
        self.end_tokens: int = (
            parent.end_tokens + len(edge) // ID_BYTES if parent is not None else 0
        )
        self.key = key
        # Plain bytes come in because calling a NewType costs as much as comparing 1000 tokens.
        self.edge: Tokens = edge  # type: ignore[assignment]
        self.pages: Pages = pages  # type: ignore[assignment]
        self.children = NO_CHILDREN
        self.lock_ref = 0
        self.hits = 0
        self.priority = 0
        self.touched_at = touched_at
        self.writer = writer

    @property
    def namespace(self) -> str:
        """The key of the root above; a dropped node still knows it."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node.key.decode()

    @property
    def n_pages(self) -> int:
        """Pages on this node's edge."""
        return len(self.pages) // ID_BYTES

    def describe(self) -> str:
        """The node in words, for messages: id, namespace, end, pages, locks."""
        return (
            f"node {self.id} ({quoted(self.namespace)}, ends at token {self.end_tokens}, "
            f"{len(self.pages) // ID_BYTES} pages, lock_ref {self.lock_ref})"
        )


NO_CHILDREN: dict[bytes, RadixNode] = {}
"""The children of every leaf, never written: most nodes are leaves, and a dict each costs time."""


def path_between(above: RadixNode | None, node: RadixNode) -> list[RadixNode]:
    """From ``node`` up to below ``above``; empty when ``above`` is not above."""
    path = []
    step: RadixNode | None = node
    while step is not above:
        if step is None:
            return []
        path.append(step)
        step = step.parent
    return path


def too_few(tokens: Tokens, start_tokens: int, needed_tokens: int) -> ValueError:
    """Why so many pages cannot join the tree."""
    return ValueError(
        f"the pages from token {start_tokens} on need {needed_tokens} tokens, "
        f"{len(tokens) // ID_BYTES} came: name as many pages as there are whole pages of tokens"
    )
