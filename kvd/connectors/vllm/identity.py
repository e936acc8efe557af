"""What the KV of an engine is of: the namespace that no unlike engine has.

Two engines may use each other's KV if everything that decides its values is equal: the weights, the
configuration of the model as it is in effect, types, quantisation, how blocks are packed. All that
is digested, and the digest is in the name. Whatever a later version of vLLM adds to its
configuration counts too, until it is known not to: a needless miss is better than wrong tokens.
What only decides how values are computed (kernels, compilation, batches, ranks) is left out. What
cannot be described is a random number: such an engine shares with nobody.

A name reads ``PARTITION/MODEL@REVISION:DTYPE:DIGEST``; requests with an adapter or a salt have
``#lora=...;salt=...`` behind it. What stands before the ``#`` is the base: new weights end what is
cached of all its members at once.

Nothing here imports vLLM: its objects are read by the names of their fields.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from kvd.connectors.attributes import attribute
from kvd.connectors.identity import (
    DIGEST_CHARS,
    MEMBER,
    EngineIdentity,
    IdentityParts,
    UnknownWeights,
    described,
    digest_of,
    plain,
)
from kvd.connectors.vllm.weights import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import AdapterWeights

SCHEME: Final = 1
"""Of what is digested: another number is another name for the same KV."""

MOST: Final = {
    "partition": 24,
    "model": 40,
    "revision": 10,
    "dtype": 8,
    "kv": 8,
    "adapter": 16 + 1 + DIGEST_CHARS,
}
"""Characters of what can be read in a name; the digest tells apart what was cut."""

LOADERS: Final = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "gguf"),
        *("instanttensor", "bitsandbytes", "sharded_state", "runai_streamer"),
        "runai_streamer_sharded",
    }
)
"""Load formats that read the files at the model's path. What others load nobody can see here."""

MODEL_APART: Final = frozenset(
    {
        *("model", "model_weights", "hf_config", "hf_text_config", "dtype", "quantization"),
        *("quantization_config", "multimodal_config", "revision", "hf_config_path"),
        # In effect in hf_config.
        *("hf_overrides", "config_format"),
        # Before tokens, and behind logits.
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        *("served_model_name", "generation_config", "override_generation_config"),
        *("max_logprobs", "logprobs_mode", "logits_processors", "pooler_config", "seed"),
        *("return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay"),
        *("io_processor_plugin", "renderer_num_workers", "spec_target_max_model_len"),
        # How, where and by whom it is run.
        *("enforce_eager", "disable_cascade_attn", "enable_sleep_mode", "sleep_mode_backend"),
        *("sleep_preserve_parameter_names", "sleep_mode_offload_cudagraph"),
        *("enable_nccl_comm_suspend", "enable_cumem_allocator", "hf_token", "trust_remote_code"),
        *("allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization"),
        "is_submodel_config",
    }
)
"""Fields of ``ModelConfig`` that are a part of their own, or decide no value of KV."""

MULTIMODAL_APART: Final = frozenset(
    {
        *("limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type"),
        *("mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode"),
        *("mm_encoder_attn_backend", "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
        *("enable_mm_embeds", "allow_missing_mm_embeddings", "mm_encoder_fp8_scale_save_path"),
        "mm_encoder_fp8_scale_save_margin",
    }
)
"""Of ``MultiModalConfig``."""

CACHE_APART: Final = frozenset(
    {
        # How much there is, and how it is found again.
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks", "num_cpu_blocks"),
        *("num_gpu_blocks_override", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        *("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_match_unit"),
        *("prefix_cache_retention_interval", "hash_block_size", "cache_hit_alignment_tokens"),
        *("effective_attention_block_size", "user_specified_block_size", "_block_size_resolved"),
        *("kv_offloading_size", "kv_offloading_backend", "is_attention_free"),
    }
)
"""Of ``CacheConfig``."""

LOAD_APART: Final = frozenset(
    {
        *("download_dir", "device", "use_tqdm_on_load", "pt_load_map_location"),
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        # Formats differ in how files are read; which are read shows in the directory.
        "safetensors_load_strategy",
    }
)
"""Of ``LoadConfig``."""

DRAFT_APART: Final = frozenset(
    {
        *("target_model_config", "target_parallel_config", "draft_parallel_config"),
        *("draft_model_config", "draft_load_config", "model", "enforce_eager", "moe_backend"),
        *("draft_tensor_parallel_size", "tensor_parallel_size", "draft_sample_method"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    }
)
"""Of ``SpeculativeConfig``."""

WITHOUT_KV: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways to speculate that have no model, and so no KV."""

LORA_APART: Final = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora"})
"""Of ``LoRAConfig``."""

BLOCK_APART: Final = frozenset({"num_kv_heads", "num_heads"})
"""Of ``KVCacheSpec``: those of a rank. The pool says how ranks share a page."""

CONTEXT: Final = (
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "dcp_kv_cache_interleave_size",
    "cp_kv_cache_interleave_size",
)
"""Of ``ParallelConfig``: they lay tokens out among ranks."""

FURTHER: Final = ("mamba_config", "engram_config", "diffusion_config", "additional_config")
"""Of ``VllmConfig``, taken whole."""

ENVIRONMENT: Final = (
    "VLLM_CPU_INT4_W4A8",
    "VLLM_BATCH_INVARIANT",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "K_SCALE_CONSTANT",
    "V_SCALE_CONSTANT",
)
"""Variables that change values, or how blocks hold them; the layout is a part of its own."""


class BlockPacking(msgspec.Struct, frozen=True):
    """How the workers pack a block, as they have found it in their layers.

    ``tag`` is for ``[pool] tag``. ``details``: what else decides the bytes, such as scales.
    """

    tag: str
    details: dict[str, str] = {}


# ---- of an engine ------------------------------------------------------------------------------


def identity_of(  # noqa: PLR0913 - each is another place where a part is found
    config: Any,
    options: VllmOptions,
    packing: BlockPacking,
    *,
    block_specs: Sequence[tuple[Sequence[str], object]],
    version: str,
    since_ns: int,
    environment: Mapping[str, str],
    snapshot: Callable[[str, str | None, str | None], str | None],
    changed_by: str = "",
) -> EngineIdentity:
    """What its KV is of.

    Args:
        config: of vLLM, complete.
        options: what the user has set.
        packing: what the workers say.
        block_specs: of each group of layers their names and the ``KVCacheSpec`` of their blocks.
        version: of vLLM.
        since_ns: when this process began; its weights were read behind that.
        environment: variables of this process.
        snapshot: where the hub's cache has a repository, by name, revision and cache directory;
            None: it has not.
        changed_by: by which call the weights may have been changed since they were read.
    """
    model = config.model_config
    gathered = IdentityParts()

    def files_of(model: Any, load: Any) -> str:
        return _weights(model, load, options, since_ns, environment, snapshot)

    gathered.add("scheme", lambda: SCHEME)
    gathered.add("engine", lambda: f"vllm {series_of(version)}")
    gathered.add("namespace", lambda: options.namespace)
    gathered.add("weights", lambda: _lasting(config, options, files_of, changed_by))
    gathered.add("draft", lambda: _draft(config, files_of))
    gathered.add("multimodal", lambda: _multimodal(model.multimodal_config, since_ns))
    if options.weights and model.multimodal_config is not None:
        gathered.add("prepared", lambda: _prepared(model, config.load_config, since_ns, snapshot))
    gathered.add(
        "environment", lambda: {n: environment[n] for n in ENVIRONMENT if n in environment}
    )
    gathered.add("blocks", lambda: _blocks(block_specs))
    gathered.add("packing", lambda: packing.tag)
    gathered.add("packing_details", lambda: packing.details)
    _add_configuration(gathered, config)
    readable = _readable(model, config.cache_config, options)
    return EngineIdentity(f"{readable}:{gathered.digest()}", gathered.found, tuple(gathered.alone))


def _add_configuration(gathered: IdentityParts, config: Any) -> None:
    """What the user, and the files of the model, have set."""
    model = config.model_config
    gathered.add("model", lambda: model_name(model))
    gathered.add("dtype", lambda: str(model.dtype))
    gathered.add("config", lambda: described(model.hf_config))
    gathered.add("text_config", lambda: described(model.hf_text_config))
    gathered.add("quantization", lambda: [model.quantization, described(model.quantization_config)])
    gathered.add("model_options", lambda: described(model, apart=MODEL_APART))
    gathered.add("load", lambda: described(config.load_config, apart=LOAD_APART))
    gathered.add("kv_cache", lambda: described(config.cache_config, apart=CACHE_APART))
    gathered.add("attention", lambda: described(attribute(config, "attention_config")))
    gathered.add(
        "context_parallel", lambda: [attribute(config.parallel_config, name) for name in CONTEXT]
    )
    gathered.add("further", lambda: [described(attribute(config, name)) for name in FURTHER])
    if (stages := attribute(config.parallel_config, "pipeline_parallel_size") or 1) > 1:
        # Whose layers a rank has decides what lies in its part of a page.
        gathered.add("stages", lambda: stages)


def _readable(model: Any, cache: Any, options: VllmOptions) -> str:
    name = plain(model_name(model), MOST["model"])
    if model.revision:
        name += "@" + plain(model.revision, MOST["revision"])
    words = [name, plain(str(model.dtype).removeprefix("torch."), MOST["dtype"])]
    if cache.cache_dtype != "auto":
        words.append("kv-" + plain(str(cache.cache_dtype), MOST["kv"]))
    partition = plain(options.namespace, MOST["partition"])
    return (f"{partition}/" if partition else "") + ":".join(words)


def model_name(model: Any) -> str:
    """The last word of its path; of a path in the hub's cache, the repository's."""
    parts = Path(str(model.model)).parts
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return parts[-1] if parts else ""


def series_of(version: str) -> str:
    """What of a version decides how blocks are packed: of a release the first two numbers."""
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\+.*)?", version)
    return release[1] if release else version


def _lasting(
    config: Any, options: VllmOptions, files_of: Callable[[Any, Any], str], changed_by: str
) -> str:
    """Of the model, unless they can be replaced while it runs, or were.

    Raises:
        UnknownWeights: they can; or nobody can say which they are.
    """
    by = ""
    if changed_by and not options.weights:
        raise UnknownWeights(
            f"{changed_by} may have changed its weights while it ran; name the weights by "
            "kvd.weights"
        )
    if attribute(config, "weight_transfer_config") is not None:
        by = "weight_transfer_config"
    elif extension := attribute(config.parallel_config, "worker_extension_cls"):
        by = f"worker extension {extension}"
    if by and not options.weights:
        raise UnknownWeights(
            f"the {by} of this engine can replace its weights while it runs; name the weights by "
            "kvd.weights"
        )
    return files_of(config.model_config, config.load_config)


def _weights(
    model: Any,
    load: Any,
    options: VllmOptions,
    since_ns: int,
    environment: Mapping[str, str],
    snapshot: Callable[[str, str | None, str | None], str | None],
) -> str:
    """Those of a model.

    Raises:
        UnknownWeights: nobody can say.
    """
    if options.weights:
        return f"named {options.weights}"
    if load.load_format not in LOADERS:
        raise UnknownWeights(
            f"--load-format {load.load_format} loads what cannot be seen in files; name the "
            "weights by kvd.weights"
        )
    if model.model_weights:
        raise UnknownWeights(f"{model.model_weights} is no path of this host")
    path = Path(str(model.model))
    if not path.exists():
        path = _from_hub(model, load, since_ns, environment, snapshot)
    return weight_files(path, since_ns=since_ns).in_words()


def _from_hub(
    model: Any,
    load: Any,
    since_ns: int,
    environment: Mapping[str, str],
    snapshot: Callable[[str, str | None, str | None], str | None],
) -> Path:
    is_elsewhere = environment.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}
    found = None if is_elsewhere else snapshot(model.model, model.revision, load.download_dir)
    if found is None:
        raise UnknownWeights(f"{model.model} is not in the cache of the Hugging Face hub")
    commit, branch = Path(found).name, model.revision or "main"
    ref = Path(found).parents[1] / "refs" / branch
    if branch != commit and not (ref.is_file() and ref.stat().st_ctime_ns <= since_ns):
        # It may have moved on between the configuration, the weights and this look.
        raise UnknownWeights(
            f"{model.model} is {commit} in the hub's cache, and was not known to be {branch!r} "
            "when this engine began; start it again, or give the commit for a --revision"
        )
    return Path(found)


def _multimodal(config: Any, since_ns: int) -> object:
    if config is None:
        return None
    scales = attribute(config, "mm_encoder_fp8_scale_path")
    files = weight_files(Path(scales), since_ns=since_ns).in_words() if scales else ""
    return [described(config, apart=MULTIMODAL_APART), files]


def _prepared(
    model: Any,
    load: Any,
    since_ns: int,
    snapshot: Callable[[str, str | None, str | None], str | None],
) -> object:
    """What its files say of how images and sound are prepared, where its weights have a name.

    What vLLM calls an image is a digest of what it is before that.
    """
    path = str(model.model)
    if not Path(path).is_dir():
        path = snapshot(path, model.revision, load.download_dir) or ""
    files = sorted(Path(path).glob("*processor_config.json")) if path else []
    return [[file.name, weight_files(file, since_ns=since_ns).digest] for file in files]


def _blocks(specs: Sequence[tuple[Sequence[str], object]]) -> object:
    """Of one group the layers are a part of how workers pack."""
    found = [(list(names), described(spec, apart=BLOCK_APART)) for names, spec in specs]
    return found if len(found) > 1 else found[0][1]


def _draft(config: Any, files_of: Callable[[Any, Any], str]) -> object:
    """Of a model that drafts: its layers have blocks, and KV, beside those of the other."""
    speculation = config.speculative_config
    if speculation is None or speculation.method in WITHOUT_KV:
        return None
    model = speculation.draft_model_config
    if model is None:
        return described(speculation, apart=DRAFT_APART)
    return [
        described(speculation, apart=DRAFT_APART),
        described(model.hf_config),
        described(model, apart=MODEL_APART),
        str(model.dtype),
        files_of(model, speculation.draft_load_config or config.load_config),
    ]


# ---- of a request ------------------------------------------------------------------------------


def adapter_rules(lora_config: Any) -> str:
    """What an engine makes of every adapter; what cannot be described is its alone."""
    gathered = IdentityParts()
    gathered.add("lora", lambda: described(lora_config, apart=LORA_APART))
    return gathered.found["lora"]


def namespace_of(base: str, adapter: str | None, salt: str | None) -> str:
    """Requests that share KV have one namespace: of an engine's base, adapter and cache salt.

    Args:
        base: an identity's namespace.
        adapter: as ``AdapterQuestion`` says it.
        salt: as the request says it: a secret of its user, maybe, and tables show namespaces.
    """
    members = []
    if adapter:
        name = plain(adapter, MOST["adapter"])
        if name != adapter:
            name = f"{name[: -DIGEST_CHARS - 1]}-{digest_of(adapter)}"
        members.append(f"lora={name}")
    if salt:
        members.append(f"salt={digest_of(salt)}")
    return f"{base}{MEMBER}{';'.join(members)}" if members else base


class PendingName(Protocol):
    """What an adapter is known by, as soon as somebody has found it out."""

    weights: AdapterWeights | None
    """What the name stands for, once it is known; None: nobody holds anything against it."""

    @property
    def number(self) -> int:
        """That vLLM gave the adapter."""
        ...

    def poll(self) -> str | None:
        """None while it is being found out.

        Raises:
            UnknownWeights: nobody knows.
        """
        ...


class RequestNamespace:
    """That of one request: see ``namespace_of``."""

    def __init__(self, base: str, adapter: PendingName | None, salt: str | None) -> None:
        self.known = base if adapter is None and not salt else ""
        """Once ``poll`` has said it, or at once, where it is the engine's own."""
        self.adapter: AdapterWeights | None = None
        """What vLLM must have read for its adapter, if anybody looks."""
        self.number = None if adapter is None else adapter.number
        """That vLLM gave its adapter; None: it has none."""
        self._base = base
        self._adapter = adapter
        self._salt = salt

    def poll(self) -> str | None:
        """The namespace; None while its adapter is being looked at.

        Raises:
            UnknownWeights: nobody knows its adapter.
        """
        adapter = None
        if self._adapter is not None:
            adapter = self._adapter.poll()
            if adapter is None:
                return None
            self.adapter = self._adapter.weights
        self.known = namespace_of(self._base, adapter, self._salt)
        return self.known


# ---- what the workers pack ---------------------------------------------------------------------


def packing_of(
    layers: Mapping[str, Any],
    modules: Mapping[str, Any],
    *,
    version: str,
    layout: str | None,
    cache_dtype: str,
) -> BlockPacking:
    """How this worker packs a block.

    Args:
        layers: the tensor of each layer.
        modules: the layers themselves, as far as they are known.
        version: of vLLM.
        layout: the name of its KV cache layout.
        cache_dtype: what the user has asked for, ``auto`` mostly.
    """
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in layers.values()})
    stored = "+".join(dtypes) if cache_dtype == "auto" else f"{cache_dtype}/{'+'.join(dtypes)}"
    kernels = sorted({_kernel(modules[name]) for name in layers if name in modules})
    words = ["vllm", series_of(version), str(layout), stored, *kernels]
    scales = {name: _scales(modules[name]) for name in layers if name in modules}
    details = {
        "layers": digest_of(json.dumps(list(layers))),
        "n_layers": str(len(layers)),
        "scales": digest_of(json.dumps(scales, sort_keys=True)),
    }
    return BlockPacking(" ".join(words), details)


def _kernel(layer: Any) -> str:
    """Who packs: the kernel, and for which processor, where kernels differ in that."""
    name: str = layer.get_attn_backend().get_name()
    isa = attribute(layer, "isa")
    return f"{name}/{isa}" if isa else name


def _scales(layer: Any) -> list[list[float]]:
    """By which what is stored is divided."""
    found = []
    for name in ("_k_scale", "_v_scale"):
        scale = attribute(layer, name)
        found.append([] if scale is None else [float(x) for x in scale.flatten().tolist()])
    return found


def agreed(packings: Iterable[BlockPacking]) -> BlockPacking | None:
    """What all ranks say, in their order; None: they pack differently, or there is none."""
    found = list(packings)
    if len({packing.tag for packing in found}) != 1:
        return None
    if all(packing == found[0] for packing in found):
        return found[0]
    details = {
        name: " ".join(packing.details.get(name, "") for packing in found)
        for name in found[0].details
    }
    return BlockPacking(found[0].tag, details)
