"""SGLang's ``UnifiedCacheLinker``: the node's pool right behind the pages of SGLang's device pool.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KvdLinker",
      "linker_module_path": "kvd.connectors.sglang"}'

SGLang's tree asks from its scheduler, and orders; two threads here copy. What is found is held from
the question until it is loaded or asked about again, since SGLang gives up a request whose load
fails: what it was told must still be there. Nobody says that a request will not load what it asked
about, so what is held longer than ``HELD_S`` is left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from queue import Queue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__ as sglang_version
from typing_extensions import override

from kvd.client import KvdError
from kvd.client.mover.engine_memory import HOST
from kvd.connectors.attributes import attribute
from kvd.connectors.refusals import BROKEN
from kvd.connectors.sglang.backend import NOT_WATCHED, namespace_of
from kvd.connectors.sglang.chains import KnownChains, PageChain
from kvd.connectors.sglang.device_pool import DeviceBuffers
from kvd.connectors.sglang.host_pages import HostPages
from kvd.connectors.sglang.identity import weight_changes
from kvd.connectors.sglang.options import check_version, linker_options
from kvd.connectors.sglang.page_store import HeldPages, PageStore
from kvd.connectors.sglang.storage_link import StorageLink

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.radix_cache import RadixKey

logger = logging.getLogger("kvd.connectors.sglang")

HELD_S: Final = 30.0
"""What a request was told is held so long, unless it asks again or loads it."""

ONLY_FULL: Final = (
    "kvd's linker has pages of full attention alone, and this engine has {}: use HiCache with "
    "kvd's storage (--enable-hierarchical-cache --hicache-storage-backend dynamic)"
)


class DevicePool(DeviceBuffers):
    """A device pool of SGLang's, from its class."""

    def __init__(self, pool: MHATokenToKVPool | MLATokenToKVPool) -> None:
        pointers, n_bytes, page_bytes = pool.get_contiguous_buf_infos()
        super().__init__(pointers, n_bytes, page_bytes, int(pool.page_size))
        self.dtype = pool.dtype
        self.device = str(torch.device(pool.device))
        self.storage_format_tag = type(pool).__name__


class _Told(NamedTuple):
    """What a request was told, and until when that is held."""

    held: HeldPages
    until_s: float


class _QueuedLoad(NamedTuple):
    held: HeldPages
    blocks: list[int]


class _LoadBatch(NamedTuple):
    counter: int
    loads: list[_QueuedLoad]
    ready: list[Any]


class _QueuedOffload(NamedTuple):
    chain: PageChain
    blocks: list[int]
    ready: list[Any]


class KvdLinker(UnifiedCacheLinker):
    """What SGLang makes of ``linker: KvdLinker``, one in each rank.

    Args:
        server_args: of SGLang's server.
        params: of its tree.
        components: of its tree.
        extra_config: ``linker_extra_config``.
        forward_stream: where device pages are written.

    Raises:
        ValueError: the extra configuration is not as it must be, SGLang is one that was not run, or
            the model has other pages than those of full attention.
        KvdError: ``layout-mismatch``: the daemon's pool is not for these pages.
    """

    def __init__(
        self,
        server_args: object,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        options = linker_options(extra_config)
        check_version(sglang_version, any_version=options.any_version)
        if not weight_changes.is_watched:
            logger.warning(NOT_WATCHED)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        if why := _why_not_served(kvcache, params, components):
            raise ValueError(ONLY_FULL.format(why))
        self._page_size = params.page_size
        pool = DevicePool(kvcache)
        self.pools = {PoolName.KV: pool}
        self._is_on_device = pool.device != HOST
        pages = HostPages(PoolName.KV.value, pool, device=pool.device)
        logger.info("kvd: a pool for SGLang's pages:\n%s", pages.section())
        config = _rank_of(server_args, params, is_replicated=isinstance(kvcache, MLATokenToKVPool))
        self._is_alone = config.tp_size * config.pp_size * config.attn_cp_size == 1
        rank = f"tp{config.tp_rank}-pp{config.pp_rank}-{os.getpid()}"
        self._link = StorageLink(
            options.name or f"sglang-{rank}", options, why_over=lambda: weight_changes.why_over
        )
        self._store = PageStore(self._link, pages, namespace_of(config, pages, options))
        self._link.open(pages)
        self.layer_done_counter = LayerWiseLoadCounter(kvcache.layer_num)
        self._chains = KnownChains()
        self._prompts: dict[str, list[str]] = {}
        self._told: dict[str, _Told] = {}
        self._pending: dict[str, _QueuedLoad] = {}
        self._results: deque[bool] = deque()
        self._loads: Queue[_LoadBatch | None] = Queue()
        self._offloads: Queue[_QueuedOffload | None] = Queue()
        self._threads = [
            threading.Thread(target=target, name=f"kvd-{name}", daemon=True)
            for name, target in (("load", self._load_all), ("offload", self._offload_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def namespace(self) -> str:
        """Whose pages they are."""
        return self._store.namespace

    # ---- asked by the tree, in the scheduler's thread --------------------------------------------

    def tell_prompt(self, rid: str, key: RadixKey) -> None:
        """What a request is about to be looked up with, from its start; kvd's plugin says it."""
        n_tokens = len(key) // self._page_size * self._page_size
        if n_tokens:
            names = get_storage_hash_str(key[:n_tokens], None, page_size=self._page_size)
            self._chains.tell(names)
            self._prompts = {rid: names}

    @override
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """All lengths up to what is there, in pages of the end that is asked about."""
        self._sweep()
        names = list(transfers[0].keys or ())
        whole = self._prompts.pop(rid, [])
        before = whole[: len(whole) - len(names)] if whole[-len(names) :] == names else None
        chain = PageChain(names, before)
        told = self._told.pop(rid, None)
        if (
            told is not None
            and told.held.chain.keys == chain.keys
            and self._store.is_held(told.held)
        ):
            held = told.held
        else:
            if told is not None:
                self._store.leave(told.held)
            held = self._store.hold(chain)
        if held.n_pages:
            self._told[rid] = _Told(held, time.monotonic() + HELD_S)
        return list(range(1, held.n_pages + 1))

    @override
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue it. Of one rank alone nothing is queued that would fail; of several all go on."""
        told = self._told.pop(rid, None)
        held = told.held if told is not None else HeldPages(PageChain([]), (), None)
        blocks = self._blocks_of(transfers[0])
        is_there = self._store.is_held(held) and held.n_pages >= len(blocks)
        if not self._is_served() or (self._is_alone and not is_there):
            self._store.leave(held)
            return False
        self._pending[rid] = _QueuedLoad(held, blocks)
        return True

    @override
    def cancel_queued_load(self, rid: str) -> bool:
        """Nothing of it has begun."""
        queued = self._pending.pop(rid, None)
        if queued is None:
            return False
        self._store.leave(queued.held)
        return True

    @override
    def start_layer_wise_loading(self) -> int:
        """Begin all that is queued; -1: that is nothing."""
        if not self._pending:
            return -1
        loads, self._pending = list(self._pending.values()), {}
        index = int(self.layer_done_counter.update_producer())
        ready = self.record_offload_ready() if self._is_on_device else []
        self._loads.put(_LoadBatch(index, loads, ready))
        return index

    @override
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether it came, all of it; no byte of it moves any more."""
        return bool(self.layer_done_counter.finish(counter_index))

    @override
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue a node's pages; their device pages stay locked until the result is taken."""
        names = list(transfers[0].keys or ())
        if not names or not self._is_served():
            return False
        before = self._chains.before(names[0])
        blocks = self._blocks_of(transfers[0])
        ready = self.record_offload_ready() if self._is_on_device else []
        self._offloads.put(_QueuedOffload(PageChain(names, before), blocks, ready))
        return True

    @override
    def num_completed_offloads(self) -> int:
        """In the order in which they were queued."""
        return len(self._results)

    @override
    def pop_completed_offload(self) -> bool:
        """Whether the node has the pages of the oldest."""
        return self._results.popleft()

    @override
    def reset(self) -> None:
        """Wait for what moves, and forget what was asked; what is stored stays."""
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self._loads.join()
        self._offloads.join()
        self._sweep(everything=True)
        self._results.clear()
        self.layer_done_counter.reset()

    @override
    def close(self) -> None:
        """Wait for what moves, and leave the daemon; repeatable."""
        self.reset()
        for queue in (self._loads, self._offloads):
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._link.close()

    def _sweep(self, *, everything: bool = False) -> None:
        """Leave what was told to requests that have not come back."""
        now_s = time.monotonic()
        for rid, told in list(self._told.items()):
            if everything or told.until_s < now_s:
                self._store.leave(self._told.pop(rid).held)

    def _blocks_of(self, transfer: PoolTransfer) -> list[int]:
        indices = transfer.device_indices
        assert indices is not None
        return self._store.pages.blocks_of(indices.cpu().numpy().astype(np.int64))

    # ---- threads ---------------------------------------------------------------------------------

    def _load_all(self) -> None:
        while (batch := self._loads.get()) is not None:
            is_here = False
            try:
                is_here = self._load_batch(batch)
            except (KvdError, *BROKEN):
                logger.exception("kvd: a load failed")
            finally:
                # Also where this thread ends by it: a forward waits for these.
                self._say_loaded(batch.counter, is_here=is_here)
                self._loads.task_done()
        self._loads.task_done()

    def _load_batch(self, batch: _LoadBatch) -> bool:
        _wait(batch.ready)
        # All of them, whatever becomes of one: each gives back what it holds.
        came = [self._store.load_held(load.held, load.blocks) for load in batch.loads]
        return came == [len(load.blocks) for load in batch.loads]

    def _say_loaded(self, counter: int, *, is_here: bool) -> None:
        if is_here:
            for layer in range(self.layer_done_counter.num_layers):
                self.layer_done_counter.complete(counter, layer)
        else:
            self.layer_done_counter.fail(counter, RuntimeError(self._link.why_away or "lost"))

    def _offload_all(self) -> None:
        while (queued := self._offloads.get()) is not None:
            is_saved = False
            try:
                _wait(queued.ready)
                is_saved = self._store.save(queued.chain, queued.blocks)
            except (KvdError, *BROKEN):
                logger.exception("kvd: a save failed")
            finally:
                self._results.append(is_saved)
                self._offloads.task_done()
        self._offloads.task_done()

    def _is_served(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)


def _why_not_served(
    kvcache: object, params: CacheInitParams, components: set[ComponentType]
) -> str:
    """What of it would not be stored, and be missing; empty: nothing."""
    # A kind of its own may have more than these two know of: scales, an index, states.
    if type(kvcache) not in {MHATokenToKVPool, MLATokenToKVPool}:
        return type(kvcache).__name__
    if components != {ComponentType.FULL}:
        return ", ".join(sorted(part.name for part in components - {ComponentType.FULL}))
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        return "pools of a model that drafts"
    return ""


def _wait(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


def _rank_of(
    server_args: object, params: CacheInitParams, *, is_replicated: bool
) -> HiCacheStorageConfig:
    """Which part of the model this rank has, as SGLang tells a storage."""
    parallel = get_parallel()
    by_attention = is_dp_attention_enabled()
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank if by_attention else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if by_attention else parallel.tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=is_replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=attribute(server_args, "served_model_name"),
    )
