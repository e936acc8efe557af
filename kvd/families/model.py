"""What a model keeps per token and per request, read from its Hugging Face ``config.json``.

Only the JSON is read: no model library, no weights. Public configurations leave out what their
model class defaults; those defaults that decide about memory are in ``_DEFAULTS``. What cannot be
told is a ``NotPlanned`` with the key that is missing, never a guess.

Of recurrent layers a convolution keeps the last ``kernel - 1`` columns of its input in the type of
the model; what is carried from token to token is summed up, so it is kept in float32 unless the
model says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_GEMMA3: Final[dict[str, object]] = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}

_DEFAULTS: Final[dict[str, dict[str, object]]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
}
"""What a model class assumes where its configuration says nothing, by ``model_type``."""

_ENCODERS: Final = frozenset(
    {
        *("albert", "bert", "bge", "camembert", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "esm", "eurobert", "ibert", "modernbert", "mpnet", "new", "nomic_bert"),
        *("roberta", "rembert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Models that read a whole text at once and keep nothing of it."""

_DTYPES: Final = {"half": "float16", "float": "float32"}

_SLIDING: Final = "sliding_attention"
_FULL: Final = frozenset({"full_attention", "attention", "chunked_attention", "global"})

INDEX_DTYPE: Final = "uint8"
INDEX_SCALE_BYTES: Final = 4
"""A key of an index is kept as 8-bit elements with one float32 scale, byte by byte."""


class NotPlanned(Exception):
    """A configuration does not say enough; the message names the key."""


class ModelFacts:
    """A table of keys. Numbers are whole, and not negative."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def get(self, key: str) -> object:
        """Whatever stands there; None for nothing."""
        return self.values.get(key)

    def number(self, *keys: str) -> int:
        """The first of ``keys`` that is there: at least 1.

        Raises:
            NotPlanned: none is there, or it is none.
        """
        found = self.maybe(*keys)
        if not found:
            raise NotPlanned(f"{' or '.join(keys)} is missing")
        return found

    def maybe(self, *keys: str) -> int:
        """The first of ``keys`` that is there and not null; 0 for none.

        Raises:
            NotPlanned: it is no whole number, or negative.
        """
        for key in keys:
            found = self.values.get(key)
            if found is None:
                continue
            if not isinstance(found, int) or isinstance(found, bool) or found < 0:
                raise NotPlanned(f"{key} = {found!r} is no whole number")
            return found
        return 0

    def text(self, key: str) -> str:
        """The text at ``key``.

        Raises:
            NotPlanned: there is none.
        """
        found = self.values.get(key)
        if not isinstance(found, str):
            raise NotPlanned(f"{key} is missing")
        return found

    def kinds(self, key: str) -> list[str]:
        """The list of texts at ``key``; empty for none."""
        found = self.values.get(key)
        return [str(text) for text in found] if isinstance(found, list) else []


class Model(msgspec.Struct, frozen=True):
    """The layers of a model by what they keep of a sequence.

    ``window_layers`` look back ``window_tokens``; ``state_layers`` keep ``state``, a table of
    tensors. ``latent_dim`` is 0 for K and V per head, ``index_dim`` 0 for no index.
    """

    name: str
    dtype: str
    context_tokens: int
    is_encoder: bool = False
    layers: int = 0
    heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    window_layers: int = 0
    window_tokens: int = 0
    window_heads: int = 0
    window_head_dim: int = 0
    window_v_dim: int = 0
    """0 in these three: as in the other layers."""
    index_dim: int = 0
    index_topk: int = 0
    state_layers: int = 0
    state: dict[str, str] = {}

    @property
    def attention_layers(self) -> int:
        """Layers with KV, sliding or not."""
        return self.layers + self.window_layers

    @property
    def without_kv(self) -> str | None:
        """Why KV is not all that there is to keep, or none of it; None where it is."""
        if self.state_layers:
            return "its recurrent layers carry a state, which only family recurrent holds"
        if self.is_encoder:
            return "it reads a text at once and decodes nothing, so no KV is ever read again"
        return None


def model_of(config: Mapping[str, object]) -> Model:
    """The model that ``config`` describes; of one with several parts, the language model.

    Raises:
        NotPlanned: a key is missing or is not what it should be; the message names it.
    """
    facts = facts_of(config)
    kind = facts.text("model_type")
    dtype = _dtype(config, facts)
    if facts.get("compress_ratios") is not None:
        raise NotPlanned("compress_ratios: KV that is compressed over tokens is of no family here")
    n_layers = facts.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    read = _READERS.get(kind)
    states = _States(0, {}, n_layers) if read is None else read(facts, n_layers, dtype)
    model = Model(
        name=kind,
        dtype=dtype,
        context_tokens=_context(facts),
        state_layers=states.layers,
        state=states.tensors,
    )
    if not states.attention_layers:
        return model
    attending, sliding, window = states.attention_layers, 0, 0
    # Layers at the end that read the KV of earlier ones have none of their own.
    shared = facts.maybe("num_kv_shared_layers")
    if shared >= n_layers:
        raise NotPlanned(f"num_kv_shared_layers = {shared} leaves none of {n_layers} layers")
    if read is None:
        attending = n_layers - shared
        sliding, window = _windows(facts, attending)
    model = msgspec.structs.replace(
        model,
        is_encoder=kind in _ENCODERS or facts.get("is_causal") is False,
        layers=attending - sliding,
        window_layers=sliding,
        window_tokens=window,
    )
    return _with_shape(model, facts)


def _with_shape(model: Model, facts: ModelFacts) -> Model:
    """What a token of one layer takes: one latent, or K and V of each head."""
    latent = facts.maybe("kv_lora_rank")
    if latent:
        index = facts.maybe("index_head_dim")
        return msgspec.structs.replace(
            model,
            latent_dim=latent,
            rope_dim=facts.number("qk_rope_head_dim"),
            index_dim=index + INDEX_SCALE_BYTES if index else 0,
            index_topk=facts.maybe("index_topk"),
        )
    heads = facts.number("num_attention_heads", "n_head", "n_heads")
    head_dim = facts.maybe("head_dim", "attention_head_dim")
    if not head_dim:
        head_dim = facts.number("hidden_size", "n_embd", "d_model", "dim") // heads
    is_shared = facts.get("multi_query") is True
    kv_heads = 1 if is_shared else facts.maybe("num_key_value_heads", "n_head_kv") or heads
    v_dim = facts.maybe("v_head_dim") or head_dim
    model = msgspec.structs.replace(model, heads=kv_heads, head_dim=head_dim, v_dim=v_dim)
    return _with_window_shape(model, facts) if model.window_layers else model


def _with_window_shape(model: Model, facts: ModelFacts) -> Model:
    """Where sliding layers and the others differ: either of them may have keys of its own."""
    full_dim = facts.maybe("global_head_dim")
    full = {
        "heads": facts.maybe("num_global_key_value_heads") or model.heads,
        "head_dim": full_dim or model.head_dim,
        "v_dim": full_dim or model.v_dim,
    }
    sliding = {
        "window_heads": facts.maybe("swa_num_key_value_heads") or model.heads,
        "window_head_dim": facts.maybe("swa_head_dim") or model.head_dim,
        "window_v_dim": facts.maybe("swa_v_head_dim") or model.v_dim,
    }
    if list(sliding.values()) == list(full.values()):
        return model
    return msgspec.structs.replace(model, **full, **sliding)


def facts_of(config: Mapping[str, object]) -> ModelFacts:
    """The part that describes the language model, over what its class assumes."""
    inner: Mapping[str, object] = config
    for part in ("text_config", "llm_config", "language_config", "thinker_config"):
        found = inner.get(part)
        if isinstance(found, dict):
            inner = {"model_type": inner.get("model_type"), **found}
    kind = inner.get("model_type")
    return ModelFacts({**_DEFAULTS.get(str(kind), {}), **inner})


def _dtype(config: Mapping[str, object], facts: ModelFacts) -> str:
    """Of the weights, which is that of the KV unless it is quantised."""
    for key in ("torch_dtype", "dtype"):
        for where in (facts.values, config):
            found = where.get(key)
            if isinstance(found, str):
                return _DTYPES.get(found, found.removeprefix("torch."))
    return "bfloat16"


def _context(facts: ModelFacts) -> int:
    """The longest sequence it was made for; 0 where the configuration does not say."""
    return facts.maybe("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def _windows(facts: ModelFacts, n_layers: int) -> tuple[int, int]:
    """How many layers slide, and how far each looks back."""
    window = facts.maybe("sliding_window", "sliding_window_size")
    if not window or facts.get("use_sliding_window") is False:
        return 0, 0
    kinds = facts.get("layer_types")
    pattern = facts.get("hybrid_layer_pattern")
    if isinstance(pattern, list):
        kinds = [_SLIDING if kind == 1 else "full_attention" for kind in pattern]
    if isinstance(kinds, list):
        kinds = kinds[:n_layers]
        unknown = sorted({str(kind) for kind in kinds} - _FULL - {_SLIDING})
        if unknown:
            raise NotPlanned(f"layer_types holds {', '.join(unknown)}, of which nothing is known")
        sliding = kinds.count(_SLIDING)
    elif period := facts.maybe("sliding_window_pattern", "_sliding_window_pattern"):
        sliding = n_layers - n_layers // period
    elif facts.get("use_sliding_window") is True:
        sliding = max(0, n_layers - facts.maybe("max_window_layers"))
    else:
        sliding = n_layers
    return sliding, window if sliding else 0


# ---- states of recurrent layers ---------------------------------------------------------------


class _States(msgspec.Struct, frozen=True):
    """``layers`` with the ``tensors`` of one state, beside ``attention_layers`` with KV."""

    layers: int
    tensors: dict[str, str]
    attention_layers: int


def _tensors(
    facts: ModelFacts, dtype: str, conv: tuple[int, int], ssm: tuple[int, ...]
) -> dict[str, str]:
    carried = facts.get("mamba_ssm_dtype") or "float32"
    columns, kernel = conv
    shape = ",".join(str(size) for size in ssm)
    return {"conv": f"{dtype}[{columns},{kernel - 1}]", "ssm": f"{carried}[{shape}]"}


def _mamba(facts: ModelFacts, n_layers: int, dtype: str) -> _States:
    """Mamba: one channel at a time."""
    inner = facts.maybe("intermediate_size", "d_inner")
    inner = inner or facts.number("expand") * facts.number("hidden_size", "d_model")
    kernel, size = facts.number("conv_kernel", "d_conv"), facts.number("state_size", "d_state")
    return _States(n_layers, _tensors(facts, dtype, (inner, kernel), (inner, size)), 0)


def _heads(facts: ModelFacts, dtype: str) -> dict[str, str]:
    """The state of one Mamba-2 layer."""
    heads = facts.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = facts.maybe("mamba_d_head", "mamba_head_dim") or facts.number("head_dim")
    groups = facts.number("mamba_n_groups", "n_groups")
    size = facts.number("mamba_d_state", "ssm_state_size", "state_size")
    kernel = facts.number("mamba_d_conv", "conv_kernel")
    columns = heads * head_dim + 2 * groups * size
    return _tensors(facts, dtype, (columns, kernel), (heads, head_dim, size))


def _hybrid(facts: ModelFacts, n_layers: int, dtype: str) -> _States:
    """Bamba and Granite: Mamba-2 layers, some of them attention instead."""
    kinds = facts.kinds("layer_types") or facts.kinds("layers_block_type")
    if kinds:
        attending = sum(kind in {"attention", "full_attention"} for kind in kinds)
    else:
        attending = len(facts.kinds("attn_layer_indices"))
    return _States(n_layers - attending, _heads(facts, dtype), attending)


def _patterned(facts: ModelFacts, _n_layers: int, dtype: str) -> _States:
    """Nemotron-H: a letter for each layer, ``M`` and ``*``; the others keep nothing."""
    pattern = facts.text("hybrid_override_pattern")
    return _States(pattern.count("M"), _heads(facts, dtype), pattern.count("*"))


def _jamba(facts: ModelFacts, n_layers: int, dtype: str) -> _States:
    """Jamba: Mamba layers, attention once per period."""
    period, offset = facts.number("attn_layer_period"), facts.maybe("attn_layer_offset")
    attending = sum(layer % period == offset for layer in range(n_layers))
    inner = facts.number("mamba_expand") * facts.number("hidden_size")
    kernel, size = facts.number("mamba_d_conv"), facts.number("mamba_d_state")
    tensors = _tensors(facts, dtype, (inner, kernel), (inner, size))
    return _States(n_layers - attending, tensors, attending)


def _delta(facts: ModelFacts, n_layers: int, dtype: str) -> _States:
    """Qwen3-Next: gated delta networks, attention in every fourth layer."""
    kinds = facts.kinds("layer_types")
    attending = kinds.count("full_attention")
    if not kinds:
        attending = n_layers // facts.number("full_attention_interval")
    k_heads, v_heads = facts.number("linear_num_key_heads"), facts.number("linear_num_value_heads")
    k_dim, v_dim = facts.number("linear_key_head_dim"), facts.number("linear_value_head_dim")
    columns = 2 * k_heads * k_dim + v_heads * v_dim
    conv = (columns, facts.number("linear_conv_kernel_dim"))
    return _States(
        n_layers - attending, _tensors(facts, dtype, conv, (v_heads, k_dim, v_dim)), attending
    )


_READERS: dict[str, Callable[[ModelFacts, int, str], _States]] = {
    "bamba": _hybrid,
    # Every layer has both, side by side.
    "falcon_h1": lambda facts, n_layers, dtype: _States(n_layers, _heads(facts, dtype), n_layers),
    "falcon_mamba": _mamba,
    "granitemoehybrid": _hybrid,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": lambda facts, n_layers, dtype: _States(n_layers, _heads(facts, dtype), 0),
    "nemotron_h": _patterned,
    "qwen3_next": _delta,
}
