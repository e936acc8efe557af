"""What engines write to the rows of every component of a pool, and whether it is still there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.layout.spec import (
    Buffer,
    Component,
    PerRequest,
    PoolSpec,
    Tail,
    companion_factor,
    companion_pages,
    is_companion,
)
from kvd.types import Pages, Tokens, count, page_ids
from tests.core.side import content

if TYPE_CHECKING:
    from tests.core.side import Side


def rows_of(spec: PoolSpec, rows: tuple[bytes, ...]) -> list[tuple[Component, Pages]]:
    """Each component with a row, from what an answer names; those in lockstep follow from kv."""
    beside = list(rows[1:])
    found = [(spec.components[0], Pages(rows[0]))]
    for component in spec.components[1:]:
        if is_companion(spec, component):
            row = companion_pages(Pages(rows[0]), companion_factor(spec, component))
        else:
            row = Pages(beside.pop(0))
        if not isinstance(component.extent, Buffer):
            found.append((component, row))
    return found


def touched(component: Component, row: Pages, end: int, start: int) -> list[tuple[int, int]]:
    """Pages that tokens ``[start, end)`` are written to, and up to which token each is."""
    if isinstance(component.extent, PerRequest):
        return [(page_ids(row)[1], end)]
    size = component.page_size
    return [
        (page, min((k + 1) * size, end))
        for k, page in enumerate(page_ids(row))
        if page and k * size < end and (k + 1) * size > start
    ]


def what(component: Component, toks: Tokens, upto_tokens: int, namespace: str = "") -> str:
    """What a page of that component holds that ends, or is filled, at that token."""
    return f"{component.name} {content(toks, namespace, upto_tokens)}"


def write(
    side: Side, rows: tuple[bytes, ...], toks: Tokens, namespace: str = "", *, start: int = 0
) -> None:
    """The engine computes tokens ``[start, end)`` of every component."""
    for component, row in rows_of(side.config.spec, rows):
        memory = side.memory_of(component.name)
        for page, upto in touched(component, row, count(toks), start):
            memory[page] = what(component, toks, upto, namespace)


def lost(
    side: Side,
    rows: tuple[bytes, ...],
    toks: Tokens,
    namespace: str = "",
    *,
    but: tuple[str, ...] = (),
) -> str:
    """The first component whose pages do not hold exactly these tokens; empty: all do."""
    for component, row in rows_of(side.config.spec, rows):
        memory = side.memory_of(component.name)
        for page, upto in touched(component, row, count(toks), 0):
            if component.name not in but and memory.get(page) != what(
                component, toks, upto, namespace
            ):
                return f"{component.name} page {page} up to token {upto}: {memory.get(page)}"
    return ""


def mapped(side: Side, rows: tuple[bytes, ...]) -> int:
    """How many window pages a row has."""
    return sum(
        page > 0
        for component, row in rows_of(side.config.spec, rows)
        if isinstance(component.extent, Tail)
        for page in page_ids(row)
    )
