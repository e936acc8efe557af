"""The engines of a measurement: two sessions, one on each daemon, and whole handoffs.

What lives here: leases and handoffs of a fixed prompt length, in either direction. What must not:
references, statistics, tables.

A handoff is timed from the call of ``finish`` to its answer. Both sides have met before, and
nothing was advanced, so not one byte can have been posted before the clock starts; the answer comes
when the other daemon has committed the prompt to its tree and said so. Prompts never repeat, so
every one of their pages travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

import kvd.client
from kvd.types import Pages, runs_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.client import Lease, Node, Receive, Send
    from kvd.harness.daemons import DaemonProcess, Pair

DEADLINE_S: Final = 30.0
TOKENS_END: Final = 2**31 - 1


class Took(msgspec.Struct, frozen=True):
    """When each of the handoffs (or writes, or copies) that ran at once began and ended."""

    spans: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        return max(end for _, end in self.spans) - min(began for began, _ in self.spans)

    @property
    def slowest_s(self) -> float:
        """The longest of them."""
        return max(end - began for began, end in self.spans)


class EngineSide(NamedTuple):
    """One daemon and the session with it."""

    daemon: DaemonProcess
    node: Node


class OneHandoff:
    """One handoff that is ready to go: both sides have met, nothing is written yet."""

    def __init__(self, lease: Lease, receive: Receive, send: Send) -> None:
        self.source = Pages(lease.pages.tobytes())
        self.destination = b""
        self.lease = lease
        self.receive = receive
        self._send = send

    async def finish(self) -> tuple[float, float]:
        """Move it all; when it began and when it was over.

        Raises:
            HandoffError: the other side did not commit.
        """
        began_s = time.monotonic()
        outcome = await self._send.finish(b"aux")
        ended_s = time.monotonic()
        await self.receive.done()
        assert outcome.committed
        self.destination = Pages(self.receive.lease.pages.tobytes())
        return began_s, ended_s

    async def end(self) -> None:
        """Give the leases back; what was delivered stays cached until room is needed."""
        await self.receive.lease.release()
        await self.lease.release(())


class HandoffEngines:
    """Both sessions, and the numbers that must not repeat: tokens and rooms."""

    def __init__(self, prefill: EngineSide, decode: EngineSide, prompt_tokens: int) -> None:
        self._sides = (prefill, decode)
        self._prompt_tokens = prompt_tokens
        self._next_token = 0
        self._room = 0

    async def meet(self, ways: int) -> list[OneHandoff]:
        """A handoff from prefill to decode, and for two ways one back as well."""
        there, back = self._sides, self._sides[::-1]
        return [await self._meet(*each) for each in (there, back)[:ways]]

    async def move(self, handoffs: list[OneHandoff]) -> Took:
        """Finish them all at once, and give everything back."""
        took = Took(tuple(await asyncio.gather(*(handoff.finish() for handoff in handoffs))))
        for handoff in handoffs:
            await handoff.end()
        return took

    async def scatter(self, seed: int) -> None:
        """Leave the free pages of both pools in random order: what years of traffic would do."""
        order = np.random.default_rng(seed)
        for side in self._sides:
            state = (await side.node.snapshot()).pools[0]
            size = state.page_size
            # One page more than a prompt needs at least, so that nothing of it is cached already.
            leases = [
                await side.node.lease(self._fresh(size), cache=False)
                for _ in range(state.total_pages - 1)
            ]
            for number in order.permutation(len(leases)).tolist():
                await leases[number].release()

    async def _meet(self, source: EngineSide, destination: EngineSide) -> OneHandoff:
        tokens = self._fresh(self._prompt_tokens)
        self._room += 1
        lease = await source.node.lease(tokens)
        receive = await destination.node.receive(
            self._room, tokens, source.daemon.name, deadline_s=DEADLINE_S
        )
        send = await source.node.send(
            self._room, tokens, lease=lease, deadline_s=DEADLINE_S, to=destination.daemon.name
        )
        await send.accepted()
        return OneHandoff(lease, receive, send)

    def _fresh(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Tokens that no prompt had before."""
        start = self._next_token
        self._next_token += count
        return (np.arange(start, start + count) % TOKENS_END).astype(np.int32)


@contextlib.asynccontextmanager
async def two_engines(pair: Pair, prompt_tokens: int) -> AsyncIterator[HandoffEngines]:
    """A session with each of two daemons, for as long as the block lasts."""
    p, d = pair.prefill, pair.decode
    async with (
        kvd.client.connect(p.client, name="bench-p") as at_p,
        kvd.client.connect(d.client, name="bench-d") as at_d,
    ):
        yield HandoffEngines(EngineSide(p, at_p), EngineSide(d, at_d), prompt_tokens)


def run_count(pages: bytes) -> int:
    """How many runs of neighbours a list of pages has."""
    return len(runs_of(Pages(pages)))
