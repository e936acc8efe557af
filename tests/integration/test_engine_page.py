"""Every example of the page for engines runs, in its order, on two real daemons.

A name that an example reads is one that it or an example before it has made, or is given here: what
only an engine has.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest_asyncio

import kvd.client
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

PAGE = Path(__file__).parents[2] / "docs/howto/engine.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)

POOL = {
    "pool.layers": "2",
    "pool.heads": "2",
    "pool.head_dim": "8",
    "pool.pages": "8192",
    "pool.page_size": "16",
    "pool.interior": "hnd",
    "pool.tag": "engine 1.2 bfloat16",
}
PLACE = "ipc:///run/kvd/client.sock"
TOKENS = list(range(100))


class Order(NamedTuple):
    key: Any
    pages: list[int]


class Event:
    """Stands in for one of CUDA: this pool is in host memory."""

    def ipc_handle(self) -> bytes:
        return bytes(64)


class Engine:
    """Runs the examples; what one of them defines the next ones may read."""

    def __init__(self, endpoint: str, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.endpoint = endpoint
        self.names: dict[str, Any] = {
            "kvd": kvd,
            "endpoint": endpoint,
            "tokens": TOKENS,
            "room": 1,
            "aux": b"first token",
        }
        self.ran: list[str] = []

    async def run(self, words: str, **given: Any) -> None:
        """The example in which these words stand."""
        text = next(one for one in EXAMPLES if words in one)
        self.ran.append(text)
        self.names.update(given)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(text.replace(PLACE, self.endpoint), words, "exec", flags=flags)
        done = eval(code, self.names)
        if inspect.isawaitable(done):
            await done


@pytest_asyncio.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    prefill, decode = Daemon("prefill-0", tmp_path, POOL), Daemon("decode-0", tmp_path, POOL)
    prefill.knows(decode)
    decode.knows(prefill)
    monkeypatch.setenv("KVD_SOCKETS__CLIENT", decode.client)
    try:
        prefill.start()
        decode.start()
        prefill.wait_ready()
        decode.wait_ready()
        async with (
            kvd.client.connect(prefill.client, name="prefill-engine") as its_engine,
            kvd.client.connect(decode.client, name="decode-engine") as other_engine,
        ):
            yield Engine(decode.client, its_engine, other_engine)
    finally:
        prefill.stop()
        decode.stop()


async def test_every_example_of_the_page_for_engines_runs(engine: Engine) -> None:
    prefill, decode = engine.prefill, engine.decode
    await engine.run("pool.layer(0)")
    await engine.run("expects =")

    await engine.run("wait_s=60", key="drawn by a launcher", rank=0, n_layers=2)
    node, worker = engine.names["node"], engine.names["worker"]
    lease = await node.lease(TOKENS, namespace="ranks")
    await engine.run("begin_written", lease_id=lease.id, upto=100, event=Event())
    copied: list[Any] = []
    await engine.run(
        "worker.check(order.key)", Order=Order, lease=lease, first=0, last=2, copy=copied.append
    )
    assert copied == [lease.pages[:2].tolist()]
    await lease.release()
    worker.close()
    await node.close()

    lease = await prefill.lease(TOKENS)
    receiving = asyncio.create_task(decode.receive(1, TOKENS, source="prefill-0"))
    await engine.run("node.hand_over(", node=prefill, lease=lease)
    assert engine.names["outcome"].committed
    handoff = await receiving
    await handoff.done()
    await handoff.lease.release(())

    lease = await decode.lease(TOKENS, namespace="chunks")
    await engine.run("await lease.written(upto)", node=decode, lease=lease, upto=64)
    assert (await decode.match(TOKENS, namespace="chunks")).tokens == 64

    keys = {f"h{number}": bytes([number]) * 32 for number in range(4)}
    await engine.run("keys=[h0, h1, h2])  #", **keys, page_size=16)
    await engine.run("extra_keys={3:", image_hash=b"image", cache_salt=b"salt")
    await engine.names["lease"].release(())
    await engine.run("reserve_tokens=256")
    assert engine.names["receive"].n_tokens == 96
    await engine.names["receive"].lease.release(())

    promised = {"prompt": TOKENS, "max_new_tokens": 32, "new_tokens": [7] * 20}
    await engine.run("promise_tokens=max_new_tokens", node=decode, **promised)
    assert len(engine.names["lease"].pages) == 8
    await engine.names["lease"].release(())

    await arenas(engine)
    await own_blocks(engine)
    await engine.run("new_epoch", node=decode)
    assert engine.names["done"].epoch == 1
    await engine.run("prompt.extend", more_tokens=[1, 2, 3])
    await engine.names["lease"].written(105)
    await engine.run("lease.retract(", generated=[4, 5])
    assert engine.names["lease"].kv_len == 105
    await engine.names["lease"].release(())

    await polled(engine)
    assert sorted(set(engine.ran)) == sorted(EXAMPLES)


async def own_blocks(engine: Engine) -> None:
    """It keeps its KV in blocks of its own."""
    layers = {layer: [np.zeros((12, 2, 16, 8), np.uint16) for _ in "kv"] for layer in range(2)}
    node = engine.decode
    await engine.run("node.blocks(kv_caches", node=node, kv_caches=layers)
    lease = await node.lease(list(range(5000, 5096)))
    blocks = engine.names["blocks"]
    await blocks.begin_save(lease, {"kv": [0, 1, 2, 3]}, first_page=0, upto_tokens=64)
    await engine.run("blocks.begin_save(", lease=lease, block_ids=[4, 5], other_ids=[6, 7])
    await engine.names["save"]
    assert lease.id
    blocks.close()
    await lease.release()


async def arenas(engine: Engine) -> None:
    """One engine has an arena at each side."""
    tokens, other = list(range(1100)), Engine(engine.endpoint, engine.prefill, engine.decode)
    for side, node in ((engine, engine.decode), (other, engine.prefill)):
        await side.run("node.arena(", node=node, tokens=tokens, room=2, upto_tokens=80)
        assert side.names["arena"].first_page > 0
    begin, other_begin = (side.names["arena"].first_page for side in (engine, other))
    await asyncio.gather(
        engine.run("arena.receive(", ids=list(range(begin, begin + 5))),
        other.run("arena.send(", ids=list(range(other_begin, other_begin + 69))),
    )
    for side in (engine, other):
        await side.names["arena"].close()
    engine.ran += other.ran
    engine.names["tokens"] = TOKENS


async def polled(engine: Engine) -> None:
    """The step loop is of the blocking client: in a thread of its own."""
    names, left = engine.names, iter(range(2000))

    class Serving:
        def __bool__(self) -> bool:
            time.sleep(0.002)
            return names["lease"] is None and next(left, None) is not None

    lease = await engine.prefill.lease(TOKENS)
    sending = asyncio.create_task(engine.prefill.hand_over(3, lease=lease, deadline_s=10))
    text = next(one for one in EXAMPLES if "begin_receive" in one)
    engine.ran.append(text)
    del names["lease"], names["node"]
    names.update(room=3, serving=Serving(), step=lambda: None)
    await asyncio.to_thread(exec, text, names)
    assert (await sending).committed
    assert names["lease"].kv_len == len(TOKENS)
