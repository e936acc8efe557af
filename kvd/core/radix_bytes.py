"""Comparisons of token and page sequences, where one memcmp does not say enough.

What must not live here: nodes. These are the only places of the index that need numpy.
"""

from __future__ import annotations

import numpy as np

from kvd.types import ID_BYTES, Pages, Tokens

FIRST_SPAN_BYTES = 2048
"""How far the search for a divergence looks at first; doubled while it finds none."""


def shared_bytes(edge: Tokens, tokens: Tokens, pos: int, end: int) -> int:
    """How much of ``edge`` equals ``tokens[pos:end]`` from its start, in bytes of whole tokens."""
    limit = min(len(edge), end - pos)
    low, span = 0, FIRST_SPAN_BYTES
    while low < limit:
        high = min(low + span, limit)
        if not tokens.startswith(edge[low:high], pos + low):
            size = (high - low) // ID_BYTES
            ours = np.frombuffer(edge, "<i4", size, low)
            theirs = np.frombuffer(tokens, "<i4", size, pos + low)
            return low + int((ours != theirs).argmax()) * ID_BYTES
        low, span = high, 2 * span
    return limit


def outdone_pages(mine: Pages, tree: Pages) -> tuple[Pages, Pages]:
    """The pages of ``mine`` that lose to the tree's, and the stretch as the tree has it.

    A page that is the same on both sides (its owner repeats what it gave before) is not among the
    losers: freeing it would free a cached page.

    Args:
        mine: The caller's pages for the whole stretch.
        tree: The tree's pages for the first part of it.
    """
    first = np.frombuffer(mine[: len(tree)], "<i4")
    losers = first[first != np.frombuffer(tree, "<i4")]
    return Pages(losers.tobytes()), Pages(tree + mine[len(tree) :])
