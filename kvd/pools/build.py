"""From the specification of a pool to its memory, and to the description that engines get."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from kvd.core.layout.geometry import Geometry, geometry, shard_places
from kvd.core.layout.spec import (
    Buffer,
    Component,
    PoolSpec,
    device_number,
    extent_tokens,
    has_bytes,
    kind,
    region_names,
    saved_region,
)
from kvd.pools.arena import Arena, reserve, round_up
from kvd.wire.memory import ComponentMemory, PoolMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class PoolRegion(msgspec.Struct, frozen=True):
    """One shard of a component with bytes, and in which memory its pages lie, from offset 0.

    ``is_pool``: engines map it. ``is_registered``: peers write into it. A buffer is mapped and not
    registered; the saved area of a component is neither: the transfer process alone touches it.
    """

    name: str
    geometry: Geometry
    is_pool: bool
    is_registered: bool
    device: int | None = None
    """The number of the CUDA device that it lies on: the transfer process allocates that memory,
    which ends with it. None: it is host memory."""
    arena: Arena | None = None
    """Its host memory, once there is any."""
    meets_device: bool = False
    """Whether it is host memory whose pages are copied to a region on a device, or from one."""


def reserve_all(
    spec: PoolSpec, wanted: list[PoolRegion], advance: Callable[[int], None]
) -> list[PoolRegion]:
    """Reserve a sealed memfd for each region of host memory, as ``reserve`` does.

    Raises:
        NotReserved: not enough memory; nothing stays taken.
    """
    placed: list[PoolRegion] = []
    with contextlib.ExitStack() as undo:
        for region in wanted:
            arena = None
            if region.device is None:
                arena = reserve(f"{spec.name}.{region.name}", region.geometry.total_bytes, advance)
                undo.callback(arena.close)
            placed.append(msgspec.structs.replace(region, arena=arena))
        undo.pop_all()
    return placed


def reserved_bytes(spec: PoolSpec) -> dict[str, int]:
    """What such a pool reserves of this host's memory, by region."""
    return sizes([*pool_regions(spec), *saved_regions(spec)])


def device_bytes(spec: PoolSpec) -> dict[int, int]:
    """What the pool takes of each device, by its number."""
    taken: dict[int, int] = {}
    for region in pool_regions(spec):
        if region.device is not None:
            size = round_up(region.geometry.total_bytes)
            taken[region.device] = taken.get(region.device, 0) + size
    return taken


def sizes(wanted: list[PoolRegion]) -> dict[str, int]:
    """Bytes of each region of host memory by its name."""
    return {region.name: region.geometry.total_bytes for region in wanted if region.device is None}


def pool_regions(spec: PoolSpec) -> Iterator[PoolRegion]:
    """What engines map, component by component, and of each shard by shard."""
    # What is fetched into a buffer are pages of the first component.
    buffers = [one for one in spec.components if isinstance(one.extent, Buffer)]
    is_fetched = any(device_number(one) is not None for one in buffers)
    for number, (component, pages) in enumerate(zip(spec.components, spec.pages, strict=True)):
        if has_bytes(component):
            shape = geometry(component, pages=pages, order=spec.order)
            is_own = isinstance(component.extent, Buffer)
            for shard, name in enumerate(region_names(spec, component.name)):
                device = device_number(component, shard)
                yield PoolRegion(
                    name,
                    shape,
                    is_pool=True,
                    is_registered=not is_own,
                    device=device,
                    meets_device=is_fetched and not number and device is None,
                )


def saved_regions(spec: PoolSpec) -> Iterator[PoolRegion]:
    """What is beside the pool for retracted leases."""
    for component, pages in zip(spec.components, spec.saved_pages, strict=True):
        if has_bytes(component) and pages:
            shape = geometry(component, pages=pages, order=spec.order)
            for shard, name in enumerate(region_names(spec, saved_region(component))):
                yield PoolRegion(
                    name,
                    shape,
                    is_pool=False,
                    is_registered=False,
                    meets_device=device_number(component, shard) is not None,
                )


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
        interior=spec.components[0].interior.value,
        tag=spec.tag,
    )


def _component_memory(component: Component, pages: int, spec: PoolSpec) -> ComponentMemory:
    shape = None
    if has_bytes(component):
        shape = geometry(component, pages=pages, order=spec.order)
    return ComponentMemory(
        name=component.name,
        pages=pages,
        page_size=component.page_size,
        page_bytes=shape.page_bytes if shape else 0,
        total_bytes=shape.total_bytes if shape else 0,
        tensors=shape.tensors if shape else (),
        tier=kind(component.tier),
        extent=kind(component.extent),
        extent_tokens=extent_tokens(component),
        shards=shard_places(spec),
    )
