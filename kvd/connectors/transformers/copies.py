"""Between the pages of a lease and the cache of a model, in the thread that calls.

A lease is there before the first byte and until the last one. No daemon gives its pages to anybody
else before this process has come back to it, has left, or is dead, and nothing is asked of a daemon
meanwhile: so what is read is what the lease stands for, and what is written is nobody else's,
whatever becomes of the daemon.

What is loaded is a whole number of pages from the start of the prompt, and so is what is saved: a
part of a page is found by nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvd.connectors.daemon_link import Unserved
from kvd.connectors.transformers.cache import KEEPS_ALL, KeptWindowLayer, KvdCache
from kvd.connectors.transformers.layout import CONV, SCAN, STATE, WINDOW

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedConfig

    from kvd.client import SyncLease
    from kvd.connectors.transformers.layout import LayerPages, LayerShape, PoolFit

STEP_TOKENS: Final = 1024
LEAST_PAGES: Final = 2

FEW_RUNS: Final = 8
"""So many runs of pages that follow each other are written one by one, more of them by index."""


class NotWhole(Unserved):
    """Not all is there that would be needed; nothing of it is used."""


class PageCopies:
    """Between the pages of one pool and the caches of one model.

    Args:
        config: of the model.
        fit: where its layers lie.
    """

    def __init__(self, config: PreTrainedConfig, fit: PoolFit) -> None:
        self._config = config
        self._fit = fit
        self.page_size = fit.page_size

    def empty(self) -> KvdCache:
        """A cache of nothing."""
        beyond = self._fit.beyond_tokens
        return KvdCache(self._config, beyond_tokens=KEEPS_ALL if beyond is None else beyond)

    def step_tokens(self) -> int:
        """How far ahead a lease has windows mapped, while it slides to its end; 0: it has none.

        A lease then takes a quarter of the windows of the pool at most, where that is enough.
        """
        if not self._fit.window_pages:
            return 0
        room = self._fit.window_pages // 4 * self.page_size - self._fit.window_tokens
        return max(LEAST_PAGES * self.page_size, min(STEP_TOKENS, room))

    def load(self, lease: SyncLease, n_tokens: int) -> KvdCache:
        """A cache of so many tokens, which are whole pages of the lease's prefix.

        Raises:
            NotWhole: of a window, or of a state, something is missing.
            KvdError: the pages are not this process's any more.
        """
        cache = self.empty()
        rows = {name: lease.pages_of(name) for name in self._parts()}
        for shape, pages, layer in zip(
            self._fit.shape.layers, self._fit.layers, cache.layers, strict=True
        ):
            if pages.k is not None and pages.v is not None:
                self._load_kv(layer, shape, pages, rows[pages.part], n_tokens)
            if pages.state:
                _load_state(layer, shape, pages, int(rows[STATE][0]))
        return cache

    def save(self, lease: SyncLease, cache: KvdCache, n_tokens: int) -> None:
        """Write to the pages what the lease's prefix does not have.

        Args:
            lease: of the first ``n_tokens``, which are whole pages; slid so far.
            cache: of these and maybe more.
            n_tokens: what is saved of it.

        Raises:
            NotWhole: the cache has not all of that any more.
            KvdError: as ``load``.
        """
        first = lease.prefix_len // self.page_size
        end = n_tokens // self.page_size
        rows = {name: lease.pages_of(name) for name in self._parts()}
        for pages, layer in zip(self._fit.layers, cache.layers, strict=True):
            if pages.k is not None and pages.v is not None:
                self._save_kv(layer, pages, rows[pages.part], first, end, cache.n_tokens)
            if pages.state:
                if n_tokens != cache.n_tokens:
                    raise NotWhole("a state is of more tokens than are saved")
                own = int(rows[STATE][1])
                for name, tensor in _state_of(layer).items():
                    pages.state[name][own].copy_(tensor[0])

    def tokens_of(
        self, lease: SyncLease, layer: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer without a window, (stop - start, heads, dim), copied.

        Raises:
            KvdError: as ``load``.
        """
        pages = self._fit.layers[layer]
        assert pages.k is not None
        assert pages.v is not None
        first = start // self.page_size
        row = lease.pages_of(pages.part)[first : -(-stop // self.page_size)]
        numbers = torch.from_numpy(row.astype(np.int64))
        offset = first * self.page_size
        k, v = (
            view[numbers].flatten(0, 1)[start - offset : stop - offset]
            for view in (pages.k, pages.v)
        )
        return k, v

    def write_tokens(
        self, lease: SyncLease, layer: int, n_tokens: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write what the lease's prefix does not have of ``n_tokens``, which are whole pages.

        Args:
            lease: of these tokens.
            layer: without a window.
            n_tokens: as in ``save``.
            k: (tokens behind the prefix, heads, dim).
            v: likewise.

        Raises:
            KvdError: as ``load``.
        """
        pages = self._fit.layers[layer]
        assert pages.k is not None
        assert pages.v is not None
        row = lease.pages_of(pages.part)
        row = row[lease.prefix_len // self.page_size : n_tokens // self.page_size]
        for view, states in zip((pages.k, pages.v), (k, v), strict=True):
            _write(view, row, states.view(-1, self.page_size, *states.shape[1:]))

    def _parts(self) -> set[str]:
        found = {pages.part for pages in self._fit.layers if pages.part}
        return found | ({STATE} if self._fit.shape.has_states else set())

    def _load_kv(
        self,
        layer: Any,
        shape: LayerShape,
        pages: LayerPages,
        row: NDArray[np.int32],
        n_tokens: int,
    ) -> None:
        assert pages.k is not None
        assert pages.v is not None
        row = row[: n_tokens // self.page_size]
        if pages.part == WINDOW:
            there = np.flatnonzero(row)
            first = int(there[0]) if there.size else len(row)
            row = row[first:]
            is_short = first * self.page_size > max(0, n_tokens - shape.window_tokens + 1)
            if is_short or not row.all():
                raise NotWhole("a window is not all there")
        numbers = torch.from_numpy(row.astype(np.int64))
        k, v = (
            # Indexed, so that it is a copy, whatever the order of the pool.
            view[numbers].flatten(0, 1).transpose(0, 1)[None].to(shape.device)
            for view in (pages.k, pages.v)
        )
        if isinstance(layer, KeptWindowLayer):
            layer.fill(k, v, n_tokens)
            return
        _begin_attention(layer, k, v)
        layer.keys, layer.values = k, v

    def _save_kv(
        self,
        layer: Any,
        pages: LayerPages,
        row: NDArray[np.int32],
        first: int,
        end: int,
        computed_tokens: int,
    ) -> None:
        assert pages.k is not None
        assert pages.v is not None
        if pages.part == WINDOW:
            there = first + np.flatnonzero(row[first:end])
            first = int(there[0]) if there.size else end
            if not row[first:end].all():
                raise NotWhole("a window is not mapped in one stretch")
        if first == end:
            return
        kept = layer.kept() if isinstance(layer, KeptWindowLayer) else (layer.keys, layer.values)
        offset = computed_tokens - kept[0].shape[2]
        start = first * self.page_size - offset
        if start < 0:
            raise NotWhole("a layer has not kept so much")
        stop = end * self.page_size - offset
        for view, states in zip((pages.k, pages.v), kept, strict=True):
            tokens = states[0, :, start:stop].transpose(0, 1)
            _write(view, row[first:end], tokens.unflatten(0, (-1, self.page_size)))


def _write(view: torch.Tensor, row: NDArray[np.int32], pages: torch.Tensor) -> None:
    """Have (n, page_size, heads, dim) in these pages."""
    cuts = np.flatnonzero(np.diff(row) != 1) + 1
    if len(cuts) >= FEW_RUNS:
        view[torch.from_numpy(row.astype(np.int64))] = pages.to(view.device)
        return
    for run, part in zip(np.split(row, cuts), np.split(np.arange(len(row)), cuts), strict=True):
        view[int(run[0]) : int(run[-1]) + 1].copy_(pages[int(part[0]) : int(part[-1]) + 1])


def _begin_attention(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.lazy_initialization(keys, values)


def _state_of(layer: Any) -> dict[str, torch.Tensor]:
    found = {CONV: layer.conv_states[0], SCAN: layer.recurrent_states[0]}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _load_state(layer: Any, shape: LayerShape, pages: LayerPages, source: int) -> None:
    """The state behind the prefix becomes the layer's."""
    if not source:
        raise NotWhole("there is no state behind the prefix")
    tensors = {
        name: view[source : source + 1].to(shape.device, copy=True)
        for name, view in pages.state.items()
    }
    if CONV in tensors:
        layer.lazy_initialization(conv_states=tensors[CONV], state_idx=0)
        layer.conv_states[0].copy_(tensors[CONV])
    if SCAN in tensors:
        layer.lazy_initialization(recurrent_states=tensors[SCAN], state_idx=0)
        layer.recurrent_states[0].copy_(tensors[SCAN])
    layer.has_previous_state[0] = True
