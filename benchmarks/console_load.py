"""A node worth looking at: a million pages, a tree, many leases, and requests that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvd.client.api import Node

Tokens = npt.NDArray[np.int32]

PAGE_SIZE: Final = 16
LONG_PROMPTS: Final = 600
LONG_PAGES: Final = 1000
BRANCHES: Final = 8000
AT_ONCE: Final = 32
CHURN_PER_S: Final = 200

SETTINGS: Final = {
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "1",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_SIZE),
}
"""One byte of KV per token: what is looked at is the bookkeeping."""


async def fill(node: Node, leases: int) -> None:
    """Long prompts, branches off them, and ``leases`` small ones that stay."""
    rng = np.random.default_rng(7)
    prompts = [
        rng.integers(0, 2**31, LONG_PAGES * PAGE_SIZE, dtype="<i4") for _ in range(LONG_PROMPTS)
    ]
    await _all_of(len(prompts), lambda number: _cache(node, prompts[number]))

    async def branch(number: int) -> None:
        stem = prompts[number % LONG_PROMPTS]
        at = (1 + number // LONG_PROMPTS) * 8 * PAGE_SIZE
        await _cache(node, np.concatenate([stem[:at], _tokens(number, 2 * PAGE_SIZE)]))

    async def hold(number: int) -> None:
        await node.lease(_tokens(10**6 + number, PAGE_SIZE), cache=False, deadline_s=60)

    await _all_of(BRANCHES, branch)
    await _all_of(leases, hold)


@contextlib.asynccontextmanager
async def churn(node: Node) -> AsyncIterator[None]:
    """Leases that come, commit and go, ``CHURN_PER_S`` of them, for as long as the block lasts."""

    async def run() -> None:
        number = 0
        while True:
            number += 1
            await _cache(node, _tokens(2 * 10**6 + number % 5000, 4 * PAGE_SIZE))
            await asyncio.sleep(1 / CHURN_PER_S)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _cache(node: Node, tokens: Tokens) -> None:
    lease = await node.lease(tokens, deadline_s=60)
    await lease.release(new_tokens=())


def _tokens(number: int, count: int) -> Tokens:
    return ((np.arange(count, dtype=np.int64) + number * 4096) % 2**31).astype("<i4")


async def _all_of(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
