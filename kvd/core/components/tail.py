"""Sliding windows in tokens: which tail of a prompt has window pages, and when a page is behind.

A layer with a window of ``W`` looks at no token further back than ``W``. So a sequence needs window
pages only for a tail of it. How long that tail is depends on what becomes of it: a tail that will
be cached ends on a page boundary then, up to a page before the last token, and shall still have
one window before that end. ``cached`` says whether it will be::

    tokens   0 ............ start ............. floor(end) .. end
             | no window pages | window pages, page aligned     |
                               '--- at least W ---'

The formulas are those of SGLang's tail allocation: ``seq - window`` floored to a page without a
prefix cache, ``seq - 1 - max(window, page)`` floored with one. Where the window is no multiple of
the page, the cached end of a received tail may lack up to a page of the ``span`` that somebody who
computes from there needs; a further receive needs none. With pages of one token nothing can be
floored, and every token has a window page, cached ones too.
"""

from __future__ import annotations

import sys


def tail_start(prompt_tokens: int, window: int, page: int, *, cached: bool) -> int:
    """First token of a prompt that has window pages; a multiple of the page."""
    if page == 1:
        return 0
    behind = prompt_tokens - 1 - max(window, page) if cached else prompt_tokens - window
    return max(0, behind) // page * page


def span(window: int, page: int) -> int:
    """Tokens before a page boundary that must be live for a sequence to go on from there.

    With pages of one token it is all of them, however many they are: as many are sent on.
    """
    if page == 1:
        return sys.maxsize
    return -(-max(window, page) // page) * page


def slid_start(upto_tokens: int, window: int, page: int, *, cached: bool) -> int:
    """First token that still needs its window page when ``upto_tokens`` is computed next.

    Never beyond ``tail_start`` of a prompt of so many tokens, so a prompt that was computed while
    sliding still has the tail that is to be sent.
    """
    if page == 1:
        return 0
    behind = upto_tokens - 1 - span(window, page) if cached else upto_tokens - window
    return max(0, behind) // page * page


def most_pages(window: int, step_tokens: int, page: int) -> int:
    """Window pages that are ever needed at once by who computes ``step_tokens`` between slides."""
    return -(-(span(window, page) + step_tokens) // page) + 1
