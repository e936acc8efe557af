"""Which architectures the demo can run, as data: a name, its shape, its pool, its configuration.

A new architecture is one more row of ``ARCHITECTURES``. Nothing here imports torch or transformers
until ``build_model`` is called, so the command line can list and refuse names without them.

Weights are random, seeded and scaled. With the usual initialisation the output of an untrained
model hardly depends on its context, and then equal tokens prove nothing; four times the spread
makes every token depend on the whole prompt. Embeddings are not tied: a tied model with scaled
weights only repeats its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHT_SCALE = 4.0

DTYPES = ("float32", "float64")
"""Where equal tokens are a fair demand: in 16 bits the order of sums decides close calls, so that
two correct runs with another chunking may differ."""


class Shape(msgspec.Struct, frozen=True):
    """The size of a model, by the names of the field."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int


Configure = Callable[[Shape], "PreTrainedConfig"]
"""Makes the Hugging Face configuration of a shape."""


class PoolLayout(msgspec.Struct, frozen=True):
    """What a daemon's pool must hold for a model: keys of its ``[pool]`` section."""

    family: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    page_size: int
    order: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: K and V, each (page_size, heads, head_dim)."""
        element = {"float32": 4, "float64": 8}[self.dtype]
        return self.layers * 2 * self.page_size * self.heads * self.head_dim * element


class Architecture(msgspec.Struct, frozen=True):
    """One row of the registry. ``family`` is the pool family that holds its KV."""

    name: str
    family: str
    shape: Shape
    configure: Configure

    def pool_layout(self, *, dtype: str, page_size: int, order: str) -> PoolLayout:
        """The pool that holds this model's KV."""
        return PoolLayout(
            family=self.family,
            layers=self.shape.layers,
            heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            dtype=dtype,
            page_size=page_size,
            order=order,
        )


def _llama(shape: Shape) -> PreTrainedConfig:
    from transformers import LlamaConfig  # noqa: PLC0415 - only who builds a model needs it

    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


ARCHITECTURES = {
    "llama": Architecture(
        name="llama",
        family="mha",
        shape=Shape(
            layers=4,
            hidden=256,
            intermediate=688,
            heads=8,
            kv_heads=2,
            head_dim=32,
            vocabulary=2048,
            max_positions=8192,
        ),
        configure=_llama,
    ),
}
"""By the name that ``kvd demo --model`` takes."""


def build_model(architecture: Architecture, *, seed: int, dtype: str) -> PreTrainedModel:
    """The model with its random weights: the same seed gives the same weights in every process."""
    import torch  # noqa: PLC0415 - see the top
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = architecture.configure(architecture.shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(WEIGHT_SCALE)
    model = model.to({"float32": torch.float32, "float64": torch.float64}[dtype])
    return cast("PreTrainedModel", model.eval())


def weight_digest(model: PreTrainedModel) -> str:
    """A short name for exactly these weights, to tell that two processes hold the same ones."""
    import xxhash  # noqa: PLC0415 - see the top

    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
