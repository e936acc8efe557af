"""A pipelined prefill: each rank computes its layers, and passes on what they made of the tokens.

    rank 0   tokens -> layers 0, 1 -> hidden  ------>
    rank 1                            hidden -> layers 2, 3 -> logits

Each rank keeps the KV of its own layers in the pool of its own daemon. The first ranks go on with
the next chunk while the last ones are at this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kvd.demo.paged import forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache, PreTrainedModel

    from kvd.demo.group import Group
    from kvd.demo.leased import Lengths


class StageSequence:
    """The tokens of one lease of this stage, and their KV in its layers; as ``Computed``."""

    peak_window_pages = 0
    slides = 0

    def __init__(
        self, model: PreTrainedModel, cache: Cache, lengths: Lengths, *, group: Group
    ) -> None:
        self.written_tokens = lengths.written_tokens
        self.last_rank = group.ranks - 1
        """It has the logits."""
        self._model = model
        self._cache = cache
        self._group = group

    @torch.inference_mode()
    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """As ``Computed.compute``: zeros where another rank has the last layer."""
        rank, config = self._group.rank, self._model.config
        decoder = self._model.model
        if rank:
            hidden = torch.empty(1, len(tokens), config.hidden_size, dtype=self._model.dtype)
            dist.recv(hidden, rank - 1)
            output = forward(decoder, self._cache, inputs_embeds=hidden)
        else:
            ids = torch.tensor([list(tokens)])
            output = forward(decoder, self._cache, input_ids=ids)
        self.written_tokens += len(tokens)
        hidden = output.last_hidden_state
        if rank + 1 < self._group.ranks:
            dist.send(hidden, rank + 1)
            return torch.zeros(config.vocab_size, dtype=self._model.dtype)
        logits: torch.Tensor = self._model.lm_head(hidden[0, -1])
        return logits
