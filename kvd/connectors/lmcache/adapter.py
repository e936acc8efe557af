"""LMCache's interface to a tier, in its own types."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import lmcache
import msgspec
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvd.connectors.daemon_link import ConnectorSession
from kvd.connectors.lmcache.names import ChunkName, Naming, check_version, release_of
from kvd.connectors.lmcache.objects import ChunkCache, ChunkPages
from kvd.connectors.lmcache.tasks import TaskOutcomes, TaskThread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj
    from numpy.typing import NDArray

logger = logging.getLogger("kvd.connectors.lmcache")


class ChunkLayout(NamedTuple):
    """Shapes and types of an object's tensors, in words, and how many bytes these are."""

    words: str
    n_bytes: int


def _layout(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> ChunkLayout:
    parts = list(zip(shapes, dtypes, strict=True))
    words = "; ".join(f"{tuple(shape)} {dtype}" for shape, dtype in parts)
    return ChunkLayout(words, sum(shape.numel() * dtype.itemsize for shape, dtype in parts))


def _layout_of(one: MemoryObj) -> ChunkLayout:
    found = one.metadata
    return _layout(found.shapes or [found.shape], found.dtypes or [found.dtype])


def _name_of(key: ObjectKey, layout: ChunkLayout) -> ChunkName:
    return ChunkName(
        chunk=key.chunk_hash,
        model=key.model_name,
        rank=key.kv_rank,
        group=key.object_group_id,
        salt=key.cache_salt,
        layout=layout.words,
        n_bytes=layout.n_bytes,
    )


def _bytes_of(one: MemoryObj) -> NDArray[np.uint8]:
    """Where they lie: LMCache keeps them there until the task is over."""
    return np.frombuffer(one.byte_array, np.uint8)


class TierParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``adapter_params`` may have."""

    endpoint: str = ""
    pool: str = "main"
    weights: str = ""
    partition: str = ""
    any_version: bool = False


class KvdL2AdapterConfig(L2AdapterConfigBase):
    """What ``adapter_params`` says."""

    def __init__(self, params: TierParams) -> None:
        self.params = params

    @classmethod
    def from_dict(cls, d: Mapping[str, object]) -> Self:
        """Of a mapping, as JSON has it.

        Raises:
            ValueError: there is no such parameter, or it is of another type.
        """
        try:
            return cls(msgspec.convert(d, TierParams))
        except msgspec.ValidationError as error:
            known = ", ".join(TierParams.__struct_fields__)
            raise ValueError(f"adapter_params: {error}; there is {known}") from None

    @classmethod
    def help(cls) -> str:
        """For a command line."""
        return f"adapter_params of kvd: {', '.join(TierParams.__struct_fields__)}"


class KvdL2Adapter(L2AdapterInterface):
    """Objects of LMCache in the pool of the node's daemon.

    Args:
        config: what its user has set.
        l1_memory_desc: of LMCache's own memory, which this tier copies from and to by its objects.

    Raises:
        KvdError: ``layout-mismatch``: the pool of the daemon has no pages of plain bytes;
            ``bad-request``: there is no such pool, or this is no endpoint;
            ``not-supported``: another version of LMCache than were run.
    """

    def __init__(self, config: KvdL2AdapterConfig, l1_memory_desc: object = None) -> None:
        super().__init__(max_capacity_bytes=0)
        params = config.params
        check_version(lmcache.__version__, any_version=params.any_version)
        naming = Naming(
            packing=f"lmcache {release_of(lmcache.__version__)}",
            weights=params.weights,
            partition=params.partition,
        )
        self._link = ConnectorSession(
            params.endpoint or None,
            name=f"lmcache {os.getpid()}",
            kind=f"lmcache {lmcache.__version__}",
            fit=lambda node: ChunkPages(node.pool(params.pool)),
            logger=logger,
            without="LMCache goes on without the node's cache",
        )
        self._link.open()
        self._cache = ChunkCache(self._link, naming.namespace)
        self._held: dict[ObjectKey, list[ChunkName]] = defaultdict(list)
        """By the name that is given back: as what it was found."""
        self._notifiers = [create_event_notifier() for _ in range(3)]
        stored, found, loaded = self._notifiers
        self._stored: TaskOutcomes[L2StoreResult] = TaskOutcomes(stored.notify)
        self._found: TaskOutcomes[Bitmap] = TaskOutcomes(found.notify)
        self._loaded: TaskOutcomes[Bitmap] = TaskOutcomes(loaded.notify)
        self._thread = TaskThread("kvd-lmcache", idle=self._cache.look, logger=logger)

    # ---- storing ---------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when a store is over."""
        return int(self._notifiers[0].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to copy these into the pool."""
        names = [_name_of(key, _layout_of(one)) for key, one in zip(keys, objects, strict=True)]
        work = partial(self._store, names, [_bytes_of(one) for one in objects])
        return self._thread.begin(
            self._stored, work, L2StoreResult(success=False, bytes_transferred=0)
        )

    def _store(self, names: list[ChunkName], objects: list[NDArray[np.uint8]]) -> L2StoreResult:
        done = self._cache.store(names, objects)
        n_bytes = sum(len(data) for is_done, data in zip(done, objects, strict=True) if is_done)
        return L2StoreResult(success=all(done), bytes_transferred=n_bytes)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Those that are over; one of whose objects was not stored has failed."""
        return self._stored.take_all()

    # ---- looking up ------------------------------------------------------------------------------

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up is over."""
        return int(self._notifiers[1].fileno())

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look for these, and have those that are there stay."""
        layouts = {
            group: _layout(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()
        }
        known = [n for n, key in enumerate(keys) if key.object_group_id in layouts]
        names = [_name_of(keys[n], layouts[keys[n].object_group_id]) for n in known]
        work = partial(self._hold, keys, names, known)
        return self._thread.begin(self._found, work, Bitmap(len(keys)))

    def _hold(self, keys: list[ObjectKey], names: list[ChunkName], known: list[int]) -> Bitmap:
        held = self._cache.hold(names)
        found = Bitmap(len(keys))
        for number, name, is_held in zip(known, names, held, strict=True):
            if is_held:
                found.set(number)
                self._held[keys[number]].append(name)
        return found

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which were found, once."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Each stays for one reason less."""
        self._thread.tell(partial(self._release, keys))

    def _release(self, keys: list[ObjectKey]) -> None:
        names = [self._held[key].pop() for key in keys if self._held.get(key)]
        for key in keys:
            if not self._held.get(key):
                self._held.pop(key, None)
        self._cache.release(names)

    # ---- loading ---------------------------------------------------------------------------------

    def get_load_event_fd(self) -> int:
        """Readable when a load is over."""
        return int(self._notifiers[2].fileno())

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to copy these out of the pool."""
        names = [_name_of(key, _layout_of(one)) for key, one in zip(keys, objects, strict=True)]
        work = partial(self._load, names, [_bytes_of(one) for one in objects])
        return self._thread.begin(self._loaded, work, Bitmap(len(keys)))

    def _load(self, names: list[ChunkName], into: list[NDArray[np.uint8]]) -> Bitmap:
        done = self._cache.load(names, into)
        loaded = Bitmap(len(names))
        for number, is_done in enumerate(done):
            if is_done:
                loaded.set(number)
        return loaded

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which were copied, once."""
        return self._loaded.take(task_id)

    # ---- the rest --------------------------------------------------------------------------------

    def get_memory_tags(self) -> api.MemoryTags:
        """A store on this host; LMCache asks for it from 0.5.7 on."""
        return api.MemoryTags(
            segment=api.MemorySegment.STORAGE, residency=api.MemoryResidency.LOCAL
        )

    def report_status(self) -> dict[str, object]:
        """For LMCache's own status page."""
        why = self._link.why_away
        return {"is_healthy": not why, "type": "kvd", "why": why, "held": self._cache.held}

    def close(self) -> None:
        """Leave; what was begun is done before."""
        self._thread.tell(self._cache.forget)
        self._thread.close()
        self._link.close()
        for notifier in self._notifiers:
            notifier.close()
