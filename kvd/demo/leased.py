"""One sequence of one lease: the model computes it, its KV goes to the pages of the lease.

``PoolViews`` maps the pool once, each layer of the model to its place in it. ``LeasedSequence`` is
what an engine works with: it computes the next tokens and, where layers have a window, slides the
lease before them, so that there are window pages for what is computed and the others go back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvd.demo.cache import (
    BlockTable,
    LatentLayer,
    LayerViews,
    Lengths,
    PagedLayer,
    StateLayer,
    StateViews,
    WindowLayer,
    forward,
)
from kvd.demo.layout import ModelShape, PoolPart, places

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

    from kvd.client import Pool
    from kvd.demo.own_blocks import OwnBlocks, SeenLease


@torch.inference_mode()
def last_logits(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """Compute ``tokens`` behind what ``cache`` holds; (vocabulary,) after the last one, here."""
    ids = torch.tensor([list(tokens)], device=model.device)
    output = forward(model, cache, input_ids=ids, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].cpu()
    return logits


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def answer(
    compute: Callable[[Sequence[int]], torch.Tensor], first: int, tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Decode greedily behind ``first`` until there are ``tokens`` tokens, ``first`` included.

    ``compute`` computes the next tokens and gives the (vocabulary,) logits after the last one. The
    KV of the last token is not computed: nothing comes after it.

    Returns:
        The tokens, and the logits that chose each of them but the first.
    """
    said, logits = [first], []
    while len(said) < tokens:
        logits.append(compute(said[-1:]))
        said.append(greedy(logits[-1]))
    return said, logits


class PoolViews:
    """The memory of every layer of a model, mapped once and kept: a view costs nothing to hold.

    ``shape``: what of the model the pool keeps. ``pool``: that, or blocks of an engine's own.
    ``shard``: of which of the pool's shards.
    """

    def __init__(self, shape: ModelShape, pool: Pool | OwnBlocks, *, shard: int = 0) -> None:
        self.shape = shape
        self.parts = {place.part for place in places(shape)}
        self.page_size = pool.page_size
        self.layers = tuple(
            self._views(pool.tensors(place.part.value, layer=place.layer, shard=shard))
            for place in places(shape)
        )

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.layers[0][0].device

    def _views(self, found: Mapping[str, torch.Tensor]) -> LayerViews | StateViews:
        """The tensors of one layer, by their names in the pool."""
        if "ssm" in found:
            return StateViews(conv=found["conv"], scan=found["ssm"])
        if "latent" in found:
            return found["latent"], found["latent"][..., : self.shape.latent_dim]
        return found["k"], found["v"]

    def damage(self, part: PoolPart, page: int) -> None:
        """Zero one page of ``part``, in all layers: what follows must come out differently."""
        for place, views in zip(places(self.shape), self.layers, strict=True):
            if place.part is part:
                for tensor in views:
                    tensor[page] = 0


def leased_cache(
    views: PoolViews, tables: Mapping[PoolPart, BlockTable], lengths: Lengths
) -> Cache:
    """What to hand to a model as its cache: the pages of one lease, of each part of the pool."""
    layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer] = []
    shape, written = views.shape, lengths.written_tokens
    for place, layer in zip(places(shape), views.layers, strict=True):
        table = tables[place.part]
        if isinstance(layer, StateViews):
            source, own = table.pages.tolist()
            layers.append(
                StateLayer(layer, source_page=source, own_page=own, written_tokens=written)
            )
        elif place.part is PoolPart.WINDOW:
            layers.append(WindowLayer(layer, table, lengths, window_tokens=shape.window_tokens))
        else:
            kind = LatentLayer if shape.latent_dim else PagedLayer
            layers.append(kind(layer, table, lengths))
    return Cache(layers=layers)


class LeasedSequence:
    """The tokens of one lease and their KV, as far as they are computed."""

    def __init__(
        self,
        model: PreTrainedModel,
        views: PoolViews,
        lease: SeenLease,
        lengths: Lengths,
        *,
        step_tokens: int,
    ) -> None:
        """Go on from ``lengths``; ``lease`` was opened with ``step_tokens``.

        So many tokens are computed between two slides, at most.
        """
        self._model = model
        self._lease = lease
        self._step_tokens = step_tokens
        self._tables = {
            part: BlockTable(lease.pages_of(part.value), views.device) for part in views.parts
        }
        self.peak_window_pages = 0
        """The most window pages that the lease had at once."""
        self.slides = 0
        """How often it slid."""
        self._note_window()
        self.written_tokens = lengths.written_tokens
        """Tokens that are computed."""
        self._covered = lengths.written_tokens + step_tokens
        self._cache = leased_cache(views, self._tables, lengths)

    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute the next tokens; (vocabulary,) logits after the last one."""
        if PoolPart.WINDOW in self._tables and self.written_tokens + len(tokens) > self._covered:
            self._slide()
        logits = last_logits(self._model, tokens, self._cache)
        self.written_tokens += len(tokens)
        return logits

    def _slide(self) -> None:
        """Window pages behind the next token go back, pages ahead of it are mapped."""
        self._lease.slide(self.written_tokens)
        self.slides += 1
        self._tables[PoolPart.WINDOW].replace(self._lease.pages_of(PoolPart.WINDOW.value))
        self._covered = self.written_tokens + self._step_tokens
        self._note_window()

    def _note_window(self) -> None:
        """Remember the peak."""
        if PoolPart.WINDOW in self._tables:
            mapped = int(self._tables[PoolPart.WINDOW].row.count_nonzero())
            self.peak_window_pages = max(self.peak_window_pages, mapped)
