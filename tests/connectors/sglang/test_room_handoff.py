"""Both sides of a handoff, without SGLang and without daemons: letters that are lost, and ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvd.client.handoff import Outcome
from kvd.connectors.sglang import room_handoff
from kvd.connectors.sglang.chains import PromptKeys
from kvd.connectors.sglang.room_handoff import (
    HandoffStage,
    HandoffTerms,
    IncomingKV,
    OutgoingKV,
    PageChunk,
)
from kvd.connectors.sglang.room_mail import RoomHeard, RoomOpen, RoomOver, RoomWanted
from kvd.errors import Code, Refusal

TERMS = HandoffTerms(7, 7, PromptKeys((), True), 0, "ns", 60.0)
WANTED = RoomWanted(7, 7, "ab", "d", 2, "decode", "ns", 0, True)
OVER = RoomOver(7, "ab", "d", 2, "given up")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(room_handoff, "AGAIN_S", 0.02)


class PlayedSend:
    outcome = None

    async def finish(self, _metadata):
        await asyncio.Event().wait()

    async def abort(self, why):
        self.why = why


class PlayedLink:
    """The loop is the test's; the node's calls are answered at once."""

    pages = None

    def __init__(self) -> None:
        self.sent = PlayedSend()
        self.begun = set()
        self.call_soon = asyncio.get_running_loop().call_soon

    def begin(self, task):
        self.begun.add(asyncio.ensure_future(task))

    async def here(self):
        node = SimpleNamespace(name="here", lease=self._lease, send=self._send)
        return SimpleNamespace(node=node, page_size=16, component="main")

    async def _lease(self, **_how):
        return SimpleNamespace(prefix_len=0, leave=lambda _pages: None)

    async def _send(self, *_args, **_how):
        return self.sent


class PlayedPost:
    here = ("p", 1)

    def __init__(self) -> None:
        self.told = []

    def post(self, host, port, letter, *, is_again=False):
        self.told.append((host, port, letter, is_again))

    def letters(self, kind):
        return [letter for _, _, letter, _ in self.told if isinstance(letter, kind)]


async def until(is_so):
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - of threads and tasks alike
            await asyncio.sleep(0.001)


async def opened():
    """The prefill side, whose room is open."""
    link, post = PlayedLink(), PlayedPost()
    outgoing = OutgoingKV(link, TERMS, post)
    outgoing.start()
    outgoing.read(WANTED)
    await until(lambda: outgoing.stage is HandoffStage.OPEN)
    return link, post, outgoing


def failed(handoff):
    return lambda: handoff.stage is HandoffStage.FAILED


def play_out(play):
    """Run it; what it has begun and did not wait for is dropped."""

    async def played():
        await play()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(played())


@pytest.mark.parametrize("is_first", [True, False])
def test_what_has_failed_stays_so(is_first):
    """A chunk that comes in the same turn of the loop as the word that all is over."""

    async def play():
        _, _, outgoing = await opened()
        calls = [lambda: outgoing.put(PageChunk(0, [], None, None)), lambda: outgoing.read(OVER)]
        for call in calls if is_first else reversed(calls):
            call()
        await until(failed(outgoing))
        await asyncio.sleep(0.05)
        assert outgoing.stage is HandoffStage.FAILED
        assert "given up" in outgoing.why

    play_out(play)


def test_that_it_is_over_is_told_until_it_is_heard():
    async def play():
        link, post, outgoing = await opened()
        outgoing.give_up("nobody wants it")
        await until(lambda: len(post.letters(RoomOver)) == 3)
        outgoing.read(RoomHeard(7, "ab", False, "decode"))
        await until(lambda: len(post.letters(RoomOver)) == 4)
        outgoing.read(RoomHeard(7, "ab", True, "decode"))
        await until(lambda: all(task.done() for task in link.begun))
        assert len(post.letters(RoomOver)) in {4, 5}
        assert [again for *_, told, again in post.told if isinstance(told, RoomOver)][:2] == [
            False,
            True,
        ]
        assert link.sent.why == "nobody wants it"

    play_out(play)


def test_nobody_is_told_for_ever():
    async def play():
        link, post, outgoing = await opened()
        outgoing.give_up("nobody wants it")
        await until(failed(outgoing))
        await until(lambda: all(task.done() for task in link.begun))
        assert len(post.letters(RoomOver)) == room_handoff.OVER_TIMES

    play_out(play)


def test_an_answer_that_was_lost_is_given_again():
    async def play():
        _, post, outgoing = await opened()
        outgoing.read(WANTED)
        await until(lambda: len(post.letters(RoomOpen)) == 2)
        assert not post.letters(RoomOver)

    play_out(play)


def test_a_send_that_has_ended_is_heard_while_pages_are_computed():
    async def play():
        link, post, outgoing = await opened()
        refusal = Refusal(Code.UNREACHABLE, "the other daemon has gone")
        link.sent.outcome = Outcome(
            committed=False, reason=refusal, decode_prefix_len=0, sent_pages=0, sent_bytes=0
        )
        await until(failed(outgoing))
        assert "has gone" in outgoing.why
        await until(lambda: post.letters(RoomOver))

    play_out(play)


def test_a_fault_is_told_as_any_failure():
    async def play():
        _, post, outgoing = await opened()
        outgoing.put(PageChunk(0, [1], None, None))
        await until(failed(outgoing))
        assert "a fault" in outgoing.why
        await until(lambda: post.letters(RoomOver))

    play_out(play)


def test_an_engine_that_does_not_hear_is_looked_up_anew():
    async def play():
        post = PlayedPost()
        incoming = IncomingKV(PlayedLink(), TERMS, post)
        asked = []

        def look_up():
            asked.append("asked")
            return ("new", 2) if len(asked) > 1 else None

        incoming.meets("old", 1, look_up)
        incoming.fill(0, [], lambda _metadata: None)
        await until(lambda: post.told and post.told[-1][0] == "new")
        assert [told[0] for told in post.told][:3] == ["old", "old", "new"]
        assert [told[3] for told in post.told][:3] == [False, True, True]
        for _ in range(3):
            n_told = len(post.told)
            incoming.read(RoomHeard(7, post.told[-1][2].life, False, "new"))
            await until(lambda n_told=n_told: len(post.told) > n_told)
        n_asked = len(asked)
        assert not post.told[-1][3]
        incoming.give_up("enough")
        await until(lambda: post.letters(RoomOver))
        assert post.told[-1][:2] == ("new", 2)
        assert len(asked) == n_asked

    play_out(play)


def test_an_engine_that_is_started_anew_knows_of_no_request_before():
    async def play():
        post = PlayedPost()
        incoming = IncomingKV(PlayedLink(), TERMS, post)
        incoming.meets("p", 1, lambda: None)
        incoming.fill(0, [], lambda _metadata: None)
        await until(lambda: post.told)
        life = post.told[0][2].life
        for engine in ("first", "first", "second"):
            assert incoming.stage is HandoffStage.MEETING
            incoming.read(RoomHeard(7, life, False, engine))
            await asyncio.sleep(0.01)
        await until(failed(incoming))
        assert "in its place" in incoming.why

    play_out(play)
