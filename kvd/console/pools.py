"""The view of the pools: the pages of each component by state, and who keeps the most of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.console.view import Field, View
from kvd.core.inspect.snapshot import pool_states
from kvd.types import NULL_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.wire.console import Query
    from kvd.wire.snapshot import PoolState

NULL_PAGES = NULL_PAGE + 1


class PoolRow:
    """One component with page ids of its own, and how many requests wait for it."""

    __slots__ = ("headroom", "state", "waiting")

    def __init__(self, state: PoolState, headroom: int, waiting: int) -> None:
        self.state = state
        self.headroom = headroom
        self.waiting = waiting


def _pools(context: Context, _: Query) -> Iterator[PoolRow]:
    """One look at all leases, and at the queue."""
    node = context.node
    waiting = Counter(waiter.budget for waiter in node.admission.queue if waiter.missing_pages)
    for state in pool_states(node):
        headroom = node.leases.budgets.headroom(state.component)
        yield PoolRow(state, headroom, waiting[state.component])


def _state(_: Context, one: PoolRow) -> str:
    """The gravest that is so."""
    pool = one.state
    known = pool.free_pages + pool.held_pages + pool.cached_pages + pool.quarantined_pages
    known += pool.condemned_pages
    if known + NULL_PAGES != pool.total_pages:
        return "does not add up"
    if pool.condemned_pages:
        return f"{pool.condemned_pages} condemned"
    if one.waiting:
        return "short"
    if not one.headroom:
        return "full"
    return "quarantined" if pool.quarantined_pages else "ok"


def _evicted(context: Context, one: PoolRow) -> int | None:
    """Only those of the first component are counted."""
    table = context.node.leases
    return table.evicted_pages if one.state.component == table.pool.name else None


def _companions(_: Context, one: PoolRow) -> str:
    return ", ".join(
        f"{other.component} ({other.pages_each} for each page)" for other in one.state.companions
    )


def _window(_: Context, one: PoolRow) -> str:
    window = one.state.window
    if window is None:
        return ""
    return (
        f"{window.window_tokens} tokens, {window.mapped_pages} of {window.full_pages} pages "
        f"mapped, {window.slides} slides"
    )


def _buffer(_: Context, one: PoolRow) -> str:
    buffer = one.state.buffer
    if buffer is None:
        return ""
    return f"{buffer.request_tokens} tokens a request, {buffer.hits} hits, {buffer.misses} misses"


POOLS: View[PoolRow] = View(
    "pools",
    (
        Field("component", "text", lambda _, one: one.state.component),
        Field("tier", "text", lambda _, one: one.state.tier),
        Field("extent", "text", lambda _, one: one.state.extent),
        Field("state", "state", _state),
        Field("total", "pages", lambda _, one: one.state.total_pages),
        Field("free", "pages", lambda _, one: one.state.free_pages),
        Field("held", "pages", lambda _, one: one.state.held_pages),
        Field("cached", "pages", lambda _, one: one.state.cached_pages),
        Field("quarantined", "pages", lambda _, one: one.state.quarantined_pages),
        Field("locked", "pages", lambda _, one: one.state.locked_pages, "cached, and in use"),
        Field("evictable", "pages", lambda _, one: one.state.evictable_pages, "cached, not in use"),
        Field("headroom", "pages", lambda _, one: one.headroom, "to be had now: free or evictable"),
        Field("waiting", "count", lambda _, one: one.waiting, "requests that lack pages of it"),
        Field("saved", "pages", lambda _, one: one.state.saved_pages, "of retracted leases"),
        Field("saved_capacity", "pages", lambda _, one: one.state.saved_capacity_pages),
        Field("page_size", "tokens", lambda _, one: one.state.page_size),
        Field("page_bytes", "bytes", lambda _, one: one.state.page_bytes),
        Field("evicted", "pages", _evicted, "counter"),
        Field("companions", "text", _companions, "in lockstep with it"),
        Field("window", "text", _window),
        Field("buffer", "text", _buffer),
        Field(
            "held_by",
            "holders",
            lambda context, one: context.biggest.of(context, one.state.component),
            "who keeps the most of it",
        ),
    ),
    objects=_pools,
    key=lambda one: f"pool:{one.state.component}",
)
