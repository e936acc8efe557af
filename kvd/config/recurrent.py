"""The states of recurrent models: how many layers have one, and its tensors.

A convolution keeps the last ``kernel - 1`` columns of its input in the type of the model; what is
carried from token to token is summed up, so it is kept in float32 unless the model says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config.facts import Facts


class States(msgspec.Struct, frozen=True):
    """``layers`` with the ``tensors`` of one state, beside ``attention_layers`` with KV."""

    layers: int
    tensors: dict[str, str]
    attention_layers: int


def states_of(facts: Facts, n_layers: int, dtype: str) -> States | None:
    """The states of a model of ``n_layers``; None where it has none of a kind known here.

    Raises:
        NotPlanned: it has, and a key about them is missing.
    """
    read = _READERS.get(facts.text("model_type"))
    return None if read is None else read(facts, n_layers, dtype)


def _tensors(
    facts: Facts, dtype: str, conv: tuple[int, int], ssm: tuple[int, ...]
) -> dict[str, str]:
    carried = facts.get("mamba_ssm_dtype") or "float32"
    columns, kernel = conv
    shape = ",".join(str(one) for one in ssm)
    return {"conv": f"{dtype}[{columns},{kernel - 1}]", "ssm": f"{carried}[{shape}]"}


def _mamba(facts: Facts, n_layers: int, dtype: str) -> States:
    """Mamba: one channel at a time."""
    inner = facts.maybe("intermediate_size", "d_inner")
    inner = inner or facts.number("expand") * facts.number("hidden_size", "d_model")
    kernel, size = facts.number("conv_kernel", "d_conv"), facts.number("state_size", "d_state")
    return States(n_layers, _tensors(facts, dtype, (inner, kernel), (inner, size)), 0)


def _mamba2(facts: Facts, n_layers: int, dtype: str) -> States:
    """Mamba-2: heads that share a step."""
    return States(n_layers, _heads(facts, dtype), 0)


def _heads(facts: Facts, dtype: str) -> dict[str, str]:
    """The state of one Mamba-2 layer."""
    heads = facts.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = facts.maybe("mamba_d_head", "mamba_head_dim") or facts.number("head_dim")
    groups = facts.number("mamba_n_groups", "n_groups")
    size = facts.number("mamba_d_state", "ssm_state_size", "state_size")
    kernel = facts.number("mamba_d_conv", "conv_kernel")
    columns = heads * head_dim + 2 * groups * size
    return _tensors(facts, dtype, (columns, kernel), (heads, head_dim, size))


def _hybrid(facts: Facts, n_layers: int, dtype: str) -> States:
    """Bamba and Granite: Mamba-2 layers, some of them attention instead."""
    kinds = facts.kinds("layer_types") or facts.kinds("layers_block_type")
    if kinds:
        attending = sum(kind in {"attention", "full_attention"} for kind in kinds)
    else:
        attending = len(facts.kinds("attn_layer_indices"))
    return States(n_layers - attending, _heads(facts, dtype), attending)


def _both(facts: Facts, n_layers: int, dtype: str) -> States:
    """Falcon-H1: every layer has both, side by side."""
    return States(n_layers, _heads(facts, dtype), n_layers)


def _patterned(facts: Facts, n_layers: int, dtype: str) -> States:
    """Nemotron-H: a letter for each layer, ``M`` and ``*``; the others keep nothing."""
    pattern = facts.text("hybrid_override_pattern")
    return States(pattern.count("M"), _heads(facts, dtype), pattern.count("*"))


def _jamba(facts: Facts, n_layers: int, dtype: str) -> States:
    """Jamba: Mamba layers, attention once per period."""
    period, offset = facts.number("attn_layer_period"), facts.maybe("attn_layer_offset")
    attending = sum(layer % period == offset for layer in range(n_layers))
    inner = facts.number("mamba_expand") * facts.number("hidden_size")
    kernel, size = facts.number("mamba_d_conv"), facts.number("mamba_d_state")
    tensors = _tensors(facts, dtype, (inner, kernel), (inner, size))
    return States(n_layers - attending, tensors, attending)


def _delta(facts: Facts, n_layers: int, dtype: str) -> States:
    """Qwen3-Next: gated delta networks, attention in every fourth layer."""
    kinds = facts.kinds("layer_types")
    attending = kinds.count("full_attention")
    if not kinds:
        attending = n_layers // facts.number("full_attention_interval")
    k_heads, v_heads = facts.number("linear_num_key_heads"), facts.number("linear_num_value_heads")
    k_dim, v_dim = facts.number("linear_key_head_dim"), facts.number("linear_value_head_dim")
    columns = 2 * k_heads * k_dim + v_heads * v_dim
    conv = (columns, facts.number("linear_conv_kernel_dim"))
    return States(
        n_layers - attending, _tensors(facts, dtype, conv, (v_heads, k_dim, v_dim)), attending
    )


_READERS: dict[str, Callable[[Facts, int, str], States]] = {
    "bamba": _hybrid,
    "falcon_h1": _both,
    "falcon_mamba": _mamba,
    "granitemoehybrid": _hybrid,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _patterned,
    "qwen3_next": _delta,
}
