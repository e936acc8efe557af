"""Quantised KV crosses from pool to pool unchanged, and its scales and its index with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import kvd.client
from tests.daemon.kv import tokens_of
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from kvd.client import Lease, Node

SETTINGS = {
    "pool.dtype": "float8_e4m3fn",
    "pool.scale_dtype": "float32",
    "pool.index_dim": "132",
    "pool.index_dtype": "uint8",
    "pool.index_page_size": "4",
    "pool.order": "layer_first",
    "transfer.integrity": "full",
}
PROMPT_TOKENS = 1001
SEED = 11


def pages_in_use(node: Node, lease: Lease) -> dict[tuple[str, int, str], torch.Tensor]:
    """The bytes of every tensor of the lease's pages, by component, layer and part."""
    pool = node.pool("main")
    out = {}
    for part in pool.memory.components:
        used = -(-PROMPT_TOKENS // part.page_size)
        ids = torch.from_numpy(lease.pages_of(part.name)[:used].copy()).long()
        for place in part.tensors:
            whole = pool.tensors(part.name, layer=place.layer)[place.part].view(torch.uint8)
            out[part.name, place.layer, place.part] = whole[ids]
    return out


def fill(node: Node, lease: Lease) -> None:
    """Random bytes, among them those that are no number."""
    source = torch.Generator().manual_seed(SEED)
    pool = node.pool("main")
    for part in pool.memory.components:
        ids = torch.from_numpy(lease.pages_of(part.name).copy()).long()
        for place in part.tensors:
            whole = pool.tensors(part.name, layer=place.layer)[place.part].view(torch.uint8)
            shape = (len(ids), *whole.shape[1:])
            whole[ids] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


async def test_every_byte_of_every_component_arrives_as_it_was(tmp_path):
    tokens = tokens_of(PROMPT_TOKENS, SEED)
    with two_daemons(tmp_path, SETTINGS) as pair:
        async with (
            kvd.client.connect(pair.prefill.client, name="p") as p,
            kvd.client.connect(pair.decode.client, name="d") as d,
        ):
            # The pages on the two sides differ, so that ids cannot be confused.
            aside = await d.lease([1, 2, 3], reserve_tokens=100)
            receive = await d.receive(5, tokens, "p")
            lease = await p.lease(tokens)
            fill(p, lease)
            send = await p.send(5, tokens, lease=lease)
            await send.advance(PROMPT_TOKENS)
            await send.finish()
            await receive.done()

            sent, received = pages_in_use(p, lease), pages_in_use(d, receive.lease)
            assert list(lease.pages) != list(receive.lease.pages)
            assert {component for component, _, _ in sent} == {"kv", "index", "scale"}
            assert [key for key in sent if not torch.equal(sent[key], received[key])] == []
            await aside.release()
