"""An engine inside the guest: ``python -m tests.systemd.engine VERB ...`` prints one line of JSON.

lease CLIENT              opens a lease and lets it go
handoff PREFILL DECODE    hands KV over from one daemon to the other, and compares the bytes
"""

from __future__ import annotations

import asyncio
import json
import sys

import kvd.client

TOKENS = 320


def lease(client: str) -> dict[str, object]:
    """What a lease of ``TOKENS`` tokens has."""
    with kvd.client.connect_sync(client, name="engine") as node:
        held = node.lease(range(TOKENS))
        pages = len(held.pages)
        held.release(())
        return {"node": node.name, "pages": pages}


def handoff(prefill: str, decode: str) -> dict[str, object]:
    """Whether what has arrived is what was written."""
    return asyncio.run(_hand_over(prefill, decode))


async def _hand_over(prefill: str, decode: str) -> dict[str, object]:
    from tests.daemon.kv import digest, tokens_of, write  # noqa: PLC0415 - loads torch

    async with (
        kvd.client.connect(prefill, name="prefill") as source,
        kvd.client.connect(decode, name="decode") as destination,
    ):
        tokens = tokens_of(TOKENS, seed=5)
        held = await source.lease(tokens)
        write(source, held, tokens)
        receive = await destination.receive(1, tokens, source.name)
        send = await source.send(1, tokens, lease=held)
        outcome = await send.finish(b"aux")
        await receive.done()
        here, there = digest(source, held.pages), digest(destination, receive.lease.pages)
        return {"committed": outcome.committed, "is_exact": here == there}


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    sys.stdout.write(json.dumps({"lease": lease, "handoff": handoff}[verb](*rest)))
