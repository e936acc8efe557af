"""The same model in one process, without kvd: what the two engines must reproduce."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from transformers import DynamicCache

from kvd.demo.compute import answer, greedy, last_logits, pack_logits
from kvd.demo.messages import ANSWER_TOKENS, Generate, Generated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(model: PreTrainedModel, order: Generate) -> Generated:
    """Prefill the whole prompt in one pass into the model's own cache, then decode greedily."""
    compute = partial(last_logits, model, cache=DynamicCache(config=model.config))
    prompt = compute(order.tokens)
    said, logits = answer(compute, greedy(prompt), ANSWER_TOKENS)
    return Generated(tokens=tuple(said), logits=pack_logits([prompt, *logits]))
