"""Which bytes of vLLM's KV cache are which page of the pool; or why they do not fit, in words.

vLLM gives each layer a tensor whose first dimension is the block. What lies inside a block is its
attention kernel's, and differs between kernels, types and versions: here a block is bytes. So the
pool is of family ``raw``, and its tag says which kernel packs them; equal tags on two nodes mean
equal blocks. Nothing here knows vLLM, or reads a byte: where blocks lie is arithmetic on addresses.

Layers may be in groups that have blocks of their own for the same tokens, as sliding windows beside
full attention. A page is the bytes of all of them: of each group a block, or several where its
blocks are of fewer tokens. Each rank has its part of it, in a shard of the pool: its heads of its
layers, of which each stage of a pipeline has as many.

A block of layers with states has one: that of all tokens up to the last of the block, behind which
alone can be gone on. It is there where a step has ended at that token, so every step has to end at
the next block's end at the latest: then each page has the state of its last token.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from kvd.client import LayerMemory
from kvd.client.mover.engine_memory import HOST, BlockLayout, block_layout
from kvd.connectors.refusals import refused_here
from kvd.errors import Code, KvdError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.client import Pool
    from kvd.client.mover.engine_memory import TensorView

DEVICES: Final = (HOST, "cuda")
"""Kinds of memory that blocks are copied from and to: by processors, and by a copy engine."""

WHOLE: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of layers of which vLLM keeps every block of a request until that is over."""

WINDOWED: Final = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""Kinds of layers of which vLLM takes blocks away meanwhile, those that no later token attends to.
Its null block stands where they were: saved in their place, that would be the KV of nobody."""

STATES: Final = ("MambaSpec",)
"""Kinds of layers of which vLLM keeps states, and takes back all but the last ones: as windows."""

ALIGNED: Final = "align"
"""How vLLM keeps them where they can be found again: at the ends of blocks."""

LOCAL: Final = (*WINDOWED, "SlidingWindowMLASpec")
"""Kinds of layers that vLLM keeps whole too, where it is told to have one group."""

ONE_GROUP: Final = "--disable-hybrid-kv-cache-manager"
"""With this switch it does."""


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers that have their blocks in common, as vLLM groups them.

    ``block_size``: tokens of a block; ``per_page``: so many blocks are one page. ``is_windowed``:
    while a request goes on, vLLM takes those of its blocks back that lie beyond the windows of
    these layers. ``has_states``: a block is the state behind its last token.
    """

    layers: tuple[str, ...]
    block_size: int
    per_page: int = 1
    is_windowed: bool = False
    has_states: bool = False

    def numbers_of(self, page: int) -> range:
        """Which blocks of a request a page of it is."""
        return range(page * self.per_page, (page + 1) * self.per_page)


class CacheGroup(Protocol):
    """A group of layers, as vLLM says it."""

    layer_names: Sequence[str]
    kv_cache_spec: Any


@runtime_checkable
class NamesCausality(Protocol):
    """A group of layers that says whether tokens attend to later ones: vLLM's of 0.32 do."""

    non_causal: bool


@runtime_checkable
class SaysWhichStates(Protocol):
    """A group of layers with states that says which of them are kept: vLLM's of 0.32 do."""

    mamba_cache_mode: str
    num_speculative_blocks: int


@runtime_checkable
class PaddedSpec(Protocol):
    """A group of layers that says how much of a block is used: a state may be smaller."""

    real_page_size_bytes: int


@runtime_checkable
class SeveralSpecs(Protocol):
    """What layers of unlike sizes in one group are: by layer, each of its own."""

    kv_cache_specs: Mapping[str, Any]


def _movable(name: str, tensor: TensorView) -> BlockLayout:
    layout = block_layout(name, tensor)
    if layout.device.split(":", maxsplit=1)[0] not in DEVICES:
        raise _unfit(
            f"the KV cache is on {layout.device} (layer {name}): kvd's connector copies memory of "
            "the host and of CUDA devices; run this engine without kvd"
        )
    return layout


def layer_groups(
    groups: Sequence[CacheGroup],
    *,
    context_ranks: int = 1,
    match_tokens: int | None = None,
    step_tokens: int = 0,
) -> tuple[LayerGroup, ...]:
    """Those of an engine, if what they keep is the KV of tokens in a row and those before.

    Args:
        groups: vLLM's.
        context_ranks: how many ranks share the tokens of a block among them.
        match_tokens: vLLM finds prefixes of so many tokens, and multiples; None: of those that all
            blocks have in common.
        step_tokens: a step computes so many at most; 0: any number.

    Raises:
        KvdError: ``layout-mismatch``: it is not; with the switch that makes it so, if there is one.
    """
    by_group = [_specs_of(group.kv_cache_spec) for group in groups]
    specs = [spec for of_group in by_group for spec in of_group]
    for spec in specs:
        _check_kind(spec, has_whole=any(_kind(other) in WHOLE for other in specs))
    if not specs:
        raise _unfit("this model has no layers with KV: there is nothing that kvd could cache")
    if context_ranks != 1:
        raise _unfit(
            f"{context_ranks} ranks share the tokens of a block (context parallelism): kvd's "
            "connector takes a block for tokens in a row; run it without kvd"
        )
    sizes = [group.kv_cache_spec.block_size for group in groups]
    page_size = math.lcm(*sizes)
    for spec in specs:
        if _kind(spec) in STATES:
            _check_states(
                spec,
                page_size=page_size,
                match_tokens=match_tokens or math.gcd(*sizes),
                step_tokens=step_tokens,
            )
    return tuple(
        LayerGroup(
            tuple(group.layer_names),
            group.kv_cache_spec.block_size,
            page_size // group.kv_cache_spec.block_size,
            is_windowed=any(_kind(spec) in WINDOWED + STATES for spec in of_group),
            has_states=any(_kind(spec) in STATES for spec in of_group),
        )
        for group, of_group in zip(groups, by_group, strict=True)
    )


def check_stages(n_layers: Sequence[int]) -> None:
    """Whether each stage of a pipeline can have a shard of the pool: all shards are of one size.

    Raises:
        KvdError: ``layout-mismatch``: they have unlike numbers of layers, which are these.
    """
    if len(set(n_layers)) > 1:
        raise _unfit(
            f"the stages of this pipeline have {', '.join(map(str, n_layers))} layers: kvd's "
            "connector gives each of them a part of a page that is as large as the others'; use a "
            f"--pipeline-parallel-size that divides {sum(n_layers)}, or run it without kvd"
        )


def page_size_of(groups: Sequence[LayerGroup]) -> int:
    """Tokens of a page."""
    return groups[0].block_size * groups[0].per_page


def _specs_of(spec: object) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, SeveralSpecs) else [spec]


def _kind(spec: object) -> str:
    return type(spec).__name__


def _check_kind(spec: object, *, has_whole: bool) -> None:
    kind = _kind(spec)
    if kind in LOCAL and kind not in WINDOWED and has_whole:
        raise _unfit(
            f"some layers of this model are of {kind}: kvd's connector serves them with {ONE_GROUP}"
        )
    if kind not in WHOLE + WINDOWED + STATES:
        raise _unfit(
            f"layers of this model are of {kind}: kvd's connector serves "
            f"{', '.join(WHOLE + WINDOWED)}, whose blocks hold the KV of their own tokens and no "
            f"more, and {', '.join(STATES)}; run it without kvd"
        )
    if isinstance(spec, NamesCausality) and spec.non_causal:
        raise _unfit(
            "the layers of this model attend to later tokens: the KV of a prefix is another one in "
            "each prompt, so nothing of it can be cached; run it without kvd"
        )


def _check_states(spec: object, *, page_size: int, match_tokens: int, step_tokens: int) -> None:
    """Whether every page will have the state of its last token: each step ends at one."""
    if not isinstance(spec, SaysWhichStates):
        raise _unfit(
            f"the layers of {_kind(spec)} do not say which states they keep, as those of vLLM 0.32 "
            "do: run this engine without kvd"
        )
    if spec.mamba_cache_mode != ALIGNED:
        raise _unfit(
            "layers of this model have states, of which vLLM keeps the last one of a request alone "
            f"(mamba_cache_mode is {spec.mamba_cache_mode!r}): kvd's connector serves those that "
            "are kept at the end of each block, with --enable-prefix-caching"
        )
    if spec.num_speculative_blocks:
        raise _unfit(
            "layers of this model have states, and tokens are drafted: kvd's connector serves "
            "states without --speculative-config alone, as each has to be of tokens that stay"
        )
    if match_tokens != page_size:
        # Of a prompt that ends within a block the kernel may keep the state of another token there.
        raise _unfit(
            f"prefixes are found every {match_tokens} tokens, and a page has {page_size}: the "
            "states of this model may be of tokens within a page; use blocks of one size for all "
            "layers, without --prefix-match-unit, or run it without kvd"
        )
    if not 0 < step_tokens < 2 * page_size:
        raise _unfit(
            "layers of this model have states: a page needs that of its last token, and vLLM keeps "
            f"those at the ends of its steps, which have up to {step_tokens} tokens and blocks "
            f"{page_size}; kvd's connector serves this model with --max-num-batched-tokens "
            f"{2 * page_size - 1}, or less"
        )


class EngineLayers:
    """The layers of one rank, group by group, and how the blocks of each lie.

    Args:
        layers: by name, the tensor of each; some may have that of another one.
        groups: vLLM's; none: all are in one.
        n_blocks: how many blocks its scheduler has; 0: as many as the tensors have.

    Raises:
        KvdError: ``layout-mismatch``: the bytes of a block are not one stretch, or where nobody
            copies them.
    """

    def __init__(
        self,
        layers: Mapping[str, TensorView],
        groups: Sequence[LayerGroup] = (),
        n_blocks: int = 0,
    ) -> None:
        found = {name: _movable(name, tensor) for name, tensor in layers.items()}
        names = [group.layers for group in groups] or [tuple(layers)]
        known = {name for group in names for name in group}
        own = {found[name].address for name in known if name in found}
        for name in found.keys() - known:
            # Layers that share the KV of another one have its tensor.
            if found[name].address not in own:
                raise _unfit(f"layer {name} is in no group of layers with KV: run it without kvd")
        self.groups = [
            _own_layouts([(name, found[name]) for name in group if name in found], n_blocks)
            for group in names
        ]
        """By name, the layers with memory of their own. Those of several groups may lie over each
        other: a block is one group's at a time."""
        self._per_page = [group.per_page for group in groups] or [1]
        self.has_rows = len(groups) > 1 or any(group.is_windowed for group in groups)
        """Whether an order has rows of blocks, and some may lack one."""
        self._tensors = layers

    @property
    def layouts(self) -> list[BlockLayout]:
        """Those of all, as they lie in a page: group by group, and block by block of each."""
        return [
            layout
            for group, n in zip(self.groups, self._per_page, strict=True)
            for _ in range(n)
            for layout in group.values()
        ]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each of them."""
        return [layout.block_bytes for layout in self.layouts]

    @property
    def page_bytes(self) -> int:
        """Of a page, with the blocks of each group."""
        return sum(self.sizes)

    def caches(self) -> list[dict[str, object]] | dict[str, object]:
        """As the client's mover takes them; of each block of a page there is a row."""
        found = [
            {name: self._given(name, layout) for name, layout in group.items()}
            for group, n in zip(self.groups, self._per_page, strict=True)
            for _ in range(n)
        ]
        return found if self.has_rows else found[0]

    def _given(self, name: str, layout: BlockLayout) -> object:
        tensor = self._tensors[name]
        if int(tensor.shape[0]) == layout.n_blocks:
            return tensor
        return LayerMemory(
            layout.address,
            (layout.n_blocks, layout.block_bytes),
            (layout.step_bytes, 1),
            1,
            layout.device,
        )


def _own_layouts(
    layers: Sequence[tuple[str, BlockLayout]], n_blocks: int
) -> dict[str, BlockLayout]:
    found: dict[str, BlockLayout] = {}
    addresses: set[int] = set()
    for name, layout in layers:
        if layout.address not in addresses:
            addresses.add(layout.address)
            found[name] = _as_scheduled(name, layout, n_blocks or layout.n_blocks)
    if not found:
        raise _unfit("a group of layers has no memory of its own here: run it without kvd")
    return found


def _as_scheduled(name: str, layout: BlockLayout, n_blocks: int) -> BlockLayout:
    """The blocks that vLLM's scheduler counts: some kernels cut each of them in several."""
    parts, rest = divmod(layout.n_blocks, n_blocks)
    if parts == 1 and not rest:
        return layout
    if rest or layout.step_bytes != layout.block_bytes:
        raise _unfit(
            f"layer {name} has {layout.n_blocks} blocks of {layout.block_bytes} bytes, every "
            f"{layout.step_bytes}, where vLLM counts {n_blocks}: a block of these is not one "
            "stretch; use a --block-size that its kernel has, or run it without kvd"
        )
    size = layout.block_bytes * parts
    return BlockLayout(layout.address, n_blocks, size, size, layout.device)


def fitting(
    pool: Pool, layers: EngineLayers, *, block_size: int, ranks: int, tag: str = ""
) -> None:
    """Whether blocks of these layers are pages of this pool.

    A page is bytes, one layer's after the other's, so layers of the pool may be cut as it likes; as
    the engine's are is best. A pool may say less of who packs them than ``tag`` does, its first
    words or nothing: engines that differ in the rest differ in their namespaces. It may not say
    anything else.

    Raises:
        KvdError: ``layout-mismatch``, with the keys to change, and the whole section that fits.
    """
    part = pool.memory.components[0]
    wanted = {
        "family": ("raw", pool.memory.family),
        "page_size": (block_size, pool.page_size),
        "tp_size": (ranks, max(1, len(pool.shards))),
    }
    wrong = [
        f"{key} = {need!r} (it is {have!r})" for key, (need, have) in wanted.items() if need != have
    ]
    has_bytes = sum(math.prod(place.page_shape) for place in part.tensors)
    if has_bytes != layers.page_bytes:
        n_layers = len({place.layer for place in part.tensors})
        wrong += _wrong_bytes(layers, n_layers, has_bytes // max(1, n_layers))
    told = pool.memory.tag if tag else ""
    if told and not f"{tag} ".startswith(f"{told} "):
        wrong.append(f"tag = {tag!r} (it is {told!r})")
    if wrong:
        section = fitting_section(
            pool, layers.sizes, page_size=block_size, ranks=ranks, tag=tag if told else ""
        )
        raise _wrong_pool(pool, wrong, section)


def page_shape(sizes: Sequence[int]) -> tuple[int, int]:
    """Layers of a pool, and bytes of a page in each, where blocks of these sizes are one page.

    Of unlike sizes a page is one stretch: no layer of a pool would be like all of them.
    """
    return (len(sizes), sizes[0]) if len(set(sizes)) == 1 else (1, sum(sizes))


def scheduled_sizes(groups: Sequence[CacheGroup], ours: Sequence[LayerGroup]) -> list[int]:
    """Bytes of each block that a page is, by what the scheduler knows of the layers."""
    return [
        size
        for group, own in zip(groups, ours, strict=True)
        for size in _layer_sizes(group) * own.per_page
    ]


def _layer_sizes(group: CacheGroup) -> list[int]:
    spec = group.kv_cache_spec
    if isinstance(spec, SeveralSpecs):
        return [_block_bytes(spec.kv_cache_specs[name]) for name in group.layer_names]
    return [_block_bytes(spec)] * len(group.layer_names)


def _block_bytes(spec: Any) -> int:
    """Without what is there to make blocks of unlike layers one size: no tensor has that."""
    found = spec.real_page_size_bytes if isinstance(spec, PaddedSpec) else spec.page_size_bytes
    return int(found)


def check_pages(pool: Pool, sizes: Sequence[int], *, page_size: int, ranks: int) -> None:
    """Whether pages have as many tokens as they need: a scheduler asks that before any worker can.

    Args:
        pool: what the daemon has.
        sizes: of each block that a page is, in one rank.
        page_size: tokens of a page.
        ranks: so many have a part of each.

    Raises:
        KvdError: as ``fitting``.
    """
    wanted = {"family": ("raw", pool.memory.family), "page_size": (page_size, pool.page_size)}
    wrong = [
        f"{key} = {need!r} (it is {have!r})" for key, (need, have) in wanted.items() if need != have
    ]
    if wrong:
        raise _wrong_pool(
            pool, wrong, fitting_section(pool, sizes, page_size=page_size, ranks=ranks)
        )


LEAST_PAGES: Final = 2
"""Of a pool: one is the null page."""

USUAL: Final = {"name": "main", "tp_size": 1, "tag": ""}
"""Of keys that are left out where they have this value."""


def fitting_section(
    pool: Pool, sizes: Sequence[int], *, page_size: int, ranks: int, tag: str = ""
) -> str:
    """The [pool] that such an engine fits, with as much memory as this one has, as TOML."""
    layers, page_bytes = page_shape(sizes)
    part = pool.memory.components[0]
    held_bytes = part.pages * part.page_bytes * max(1, len(pool.shards))
    keys = {
        "name": pool.name,
        "family": "raw",
        "layers": layers,
        "page_size": page_size,
        "page_bytes": page_bytes,
        "pages": max(LEAST_PAGES, held_bytes // (layers * page_bytes * ranks)),
        "tp_size": ranks,
        "tag": tag,
    }
    # Texts of JSON are texts of TOML: names and tags have no character where these differ.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in keys.items()
        if USUAL.get(key) != value
    ]
    # Memory of several shards cannot be kept over a restart.
    more = "device" if ranks > 1 else "backing, directory and device"
    return "\n".join(["[pool]", *lines, f"# {more}: as it was"])


def _wrong_pool(pool: Pool, wrong: Sequence[str], section: str) -> KvdError:
    return _unfit(
        f"pool {pool.name} does not fit this engine; its [pool] needs {', '.join(wrong)}. This "
        f"fits, in as much memory:\n\n{section}\n"
    )


def _wrong_bytes(layers: EngineLayers, n_layers: int, n_bytes: int) -> list[str]:
    names, has = ("layers", "page_bytes"), (n_layers, n_bytes)
    return [
        f"{key} = {wanted} (it is {have})"
        for key, wanted, have in zip(names, page_shape(layers.sizes), has, strict=True)
        if wanted != have
    ]


def _unfit(message: str) -> KvdError:
    return refused_here(Code.LAYOUT_MISMATCH, message)
