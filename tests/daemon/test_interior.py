"""What lies where inside a page: engines pack it, and pools that differ in it must not exchange.

An engine writes the bytes of each layer of a page as its kernels want them. Where both nodes have
equal shards whole pages travel, and any packing arrives as it was. Where a page is cut by heads on
the way, kvd must know where a head lies: that is what ``pool.interior`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvd.client
from tests.daemon.conftest import settle
from tests.daemon.kv import tokens_of
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvd.client import Node, Pool
    from tests.support.daemons import Pair

LAYERS, HEADS, DIM, PAGE = 2, 4, 8, 16
MODEL = {
    "pool.layers": str(LAYERS),
    "pool.heads": str(HEADS),
    "pool.head_dim": str(DIM),
    "pool.pages": "33",
    "transfer.integrity": "full",
}
TWO_RANKS = {"pool.tp_size": "2"}
PROMPT_TOKENS = 5 * PAGE
N_PAGES = 5

Kv = list[torch.Tensor]
"""By layer of the model: (pages, heads, slots, 2, dim), K and V of each token."""


def model_kv(seed: int) -> Kv:
    """The KV of a prompt as the model has it: random bits, none of them like another's."""
    source = torch.Generator().manual_seed(seed)
    shape = (N_PAGES, HEADS, PAGE, 2, DIM)
    return [
        torch.randint(-(2**15), 2**15, shape, generator=source).to(torch.int16)
        for _ in range(LAYERS)
    ]


def by_slot(kv: torch.Tensor) -> torch.Tensor:
    """K of all slots, then V; in each slot all heads: what ``nhd`` means."""
    return kv.permute(2, 1, 0, 3)


def by_head(kv: torch.Tensor) -> torch.Tensor:
    """K of all heads, then V; of each head all slots: what ``hnd`` means."""
    return kv.permute(2, 0, 1, 3)


def packed(kv: torch.Tensor) -> torch.Tensor:
    """K and V of a slot side by side, as some engines have them."""
    return kv


def bytes_of(pool: Pool, page: int, layer: int, shard: int) -> torch.Tensor:
    """A layer of a page as its bytes lie, whatever kvd takes them for; a copy."""
    parts = pool.view("kv", layer=layer, shard=shard)
    return torch.cat([part[page].contiguous().flatten().view(torch.uint8) for part in parts])


def put(pool: Pool, page: int, layer: int, shard: int, content: torch.Tensor) -> None:
    """Write the bytes of a layer of a page, as an engine does that copies whole blocks."""
    content = content.contiguous().flatten().view(torch.uint8)
    for part in pool.view("kv", layer=layer, shard=shard):
        n_bytes = part[page].numel() * part.element_size()
        part[page] = content[:n_bytes].view(part.dtype).view(part[page].shape)
        content = content[n_bytes:]
    assert not content.numel()


def heads_of(pool: Pool) -> list[tuple[int, int]]:
    """Of the model, by shard."""
    shards = pool.component("kv").shards
    return [(one.first_head, one.end_head) for one in shards] or [(0, HEADS)]


def fill(node: Node, pages: Sequence[int], kv: Kv, pack) -> None:
    """Each rank of the engine writes its heads, packed in its way."""
    pool = node.pool("main")
    for shard, (first, end) in enumerate(heads_of(pool)):
        for layer in range(LAYERS):
            for index, page in enumerate(pages):
                put(pool, int(page), layer, shard, pack(kv[layer][index, first:end]))


def wrong(node: Node, pages: Sequence[int], kv: Kv, pack) -> list[tuple[int, int, int]]:
    """Shard, layer and page of whatever is not what an engine of that packing would read."""
    pool = node.pool("main")
    return [
        (shard, layer, index)
        for shard, (first, end) in enumerate(heads_of(pool))
        for layer in range(LAYERS)
        for index, page in enumerate(pages)
        if not torch.equal(
            bytes_of(pool, int(page), layer, shard),
            pack(kv[layer][index, first:end]).contiguous().flatten().view(torch.uint8),
        )
    ]


async def handed_over(pair: Pair, pack, *, room: int = 1) -> list[tuple[int, int, int]]:
    """Hand a prompt over, which must commit; what of it is wrong for the engine over there."""
    tokens = tokens_of(PROMPT_TOKENS, seed=room)
    async with (
        kvd.client.connect(pair.prefill.client, name="p") as p,
        kvd.client.connect(pair.decode.client, name="d") as d,
    ):
        aside = await d.lease([1, 2, 3])  # so that page ids differ
        kv = model_kv(seed=room)
        receive = await d.receive(room, tokens, "p")
        lease = await p.lease(tokens)
        fill(p, lease.pages, kv, pack)
        outcome = await p.hand_over(room, lease=lease)
        await receive.done()
        found = wrong(d, receive.lease.pages, kv, pack)

        assert outcome.committed
        assert outcome.sent_pages == N_PAGES
        assert list(lease.pages) != list(receive.lease.pages)
        await receive.lease.release(())
        await lease.release(())
        await aside.release(())
    settle(pair)
    return found


@pytest.mark.parametrize("pack", [by_head, packed])
async def test_pages_that_are_not_what_their_pool_says_are_cut_in_the_wrong_places(
    tmp_path: Path, pack
) -> None:
    """Nothing can notice it but the engine: every byte that was sent arrived, and was summed."""
    with two_daemons(tmp_path, MODEL, prefill={**MODEL, **TWO_RANKS}) as pair:
        assert await handed_over(pair, by_slot) == []
        assert len(await handed_over(pair, pack, room=2)) == LAYERS * N_PAGES
