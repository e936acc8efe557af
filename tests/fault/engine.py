"""An engine: a process of its own with one session, told what to do, line by line.

    python -m tests.fault.engine ENDPOINT NAME

It opens another session whenever the daemon is gone; with ``kept`` as a third word it stays with
the one it has, for the pool outlives the daemon. It checks what it gets: a delivered page as well
as a cached one that it is allowed to reuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

import kvd.client
from kvd.client import KvdError
from kvd.client.state import EventsLost
from kvd.errors import Code, Refusal
from tests.fault import over_restarts
from tests.fault.checked import Checked, give_back, grown_of, prompt_of
from tests.fault.jobs import (
    JOBS,
    Burst,
    Check,
    Hoard,
    Hold,
    Job,
    Listen,
    Receive,
    Report,
    Send,
    Unruly,
    encode,
)
from tests.fault.prompts import PAGE_TOKENS, Memory, Prompt

if TYPE_CHECKING:
    from kvd.client import Lease, Node

RETRY_S = 0.05
CONNECT_S = 30.0
RETURN_S = 4.0
"""How long a call waits for a daemon that is away."""


class Session:
    """One session after the other with the same daemon."""

    def __init__(self, endpoint: str, name: str, *, is_kept: bool) -> None:
        self._endpoint = endpoint
        self._name = name
        self._is_kept = is_kept
        self._node: Node | None = None
        self._memory: Memory | None = None
        self._opening: asyncio.Task[tuple[Node, Memory]] | None = None

    async def node(self, within_s: float = CONNECT_S) -> tuple[Node, Memory]:
        """A session that is alive as far as we know.

        Raises:
            KvdError: none could be opened in that time.
        """
        if self._opening is None or self._opening.done():
            node = self._node
            if node is not None and self._is_usable(node):
                assert self._memory is not None
                return node, self._memory
            self._opening = asyncio.create_task(self._open())
        try:
            return await asyncio.wait_for(asyncio.shield(self._opening), within_s)
        except TimeoutError:
            why = f"no session could be opened within {within_s:.1f} s"
            raise KvdError(Refusal(Code.UNREACHABLE, why, side="campaign")) from None

    def _is_usable(self, node: Node) -> bool:
        return node._port.connection.end is None and (self._is_kept or not node.is_away)

    async def _open(self) -> tuple[Node, Memory]:
        await self.leave()
        while True:
            try:
                node = await kvd.client.connect(
                    self._endpoint, name=self._name, return_within_s=RETURN_S
                )
            except KvdError:
                await asyncio.sleep(RETRY_S)
            else:
                self._node, self._memory = node, Memory(node, is_kept=self._is_kept)
                return self._node, self._memory

    async def leave(self) -> None:
        """Close the session in the middle of whatever runs."""
        node, self._node, self._memory = self._node, None, None
        if node is not None:
            await node.close()


class Engine:
    """Does the jobs, all at the same time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, line: bytes) -> None:
        task = asyncio.create_task(self._do(JOBS.decode(line)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, job: Job) -> None:
        began_s = time.monotonic()
        checked = Checked(may_be_torn=isinstance(job, Receive) and job.is_torn)
        report = Report(job.id, "")
        try:
            match job:
                case Send():
                    await self._send(job, checked)
                case Receive():
                    await self._receive(job, checked)
                case Hoard():
                    await self._hoard(job)
                case Listen():
                    report = await self._listen(job)
                case Burst():
                    await over_restarts.burst(*await self._session.node(), job)
                case Hold():
                    report = await over_restarts.hold(*await self._session.node(), job, checked)
                case Check():
                    report = await over_restarts.check(*await self._session.node(), job, checked)
        except KvdError as refused:
            report = Report(job.id, refused.code, str(refused)[:400])
        if checked.wrong:
            report = msgspec.structs.replace(report, message="; ".join(checked.wrong)[:800])
        _say(
            msgspec.structs.replace(
                report,
                began_s=began_s,
                ended_s=time.monotonic(),
                checked=checked.pages,
                wrong=len(checked.wrong),
            )
        )

    async def _send(self, job: Send, checked: Checked) -> None:
        until_s = time.monotonic() + job.deadline_s
        node, memory = await self._session.node(job.deadline_s)
        tokens, keys = prompt_of(job.prompt)
        lease = await node.lease(
            tokens, namespace=job.prompt.namespace, deadline_s=_left_s(until_s), priority=1
        )
        is_good = False
        try:
            cached = lease.prefix_len // PAGE_TOKENS
            checked.look(memory, lease, keys[:cached], "cached on the prefill side")
            sending = await node.send(
                job.room,
                tokens,
                lease=lease,
                namespace=job.prompt.namespace,
                deadline_s=_left_s(until_s),
                to=job.to,
            )
            pages = lease.pages.tolist()
            written = cached
            for step in range(1, job.steps + 1):
                upto = cached + (len(keys) - cached) * step // job.steps
                checked.must_be_kept(lease)
                for place in range(written, upto):
                    memory.write(pages[place], keys[place])
                written = upto
                if job.unruly is not Unruly.NO and step == max(1, job.steps // 2):
                    await self._misbehave(job, sending)
                await sending.advance(min(upto * PAGE_TOKENS, len(tokens)))
                if step == job.steps and job.unruly is Unruly.TEARS and upto > cached:
                    memory.tear(pages[upto - 1])
                await asyncio.sleep(job.pause_s)
            is_good = job.unruly is not Unruly.TEARS
            outcome = await sending.finish(aux=job.room.to_bytes(8, "little"))
            if outcome.reason is not None:
                raise KvdError(outcome.reason)
        finally:
            await give_back(lease, commit=is_good)

    async def _misbehave(self, job: Send, sending: kvd.client.Send) -> None:
        match job.unruly:
            case Unruly.ABORTS:
                await sending.abort("the campaign's engine gave up")
            case Unruly.NEVER_FINISHES:
                await asyncio.sleep(job.deadline_s + 0.2)
            case Unruly.LEAVES:
                await self._session.leave()

    async def _receive(self, job: Receive, checked: Checked) -> None:
        until_s = time.monotonic() + job.deadline_s
        node, memory = await self._session.node(job.deadline_s)
        tokens, keys = prompt_of(job.prompt)
        receiving = await node.receive(
            job.room,
            tokens,
            job.source,
            namespace=job.prompt.namespace,
            deadline_s=_left_s(until_s),
            reserve_tokens=job.grow,
        )
        if job.unruly is Unruly.CANCELS:
            await asyncio.sleep(0.003 * (job.room % 5))
            await receiving.cancel()
            return
        if job.unruly is Unruly.LEAVES:
            await asyncio.sleep(0.003 * (job.room % 5))
            await self._session.leave()
        await receiving.done()
        lease = receiving.lease
        new = ()
        try:
            checked.look(memory, lease, keys, "delivered")
            assert receiving.aux == job.room.to_bytes(8, "little"), receiving.aux
            if job.grow:
                new = Prompt(job.prompt.family, 0, job.grow, job.room, "").tokens()
                _, grown = grown_of(job.prompt, tokens, new)
                pages = lease.pages.tolist()
                for place in range(len(tokens) // PAGE_TOKENS, len(grown)):
                    memory.write(pages[place], grown[place])
                await lease.commit(new)
                checked.look(memory, lease, grown, "after decoding")
        finally:
            await give_back(lease, commit=True)

    async def _hoard(self, job: Hoard) -> None:
        """Page by page, so that every page that somebody gives back is taken."""
        node, _ = await self._session.node()
        held: list[Lease] = []
        until_s = time.monotonic() + job.hold_s
        number = 0
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                number += 1
                tokens = Prompt(1000 + job.id, 0, 8 * PAGE_TOKENS, number).tokens()
                with contextlib.suppress(KvdError):
                    held.append(await node.lease(tokens, deadline_s=min(0.1, left_s), cache=False))
        finally:
            for lease in held:
                await give_back(lease, commit=False)

    async def _listen(self, job: Listen) -> Report:
        """Contiguous, or the gap is named: else the code says so."""
        node, _ = await self._session.node()
        heard = lost = last = 0
        until_s = time.monotonic() + job.for_s
        async for event in node.events():
            if isinstance(event, EventsLost):
                lost += event.count
                last += event.count
            else:
                heard += 1
                if last and event.seq != last + 1:
                    return Report(job.id, "gap", f"{event.seq} came after {last}")
                last = event.seq
            if time.monotonic() > until_s:
                break
        return Report(job.id, "", events=heard, lost_events=lost)


def _left_s(until_s: float) -> float:
    return max(0.02, until_s - time.monotonic())


def _say(message: msgspec.Struct) -> None:
    os.write(sys.stdout.fileno(), encode(message) + b"\n")


async def main(endpoint: str, name: str, *, is_kept: bool) -> None:
    """Until the standard input ends."""
    session = Session(endpoint, name, is_kept=is_kept)
    engine = Engine(session)
    await session.node()
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say(Report(0, ""))
    async for line in lines:
        engine.take(line)
    await session.leave()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], is_kept="kept" in sys.argv[3:]))
