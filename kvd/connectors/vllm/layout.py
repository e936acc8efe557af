"""Which bytes of vLLM's KV cache are which page of the pool; or why they do not fit, in words.

vLLM gives each layer a tensor whose first dimension is the block. What lies inside a block is its
attention kernel's, and differs between kernels, types and versions: here a block is bytes. So the
pool is of family ``raw``, and its tag says which kernel packs them; equal tags on two nodes mean
equal blocks. Nothing here knows vLLM, or reads a byte: where blocks lie is arithmetic on addresses.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from kvd.client.mover.engine_memory import HOST, block_layout
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.client import Pool
    from kvd.client.mover.engine_memory import BlockLayout, TensorView

DEVICES: Final = (HOST, "cuda")
"""Kinds of memory that blocks are copied from and to: by processors, and by a copy engine."""

WHOLE: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of layers of which vLLM keeps every block of a request until that is over. Of others, as of
sliding windows, it takes blocks away meanwhile, and its null block stands where they were: saved in
their place, that would be the KV of nobody."""


@runtime_checkable
class NamesCausality(Protocol):
    """A group of layers that says whether tokens attend to later ones: vLLM's of 0.32 do."""

    non_causal: bool


def _movable(name: str, tensor: TensorView) -> BlockLayout:
    layout = block_layout(name, tensor)
    if layout.device.split(":", maxsplit=1)[0] not in DEVICES:
        raise _unfit(
            f"the KV cache is on {layout.device} (layer {name}): kvd's connector copies memory of "
            "the host and of CUDA devices; run this engine without kvd"
        )
    return layout


def block_layouts(layers: Mapping[str, TensorView]) -> list[BlockLayout]:
    """Those of all layers that have memory of their own, in the order given.

    Raises:
        KvdError: ``layout-mismatch``: the bytes of a block are not one stretch, or where nobody
            copies them; or layers differ in the bytes of one.
    """
    found: dict[int, BlockLayout] = {}
    for name, tensor in layers.items():
        layout = _movable(name, tensor)
        # Layers that share the KV of another one have its tensor.
        found.setdefault(layout.address, layout)
    sizes = sorted({layout.block_bytes for layout in found.values()})
    if len(sizes) > 1:
        raise _unfit(
            f"blocks of {' and '.join(map(str, sizes))} bytes in different layers: a pool of "
            "family raw has pages of one size; run this model without kvd"
        )
    return list(found.values())


def check_groups(specs: Sequence[object], *, context_ranks: int = 1) -> None:
    """Whether a block is of so many tokens in a row and those before, and stays until the end.

    Args:
        specs: vLLM's, one for each group of layers that have their blocks in common.
        context_ranks: how many ranks share the tokens of a block among them.

    Raises:
        KvdError: ``layout-mismatch``: it is not.
    """
    kinds = [type(spec).__name__ for spec in specs]
    if len(kinds) != 1:
        raise _unfit(
            f"a model with {len(kinds)} KV cache groups ({', '.join(sorted(set(kinds)))}): kvd's "
            "connector serves one; run it without kvd, or with --disable-hybrid-kv-cache-manager"
        )
    if kinds[0] not in WHOLE:
        raise _unfit(
            f"the layers of this model are of {kinds[0]}: kvd's connector serves "
            f"{' and '.join(WHOLE)}, of which vLLM keeps every block of a request until it is "
            "over; run it without kvd"
        )
    if isinstance(specs[0], NamesCausality) and specs[0].non_causal:
        raise _unfit(
            "the layers of this model attend to later tokens: the KV of a prefix is another one in "
            "each prompt, so nothing of it can be cached; run it without kvd"
        )
    if context_ranks != 1:
        raise _unfit(
            f"{context_ranks} ranks share the tokens of a block (context parallelism): kvd's "
            "connector takes a block for tokens in a row; run it without kvd"
        )


def fitting(
    pool: Pool, layouts: Sequence[BlockLayout], *, block_size: int, ranks: int, tag: str = ""
) -> None:
    """Whether blocks of these layers are pages of this pool.

    A pool may say less of who packs them than ``tag`` does, its first words or nothing: engines
    that differ in the rest differ in their namespaces. It may not say anything else.

    Raises:
        KvdError: ``layout-mismatch``, with the keys to change, and the whole section that fits.
    """
    part = pool.memory.components[0]
    n_layers = len({place.layer for place in part.tensors})
    n_bytes = layouts[0].block_bytes
    wanted = {
        "family": ("raw", pool.memory.family),
        "page_size": (block_size, pool.page_size),
        "layers": (len(layouts), n_layers),
        "tp_size": (ranks, max(1, len(pool.shards))),
    }
    wrong = [
        f"{key} = {need!r} (it is {have!r})" for key, (need, have) in wanted.items() if need != have
    ]
    if not wrong and part.tensors:
        page_bytes = math.prod(part.tensors[0].page_shape)
        if page_bytes != n_bytes:
            wrong.append(f"page_bytes = {n_bytes} (it is {page_bytes})")
    told = pool.memory.tag if tag else ""
    if told and not f"{tag} ".startswith(f"{told} "):
        wrong.append(f"tag = {tag!r} (it is {told!r})")
    if wrong:
        section = fitting_section(
            pool,
            layers=len(layouts),
            page_bytes=n_bytes,
            block_size=block_size,
            ranks=ranks,
            tag=tag if told else "",
        )
        raise _wrong_pool(pool, wrong, section)


def check_pages(pool: Pool, *, layers: int, page_bytes: int, block_size: int, ranks: int) -> None:
    """Whether pages have as many tokens as blocks: that, a scheduler needs before any worker does.

    Args:
        pool: what the daemon has.
        layers: so many have blocks of their own.
        page_bytes: of a block in one of them, and in one rank.
        block_size: tokens of a block.
        ranks: so many have a part of each.

    Raises:
        KvdError: as ``fitting``.
    """
    wanted = {"family": ("raw", pool.memory.family), "page_size": (block_size, pool.page_size)}
    wrong = [
        f"{key} = {need!r} (it is {have!r})" for key, (need, have) in wanted.items() if need != have
    ]
    if wrong:
        section = fitting_section(
            pool, layers=layers, page_bytes=page_bytes, block_size=block_size, ranks=ranks
        )
        raise _wrong_pool(pool, wrong, section)


LEAST_PAGES: Final = 2
"""Of a pool: one is the null page."""

USUAL: Final = {"name": "main", "tp_size": 1, "tag": ""}
"""Of keys that are left out where they have this value."""


def fitting_section(
    pool: Pool, *, layers: int, page_bytes: int, block_size: int, ranks: int, tag: str = ""
) -> str:
    """The [pool] that such an engine fits, with as much memory as this one has, as TOML."""
    part = pool.memory.components[0]
    held_bytes = part.pages * part.page_bytes * max(1, len(pool.shards))
    keys = {
        "name": pool.name,
        "family": "raw",
        "layers": layers,
        "page_size": block_size,
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


def _unfit(message: str) -> KvdError:
    return KvdError(Refusal(Code.LAYOUT_MISMATCH, message, side="client"))
