"""Which architectures the demo can run, as data: a name, its shape, its pool, its configuration.

A new architecture is one more row of ``ARCHITECTURES``. Nothing here imports torch or transformers
until ``build_model`` is called, so the command line can list and refuse names without them.

Weights are random, seeded and scaled. With the usual initialisation the output of an untrained
model hardly depends on its context, and then equal tokens prove nothing; four times the spread
makes every token depend on the whole prompt. Embeddings are not tied: a tied model with scaled
weights only repeats its last token. A recurrent model is spread widely as it is, but forgets within
a few tokens; its decay is slowed down instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from kvd.demo.layout import ModelShape, PoolLayout, PoolPart, places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 1
"""Of the weights."""

Configure = Callable[[ModelShape], tuple[str, dict[str, object]]]
"""The name of a Hugging Face configuration, and what it is given of a shape."""


class Architecture(msgspec.Struct, frozen=True):
    """One row of the registry. ``family`` is the pool family that holds its KV.

    ``weight_scale``: of every matrix. ``log_decay``: added to the logarithm of a recurrent layer's
    decay.
    """

    name: str
    family: str
    shape: ModelShape
    configure: Configure
    weight_scale: float = 4.0
    log_decay: float = 0.0

    @property
    def pool(self) -> PoolLayout:
        """The pool that holds this model's KV."""
        return PoolLayout(family=self.family, shape=self.shape)


def _layer_types(shape: ModelShape) -> list[str]:
    """The kind of each layer, as transformers calls it."""
    kinds = {PoolPart.KV: "full_attention", PoolPart.WINDOW: "sliding_attention"}
    return [kinds[place.part] for place in places(shape)]


def _decoder(shape: ModelShape, **more: object) -> dict[str, object]:
    """What every decoder with attention is given."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        **more,
    }


NO_ENDS: dict[str, object] = {"bos_token_id": None, "eos_token_id": None}


def _llama(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "LlamaConfig", _decoder(shape, head_dim=shape.head_dim, **NO_ENDS)


def _qwen(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "Qwen3Config", _decoder(shape, head_dim=shape.head_dim, **NO_ENDS)


def _deepseek(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "DeepseekV3Config", _decoder(
        shape,
        moe_intermediate_size=shape.intermediate // 4,
        num_mtp_layers=0,
        first_k_dense_replace=1,
        kv_lora_rank=shape.latent_dim,
        q_lora_rank=shape.latent_dim,
        qk_rope_head_dim=shape.rope_dim,
        qk_nope_head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        n_routed_experts=shape.experts,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        **{**NO_ENDS, "num_key_value_heads": shape.heads},
    )


def _gemma(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "Gemma3TextConfig", _decoder(
        shape,
        head_dim=shape.head_dim,
        query_pre_attn_scalar=shape.head_dim,
        sliding_window=shape.window_tokens,
        layer_types=_layer_types(shape),
        pad_token_id=None,
        **NO_ENDS,
    )


def _gptoss(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "GptOssConfig", _decoder(
        shape,
        head_dim=shape.head_dim,
        num_local_experts=shape.experts,
        num_experts_per_tok=2,
        sliding_window=shape.window_tokens,
        layer_types=_layer_types(shape),
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    )


def _mamba(shape: ModelShape) -> tuple[str, dict[str, object]]:
    return "Mamba2Config", {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "expand": shape.intermediate // shape.hidden,
        "num_heads": shape.heads,
        "head_dim": shape.head_dim,
        "state_size": shape.state_dim,
        "n_groups": shape.groups,
        "conv_kernel": shape.conv_tokens,
        "chunk_size": 64,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        **NO_ENDS,
    }


_LLAMA = ModelShape(
    layers=4,
    hidden=256,
    intermediate=688,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocabulary=2048,
    max_positions=8192,
)
_SHAPE = msgspec.structs.replace

_ROWS = (
    Architecture(name="llama", family="mha", shape=_LLAMA, configure=_llama),
    Architecture(name="qwen", family="mha", shape=_SHAPE(_LLAMA, kv_heads=4), configure=_qwen),
    Architecture(
        name="deepseek",
        family="mla",
        shape=_SHAPE(_LLAMA, latent_dim=64, rope_dim=16, experts=8),
        configure=_deepseek,
    ),
    Architecture(
        name="gemma",
        family="swa",
        shape=_SHAPE(_LLAMA, layers=6, window_tokens=96, full_every=3),
        configure=_gemma,
    ),
    Architecture(
        name="gptoss",
        family="swa",
        shape=_SHAPE(_LLAMA, intermediate=256, window_tokens=72, full_every=2, experts=4),
        configure=_gptoss,
    ),
    Architecture(
        name="mamba",
        family="recurrent",
        shape=_SHAPE(
            _LLAMA,
            intermediate=512,
            heads=8,
            kv_heads=0,
            head_dim=64,
            state_dim=32,
            groups=2,
            conv_tokens=4,
        ),
        configure=_mamba,
        weight_scale=1.0,
        log_decay=-5.0,
    ),
)
ARCHITECTURES = {row.name: row for row in _ROWS}
"""Those that decode, by the name that ``kvd demo --model`` takes."""


def build_model(
    architecture: Architecture, *, seed: int = SEED, dtype: str = "float32"
) -> PreTrainedModel:
    """The model with its random weights: the same seed gives the same weights in every process."""
    import torch  # noqa: PLC0415 - see the top
    import transformers  # noqa: PLC0415

    torch.manual_seed(seed)
    name, given = architecture.configure(architecture.shape)
    config = getattr(transformers, name)(**given)
    # The expert kernels of transformers know no float64; its loop over experts does.
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.add_(architecture.log_decay)
            elif parameter.ndim > 1:
                parameter.mul_(architecture.weight_scale)
    return cast("PreTrainedModel", model.to(getattr(torch, dtype)).eval())


def weight_digest(model: PreTrainedModel) -> str:
    """A short name for exactly these weights, to tell that two processes hold the same ones."""
    import xxhash  # noqa: PLC0415 - see the top

    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
