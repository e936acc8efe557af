"""recurrent: a state of fixed size per request, beside KV or without.

Where no layer has KV a page is one token that takes no byte: the tree still matches prompts, and a
snapshot of the state lies at the end of one.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from typing_extensions import override

from kvd.core.layout.geometry import misplaced
from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Component,
    Device,
    PerRequest,
    State,
    StateTensor,
    page_bytes,
)
from kvd.families.budget import pool_bytes, size_bytes, two_budgets
from kvd.families.family import ELEMENTS, HEADS, LATENT, SCALE, Breach, PoolFamily, text_rule
from kvd.families.keys import MAX_PAGES, Layers, PageCount, PoolSection, example, rule
from kvd.families.mha import components

if TYPE_CHECKING:
    from kvd.families.family import PlanRequest, Value
    from kvd.families.model import Model

LEAST_LOGICAL_TOKENS, MOST_LOGICAL_TOKENS = 2**20, 2**22
"""Counted where tokens take no bytes, unless pool.pages says how many: typical requests of every
state, between these bounds. A counted token takes 4 bytes of the daemon's own memory."""

_TENSOR = re.compile(r"([a-z0-9_]+)\[([0-9]{1,9}(?:, ?[0-9]{1,9}){0,5})\]")
_MAX_STATE_ELEMENTS = 2**31


class StatePool(PoolSection, frozen=True):
    """[pool] of this family."""

    state_layers: Annotated[Layers | None, example(24)] = None
    """recurrent: layers with a state."""
    states: Annotated[PageCount | None, example(129)] = None
    """recurrent: number of states, the null state included. Left out: two for each usual request,
    one of them for the cache."""
    state: Annotated[
        dict[str, str],
        rule('a table of NAME = "DTYPE[N,N,...]"'),
        example({"conv": "bfloat16[4352,3]", "ssm": "float32[64,64,128]"}),
    ] = msgspec.field(default_factory=dict)
    """recurrent: the tensors of one layer's state of one request."""

    @property
    @override
    def counts_tokens(self) -> bool:
        return self.layers == 0


def state_tensor(name: str, text: str) -> StateTensor | None:
    """One tensor of ``float32[64,128]``; None if it is not written so."""
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in DTYPE_BYTES:
        return None
    shape = tuple(int(size) for size in match[2].split(","))
    return (
        StateTensor(name, shape, match[1]) if 0 < math.prod(shape) <= _MAX_STATE_ELEMENTS else None
    )


def _state(pool: StatePool) -> Component:
    """Wide elements first, so that each lies at a multiple of its size; then by name."""
    tensors = [tensor for name, text in pool.state.items() if (tensor := state_tensor(name, text))]
    tensors.sort(key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    return Component(
        name="state",
        layers=pool.state_layers or 0,
        layout=State(tuple(tensors)),
        page_size=1,
        extent=PerRequest(),
        tier=Device(pool.device),
    )


def _divide(pool: StatePool, parts: tuple[Component, ...]) -> tuple[int, int]:
    if pool.pages is not None or not pool.counts_tokens:
        return two_budgets(pool, parts, pool.states)
    states = pool_bytes(pool) // page_bytes(parts[-1]) if pool.states is None else pool.states
    tokens = max(LEAST_LOGICAL_TOKENS, (states - 1) * pool.typical_tokens)
    return min(tokens, MOST_LOGICAL_TOKENS) + 1, states


def _memory_flaws(pool: StatePool) -> list[Breach]:
    """Every element of a state lies where programs can read it."""
    found = misplaced(_state(pool))
    if found is None:
        return []
    rule = (
        f"would lie at byte {found.offset_bytes} of the state, one of which follows the other at "
        f"{found.page_stride_bytes}: no multiples of the bytes of {found.dtype}"
    )
    fix = "pad the tensor with the narrowest type to a multiple of the widest one"
    return [Breach(key="pool.state", rule=rule, fix=fix, entry=found.part)]


def _unsuited(model: Model, _asked: str | None) -> str | None:
    if model.state_layers:
        return None
    return model.without_kv or "it has no recurrent state"


def _plan_keys(model: Model, wanted: PlanRequest) -> dict[str, Value]:
    return {
        "state_layers": model.state_layers,
        "state": model.state,
        "typical_tokens": wanted.context_tokens,
    }


def _plan_sizes(pool: StatePool, wanted: PlanRequest) -> dict[str, Value]:
    """Without KV as many states as fit, and tokens enough for a whole request of each."""
    if not pool.counts_tokens:
        return {}
    states = (size_bytes(wanted.memory) or 0) // page_bytes(_state(pool))
    pages = min((states - 1) * wanted.context_tokens, MAX_PAGES - 1) + 1
    return {"pages": max(2, pages), "states": max(2, states)}


FAMILY = PoolFamily(
    name="recurrent",
    owns="a state, beside KV or without",
    section=StatePool,
    components=lambda pool: (*components(pool), _state(pool)),
    divide=_divide,
    groups=(ELEMENTS, HEADS, LATENT, SCALE),
    alone="states",
    needs={
        "state_layers": "how many of its layers have a state",
        "state": 'the tensors of one layer, like ssm = "float32[64,64,128]"',
    },
    texts={
        "state": text_rule(
            lambda text: state_tensor("", text) is not None,
            "write for example float32[64,64,128]",
        )
    },
    entries={
        "state": text_rule(
            lambda name: re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", name) is not None,
            "name a tensor, like ssm",
        )
    },
    second="states",
    without_layers="",
    memory_flaws=_memory_flaws,
    unkept="a state has no tokens of its own by which it could be found again",
    untiered="a prompt is nothing without its state, which is of its end alone and of no page",
    unsharded="a state has no layers and heads of KV by which it could be cut",
    uncounted="a state is carried from token to token, so it must be kept",
    unsuited=_unsuited,
    plan_keys=_plan_keys,
    plan_sizes=_plan_sizes,
    plan_note=lambda _model, _spec: "one state per request, one cached",
    shape={
        "layers": 1,
        "heads": 2,
        "head_dim": 16,
        "state_layers": 2,
        "state": {"conv": "bfloat16[8,4]", "ssm": "float32[4,2,8]"},
    },
)
