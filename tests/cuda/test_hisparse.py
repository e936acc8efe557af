"""KV in host memory, its index and buffer on a device of the double: real daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

import kvd.client
from tests.daemon.conftest import settle
from tests.daemon.kv import tokens_of
from tests.integration.test_hisparse import Both, hand_over, holds, is_right
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMMON = {
    "pool.layers": "3",
    "pool.dtype": "float16",
    "pool.latent_dim": "64",
    "pool.rope_dim": "16",
    "pool.index_dim": "32",
    "pool.index_dtype": "uint8",
    "transfer.integrity": "full",
}
PREFILL = {**COMMON, "pool.family": "mla", "pool.page_size": "64", "pool.index_page_size": "32"}
DECODE = {
    **COMMON,
    "pool.family": "hisparse",
    "pool.page_size": "16",
    "pool.index_page_size": "8",
    "pool.pages": "129",
    "pool.buffer_tokens": "256",
    "pool.buffer_pages": "65",
    "pool.saved_size": "1MiB",
}


@pytest_asyncio.fixture
async def both(double, nixl, kernels, tmp_path, monkeypatch) -> AsyncIterator[Both]:
    """Prefill on cuda:0 with larger pages; the device half of decode on cuda:1."""
    for name, value in double.environment.items():
        monkeypatch.setenv(name, value)
    p = {**PREFILL, "pool.pages": "33", "pool.device": "cuda:0"}
    d = {**DECODE, "pool.device": "cuda:1"}
    with two_daemons(tmp_path, d, prefill=p) as pair:
        async with (
            kvd.client.connect(pair.prefill.client, name="prefill-engine") as prefill,
            kvd.client.connect(pair.decode.client, name="decode-engine") as decode,
        ):
            places = {one.component for one in decode._attachment.attached.devices}
            assert places == {"index", "buffer"}
            yield Both(pair, prefill, decode, 16)
        settle(pair)


async def test_a_prompt_lands_on_both_sides_and_pages_are_fetched_to_the_device(both):
    tokens = tokens_of(200, seed=200)

    lease = await hand_over(both, tokens, tier="device")
    fetched = await lease.fetch([0, 3, 12])

    assert is_right(both.d, "kv", lease.pages, tokens)
    assert is_right(both.d, "index", lease.pages_of("index")[: 200 // 8], tokens)
    assert holds(both.d, "buffer", fetched.pages, tokens, [0, 3, 12])
    await lease.release()
