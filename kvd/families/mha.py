"""mha: K and V per head, of every token, in every layer; an index and scales beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.families.budget import one_budget
from kvd.families.components import companions, kv
from kvd.families.family import ELEMENTS, HEADS, INDEX, SCALE, PoolFamily
from kvd.families.keys import PoolSection

if TYPE_CHECKING:
    from kvd.core.layout.spec import Component, PoolSpec
    from kvd.families.family import PlanRequest, Value
    from kvd.families.model import Model


def components(pool: PoolSection) -> tuple[Component, ...]:
    """KV, and what goes in lockstep with it."""
    first = kv(pool)
    return (first, *companions(pool, first))


def plan_keys(_model: Model, _wanted: PlanRequest) -> dict[str, Value]:
    """The keys of the model say it all."""
    return {}


def full_note(model: Model, _spec: PoolSpec) -> str:
    """That nothing is spared; of sliding layers, how many could have been."""
    if model.window_layers:
        return f"full allocation: all {model.attention_layers} layers hold every token"
    return "full allocation"


def _unsuited(model: Model, _asked: str | None) -> str | None:
    if model.without_kv or model.latent_dim:
        return model.without_kv or "it keeps latents"
    return "its sliding layers have another shape than the others" if model.window_heads else None


FAMILY = PoolFamily(
    name="mha",
    owns="K and V per layer",
    section=PoolSection,
    components=components,
    divide=one_budget,
    groups=(ELEMENTS, HEADS, SCALE, INDEX),
    unsuited=_unsuited,
    plan_keys=plan_keys,
    plan_note=full_note,
    is_full=True,
    shape={"layers": 2, "heads": 2, "head_dim": 16},
)
