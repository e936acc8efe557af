"""How the memory of a pool is divided between its components, and what a request takes of them.

Closed forms only. With ``n`` pages of kv and ``b`` pages of the other budget (windows, states) for
a typical request, ``size`` bytes are divided so that both run out together::

    kv pages = size * n / (kv_page_bytes * n + beside_page_bytes * b)

A page of kv is paid with its companions, and in every shard of the node. Every count includes the
null page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvd.core.components.tail import most_pages
from kvd.core.layout.page_sizes import pages_in
from kvd.core.layout.spec import Buffer, Component, PerRequest, Tail, Whole, page_bytes
from kvd.families.keys import MAX_PAGES
from kvd.families.sharding import shard_count

if TYPE_CHECKING:
    from kvd.families.keys import PoolSection

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([0-9]{1,12}) ?(KiB|MiB|GiB|TiB)")

USUAL_STATES = 2
"""Of one request: its own, and one that the cache keeps of its prompt."""
USUAL_SAVED_SHARE = 8
"""A pool that runs full retracts a few of its leases at a time, not a half of them."""
USUAL_SAVED_BYTES = 2**30
"""At most, unless asked for: memory is reserved at the start, which takes a second per GiB."""


def size_bytes(size: str) -> int | None:
    """Bytes of ``256MiB``; None if it is not written so."""
    match = _SIZE.fullmatch(size)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def factor(kv: Component, component: Component) -> int:
    """Pages of a companion that belong to one page of kv; 0 for what is no companion."""
    if not isinstance(component.extent, Whole):
        return 0
    return pages_in(kv.page_size, component.page_size) or 0


def block_bytes(parts: tuple[Component, ...], shards: int = 1) -> int:
    """Bytes of one page of kv with its companions, in all shards together."""
    kv = parts[0]
    one_shard = page_bytes(kv) + sum(factor(kv, part) * page_bytes(part) for part in parts[1:])
    return shards * one_shard


def beside(parts: tuple[Component, ...]) -> Component | None:
    """The one component that has a budget of its own beside kv, if the family has one."""
    return next((part for part in parts[1:] if not isinstance(part.extent, Whole)), None)


def pages_of_request(component: Component, tokens: int) -> int:
    """The most pages of ``component`` that a request of ``tokens`` holds at a time."""
    pages = -(-tokens // component.page_size)
    match component.extent:
        case Whole():
            return pages
        case Tail(window_tokens):
            return min(pages, window_pages(component, window_tokens))
        case Buffer(buffer_tokens):
            return min(pages, -(-buffer_tokens // component.page_size))
        case PerRequest():
            return USUAL_STATES


def window_pages(component: Component, window_tokens: int) -> int:
    """Pages of a window that slides page by page: its length, the boundary, and one ahead.

    Pages of one token never slide: there it is more than there can be.
    """
    return most_pages(window_tokens, component.page_size, component.page_size)


def least_pages(component: Component) -> int:
    """Pages without which not one request can run, the null page included."""
    match component.extent:
        case Tail(window_tokens):
            return window_pages(component, window_tokens) + 1
        case Buffer(buffer_tokens):
            return -(-buffer_tokens // component.page_size) + 1
        case Whole() | PerRequest():
            return 2


def page_counts(parts: tuple[Component, ...], divided: tuple[int, int]) -> tuple[int, ...]:
    """Pages of each component, parallel to ``parts``; less than 2 where memory is too short.

    ``divided``: pages of kv, and of what has a budget beside it.
    """
    first, second = divided
    kinds = [factor(parts[0], part) for part in parts]
    return tuple([first * k if k else second for k in kinds])


def one_budget(pool: PoolSection, parts: tuple[Component, ...]) -> tuple[int, int]:
    """All memory is for kv and what goes in lockstep with it."""
    if pool.pages is not None:
        return pool.pages, 0
    return pool_bytes(pool) // block_bytes(parts, shard_count(pool)), 0


def two_budgets(
    pool: PoolSection, parts: tuple[Component, ...], given: int | None
) -> tuple[int, int]:
    """Kv and what is beside it run out together; ``given`` pages of the latter, where not None."""
    other = parts[-1]
    n = pages_of_request(parts[0], pool.typical_tokens)
    b = pages_of_request(other, pool.typical_tokens)
    if pool.pages is not None:
        return pool.pages, max(b + 1, -(-pool.pages * b // n)) if given is None else given
    size, block, each = pool_bytes(pool), block_bytes(parts, shard_count(pool)), page_bytes(other)
    if given is not None:
        return max(0, size - given * each) // block, given
    # Floored in integers: a page too many would be memory that is not there.
    first = size * n // (block * n + each * b)
    second, least = (size - first * block) // each, least_pages(other)
    if second < least:  # the memory is less than one typical request takes
        first, second = max(0, size - least * each) // block, least
    return first, second


def pool_bytes(pool: PoolSection) -> int:
    """What ``pool.size`` says; 0 where it says nothing."""
    return size_bytes(pool.size or "") or 0


def _one_lease(component: Component) -> int:
    """Pages that one lease has of it at most, once it has slid along its prompt."""
    match component.extent:
        case Tail(window):
            return most_pages(window, 0, component.page_size)
        case _:
            return 1


def saved_counts(
    pool: PoolSection, parts: tuple[Component, ...], counts: tuple[int, ...]
) -> tuple[int, ...]:
    """Pages of host memory for retracted leases, parallel to ``parts``, null pages included.

    Each component gets the same share of its pages, a buffer none; but of windows and states at
    least what one lease has, or none could ever be saved. All are 0 where that leaves one of them
    no more than its null page.
    """
    total = shard_count(pool) * sum(
        page_bytes(part) * count
        for part, count in zip(parts, counts, strict=True)
        if not isinstance(part.extent, Buffer)
    )
    size = size_bytes(pool.saved_size) if pool.saved_size is not None else None
    if size is None:
        size = min(total // USUAL_SAVED_SHARE, USUAL_SAVED_BYTES)
    first = min(size * counts[0] // total if total else 0, MAX_PAGES)
    saved = []
    for part, count in zip(parts, counts, strict=True):
        if isinstance(part.extent, Buffer):
            saved.append(0)
        elif k := factor(parts[0], part):
            saved.append(first * k)
        else:
            share = min(size * count // total, MAX_PAGES)
            saved.append(max(share, min(count, _one_lease(part) + 1)) if size else 0)
    is_useful = all(
        count > 1
        for part, count in zip(parts, saved, strict=True)
        if not isinstance(part.extent, Buffer)
    )
    return tuple(saved) if is_useful else (0,) * len(parts)
