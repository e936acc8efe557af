"""The cache that a model computes in: transformers' own, filled beforehand from the node.

``KvdCache`` is a ``DynamicCache``: its tensors are this process's, and the model's own attention
reads them. Two things are added. It knows the tokens that it was filled by, from what the model was
given, and tells when those of the prompt are computed. And layers with a window keep some more
tokens, for the whole pages that the node caches: the model sees what it would see anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedConfig

KEEPS_ALL = 1 << 62
"""Tokens beyond a window: every one of them."""


class KeptWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """One layer with a window, which also keeps up to ``beyond_tokens`` that have left it."""

    def __init__(self, sliding_window: int, beyond_tokens: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.beyond_tokens = beyond_tokens
        self._older: tuple[torch.Tensor, torch.Tensor] | None = None

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As it is, and what leaves the window is kept for a while."""
        seen: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, *args, **kwargs
        )
        assert self.keys is not None
        if self.beyond_tokens:
            self._keep(*(states[:, :, : -self.keys.shape[2] or None] for states in seen))
        return seen

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not keys.shape[2] or self.keys is None or not self.keys.shape[2]:
            return
        left = (keys, values)
        if self._older is not None:
            left = tuple(torch.cat(pair, dim=2) for pair in zip(self._older, left, strict=True))  # type: ignore[assignment]
        if left[0].shape[2] > self.beyond_tokens:
            # Cloned: a part of it would keep all of it in memory.
            left = tuple(states[:, :, -self.beyond_tokens :].clone() for states in left)  # type: ignore[assignment]
        self._older = left

    def fill(self, keys: torch.Tensor, values: torch.Tensor, n_tokens: int) -> None:
        """The KV of the last tokens of ``n_tokens``: all of its window, if not more."""
        self.lazy_initialization(keys, values)
        window = self.sliding_window - 1
        cut = max(0, keys.shape[2] - window)
        self.keys, self.values = keys[:, :, cut:], values[:, :, cut:]
        self.cumulative_length = n_tokens
        self._older = None
        if cut:
            self._keep(keys[:, :, :cut], values[:, :, :cut])

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What there is: of the window, and of what was before it."""
        assert self.keys is not None
        assert self.values is not None
        if self._older is None:
            return self.keys, self.values
        keys, values = self._older
        return torch.cat([keys, self.keys], dim=2), torch.cat([values, self.values], dim=2)

    def forget(self) -> None:
        """Keep no more than the window, from now on."""
        self.beyond_tokens, self._older = 0, None


class KvdCache(DynamicCache):
    """The KV of one sequence, in this process, and of which tokens it is.

    Args:
        config: of the model.
        beyond_tokens: how many tokens a layer keeps that have left its window.
    """

    def __init__(self, config: PreTrainedConfig, *, beyond_tokens: int) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                self.layers[index] = KeptWindowLayer(layer.sliding_window, beyond_tokens)
        self.n_tokens = 0
        """What its KV is of: what was loaded, and what the model was given since."""
        self.saved_tokens = 0
        """What the node has of it, since it was saved."""
        self.made_for: object = None
        """Who counts what is computed into it: no other does."""
        self._given: list[torch.Tensor] = []
        self._prompt_tokens = 0
        self._is_forgotten = False
        self._then: Callable[[], object] | None = None

    def loaded(self, ids: torch.Tensor) -> None:
        """It holds the KV of these tokens, (1, tokens), and no others."""
        self.n_tokens, self._given = ids.shape[1], [ids]

    def given(self, ids: torch.Tensor | None) -> None:
        """The model is about to compute these behind what is here, (1, tokens); None: no tokens."""
        if ids is None:
            self.forget()
        if ids is None or self._is_forgotten:
            return
        if self.n_tokens >= self._prompt_tokens:
            self.tell()
        self.n_tokens += ids.shape[1]
        self._given.append(ids.detach())

    def tokens(self) -> NDArray[np.int64]:
        """Those that its KV is of."""
        given = [ids[0].cpu().numpy().astype(np.int64) for ids in self._given]
        return np.concatenate([np.empty(0, np.int64), *given])

    def when_computed(self, prompt_tokens: int, then: Callable[[], object]) -> None:
        """Call ``then`` once, when so many tokens are computed and the next one comes."""
        self._prompt_tokens, self._then = prompt_tokens, then

    def tell(self) -> None:
        """The prompt is computed, if that was not told before."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def forget(self) -> None:
        """Nobody copies from it any more: it is as transformers' own from now on."""
        self._then, self._given, self.n_tokens, self._is_forgotten = None, [], 0, True
        for layer in self.layers:
            if isinstance(layer, KeptWindowLayer):
                layer.forget()
