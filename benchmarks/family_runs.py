"""One pool family at work: two daemons, prompts that travel, and room that runs out.

What lives here: handoffs, what a request holds meanwhile, how many fit. What must not: closed forms
(``family_forms``), tables.

A prompt's KV is computed in chunks on the prefill side, its windows sliding along, then handed over
and decoded: the decode side slides through the whole answer, and what counts is the most that it
holds at any moment. A handoff is timed from the call of ``finish`` to its answer (``engines``).
Room runs out when a receive is in the daemon's queue instead of answered. That comes first: until
both pools have been written once, handoffs are slower, because the kernel maps their memory.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from benchmarks.family_forms import DEVICE, HOST
from kvd.bench.engines import DEADLINE_S
from kvd.harness.daemons import DaemonFailed
from kvd.types import NULL_PAGE

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from numpy.typing import NDArray

    from benchmarks.family_forms import FamilyForm, FamilyWorkload
    from kvd.bench.engines import EngineSide
    from kvd.client import Lease, Receive, Send
    from kvd.wire.memory import ComponentMemory
    from kvd.wire.snapshot import Snapshot

L = TypeVar("L")


class ComponentSeen(msgspec.Struct, frozen=True):
    """One component of a request as an engine sees it; ``held_pages`` at most, decode side."""

    name: str
    tier: str
    page_bytes: int
    pool_bytes: int
    held_pages: int


class FetchSeen(msgspec.Struct, frozen=True):
    """A buffer filled from host memory, and the same pages wanted again; medians of the times.

    ``misses`` of the first, ``hits`` of the second, ``copied_bytes`` of both.
    """

    misses: int
    hits: int
    copied_bytes: int
    cold_ms: float
    warm_ms: float


class FamilySeen(msgspec.Struct, frozen=True):
    """What was measured of one family.

    ``handed_off`` prompts took ``sent_bytes`` by the prefill daemon's count and ``received_bytes``
    by the decode daemon's. ``admitted`` requests were held when the next one had to wait, for the
    component ``short_of``.
    """

    parts: tuple[ComponentSeen, ...]
    admitted: int
    short_of: str
    handed_off: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    times_s: tuple[float, ...] = ()
    placeholder_bytes: int = 0
    counted_pages: dict[str, int] = {}
    """By component with page ids of its own, what the decode daemon had in leases when full."""
    left_pages: int = 0
    """What both daemons had in leases when all had been released."""
    violations: int = 0
    """Broken invariants that they counted, and findings of their audits."""
    fetch: FetchSeen | None = None
    """Where there is a device buffer."""
    prefill_window_pages: int = 0
    """The most that the prefill side's lease had mapped, where there are windows."""
    prefill_window_pages_unslid: int = 0
    """The same of a lease that computes the whole prompt at once."""

    def held_bytes(self, tier: str) -> int:
        """Bytes of one request in that memory."""
        return sum(one.held_pages * one.page_bytes for one in self.parts if one.tier == tier)

    def pool_bytes(self, tier: str) -> int:
        """Bytes of the whole pool there, null pages included."""
        return sum(one.pool_bytes for one in self.parts if one.tier == tier)


def components_of(side: EngineSide) -> tuple[ComponentMemory, ...]:
    """What its daemon keeps of a request, as engines see it."""
    return side.node.pool("main").memory.components


class HeldPages:
    """Counts what a lease holds of each component, and keeps the most."""

    def __init__(self, side: EngineSide) -> None:
        self._parts = components_of(side)
        self._most = dict.fromkeys((part.name for part in self._parts), 0)

    def look(self, lease: Lease) -> None:
        """Count the pages that it has now."""
        for name in self._most:
            self._most[name] = max(self._most[name], distinct(lease.pages_of(name)))

    def seen(self) -> tuple[ComponentSeen, ...]:
        """Every component; what is only counted is told as the device's."""
        return tuple(
            ComponentSeen(
                name=part.name,
                tier=HOST if part.tier == HOST else DEVICE,
                page_bytes=part.total_bytes // part.pages,
                pool_bytes=part.total_bytes,
                held_pages=self._most[part.name],
            )
            for part in self._parts
        )


class MetHandoff(NamedTuple):
    """A handoff whose two sides have met."""

    lease: Lease
    receive: Receive
    send: Send


class FamilyTurns:
    """The two daemons of one family, and its handoffs one after the other."""

    def __init__(
        self, family: FamilyForm, work: FamilyWorkload, prefill: EngineSide, decode: EngineSide
    ) -> None:
        self.family = family
        self._work = work
        self._prefill = prefill
        self._decode = decode
        self._prompts = FreshPrompts(work)
        self._holding = HeldPages(decode)
        self._times_s: list[float] = []
        self._windows = [part.name for part in components_of(prefill) if part.extent == "tail"]
        self._most_windows = 0
        self._admitted = 0
        self._short_of = ""
        self._counted: dict[str, int] = {}
        self._buffers = [one for one in components_of(decode) if one.extent == "buffer"]
        self._fetches: list[FetchSeen] = []

    async def fill(self) -> None:
        """Hand prompts over and keep them, until one has to wait; then let all of them go."""
        kept: list[Lease] = []
        while (met := await self._meet()) is not None:
            await self._finish(met)
            kept.append(met.receive.lease)
        self._admitted = len(kept)
        self._counted = leased_pages(await self._decode.node.snapshot())
        for lease in kept:
            await lease.release()

    async def turn(self) -> None:
        """One handoff that is timed, decoded to the end of its answer, and released."""
        met = await self._meet()
        if met is None:
            raise DaemonFailed(f"{self.family.name}: a prompt has to wait, and nobody has pages")
        self._times_s.append(await self._finish(met))
        lease = met.receive.lease
        await self._decode_all(lease)
        for buffer in self._buffers:
            wanted = self._work.buffer_tokens // buffer.page_size
            self._fetches.append(await fetch_twice(lease, wanted))
        await lease.release()

    async def seen(self) -> FamilySeen:
        """What came of it all. Nothing is held any more, or it is told.

        Raises:
            DaemonFailed: a handoff has failed.
        """
        unslid = await self._unslid_windows()
        sent, got = [await one.node.snapshot() for one in (self._prefill, self._decode)]
        if got.totals.handoffs_failed or sent.totals.handoffs_failed:
            raise DaemonFailed(f"{self.family.name}: a handoff has failed")
        return FamilySeen(
            parts=self._holding.seen(),
            admitted=self._admitted,
            short_of=self._short_of,
            handed_off=got.totals.handoffs_delivered,
            sent_bytes=sent.totals.sent_bytes,
            received_bytes=got.totals.received_bytes,
            times_s=tuple(self._times_s),
            counted_pages=self._counted,
            left_pages=sum(sum(leased_pages(one).values()) for one in (sent, got)),
            violations=sum(one.totals.violations + one.audit.findings for one in (sent, got)),
            fetch=median_fetch(self._fetches),
            prefill_window_pages=self._most_windows,
            prefill_window_pages_unslid=unslid,
        )

    async def _meet(self) -> MetHandoff | None:
        """A prompt that is computed and received for; None when the receive has to wait."""
        tokens, room = self._prompts.fresh()
        lease = await self._computed(tokens)
        receive = await unless_waiting(
            self._decode,
            self._decode.node.receive(
                room,
                tokens,
                self._prefill.daemon.name,
                reserve_tokens=self._work.answer_tokens,
                step_tokens=self._work.step_tokens,
                deadline_s=DEADLINE_S,
            ),
        )
        if isinstance(receive, WaitsFor):
            self._short_of = receive.budget
            await lease.release()
            return None
        send = await self._prefill.node.send(room, tokens, lease=lease, deadline_s=DEADLINE_S)
        await send.accepted()
        return MetHandoff(lease, receive, send)

    async def _computed(self, tokens: NDArray[np.int32]) -> Lease:
        """A lease of the prefill side, slid along the prompt chunk by chunk."""
        chunk = self._work.chunk_tokens
        lease = await self._prefill.node.lease(tokens, step_tokens=chunk)
        for upto in range(chunk, len(tokens) + 1, chunk) if self._windows else ():
            self._look_at_windows(lease)
            await lease.slide(upto)
        self._look_at_windows(lease)
        return lease

    def _look_at_windows(self, lease: Lease) -> None:
        for name in self._windows:
            self._most_windows = max(self._most_windows, distinct(lease.pages_of(name)))

    async def _unslid_windows(self) -> int:
        """Window pages of a prompt that is computed at once."""
        if not self._windows:
            return 0
        lease = await self._prefill.node.lease(self._prompts.fresh()[0])
        pages = distinct(lease.pages_of(self._windows[0]))
        await lease.release()
        return pages

    async def _finish(self, met: MetHandoff) -> float:
        """Move it; how long that took. The prefill side's lease is over, its KV cached."""
        began_s = time.perf_counter()
        outcome = await met.send.finish(b"aux")
        took_s = time.perf_counter() - began_s
        await met.receive.done()
        assert outcome.committed
        await met.lease.release(())
        return took_s

    async def _decode_all(self, lease: Lease) -> None:
        """Slide through the answer and look at what is held."""
        self._holding.look(lease)
        work = self._work
        for upto in range(work.prompt_tokens, work.room_tokens, work.step_tokens):
            await lease.slide(upto)
            self._holding.look(lease)


async def count_leases(work: FamilyWorkload, side: EngineSide) -> FamilySeen:
    """Leases of a pool that is never written, until one has to wait."""
    prompts, holding = FreshPrompts(work), HeldPages(side)
    kept: list[Lease] = []
    while True:
        tokens, _ = prompts.fresh()
        opened = side.node.lease(tokens, reserve_tokens=work.answer_tokens, deadline_s=DEADLINE_S)
        lease = await unless_waiting(side, opened)
        if isinstance(lease, WaitsFor):
            break
        holding.look(lease)
        kept.append(lease)
    full = await side.node.snapshot()
    for one in kept:
        await one.release()
    end = await side.node.snapshot()
    return FamilySeen(
        parts=holding.seen(),
        admitted=len(kept),
        short_of=lease.budget,
        placeholder_bytes=full.pools[0].placeholder_bytes,
        counted_pages=leased_pages(full),
        left_pages=sum(leased_pages(end).values()),
        violations=end.totals.violations + end.audit.findings,
    )


async def fetch_twice(lease: Lease, n_pages: int) -> FetchSeen:
    """Want the first pages of a prompt in the device buffer, then the same again."""
    wanted = range(n_pages)
    began_s = time.perf_counter()
    first = await lease.fetch(wanted)
    middle_s = time.perf_counter()
    again = await lease.fetch(wanted)
    ended_s = time.perf_counter()
    return FetchSeen(
        misses=first.misses,
        hits=again.hits,
        copied_bytes=first.copied_bytes + again.copied_bytes,
        cold_ms=(middle_s - began_s) * 1e3,
        warm_ms=(ended_s - middle_s) * 1e3,
    )


def median_fetch(fetches: list[FetchSeen]) -> FetchSeen | None:
    """The last of them with the medians of all times; None where there was none."""
    if not fetches:
        return None
    return msgspec.structs.replace(
        fetches[-1],
        cold_ms=statistics.median(one.cold_ms for one in fetches),
        warm_ms=statistics.median(one.warm_ms for one in fetches),
    )


def leased_pages(snapshot: Snapshot) -> dict[str, int]:
    """Pages that leases have, by component: their own, cached ones that they need, quarantined."""
    return {
        one.component: one.held_pages + one.locked_pages + one.quarantined_pages
        for one in snapshot.pools
    }


class WaitsFor(NamedTuple):
    """A request is in the queue, because there is not enough of ``budget``."""

    budget: str


async def unless_waiting(side: EngineSide, request: Coroutine[object, object, L]) -> L | WaitsFor:
    """The answer to ``request``; or, if it has to wait, what for, and it is withdrawn.

    A daemon takes the requests of a session in order, and answers at once what it does not queue:
    its state after the request shows the request if it waits.
    """
    asked = asyncio.ensure_future(request)
    looked = asyncio.ensure_future(side.node.snapshot())
    snapshot: Snapshot = await looked
    short = [one for one in snapshot.waiting if one.missing_pages]
    if not short:
        return await asked
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    return WaitsFor(short[0].budget)


class FreshPrompts:
    """Tokens and rooms that no request had before, so that nothing is ever cached of one."""

    def __init__(self, work: FamilyWorkload) -> None:
        self._tokens = work.prompt_tokens
        self._count = 0

    def fresh(self) -> tuple[NDArray[np.int32], int]:
        """A prompt, and its room."""
        start = self._count * self._tokens
        self._count += 1
        return np.arange(start, start + self._tokens, dtype=np.int32), self._count


def distinct(pages: NDArray[np.int32]) -> int:
    """How many pages there are in a row, the null page not counted."""
    return int(np.unique(pages[pages != NULL_PAGE]).size)
