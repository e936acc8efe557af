"""Which sizes of pages are right, and why: the one place that says it.

A page is the unit of allocation, of matching and of transfer. Its size is judged by whoever takes
one from outside (configuration, command line, demo, a peer's fingerprint, an attention kernel), and
each of them asks here, so that what one accepts the others can hold.

    any page                 1 to 65536 tokens
    page of a companion      divides the page of matching: page ``p`` owns ``p*k .. p*k+k-1``
    page of a peer           equal, or one a whole multiple of the other: then only the node with
                             the larger ones sends, and into host memory (``peers.compatibility``)
    with a sliding window    at least 2: the tail begins at the border of a page
    device buffer            holds whole pages, which are what is copied into it
    second flash-attn        whole multiples of 256: how its kernel walks a block table

Each ``..._flaw`` gives the reason in words that follow "must" or "because"; None where all is well.
"""

from __future__ import annotations

from typing import Final

LEAST_PAGE_TOKENS: Final = 1
MOST_PAGE_TOKENS: Final = 65536
"""Of one page: prompts hardly ever share longer pieces, and a piece is sent whole."""

LEAST_SLIDING_TOKENS: Final = 2
KERNEL_PAGE_TOKENS: Final = 256


def pages_in(large: int, small: int) -> int | None:
    """How many pages of ``small`` tokens one of ``large`` holds; None where that is no number."""
    if small < LEAST_PAGE_TOKENS or large % small:
        return None
    return large // small


def companion_flaw(page: int, companion: int) -> str | None:
    """Why a component with pages of ``companion`` tokens cannot go in lockstep."""
    if pages_in(page, companion) is not None:
        return None
    return f"pages of {page} tokens are no whole number of pages of {companion}"


def buffer_flaw(page: int, buffer_tokens: int) -> str | None:
    """Why a device buffer of so many tokens cannot be filled page by page."""
    if pages_in(buffer_tokens, page) is not None:
        return None
    return f"{buffer_tokens} tokens are none of {page} each"


def window_flaw(page: int) -> str | None:
    """Why layers with a window cannot have pages of that size."""
    if page >= LEAST_SLIDING_TOKENS:
        return None
    # ``tail`` floors to pages: with pages of one token every token keeps its window page for ever.
    return (
        "single tokens have no page boundary for the window's tail to begin at, so the sliding "
        "layers would be charged in full, like the others"
    )


def kernel_flaw(page: int) -> str | None:
    """Why an attention kernel of the second generation cannot read pages of that size."""
    if page % KERNEL_PAGE_TOKENS == 0:
        return None
    return f"page_size {page} is no multiple of {KERNEL_PAGE_TOKENS}"
