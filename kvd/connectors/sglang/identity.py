"""Whose pages an SGLang stores: the namespace that no unlike engine has.

SGLang hands a store the name that a model is served by, which says nothing of its weights. So what
decides the values of KV is read from the arguments of its server: the files of the weights, types,
quantisation, what is overridden of the configuration. How pages are packed, and which part of the
model a rank has, count too: bytes of another layout, dtype or rank are not its own. Adapters and
salts are in SGLang's own hashes of pages.

Weights that are changed in a running engine are nobody's in particular: a plugin of SGLang's sees
that they are about to be (``WeightChanges``), and from then on that engine finds and stores
nothing. SGLang writes pages from queues, so pages of before may come behind the change.

What cannot be found out is a random number: such an engine shares with nobody, and finds nothing
of before its own start. ``weights`` in the extra configuration is a name for them, in their place.

Nothing here imports SGLang: its objects are read by the names of their fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvd.connectors.attributes import attribute
from kvd.connectors.identity import (
    EngineIdentity,
    IdentityParts,
    UnknownWeights,
    described,
    plain,
)
from kvd.connectors.vllm.weights import weight_files

if TYPE_CHECKING:
    from kvd.connectors.sglang.host_pages import HostPages
    from kvd.connectors.sglang.options import StorageOptions

SCHEME: Final = 1
"""Of what is digested: another number is another name for the same KV."""

MOST: Final = {"partition": 24, "model": 40, "dtype": 16}
"""Characters of what can be read in a name; the digest tells apart what was cut."""

ARGUMENTS: Final = (
    *("revision", "dtype", "quantization", "kv_cache_dtype", "quantization_param_path"),
    *("json_model_override_args", "load_format", "model_loader_extra_config", "model_impl"),
    *("speculative_algorithm", "modelopt_quant", "torchao_config", "rl_quant_profile"),
)
"""Of the server: those that decide values of KV, beside the weights."""


UPDATES: Final = tuple(
    f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}"
    for name in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
)
"""Of SGLang's scheduler: what changes the weights of a running engine."""


class WeightChanges:
    """Whether the weights of this process are still those that it began with.

    Attributes:
        is_watched: whether anybody would see that they change.
        why_over: why nothing is to be stored any more; empty: they are.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.why_over = ""

    def begin(self, *_args: object, **_kwargs: object) -> None:
        """They are about to change; SGLang calls it before."""
        self.why_over = "the weights were changed in this engine; start it again to use the pool"


weight_changes: Final = WeightChanges()
"""Of this process."""


def identity_of_pages(
    config: Any, server: Any, pages: HostPages, options: StorageOptions, *, version: str
) -> EngineIdentity:
    """The namespace of what this rank stores of one host pool.

    Args:
        config: SGLang's ``HiCacheStorageConfig``.
        server: its ``ServerArgs``; None: this is no server.
        pages: of the host pool.
        options: what the user has set.
        version: of SGLang.
    """
    gathered = IdentityParts()
    gathered.add("scheme", lambda: SCHEME)
    gathered.add("engine", lambda: "sglang " + ".".join(version.split(".")[:2]))
    gathered.add("served", lambda: config.model_name or "")
    gathered.add("weights", lambda: _weights(server, "model_path", options))
    gathered.add("draft", lambda: _draft(server, options))
    gathered.add("arguments", lambda: _arguments(server))
    gathered.add("rank", lambda: rank_of(config))
    gathered.add("pool", lambda: pages.name)
    gathered.add("packing", pages.in_words)
    name = plain(str(config.model_name or "model").rstrip("/").rpartition("/")[2], MOST["model"])
    before = f"{plain(options.partition, MOST['partition'])}/" if options.partition else ""
    dtype = plain(pages.dtype.removeprefix("torch."), MOST["dtype"])
    namespace = f"{before}{name}:{dtype}:{gathered.digest()}"
    return EngineIdentity(namespace, gathered.found, tuple(gathered.alone))


def rank_of(config: Any) -> dict[str, object]:
    """Which part of the model, of which division of it; where all ranks have all, that is said."""
    part = {
        "stage": (config.pp_rank, config.pp_size),
        "context": (config.attn_cp_rank, config.attn_cp_size),
        "decode context": (config.dcp_rank, config.dcp_size),
    }
    if config.is_mla_model:
        return {**part, "tensor": "all"}
    return {**part, "tensor": (config.tp_rank, config.tp_size)}


def _weights(server: Any, field: str, options: StorageOptions) -> str:
    if options.weights:
        return f"named {options.weights}"
    path = attribute(server, field)
    if not path:
        raise UnknownWeights("there are no arguments of a server here: name the weights")
    if not Path(path).exists():
        raise UnknownWeights(
            f"{path} is no path here, and what was read of a hub is not seen: name the weights, "
            "or give the directory that they were downloaded to"
        )
    return weight_files(Path(path), since_ns=options.since_ns).in_words()


def _draft(server: Any, options: StorageOptions) -> str:
    """Of a model that drafts, whose KV is in pools of its own; its name alone if they are named."""
    path = attribute(server, "speculative_draft_model_path")
    if not path or options.weights:
        return str(path or "")
    return _weights(server, "speculative_draft_model_path", options)


def _arguments(server: Any) -> object:
    return {name: described(attribute(server, name)) for name in ARGUMENTS}
