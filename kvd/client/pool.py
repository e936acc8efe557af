"""The daemon's pools as this process sees them: described, mapped on first use, viewed as tensors.

torch is loaded by the first view that asks for tensors, not before; ``arrays`` needs none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvd.client.device_mapping import DeviceMapping
from kvd.client.lease_key import LeaseKey
from kvd.client.mapping import Mapping
from kvd.client.rows import Along, ComponentRow
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvd.client.attachment import Attachment
    from kvd.wire.memory import ComponentMemory, PoolMemory, ShardPlace, TensorPlace


WHOLE = "whole"


class Pool:
    """One pool. ``memory`` says what a page holds and where; views are the memory itself."""

    def __init__(
        self, memory: PoolMemory, attachment: Attachment, end: Callable[[], Refusal | None]
    ) -> None:
        """``end``: why the session is over, once it is."""
        self.memory = memory
        self._attachment = attachment
        self._end = end
        self._mappings: dict[tuple[str, int], Mapping | DeviceMapping] = {}
        """By component and shard."""

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.memory.name

    @property
    def page_size(self) -> int:
        """Tokens per page of the first component."""
        return self.memory.components[0].page_size

    @property
    def interior(self) -> str:
        """How a page lies in each layer, as ``pool.interior`` says: it is the shape of views."""
        return self.memory.interior

    @property
    def tag(self) -> str:
        """Who packs the pages, as ``pool.tag`` says; empty where it says nothing."""
        return self.memory.tag

    @property
    def shards(self) -> tuple[ShardPlace, ...]:
        """What of the model each shard of this pool has; empty where one has all of it.

        Shard ``i`` is what ``view(..., shard=i)`` shows. A page has the same id in all of them.
        """
        return self.memory.components[0].shards

    def page_size_of(self, component: str) -> int:
        """Tokens per page of any component; 1 for a state, whose page is one state.

        Raises:
            KvdError: ``bad-request`` when there is no such component.
        """
        return self.component(component).page_size

    def component(self, name: str) -> ComponentMemory:
        """What a component is: pages, page size, tier, extent, window, and where its tensors lie.

        Raises:
            KvdError: ``bad-request`` when there is none of that name; the message names those that
                there are.
        """
        for part in self.memory.components:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.memory.components)
        raise _none(f"pool {self.name} has no component {name!r}; it has {known}")

    def row_of(self, component: str) -> Along | ComponentRow:
        """How the pages that a lease has of this component are known.

        Raises:
            KvdError: ``bad-request`` when there is no such component.
        """
        wanted = self.component(component)
        first = self.memory.components[0]
        if wanted.extent == WHOLE:
            return Along(first.page_size // wanted.page_size)
        beside = [part.name for part in self.memory.components if part.extent != WHOLE]
        return ComponentRow(beside.index(component))

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer of the first component: ``(k, v)``, or ``(latent,)``.

        K and V have the shape (pages, page_size, kv_heads, head_dim); where ``interior`` is
        ``hnd``, (pages, kv_heads, page_size, head_dim). A latent has (pages, page_size, 1,
        latent_dim + rope_dim). Of an ``opaque`` page and of family raw there is one tensor of
        bytes, (pages, bytes of the layer). They share their bytes with the daemon and with every
        other process of this pool. Of a pool in shards they are those of shard 0.

        Raises:
            KvdError: ``bad-request`` when there is no such layer, ``not-supported`` when the
                component has no bytes. As ``view``.
        """
        return self.view(self.memory.components[0].name, layer=layer)

    def view(self, component: str, *, layer: int, shard: int = 0) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer of any component, in the order in which they lie in memory.

        Each has the shape (pages, ...), indexed by the ids of ``lease.pages_of(component)``: K and
        V (and their scales) as in ``layer``; one latent; an index (pages, page_size, heads, dim);
        the tensors of a state, each ``(pages, *its own shape)``, in the order of the configuration.
        Layers are counted from 0 within the shard, as heads are: of which layers and heads of the
        model it is, ``shards`` says.

        Raises:
            KvdError: ``bad-request`` when there is no such component, layer or shard,
                ``not-supported`` when the component has no bytes: the message says why. What ended
                the session, once it is over: no page of the pool is this process's then. Views of
                before stay mapped, for whoever looks at them, and are not to be written.
        """
        return tuple(self.tensors(component, layer=layer, shard=shard).values())

    def tensors(self, component: str, *, layer: int, shard: int = 0) -> dict[str, torch.Tensor]:
        """As ``view``, by name: ``k`` and ``v``, ``latent``, ``raw``, or those of a state.

        Raises:
            KvdError: as ``view``; ``not-supported`` where torch is not installed.
        """
        mapping, places, pages = self._placed(component, layer, shard)
        return {place.part: mapping.tensor(place, pages) for place in places}

    def arrays(
        self, component: str, *, layer: int, shard: int = 0
    ) -> dict[str, NDArray[np.generic]]:
        """As ``tensors``, as numpy arrays of the same memory: for a process without torch.

        numpy has no bfloat16 and no float8: those come as unsigned integers of the same width,
        which are their bits.

        Raises:
            KvdError: as ``view``; ``not-supported`` for a pool on a device.
        """
        mapping, places, pages = self._placed(component, layer, shard)
        return {place.part: mapping.array(place, pages) for place in places}

    def host_memory(self, component: str, shard: int = 0) -> NDArray[np.uint8]:
        """All bytes of a component, as they are mapped here: ``component(...).tensors`` says where.

        Raises:
            KvdError: as ``arrays``.
        """
        mapping, _, _ = self._placed(component, 0, shard)
        if isinstance(mapping, Mapping):
            return mapping.bytes
        why = (
            f"{self.name}.{component} lies on a device, where engines compute in its pages: blocks "
            "of an engine's own are moved to and from pools in host memory; set pool.device to host"
        )
        raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))

    def close(self) -> None:
        """Unmap; repeatable. A later view maps again while the session lasts.

        Raises:
            KvdError: ``wrong-state`` while a view is alive; that component stays mapped.
        """
        for key, mapping in list(self._mappings.items()):
            mapping.close()
            del self._mappings[key]

    def _placed(
        self, component: str, layer: int, shard: int
    ) -> tuple[Mapping | DeviceMapping, list[TensorPlace], int]:
        """Where the tensors of a layer lie, in what, and in how many pages."""
        self._attachment.require_open()
        end = self._end()
        if end is not None:
            raise KvdError(end)
        part = self.component(component)
        if not part.total_bytes:
            raise self._has_no_bytes(part)
        n_shards = max(1, len(part.shards))
        if not 0 <= shard < n_shards:
            have = f"{n_shards} shards, from 0" if n_shards > 1 else "one shard, number 0"
            raise _none(f"{self.name}.{component} has {have}; not {shard}")
        places = [place for place in part.tensors if place.layer == layer]
        if not places:
            layers = {place.layer for place in part.tensors}
            raise _none(
                f"{self.name}.{component} has {len(layers)} layers with bytes here, from 0; there "
                f"is no layer {layer}"
            )
        return self._mapping(part, shard), places, part.pages

    def _has_no_bytes(self, part: ComponentMemory) -> KvdError:
        what = f"{self.name}.{part.name} has no bytes, its {part.pages} pages are only counted"
        if self.memory.family == "prefill-only":
            why = (
                "cache.mode = 'prefill-only' on this node, where no KV is ever written or read: "
                "attend over the K and V of the batch itself, or set cache.mode = 'radix' or 'off'"
            )
        else:
            others = [
                component.name for component in self.memory.components if component.total_bytes
            ]
            why = f"the {self.memory.family} pool keeps bytes in {', '.join(others)} alone"
        return KvdError(Refusal(Code.NOT_SUPPORTED, f"{what}: {why}", side="client"))

    def _mapping(self, part: ComponentMemory, shard: int = 0) -> Mapping | DeviceMapping:
        key = part.name, shard
        if key not in self._mappings:
            self._mappings[key] = self._mapped(part, shard)
        return self._mappings[key]

    def _mapped(self, part: ComponentMemory, shard: int) -> Mapping | DeviceMapping:
        place = self._attachment.on_device(self.name, part.name, shard)
        if place is not None:
            return DeviceMapping(place, part.total_bytes)
        fd = self._attachment.memory_fd(self.name, part.name, shard)
        mapping = Mapping(fd, part.total_bytes)
        mapping.begin_prefault()
        return mapping


class Pools:
    """Every pool of one attachment."""

    def __init__(
        self, attachment: Attachment, end: Callable[[], Refusal | None] = lambda: None
    ) -> None:
        """``end``: why the session is over, once it is."""
        self._attachment = attachment
        self._end = end
        pools = attachment.attached.pools
        self._pools = {pool.name: Pool(pool, attachment, end) for pool in pools}
        self.match_page_tokens = pools[0].match_page_tokens if pools else 0
        """Tokens of a page of the tree, of the pool that leases are of."""

    def key_of(self, lease: int, version: int) -> LeaseKey:
        """The key of a lease, with the session and the life of the daemon that are now."""
        attached = self._attachment.attached
        return LeaseKey(
            session=attached.session,
            incarnation=attached.incarnation,
            lease=lease,
            version=version,
        )

    def pool(self, name: object) -> Pool:
        """The pool of that name.

        Raises:
            KvdError: ``bad-request`` when there is none; what ended the session, once it is over.
        """
        end = self._end()
        if end is not None:
            raise KvdError(end)
        found = self._pools.get(name) if isinstance(name, str) else None
        if found is None:
            raise _none(f"there is no pool {name!r}; there is {', '.join(self._pools) or 'none'}")
        return found

    def chosen(self, name: object) -> Pool:
        """As ``pool``; the one that there is, where its name was left out."""
        # By its type too: what is no name is no choice either, and is refused by it.
        is_left_out = isinstance(name, str) and not name
        return self.pool(next(iter(self._pools)) if is_left_out else name)

    def row_of(self, component: str) -> Along | ComponentRow:
        """How the pages that leases have of this component are known.

        Raises:
            KvdError: ``bad-request`` when the pool that leases are of has no such component.
        """
        return next(iter(self._pools.values())).row_of(component)

    def close(self) -> None:
        """Unmap what nobody looks at; memory under a live view stays until the view goes."""
        for pool in self._pools.values():
            with contextlib.suppress(KvdError):
                pool.close()


def _none(message: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, message, side="client"))
