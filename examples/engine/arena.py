"""Engines that place pages themselves: a prompt goes from the arena of one to that of the other.

    python arena.py ENDPOINT PREFILL_ENDPOINT

kvd does not know what is in an arena: each engine has a prefix cache of its own. Nothing is copied
but between the nodes.
"""

from __future__ import annotations

import asyncio
import sys

import model
import numpy as np

from kvd.client import KvdError, Node, PageArena, connect

PAGES = 64
PROMPT = np.arange(4000, 4200)
CHUNK = 64
ROOM = 1
"""One for each request: both engines know it from whoever sent the request to them."""


async def prefill(node: Node, arena: PageArena, tokens: np.ndarray) -> None:
    """Compute a prompt, and let each chunk go while the next one is computed."""
    memory, pages = model.memory_of(node.pool("main")), arena.pages[: pages_of(node, tokens)]
    try:
        send = await arena.send(ROOM, tokens, pages=pages, namespace=model.NAMESPACE)
        for first in range(0, len(tokens), CHUNK):
            upto = min(first + CHUNK, len(tokens))
            model.compute(memory, pages, tokens, first, upto)
            await send.advance(upto)  # These are read from now on, and not to be written.
        outcome = await send.finish(aux=b"first token")  # Now they may be written again.
        print("prefill:", "it was taken" if outcome.committed else f"not taken: {outcome.reason}")
    except KvdError as error:  # The decode engine computes it.
        print("prefill: not sent,", error.code)


async def decode(node: Node, arena: PageArena, tokens: np.ndarray, source: str) -> None:
    """Have the KV of a prompt come; else compute it, in pages that nobody writes."""
    memory, n = model.memory_of(node.pool("main")), pages_of(node, tokens)
    pages = arena.pages[:n]
    try:
        receive = await arena.receive(
            ROOM, tokens, source, pages=pages, namespace=model.NAMESPACE, deadline_s=5
        )
        await receive.done()
        print("decode: it has come, with", receive.aux)
    except KvdError as error:
        print("decode: computed,", error.code)
        # Until ``receive.is_safe`` the other node may still write those, so it is done in others.
        pages = arena.pages[n : 2 * n]
        model.compute(memory, pages, tokens, 0)
    print(f"decode: {model.wrong(memory, pages, tokens)} of {len(tokens)} tokens are wrong")


def pages_of(node: Node, tokens: np.ndarray) -> int:
    """As many as these tokens take."""
    return -(-len(tokens) // node.pool("main").page_size)


async def main(endpoint: str, prefill_endpoint: str) -> None:
    """Both engines, each with a daemon and an arena of its own."""
    async with (
        connect(endpoint, name="decode") as here,
        connect(prefill_endpoint, name="prefill") as there,
    ):
        # When its engine starts: an arena needs pages that follow each other.
        ours, theirs = await here.arena(PAGES), await there.arena(PAGES)
        await asyncio.gather(
            prefill(there, theirs, PROMPT), decode(here, ours, PROMPT, source=there.name)
        )
        await ours.close()
        await theirs.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KvdError as refused:  # No daemon, or no such pages in a row: an engine has its own then.
        print("without kvd:", refused.code)
