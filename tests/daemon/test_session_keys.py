"""Processes that find their session by a key, and ranks that speak on the attach socket."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kvd.client.attachment import ask, take_answer
from kvd.core.effects import AnswerWorker
from kvd.daemon import attach as attach_module
from kvd.daemon import session_keys
from kvd.daemon.session_entries import AttachLimits
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import Attach, Join, RankAnswer, RankWritten
from kvd.wire.client import SayWritten
from tests.daemon.test_attach import (
    PROCESS,
    Daemon,
    arena,
    first_line,
    process,
    readable,
    until,
    with_daemon,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.core.inputs import FromWorker

__all__ = ["arena"]

KEYED = PROCESS.replace('Join(bytes.fromhex(token)) if token else Attach("worker")', "{request}")
SLOW_S = 30.0


async def waits(daemon: Daemon, request: Join):
    """The socket of a process that waits for its session."""
    sock = daemon.dial()
    ask(sock, request)
    before = daemon.server._keys.n_waiting(os.getuid())
    await until(lambda: daemon.server._keys.n_waiting(os.getuid()) == before + 1)
    return sock


async def answered(sock):
    await readable(sock)
    attachment = take_answer(sock)
    assert attachment is not None
    return attachment


# ---- keys ----------------------------------------------------------------------------------------


@with_daemon()
async def test_who_is_early_joins_when_the_session_is_there(daemon: Daemon) -> None:
    early = [await waits(daemon, Join(key="k", wait_s=SLOW_S, rank=n, ranks=2)) for n in (0, 1)]
    other = await waits(daemon, Join(key="another", wait_s=SLOW_S))

    main = await daemon.attach(Attach("decode-0", key="k"))
    joined = [await answered(sock) for sock in early]
    late = await daemon.attach(Join(key="k"))

    assert {one.attached.token for one in (*joined, late)} == {main.attached.token}
    me = os.getpid()
    assert daemon.said == [("opened", 1, "decode-0", me), *[("joined", 1, me)] * 3]
    assert daemon.server._keys.n_waiting(os.getuid()) == 1
    other.close()
    await until(lambda: daemon.server._keys.n_waiting(os.getuid()) == 0)
    for one in (main, *joined, late):
        one.close()
    await until(lambda: daemon.said[-1] == ("gone", 1))
    assert not daemon.server._keys._sessions
    assert not daemon.server._keys._waiting


@with_daemon()
async def test_a_wait_ends_and_says_with_what_to_connect(daemon: Daemon) -> None:
    sock = await waits(daemon, Join(key="k", wait_s=0.05))

    await readable(sock)
    with pytest.raises(KvdError) as caught:
        take_answer(sock)
    sock.close()

    assert caught.value.refusal == Refusal(
        Code.DEADLINE,
        f"no process of user {os.getuid()} has connected to node-a with the key 'k' within "
        "0.05 s: connect(name=..., key=...) in the process that opens leases, as the same user, or "
        "wait longer",
        side="node-a",
        numbers={"wait_s": 0.05, "uid": os.getuid()},
    )
    assert (await daemon.refusal_of(Join(key="k"))).code is Code.DEADLINE
    assert daemon.said == []


@with_daemon()
async def test_a_key_is_of_one_living_engine(daemon: Daemon) -> None:
    with process(daemon, "", KEYED.format(request='Attach("worker", key="k")')) as child:
        await first_line(child)

        refusal = await daemon.refusal_of(Attach("decode-1", key="k"))

        assert (refusal.code, refusal.numbers) == (
            Code.WRONG_STATE,
            {"session": 1, "pid": child.pid},
        )
        assert "whose pid" in refusal.message
    await until(lambda: ("gone", 1) in daemon.said)
    again = await daemon.attach(Attach("decode-1", key="k"))
    assert again.attached.session == 2
    again.close()


@with_daemon()
async def test_the_key_of_a_dead_opener_is_free_though_its_workers_live(daemon: Daemon) -> None:
    with process(daemon, "", KEYED.format(request='Attach("worker", key="k")')) as child:
        await first_line(child)
        worker = await daemon.attach(Join(key="k"))
    await until(lambda: len(daemon.server._connections) == 1)
    early = await waits(daemon, Join(key="k", wait_s=SLOW_S))

    again = await daemon.attach(Attach("worker", key="k"))

    joined = await answered(early)
    assert joined.attached.session == again.attached.session == 2
    joined.close()
    assert worker.attached.session == 1
    worker.close()
    await until(lambda: ("gone", 1) in daemon.said)
    # The end of the old session takes nothing from the new one.
    late = await daemon.attach(Join(key="k"))
    assert late.attached.session == 2
    late.close()
    again.close()


@with_daemon(AttachLimits(waiting_per_user=2))
async def test_few_of_one_user_wait(daemon: Daemon) -> None:
    socks = [await waits(daemon, Join(key=key, wait_s=SLOW_S)) for key in "ab"]

    refusal = await daemon.refusal_of(Join(key="c", wait_s=SLOW_S))

    assert (refusal.code, refusal.numbers) == (Code.NO_ROOM, {"waiting": 2, "limit": 2})
    for sock in socks:
        sock.close()
    await until(lambda: daemon.server._keys.n_waiting(os.getuid()) == 0)
    (await waits(daemon, Join(key="c", wait_s=SLOW_S))).close()


@with_daemon(AttachLimits(processes_per_session=2))
async def test_of_those_who_waited_too_many_are_refused(daemon: Daemon) -> None:
    early = [await waits(daemon, Join(key="k", wait_s=SLOW_S)) for _ in range(2)]

    main = await daemon.attach(Attach("decode-0", key="k"))

    joined = await answered(early[0])
    await readable(early[1])
    with pytest.raises(KvdError, match="no-room: 2 processes map the pool"):
        take_answer(early[1])
    for one in (main, joined, early[1]):
        one.close()


@with_daemon()
async def test_one_who_waits_and_says_more_waits_no_more(daemon: Daemon) -> None:
    sock = await waits(daemon, Join(key="k", wait_s=SLOW_S))

    ask(sock, Join(key="k", wait_s=SLOW_S))
    await until(lambda: daemon.server._keys.n_waiting(os.getuid()) == 0)
    sock.close()

    (await daemon.attach(Attach("decode-0", key="k"))).close()


@with_daemon()
async def test_the_key_of_another_user_is_another_key(daemon: Daemon) -> None:
    """The kernel says whose process connects; here every second one is somebody else's."""
    real, calls = attach_module.peer_credentials, []

    def credentials(sock):
        pid, uid = real(sock)
        calls.append(uid)
        return pid, uid + len(calls) % 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach_module, "peer_credentials", credentials)
        await each_joins_its_own(daemon)


async def each_joins_its_own(daemon: Daemon) -> None:
    first = await daemon.attach(Attach("decode-0", key="k"))

    second = await daemon.attach(Attach("decode-1", key="k"))
    third = await daemon.attach(Join(key="k"))
    fourth = await daemon.attach(Join(key="k"))

    assert [one.attached.session for one in (first, second, third, fourth)] == [1, 2, 1, 2]
    for one in (first, second, third, fourth):
        one.close()


@pytest.mark.parametrize(
    "request_",
    [
        Join(b"S" * 17, key="k"),
        Join(),
        Join(key="line\nbreak"),
        Join(key="k", wait_s=-1.0),
        Join(key="k", wait_s=float("nan")),
        Join(key="k", wait_s=3601.0),
        Join(key="k", rank=2, ranks=2),
        Join(key="k", rank=-1, ranks=2),
        Join(key="k", rank=0, ranks=1025),
        Attach("decode-0", key="\x1b[31mred"),
    ],
)
def test_what_nobody_could_join_by_is_refused(request_, tmp_path: Path, arena) -> None:
    async def run() -> Refusal:
        daemon = Daemon(tmp_path / "attach.sock", arena, AttachLimits())
        refusal = await daemon.refusal_of(request_)
        daemon.server.close()
        assert daemon.said == []
        return refusal

    assert asyncio.run(run()).code is Code.BAD_REQUEST


@pytest.mark.parametrize(
    ("uid", "uid_map", "is_alone"),
    [
        (1000, "0 100000 65536", True),
        (65534, "0 100000 65536", False),
        (65534, "         0          0 4294967295", True),
    ],
)
def test_users_that_a_namespace_does_not_map_look_alike(uid, uid_map, is_alone, monkeypatch):
    files = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": uid_map + "\n"}
    monkeypatch.setattr(session_keys.Path, "read_text", lambda path: files[str(path)])

    assert session_keys.is_told_apart(uid) is is_alone


# ---- ranks ---------------------------------------------------------------------------------------


class Speaking(Daemon):
    """What ranks say, answered as the test wants it."""

    def __init__(self, *rest) -> None:
        super().__init__(*rest)
        self.words: list[SayWritten] = []
        self.left: list[tuple[int, ...]] = []
        self.refuses: Refusal | None = None

    def worker_said(self, got: FromWorker) -> None:
        self.words.append(got.message)
        self.server.answer(AnswerWorker(got.worker, got.message.call, self.refuses))

    def rank_left(self, *what: int) -> None:
        self.left.append(what)


def with_speaker(body):
    """Run the test with such a daemon."""

    def test(tmp_path: Path, arena) -> None:
        async def run() -> None:
            daemon = Speaking(tmp_path / "attach.sock", arena, AttachLimits())
            await body(daemon)
            daemon.server.close()

        asyncio.run(run())

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


async def heard(attachment):
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(attachment.fileno(), ready.set)
    try:
        await asyncio.wait_for(ready.wait(), 5.0)
    finally:
        loop.remove_reader(attachment.fileno())
    return attachment.hear()


@with_speaker
async def test_a_rank_says_how_far_it_is_and_is_answered(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0", key="k"))
    ranks = [await daemon.attach(Join(key="k", rank=n, ranks=2)) for n in (0, 1)]

    ranks[1].say(RankWritten(5, 7, 96, b"e" * 64))
    assert await heard(ranks[1]) == RankAnswer(5)
    daemon.refuses = Refusal(Code.UNKNOWN_LEASE, "none", side="node-a")
    ranks[0].say(RankWritten(6, 8, 48))
    assert await heard(ranks[0]) == RankAnswer(6, daemon.refuses)

    assert daemon.words == [SayWritten(5, 7, 96, 1, 2, b"e" * 64), SayWritten(6, 8, 48, 0, 2)]
    assert main.hear() is None
    for one in (main, *ranks):
        one.close()


@with_speaker
async def test_who_is_no_rank_says_nothing_of_what_is_written(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0"))
    joined = await daemon.attach(Join(main.attached.token))

    for one in (main, joined):
        one.say(RankWritten(1, 7, 96))
        answer = await heard(one)
        assert isinstance(answer, RankAnswer)
        assert answer.refusal is not None
        assert answer.refusal.code is Code.WRONG_STATE

    assert daemon.words == []
    assert daemon.server.session_of(main.attached.token) == 1, "it is served on"
    main.close()
    joined.close()


@with_speaker
async def test_each_rank_joins_once_and_all_know_how_many_they_are(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0", key="k"))
    first = await daemon.attach(Join(key="k", rank=1, ranks=2))

    twice = await daemon.refusal_of(Join(key="k", rank=1, ranks=2))
    others = await daemon.refusal_of(Join(key="k", rank=0, ranks=4))

    assert (twice.code, twice.numbers) == (Code.WRONG_STATE, {"rank": 1, "pid": os.getpid()})
    assert (others.code, others.numbers) == (Code.BAD_REQUEST, {"ranks": 4, "session_ranks": 2})
    first.close()
    await until(lambda: daemon.left == [(1, 1, 2, os.getpid())])
    (await daemon.attach(Join(key="k", rank=1, ranks=2))).close()
    main.close()


@with_speaker
async def test_a_killed_rank_is_noticed_while_its_session_lives(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0", key="k"))
    source = KEYED.format(request='Join(key="k", rank=0, ranks=2)')
    with process(daemon, "", source) as child:
        await first_line(child)
        child.kill()
        took_s = await until(lambda: daemon.left == [(1, 0, 2, child.pid)])

    assert took_s < 1
    assert daemon.server.session_of(main.attached.token) == 1
    main.close()
    await until(lambda: daemon.said[-1] == ("gone", 1))
    assert len(daemon.left) == 1, "the last process is the end of the session, and not of a rank"


@with_speaker
async def test_what_is_no_word_shuts_its_process_out_and_wakes_it(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0", key="k"))
    rank = await daemon.attach(Join(key="k", rank=0, ranks=1))

    rank._sock.send(b"nonsense")

    refusal = await heard(rank)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.WRONG_STATE
    rank.say(RankWritten(1, 7, 96))
    await asyncio.sleep(0.05)
    assert daemon.words == []
    assert daemon.server.session_of(main.attached.token) == 1
    rank.close()
    main.close()


@with_speaker
async def test_who_does_not_read_its_answers_is_served_no_more(daemon: Speaking) -> None:
    main = await daemon.attach(Attach("decode-0", key="k"))
    rank = await daemon.attach(Join(key="k", rank=0, ranks=1))
    (connection,) = [one for one in daemon.server._connections if one.rank]
    daemon.refuses = Refusal(Code.UNKNOWN_LEASE, "x" * 60_000, side="node-a")

    for call in range(200):
        rank.say(RankWritten(call, 7, 96))
        await asyncio.sleep(0)
        if connection.is_shut:
            break
    await until(lambda: connection.is_shut)

    assert (os.getpid(), Code.CLIENT_GONE) in daemon.sent_away
    assert daemon.server.session_of(main.attached.token) == 1
    rank.close()
    main.close()
