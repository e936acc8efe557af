"""The link against admin sockets: daemons that are there, silent, gone, and back."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import pytest

from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed, Because, Evict, Flush, Look, Report, Why
from kvd.wire.console import EventQuery
from tests.tui.frames import LEASES
from tests.tui.links import LIMIT_S, WANTED, Watched, running
from tui import link as link_module
from tui.link import Link
from tui.model.mirror import LinkConnecting, Mirror


async def test_frames_come_to_the_mirror(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror):
        await mirror.live()

    assert mirror.snapshot().table(LEASES).order == ("lease:1", "lease:2")
    assert daemon.asked[0] == Look(0, (LEASES,), EventQuery(0), link_module.FRAMES, 0.05)


async def test_one_look_is_under_way_and_no_more_than_are_painted(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.live()
        link.fps = 5.0
        await asyncio.sleep(1.0)

    assert 3 <= mirror.frames <= 8


async def test_somebody_in_a_hurry_does_not_wait_for_the_next_frame(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        link.fps = 0.01
        await mirror.live()
        for _ in range(20):
            before = mirror.frames
            link.hurry()
            await mirror.until(lambda _, before=before: mirror.frames > before)

    assert mirror.frames >= 20


def test_frames_come_more_rarely_where_painting_takes_long(endpoint):
    link = Link(endpoint, Mirror(), lambda: WANTED, fps=10.0)
    assert link.interval_s == 0.1

    for _ in range(50):
        link.painted(0.1)

    assert link.interval_s == pytest.approx(0.4, rel=0.01)


async def test_questions_and_verbs_are_answered_between_frames(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.live()
        evicted, refused = await asyncio.gather(
            link.ask(Evict(0, 100)), link.ask(Why(0, "lease", 8))
        )

    assert msgspec.structs.replace(evicted, call=0) == Report(0, {"evicted_pages": 100}, ())
    assert refused.refusal == Refusal(Code.UNKNOWN_LEASE, "there is no lease 8")


async def test_a_question_to_nobody_fails_at_once(endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.until(lambda one: one != LinkConnecting(""))
        answer = await link.ask(Flush(0))

    assert answer.refusal.message == "no daemon is connected, so nobody was asked"


async def test_a_daemon_that_is_not_there_is_waited_for(endpoint, path, process):
    mirror = Watched()
    async with running(endpoint, mirror):
        standing = await mirror.until(lambda one: one != LinkConnecting(""))
        assert standing == LinkConnecting(f"there is no socket at {path}")

        process()
        await mirror.live()


async def test_a_killed_daemon_is_down_and_its_successor_is_followed(endpoint, process):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        first = process("a" * 32)
        await mirror.live()

        first.kill()
        first.wait()
        await mirror.down("nobody listens on")
        assert isinstance(await link.ask(Why(0, "lease", 1)), AdminFailed)

        process("b" * 32)
        await mirror.live()

    assert mirror.vitals.incarnation == "b" * 32
    assert [one.kind for one in mirror.notices] == ["restart"]


async def test_a_stopped_daemon_is_said_to_be_silent_and_goes_on_by_itself(
    endpoint, process, monkeypatch
):
    """Nothing is heaped up for it: it has one question to answer when it goes on."""
    monkeypatch.setattr(link_module, "ANSWER_S", 0.3)
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        child = process()
        await mirror.live()

        child.send_signal(signal.SIGSTOP)
        standing = await mirror.down("no answer for more than 0.3 s")
        unanswered = await link.ask(Why(0, "lease", 1), limit_s=0.2)
        assert unanswered.refusal.message == "no answer within 0.2 s; it may yet be done"
        before = mirror.frames
        assert mirror.now() == standing

        child.send_signal(signal.SIGCONT)
        await mirror.live()
        answer = await link.ask(Why(0, "lease", 1))

    assert mirror.frames > before
    assert msgspec.structs.replace(answer, call=0) == Because(0, "it is asked for", ())
    assert list(mirror.notices) == []


async def test_a_question_that_is_open_when_the_daemon_dies_ends(endpoint, process):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        child = process()
        await mirror.live()
        child.send_signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(link.ask(Evict(0, 1), limit_s=LIMIT_S))
        await asyncio.sleep(0)

        child.kill()

        answer = await asked

    assert answer.refusal.message == (
        "the connection was lost before the answer; it may have been done"
    )


async def test_a_daemon_that_knows_no_looks_is_down_with_its_own_words(daemon, endpoint):
    daemon.answer = lambda _: AdminFailed(
        0, Refusal(Code.BAD_REQUEST, "no message of this socket: Invalid value 'look'")
    )
    mirror = Watched()
    async with running(endpoint, mirror):
        standing = await mirror.until(lambda one: one != LinkConnecting(""))

    assert standing == LinkConnecting(
        "the daemon refuses to be looked at: no message of this socket: Invalid value 'look'"
    )
