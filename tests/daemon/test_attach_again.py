"""Engines of before a restart come back to the attach socket, or are found dead."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.client.attachment import Attachment, ask, dial, take_answer
from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec
from kvd.daemon.former_processes import is_alive, process_now, started_ticks
from kvd.daemon.session_entries import AttachLimits
from kvd.daemon.sessions import Past
from kvd.errors import Code, KvdError, Refusal
from kvd.journal.engines import EngineRecord, Process
from kvd.pools.build import pool_memory
from kvd.wire.attach import Attach, AttachRequest, Join
from tests.support.attaching import AttachListener, ListenedAttach
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

POOL = PoolSpec(
    "main", "mha", PageOrder.PAGE_FIRST, (Component("kv", 1, Mha(1, 8, 8, "bfloat16"), 4),), (8,)
)
TOKEN = b"S" + b"t" * 16
HERE = Process(os.getpid(), started_ticks(os.getpid()) or 0)
ELSEWHERE = Process(1, started_ticks(1) or 0)
"""A process that is alive and never attaches."""
ANOTHER = Process(os.getppid(), started_ticks(os.getppid()) or 0)
"""The same."""


async def eventually(is_so: Callable[[], bool]) -> None:
    """Within a second."""
    async with asyncio.timeout(1.0):
        while not is_so():  # noqa: ASYNC110 - counts, not an event
            await asyncio.sleep(0.001)


class Server(AttachListener):
    """An attach server with a past, and everything it said, in order."""

    def __init__(
        self, path: str, fd: int, past: Past, kept: tuple[int, ...], limits: AttachLimits
    ) -> None:
        self.path = path
        self.said: list[tuple[object, ...]] = []
        self._news = asyncio.Event()
        self.refusals: list[Code] = []
        self.kept = kept
        self.attach = ListenedAttach(
            path,
            self,
            (pool_memory(POOL),),
            [fd],
            incarnation="2" * 32,
            limits=limits,
            past=past,
            notes=self,
        )
        self.attach.serve(asyncio.get_running_loop())

    def _say(self, what: tuple[object, ...]) -> None:
        self.said.append(what)
        self._news.set()

    def opened(self, session, name, pid):
        self._say(("opened", session, name))

    def joined(self, session, pid):
        self._say(("joined", session))

    def gone(self, session):
        self._say(("gone", session))

    def hung_up_on(self, session, why, pids):
        self._say(("hung up on", session, pids))

    def refused(self, pid, why):
        self.refusals.append(why.code)

    def returned(self, session, pid, leases):
        self._say(("returned", session, pid, leases))

    def session_opened(self, session, token, name, process):
        assert process == process_now(process.pid)
        self._say(("note opened", session, b"S" + token, name, process.pid))

    def session_joined(self, session, process):
        self._say(("note joined", session, process.pid))

    def process_left(self, session, pid):
        self._say(("note process left", session, pid))

    def session_ended(self, session):
        self._say(("note left", session))

    async def process(self, request: AttachRequest) -> Attachment:
        """A process that attaches, of this one."""
        sock = dial(self.path)
        assert sock is not None
        ask(sock, request)
        loop, ready, fd = asyncio.get_running_loop(), asyncio.Event(), sock.fileno()
        loop.add_reader(fd, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), 5)
        finally:
            loop.remove_reader(fd)
        try:
            attachment = take_answer(sock)
        except KvdError:
            sock.close()
            raise
        assert attachment is not None
        return attachment

    async def hears(self, *what: object) -> None:
        """Until it has said that."""
        async with asyncio.timeout(5):
            while what not in self.said:
                self._news.clear()
                await self._news.wait()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Server]]:
    servers: list[Server] = []
    placed = build_pool(POOL)

    def begin(
        *processes: Process, kept: tuple[int, ...] = (), most: int = 8, per_session: int = 16
    ) -> Server:
        engines = (EngineRecord(3, TOKEN, "decode-0", processes),) if processes else ()
        path, past = str(tmp_path / "attach.sock"), Past(engines, first_session=9)
        limits = AttachLimits(max_sessions=most, processes_per_session=per_session)
        servers.append(Server(path, placed[0].arena.fd, past, kept, limits))
        return servers[-1]

    yield begin
    for one in servers:
        one.attach.close()
    for place in placed:
        place.arena.close()


# ---- coming back ---------------------------------------------------------------------------------


async def test_who_comes_back_is_the_same_session_and_hears_what_is_kept(start):
    server = start(HERE, kept=(71, 70))

    back = await server.process(Attach("decode-0", resumes=TOKEN, leases=(70, 72)))

    told = back.attached
    assert (told.session, told.token, told.leases) == (3, TOKEN, (70,))
    assert server.said == [("returned", 3, os.getpid(), (70, 72))]
    back.close()
    await server.hears("gone", 3)
    assert server.said[1:] == [("note left", 3), ("gone", 3)]


async def test_routing_id_of_before_the_restart_is_of_nobody(start):
    """What an engine had sent to the daemon before must not be taken for what it says now."""
    server = start(HERE)
    assert server.attach.session_of(TOKEN) is None

    back = await server.process(Attach("decode-0", resumes=TOKEN))

    route = back.attached.route
    assert route.startswith(TOKEN)
    assert len(route) == len(TOKEN) + 8
    assert (server.attach.session_of(route), server.attach.session_of(TOKEN)) == (3, None)
    back.close()
    await server.hears("gone", 3)
    assert server.attach.session_of(route) is None


async def test_a_token_that_is_not_known_opens_a_new_session_above_all_former_ones(start):
    server = start(HERE)

    new = await server.process(Attach("decode-0", resumes=b"S" + b"u" * 16, leases=(70,)))

    told = new.attached
    assert (told.session, told.leases, told.route) == (9, (), b"")
    assert told.token != TOKEN
    assert server.said == [
        ("note opened", 9, told.token, "decode-0", os.getpid()),
        ("opened", 9, "decode-0"),
    ]
    new.close()


async def test_a_second_process_with_the_token_opens_a_session_of_its_own(start):
    """A forked child knows the token; what the session holds is not its to release."""
    server = start(HERE)
    main = await server.process(Attach("decode-0", resumes=TOKEN))

    child = await server.process(Attach("decode-0", resumes=TOKEN, leases=(70,)))

    assert (main.attached.session, child.attached.session) == (3, 9)
    main.close()
    child.close()


async def test_places_of_those_who_are_awaited_are_kept(start):
    server = start(HERE, most=1)

    with pytest.raises(KvdError, match=r"^no-room: 1 sessions are open on node-a"):
        await server.process(Attach("another"))
    back = await server.process(Attach("decode-0", resumes=TOKEN))

    assert back.attached.session == 3
    back.close()


async def test_who_is_refused_for_want_of_a_place_leaves_the_session_as_it_was(start):
    """The route that it would have had leads nowhere."""
    server = start(ELSEWHERE, per_session=1)

    with pytest.raises(KvdError, match=r"^no-room: 1 processes map the pool for session 3"):
        await server.process(Attach("decode-0", resumes=TOKEN))

    session = server.attach._sessions.of_token(TOKEN)
    assert session.route == TOKEN
    assert server.attach.session_of(session.route) is None


async def test_ten_thousand_leases_are_named_in_one_message(start):
    leases = tuple(range(4_000_000_000, 4_000_010_000))
    server = start(HERE, kept=leases)

    back = await server.process(Attach("decode-0", resumes=TOKEN, leases=leases))

    assert back.attached.leases == leases
    back.close()


# ---- the other processes of a session ------------------------------------------------------------


async def test_a_worker_is_told_to_try_again_until_its_session_is_back(start):
    server = start(HERE, ELSEWHERE)

    with pytest.raises(KvdError) as early:
        await server.process(Join(TOKEN))
    main = await server.process(Attach("decode-0", resumes=TOKEN))
    worker = await server.process(Join(TOKEN))

    assert early.value.refusal == Refusal(
        Code.UNREACHABLE,
        "session 3 is of before node-a was restarted, and the process that opened it has not come "
        "back yet: join again in a moment",
        side="node-a",
    )
    assert early.value.retryable
    assert worker.attached.token == TOKEN
    assert server.said[1:] == [("note joined", 3, os.getpid()), ("joined", 3)]
    main.close()
    worker.close()


async def test_a_session_lives_while_a_worker_of_before_may_map_the_pool(start):
    server = start(HERE, ELSEWHERE)
    main = await server.process(Attach("decode-0", resumes=TOKEN))

    main.close()
    again = await server.process(Attach("decode-0", resumes=TOKEN))

    assert again.attached.session == 3
    assert server.attach._sessions.awaited() == {3: (ELSEWHERE,)}
    server.attach._ends.dead(3, (ELSEWHERE,))
    assert ("gone", 3) not in server.said
    again.close()
    await server.hears("gone", 3)


async def test_a_session_that_is_hung_up_on_is_kept_by_workers_of_before(start):
    server = start(HERE, ELSEWHERE)
    main = await server.process(Attach("decode-0", resumes=TOKEN))

    server.attach.hang_up(3, Refusal(Code.CLIENT_GONE, "it reads nothing", side="node-a"))

    assert server.attach.session_of(main.attached.route) is None
    await server.hears("hung up on", 3, (HERE.pid, ELSEWHERE.pid))
    assert server.said[-1] == ("hung up on", 3, (HERE.pid, ELSEWHERE.pid))
    main.close()
    await server.hears("hung up on", 3, (ELSEWHERE.pid,))
    assert ("gone", 3) not in server.said


async def test_one_process_that_cannot_be_seen_stands_for_one_that_came_back(start):
    server = start(Process(0), Process(0))
    session = server.attach._sessions.of_token(TOKEN)
    back = await server.process(Attach("decode-0", resumes=TOKEN))

    assert session.awaited == (Process(0), Process(0))
    back_of_elsewhere = next(iter(session.connections))
    back_of_elsewhere.has_left = True
    session.drop(back_of_elsewhere)
    back_of_elsewhere.process = Process(0)
    assert session.take(back_of_elsewhere)
    assert session.awaited == (Process(0),)
    back.close()


# ---- deaths --------------------------------------------------------------------------------------


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


async def test_a_session_is_over_when_the_last_of_its_processes_is_dead(start, child):
    server = start(Process(child.pid, started_ticks(child.pid)))
    await asyncio.sleep(0)
    assert server.said == []

    child.kill()  # and not waited for: a zombie maps nothing

    await server.hears("gone", 3)
    assert server.said == [("note left", 3), ("gone", 3)]
    with pytest.raises(KvdError, match=r"^unknown-session: "):
        await server.process(Join(TOKEN))


async def test_nobody_is_looked_for_any_more_once_all_are_back(start):
    server = start(HERE)
    back = await server.process(Attach("decode-0", resumes=TOKEN))

    former = server.attach._ends._former
    former._look()
    assert former._next is None
    back.close()


def test_a_number_in_use_again_is_another_process(child):
    started = started_ticks(child.pid)
    assert started
    assert process_now(child.pid) == Process(child.pid, started)

    assert is_alive(Process(child.pid, started))
    assert not is_alive(Process(child.pid, started - 1))
    assert is_alive(Process(child.pid))
    assert is_alive(Process(0))
    child.kill()
    child.wait()
    assert not is_alive(Process(child.pid, started))
    assert not is_alive(Process(child.pid))
    assert process_now(child.pid) == Process(child.pid, 1)


# ---- what processes of before may still copy -----------------------------------------------------


async def test_a_session_is_whole_when_its_other_processes_are_back_or_dead(start):
    server = start(HERE, ELSEWHERE, ANOTHER)
    back = await server.process(Attach("decode-0", resumes=TOKEN))
    assert server.attach.whole == []

    server.attach._ends.dead(3, (ANOTHER,))
    assert server.attach.whole == []
    server.attach._ends.dead(3, (ELSEWHERE,))

    assert server.attach.whole == [3]
    server.attach._ends.dead(3, (ELSEWHERE,))
    assert server.attach.whole == [3]
    back.close()


async def test_a_session_of_one_process_is_whole_when_that_is_back(start):
    server = start(HERE)
    back = await server.process(Attach("decode-0", resumes=TOKEN))
    assert server.attach.whole == [3]
    back.close()


async def test_a_process_copies_no_more_when_it_has_left_or_is_dead_and_not_before(start):
    server = start(HERE)
    back = await server.process(Attach("decode-0", resumes=TOKEN))
    leaves = await server.process(Join(TOKEN))
    hangs_up = await server.process(Join(TOKEN))
    numbers = sorted(server.attach._by_number)

    leaves.close()
    await eventually(lambda: server.attach.workers_gone == [numbers[-2]])
    # Its process lives, so that it may still copy what it had begun.
    hangs_up._sock.close()
    await eventually(lambda: len(server.attach._connections) == 1)
    assert server.attach.workers_gone == [numbers[-2]]

    server.attach._ends.dead(3, (process_now(os.getpid()),))
    assert server.attach.workers_gone == numbers[-2:]
    back.close()
