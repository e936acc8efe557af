"""What a pool holds, as data: component = layout x extent x tier.

A pool family is a list of components and nothing else; no class per family. This file says how
many bytes a page of one layer takes. Where those bytes lie is ``geometry``.

The first component is called ``kv``, and its page is the page of matching. Of the others

* a **companion** is ``Whole`` too. Its pages go in lockstep with those of kv: page ``p`` of kv owns
  its pages ``p*k .. p*k+k-1``, where k is how many of its pages hold the tokens of one page of kv.
  It has no free list and no row of its own: nothing of it can leak.
* every other one has a **budget**: a free list and page ids of its own.

Invariant of every spec: page sizes divide that of the first component, and a companion has k times
its pages. Which page sizes are right, and why, is ``page_sizes``.
"""

from __future__ import annotations

import enum
import math
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.layout.shards import Shard
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of one element, by torch dtype name."""


class Mha(msgspec.Struct, frozen=True, tag="mha"):
    """K and V per layer, each ``(page_size, heads, dim)``; K and V may differ in width.

    A width of 0 leaves that one out: an index keeps keys and no values.
    """

    heads: int
    k_dim: int
    v_dim: int
    dtype: str


class Mla(msgspec.Struct, frozen=True, tag="mla"):
    """One latent per layer, ``(page_size, 1, latent_dim + rope_dim)``."""

    latent_dim: int
    rope_dim: int
    dtype: str


class Raw(msgspec.Struct, frozen=True, tag="raw", omit_defaults=True):
    """``page_bytes`` opaque bytes per page and layer, packed as the engine likes.

    Of ``ranks`` each has so many bytes of its own: they are what shards are counted in.
    """

    page_bytes: int
    ranks: int = 1


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a state: ``shape`` of one layer of one request, without a page dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class State(msgspec.Struct, frozen=True, tag="state"):
    """The tensors of one state of one layer, one after the other. A page is one such state."""

    tensors: tuple[StateTensor, ...]


Layout = Mha | Mla | Raw | State


class Interior(enum.Enum):
    """How the elements of a page lie in one layer, which says what a page can be cut into.

    ``NHD``: token by token, in each of them all heads; cut by tokens and by heads. ``HND``: head by
    head, of each of them all tokens; cut by heads. ``OPAQUE``: as the engine likes; never cut.
    """

    NHD = "nhd"
    HND = "hnd"
    OPAQUE = "opaque"


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """Every token of the sequence owns a slot."""


class Tail(msgspec.Struct, frozen=True, tag="tail"):
    """Only the last ``window_tokens`` own slots."""

    window_tokens: int


class PerRequest(msgspec.Struct, frozen=True, tag="per-request"):
    """One state per request, whatever its length."""


class Buffer(msgspec.Struct, frozen=True, tag="buffer"):
    """Copies of some pages of the first component, at most ``tokens`` of each request.

    It is this node's own affair: never sent, never in the tree, no part of the fingerprint.
    """

    tokens: int


Extent = Whole | Tail | PerRequest | Buffer


_CUDA = "cuda:"


class Device(msgspec.Struct, frozen=True, tag="device"):
    """In the memory of ``cpu`` or ``cuda:N``."""

    name: str


class Host(msgspec.Struct, frozen=True, tag="host"):
    """In host memory beside a device pool."""


class Nowhere(msgspec.Struct, frozen=True, tag="nowhere"):
    """Logical accounting only: no bytes exist."""


Tier = Device | Host | Nowhere


class Component(msgspec.Struct, frozen=True):
    """One named kind of state that a sequence owns: ``kv``, ``swa``, ``index``, ``state``.

    ``page_size`` is in tokens; 1 for a state, of which a page is one. ``interior`` says nothing of
    a state, whose tensors have no tokens; opaque bytes are ``OPAQUE``.
    """

    name: str
    layers: int
    layout: Layout
    page_size: int
    extent: Extent = Whole()
    tier: Tier = Device("cpu")
    interior: Interior = Interior.NHD


class PageOrder(enum.Enum):
    """Which index varies slowest in memory."""

    PAGE_FIRST = "page_first"
    LAYER_FIRST = "layer_first"


MAX_TAG_CHARS = 200
"""Of a pool's tag: so much is configured at most, and said of a peer's."""


class HeldShards(msgspec.Struct, frozen=True):
    """Which shards of a model's KV a pool keeps; ``layers`` and ``heads`` are the model's."""

    layers: int
    heads: int
    shards: tuple[Shard, ...]


class PoolSpec(msgspec.Struct, frozen=True):
    """One pool: its components, their order in memory, and the pages of each (null page included).

    Two daemons may exchange pages when their ``fingerprint`` is equal; page counts may differ.
    """

    name: str
    family: str
    order: PageOrder
    components: tuple[Component, ...]
    pages: tuple[int, ...]
    saved_pages: tuple[int, ...] = ()
    """Pages of host memory beside each component for retracted leases, a null page included; 0 for
    none, and left out for none at all."""
    held: HeldShards | None = None
    """Where the first component is sharded: components are as one shard has them, and all shards of
    a node are alike. None: the pool has all of the model, in one shard."""
    tag: str = ""
    """Who packs its pages, in the engine's words: two pools of unlike tags exchange nothing."""

    def __post_init__(self) -> None:
        if not self.saved_pages:
            msgspec.structs.force_setattr(self, "saved_pages", (0,) * len(self.components))

    @property
    def match_page_tokens(self) -> int:
        """Granularity of matching: the least common multiple of the page sizes (I4)."""
        return math.lcm(*(component.page_size for component in self.components))

    def index(self, name: str) -> int:
        """Where the component of that name is in ``components``, ``pages`` and ``saved_pages``.

        Raises:
            KeyError: there is none.
        """
        for index, component in enumerate(self.components):
            if component.name == name:
                return index
        raise KeyError(name)


def kind(what: Extent | Tier) -> str:
    """The word for it in reports, to engines, and in fingerprints."""
    return str(what.__struct_config__.tag)


def extent_tokens(component: Component) -> int:
    """Of its window, or of one request's buffer; 0 where its extent has no number."""
    match component.extent:
        case Tail(tokens) | Buffer(tokens):
            return tokens
        case Whole() | PerRequest():
            return 0


def is_companion(spec: PoolSpec, component: Component) -> bool:
    """Whether its page ids follow from those of the first component."""
    return component is not spec.components[0] and isinstance(component.extent, Whole)


def budgets(spec: PoolSpec) -> tuple[Component, ...]:
    """The components with page ids of their own, the first one first."""
    return tuple(component for component in spec.components if not is_companion(spec, component))


def companion_factor(spec: PoolSpec, component: Component) -> int:
    """How many pages of a companion belong to one page of the first component."""
    return spec.components[0].page_size // component.page_size


def companion_pages(pages: Pages, k: int) -> Pages:
    """The ``k`` companion pages of each of ``pages``, in order; null pages follow null pages."""
    if k == 1:
        return pages
    ids = np.frombuffer(pages, dtype="<i4")
    each = ids[:, np.newaxis] * np.int32(k) + np.arange(k, dtype="<i4")
    return Pages(each.astype("<i4", copy=False).tobytes())


def layer_page_bytes(component: Component) -> int:
    """Bytes of one page of one layer of ``component``."""
    match component.layout:
        case Mha(heads, k_dim, v_dim, dtype):
            return component.page_size * heads * (k_dim + v_dim) * DTYPE_BYTES[dtype]
        case Mla(latent_dim, rope_dim, dtype):
            return component.page_size * (latent_dim + rope_dim) * DTYPE_BYTES[dtype]
        case Raw(page_bytes, ranks):
            return page_bytes * ranks
        case State(tensors):
            return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)


def page_bytes(component: Component) -> int:
    """Bytes of one page over all layers of ``component``, wherever they would lie."""
    return component.layers * layer_page_bytes(component)


def has_bytes(component: Component) -> bool:
    """Whether there is memory behind its pages; otherwise they are counted and nothing more."""
    return not isinstance(component.tier, Nowhere) and page_bytes(component) > 0


def shards_of(spec: PoolSpec) -> tuple[Shard, ...]:
    """The shards of a pool; of one that has all of the model, that one shard."""
    if spec.held is not None:
        return spec.held.shards
    first = spec.components[0]
    return (
        Shard(first_layer=0, end_layer=first.layers, first_head=0, end_head=heads_of(first.layout)),
    )


def heads_of(layout: Layout) -> int:
    """Heads that shards may divide among them; a latent is one, and so is an opaque rank."""
    match layout:
        case Mha(heads):
            return heads
        case Raw(ranks=ranks):
            return ranks
        case Mla() | State():
            return 1


def shard_of(component: Component, shard: Shard) -> Component:
    """A component of the model as one shard has it."""
    return _resized(
        component, shard.end_layer - shard.first_layer, shard.end_head - shard.first_head
    )


def _resized(component: Component, layers: int, heads: int) -> Component:
    layout = component.layout
    if isinstance(layout, Mha):
        layout = msgspec.structs.replace(layout, heads=heads)
    elif isinstance(layout, Raw):
        layout = msgspec.structs.replace(layout, ranks=heads)
    return msgspec.structs.replace(component, layers=layers, layout=layout)


def node_page_bytes(spec: PoolSpec, component: Component) -> int:
    """Bytes of one page of ``component`` in all shards of the node together."""
    return page_bytes(component) * (1 if spec.held is None else len(spec.held.shards))


def lockstep_bytes(spec: PoolSpec) -> int:
    """Bytes of one page of the first component, with what is in lockstep with it."""
    return sum(
        node_page_bytes(spec, component) * companion_factor(spec, component)
        for component in spec.components
        if isinstance(component.extent, Whole) and has_bytes(component)
    )


def shard_region(component: str, shard: int) -> str:
    """The name of the memory of one shard of a component: of the first, the component's own."""
    return f"{component}#{shard}" if shard else component


def device_number(component: Component, shard: int = 0) -> int | None:
    """The CUDA device that a shard lies on, each on the one after the last; None: on the host."""
    match component.tier:
        case Device(name) if name.startswith(_CUDA):
            return int(name.removeprefix(_CUDA)) + shard
        case _:
            return None


def region_names(spec: PoolSpec, area: str) -> tuple[str, ...]:
    """The regions of an area, one for each shard: of a component, or of its saved pages."""
    return tuple(shard_region(area, shard) for shard in range(len(shards_of(spec))))


def saved_region(component: Component) -> str:
    """The name of the host memory that takes this component's pages of retracted leases."""
    return f"{component.name}.saved"


class Exchanged(msgspec.Struct, frozen=True, omit_defaults=True):
    """A component as a peer must know it: not in which memory it lies, nor how much there is.

    ``layers`` is 0 where there are no bytes: nothing of it can be exchanged.
    """

    name: str
    layers: int
    layout: Layout
    page_size: int
    extent: Extent
    interior: Interior = Interior.NHD
    """Left out where it is this: versions of kvd that know of no other say nothing of it."""


def exchanged(spec: PoolSpec) -> tuple[Exchanged, ...]:
    """The components that a peer must have too: all but buffers, and as the model has them."""
    return tuple(
        Exchanged(
            name=component.name,
            layers=component.layers if has_bytes(component) else 0,
            layout=component.layout,
            page_size=component.page_size,
            extent=component.extent,
            interior=component.interior,
        )
        for component in (_of_model(part, spec.held) for part in spec.components)
        if not isinstance(component.extent, Buffer)
    )


def _of_model(component: Component, held: HeldShards | None) -> Component:
    """A component as the model has it, of which a pool's shards have parts."""
    return component if held is None else _resized(component, held.layers, held.heads)


def fingerprint(spec: PoolSpec) -> str:
    """A pool as its peers must know it, as canonical text.

    First what must be equal on both sides of a handoff: the order, the components, and the tag,
    where there is one. Then, where the pool is not all of the model in one shard, its shards, which
    may differ (``read_shards``).
    """
    if spec.held is None:
        return _as_text(_comparable(spec))
    return _as_text((*_comparable(spec), spec.held.shards))


def _comparable(spec: PoolSpec) -> tuple[object, ...]:
    tag = (spec.tag,) if spec.tag else ()
    return (spec.order, exchanged(spec), *tag)


def _as_text(value: object) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def read_shards(theirs: str) -> tuple[str, tuple[Shard, ...]]:
    """A peer's fingerprint without its shards, and those; none where it names none."""
    try:
        *comparable, last = msgspec.json.decode(theirs, type=list[msgspec.Raw])
        shards = msgspec.json.decode(last, type=tuple[Shard, ...])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return theirs, ()
    if not 2 <= len(comparable) <= 3:  # with the tag, or without
        return theirs, ()
    return f"[{','.join(bytes(value).decode() for value in comparable)}]", shards


MAX_DIFFERENCE_CHARS = 500
"""Of what is said about a peer's layout: a dozen fields."""

MAX_DIFFERENCES = 100
"""Looked for in a peer's layout: more of them than fit into what is said."""

ABSENT = "absent"


def layout_difference(ours: PoolSpec, theirs: str) -> str | None:
    """The differences between our layout and a peer's fingerprint, in words; None when equal.

    Which shards either has is no difference. The cost is linear in ``theirs``, and what is said is
    cut to ``MAX_DIFFERENCE_CHARS``.
    """
    text = _as_text(_comparable(ours))
    theirs, _ = read_shards(theirs)
    if text == theirs:
        return None
    try:
        other = _by_name(theirs)
    except (msgspec.DecodeError, RecursionError):
        return f"theirs is no layout: {theirs[:40]!r}"
    said = "; ".join(islice(_differences("", _by_name(text), other), MAX_DIFFERENCES))
    if len(said) > MAX_DIFFERENCE_CHARS:
        return said[: MAX_DIFFERENCE_CHARS - 3] + "..."
    return said or f"equal, but written differently: {theirs[:40]!r}"


def _by_name(text: str) -> object:
    """A fingerprint, whose parts have no names of their own, with these, and what is left out."""
    read = msgspec.json.decode(text)
    if not isinstance(read, list):
        return read
    names = ("order", "components", "tag", *map(str, range(3, len(read))))
    named = {"tag": "", **dict(zip(names, read, strict=False))}
    components = named.get("components")
    for component in components if isinstance(components, list) else ():
        if isinstance(component, dict):
            component.setdefault("interior", Interior.NHD.value)
            layout = component.get("layout")
            if isinstance(layout, dict) and layout.get("type") == Raw.__struct_config__.tag:
                layout.setdefault("ranks", 1)
    return named


def _differences(path: str, ours: object, theirs: object) -> Iterator[str]:
    """Leaf by leaf, no deeper than both of them go: a stranger's may nest as deep as it likes."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            name = f"{path}.{key[:40]}" if path else key[:40]
            yield from _differences(name, ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif isinstance(ours, list) and isinstance(theirs, list):
        for index, pair in enumerate(zip_longest(ours, theirs, fillvalue=ABSENT)):
            # A component that only one side has: its name says enough.
            one, other = map(_its_name, pair) if ABSENT in pair else pair
            yield from _differences(f"{path}.{index}", one, other)
    elif ours != theirs:
        yield f"{path or 'layout'}: ours {_shown(ours)}, theirs {_shown(theirs)}"


def _its_name(value: object) -> object:
    if value == ABSENT:
        return {}
    return {"name": value["name"]} if isinstance(value, dict) and "name" in value else value


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)[:80] or "nothing"
