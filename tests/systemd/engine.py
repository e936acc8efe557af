"""An engine inside the guest: ``python -m tests.systemd.engine VERB ...`` prints one line of JSON.

lease CLIENT              opens a lease and lets it go
handoff PREFILL DECODE    hands KV over from one daemon to the other, and compares the bytes
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import kvd.client
from kvd.client import KvdError
from kvd.errors import Code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client import Lease, Node

TOKENS = 320
RETURN_S = 30.0


def lease(client: str) -> dict[str, object]:
    """What a lease of ``TOKENS`` tokens has."""
    with kvd.client.connect_sync(client, name="engine") as node:
        held = node.lease(range(TOKENS))
        pages = len(held.pages)
        held.release(())
        return {"node": node.name, "pages": pages}


def refused(client: str) -> dict[str, object]:
    """The code with which a lease was refused; empty if it was granted."""
    with kvd.client.connect_sync(client, name="engine") as node:
        try:
            node.lease(range(TOKENS)).release(())
        except KvdError as error:
            return {"code": error.code}
        return {"code": ""}


def handoff(prefill: str, decode: str) -> dict[str, object]:
    """Whether what has arrived is what was written."""
    return asyncio.run(_hand_over(prefill, decode, _nothing))


def half(prefill: str, decode: str) -> dict[str, object]:
    """As ``handoff``, with a pause in the middle."""

    async def pause() -> None:
        _say({"advanced": TOKENS // 2})
        await asyncio.to_thread(sys.stdin.readline)

    return asyncio.run(_hand_over(prefill, decode, pause))


async def _nothing() -> None:
    """No pause."""


async def _hand_over(
    prefill: str, decode: str, pause: Callable[[], Awaitable[None]]
) -> dict[str, object]:
    from tests.daemon.kv import digest, tokens_of, write  # noqa: PLC0415 - loads torch

    async with (
        kvd.client.connect(prefill, name="prefill") as source,
        kvd.client.connect(decode, name="decode") as destination,
    ):
        tokens = tokens_of(TOKENS, seed=5)
        held = await source.lease(tokens)
        write(source, held, tokens)
        here = digest(source, held.pages)
        receive = await destination.receive(1, tokens, source.name)
        send = await source.send(1, tokens, lease=held)
        await send.advance(TOKENS // 2)
        await send.accepted()
        await pause()
        outcome = await send.finish(b"aux")
        await receive.done()
        there = digest(destination, receive.lease.pages)
        return {"committed": outcome.committed, "is_exact": here == there}


def stay(client: str) -> dict[str, object]:
    """Stays until its standard input ends, over restarts of the daemon."""
    return asyncio.run(_stay(client))


async def _stay(client: str) -> dict[str, object]:
    from tests.daemon.kv import digest, tokens_of, write  # noqa: PLC0415 - loads torch

    cached, running = tokens_of(TOKENS, seed=6), tokens_of(TOKENS, seed=7)
    async with kvd.client.connect(client, name="engine", return_within_s=RETURN_S) as node:
        lease = await node.lease(cached)
        write(node, lease, cached)
        written = digest(node, lease.pages)
        await lease.release(())
        held = await node.lease(running)
        write(node, held, running)
        mine, k = digest(node, held.pages), node.pool("main").layer(0)[0]
        life, session = node.incarnation, node.session
        _say({"pages": len(held.pages)})
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                again = await _asked_until_it_is_back(node, cached)
            except KvdError as error:
                _say({"code": error.code})
                break
            _say(
                {
                    "is_new_daemon": node.incarnation != life,
                    "is_same_session": node.session == session,
                    "is_same_memory": node.pool("main").layer(0)[0].data_ptr() == k.data_ptr(),
                    "cached_tokens": again.prefix_len,
                    "is_cached_exact": digest(node, again.pages) == written,
                    "is_held_exact": digest(node, held.pages) == mine,
                }
            )
            life = node.incarnation
            await again.release(())
    return {"end": "asked to"}


async def _asked_until_it_is_back(node: Node, tokens: NDArray[np.int32]) -> Lease:
    """A lease. What a daemon was asked ends with it, and is to be asked again."""
    try:
        return await node.lease(tokens)
    except KvdError as error:
        if error.code != Code.UNREACHABLE.value:
            raise
        return await node.lease(tokens)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    verbs = {"lease": lease, "refused": refused, "handoff": handoff, "half": half, "stay": stay}
    _say(verbs[verb](*rest))
