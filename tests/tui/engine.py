"""Engines for consoles to look at: each a process of its own, with one session and one habit.

    python -m tests.tui.engine HABIT ENDPOINT NAME FIRST COUNT [SOURCE]

It says ``ready`` when it does what it is to do, and goes on until it is stopped or its daemon is
gone. Prompts follow from the number of their room, so both sides of a handoff know them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

import kvd.client
from kvd.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from numpy.typing import NDArray

    from kvd.client import Lease, Node

    Tokens = NDArray[np.int32]

PAGE = 16
SYSTEM_PAGES = 16
"""Of the prompt that all others begin with."""
CHUNK_PAGES = 8
"""What a prefill engine computes at once."""
CHUNK_S = 0.05
TOKEN_S = 0.02
ROOMS_EACH = 10_000
FOREVER_S = 600.0


def prompt(number: int) -> Tokens:
    """The system prompt, then 20 to 79 pages of its own and the beginning of another."""
    draw = np.random.default_rng(number)
    own = draw.integers(0, 2**31 - 1, PAGE * int(draw.integers(20, 80)) + 5, dtype=np.int32)
    return np.concatenate([np.arange(PAGE * SYSTEM_PAGES, dtype=np.int32), own])


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def _grow(lease: Lease, tokens: int) -> None:
    """Generate so many tokens, and commit what is a page."""
    for first in range(0, tokens, PAGE):
        await asyncio.sleep(TOKEN_S * PAGE / 4)
        await lease.commit(range(first, first + PAGE))


async def works(node: Node, first: int, at_once: int) -> None:
    """Requests of its own: leases that grow, are committed and released."""

    async def one(number: int) -> None:
        for turn in itertools.count():
            lease = await node.lease(prompt(first + number + 7 * (turn % 5)), reserve_tokens=64)
            await lease.commit()
            await _grow(lease, 64)
            await lease.release(())
            if turn == 0 and number == 0:
                _ready()  # the cache has begun to fill

    await asyncio.gather(*(one(number) for number in range(at_once)))


async def sends(node: Node, first: int, at_once: int) -> None:
    """Prefills one room after the other, chunk by chunk, for whoever receives in them."""

    async def one(stream: int) -> None:
        for room in _rooms(first, stream):
            with contextlib.suppress(KvdError):
                await _prefill(node, room)

    _ready()
    await asyncio.gather(*(one(stream) for stream in range(at_once)))


async def _prefill(node: Node, room: int) -> None:
    tokens = prompt(room)
    lease = await node.lease(tokens)
    try:
        send = await node.send(room, tokens, lease=lease)
        for upto in range(lease.prefix_len, len(tokens), CHUNK_PAGES * PAGE):
            await send.advance(upto)
            await asyncio.sleep(CHUNK_S)
        await send.finish(b"first token")
    finally:
        await lease.release(())


async def receives(node: Node, first: int, at_once: int, source: str) -> None:
    """Decodes: one room after the other, and some tokens after each prompt."""

    async def one(stream: int) -> None:
        for room in _rooms(first, stream):
            with contextlib.suppress(KvdError):
                receive = await node.receive(room, prompt(room), source, reserve_tokens=64)
                await receive.done()
                await _grow(receive.lease, 64)
                await receive.lease.release(())
            if room == first:
                _ready()

    await asyncio.gather(*(one(stream) for stream in range(at_once)))


async def sends_some(node: Node, room: int, chunks: int) -> None:
    """Prefills the first chunks of a prompt, and computes no more."""
    tokens = prompt(room)
    lease = await node.lease(tokens)
    send = await node.send(room, tokens, lease=lease, deadline_s=FOREVER_S)
    await send.accepted()
    await send.advance(lease.prefix_len + chunks * CHUNK_PAGES * PAGE)
    _ready()
    await asyncio.sleep(FOREVER_S)


async def receives_and_keeps(node: Node, room: int, count: int, source: str) -> None:
    """Decodes rooms from this one on, and neither commits nor releases anything."""
    receives = [
        await node.receive(each, prompt(each), source, deadline_s=FOREVER_S)
        for each in range(room, room + count)
    ]
    _ready()
    for receive in receives:
        with contextlib.suppress(KvdError):
            await receive.done()
    await asyncio.sleep(FOREVER_S)


async def sends_all(node: Node, room: int, count: int) -> None:
    """Prefills so many rooms from this one on, all of each."""
    _ready()
    await asyncio.gather(*(_prefill(node, each) for each in range(room, room + count)))
    await asyncio.sleep(FOREVER_S)


async def forks(node: Node, first: int, count: int) -> None:
    """Holds so many leases; a child of it has its connection, too, until stdin is closed."""
    for at in range(count):
        await node.lease(prompt(first + at))
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    _ready()
    await asyncio.sleep(FOREVER_S)


async def hoards(node: Node, first: int, spare_pages: int) -> None:
    """Holds every page that can be had but these."""
    pool = (await node.snapshot()).pools[0]
    pages = pool.free_pages + pool.evictable_pages - spare_pages
    tokens = np.arange(first, first + PAGE * pages, dtype=np.int32)
    kept = await node.lease(tokens, cache=False)
    _ready()
    await asyncio.sleep(FOREVER_S)
    await kept.release()


async def waits(node: Node, first: int, count: int) -> None:
    """So many requests that wait for pages for as long as they may."""
    asked = [
        asyncio.ensure_future(node.lease(prompt(first + at), deadline_s=FOREVER_S / 2))
        for at in range(count)
    ]
    _ready()
    await asyncio.wait(asked)


HABITS: dict[str, Callable[..., Coroutine[None, None, None]]] = {
    habit.__name__.replace("_", "-"): habit
    for habit in (
        *(works, sends, sends_some, sends_all, receives, receives_and_keeps),
        *(forks, hoards, waits),
    )
}


def _rooms(first: int, stream: int) -> Iterator[int]:
    return iter(range(first + stream * ROOMS_EACH, first + (stream + 1) * ROOMS_EACH))


@contextlib.contextmanager
def engines() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts engines, each when it is ready; what is left of them is ended with the block."""
    started: list[subprocess.Popen[str]] = []

    def start(habit: str, endpoint: str, name: str, *more: int | str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", __name__, habit, endpoint, name, *map(str, more)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "ready\n", f"{habit} {name}: {said!r}"
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


async def main(habit: str, endpoint: str, name: str, *numbers: int | str) -> None:
    """Do that until somebody ends it, or the daemon is gone."""
    with contextlib.suppress(KvdError):
        async with kvd.client.connect(endpoint, name=name) as node:
            await HABITS[habit](node, *numbers)


if __name__ == "__main__":
    habit, endpoint, name, first, count, *source = sys.argv[1:]
    asyncio.run(main(habit, endpoint, name, int(first), int(count), *source))
