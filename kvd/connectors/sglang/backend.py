"""SGLang's ``HiCacheStorage``, by the node's pool. Of this package it alone imports SGLang.

SGLang calls from threads of its own: one asks what there is, one has pages loaded, one has them
saved. What is answered here is about pages; what is not there, or not had in time, is a miss.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__ as sglang_version
from typing_extensions import override

from kvd.connectors.sglang.chains import PageChain, RestorablePages
from kvd.connectors.sglang.host_pages import HostPages, UnfitHostPool
from kvd.connectors.sglang.identity import identity_of_pages, weight_changes
from kvd.connectors.sglang.options import check_version, storage_options
from kvd.connectors.sglang.page_store import PageStore
from kvd.connectors.sglang.storage_link import StorageLink

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from kvd.connectors.sglang.options import StorageOptions

logger = logging.getLogger("kvd.connectors.sglang")

BY_NUMBER: Final = (
    "kvd copies pages of SGLang's host pool by their numbers (interface_v1), and none through a "
    "tensor of its own"
)

NOT_WATCHED: Final = (
    "kvd: its plugin for SGLang is not loaded (is kvd installed here, and SGLANG_PLUGINS without "
    "it?): weights that are changed in this engine would not be seen, and must not be"
)

NO_PREFIX: Final = (
    'kvd: "hicache_storage_pass_prefix_keys": true is missing in '
    "--hicache-storage-backend-extra-config: pages behind others that SGLang has itself are not "
    "always found without it"
)


class KvdHiCache(HiCacheStorage):
    """What SGLang makes of ``--hicache-storage-backend dynamic``, one in each rank.

    Args:
        storage_config: which part of the model this rank has, and the extra configuration.
        _kwargs: SGLang passes nothing in it.

    Raises:
        ValueError: the extra configuration is not as it must be, or SGLang is one that was not run.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: object = None) -> None:
        self._config = storage_config
        self._options = storage_options(storage_config.extra_config)
        check_version(sglang_version, any_version=self._options.any_version)
        rank = f"tp{storage_config.tp_rank}-pp{storage_config.pp_rank}-{os.getpid()}"
        model = str(storage_config.model_name or "sglang").rpartition("/")[2]
        if not weight_changes.is_watched:
            logger.warning(NOT_WATCHED)
        self._link = StorageLink(
            self._options.name or f"{model}-{rank}",
            self._options,
            why_over=lambda: weight_changes.why_over,
        )
        self._stores: dict[str, PageStore] = {}
        self._is_told = False

    # ---- SGLang's host pools ---------------------------------------------------------------------

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """The pool that all others go with.

        Raises:
            UnfitHostPool: its pages cannot be copied by address.
            KvdError: ``layout-mismatch``: the daemon's pool is not for them.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = HostPages(PoolName.KV.value, mem_pool_host)
        logger.info("kvd: a pool for SGLang's pages:\n%s", pages.section())
        self._stores[pages.name] = PageStore(
            self._link, pages, namespace_of(self._config, pages, self._options)
        )
        self._link.open(pages)

    @override
    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """A pool beside it; one that cannot be stored is said once, and has no page here."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._stores:
            return
        try:
            pages = HostPages(name, host_pool)
        except UnfitHostPool as error:
            logger.warning("kvd: pages of %s are not stored: %s", name, error)
            return
        self._stores[name] = PageStore(
            self._link, pages, namespace_of(self._config, pages, self._options)
        )

    # ---- by the numbers of host pages ------------------------------------------------------------

    @override
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many there are from the first one on."""
        return self._store().found(self._chain(keys, extra_info))

    @override
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Fill host pages; which are right."""
        store = self._store()
        blocks = _blocks(store, keys, host_indices)
        n_right = store.load(self._chain(keys, extra_info), blocks) if blocks else 0
        return [place < n_right for place in range(len(keys))]

    @override
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Keep host pages; all of them, or none."""
        store = self._store()
        blocks = _blocks(store, keys, host_indices)
        is_saved = bool(blocks) and store.save(self._chain(keys, extra_info), blocks or [])
        return [is_saved] * len(keys)

    # ---- of several pools ------------------------------------------------------------------------

    @override
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """After how many pages a prompt can be gone on from, all pools considered."""
        n_pages = self.batch_exists(keys, extra_info)
        restorable = RestorablePages(n_pages)
        for transfer in pool_transfers or ():
            store = self._stores.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                chain = self._chain(keys[:n_pages], extra_info)
                restorable.whole(str(transfer.name), store.found(chain) if store else 0)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                n_trailing = max(1, len(transfer.keys or ()))
                there = [False] * n_pages
                if store is not None:
                    there = store.each_found([PageChain([key]) for key in keys[:n_pages]])
                restorable.trailing(str(transfer.name), there, n_trailing)
        return PoolTransferResult(
            restorable.most, restorable.by_pool(PoolName.KV.value), restorable.lengths
        )

    @override
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_get_v1``, pool by pool."""
        return {
            transfer.name: self._moved(transfer, extra_info, to_pages=False)
            for transfer in transfers
        }

    @override
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_set_v1``, pool by pool."""
        return {
            transfer.name: self._moved(transfer, extra_info, to_pages=True)
            for transfer in transfers
        }

    # ---- one page in a tensor of its own ---------------------------------------------------------

    @override
    def exists(self, key: str) -> bool:
        """Whether it is there, found by itself."""
        return self.batch_exists([key]) == 1

    @override
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Refused: without ``interface_v1`` there is no session, and with it SGLang never asks."""
        raise NotImplementedError(BY_NUMBER)

    @override
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """As ``get``."""
        raise NotImplementedError(BY_NUMBER)

    @override
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """As ``get``."""
        raise NotImplementedError(BY_NUMBER)

    @override
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """As ``get``."""
        raise NotImplementedError(BY_NUMBER)

    # ---- all of it -------------------------------------------------------------------------------

    def _store(self) -> PageStore:
        return self._stores[PoolName.KV.value]

    def _chain(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> PageChain:
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None and extra_info is not None and not self._is_told:
            self._is_told = True
            logger.warning(NO_PREFIX)
        return PageChain(keys, before)

    def _moved(
        self,
        transfer: PoolTransfer,
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        to_pages: bool,
    ) -> list[bool]:
        """Which pages of a transfer were copied."""
        store, keys = self._stores.get(str(transfer.name)), list(transfer.keys or ())
        blocks = None if store is None else _blocks(store, keys, transfer.host_indices)
        if store is None or blocks is None:
            return [False] * len(keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            chains = [(self._chain(keys, extra_info), blocks)] if keys else []
        else:
            # Pages of a window, or states: those before them may be nowhere.
            chains = [(PageChain([key]), [block]) for key, block in zip(keys, blocks, strict=True)]
        moved: list[bool] = []
        for chain, numbers in chains:
            if to_pages:
                moved += [store.save(chain, numbers)] * len(numbers)
            else:
                n_right = store.load(chain, numbers)
                moved += [place < n_right for place in range(len(numbers))]
        return moved

    @override
    def clear(self) -> None:
        """Nothing that was stored before is found again, by any engine of these pages."""
        for store in self._stores.values():
            store.clear()

    def close(self) -> None:
        """Leave the daemon; repeatable."""
        self._link.close()


def namespace_of(config: HiCacheStorageConfig, pages: HostPages, options: StorageOptions) -> str:
    """Whose pages these are, as the log says part by part."""
    try:
        server = get_server_args()
    except (ValueError, RuntimeError, AttributeError):
        server = None
    identity = identity_of_pages(config, server, pages, options, version=sglang_version)
    for flaw in identity.alone:
        logger.warning("kvd: nobody shares what is stored of %s: %s", pages.name, flaw)
    logger.info("kvd: %s is %s: %s", pages.name, identity.namespace, identity.in_words())
    return identity.namespace


def _blocks(
    store: PageStore, keys: Sequence[str], host_indices: torch.Tensor | None
) -> list[int] | None:
    """The host pages of these keys; None, and it is logged, where they are not as many."""
    n_indices = 0 if host_indices is None else host_indices.numel()
    if host_indices is None or n_indices != len(keys) * store.pages.page_size:
        logger.error("kvd: %d indices of %s for %d pages", n_indices, store.pages.name, len(keys))
        return None
    try:
        return store.pages.blocks_of(host_indices.cpu().numpy().astype(np.int64))
    except ValueError as error:
        logger.error("kvd: %s", error)  # noqa: TRY400 - it says all there is to say
        return None
