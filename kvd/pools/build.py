"""From the specification of a pool to its memory, and to the description that engines get."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from kvd.core.geometry import Geometry, geometry
from kvd.core.spec import Component, Device, Host, Nowhere, PoolSpec, saved_region
from kvd.pools.arena import Arena, NotReserved, check_free, reserve
from kvd.wire.memory import ComponentMemory, PoolMemory

if TYPE_CHECKING:
    from collections.abc import Iterable


class Placed(msgspec.Struct, frozen=True):
    """One component with bytes: where its pages lie in which arena, from offset 0.

    ``is_pool``: engines map it and peers write into it. The saved area of a component is neither:
    the transfer process alone touches it.
    """

    name: str
    geometry: Geometry
    arena: Arena
    is_pool: bool = True


def build_pool(spec: PoolSpec) -> list[Placed]:
    """Reserve the memory of every component that has any, in the order of the specification.

    The saved areas come after all of them.

    Raises:
        NotReserved: not enough memory, or memory of a kind that is not here; nothing stays taken.
    """
    shapes = {
        component.name: geometry(component, pages=pages, order=spec.order)
        for component, pages in _with_bytes(spec)
    }
    saved = {
        saved_region(component): geometry(component, pages=spec.saved_pages, order=spec.order)
        for component, _ in _with_bytes(spec)
        if spec.saved_pages
    }
    shapes |= saved
    check_free({name: shape.total_bytes for name, shape in shapes.items()})
    placed: list[Placed] = []
    with contextlib.ExitStack() as undo:
        for name, shape in shapes.items():
            arena = reserve(f"{spec.name}.{name}", shape.total_bytes)
            undo.callback(arena.close)
            placed.append(Placed(name, shape, arena, is_pool=name not in saved))
        undo.pop_all()
    return placed


def pool_memory(spec: PoolSpec) -> PoolMemory:
    """The pool as an engine sees it; components without bytes have no tensors and no descriptor."""
    return PoolMemory(
        name=spec.name,
        family=spec.family,
        order=spec.order.value,
        match_page_tokens=spec.match_page_tokens,
        components=tuple(
            _component_memory(component, pages, spec)
            for component, pages in zip(spec.components, spec.pages, strict=True)
        ),
    )


def _component_memory(component: Component, pages: int, spec: PoolSpec) -> ComponentMemory:
    match component.tier:
        case Nowhere():
            return ComponentMemory(component.name, pages, component.page_size, 0, 0, ())
        case Device() | Host():
            shape = geometry(component, pages=pages, order=spec.order)
            return ComponentMemory(
                name=component.name,
                pages=pages,
                page_size=component.page_size,
                page_bytes=shape.page_bytes,
                total_bytes=shape.total_bytes,
                tensors=shape.tensors,
            )


def _with_bytes(spec: PoolSpec) -> Iterable[tuple[Component, int]]:
    """The components that own memory of this host."""
    for component, pages in zip(spec.components, spec.pages, strict=True):
        match component.tier:
            case Nowhere():
                continue
            case Device(name) if name != "cpu":
                raise NotReserved(
                    f"component {component.name} of pool {spec.name} lies on {name}, and this "
                    "version reserves host memory only: set pool.device = 'cpu'"
                )
            case Device() | Host():
                yield component, pages
