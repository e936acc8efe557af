"""swa: KV of every token in some layers, and of the last window only in those that slide.

The windows have page ids and a budget of their own; the memory is divided so that both run out
together. What a window is over time is ``kvd.core.components.tail``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kvd.core.layout.page_sizes import window_flaw
from kvd.core.layout.spec import Component, Device, Mha, Tail
from kvd.families.budget import two_budgets
from kvd.families.components import kv, v_dim
from kvd.families.family import ELEMENTS, HEADS, Breach, PoolFamily
from kvd.families.keys import Elements, Heads, Layers, PageCount, PoolSection, Tokens, example

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.layout.spec import PoolSpec
    from kvd.families.family import PlanRequest, Value
    from kvd.families.model import Model


class WindowPool(PoolSection, frozen=True):
    """[pool] of this family."""

    window_tokens: Annotated[Tokens | None, example(1024)] = None
    """swa: how many tokens a sliding layer looks back."""
    window_layers: Annotated[Layers | None, example(52)] = None
    """swa: number of sliding layers."""
    window_heads: Annotated[Heads | None, example(8)] = None
    """swa: KV heads of a sliding layer. Left out: pool.heads."""
    window_head_dim: Annotated[Elements | None, example(192)] = None
    """swa: elements of one K head of a sliding layer. Left out: pool.head_dim."""
    window_v_dim: Annotated[Elements | None, example(128)] = None
    """swa: elements of one V head of a sliding layer. Left out: window_head_dim if that is given,
    else as in the other layers."""
    window_pages: Annotated[PageCount | None, example(4096)] = None
    """swa: pages of the sliding layers, the null page included. Left out: what usual requests need,
    each its window and two pages. Only engines that lease with step_tokens do with that; otherwise
    each page of a prompt takes one."""


def _v_dim(pool: WindowPool) -> int:
    if pool.window_v_dim is not None:
        return pool.window_v_dim
    # Where K and V are one in the other layers, they are in these.
    own = pool.window_head_dim if pool.v_dim != 0 else None
    return own or v_dim(pool)


def _components(pool: WindowPool) -> tuple[Component, ...]:
    windows = Component(
        name="swa",
        layers=pool.window_layers or 0,
        layout=Mha(
            heads=pool.window_heads or pool.heads,
            k_dim=pool.window_head_dim or pool.head_dim,
            v_dim=_v_dim(pool),
            dtype=pool.dtype,
        ),
        page_size=pool.page_size,
        extent=Tail(pool.window_tokens or 0),
        tier=Device(pool.device),
    )
    return kv(pool), windows


def _flaws(pool: WindowPool) -> Iterator[Breach]:
    if why := window_flaw(pool.page_size):
        rule = f"is refused with pool.family = swa: {why}"
        fix = "give 2 or more, or pool.family = mha, which allocates all layers in full"
        yield Breach("pool.page_size", rule, fix)


def _unsuited(model: Model, _asked: str | None) -> str | None:
    if model.without_kv:
        return model.without_kv
    if not model.window_layers:
        return "it has no sliding layers"
    if not model.layers:
        return "all its layers slide, and one must have KV of every token: it is held in full"
    return None


def _plan_keys(model: Model, wanted: PlanRequest) -> dict[str, Value]:
    names = ["layers", "window_layers", "window_tokens"]
    if model.window_heads:
        names += ["window_heads", "window_head_dim", "window_v_dim"]
    of_model = {name: getattr(model, name) for name in names}
    return {**of_model, "typical_tokens": wanted.context_tokens}


def _note(model: Model, _spec: PoolSpec) -> str:
    return (
        f"{model.window_layers} of {model.attention_layers} layers hold the last "
        f"{model.window_tokens} tokens only"
    )


FAMILY = PoolFamily(
    name="swa",
    owns="K and V, in the sliding layers of the last window only",
    section=WindowPool,
    components=_components,
    divide=lambda pool, parts: two_budgets(pool, parts, pool.window_pages),
    groups=(ELEMENTS, HEADS),
    alone="sliding layers",
    needs={
        "window_tokens": "the model's sliding_window, like 1024",
        "window_layers": "how many of its layers slide",
    },
    second="window_pages",
    without_layers="its sliding layers alone",
    flaws=_flaws,
    unkept="the window of a sequence has pages of its own, and slides",
    untiered="the window of a sequence has pages of its own, which are no part of an object",
    unsharded="the window of a sequence has pages of its own, which are not cut",
    uncounted="sliding layers have a window of the pool, and a budget of its own, and there is "
    "none",
    unsuited=_unsuited,
    plan_keys=_plan_keys,
    plan_note=_note,
    shape={"layers": 1, "heads": 2, "head_dim": 16, "window_layers": 2, "window_tokens": 40},
)
