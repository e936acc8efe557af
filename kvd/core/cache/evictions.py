"""What has left the tree lately, so that whoever misses it can be told why.

What must not live here: which node goes first (``eviction``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_intdigest

from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.radix_node import RadixNode


SLOTS = 2**16
"""64 KiB: ten minutes of a node that evicts a hundred nodes a second."""

NEW = "new"
EVICTED = "evicted"
BESIDE = "beside"
"""The tokens are cached, but a component beside the first has nothing there to go on from."""

_PLACE = SLOTS - 1
_TAG_SHIFT = 56


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictedFilter:
    """What has left the tree lately, so that a lease can say why its prompt is not there.

    A fixed table of one-byte marks, by the low bits of their hash, the newest in its place; the
    high byte is what is kept, 0 is none. No objects, so it costs the collector nothing and a freeze
    a copy. A mark is of the first page of a node that was evicted or flushed: its namespace, where
    it begins, its tokens. Whole nodes leave, and the match of a prompt ends where the node began,
    so the first page that a lease misses is the one to look up.

    It may be wrong both ways, and is for the eye and for counters: a prompt with other tokens
    before an equal page has the same mark, one in 255 others has by chance, marks are overwritten,
    and a prompt that is cut anew inside of what has left has none.
    """

    __slots__ = ("_is_single", "_marks")

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        """Whether nothing is beside the first component."""
        self._marks = bytearray(SLOTS)

    def left(self, nodes: Iterable[RadixNode]) -> None:
        """These nodes have left the tree; they still know what was above them."""
        marks, hashed = self._marks, xxh3_64_intdigest
        for node in nodes:
            parent = node.parent
            # A root has no tokens of its own to be missed by.
            if parent is None:
                continue
            root = parent
            while root.parent is not None:
                root = root.parent
            start_tokens = parent.end_tokens
            mark = hashed(node.key, hashed(root.key, start_tokens) if root.key else start_tokens)
            marks[mark & _PLACE] = mark >> _TAG_SHIFT or 1

    def why_missed(
        self, tokens: Tokens, root: RadixNode, anchor: RadixNode, page_tokens: int
    ) -> str:
        """Why nothing of the prompt is found behind ``anchor``, of which a page misses."""
        start_tokens = anchor.end_tokens
        start = start_tokens * ID_BYTES
        page = tokens[start : start + page_tokens * ID_BYTES]
        named = xxh3_64_intdigest(root.key, start_tokens) if root.key else start_tokens
        mark = xxh3_64_intdigest(page, named)
        if self._marks[mark & _PLACE] == (mark >> _TAG_SHIFT or 1):
            return EVICTED
        return NEW if self._is_single or page not in anchor.children else BESIDE
