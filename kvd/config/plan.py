"""What a model's KV takes in each family that suits it, and how many requests a memory admits.

Each plan is a [pool] section that was read and divided by the same functions as the daemon's own:
what is printed here is what a daemon with that section will have. Closed forms, with ``n`` pages of
kv for a request of ``context`` tokens::

    rooms = min over the budgets of (pages - 1) // pages that one request holds
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.config.facts import NotPlanned
from kvd.config.host import Host
from kvd.config.load import load
from kvd.config.model import INDEX_DTYPE
from kvd.config.pool import PREFILL_ONLY, components, pool_spec
from kvd.config.pool_pages import MAX_PAGES, block_bytes, pages_of_request, size_bytes
from kvd.config.render import toml_value
from kvd.config.schema import Config
from kvd.core.layout.spec import (
    Buffer,
    Component,
    PerRequest,
    PoolSpec,
    budgets,
    has_bytes,
    lockstep_bytes,
    node_page_bytes,
    page_bytes,
    shards_of,
)

if TYPE_CHECKING:
    from kvd.config.keys import Value
    from kvd.config.model import Model
    from kvd.config.origin import ConfigError

FAMILIES = ("mha", "mla", "swa", "hisparse", "recurrent", PREFILL_ONLY)
USUAL_CONTEXT_TOKENS = 8192
"""Of a request, where neither the model nor the caller says it."""

_NOWHERE = Host(node_name="node-0", runtime="/run/kvd", config_file="/dev/null")


class Wanted(msgspec.Struct, frozen=True):
    """What is planned for. Sizes are texts like ``80GiB``; ``host_memory`` is for hisparse.

    ``memory`` is that of a node, and ``shards`` are keys of [pool] that say what it holds.
    """

    memory: str
    host_memory: str
    context_tokens: int
    page_size: int
    buffer_tokens: int
    dtype: str | None = None
    shards: dict[str, str | int] = {}


class Part(msgspec.Struct, frozen=True):
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


class Plan(msgspec.Struct, frozen=True):
    """One family. ``bytes_per_token`` is what each further token takes in every layer of kv.

    ``rooms`` requests of the whole context fit at once; ``gain`` is how many times those of full
    allocation, 1.0 for that itself and where there is nothing to compare with.
    """

    family: str
    parts: tuple[Part, ...]
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


Outcome = Plan | Unsuited


def plans(model: Model, wanted: Wanted, asked: str | None = None) -> list[Outcome]:
    """Every family in the order of ``FAMILIES``: its plan, or why there is none.

    Prefill-only is planned for a model that can decode only if it is ``asked`` for.

    A family that suits the model and whose pool does not fit is refused in the words of the check.
    """
    out: list[Outcome] = []
    full = 0
    for family, why in _unsuited(model, asked).items():
        if why is not None:
            out.append(Unsuited(family, why))
            continue
        try:
            made = _plan(model, wanted, family, full)
        except NotPlanned as exc:
            out.append(Unsuited(family, str(exc)))
            continue
        if family in {"mha", "mla"}:
            full = made.rooms
        out.append(made)
    return out


def _unsuited(model: Model, asked: str | None) -> dict[str, str | None]:
    """By family, why the model cannot be held in it; None where it can."""
    if model.state_layers:
        why = "its recurrent layers carry a state, which only family recurrent holds"
        return dict.fromkeys(FAMILIES, why) | {"recurrent": None}
    if model.is_encoder:
        why = "it reads a text at once and decodes nothing, so no KV is ever read again"
        return dict.fromkeys(FAMILIES, why) | {PREFILL_ONLY: None}
    latent, index = model.latent_dim, model.index_dim
    return {
        "mha": _reason_not_mha(model),
        "mla": None if latent else "it keeps K and V per head",
        "swa": _reason_not_swa(model),
        "hisparse": None if index else "every token is read at every step: there is no index",
        "recurrent": "it has no recurrent state",
        PREFILL_ONLY: _reason_not_prefill_only(model, asked),
    }


def _reason_not_mha(model: Model) -> str | None:
    if model.latent_dim:
        return "it keeps latents"
    return "its sliding layers have another shape than the others" if model.window_heads else None


def _reason_not_prefill_only(model: Model, asked: str | None) -> str | None:
    if model.latent_dim:
        return "its attention expands latents from the pool"
    if model.window_layers:
        return "its sliding layers have a window of the pool"
    if asked != PREFILL_ONLY:
        return "it decodes; where it only embeds or scores, ask for this family by name"
    return None


def _reason_not_swa(model: Model) -> str | None:
    if not model.window_layers:
        return "it has no sliding layers"
    if not model.layers:
        return "all its layers slide, and one must have KV of every token: it is held in full"
    return None


def _plan(model: Model, wanted: Wanted, family: str, full: int) -> Plan:
    pool = _pool_keys(model, wanted, family)
    if family == "hisparse":
        pool |= _hisparse_pages(pool, wanted)
    elif family == "recurrent" and not model.attention_layers:
        pool |= _counted_pages(pool, wanted)
    else:
        pool["size"] = wanted.memory
    others: dict[str, dict[str, Value]] = {}
    if family == PREFILL_ONLY:
        others = {
            "cache": {"mode": PREFILL_ONLY},
            "engine": {"workload": "embedding", "attention": "varlen"},
        }
    config = _checked(pool, others)
    spec = pool_spec(config)
    parts = tuple(_part(one, n, wanted.context_tokens, spec) for one, n in _pages(spec))
    rooms = _rooms(spec, wanted.context_tokens)
    full = full or _full_rooms(spec, wanted)
    kv = spec.components[0]
    block = 0 if family == PREFILL_ONLY else lockstep_bytes(spec)
    return Plan(
        family=family,
        parts=parts,
        bytes_per_token=block // kv.page_size,
        request_bytes=sum(one.request_pages * one.page_bytes for one in parts),
        tokens=(spec.pages[0] - 1) * kv.page_size,
        rooms=rooms,
        gain=rooms / full if full else 1.0,
        note=_note(model, family, spec),
        toml=_toml({"pool": pool, **others}),
    )


def _pages(spec: PoolSpec) -> zip[tuple[Component, int]]:
    return zip(spec.components, spec.pages, strict=True)


def _pool_keys(model: Model, wanted: Wanted, family: str) -> dict[str, Value]:
    """The [pool] section without its sizes."""
    is_windowed = family == "swa"
    pool: dict[str, Value] = {
        "family": "mha" if family == PREFILL_ONLY else family,
        "layers": model.layers if is_windowed else model.attention_layers,
    }
    if model.latent_dim:
        pool |= {"latent_dim": model.latent_dim, "rope_dim": model.rope_dim}
    elif model.heads:
        pool |= {"heads": model.heads, "head_dim": model.head_dim}
        if model.v_dim != model.head_dim:
            pool["v_dim"] = model.v_dim
    if model.attention_layers:
        pool |= {"dtype": wanted.dtype or model.dtype, "page_size": wanted.page_size}
    if is_windowed:
        pool |= _window_keys(model)
    pool |= wanted.shards
    if model.index_dim:
        pool |= {"index_dim": model.index_dim, "index_dtype": INDEX_DTYPE}
    if family == "hisparse":
        page = wanted.page_size
        pool["buffer_tokens"] = -(-wanted.buffer_tokens // page) * page
    if family == "recurrent":
        pool |= {"state_layers": model.state_layers, "state": model.state}
    if family in {"swa", "hisparse", "recurrent"}:
        pool["typical_tokens"] = wanted.context_tokens
    return pool


def _window_keys(model: Model) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "window_layers": model.window_layers,
        "window_tokens": model.window_tokens,
    }
    if model.window_heads:
        keys |= {
            "window_heads": model.window_heads,
            "window_head_dim": model.window_head_dim,
            "window_v_dim": model.window_v_dim,
        }
    return keys


def _hisparse_pages(pool: dict[str, Value], wanted: Wanted) -> dict[str, Value]:
    """Host memory for kv; the device has the index of all of it, and a buffer for each request.

    As many requests as both memories hold; what is left of the device are more buffers.
    """
    parts = components(_checked({**pool, "pages": 2**20}, {}).pool)
    kv, buffer = parts[0], parts[-1]
    device = size_bytes(wanted.memory) or 0
    host_pages = (size_bytes(wanted.host_memory) or 0) // page_bytes(kv)
    n = pages_of_request(kv, wanted.context_tokens)
    b = pages_of_request(buffer, wanted.context_tokens)
    beside = block_bytes(parts[:-1]) - page_bytes(kv)
    room_bytes = n * beside + b * page_bytes(buffer)
    rooms = min((host_pages - 1) // n, (device - beside - page_bytes(buffer)) // room_bytes)
    pages = host_pages
    if beside:
        left = device - (rooms * b + 1) * page_bytes(buffer)
        pages = min(host_pages, left // beside)
    buffers = (device - pages * beside) // page_bytes(buffer)
    return {"pages": max(2, pages), "buffer_pages": max(2, min(buffers, pages * b // n + b + 1))}


def _counted_pages(pool: dict[str, Value], wanted: Wanted) -> dict[str, Value]:
    """As many states as fit, and tokens enough for a whole request of each."""
    (_, state) = components(_checked({**pool, "pages": 2**20}, {}).pool)
    states = (size_bytes(wanted.memory) or 0) // page_bytes(state)
    pages = min((states - 1) * wanted.context_tokens, MAX_PAGES - 1) + 1
    return {"pages": max(2, pages), "states": max(2, states)}


def _checked(pool: dict[str, Value], others: dict[str, dict[str, Value]]) -> Config:
    """The configuration with this section, through every rule of the check."""
    sets = []
    for section, keys in {"pool": pool, **others}.items():
        for name, value in keys.items():
            if isinstance(value, dict):
                sets += [f"{section}.{name}.{entry}={item}" for entry, item in value.items()]
            else:
                sets.append(f"{section}.{name}={value}")
    found = load(None, {}, sets, host=_NOWHERE)
    if not isinstance(found, Config):
        raise NotPlanned("; ".join(_said(error) for error in found))
    return found


def _said(error: ConfigError) -> str:
    return f"{error.key} = {error.value} {error.rule}: {error.fix}"


def _part(component: Component, pages: int, context_tokens: int, spec: PoolSpec) -> Part:
    held = pages_of_request(spec.components[0], context_tokens)
    k = spec.components[0].page_size // component.page_size
    request = held * k if component not in budgets(spec) else _held(component, context_tokens)
    return Part(
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
        (spec.pages[spec.index(one.name)] - 1) // _held(one, context_tokens)
        for one in budgets(spec)
    )


def _full_rooms(spec: PoolSpec, wanted: Wanted) -> int:
    """Requests that fit if the sliding layers had KV of every token; 0 for other families."""
    if spec.family != "swa":
        return 0
    kv = spec.components[0]
    pages = (size_bytes(wanted.memory) or 0) // sum(page_bytes(one) for one in spec.components)
    return (pages - 1) // pages_of_request(kv, wanted.context_tokens)


def _note(model: Model, family: str, spec: PoolSpec) -> str:
    if family == PREFILL_ONLY:
        kv = spec.components[0]
        return (
            f"tokens are counted and take no byte, which would be {page_bytes(kv) // kv.page_size} "
            f"each in family mha; a placeholder of one page has {page_bytes(kv)} bytes"
        )
    if family == "swa":
        return (
            f"{model.window_layers} of {model.attention_layers} layers hold the last "
            f"{model.window_tokens} tokens only"
        )
    if family == "hisparse":
        buffer = next(one for one in spec.components if isinstance(one.extent, Buffer))
        return (
            f"KV in host memory; of each request {pages_of_request(buffer, 2**28)} pages on the "
            f"device, which reads {model.index_topk} tokens a step"
        )
    if model.window_layers:
        return f"full allocation: all {model.attention_layers} layers hold every token"
    return "full allocation" if family in {"mha", "mla"} else "one state per request, one cached"


def _toml(sections: dict[str, dict[str, Value]]) -> str:
    """Sections to paste into kvd.toml."""
    blocks = []
    for section, keys in sections.items():
        plain = [f"{k} = {toml_value(v)}" for k, v in keys.items() if not isinstance(v, dict)]
        blocks.append("\n".join([f"[{section}]", *plain]))
        for name, table in keys.items():
            if isinstance(table, dict):
                entries = [f"{entry} = {toml_value(item)}" for entry, item in table.items()]
                blocks.append("\n".join([f"[{section}.{name}]", *entries]))
    return "\n\n".join(blocks) + "\n"
