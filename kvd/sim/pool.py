"""The pools of simulated hosts: one small specification per family, and what kinds it has.

Pages have ``PAGE_TOKENS`` tokens, and as few bytes as there can be: what counts is which pages
there are, not what is in them. Only who sends to host pools may have larger pages: several
**units** of so many tokens each, and then the same is true of its companions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.core.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    Order,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
    companion_factor,
    is_companion,
)
from kvd.sim.contents import PAGE_TOKENS

if TYPE_CHECKING:
    from random import Random

    from kvd.sim.profile import Profile

WINDOW_TOKENS = 40
"""No multiple of the page, and longer than one."""

BUFFER_TOKENS = 64
LARGE, LARGE_PAGES = 2, 0.5
"""Units in a large page, and the share of senders to host pools that have such pages."""

STEPS_TOKENS = (0, 0, 16, 48)
"""What engines say of how far they compute between two slides."""

_KV = Component(
    name="kv",
    layers=1,
    layout=Mha(heads=1, k_dim=1, v_dim=1, dtype="float32"),
    page_size=PAGE_TOKENS,
)
_INDEX = Component(
    name="index",
    layers=1,
    layout=Mha(heads=1, k_dim=1, v_dim=0, dtype="float32"),
    page_size=PAGE_TOKENS // 4,
)
_SWA = Component(
    name="swa",
    layers=1,
    layout=Mha(heads=1, k_dim=1, v_dim=1, dtype="float32"),
    page_size=PAGE_TOKENS,
    extent=Tail(WINDOW_TOKENS),
)
_STATE = Component(
    name="state",
    layers=1,
    layout=State((StateTensor("ssm", (2,), "float32"),)),
    page_size=1,
    extent=PerRequest(),
)
_BUFFER = Component(
    name="buffer",
    layers=1,
    layout=Mha(heads=1, k_dim=1, v_dim=1, dtype="float32"),
    page_size=PAGE_TOKENS,
    extent=Buffer(BUFFER_TOKENS),
)

SAVED_PAGES = (0, 9, 41)
"""Pages of the saved area of the first component, a null page included."""


def pool_of(profile: Profile, name: str, rng: Random) -> PoolSpec:
    """The pool of the node ``name``; ``p...`` computes prompts, ``d...`` goes on from them."""
    pages = rng.choice(profile.pool_pages)
    saved_pages = rng.choice(SAVED_PAGES)
    more: list[tuple[Component, int, int]] = []
    kv, index = _KV, _INDEX
    match profile.family:
        case "swa":
            few = rng.choice(profile.beside_pages)
            more = [(_SWA, few, saved_pages and rng.choice((5, 30)))]
        case "recurrent":
            more = [(_STATE, rng.choice(profile.beside_pages), saved_pages and 4)]
        case "hisparse":
            buffer_pages = rng.choice(profile.beside_pages)
            if name[0] == "d":
                kv = msgspec.structs.replace(kv, tier=Host())
                more = [(_BUFFER, buffer_pages, 0)]
            elif rng.random() < LARGE_PAGES:
                pages = pages // LARGE + 1
                kv = msgspec.structs.replace(kv, page_size=LARGE * kv.page_size)
                index = msgspec.structs.replace(index, page_size=LARGE * index.page_size)
            more = [(index, 4 * pages, 4 * saved_pages), *more]
        case _:
            pass
    return PoolSpec(
        name="main",
        family=profile.family,
        order=Order.PAGE_FIRST,
        components=(kv, *(component for component, _, _ in more)),
        pages=(pages, *(n_pages for _, n_pages, _ in more)),
        saved_pages=(saved_pages, *(saved for _, _, saved in more)),
    )


class Companion(NamedTuple):
    """A component in lockstep with the first: ``factor`` of its pages, or units, to one of that."""

    name: str
    factor: int
    unit_tokens: int


class Kinds(NamedTuple):
    """What a pool has beside its first component, by kind. Rows are numbered as in answers."""

    units: int
    """In a page of the first component and of its companions."""
    companions: tuple[Companion, ...]
    windows: tuple[tuple[int, str, int], ...]
    """Number of the row, name, tokens."""
    states: tuple[tuple[int, str], ...]
    buffers: tuple[tuple[int, str], ...]


def kinds_of(spec: PoolSpec) -> Kinds:
    """Those of a specification."""
    units = spec.components[0].page_size // PAGE_TOKENS
    companions, windows, states, buffers = [], [], [], []
    row = 0
    for one in spec.components[1:]:
        if is_companion(spec, one):
            factor = companion_factor(spec, one)
            companions.append(Companion(one.name, factor, one.page_size // units))
            continue
        match one.extent:
            case Tail(tokens):
                windows.append((row, one.name, tokens))
            case PerRequest():
                states.append((row, one.name))
            case _:
                buffers.append((row, one.name))
        row += 1
    return Kinds(units, tuple(companions), tuple(windows), tuple(states), tuple(buffers))
