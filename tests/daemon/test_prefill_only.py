"""A daemon without KV: it counts tokens, refuses whatever needs bytes, and stays."""

from __future__ import annotations

import pytest

import kvd.client
from kvd.errors import Code, KvdError
from tests.support.daemons import Daemon

MODE = {
    "cache.mode": "prefill-only",
    "engine.workload": "embedding",
    "engine.attention": "varlen",
    "pool.size": "64GiB",
}


async def test_tokens_are_counted_and_whatever_needs_kv_is_refused(tmp_path):
    """scenarios D1, D10, D13: 64 GiB of tokens are counted by a daemon that holds none of it."""
    daemon = Daemon("e", tmp_path, MODE)
    daemon.start()
    try:
        daemon.wait_ready()
        async with kvd.client.connect(daemon.client, name="encoder") as node:
            pool = node.pool("main")
            lease = await node.lease(list(range(1, 1001)), reserve_tokens=24)
            assert (lease.prefix_len, len(lease.pages)) == (0, 64)
            await lease.extend(16)

            async def send() -> None:
                await node.send(7, list(range(1, 1001)), lease=lease)

            async def view() -> None:
                pool.layer(0)

            for attempt in (view, send, lease.commit, lease.retract):
                with pytest.raises(KvdError, match=r"cache\.mode") as refused:
                    await attempt()
                assert refused.value.code == Code.NOT_SUPPORTED.value
            with pytest.raises(KvdError, match=r"cache\.mode"):
                await node.receive(7, [1, 2, 3], "p")
            with pytest.raises(KvdError, match=r"cache\.mode"):
                await node.match([1, 2, 3])
            await lease.release()
            (state,) = daemon.snapshot().pools
        assert (state.total_pages, state.free_pages) == (2**21, 2**21 - 1)
        assert (state.page_bytes, state.placeholder_bytes) == (0, 32768)
        assert pool.memory.components[0].total_bytes == 0
    finally:
        daemon.stop()
