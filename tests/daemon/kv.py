"""The KV of a prompt: written so that equal prefixes have equal bytes, compared by digest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvd.client import Lease, Node, Pool

PAGE = 16
SHAPE = {"pool.layers": "4", "pool.heads": "2", "pool.head_dim": "64", "pool.pages": "257"}
"""32 KiB a page, 8 MiB a pool."""
PAGE_BYTES = 4 * 2 * 2 * 64 * 2 * PAGE
LAYERS = 4


def tokens_of(count: int, seed: int) -> NDArray[np.int32]:
    """``count`` token ids; another seed shares no page with them."""
    return np.random.default_rng(seed).integers(0, 2**31 - 1, count, dtype=np.int32)


def write(node: Node, lease: Lease, tokens: NDArray[np.int32], upto: int | None = None) -> None:
    """Write the pages of ``lease`` up to token ``upto`` that were not cached when it began."""
    end = len(tokens) if upto is None else upto
    write_pages(node, lease.pages, tokens[:end], first=lease.prefix_len // PAGE)


def write_pages(
    node: Node, pages: NDArray[np.int32], tokens: NDArray[np.int32], first: int = 0
) -> None:
    """Write these pages, one for each page of the tokens, from page ``first`` on."""
    pool = node.pool("main")
    for index in range(first, min(len(pages), -(-len(tokens) // PAGE))):
        _write_page(pool, int(pages[index]), tokens[: (index + 1) * PAGE])


def digest(node: Node, pages: Iterable[int]) -> str:
    """Of everything these pages hold, in their order."""
    ids = torch.as_tensor(list(map(int, pages)), dtype=torch.long)
    found = hashlib.sha256()
    pool = node.pool("main")
    for layer in range(LAYERS):
        for part in pool.layer(layer):
            found.update(part[ids].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _write_page(pool: Pool, page: int, tokens: NDArray[np.int32]) -> None:
    seed = int.from_bytes(hashlib.sha256(tokens.tobytes()).digest()[:8], "little")
    source = np.random.default_rng(seed)
    for layer in range(LAYERS):
        for part in pool.layer(layer):
            raw = source.integers(0, 256, part[page].numel() * 2, dtype=np.uint8)
            part[page] = torch.from_numpy(raw).view(torch.bfloat16).view(part[page].shape)
