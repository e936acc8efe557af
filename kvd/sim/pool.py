"""The pools of simulated hosts: one small specification per family, and what its pages hold.

Pages have ``PAGE_TOKENS`` tokens, and as few bytes as there can be: what counts is which pages
there are, not what is in them. Only who sends to host pools may have larger pages: several
**units** of so many tokens each, one after the other, as its pieces are numbered in a post; then
the same is true of its companions.

A component in lockstep with the first is written with it, piece by piece. Its content follows from
the first one's, so only whether it was moved at all has to be told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
    Whole,
    companion_factor,
    is_companion,
    saved_region,
)
from kvd.sim.contents import PAGE_TOKENS, UNWRITTEN

if TYPE_CHECKING:
    from random import Random

    from kvd.sim.contents import Contents
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
        order=PageOrder.PAGE_FIRST,
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
    for component in spec.components[1:]:
        if is_companion(spec, component):
            factor = companion_factor(spec, component)
            companions.append(Companion(component.name, factor, component.page_size // units))
            continue
        match component.extent:
            case Tail(tokens):
                windows.append((row, component.name, tokens))
            case PerRequest():
                states.append((row, component.name))
            case _:
                buffers.append((row, component.name))
        row += 1
    return Kinds(units, tuple(companions), tuple(windows), tuple(states), tuple(buffers))


class SimMemory:
    """One process's pools. ``regions``: by name, what their pages hold."""

    def __init__(self, spec: PoolSpec, contents: Contents) -> None:
        self.kinds = kinds_of(spec)
        self.regions: dict[str, list[int]] = {}
        for component, pages, saved in zip(
            spec.components, spec.pages, spec.saved_pages, strict=True
        ):
            units = self.kinds.units if isinstance(component.extent, Whole) else 1
            self.regions[component.name] = [UNWRITTEN] * (pages * units)
            self.regions[saved_region(component)] = [UNWRITTEN] * (max(1, saved) * units)
        self.first = self.regions[spec.components[0].name]
        self._contents = contents

    def units(self, pages: list[int]) -> list[int]:
        """Those of pages of the first component, or of one in lockstep with it."""
        units = self.kinds.units
        if units == 1:
            return pages
        return [page * units + piece for page in pages for piece in range(units)]

    def write(self, pages: list[int], contents: list[int], start_tokens: int) -> None:
        """An engine writes units of its row from ``start_tokens`` on, up to the last content."""
        first = self.first
        for k in range(start_tokens // PAGE_TOKENS, len(contents)):
            first[pages[k]] = contents[k]
            for name, factor, _ in self.kinds.companions:
                beside = self.regions[name]
                for piece in range(factor):
                    page = pages[k] * factor + piece
                    beside[page] = self._contents.piece(contents[k], piece)

    def wrong(self, pages: list[int], contents: list[int], n_tokens: int) -> list[str]:
        """Which of these units do not hold that many tokens of these contents."""
        held = self._wrong("", self.first, pages, contents)
        for name, factor, unit_tokens in self.kinds.companions:
            due = [
                self._contents.piece(content, piece)
                for content in contents
                for piece in range(factor)
            ][: -(-n_tokens // unit_tokens)]
            row = [page * factor + piece for page in pages for piece in range(factor)]
            held += self._wrong(f" of {name}", self.regions[name], row, due)
        return held

    def wrong_beside(self, region: str, pages: list[int], contents: list[int]) -> list[str]:
        """The same of a component with pages of its own."""
        return self._wrong(f" of {region}", self.regions[region], pages, contents)

    def _wrong(self, of: str, held: list[int], pages: list[int], contents: list[int]) -> list[str]:
        if [held[page] for page in pages[: len(contents)]] == contents:
            return []
        wrong = [
            f"page {page}{of} holds {held[page]}, {wanted} is due"
            for page, wanted in zip(pages, contents, strict=False)
            if held[page] != wanted
        ]
        return wrong or [f"pages{of} are missing"]
