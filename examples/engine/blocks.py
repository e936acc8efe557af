"""An engine whose KV cache is its own: a scheduler that has leases, and a rank that copies blocks.

    python blocks.py [ENDPOINT]

The scheduler tells the rank, which is another process, what of a prompt is cached and in which
pages. The rank loads that, computes the rest, and saves it while the engine goes on. A copy that
does not count, for whatever reason, costs a prefill or a save, and never a token.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import model
import numpy as np

from kvd.client import KvdError, LeaseKey, PendingCopy, SyncNode, Worker, connect_sync, join

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCKS = 64
PROMPT = np.arange(2000, 2100)


class Order(NamedTuple):
    """A prompt for the rank. ``key`` says of which lease of which session the pages are."""

    key: LeaseKey
    pages: np.ndarray
    tokens: np.ndarray
    cached_tokens: int


class Rank:
    """Blocks of its own, for as long as it lives."""

    def __init__(self, worker: Worker) -> None:
        pool = worker.pool("main")
        self._page_size = pool.page_size
        self._memory = model.memory_like(pool, BLOCKS)
        layers = zip(self._memory[::2], self._memory[1::2], strict=True)  # (k, v) of each
        self._copies = worker.blocks(dict(enumerate(layers)), block_size=pool.page_size)
        self._free = list(range(BLOCKS))

    def compute(self, order: Order) -> tuple[str, np.ndarray, int]:
        """Have the KV of a prompt in blocks: what to say of it, these, and how much was loaded."""
        blocks = np.array([self._free.pop() for _ in order.pages])
        loaded, why = order.cached_tokens, ""
        if loaded:
            n = loaded // self._page_size
            why = self._ended("load", order, blocks[:n], order.pages[:n])
            loaded = 0 if why else loaded  # What came of it half is written over.
        model.compute(self._memory, blocks, order.tokens, loaded)
        wrong = model.wrong(self._memory, blocks, order.tokens)
        return f"{loaded} tokens loaded{why and f' ({why})'}, {wrong} wrong", blocks, loaded

    def save(self, order: Order, blocks: np.ndarray, loaded: int) -> str:
        """Have what was computed in the pages; what to say of it. The blocks are free then."""
        first = loaded // self._page_size
        why = self._ended("save", order, blocks[first:], order.pages[first:], first)
        self._free += blocks.tolist()
        return f"not saved ({why})" if why else "saved"

    def close(self) -> None:
        """Wait for what moves: the blocks may be freed then."""
        self._copies.close()

    def _ended(
        self, what: str, order: Order, blocks: np.ndarray, pages: np.ndarray, first: int = 0
    ) -> str:
        """Copy; why that does not count, or nothing. In either case no byte moves any more."""
        begin = self._copies.begin_load if what == "load" else self._copies.begin_save
        more = {"upto_tokens": len(order.tokens)} if what == "save" else {}
        try:
            copy: PendingCopy = begin(
                order.key, {"kv": blocks}, pages={"kv": pages}, first_page=first, **more
            )
            while not copy.safe():
                time.sleep(0.001)  # An engine does a step of its other requests here.
            copy.result()
        except KvdError as error:
            return error.code
        return ""


def rank_process(scheduler: Connection, endpoint: str | None, key: str) -> None:
    """The rank, until it is told None."""
    with join(endpoint, key=key, rank=0, ranks=1) as worker:
        rank = Rank(worker)
        while (order := scheduler.recv()) is not None:
            said, *where = rank.compute(order)
            scheduler.send(said)  # The engine says its first token here.
            scheduler.send(rank.save(order, *where))
        rank.close()


def request(node: SyncNode, rank: Connection, tokens: np.ndarray) -> None:
    """One prompt, through the rank. The lease is there from before the first byte to the last."""
    lease = node.lease(tokens, namespace=model.NAMESPACE, deadline_s=0)
    try:
        # A copy of the numbers goes, with the key that they are known by.
        rank.send(Order(lease.key, lease.pages.copy(), tokens, lease.prefix_len))
        print(rank.recv())
        print(rank.recv())
    finally:
        lease.leave(())  # Commits what was saved, and no more: nobody says how much that is.


def main(endpoint: str | None = None) -> None:
    """A prompt twice, with kvd or without."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    key = uuid.uuid4().hex  # Drawn by the launcher of an engine: by it its processes find together.
    try:
        with connect_sync(
            endpoint, name="blocks", key=key, within_s=1.0, on_unreachable="miss"
        ) as node:
            process = spawn.Process(target=rank_process, args=(theirs, endpoint, key))
            process.start()
            theirs.close()  # So that ``recv`` ends if the rank does.
            try:
                for _ in range(2):
                    request(node, ours, PROMPT)
            finally:
                ours.send(None)
                process.join()
    except KvdError as error:
        print("computed without kvd:", error.code)


if __name__ == "__main__":
    main(*sys.argv[1:])
