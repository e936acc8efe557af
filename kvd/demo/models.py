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

from typing import TYPE_CHECKING, cast

import msgspec

from kvd.demo.layout import ModelShape, PoolLayout, PoolPart, places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 1  # of the weights, and of what is said


class Architecture(msgspec.Struct, frozen=True):
    """One row of the registry. ``family`` is the pool family that holds its KV.

    ``config``: the name of its Hugging Face configuration, which is given ``options`` beyond what
    follows from the shape. ``weight_scale``: of every matrix. ``log_decay``: added to the logarithm
    of a recurrent layer's decay.
    """

    name: str
    family: str
    config: str
    shape: ModelShape
    options: dict[str, object] = {}
    weight_scale: float = 4.0
    log_decay: float = 0.0

    @property
    def pool(self) -> PoolLayout:
        """The pool that holds this model's KV."""
        return PoolLayout(family=self.family, shape=self.shape)


def _options(architecture: Architecture) -> dict[str, object]:
    """What the configuration of an architecture is given."""
    shape = architecture.shape
    found: dict[str, object] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if shape.latent_dim:
        found["kv_lora_rank"], found["qk_rope_head_dim"] = shape.latent_dim, shape.rope_dim
        found["qk_nope_head_dim"] = found["v_head_dim"] = found.pop("head_dim")
        found["num_key_value_heads"] = shape.heads
    if shape.window_tokens:
        kinds = {PoolPart.KV: "full_attention", PoolPart.WINDOW: "sliding_attention"}
        found["sliding_window"] = shape.window_tokens
        found["layer_types"] = [kinds[place.part] for place in places(shape)]
    if shape.state_dim:
        found |= {
            "num_heads": shape.heads,
            "state_size": shape.state_dim,
            "n_groups": shape.groups,
            "conv_kernel": shape.conv_tokens,
        }
    return found | architecture.options


_LLAMA = ModelShape(layers=4, heads=8, kv_heads=2, head_dim=32, vocabulary=2048)
_SHAPE = msgspec.structs.replace

_ROWS = (
    Architecture(name="llama", family="mha", config="LlamaConfig", shape=_LLAMA),
    Architecture(name="qwen", family="mha", config="Qwen3Config", shape=_SHAPE(_LLAMA, kv_heads=4)),
    Architecture(
        name="deepseek",
        family="mla",
        config="DeepseekV3Config",
        shape=_SHAPE(_LLAMA, latent_dim=64, rope_dim=16),
        options={
            "moe_intermediate_size": 172,
            "num_mtp_layers": 0,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    Architecture(
        name="gemma",
        family="swa",
        config="Gemma3TextConfig",
        shape=_SHAPE(_LLAMA, layers=6, window_tokens=96, full_every=3),
        options={"query_pre_attn_scalar": 32},
    ),
    Architecture(
        name="gptoss",
        family="swa",
        config="GptOssConfig",
        shape=_SHAPE(_LLAMA, window_tokens=72, full_every=2),
        options={
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        },
    ),
    Architecture(
        name="mamba",
        family="recurrent",
        config="Mamba2Config",
        shape=_SHAPE(_LLAMA, kv_heads=0, head_dim=64, state_dim=32, groups=2, conv_tokens=4),
        options={"expand": 2, "chunk_size": 64},
        weight_scale=1.0,
        log_decay=-5.0,
    ),
)
ARCHITECTURES = {row.name: row for row in _ROWS}
"""By the name that ``kvd demo --model`` takes."""


def build_model(
    architecture: Architecture, *, seed: int = SEED, dtype: str = "float32"
) -> PreTrainedModel:
    """The model with its random weights: the same seed gives the same weights in every process."""
    import torch  # noqa: PLC0415 - see the top
    import transformers  # noqa: PLC0415

    torch.manual_seed(seed)
    config = getattr(transformers, architecture.config)(**_options(architecture))
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
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
