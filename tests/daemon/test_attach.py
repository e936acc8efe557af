"""The attach socket, both ends: memory goes out, deaths come in, hostile packets change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from kvd import __version__
from kvd.client.attachment import Attachment, ask, dial, take_answer
from kvd.core.inputs import Heir
from kvd.core.layout.spec import Component, Mha, Nowhere, PageOrder, PoolSpec, Raw
from kvd.daemon.attach import DEFAULT_LIMITS
from kvd.daemon.session_entries import AttachLimits
from kvd.errors import Code, KvdError, Refusal
from kvd.journal.engines import Process
from kvd.pools.arena import Arena, reserve
from kvd.pools.build import pool_memory
from kvd.wire.attach import PROTOCOL, Attach, Attached, AttachRequest, Join
from tests.support.attaching import AttachListener, ListenedAttach
from tests.support.descriptors import none_left

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path


POOL = pool_memory(
    PoolSpec(
        "main",
        "mha",
        PageOrder.PAGE_FIRST,
        (
            Component("kv", 2, Mha(2, 8, 8, "bfloat16"), 4),
            Component("ghost", 1, Raw(64), 4, tier=Nowhere()),
        ),
        (8, 8),
    )
)

PROCESS = """
import select, sys
from kvd.client.attachment import ask, dial, take_answer
from kvd.wire.attach import Attach, Join

path, token = sys.argv[1:]
sock = dial(path)
ask(sock, Join(bytes.fromhex(token)) if token else Attach("worker"))
select.select([sock], [], [])
attachment = take_answer(sock)
print(attachment.attached.token.hex(), flush=True)
sys.stdin.read()
"""

WORDLESS = PROCESS.replace("sys.stdin.read()", "attachment._sock.close(); sys.stdin.read()")
"""It closes its connection and lives on, with the pool mapped."""


HEIR = """
import os, sys, time
import select
from kvd.client.attachment import ask, dial, take_answer
from kvd.wire.attach import Join

path, token = sys.argv[1:]
sock = dial(path)
ask(sock, Join(bytes.fromhex(token), rank=1, ranks=2))
select.select([sock], [], [])
attachment = take_answer(sock)
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
time.sleep(60)
"""
"""Joins as a rank; its child has its connection."""


class Daemon(AttachListener):
    """A server on this loop, and everything it said to the reactor, in order."""

    def __init__(self, path: Path, arena: Arena, limits: AttachLimits) -> None:
        self.path = str(path)
        self.said: list[tuple[object, ...]] = []
        self.sent_away: list[tuple[int, Code]] = []
        self.server = ListenedAttach(
            self.path, self, (POOL,), [arena.fd], incarnation="1" * 32, limits=limits
        )
        self.server.serve(asyncio.get_running_loop())

    def opened(self, session: int, name: str, pid: int) -> None:
        self.said.append(("opened", session, name, pid))

    def joined(self, session: int, pid: int) -> None:
        self.said.append(("joined", session, pid))

    def gone(self, session: int) -> None:
        self.said.append(("gone", session))

    def hung_up_on(self, session: int, why: Refusal, pids: tuple[int, ...]) -> None:
        self.said.append(("hung up on", session, why.code, pids))

    def rank_left(self, session: int, rank: int, ranks: int, pid: int) -> None:
        self.said.append(("rank left", session, rank, ranks, pid))

    def refused(self, pid: int, why: Refusal) -> None:
        self.sent_away.append((pid, why.code))

    async def attach(self, request: AttachRequest) -> Attachment:
        """Attach from this process."""
        sock = self.dial()
        ask(sock, request)
        await readable(sock)
        try:
            attachment = take_answer(sock)
        except KvdError:
            sock.close()
            raise
        assert attachment is not None
        return attachment

    async def refusal_of(self, request: AttachRequest) -> Refusal:
        """Attach and be refused."""
        with pytest.raises(KvdError) as caught:
            await self.attach(request)
        return caught.value.refusal

    def dial(self) -> socket.socket:
        sock = dial(self.path)
        assert sock is not None
        return sock


def with_daemon(
    limits: AttachLimits = DEFAULT_LIMITS,
) -> Callable[[Callable[[Daemon], Awaitable[None]]], Callable[..., None]]:
    """Run the test on asyncio and on uvloop, with a daemon; at the end no descriptor is left."""

    def decorate(body: Callable[[Daemon], Awaitable[None]]) -> Callable[..., None]:
        @pytest.mark.parametrize(
            "loop_factory",
            [asyncio.new_event_loop, uvloop.new_event_loop],
            ids=["asyncio", "uvloop"],
        )
        def test(
            loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, arena: Arena
        ) -> None:
            async def run() -> None:
                with none_left():
                    daemon = Daemon(tmp_path / "attach.sock", arena, limits)
                    await body(daemon)
                    daemon.server.close()

            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(run())
            assert not (tmp_path / "attach.sock").exists()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


@pytest.fixture
def arena() -> Iterator[Arena]:
    own = reserve("kv", 1)
    yield own
    own.close()


async def readable(sock: socket.socket, *, within_s: float = 5.0) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await asyncio.wait_for(ready.wait(), within_s)
    finally:
        loop.remove_reader(sock.fileno())


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> float:
    """Let the loop run until ``condition`` holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, "it did not happen in time"
        await asyncio.sleep(0.002)
    return time.monotonic() - start


@contextlib.contextmanager
def process(
    daemon: Daemon, token: str = "", source: str = PROCESS
) -> Iterator[subprocess.Popen[str]]:
    """Another process that attaches, or joins the session of ``token``, and stays."""
    with subprocess.Popen(
        [sys.executable, "-c", source, daemon.path, token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


async def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return (await asyncio.to_thread(child.stdout.readline)).strip()


# ---- the way in ----------------------------------------------------------------------------------


@with_daemon()
async def test_attach_passes_the_memory_and_a_token(daemon: Daemon) -> None:
    attachment = await daemon.attach(Attach("decode-0"))

    token = attachment.attached.token
    assert attachment.attached == Attached(
        1, token, "node-a", "1" * 32, (POOL,), version=__version__, hears_waits=True
    )
    assert (len(token), token[:1]) == (17, b"S")
    assert daemon.said == [("opened", 1, "decode-0", os.getpid())]
    assert (daemon.server.session_of(token), daemon.server.session_of(b"S")) == (1, None)
    with mmap.mmap(attachment.memory_fd("main", "kv"), 4096) as memory:
        assert memory[:4] == bytes(4)

    attachment.close()
    await until(lambda: daemon.said[1:] == [("gone", 1)])
    assert daemon.server.session_of(token) is None


@with_daemon()
async def test_memory_fd_says_what_there_is_when_asked_for_something_else(daemon: Daemon) -> None:
    attachment = await daemon.attach(Attach("decode-0"))

    with pytest.raises(KvdError, match=r"main.ghost has no memory here; there is: main.kv$"):
        attachment.memory_fd("main", "ghost")
    attachment.close()


@with_daemon()
async def test_each_session_has_a_number_and_a_token_of_its_own(daemon: Daemon) -> None:
    attachments = [await daemon.attach(Attach(f"engine-{n}")) for n in range(20)]

    tokens = [one.attached.token for one in attachments]
    assert [daemon.server.session_of(token) for token in tokens] == list(range(1, 21))
    assert len(set(tokens)) == 20
    for one in attachments:
        one.close()
    await until(lambda: len(daemon.said) == 40)
    assert sorted(daemon.said[20:]) == [("gone", number) for number in range(1, 21)]


# ---- deaths --------------------------------------------------------------------------------------


@with_daemon()
async def test_a_killed_process_is_noticed_within_a_second(daemon: Daemon) -> None:
    """SIGKILL leaves nothing to say goodbye: the kernel's hang-up is the news."""
    with process(daemon) as child:
        token = bytes.fromhex(await first_line(child))
        assert daemon.server.session_of(token) == 1

        child.send_signal(signal.SIGKILL)
        took_s = await until(lambda: daemon.server.session_of(token) is None)

    assert took_s < 1
    assert daemon.said == [("opened", 1, "worker", child.pid), ("gone", 1)]


@with_daemon()
async def test_a_session_lives_until_its_last_process_has_died(daemon: Daemon) -> None:
    """A tensor-parallel worker that maps the pool may outlive the process that attached."""
    with process(daemon) as first:
        token = await first_line(first)
        with process(daemon, token) as second:
            assert await first_line(second) == token

            first.kill()
            await asyncio.to_thread(first.wait)
            await until(lambda: len(daemon.server._connections) == 1)
            assert daemon.server.session_of(bytes.fromhex(token)) == 1

            second.kill()
            assert await until(lambda: len(daemon.said) == 3) < 1

    assert daemon.said == [
        ("opened", 1, "worker", first.pid),
        ("joined", 1, second.pid),
        ("gone", 1),
    ]


@with_daemon()
async def test_processes_hear_the_daemon_hang_up(daemon: Daemon) -> None:
    attachment = await daemon.attach(Attach("decode-0"))
    assert attachment.last_word() is None

    daemon.server.close()
    await asyncio.sleep(0)

    word = attachment.last_word()
    assert word is not None
    assert (word.code, word.message[:16]) == (Code.UNREACHABLE, "node-a hung up: ")
    assert daemon.said == [("opened", 1, "decode-0", os.getpid())]
    attachment.close()


# ---- refusals ------------------------------------------------------------------------------------


@with_daemon()
async def test_join_is_refused_when_the_session_has_ended(daemon: Daemon) -> None:
    refusal = await daemon.refusal_of(Join(b"S" + bytes(16)))

    assert refusal == Refusal(
        Code.UNKNOWN_SESSION,
        "node-a has no session of this token: it ended with its last process, or the daemon was "
        "restarted; attach anew",
        side="node-a",
    )
    assert daemon.said == []


@with_daemon()
async def test_another_protocol_is_refused_with_both_versions(daemon: Daemon) -> None:
    refusal = await daemon.refusal_of(Attach("decode-0", protocol=7))

    assert (refusal.code, refusal.numbers) == (
        Code.VERSIONS_DIFFER,
        {"client": 7, "daemon": PROTOCOL},
    )
    assert "speaks protocol 7, node-a is kvd" in refusal.message


@pytest.mark.parametrize("name", ["", "x" * 129, "line\nbreak", "\x1b[31mred"])
def test_a_name_that_no_table_could_show_is_refused(
    name: str, tmp_path: Path, arena: Arena
) -> None:
    async def run() -> Refusal:
        daemon = Daemon(tmp_path / "attach.sock", arena, AttachLimits())
        refusal = await daemon.refusal_of(Attach(name))
        daemon.server.close()
        return refusal

    assert asyncio.run(run()).code is Code.BAD_REQUEST


@with_daemon(AttachLimits(max_sessions=2))
async def test_sessions_are_limited_and_a_freed_one_can_be_had(daemon: Daemon) -> None:
    first, second = [await daemon.attach(Attach("engine")) for _ in range(2)]
    refusal = await daemon.refusal_of(Attach("engine"))
    first.close()
    await until(lambda: ("gone", 1) in daemon.said)
    third = await daemon.attach(Attach("engine"))

    assert (refusal.code, refusal.message) == (
        Code.NO_ROOM,
        "2 sessions are open on node-a, which is its limit: end some, or raise limits.max_clients",
    )
    assert third.attached.session == 3
    second.close()
    third.close()
    await until(lambda: len(daemon.said) == 6)


@with_daemon(AttachLimits(max_sessions=1, processes_per_session=1))
async def test_processes_are_limited(daemon: Daemon) -> None:
    first = await daemon.attach(Attach("engine"))
    sock = daemon.dial()
    await readable(sock)

    with pytest.raises(KvdError, match=r"^no-room: 1 processes are attached to node-a"):
        take_answer(sock)
    sock.close()
    first.close()
    await until(lambda: len(daemon.said) == 2)


@with_daemon(AttachLimits(request_within_s=0.05))
async def test_a_silent_connection_is_closed_with_words(daemon: Daemon) -> None:
    sock = daemon.dial()
    await readable(sock)

    with pytest.raises(KvdError, match=r"^deadline: pid \d+ connected and said nothing for 0.05 s"):
        take_answer(sock)
    sock.close()
    assert daemon.said == []


@pytest.mark.parametrize("length", [1, 40, 5_000])
def test_garbage_gets_a_typed_answer_and_harms_nobody(
    length: int, tmp_path: Path, arena: Arena
) -> None:
    async def run() -> None:
        daemon = Daemon(tmp_path / "attach.sock", arena, AttachLimits())
        honest = await daemon.attach(Attach("honest"))
        sock = daemon.dial()
        sock.sendmsg([b"\xc1" * length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"\0\0\0\0")])
        sock.send(b"and more")
        await readable(sock)
        with pytest.raises(KvdError) as caught:
            take_answer(sock)
        sock.close()

        assert caught.value.code in {"bad-request", "too-large"}
        assert daemon.said == [("opened", 1, "honest", os.getpid())]
        honest.close()
        daemon.server.close()

    asyncio.run(run())


@with_daemon()
async def test_a_process_that_keeps_talking_is_sent_away(daemon: Daemon) -> None:
    sock = daemon.dial()
    ask(sock, Attach("chatty"))
    await readable(sock)
    attachment = take_answer(sock)
    assert attachment is not None
    ask(sock, Attach("chatty"))
    await readable(sock)

    word = attachment.last_word()
    assert word is not None
    assert word.code is Code.WRONG_STATE
    assert daemon.sent_away == [(os.getpid(), Code.WRONG_STATE)]
    ask(sock, Attach("chatty"))
    shut = ("hung up on", 1, Code.WRONG_STATE, (os.getpid(),))
    assert daemon.said == [("opened", 1, "chatty", os.getpid()), shut]
    assert daemon.server.session_of(attachment.route) is None
    attachment.close()
    await until(lambda: daemon.said[-1] == ("gone", 1))


@with_daemon()
async def test_a_process_that_closes_its_socket_without_a_word_is_awaited_until_it_is_dead(
    daemon: Daemon,
) -> None:
    with process(daemon, source=WORDLESS) as child:
        token = bytes.fromhex(await first_line(child))

        await until(lambda: daemon.said[-1][0] == "hung up on")

        assert daemon.said[1:] == [("hung up on", 1, Code.CLIENT_GONE, (child.pid,))]
        assert daemon.server.session_of(token) is None
        assert (await daemon.refusal_of(Join(token))).code is Code.CLIENT_GONE
        child.kill()
        assert await until(lambda: daemon.said[-1] == ("gone", 1)) < 1


@with_daemon()
async def test_a_process_that_cannot_be_seen_is_gone_when_it_hangs_up(daemon: Daemon) -> None:
    """Of another pid namespace: so its connection is kept open when it is hung up on."""
    attachment = await daemon.attach(Attach("contained"))
    [connection] = daemon.server._connections
    connection.process = Process(0)
    daemon.server.hang_up(1, Refusal(Code.CLIENT_GONE, "it reads nothing"))
    await until(lambda: daemon.said[-1] == ("hung up on", 1, Code.CLIENT_GONE, (0,)))

    attachment._sock.close()

    await until(lambda: daemon.said[-1] == ("gone", 1))
    attachment.close()


@with_daemon()
async def test_a_process_that_leaves_is_gone_at_once_though_it_lives(daemon: Daemon) -> None:
    attachment = await daemon.attach(Attach("decode-0"))

    attachment.close()

    await until(lambda: len(daemon.said) == 2)
    assert daemon.said[1:] == [("gone", 1)]


@with_daemon()
async def test_a_session_that_is_hung_up_on_ends_with_its_last_process(daemon: Daemon) -> None:
    with process(daemon) as child:
        token = await first_line(child)
        with process(daemon, token) as worker:
            await first_line(worker)
            why = Refusal(Code.CLIENT_GONE, "it reads nothing", side="node-a")

            daemon.server.hang_up(1, why)
            daemon.server.hang_up(1, why)
            child.kill()
            await until(lambda: len(daemon.said) == 4)
            assert daemon.said[-1] == ("hung up on", 1, Code.CLIENT_GONE, (worker.pid,))
            refused = await daemon.refusal_of(Join(bytes.fromhex(token)))
            worker.kill()
            assert await until(lambda: daemon.said[-1] == ("gone", 1)) < 1
    assert refused == why
    assert len(daemon.said) == 5


@with_daemon()
async def test_nobody_speaks_for_a_rank_whose_forked_child_lives_until_another_joins(
    daemon: Daemon,
) -> None:
    main = await daemon.attach(Attach("decode-0"))
    with process(daemon, main.attached.token.hex(), HEIR) as dead:
        child = int(await first_line(dead))
        dead.kill()
        await until(lambda: bool(daemon.server.left), within_s=20)
        assert daemon.said[-1] == ("rank left", 1, 1, 2, dead.pid)
        assert daemon.server.left[-1].heirs == (Heir(pid=child, of_pid=dead.pid),)
        assert set(daemon.server.left[-1].pids) == {os.getpid(), child}
        # One that takes its place is not the one that is gone.
        again = await daemon.attach(Join(main.attached.token, rank=1, ranks=2))
        os.kill(child, signal.SIGKILL)
        await until(lambda: len(daemon.server._connections) == 2)
        await until(lambda: set(daemon.server.left[-1].pids) == {os.getpid()})
        assert sum(said[0] == "rank left" for said in daemon.said) == 1
        again.close()
        await until(lambda: sum(said[0] == "rank left" for said in daemon.said) == 2)
    main.close()
    await until(lambda: daemon.said[-1] == ("gone", 1))


@with_daemon(AttachLimits(processes_per_session=2))
async def test_processes_of_one_session_are_limited_and_one_that_left_makes_room(
    daemon: Daemon,
) -> None:
    main = await daemon.attach(Attach("decode-0"))
    worker = await daemon.attach(Join(main.attached.token))

    refusal = await daemon.refusal_of(Join(main.attached.token))
    worker.close()
    await until(lambda: len(daemon.server._connections) == 1)
    another = await daemon.attach(Join(main.attached.token))

    assert (refusal.code, refusal.numbers) == (Code.NO_ROOM, {"limit": 2})
    assert "2 processes map the pool for session 1 of node-a" in refusal.message
    another.close()
    main.close()
    await until(lambda: daemon.said[-1] == ("gone", 1))


@with_daemon()
async def test_a_description_too_long_for_a_packet_is_an_error_with_its_size(
    daemon: Daemon,
) -> None:
    entries = daemon.server._entries
    entries._memory = entries._memory._replace(pools=(POOL,) * 30_000)

    refusal = await daemon.refusal_of(Attach("engine"))

    assert refusal.code is Code.INTERNAL
    assert "Message too long" in refusal.message
    assert daemon.said == [("opened", 1, "engine", os.getpid()), ("gone", 1)]
