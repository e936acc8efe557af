"""KV in host memory and a buffer of it on the device, between real daemons: compared by bytes.

The prefill node keeps its KV on the device, in pages of 64 tokens with a sparse-attention index.
The decode node has pages of 16 tokens, so that each page that arrives is cut, or of 64.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch

import kvd.client
from kvd.client import KvdError
from kvd.errors import Code
from kvd.wire import admin
from tests.daemon.conftest import settle
from tests.daemon.kv import tokens_of
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from numpy.typing import NDArray

    from kvd.client import Lease, Node
    from tests.support.daemons import Pair

LAYERS = 3
SLOT_TOKENS = 256
"""Of the buffer, per request."""

INDEX = {"pool.index_dim": "32", "pool.index_dtype": "uint8"}
KINDS = {
    "mla": {"pool.latent_dim": "64", "pool.rope_dim": "16"},
    "mha": {"pool.heads": "2", "pool.head_dim": "32"},
}
CASES = {
    "mla cut to pages of 16": ("mla", 16, 8),
    "mha with equal pages": ("mha", 64, 32),
}


class Both(NamedTuple):
    """A session with each of two daemons, and the tokens of a page of the decode node."""

    pair: Pair
    p: Node
    d: Node
    page: int


@pytest.fixture(scope="module", params=list(CASES))
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, page, index_page = CASES[request.param]
    common = {"pool.layers": str(LAYERS), "pool.dtype": "float16", **INDEX, **KINDS[kind]}
    prefill = {
        **common,
        "pool.family": kind,
        "pool.page_size": "64",
        "pool.index_page_size": "32",
        "pool.pages": "33",
    }
    decode = {
        **common,
        "pool.family": "hisparse",
        "pool.page_size": str(page),
        "pool.index_page_size": str(index_page),
        "pool.pages": str(2048 // page + 1),
        "pool.buffer_tokens": str(SLOT_TOKENS),
        "pool.buffer_pages": str(4 * SLOT_TOKENS // page + 1),
        "pool.saved_size": "1MiB",
    }
    with two_daemons(tmp_path_factory.mktemp("hisparse"), decode, prefill=prefill) as pair:
        yield pair


@pytest_asyncio.fixture
async def both(cut: Pair) -> AsyncIterator[Both]:
    """Two sessions; afterwards nothing may be held."""
    async with (
        kvd.client.connect(cut.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(cut.decode.client, name="decode-engine") as d,
    ):
        yield Both(cut, p, d, d.pool("main").page_size)
    settle(cut)


# ---- what engines do -----------------------------------------------------------------------------

_rooms = iter(range(1, 1000))


def kv_of(tokens: NDArray[np.int32], part: torch.Tensor, salt: int) -> torch.Tensor:
    """What a model would compute for these tokens: as if drawn, from each token and its place."""
    width = part[0, 0].numel() * part.element_size()
    places = np.arange(len(tokens), dtype=np.uint64)
    seeds = tokens.astype(np.uint64) * 2654435761 + places * 40503 + 97 * salt
    mixed = (seeds[:, None] + np.arange(width, dtype=np.uint64) * 7919) % 251
    raw = torch.from_numpy(mixed.astype(np.uint8))
    return raw.view(part.dtype).reshape(len(tokens), *part.shape[2:])


def write(node: Node, lease: Lease, tokens: NDArray[np.int32], start: int = 0) -> None:
    """Write the KV and the index of tokens ``[start, end)`` of a lease."""
    for component in ("kv", "index"):
        rows = torch.as_tensor(lease.pages_of(component).astype(np.int64))
        for layer in range(LAYERS):
            for salt, part in enumerate(node.pool("main").view(component, layer=layer), 2 * layer):
                at = torch.arange(start, len(tokens))
                made = kv_of(tokens, part, salt)[start:]
                part[rows[at // part.shape[1]], at % part.shape[1]] = made


def is_right(
    node: Node, component: str, pages: NDArray[np.int32], tokens: NDArray[np.int32]
) -> bool:
    """Whether these pages hold exactly these tokens of a sequence, from its first token on."""
    return holds(node, component, pages, tokens, range(len(pages)))


def holds(
    node: Node,
    component: str,
    pages: NDArray[np.int32],
    tokens: NDArray[np.int32],
    logical: range | list[int],
) -> bool:
    """Whether ``pages[i]`` holds page ``logical[i]`` of these tokens, in all layers."""
    for layer in range(LAYERS):
        for salt, part in enumerate(node.pool("main").view(component, layer=layer), 2 * layer):
            wanted, size = kv_of(tokens, part, salt), part.shape[1]
            for page, one in zip(pages.tolist(), logical, strict=True):
                want = wanted[one * size : (one + 1) * size]
                found = part[page][: len(want)]
                if not torch.equal(found.view(torch.uint8), want.view(torch.uint8)):
                    return False
    return True


async def hand_over(
    both: Both, tokens: NDArray[np.int32], *, tier: str | None = None, reserve: int = 0
) -> Lease:
    """One handoff; the decode engine's lease."""
    room = next(_rooms)
    lease = await both.p.lease(tokens)
    write(both.p, lease, tokens)
    receive = await both.d.receive(room, tokens, "p", tier=tier, reserve_tokens=reserve)
    send = await both.p.send(room, tokens, lease=lease)
    outcome = await send.finish(b"aux")
    await receive.done()
    assert outcome.committed
    await lease.release(())
    return receive.lease


# ---- arrival -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [200, 64, 5, 257])
async def test_a_prompt_lands_in_host_memory_and_its_index_on_the_device(
    both: Both, length: int
) -> None:
    """scenarios E1, E2, E4: the last page is partial, or not; each page that comes is cut."""
    tokens = tokens_of(length, seed=length)

    lease = await hand_over(both, tokens)

    assert is_right(both.d, "kv", lease.pages, tokens)
    index = lease.pages_of("index")
    each = both.d.pool("main").page_size_of("index")
    assert is_right(both.d, "index", index[: -(-length // each)], tokens)
    await lease.release()


async def test_a_second_request_with_the_same_prefix_is_sent_the_rest_alone(both: Both) -> None:
    """scenario E11."""
    tokens = tokens_of(300, seed=11)
    first = await hand_over(both, tokens)
    longer = np.concatenate([tokens, tokens_of(50, seed=12)])

    second = await hand_over(both, longer)

    assert second.prefix_len == 300 // both.page * both.page
    assert is_right(both.d, "kv", second.pages, longer)
    reply = await second.fetch([0, second.prefix_len // both.page])
    assert holds(both.d, "buffer", reply.pages, longer, [0, second.prefix_len // both.page])
    await first.release()
    await second.release()


# ---- fetch ---------------------------------------------------------------------------------------


async def test_fetched_pages_have_the_bytes_of_the_host_and_stay(both: Both) -> None:
    tokens = tokens_of(512, seed=21)
    lease = await hand_over(both, tokens)
    before = both.pair.decode.snapshot().pools[1].buffer
    last = 512 // both.page - 1

    missed = await lease.fetch([last, 0, 1])
    hit = await lease.fetch([1, last])

    assert (missed.hits, missed.misses) == (0, 3)
    page_bytes = both.d.pool("main").component("kv").page_bytes
    assert missed.copied_bytes == 3 * page_bytes
    assert holds(both.d, "buffer", missed.pages, tokens, [last, 0, 1])
    assert (hit.hits, hit.misses, hit.copied_bytes) == (2, 0, 0)
    assert hit.pages.tolist() == [missed.pages[2], missed.pages[0]]
    assert set(missed.pages.tolist()) <= set(lease.pages_of("buffer").tolist())
    after = both.pair.decode.snapshot()
    assert before is not None
    assert after.pools[1].buffer is not None
    assert after.pools[1].buffer.hits - before.hits == 2
    assert after.pools[1].buffer.misses - before.misses == 3
    assert after.pools[1].buffer.copied_bytes - before.copied_bytes == 3 * page_bytes
    (held,) = [one.beside[0] for one in after.leases]
    assert (held.hits, held.misses) == (2, 3)
    await lease.release()


async def test_any_pages_come_right_through_a_buffer_that_holds_half_of_them(both: Both) -> None:
    tokens = tokens_of(2 * SLOT_TOKENS, seed=22)
    lease = await hand_over(both, tokens)
    n_pages, n_slots = len(lease.pages), len(lease.pages_of("buffer"))
    assert n_pages == 2 * n_slots
    rng = np.random.default_rng(22)

    for _ in range(40):
        wanted = rng.choice(n_pages, rng.integers(1, n_slots + 1), replace=False).tolist()
        ahead = rng.choice(n_pages, n_slots // 2, replace=False).tolist()
        reply = await lease.fetch(wanted, ahead=ahead)
        assert reply.hits + reply.misses == len(wanted)
        assert holds(both.d, "buffer", reply.pages, tokens, wanted)

    await lease.release()


async def test_pages_told_ahead_need_no_copy_when_they_are_wanted(both: Both) -> None:
    tokens = tokens_of(512, seed=23)
    lease = await hand_over(both, tokens)
    await lease.fetch([0], ahead=[2, 3])

    reply = await lease.fetch([3, 2])

    assert (reply.hits, reply.misses, reply.copied_bytes) == (2, 0, 0)
    assert holds(both.d, "buffer", reply.pages, tokens, [3, 2])
    await lease.release()


async def test_the_page_that_is_being_written_is_never_stale(both: Both) -> None:
    prompt = tokens_of(120, seed=24)
    lease = await hand_over(both, prompt, reserve=16)
    tokens = prompt
    for step in range(12):
        tokens = np.concatenate([tokens, tokens_of(1, seed=2400 + step)])
        write(both.d, lease, tokens, start=len(tokens) - 1)
        await lease.commit(tokens[-1:])
        last = (len(tokens) - 1) // both.page

        reply = await lease.fetch([last, 0])

        assert holds(both.d, "buffer", reply.pages, tokens, [last, 0])
    await lease.release()


# ---- tiers ---------------------------------------------------------------------------------------


async def test_a_short_prompt_is_in_the_buffer_when_the_engine_hears_of_it(both: Both) -> None:
    """scenario E6: in all layers, page n of the prompt in page n of the buffer's row."""
    tokens = tokens_of(SLOT_TOKENS - 7, seed=31)

    lease = await hand_over(both, tokens, tier="device")

    assert is_right(both.d, "buffer", lease.pages_of("buffer"), tokens)
    assert is_right(both.d, "kv", lease.pages, tokens)
    reply = await lease.fetch([0, 1])
    assert (reply.hits, reply.misses) == (2, 0)
    await lease.release()


async def test_requests_of_one_daemon_choose_for_themselves(both: Both) -> None:
    one, other = tokens_of(100, seed=32), tokens_of(100, seed=33)

    preloaded = await hand_over(both, one, tier="device")
    on_demand = await hand_over(both, other, tier="host")

    assert (await preloaded.fetch([0])).hits == 1
    assert (await on_demand.fetch([0])).misses == 1
    await preloaded.release()
    await on_demand.release()


async def test_a_long_prompt_cannot_be_preloaded(both: Both) -> None:
    with pytest.raises(KvdError) as caught:
        await both.d.receive(next(_rooms), tokens_of(SLOT_TOKENS + 1, seed=34), "p", tier="device")

    slots = SLOT_TOKENS // both.page
    assert caught.value.code == Code.TOO_LARGE.value
    assert caught.value.numbers == {"prompt_pages": slots + 1, "buffer_pages": slots}


async def test_more_pages_at_once_than_there_are_slots_are_refused(both: Both) -> None:
    lease = await hand_over(both, tokens_of(512, seed=35))
    slots = SLOT_TOKENS // both.page

    if slots < len(lease.pages):
        with pytest.raises(KvdError) as caught:
            await lease.fetch(range(slots + 1))
        assert caught.value.code == Code.TOO_LARGE.value
        assert caught.value.numbers == {"wanted_pages": slots + 1, "buffer_pages": slots}
    with pytest.raises(KvdError) as caught:
        await lease.fetch([len(lease.pages)])
    assert caught.value.code == Code.BAD_PAGES.value
    await lease.release()


# ---- away and back -------------------------------------------------------------------------------


async def test_a_retracted_lease_comes_back_with_its_bytes(both: Both) -> None:
    tokens = tokens_of(250, seed=41)
    lease = await hand_over(both, tokens)
    await lease.fetch([0, 1], ahead=[2])

    retraction = await lease.retract()
    both.pair.decode.ask(admin.Flush(1), admin.Report)
    resumption = await lease.resume()

    assert retraction.saved_pages >= -(-250 // both.page)
    assert (resumption.prefix_len, resumption.kv_len) == (0, 250)

    assert is_right(both.d, "kv", lease.pages, tokens)
    reply = await lease.fetch([2, 0, 249 // both.page])
    assert holds(both.d, "buffer", reply.pages, tokens, [2, 0, 249 // both.page])
    await lease.release()


async def test_a_fetch_outlives_the_transfer_process(both: Both) -> None:
    tokens = tokens_of(250, seed=42)
    lease = await hand_over(both, tokens)
    kept = await lease.fetch([0])
    old = both.pair.decode.transfer_pid()

    os.kill(old, signal.SIGKILL)
    began_s = time.monotonic()
    reply = await lease.fetch([1, 0, 2])

    assert time.monotonic() - began_s < 20
    assert holds(both.d, "buffer", reply.pages, tokens, [1, 0, 2])
    assert reply.pages[1] == kept.pages[0]
    both.pair.prefill.wait_for(
        lambda: both.pair.prefill.snapshot().peers[0].agent == "loaded", "has no agent again", 20.0
    )
    await lease.release()


# ---- pages that do not fit together --------------------------------------------------------------


async def test_small_pages_for_large_ones_are_refused_with_both_numbers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    common = {"pool.layers": "1", "pool.pages": "40", **KINDS["mla"]}
    prefill = {**common, "pool.family": "mla", "pool.page_size": "16"}
    decode = {**common, "pool.family": "hisparse", "pool.page_size": "64"}
    decode |= {"pool.buffer_tokens": "128", "pool.buffer_pages": "5"}
    with two_daemons(tmp_path_factory.mktemp("apart"), decode, prefill=prefill) as pair:
        async with kvd.client.connect(pair.decode.client, name="decode-engine") as d:
            with pytest.raises(KvdError) as caught:
                await d.receive(1, tokens_of(100, seed=51), "p")

    assert caught.value.code == Code.LAYOUT_MISMATCH.value
    assert caught.value.numbers == {"ours": 64, "theirs": 16}
