"""Real daemons whose pools have other shards of one model: each head arrives in its place.

Tensor-parallel ranks, pipeline stages and copies on both sides, with NIXL between the processes and
every page summed. The KV of a prompt is made as the model has it; the prefill engine writes to each
shard the layers and heads that it has, and the decode engine must find them in those of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

import kvd.client
from kvd.cli import kvd as command
from kvd.client import KvdError
from kvd.types import amount
from kvd.wire.memory import ShardPlace
from tests.daemon.conftest import settle
from tests.daemon.kv import tokens_of
from tests.support.daemons import START_S, Daemon, Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvd.client import Lease, Node, Pool


LAYERS, HEADS, DIM, PAGE = 4, 4, 8, 16
MODEL = {
    "pool.layers": str(LAYERS),
    "pool.heads": str(HEADS),
    "pool.head_dim": str(DIM),
    "pool.pages": "65",
    "pool.saved_size": "1MiB",
    "transfer.integrity": "full",
}
LATENT = {
    "pool.family": "mla",
    "pool.layers": str(LAYERS),
    "pool.latent_dim": "24",
    "pool.rope_dim": "8",
    "pool.pages": "65",
    "transfer.integrity": "full",
}
LAYER_FIRST = {"pool.order": "layer_first"}
PROMPT_TOKENS = 203
N_PAGES = 13
CELL_BYTES = PAGE * 2 * DIM * 2
"""Of one head of one layer of a page: K and V."""

Kv = list[tuple[torch.Tensor, ...]]
"""By layer of the model: K and V (tokens, heads, dim), or one latent (tokens, 1, dim)."""


def tp(size: int, **more: str) -> dict[str, str]:
    return {"pool.tp_size": str(size), **{f"pool.{key}": value for key, value in more.items()}}


def model_kv(pool: Pool, seed: int) -> Kv:
    """The KV of a prompt on all layers and heads: random bits, none of them like another's."""
    source = torch.Generator().manual_seed(seed)
    widths = [place.page_shape[-1] for place in pool.component("kv").tensors if not place.layer]
    heads = HEADS if len(widths) > 1 else 1
    return [
        tuple(
            torch.randint(-(2**15), 2**15, (PROMPT_TOKENS, heads, width), generator=source).short()
            for width in widths
        )
        for _ in range(LAYERS)
    ]


def slots(pool: Pool, pages: Sequence[int], layer: int, shard: int, part: int) -> torch.Tensor:
    """A tensor's slots of a prompt, as bits: (tokens, heads of the shard, dim), a copy."""
    ids = torch.as_tensor(list(map(int, pages)), dtype=torch.long)
    return _bits(pool, layer, shard, part)[ids].flatten(0, 1)[:PROMPT_TOKENS]


def _bits(pool: Pool, layer: int, shard: int, part: int) -> torch.Tensor:
    return pool.view("kv", layer=layer, shard=shard)[part].view(torch.int16)


def places(pool: Pool) -> list[tuple[int, ShardPlace]]:
    whole = pool.component("kv").shards
    if whole:
        return list(enumerate(whole))
    heads = pool.component("kv").tensors[0].page_shape[1]
    return [(0, ShardPlace(0, LAYERS, 0, heads))]


def fill(node: Node, lease: Lease, kv: Kv) -> None:
    """Each rank of the engine writes its layers and heads to its shard."""
    pool = node.pool("main")
    for number, place in places(pool):
        for layer in range(place.first_layer, place.end_layer):
            for part, tensor in enumerate(kv[layer]):
                mine = tensor[:, place.first_head : place.end_head]
                memory = _bits(pool, layer - place.first_layer, number, part)
                for token in range(PROMPT_TOKENS):
                    memory[int(lease.pages[token // PAGE]), token % PAGE] = mine[token]


def wrong(node: Node, pages: Sequence[int], kv: Kv) -> list[tuple[int, int, int]]:
    """Shard, layer and tensor of whatever is not where it belongs."""
    pool = node.pool("main")
    return [
        (number, layer, part)
        for number, place in places(pool)
        for layer in range(place.first_layer, place.end_layer)
        for part, tensor in enumerate(kv[layer])
        if not torch.equal(
            slots(pool, pages, layer - place.first_layer, number, part),
            tensor[:, place.first_head : place.end_head],
        )
    ]


FLEET = {
    "one": tp(1),
    "two": tp(2),
    "four": tp(4),
    "eight": tp(8),
    "thrice": tp(2, replicas="3"),
    "stage": tp(4, stage="1:3"),
    "low": tp(2, stage="0:2"),
    "high": tp(1, stage="2:4"),
    "left": tp(4, tp_ranks="0-1"),
    "right": tp(4, tp_ranks="2-3"),
}
"""Nodes of one model: of each what makes it another one than the rest."""

HANDOFFS = [
    ("one", "two"),
    ("two", "one"),
    ("two", "four"),
    ("four", "two"),
    ("one", "eight"),
    ("eight", "two"),
    ("thrice", "four"),
    ("four", "thrice"),
    ("two", "stage"),
]

SEVERAL = [
    (("low", "high"), "two"),
    (("left", "right"), "two"),
    (("left", "right"), "stage"),
    (("low", "left", "right"), "high"),
]
"""Sources that together have what the last one keeps: the first of the last three, nothing."""

KNOWN = {
    frozenset(pair)
    for pair in (
        *HANDOFFS,
        ("stage", "one"),
        *((source, target) for sources, target in SEVERAL for source in sources),
    )
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """All of them, each with those as peers that it hands over to, or gets from."""
    place = tmp_path_factory.mktemp("fleet")
    fleet = {name: Daemon(name, place, {**MODEL, **own}) for name, own in FLEET.items()}
    for one, other in map(sorted, KNOWN):
        fleet[one].knows(fleet[other])
    try:
        for one in fleet.values():
            one.start()
        for one in fleet.values():
            one.wait_for(lambda one=one: _is_up(one), "does not know the others", START_S)  # type: ignore[misc]
        yield fleet
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Daemon.stop, fleet.values()))


def _is_up(daemon: Daemon) -> bool:
    with contextlib.suppress(KvdError):
        peers = daemon.snapshot().peers
        n_known = sum(daemon.name in pair for pair in KNOWN)
        return len(peers) == n_known and all(one.agent == "loaded" for one in peers)
    return False


@pytest.mark.parametrize(("source", "target"), HANDOFFS)
async def test_every_head_arrives_in_its_shard(
    fleet: dict[str, Daemon], source: str, target: str
) -> None:
    await hand_over(fleet[source], fleet[target], HANDOFFS.index((source, target)) + 1)
    settle(Pair(fleet[source], fleet[target]))


@pytest.mark.parametrize(("sources", "target"), SEVERAL)
async def test_several_nodes_fill_the_shards_of_one_together(
    fleet: dict[str, Daemon], sources: tuple[str, ...], target: str
) -> None:
    room = 50 + SEVERAL.index((sources, target))
    tokens = tokens_of(PROMPT_TOKENS, seed=room)
    async with contextlib.AsyncExitStack() as stack:
        d = await stack.enter_async_context(kvd.client.connect(fleet[target].client, name="d"))
        receive = await d.receive(room, tokens, sources)
        engines = [
            await stack.enter_async_context(kvd.client.connect(fleet[name].client, name="p"))
            for name in sources
        ]
        kv = model_kv(d.pool("main"), seed=room)
        leases = [await node.lease(tokens) for node in engines]
        sends = []
        for node, lease in zip(engines, leases, strict=True):
            fill(node, lease, kv)
            sends.append(await node.send(room, tokens, lease=lease))
        for send in sends:
            await send.accepted()
            await send.advance(100)
        outcomes = await asyncio.gather(*(send.finish(b"aux") for send in sends))
        await receive.done()

        assert wrong(d, receive.lease.pages, kv) == []
        kept_bytes = N_PAGES * fleet[target].snapshot().pools[0].page_bytes
        assert sum(one.sent_bytes for one in outcomes) == kept_bytes
        await receive.lease.release(())
        for lease in leases:
            await lease.release(())


@pytest.mark.parametrize("model", [LATENT, {**MODEL, **LAYER_FIRST}], ids=["latents", "by-layer"])
async def test_every_rank_gets_its_part_of_other_pools_too(
    model: dict[str, str], tmp_path: Path
) -> None:
    with two_daemons(tmp_path, {**model, **tp(4)}, prefill={**model, **tp(2)}) as pair:
        await hand_over(pair.prefill, pair.decode, 1)
        settle(pair)


async def hand_over(source: Daemon, target: Daemon, room: int) -> None:
    """A prompt in two chunks; afterwards it is in the target's cache, in every shard."""
    tokens = tokens_of(PROMPT_TOKENS, seed=room)
    async with (
        kvd.client.connect(source.client, name="p") as p,
        kvd.client.connect(target.client, name="d") as d,
    ):
        aside = await d.lease([1, 2, 3], reserve_tokens=100)  # so that page ids differ
        kv = model_kv(p.pool("main"), seed=room)
        receive = await d.receive(room, tokens, source.name)
        lease = await p.lease(tokens)
        fill(p, lease, kv)
        send = await p.send(room, tokens, lease=lease)
        await send.accepted()
        await send.advance(100)
        outcome = await send.finish(b"first")
        await receive.done()

        assert list(lease.pages) != list(receive.lease.pages)
        assert wrong(d, receive.lease.pages, kv) == []
        assert outcome.sent_pages == N_PAGES
        assert outcome.sent_bytes == N_PAGES * target.snapshot().pools[0].page_bytes
        await receive.lease.release()
        again = await d.lease(tokens)
        assert again.prefix_len == PROMPT_TOKENS // PAGE * PAGE
        await again.release(())
        await lease.release(())
        await aside.release(())


def said(daemon: Daemon, *words: str) -> str:
    verb, *arguments = words
    found = CliRunner().invoke(command, [verb, "--connect", daemon.admin, *arguments])
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


async def test_figures_are_those_of_all_shards(fleet: dict[str, Daemon]) -> None:
    room, tokens, pair = 99, tokens_of(PROMPT_TOKENS, seed=99), Pair(fleet["two"], fleet["four"])
    async with (
        kvd.client.connect(pair.prefill.client, name="p") as p,
        kvd.client.connect(pair.decode.client, name="d") as d,
    ):
        receive = await d.receive(room, tokens, "two")
        lease = await p.lease(tokens)
        fill(p, lease, model_kv(p.pool("main"), seed=8))
        send = await p.send(room, tokens, lease=lease)
        await send.accepted()
        await send.advance(96)
        page_bytes = LAYERS * HEADS * CELL_BYTES
        for one in (pair.prefill, pair.decode):
            one.wait_for(lambda one=one: _moved(one) == 6 * page_bytes, "has not moved it", 5)  # type: ignore[misc]
            shot = one.snapshot()
            assert [room.total_bytes for room in shot.rooms] == [N_PAGES * page_bytes]
            assert [pool.page_bytes for pool in shot.pools] == [page_bytes]
            assert {peer.layout for peer in shot.peers} == {"same"}
            moved = f"{amount(6 * page_bytes)} of {amount(N_PAGES * page_bytes)} moved"
            assert moved in said(one, "why", "room", str(room))
        for one, words in (
            (pair.decode, "4 shards of 2.0 KiB a page: layers 0-3 of head 0 | head 1 | head 2 |"),
            (pair.prefill, "2 shards of 4.0 KiB a page: layers 0-3 of heads 0-1 | heads 2-3"),
        ):
            assert words in said(one, "pools")
        await send.finish()
        await receive.done()
        await receive.lease.release(())
        await lease.release(())
    settle(pair)


def _moved(daemon: Daemon) -> int:
    return sum(room.moved_bytes for room in daemon.snapshot().rooms)


RANK = """
import sys
import kvd.client

endpoint, token, page = sys.argv[1:]
with kvd.client.join(endpoint, token=bytes.fromhex(token)) as worker:
    pool = worker.pool("main")
    for layer in range(pool.shards[1].end_layer):
        for tensor in pool.view("kv", layer=layer, shard=1):
            tensor[int(page)] = 2
            del tensor
    print(pool.shards[1].first_head, pool.shards[1].end_head)
"""


async def test_each_rank_of_an_engine_maps_its_shard_in_a_process_of_its_own(
    fleet: dict[str, Daemon],
) -> None:
    daemon = fleet["two"]
    async with kvd.client.connect(daemon.client, name="rank 0") as node:
        lease = await node.lease(list(range(16)))
        page, token = str(int(lease.pages[0])), node.token.hex()
        rank = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RANK, daemon.client, token, page),
            stdout=asyncio.subprocess.PIPE,
        )
        pool = node.pool("main")
        for part in pool.view("kv", layer=3, shard=0):
            part[int(page)] = 1
        said, _ = await rank.communicate()
        seen = [
            {value for part in pool.view("kv", layer=3, shard=n) for value in numbers(part, page)}
            for n in range(2)
        ]

        assert said.split() == [b"2", b"4"]
        assert seen == [{1.0}, {2.0}]
        await lease.release(())


def numbers(part: torch.Tensor, page: str) -> list[float]:
    return part[int(page)].flatten().tolist()


async def test_a_retracted_lease_comes_back_in_every_shard(fleet: dict[str, Daemon]) -> None:
    tokens = tokens_of(PROMPT_TOKENS, seed=9)
    async with kvd.client.connect(fleet["thrice"].client, name="engine") as node:
        lease = await node.lease(tokens)
        kv = model_kv(node.pool("main"), seed=10)
        fill(node, lease, kv)
        retracted = await lease.retract()
        other = await node.lease(tokens_of(600, seed=11))
        fill(node, other, model_kv(node.pool("main"), seed=12))
        await lease.resume()

        assert wrong(node, lease.pages, kv) == []
        assert retracted.saved_bytes == N_PAGES * 3 * LAYERS * HEADS * CELL_BYTES
        await other.release(())
        await lease.release(())


async def test_a_peer_that_has_not_all_of_it_is_refused_with_what_is_missing(
    fleet: dict[str, Daemon],
) -> None:
    async with kvd.client.connect(fleet["one"].client, name="d") as d:
        with pytest.raises(KvdError) as refused:
            await d.receive(5, tokens_of(40, seed=1), "stage")

    assert refused.value.refusal.message == (
        "stage has layers 1-2 of heads 0-3, which is not all that is kept here: layer 0 of heads "
        "0-3, layer 3 of heads 0-3 must come from elsewhere too; name every source"
    )
