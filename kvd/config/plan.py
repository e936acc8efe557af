"""What a model's KV takes in each family that suits it, and how many requests a memory admits.

Each plan is a [pool] section that was read and divided by the same functions as the daemon's own:
what is printed here is what a daemon with that section will have. Closed forms, with ``n`` pages of
kv for a request of ``context`` tokens::

    rooms = min over the budgets of (pages - 1) // pages that one request holds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvd.config.host import HostFacts
from kvd.config.load import load
from kvd.config.pool import pool_spec
from kvd.config.render import as_file
from kvd.config.schema import Config
from kvd.core.layout.spec import (
    Component,
    PerRequest,
    PoolSpec,
    Tail,
    budgets,
    has_bytes,
    lockstep_bytes,
    node_page_bytes,
    page_bytes,
    shards_of,
)
from kvd.families import FAMILIES, PoolSection
from kvd.families.budget import pages_of_request, size_bytes
from kvd.families.model import INDEX_DTYPE, NotPlanned

if TYPE_CHECKING:
    from kvd.families import PlanRequest, PoolFamily, Value
    from kvd.families.model import Model

USUAL_CONTEXT_TOKENS = 8192
"""Of a request, where neither the model nor the caller says it."""

_NOWHERE = HostFacts(node_name="node-0", runtime="/run/kvd", config_file="/dev/null")


class PlanPart(msgspec.Struct, frozen=True):
    """One component of a plan. ``request_pages`` is what one request holds of it at a time.

    ``page_bytes`` are of all ``shards`` of the node, ``layers`` those of each.
    """

    name: str
    tier: str
    layers: int
    page_size: int
    page_bytes: int
    pages: int
    request_pages: int
    shards: int = 1

    @property
    def total_bytes(self) -> int:
        """Of all its pages."""
        return self.pages * self.page_bytes


class FamilyPlan(msgspec.Struct, frozen=True):
    """One family. ``bytes_per_token`` is what each further token takes in every layer of kv.

    ``rooms`` requests of the whole context fit at once; ``gain`` is how many times those of full
    allocation, 1.0 for that itself and where there is nothing to compare with.
    """

    family: str
    parts: tuple[PlanPart, ...]
    bytes_per_token: int
    request_bytes: int
    tokens: int
    rooms: int
    gain: float
    note: str
    toml: str


class Unsuited(msgspec.Struct, frozen=True):
    """A family in which this model cannot be held, and why."""

    family: str
    why: str


Outcome = FamilyPlan | Unsuited

COPIED_GB_S: Final = {4 * 2**10: 9.6, 16 * 2**10: 23.0, 64 * 2**10: 41.0, 2**19: 53.0, 2**21: 54.0}
"""Between a GPU and registered host memory, in pieces of so many bytes: measured on one H100."""

QUICK_PIECE_BYTES: Final = 64 * 2**10
"""Pieces below cost more than a fifth of the speed."""

REGISTERED_S_A_GIB: Final = 0.06
"""Measured were 0.02 to 0.06."""

CONTEXT_BYTES: Final = 518 * 2**20
"""Of GPU memory, of each process that has made a CUDA context."""


class GpuNodePlan(msgspec.Struct, frozen=True):
    """What a pool in host memory costs the engines of a GPU node, which copy to and from it.

    ``piece_bytes``: of a block in one layer, where an engine has a tensor for each; all layers of a
    block together are one piece of ``page_bytes``. ``pinned_bytes``: registered with CUDA by each
    of ``processes``, so never swapped. ``load_s``: of one request of the whole context.
    """

    processes: int
    tokens_per_gib: int
    pinned_bytes: int
    registering_s: float
    contexts_bytes: int
    piece_bytes: int
    page_bytes: int
    copied_gb_s: float
    load_s: float

    @property
    def is_slow(self) -> bool:
        """Whether pieces are so small that they cost speed."""
        return self.piece_bytes < QUICK_PIECE_BYTES


def gpu_node(made: FamilyPlan, processes: int) -> GpuNodePlan:
    """What this plan costs so many processes that copy between it and a GPU."""
    kv = made.parts[0]
    piece = kv.page_bytes // max(1, kv.layers * kv.shards)
    rate = max((rate for size, rate in COPIED_GB_S.items() if size <= piece), default=0.0)
    # Below the smallest that was measured a piece takes as long as that one.
    rate = rate or COPIED_GB_S[4 * 2**10] * piece / (4 * 2**10)
    total = sum(part.total_bytes for part in made.parts)
    return GpuNodePlan(
        processes=processes,
        tokens_per_gib=2**30 // max(1, made.bytes_per_token),
        pinned_bytes=total,
        registering_s=total / 2**30 * REGISTERED_S_A_GIB,
        contexts_bytes=processes * CONTEXT_BYTES,
        piece_bytes=piece,
        page_bytes=kv.page_bytes,
        copied_gb_s=rate,
        load_s=made.request_bytes / 1e9 / rate,
    )


def plans(model: Model, wanted: PlanRequest, asked: str | None = None) -> list[Outcome]:
    """Every family in the order of ``FAMILIES``: its plan, or why there is none.

    Prefill-only is planned for a model that can decode only if it is ``asked`` for.

    A family that suits the model and whose pool does not fit is refused in the words of the check.
    """
    out: list[Outcome] = []
    full = 0
    for family in FAMILIES.values():
        why = family.unsuited(model, asked)
        if why is not None:
            out.append(Unsuited(family.name, why))
            continue
        try:
            made = _plan(model, wanted, family, full)
        except NotPlanned as exc:
            out.append(Unsuited(family.name, str(exc)))
            continue
        if family.is_full:
            full = made.rooms
        out.append(made)
    return out


def _plan(
    model: Model, wanted: PlanRequest, family: PoolFamily[PoolSection], full: int
) -> FamilyPlan:
    pool = _pool_keys(model, wanted, family)
    # Pages of each memory, where the family has more to say than one size.
    sizes = family.plan_sizes and family.plan_sizes(
        checked_pool({**pool, "pages": 2**20}, {}).pool, wanted
    )
    pool |= sizes or {"size": wanted.memory}
    others = {name: dict(keys) for name, keys in family.with_sections.items()}
    config = checked_pool(pool, others)
    spec = pool_spec(config)
    parts = tuple(
        _part(component, pages, wanted.context_tokens, spec)
        for component, pages in zip(spec.components, spec.pages, strict=True)
    )
    rooms = _rooms(spec, wanted.context_tokens)
    full = full or _full_rooms(spec, wanted)
    first = spec.components[0]
    return FamilyPlan(
        family=family.name,
        parts=parts,
        bytes_per_token=lockstep_bytes(spec) // first.page_size,
        request_bytes=sum(part.request_pages * part.page_bytes for part in parts),
        tokens=(spec.pages[0] - 1) * first.page_size,
        rooms=rooms,
        gain=rooms / full if full else 1.0,
        note=family.plan_note(model, spec),
        toml=as_file({"pool": pool, **others}),
    )


def _pool_keys(
    model: Model, wanted: PlanRequest, family: PoolFamily[PoolSection]
) -> dict[str, Value]:
    """The [pool] section without its sizes."""
    own = family.plan_keys(model, wanted)
    pool: dict[str, Value] = {
        "family": PoolSection().family if family.is_mode else family.name,
        "layers": own.pop("layers", model.attention_layers),
    }
    if model.latent_dim:
        pool |= {"latent_dim": model.latent_dim, "rope_dim": model.rope_dim}
    elif model.heads:
        pool |= {"heads": model.heads, "head_dim": model.head_dim}
        if model.v_dim != model.head_dim:
            pool["v_dim"] = model.v_dim
    if model.attention_layers:
        pool |= {"dtype": wanted.dtype or model.dtype, "page_size": wanted.page_size}
    pool |= wanted.shards
    if model.index_dim:
        pool |= {"index_dim": model.index_dim, "index_dtype": INDEX_DTYPE}
    return pool | own


def checked_pool(pool: dict[str, Value], others: dict[str, dict[str, Value]]) -> Config:
    """The configuration with this section, through every rule of the check.

    Raises:
        NotPlanned: it breaks one, in the words of the check.
    """
    sets = []
    for section, keys in {"pool": pool, **others}.items():
        for name, value in keys.items():
            if isinstance(value, dict):
                sets += [f"{section}.{name}.{entry}={item}" for entry, item in value.items()]
            else:
                sets.append(f"{section}.{name}={value}")
    found = load(None, {}, sets, host=_NOWHERE)
    if not isinstance(found, Config):
        raise NotPlanned(
            "; ".join(f"{error.key} = {error.value} {error.rule}: {error.fix}" for error in found)
        )
    return found


def _part(component: Component, pages: int, context_tokens: int, spec: PoolSpec) -> PlanPart:
    held = pages_of_request(spec.components[0], context_tokens)
    k = spec.components[0].page_size // component.page_size
    request = held * k if component not in budgets(spec) else _held(component, context_tokens)
    return PlanPart(
        name=component.name,
        tier=str(component.tier.__struct_config__.tag),
        layers=component.layers,
        page_size=component.page_size,
        page_bytes=node_page_bytes(spec, component) if has_bytes(component) else 0,
        pages=pages,
        request_pages=request,
        shards=len(shards_of(spec)),
    )


def _held(component: Component, context_tokens: int) -> int:
    """Of one request. A cached state gives way, so only its own counts."""
    if isinstance(component.extent, PerRequest):
        return 1
    return pages_of_request(component, context_tokens)


def _rooms(spec: PoolSpec, context_tokens: int) -> int:
    return min(
        (spec.pages[spec.index(component.name)] - 1) // _held(component, context_tokens)
        for component in budgets(spec)
    )


def _full_rooms(spec: PoolSpec, wanted: PlanRequest) -> int:
    """Requests that fit if the sliding layers had KV of every token; 0 for other pools."""
    if not any(isinstance(component.extent, Tail) for component in spec.components):
        return 0
    kv = spec.components[0]
    pages = (size_bytes(wanted.memory) or 0) // sum(
        page_bytes(component) for component in spec.components
    )
    return (pages - 1) // pages_of_request(kv, wanted.context_tokens)
