"""The pages of every component as a table: by state, how full, and what windows and buffers save.

A row is a component with page ids of its own; what is in lockstep with it is said below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvd.cli.sheet import TextTable, nothing
from kvd.core.layout.shards import span
from kvd.text import amount, bar, clean, counted

if TYPE_CHECKING:
    from kvd.wire.snapshot import BufferState, CompanionState, PoolState, WindowState

_PLACES = {"host": " in host memory"}
"""What is said of a tier; most pages are on the device, and that goes without saying."""


def table(states: tuple[PoolState, ...]) -> RenderableType:
    """Pages by state; the last column says whether they add up to the total (I1)."""
    if not states:
        return nothing("pools")
    out = TextTable(
        *("POOL", "TOTAL>", "FREE>", "HELD>", "CACHED>", "LOCKED>", "EVICTABLE>", "QUAR>", "SUM"),
    )
    for one in states:
        counts = (
            one.total_pages,
            one.free_pages,
            one.held_pages,
            one.cached_pages,
            one.locked_pages,
            one.evictable_pages,
            one.quarantined_pages,
        )
        out.row(
            f"{one.pool}/{one.component}",
            *(str(count) for count in counts),
            sum_check(one),
            prose="\n".join(_prose(one)),
        )
    if len(states) == 1 and not states[0].companions:
        return out
    return Group(out, Text(_total(states), "dim"))


def _prose(one: PoolState) -> list[str]:
    cells = bar(
        held=one.held_pages,
        cached=one.cached_pages,
        quarantined=one.quarantined_pages,
        total=one.total_pages,
        width=32,
    )
    lines = [f"[{cells}] {_page(one)}"]
    if one.shards:
        lines.append(_shards(one))
    lines += [_companion(beside) for beside in one.companions]
    if one.window is not None:
        lines.append(_window(one.window))
    if one.buffer is not None:
        lines.append(_buffer(one.buffer))
    if one.saved_capacity_pages and one.page_bytes:
        lines.append(_saved_area(one))
    return lines


def _page(one: PoolState) -> str:
    """What a page is and where; where pages are only counted, that they hold nothing."""
    if one.page_bytes:
        what = "one state" if one.extent == "per-request" else f"{one.page_size} tokens"
        return f"{what}, {amount(one.page_bytes)} a page{_PLACES.get(one.tier, '')}"
    counted = f"{(one.total_pages - 1) * one.page_size} tokens are counted, no byte is held"
    if not one.placeholder_bytes:
        return counted
    return f"{counted}; a placeholder of one page has {amount(one.placeholder_bytes)}"


def _shards(one: PoolState) -> str:
    """Of which layers and heads of the model the shards are, and what a page takes in each."""
    n_shards, first = len(one.shards), one.shards[0]
    heads = list(dict.fromkeys((shard.first_head, shard.end_head) for shard in one.shards))
    said = " | ".join(span("head", *each) for each in heads)
    copies = f", {n_shards // len(heads)} of each" if n_shards > len(heads) else ""
    layers = span("layer", first.first_layer, first.end_layer)
    each = amount(one.page_bytes // n_shards)
    return f"{counted(n_shards, 'shard')} of {each} a page: {layers} of {said}{copies}"


def _companion(one: CompanionState) -> str:
    each = "1 page" if one.pages_each == 1 else f"{one.pages_each} pages"
    return (
        f"with {one.component}: {each} of {one.page_size} tokens for each, "
        f"{amount(one.page_bytes)} a page{_PLACES.get(one.tier, '')}"
    )


def _window(one: WindowState) -> str:
    """What is mapped now, against a page for every token."""
    of = f" ({100 * one.mapped_pages / one.full_pages:.0f} %)" if one.full_pages else ""
    return (
        f"window of {one.window_tokens} tokens: {one.mapped_pages} pages mapped, "
        f"{one.full_pages} with full allocation{of}; {one.slides} slides"
    )


def _buffer(one: BufferState) -> str:
    """How often a page was there when it was wanted."""
    wanted = one.hits + one.misses
    of = f" ({100 * one.hits / wanted:.1f} % were there)" if wanted else ""
    return (
        f"at most {one.request_tokens} tokens of a request; {one.hits} hits, {one.misses} misses"
        f"{of}, {amount(one.copied_bytes)} copied"
    )


def _saved_area(one: PoolState) -> str:
    """The host memory beside the pool."""
    kept = amount(one.saved_pages * _whole_bytes(one))
    return (
        f"saved area: {one.saved_pages} of {one.saved_capacity_pages} pages hold {kept} of "
        "retracted leases"
    )


def _total(states: tuple[PoolState, ...]) -> str:
    """All components in bytes; a companion's go with the pages that they belong to."""
    bytes_each = [_whole_bytes(one) for one in states]
    sums = {
        "": [one.total_pages for one in states],
        " free": [one.free_pages for one in states],
        " held": [one.held_pages for one in states],
        " cached": [one.cached_pages for one in states],
        " quarantined": [one.quarantined_pages for one in states],
    }
    said = [
        f"{amount(sum(map(int.__mul__, pages, bytes_each)))}{name}" for name, pages in sums.items()
    ]
    names = [name for one in states for name in (one.component, *_names(one.companions))]
    return f"total of {clean(', '.join(names))}: {said[0]}; {', '.join(said[1:])}"


def _whole_bytes(one: PoolState) -> int:
    """Of a page and of what is in lockstep with it."""
    return one.page_bytes + sum(each.pages_each * each.page_bytes for each in one.companions)


def _names(companions: tuple[CompanionState, ...]) -> list[str]:
    return [one.component for one in companions]


def sum_check(one: PoolState) -> Text:
    """Whether null, free, held, cached and quarantined pages make the total."""
    found = 1 + one.free_pages + one.held_pages + one.cached_pages + one.quarantined_pages
    found += one.condemned_pages
    if found == one.total_pages:
        if one.condemned_pages:
            return Text(f"ok, {one.condemned_pages} condemned", style="yellow")
        return Text("ok", style="green")
    return Text(f"WRONG: {found} of {one.total_pages}; kvd audit", style="bold red")
