"""One step of a model: tokens in, the logits after the last of them out.

Where the KV lies is the cache's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvd.demo.paged import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Cache, PreTrainedModel


@torch.inference_mode()
def last_logits(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """Compute ``tokens`` behind what ``cache`` holds; (vocabulary,) after the last one."""
    output = forward(model, cache, input_ids=torch.tensor([list(tokens)]), logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def answer(
    compute: Callable[[Sequence[int]], torch.Tensor], first: int, tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Decode greedily behind ``first`` until there are ``tokens`` tokens, ``first`` included.

    The KV of the last token is not computed: nothing comes after it.

    Args:
        compute: computes the next tokens and gives the (vocabulary,) logits after the last one.
        first: the first token of the answer.
        tokens: how many there shall be.

    Returns:
        The tokens, and the (vocabulary,) logits that chose each of them but the first.
    """
    said, logits = [first], []
    while len(said) < tokens:
        logits.append(compute(said[-1:]))
        said.append(greedy(logits[-1]))
    return said, logits


def pack_logits(logits: Sequence[torch.Tensor]) -> bytes:
    """Rows of logits as they travel: little-endian float64."""
    packed: bytes = torch.stack(list(logits)).double().numpy().astype("<f8").tobytes()
    return packed
