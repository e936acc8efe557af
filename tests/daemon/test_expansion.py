"""A decode node that keeps KV in host memory may have smaller pages than its prefill nodes.

scenario E1, scenario E4.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import kvd.client
from tests.daemon.kv import tokens_of
from tests.support.daemons import Daemon, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvd.client import Lease, Node

SHAPE = {
    "pool.latent_dim": "48",
    "pool.rope_dim": "16",
    "pool.layers": "3",
    "pool.index_dim": "12",
    "pool.index_dtype": "uint8",
    "transfer.integrity": "full",
}
PREFILL = SHAPE | {
    "pool.family": "mla",
    "pool.page_size": "64",
    "pool.index_page_size": "16",
    "pool.pages": "33",
}
DECODE = SHAPE | {
    "pool.family": "hisparse",
    "pool.buffer_tokens": "256",
    "pool.buffer_pages": "300",
}


@contextlib.contextmanager
def one_way(directory: Path, prefill: dict[str, str], decode: dict[str, str]) -> Iterator[Pair]:
    """Two daemons; only ``p`` gets an agent, for nothing can be sent to it."""
    pair = Pair(Daemon("p", directory, prefill), Daemon("d", directory, decode))
    for one in (pair.prefill, pair.decode):
        one.knows(pair.other(one))
    try:
        for one in (pair.prefill, pair.decode):
            one.start()
        for one in (pair.prefill, pair.decode):
            one.wait_ready()
        pair.prefill.wait_for(lambda: is_linked(pair.prefill), "has no agent for d", 30.0)
        yield pair
    finally:
        for one in (pair.prefill, pair.decode):
            one.stop()


def is_linked(daemon: Daemon) -> bool:
    return any(one.agent == "loaded" for one in daemon.snapshot().peers)


def slots(node: Node, lease: Lease, component: str, layer: int) -> torch.Tensor:
    """The bytes of each token of the lease, in the order of the prompt."""
    pool = node.pool("main")
    (tensor,) = pool.tensors(component, layer=layer).values()
    ids = torch.from_numpy(lease.pages_of(component).copy()).long()
    return tensor.view(torch.uint8)[ids].flatten(0, 1)


def fill(node: Node, lease: Lease) -> None:
    """Random bytes in every page of the lease."""
    source = torch.Generator().manual_seed(5)
    pool = node.pool("main")
    for component in ("kv", "index"):
        ids = torch.from_numpy(lease.pages_of(component).copy()).long()
        for layer in range(3):
            (tensor,) = pool.tensors(component, layer=layer).values()
            raw = tensor.view(torch.uint8)
            shape = (len(ids), *raw.shape[1:])
            raw[ids] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


async def hand_over(p: Node, d: Node, room: int, tokens: NDArray[np.int32]) -> int:
    """One handoff; every token that was sent must be there. How many were cached before."""
    lease = await p.lease(tokens)
    fill(p, lease)
    receive = await d.receive(room, tokens, "p")
    send = await p.send(room, tokens, lease=lease)
    await send.advance(len(tokens) // 2)
    outcome = await send.finish(b"aux")
    await receive.done()
    assert outcome.committed
    assert receive.aux == b"aux"
    cached = receive.lease.prefix_len
    for component in ("kv", "index"):
        for layer in range(3):
            sent = slots(p, lease, component, layer)[cached : len(tokens)]
            got = slots(d, receive.lease, component, layer)[cached : len(tokens)]
            assert torch.equal(sent, got)
    await receive.lease.release()
    await lease.release()
    return cached


@pytest.mark.parametrize(("order", "page_size"), [("page_first", 1), ("layer_first", 16)])
async def test_every_token_arrives_though_pages_are_smaller_here(tmp_path, order, page_size):
    first, other = tokens_of(1001, 3), tokens_of(333, 4)
    decode = DECODE | {
        "pool.order": order,
        "pool.page_size": str(page_size),
        "pool.index_page_size": str(page_size),
        "pool.pages": str(2048 // page_size + 1),
    }
    with one_way(tmp_path, PREFILL | {"pool.order": order}, decode) as pair:
        async with (
            kvd.client.connect(pair.prefill.client, name="p") as p,
            kvd.client.connect(pair.decode.client, name="d") as d,
        ):
            assert await hand_over(p, d, 1, first) == 0
            # What is cached there ends inside of a page here: the rest of that page is sent.
            again = np.concatenate((first[:700], other))
            assert await hand_over(p, d, 2, again) == 700 // page_size * page_size
