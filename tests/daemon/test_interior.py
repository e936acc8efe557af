"""What lies where inside a page: engines pack it, and pools that differ in it must not exchange.

An engine writes the bytes of each layer of a page as its kernels want them. Where both nodes have
equal shards whole pages travel, and any packing arrives as it was. Where a page is cut by heads on
the way, kvd must know where a head lies: that is what ``pool.interior`` says.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

import kvd.client
from kvd.cli import kvd as command
from kvd.client import KvdError
from tests.daemon.conftest import settle
from tests.daemon.kv import tokens_of
from tests.support.daemons import START_S, Daemon, Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvd.client import Node, Pool

LAYERS, HEADS, DIM, PAGE = 2, 4, 8, 16
MODEL = {
    "pool.layers": str(LAYERS),
    "pool.heads": str(HEADS),
    "pool.head_dim": str(DIM),
    "pool.pages": "33",
    "transfer.integrity": "full",
}
TWO_RANKS = {"pool.tp_size": "2"}
OPAQUE = {**MODEL, "pool.interior": "opaque"}
TAGGED = {"pool.tag": "engine 1 avx2"}
RANK_BYTES = HEADS // 2 * PAGE * 2 * DIM * 2
"""Of one layer of a page, where two ranks divide the heads."""
RAW = {
    "pool.family": "raw",
    "pool.layers": str(LAYERS),
    "pool.page_bytes": str(RANK_BYTES),
    "pool.pages": "33",
    "transfer.integrity": "full",
}
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


def together(kv: torch.Tensor) -> torch.Tensor:
    """Of each head all slots, and of each slot K and V, as engines pack that read both at once."""
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
    """Of the model, by shard; what each rank of family raw has is the engine's to know."""
    each = HEADS // 2 if pool.memory.family == "raw" else 1
    shards = pool.component("kv").shards
    return [(one.first_head * each, one.end_head * each) for one in shards] or [(0, HEADS)]


def ids(pages: Iterable[int]) -> torch.Tensor:
    """Page numbers that a tensor takes."""
    return torch.as_tensor(list(map(int, pages)), dtype=torch.long)


def said(daemon: Daemon, *words: str) -> str:
    """What a verb prints, in one line."""
    verb, *arguments = words
    found = CliRunner().invoke(command, [verb, "--connect", daemon.admin, *arguments])
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


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
        receive = await d.receive(room, tokens, pair.prefill.name)
        lease = await p.lease(tokens)
        fill(p, lease.pages, kv, pack)
        outcome = await p.hand_over(room, lease=lease)
        await receive.done()
        found = wrong(d, receive.lease.pages, kv, pack)

        assert outcome.committed
        assert outcome.sent_pages == N_PAGES
        await receive.lease.release(())
        await lease.release(())
        await aside.release(())
    settle(pair)
    return found


async def test_pages_that_are_not_what_their_pool_says_are_cut_in_the_wrong_places(
    tmp_path: Path,
) -> None:
    """Nothing can notice it but the engine: every byte that was sent arrived, and was summed."""
    with two_daemons(tmp_path, MODEL, prefill={**MODEL, **TWO_RANKS}) as pair:
        assert await handed_over(pair, by_slot) == []
        for room, pack in ((2, by_head), (3, together)):
            assert len(await handed_over(pair, pack, room=room)) == LAYERS * N_PAGES


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize(
    ("pack", "settings", "shapes"),
    [
        (by_head, {}, [(HEADS, PAGE, DIM)] * 2),
        (together, {"pool.head_dim": str(2 * DIM), "pool.v_dim": "0"}, [(HEADS, PAGE, 2 * DIM)]),
    ],
)
async def test_heads_are_cut_where_the_pool_says_that_they_lie(
    tmp_path: Path, pack, settings: dict[str, str], shapes: list[tuple[int, ...]], order: str
) -> None:
    """From two ranks to one, and back: each reads what its own engine would have written."""
    model = {**MODEL, **settings, "pool.interior": "hnd", "pool.order": order}
    with two_daemons(tmp_path, model, prefill={**model, **TWO_RANKS}) as pair:
        assert await handed_over(pair, pack) == []
        assert await handed_over(Pair(pair.decode, pair.prefill), pack, room=2) == []
        async with kvd.client.connect(pair.decode.client, name="d") as d:
            pool = d.pool("main")
            assert pool.interior == "hnd"
            assert [tuple(part.shape[1:]) for part in pool.layer(0)] == shapes
        assert "hnd inside" in said(pair.decode, "pools")


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("family", ["mha", "raw"])
async def test_opaque_pages_arrive_as_they_were_between_equal_ranks(
    tmp_path: Path, family: str, order: str
) -> None:
    model = {**(OPAQUE if family == "mha" else RAW), **TWO_RANKS, "pool.order": order}
    with two_daemons(tmp_path, model) as pair:
        assert await handed_over(pair, together) == []
        async with kvd.client.connect(pair.decode.client, name="d") as d:
            (part,) = d.pool("main").view("kv", layer=1, shard=1)
            assert (tuple(part.shape[1:]), part.dtype) == ((RANK_BYTES,), torch.uint8)
            assert d.pool("main").interior == "opaque"


async def test_what_goes_along_with_opaque_pages_arrives_with_them(tmp_path: Path) -> None:
    with two_daemons(tmp_path, {**RAW, "pool.components.scale": "24"}) as pair:
        tokens = tokens_of(PROMPT_TOKENS, seed=1)
        async with (
            kvd.client.connect(pair.prefill.client, name="p") as p,
            kvd.client.connect(pair.decode.client, name="d") as d,
        ):
            receive = await d.receive(1, tokens, "p")
            lease = await p.lease(tokens)
            content = torch.randint(0, 256, (LAYERS, N_PAGES, 24), dtype=torch.uint8)
            for layer in range(LAYERS):
                (part,) = p.pool("main").view("scale", layer=layer)
                part[ids(lease.pages_of("scale"))] = content[layer]
            await p.hand_over(1, lease=lease)
            await receive.done()

            for layer in range(LAYERS):
                (part,) = d.pool("main").view("scale", layer=layer)
                assert torch.equal(part[ids(receive.lease.pages_of("scale"))], content[layer])
            del part
            await receive.lease.release(())
            await lease.release(())
        settle(pair)


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "ranks": {**OPAQUE, **TWO_RANKS},
    "byhead": {**OPAQUE, "pool.interior": "hnd"},
    "newer": {**OPAQUE, "pool.tag": "engine 2 avx512"},
    "ranked": {**RAW, **TWO_RANKS},
}
"""Nodes with which ``d`` must not exchange: what each of them has."""

WHY = {
    "ranks": "pages of {one} and {other} are opaque, so none is cut on its way",
    "byhead": "pages of {one} are {ours} inside, those of {other} {theirs} (pool.interior)",
    "newer": "pool.tag of {one} is {ours}, of {other} {theirs}",
    "ranked": "{one} and {other} lay out their pools differently",
}
VALUES = {
    "byhead": ("opaque", "hnd"),
    "newer": ("'engine 1 avx2'", "'engine 2 avx512'"),
}
"""Of ``d`` and of the other."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    place = tmp_path_factory.mktemp("interior")
    fleet = {name: Daemon(name, place, {**TAGGED, **own}) for name, own in REFUSED.items()}
    d = fleet["d"] = Daemon("d", place, {**TAGGED, **OPAQUE})
    for name in REFUSED:
        fleet[name].knows(d)
        d.knows(fleet[name])
    try:
        for one in fleet.values():
            one.start()
        for one in fleet.values():
            one.wait_ready()
            n_peers = len(REFUSED) if one is d else 1
            one.wait_for(
                lambda one=one, n=n_peers: _n_refused(one) == n,  # type: ignore[misc]
                "knows not what its peers have",
                START_S,
            )
        yield fleet
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Daemon.stop, fleet.values()))


def _n_refused(daemon: Daemon) -> int:
    return sum("pool" in peer.layout for peer in daemon.snapshot().peers)


def words(name: str, *, of_d: bool) -> str:
    """What the daemon says of the other."""
    values = VALUES.get(name, ("", ""))
    one, other = ("d", name) if of_d else (name, "d")
    ours, theirs = values if of_d else values[::-1]
    return WHY[name].format(one=one, other=other, ours=ours, theirs=theirs)


@pytest.mark.parametrize("name", REFUSED)
async def test_both_sides_refuse_in_words_and_no_byte_travels(
    fleet: dict[str, Daemon], name: str
) -> None:
    """Where an engine asks for the pages, and wherever an operator looks; nothing can be sent."""
    d, other = fleet["d"], fleet[name]
    room, tokens = list(REFUSED).index(name) + 1, tokens_of(PROMPT_TOKENS, seed=1)
    async with kvd.client.connect(d.client, name="d") as engine:
        with pytest.raises(KvdError) as refused:
            await engine.receive(room, tokens, name)
    async with kvd.client.connect(other.client, name="p") as engine:
        lease = await engine.lease(tokens)
        with pytest.raises(KvdError) as unsent:
            await engine.hand_over(room, lease=lease, to="d", deadline_s=0.2)
        await lease.release(())

    for one, of_d in ((refused, True), (unsent, False)):
        assert one.value.code == "layout-mismatch"
        assert words(name, of_d=of_d) in str(one.value)
    for one, at, of_d in ((d, name, True), (other, "d", False)):
        (shown,) = [peer for peer in one.snapshot().peers if peer.name == at]
        assert words(name, of_d=of_d) in shown.layout
        assert words(name, of_d=of_d) in said(one, "why", "peer", at)
        totals = one.snapshot().totals
        assert (totals.sent_bytes, totals.received_bytes) == (0, 0)


# ---- what an engine expects ----------------------------------------------------------------------

RANK = """
import sys
import kvd.client

endpoint, token, tag = sys.argv[1:]
with kvd.client.join(endpoint, token=bytes.fromhex(token), expects={"tag": tag}) as worker:
    print(worker.pool("main").tag)
"""


async def test_an_engine_that_expects_what_there_is_gets_it(fleet: dict[str, Daemon]) -> None:
    expects = {
        "family": "mha",
        "order": "page_first",
        "interior": "opaque",
        "tag": TAGGED["pool.tag"],
        "page_size": PAGE,
    }
    async with kvd.client.connect(fleet["d"].client, name="engine", expects=expects) as node:
        assert node.pool("main").tag == TAGGED["pool.tag"]
    node = kvd.client.connect_sync(fleet["d"].client, name="engine", expects=expects)
    node.close()


async def test_an_engine_that_expects_something_else_is_told_both_and_has_no_session(
    fleet: dict[str, Daemon],
) -> None:
    expects = {"interior": "hnd", "tag": "engine 3"}
    endpoint = fleet["d"].client

    with pytest.raises(KvdError) as refused:
        async with kvd.client.connect(endpoint, name="engine", expects=expects):
            pass
    with pytest.raises(KvdError) as blocking:
        kvd.client.connect_sync(endpoint, name="engine", expects=expects)
    async with kvd.client.connect(endpoint, name="rank 0") as node:
        rank = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RANK, endpoint, node.token.hex(), "engine 3"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, joined = await rank.communicate()

    assert refused.value.code == blocking.value.code == "layout-mismatch"
    assert str(refused.value) == str(blocking.value)
    assert refused.value.refusal.message == (
        "pool main of d is not what this engine writes and reads: pool.interior is 'opaque' "
        "there, this engine expects 'hnd'; pool.tag is 'engine 1 avx2' there, this engine expects "
        "'engine 3'; configure [pool] of d for this engine, or start the engine that this pool is "
        "for"
    )
    assert refused.value.numbers == {
        "interior": "opaque",
        "expected_interior": "hnd",
        "tag": "engine 1 avx2",
        "expected_tag": "engine 3",
    }
    assert rank.returncode != 0
    assert b"layout-mismatch" in joined
    assert b"pool.tag is 'engine 1 avx2' there, this engine expects 'engine 3'" in joined
    fleet["d"].wait_for(lambda: not fleet["d"].snapshot().clients, "has a session left", 5)


async def test_what_nobody_can_expect_is_named(fleet: dict[str, Daemon]) -> None:
    with pytest.raises(
        KvdError, match="expects has 'tags'; an engine may expect family"
    ) as refused:
        async with kvd.client.connect(fleet["d"].client, name="e", expects={"tags": "engine 1"}):
            pass

    assert refused.value.code == "bad-request"
