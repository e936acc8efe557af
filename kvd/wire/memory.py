"""How pool memory is described to whoever maps it: by offset and strides, never by assumption."""

from __future__ import annotations

import msgspec


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one layer as a strided view ``(pages, *page_shape)`` of a component's bytes.

    ``part`` is ``k``, ``v``, ``latent``, ``raw`` (bytes that are not told apart) or the name of a
    tensor of a state; inside a page the elements are contiguous.
    """

    layer: int
    part: str
    dtype: str
    offset_bytes: int
    page_stride_bytes: int
    page_shape: tuple[int, ...]


class ShardPlace(msgspec.Struct, frozen=True, array_like=True):
    """Layers ``[first_layer, end_layer)`` and heads ``[first_head, end_head)`` of the model."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class ComponentMemory(msgspec.Struct, frozen=True):
    """One component's bytes: the memory descriptor passed beside this holds them from offset 0.

    A sharded component has ``shards``, each with a descriptor of its own, in this order; pages,
    bytes and tensors are those of any of them, for all are alike. Without, there is one.

    ``tier`` is ``device``, ``host`` or ``nowhere`` (no bytes and no descriptor); ``extent`` is
    ``whole``, ``tail``, ``per-request`` or ``buffer``, with the window or the buffer of a request
    in ``extent_tokens``. The pages of a ``whole`` one after the first follow from the first's.
    """

    name: str
    pages: int
    page_size: int
    page_bytes: int
    total_bytes: int
    tensors: tuple[TensorPlace, ...]
    tier: str = "device"
    extent: str = "whole"
    extent_tokens: int = 0
    shards: tuple[ShardPlace, ...] = ()


class DeviceMemory(msgspec.Struct, frozen=True):
    """Memory of one shard of a component that lies on a device: no descriptor is passed for it.

    ``handle`` opens it (cudaIpcOpenMemHandle) on the device whose PCI bus id is ``bus_id``, which
    every process knows by a number of its own. It ends with the daemon that passed it.
    """

    pool: str
    component: str
    shard: int
    bus_id: str
    handle: bytes


class PoolMemory(msgspec.Struct, frozen=True):
    """One pool as an engine sees it.

    Descriptors are passed in the order of ``components``, and of those alone that have bytes in
    host memory: for each shard of a component one, shard 0 first, before those of the next one.
    ``interior`` is ``nhd``, ``hnd`` or ``opaque``, as ``tensors`` have it; ``tag`` says who packs
    the pages.
    """

    name: str
    family: str
    order: str
    match_page_tokens: int
    components: tuple[ComponentMemory, ...]
    interior: str = "nhd"
    tag: str = ""
