"""Which tensor of a model's cache is which page of the pool.

What a model keeps is found out by asking it: one token is computed into an empty cache, and its
layers are looked at. ``CacheShape`` is what they hold. ``PoolFit`` are the views of a pool for each
of them, in one form: (pages, page_size, heads, dim) for K and for V, whatever the pool's order and
interior; a latent's views are its two parts.

    layer of the model     in the pool
    looks at every token   component kv: K and V, or one latent (K the latent, V its rotated key)
    looks back a window    component swa, where the pool has one; in kv like the others otherwise
    has a state            component state: conv and ssm
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from transformers import DynamicCache

from kvd.connectors.refusals import refused_here
from kvd.errors import Code, KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Cache, PreTrainedModel

    from kvd.client import Pool

KV, WINDOW, STATE = "kv", "swa", "state"

ATTENTION: Final = ("DynamicLayer", "DynamicSlidingWindowLayer")
BOTH: Final = "LinearAttentionAndFullAttentionLayer"
STATES: Final = ("LinearAttentionLayer", BOTH)
NOTHING: Final = "DummyLayer"
"""Layers of transformers' cache that are served, by the names of their classes."""

ARGUMENTS: Final = ("cache", "cache_params", "past_key_values")
"""What a model calls its cache, by its version and family."""

CONV, SCAN = "conv", "ssm"
"""The tensors of a state, by their names in the pool."""

LOOKED_AT: Final = 16
"""Tokens that are computed whole and in two pieces, of a model with states."""

EXACT: Final = 1e-3
ROUNDED: Final = 3e-2
"""How far apart logits may be then, of the largest one: in 32 bits or more, and in fewer."""


class KvShape(msgspec.Struct, frozen=True):
    """The KV of one token in one layer."""

    heads: int
    k_dim: int
    v_dim: int
    dtype: str


class HeldTensor(msgspec.Struct, frozen=True):
    """One tensor of a state."""

    shape: tuple[int, ...]
    dtype: str

    def in_words(self) -> str:
        """As ``[pool.state]`` has it."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class LayerShape(msgspec.Struct, frozen=True, eq=False):
    """What one layer of a model's cache holds, and on which device."""

    device: torch.device
    kv: KvShape | None = None
    window_tokens: int = 0
    """0: it looks at every token."""
    state: dict[str, HeldTensor] = {}


class CacheShape(msgspec.Struct, frozen=True, eq=False):
    """What all layers hold. ``argument``: what the model calls its cache."""

    argument: str
    layers: tuple[LayerShape, ...]

    @property
    def has_states(self) -> bool:
        """Whether any layer is recurrent."""
        return any(layer.state for layer in self.layers)

    @property
    def has_kv(self) -> bool:
        """Whether any layer keeps KV of tokens."""
        return any(layer.kv for layer in self.layers)

    def section(self, size: str) -> str:
        """The ``[pool]`` section of a daemon for this model, of so much memory."""
        return "\n".join(f"{key} = {value}" for key, value in self._keys(size))

    def in_words(self) -> str:
        """What decides how it lies in pages; equal for equal ones."""
        return "; ".join(
            f"{layer.kv or ''} {layer.window_tokens or ''} "
            f"{ {name: held.in_words() for name, held in layer.state.items()} or '' }"
            for layer in self.layers
        )

    def _keys(self, size: str) -> Iterator[tuple[str, object]]:
        whole = [layer.kv for layer in self.layers if layer.kv and not layer.window_tokens]
        windows = [layer for layer in self.layers if layer.window_tokens]
        states = [layer.state for layer in self.layers if layer.state]
        if not whole:  # One layer must have KV of every token: then all have.
            whole, windows = [layer.kv for layer in windows if layer.kv], []
        kv = whole[0] if whole else None
        is_latent = kv is not None and kv.heads == 1 and kv.k_dim != kv.v_dim
        family = "recurrent" if states else "swa" if windows else "mla" if is_latent else "mha"
        yield "family", f'"{family}"'
        yield "layers", len(whole)
        if kv is not None:
            yield "dtype", f'"{kv.dtype}"'
            if is_latent:
                yield from (("latent_dim", kv.k_dim), ("rope_dim", kv.v_dim))
            else:
                yield from (("heads", kv.heads), ("head_dim", kv.k_dim))
                yield from [("v_dim", kv.v_dim)] * (kv.v_dim != kv.k_dim)
            yield "page_size", 16
        if windows and (slid := windows[0].kv) is not None:
            yield "window_tokens", windows[0].window_tokens
            yield "window_layers", len(windows)
            if slid != kv:
                yield from (("window_heads", slid.heads), ("window_head_dim", slid.k_dim))
                yield "window_v_dim", slid.v_dim
        if states:
            yield "state_layers", len(states)
            for name, held in states[0].items():
                yield f"state.{name}", f'"{held.in_words()}"'
        yield "size", f'"{size}"'


def cache_argument(model: PreTrainedModel) -> str:
    """What it calls its cache, in this version of transformers."""
    takes = _takes(type(model).forward)
    return next((name for name in ARGUMENTS if name in takes), ARGUMENTS[-1])


@functools.cache
def _takes(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def compute(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, *, first: int, logits: int = 1
) -> torch.Tensor:
    """Compute (1, tokens) behind the ``first`` ones that ``cache`` holds.

    Returns:
        (1, logits, vocabulary) of the last so many, or of all of them where a model tells no fewer.
    """
    takes, how = _takes(type(model).forward), {cache_argument(model): cache}
    more: dict[str, object] = {"logits_to_keep": logits} if "logits_to_keep" in takes else {}
    if "position_ids" in takes:
        # Some count from 0 if they are told none, whatever is in their cache.
        more["position_ids"] = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=True, **how, **more).logits
    return found


def shape_of(model: PreTrainedModel) -> CacheShape:
    """What the cache of ``model`` holds: it computes one token for that.

    Raises:
        KvdError: ``not-supported`` for a layer that no page can hold, or layers that are unlike.
    """
    if model.config.is_encoder_decoder:
        raise _not_served(model, "it has an encoder")
    argument = cache_argument(model)
    cache = DynamicCache(config=model.config)
    first = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        compute(model, first, cache, first=0)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise _not_served(model, f"it does not compute in a DynamicCache ({error})") from error
    shape = CacheShape(argument, tuple(_layer(model, layer) for layer in cache.layers))
    _require_alike(model, shape)
    if not (shape.has_kv or shape.has_states):
        raise _not_served(model, "no layer of its cache holds anything")
    if type(model)._is_stateful and not shape.has_states:  # noqa: SLF001 - it is named nowhere else
        # Of one that keeps it in its modules, a prompt would go on from the state of another one.
        raise _not_served(model, "it has a state, and its cache holds none")
    if shape.has_states:
        _require_that_it_goes_on(model)
    return shape


def _require_alike(model: PreTrainedModel, shape: CacheShape) -> None:
    groups: dict[str, set[str]] = {"whole": set(), "window": set(), "state": set()}
    for layer in shape.layers:
        if layer.kv is not None:
            kind = "window" if layer.window_tokens else "whole"
            groups[kind].add(f"{layer.kv} {layer.window_tokens}")
        if layer.state:
            groups["state"].add(str(layer.state))
    for kind, found in groups.items():
        if len(found) > 1:
            raise _not_served(model, f"its layers are unlike ({kind}): {'; '.join(sorted(found))}")


def _require_that_it_goes_on(model: PreTrainedModel) -> None:
    """From a state, by several tokens, as if it had computed all of them in one piece.

    Not every model does: those of Mamba 1 begin a convolution anew behind it.
    """
    if model.training:
        raise _not_served(model, "it has states, and is in training mode: call eval() before")
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(LOOKED_AT, device=model.device)[None] % vocabulary
    n, cache = LOOKED_AT // 2, DynamicCache(config=model.config)
    whole = compute(model, ids, DynamicCache(config=model.config), first=0, logits=n)[:, -n:]
    compute(model, ids[:, :-n], cache, first=0)
    rest = compute(model, ids[:, -n:], cache, first=LOOKED_AT - n, logits=n)
    off = float((rest - whole).abs().max() / whole.abs().max())
    if off > (EXACT if whole.dtype in {torch.float32, torch.float64} else ROUNDED):
        why = f"it does not go on from a state as if it had computed all (off by {off:.1%})"
        raise _not_served(model, why)


def _layer(model: PreTrainedModel, layer: Any) -> LayerShape:
    kind = type(layer).__name__
    if kind == NOTHING:
        return LayerShape(model.device)
    if kind not in (*ATTENTION, *STATES):
        raise _not_served(model, f"a layer of its cache is a {kind}")
    found = LayerShape(model.device)
    if kind in ATTENTION or kind == BOTH:
        found = _attention(model, layer)
    return msgspec.structs.replace(found, **_state(model, layer)) if kind in STATES else found


def _attention(model: PreTrainedModel, layer: Any) -> LayerShape:
    if not layer.is_initialized or layer.keys is None:
        raise _not_served(model, "a layer of its cache holds nothing behind a token")
    keys, values = layer.keys, layer.values
    if keys.ndim != 4 or values.shape[1] != keys.shape[1] or values.dtype != keys.dtype:
        shapes = f"{tuple(keys.shape)} {keys.dtype}, {tuple(values.shape)} {values.dtype}"
        raise _not_served(model, f"K and V of a layer are {shapes}")
    kv = KvShape(
        heads=keys.shape[1],
        k_dim=keys.shape[3],
        v_dim=values.shape[3],
        dtype=_dtype(keys),
    )
    window = layer.sliding_window if type(layer).__name__ == ATTENTION[1] else 0
    return LayerShape(keys.device, kv, window_tokens=window)


def _state(model: PreTrainedModel, layer: Any) -> dict[str, object]:
    if layer.number_of_states != 1:
        raise _not_served(model, f"a layer has {layer.number_of_states} states")
    tensors = {CONV: layer.conv_states[0], SCAN: layer.recurrent_states[0]}
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    state = {
        name: HeldTensor(tuple(tensor.shape[1:]), _dtype(tensor)) for name, tensor in there.items()
    }
    device = next(iter(there.values())).device if there else model.device
    return {"state": state, "device": device}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _not_served(model: PreTrainedModel, why: str) -> KvdError:
    name = type(model).__name__
    what = f"kvd has no pages for the cache of {name}: {why}; call generate without kvd"
    return refused_here(Code.NOT_SUPPORTED, what)


def pool_section(model: PreTrainedModel, size: str = "4GiB") -> str:
    """The ``[pool]`` section that a daemon needs for ``model``, of so much memory.

    Raises:
        KvdError: ``not-supported`` where no pool can hold what it keeps.
    """
    return f"[pool]\n{shape_of(model).section(size)}"


# ---- in a pool ---------------------------------------------------------------------------------


class LayerPages(msgspec.Struct, frozen=True, eq=False):
    """Where one layer of the model lies in the pool.

    ``part``: the component of its KV. ``k`` and ``v``: (pages, page_size, heads, dim). ``state``:
    by name, (pages, *its own shape).
    """

    part: str = ""
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    state: dict[str, torch.Tensor] = {}


class PoolFit:
    """The views of a pool, for each layer of a model.

    Args:
        shape: what the model keeps.
        pool: of the daemon.

    Raises:
        KvdError: ``layout-mismatch`` where the pool is another model's, with a section that fits.
    """

    def __init__(self, shape: CacheShape, pool: Pool) -> None:
        self.shape = shape
        self.page_size = pool.page_size
        self._pool = pool
        self._counts = dict.fromkeys((KV, WINDOW, STATE), 0)
        self._parts = {part.name: part for part in pool.memory.components}
        if pool.shards:
            raise self._misfit(f"it is in {len(pool.shards)} shards: set pool.tp_size to 1")
        self.has_windows = WINDOW in self._parts
        self.layers = tuple(map(self._placed, shape.layers))
        for name, count in self._counts.items():
            has = (
                {place.layer for place in self._parts[name].tensors} if name in self._parts else ()
            )
            if len(has) != count:
                raise self._misfit(f"{name} has {len(has)} layers, the model {count}")
        extra = set(self._parts) - {KV, WINDOW, STATE}
        if extra:
            raise self._misfit(f"it has {', '.join(sorted(extra))} beside")
        windows = {layer.window_tokens for layer in shape.layers if layer.window_tokens}
        if self.has_windows and windows != {self._parts[WINDOW].extent_tokens}:
            raise self._misfit(f"its window is of {self._parts[WINDOW].extent_tokens} tokens")
        self.window_tokens = max(windows, default=0)
        self.window_pages = self._parts[WINDOW].pages if self.has_windows else 0
        self.beyond_tokens = self._beyond(self.window_tokens)

    def _beyond(self, window_tokens: int) -> int | None:
        """How many tokens a layer must keep beyond its window; None: all of them."""
        if not window_tokens:
            return 0
        # What a lease has mapped when it has slid to the last whole page, and the rest behind it.
        return 4 * max(self.page_size, 1) if self.has_windows else None

    def _placed(self, layer: LayerShape) -> LayerPages:
        found = LayerPages()
        if layer.kv is not None:
            part = WINDOW if layer.window_tokens and self.has_windows else KV
            k, v = self._kv(layer.kv, self._next(part))
            found = LayerPages(part=part, k=k, v=v)
        if layer.state:
            held = self._next(STATE)
            for name, wanted in layer.state.items():
                here = held.get(name)
                if here is None or (tuple(here.shape[1:]), _dtype(here)) != (
                    wanted.shape,
                    wanted.dtype,
                ):
                    is_here = "none" if here is None else f"{_dtype(here)}{list(here.shape[1:])}"
                    raise self._misfit(f"state.{name} is {is_here}, not {wanted.in_words()}")
            found = msgspec.structs.replace(found, state=held)
        return found

    def _next(self, part: str) -> dict[str, torch.Tensor]:
        number = self._counts[part]
        self._counts[part] += 1
        try:
            return self._pool.tensors(part, layer=number)
        except KvdError as error:
            if error.code != Code.BAD_REQUEST.value:
                raise
            raise self._misfit(f"{part} has fewer layers than the model") from None

    def _kv(self, kv: KvShape, found: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if set(found) == {"latent"}:
            latent = found["latent"]
            k, v = latent[..., : kv.k_dim], latent[..., kv.k_dim :]
        elif set(found) == {"k", "v"}:
            k, v = found["k"], found["v"]
            if self._pool.interior == "hnd":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            raise self._misfit(f"a layer has {', '.join(found)}, not k and v")
        here = KvShape(heads=k.shape[2], k_dim=k.shape[3], v_dim=v.shape[3], dtype=_dtype(k))
        if here != kv:
            raise self._misfit(f"a layer is {here}, not {kv}")
        return k, v

    def _misfit(self, why: str) -> KvdError:
        total = sum(part.total_bytes for part in self._parts.values())
        size = f"{max(1, math.ceil(total / 2**20))}MiB"
        what = (
            f"pool {self._pool.name} (family {self._pool.memory.family}) is not for this model: "
            f"{why}. The section that fits, in as much memory:\n[pool]\n{self.shape.section(size)}"
        )
        return refused_here(Code.LAYOUT_MISMATCH, what)
