"""The pool whose pages are vLLM's blocks, worked out from a model's configuration.

A block is bytes to kvd, as many of each layer and rank as vLLM's own KV cache spec has: K and V of
each head of the rank, or one latent. What vLLM would choose by itself (the type of the model, the
size of a block) is said to it by an argument, so that what is planned is what it does. What no
configuration tells is refused by its key, or listed as unknown; it is never guessed.

Figures are those of vLLM 0.32, with whose engines they were compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvd.config.plan import checked_pool
from kvd.config.render import as_file
from kvd.families.model import Model, ModelFacts, NotPlanned, facts_of, model_of
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.families import Value

MODEL_TYPES: Final = {"half": "float16", "float": "float32"}
"""Other names of what ``--dtype`` takes."""

MODEL_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of an element, by ``--dtype``."""

KV_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
"""Of an element, by ``--kv-cache-dtype``. The others pack scales among elements."""

LATENTS: Final = frozenset(
    {
        *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "longcat_flash"),
        "pangu_ultra_moe",
    }
)
"""Types of models whose latents vLLM keeps as they are, in layers of nothing else."""

TO_BE_SEEN: Final = (
    "start the engine with any pool of family raw: it refuses that, and prints the one that fits"
)


class VllmPlanRequest(msgspec.Struct, frozen=True):
    """What is planned for. ``dtype`` and the rest: as vLLM's own arguments of that name.

    ``memory_bytes`` are for the pages of all ranks; 0: there are ``pages``. ``ranks``: of a stage,
    of which a pipeline has so many ``stages``.
    """

    block_size: int
    memory_bytes: int = 0
    pages: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    stages: int = 1


class VllmPlan(msgspec.Struct, frozen=True):
    """A pool, and how vLLM is to be started for it.

    ``layers``: of a stage. ``page_bytes``: of a block in one layer and rank; ``block_bytes``: in
    all of them. ``unknown``: what may be otherwise in an engine, since no configuration tells it.
    """

    layers: int
    page_bytes: int
    block_bytes: int
    pages: int
    tokens: int
    arguments: tuple[str, ...]
    unknown: tuple[str, ...]
    toml: str


def vllm_plan(config: Mapping[str, object], wanted: VllmPlanRequest) -> VllmPlan:
    """The pool for a model with that ``config.json``.

    Raises:
        NotPlanned: it cannot be known, or kvd's connector does not serve it; the message names the
            key, and what to do.
    """
    model, facts = model_of(config), facts_of(config)
    _check_served(model, facts, config)
    dtype = _model_type(model, wanted.dtype)
    arguments = ["--block-size", str(wanted.block_size), "--dtype", dtype]
    if wanted.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", wanted.kv_cache_dtype]
    if wanted.ranks > 1:
        arguments += ["--tensor-parallel-size", str(wanted.ranks)]
    if wanted.stages > 1:
        arguments += ["--pipeline-parallel-size", str(wanted.stages)]
    element = _element_bytes(config, dtype, wanted.kv_cache_dtype)
    page_bytes = wanted.block_size * _elements(model, wanted.ranks) * element
    layers, rest = divmod(model.attention_layers, wanted.stages)
    if rest:
        raise NotPlanned(
            f"{model.attention_layers} layers are no whole number for each of {wanted.stages} "
            "stages: kvd's connector serves pipelines whose stages have as many each"
        )
    shards = wanted.ranks * wanted.stages
    block_bytes = page_bytes * layers * shards
    pages = wanted.pages or wanted.memory_bytes // block_bytes
    pool: dict[str, Value] = {
        "family": "raw",
        "layers": layers,
        "page_size": wanted.block_size,
        "page_bytes": page_bytes,
        "pages": pages,
    }
    # Memory of several shards cannot be kept over a restart.
    pool |= {"tp_size": shards} if shards > 1 else {"backing": "shm"}
    if pages < 2:
        raise NotPlanned(
            f"a block of {wanted.block_size} tokens has {amount(block_bytes)}, so "
            f"{amount(wanted.memory_bytes)} hold {pages} of them: give it more memory"
        )
    checked_pool(pool, {})
    return VllmPlan(
        layers=layers,
        page_bytes=page_bytes,
        block_bytes=block_bytes,
        pages=pages,
        tokens=(pages - 1) * wanted.block_size,
        arguments=tuple(arguments),
        unknown=_unknown(model, facts, wanted.block_size),
        toml=as_file({"pool": pool}),
    )


def _check_served(model: Model, facts: ModelFacts, config: Mapping[str, object]) -> None:
    """Whether kvd's connector takes such a model's blocks, and they are known to be alike."""
    if model.state_layers:
        raise NotPlanned(
            f"{model.state_layers} layers carry a state: how many tokens vLLM gives to its blocks "
            f"it chooses by their bytes; {TO_BE_SEEN}"
        )
    if model.without_kv is not None:
        raise NotPlanned(f"{model.without_kv}; kvd's connector for vLLM serves KV of attention")
    if config.get("is_encoder_decoder") is True or facts.get("is_encoder_decoder") is True:
        raise NotPlanned("is_encoder_decoder: vLLM takes no connector for such a model")
    if facts.get("use_bidirectional_attention"):
        raise NotPlanned(
            f"use_bidirectional_attention = {facts.get('use_bidirectional_attention')!r}: kvd's "
            "connector refuses layers whose tokens attend to later ones"
        )
    if model.index_dim:
        raise NotPlanned(
            "index_head_dim: the index of its sparse attention has blocks of another size than its "
            f"layers, as its kernel packs them; {TO_BE_SEEN}"
        )
    if model.latent_dim and model.name not in LATENTS:
        raise NotPlanned(
            f"kv_lora_rank: whether vLLM keeps latents of a {model.name} is not known here; "
            + TO_BE_SEEN
        )
    if model.v_dim != model.head_dim:
        raise NotPlanned(
            f"v_head_dim = {model.v_dim} is not head_dim = {model.head_dim}: whether vLLM pads V "
            f"differs from model to model; {TO_BE_SEEN}"
        )
    if model.window_head_dim:
        raise NotPlanned(
            "sliding layers have KV of another shape than the others, and how many tokens vLLM "
            f"gives to their blocks it chooses by itself; {TO_BE_SEEN}"
        )


def _model_type(model: Model, asked: str) -> str:
    """That of the model in vLLM: it computes in half precision what is saved as float32."""
    dtype = MODEL_TYPES.get(asked, asked)
    if dtype == "auto":
        dtype = "bfloat16" if model.dtype == "float32" else model.dtype
    if dtype not in MODEL_BYTES:
        raise NotPlanned(f"{dtype} is none of {', '.join(MODEL_BYTES)}: say vLLM's --dtype")
    return dtype


def _element_bytes(config: Mapping[str, object], dtype: str, kv_cache_dtype: str) -> int:
    if kv_cache_dtype != "auto":
        if kv_cache_dtype not in KV_BYTES:
            raise NotPlanned(
                f"--kv-cache-dtype {kv_cache_dtype} is none of {', '.join(KV_BYTES)}, and how "
                f"others are packed is their kernel's; {TO_BE_SEEN}"
            )
        return KV_BYTES[kv_cache_dtype]
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if _quantised(config.get("quantization_config"), key):
            raise NotPlanned(
                f"quantization_config.{key}: the checkpoint chooses the type of its KV; say which "
                "by --kv-cache-dtype, here and to vLLM"
            )
    return MODEL_BYTES[dtype]


def _quantised(found: object, key: str) -> bool:
    """Whether that is said, at the top or in a table within."""
    if not isinstance(found, dict):
        return False
    return bool(found.get(key)) or _quantised(found.get("quantization"), key)


def _elements(model: Model, ranks: int) -> int:
    """Of a token, in one layer of one rank; neighbours have the same head where there are few."""
    if model.latent_dim:
        return model.latent_dim + model.rope_dim  # each rank has all of it
    if model.heads % ranks and ranks % model.heads:
        raise NotPlanned(
            f"{model.heads} KV heads cannot be divided among {ranks} ranks, nor each be given to "
            "as many of them: vLLM refuses that --tensor-parallel-size"
        )
    return max(1, model.heads // ranks) * 2 * model.head_dim


def _unknown(model: Model, facts: ModelFacts, block_size: int) -> tuple[str, ...]:
    kernel = (
        f"whether its attention kernel takes blocks of {block_size} tokens, and adds nothing to "
        "them; an engine that lays blocks out otherwise refuses this pool when it starts, and "
        "prints the one that fits"
    )
    if model.latent_dim:
        kernel += (
            ". For latents vLLM on a processor takes blocks of 16 whatever it is told, or "
            "multiples of 32 where that has AMX"
        )
    found = [kernel, "who packs the blocks, so there is no pool.tag; namespaces tell engines apart"]
    drafts = facts.maybe("num_nextn_predict_layers")
    more = f", as {drafts} of its own would be" if drafts else ""
    found.append(
        "layers of a model that drafts (--speculative-config): they come on top of these" + more
    )
    return tuple(found)
