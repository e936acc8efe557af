"""Consoles without a socket: who is served in which beat, and who no more."""

from __future__ import annotations

import pytest

from kvd.console.server import ConsoleServer
from kvd.daemon.consoles import BEAT_S, Consoles
from kvd.observe.bus import Bus
from kvd.types import Sent
from kvd.wire.admin import Look
from kvd.wire.console import Query
from tests.core.world import World

FRAME_S = 0.001


class Room:
    """Consoles of a node, a clock, and what was sent to whom. A frame takes ``FRAME_S``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.sent: list[bytes] = []
        self.calls = 0
        self.ended: list[int | None] = []
        """By look, the call of the one before that it left without an answer."""
        self.outcome = Sent.TAKEN
        frame = ConsoleServer.frame

        def timed(server: ConsoleServer, *args: object) -> bytes:
            self.now_s += FRAME_S
            return frame(server, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(ConsoleServer, "frame", timed)
        node = World().d.node
        self.consoles = Consoles(node, Bus(), 0.03, lambda session: 0, lambda: self.now_s)

    def look(self, console: bytes, frames: int = 100) -> bool:
        """Whether it is answered at once."""
        self.calls += 1
        asked = Look(self.calls, (Query("pools"),), frames=frames, every_s=0.05)
        looked = self.consoles.look(console, asked)
        self.ended.append(looked.ended_call)
        return looked.frame is not None

    def beat(self) -> list[bytes]:
        """To whom one beat sends."""
        self.now_s += 0.05
        self.sent.clear()

        def send(console: bytes, _: bytes) -> Sent:
            self.sent.append(console)
            return self.outcome

        self.consoles.beat(send)
        return list(self.sent)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


def test_of_more_consoles_than_a_beat_has_time_for_all_have_their_turn(room):
    names = [b"%d" % number for number in range(12)]
    n_now = sum(room.look(name) for name in names)
    turns = [room.beat() for _ in range(5)]

    assert n_now == BEAT_S / FRAME_S
    assert {len(turn) for turn in turns} == {5}
    assert {name for turn in turns[:3] for name in turn} == set(names)


def test_a_look_that_the_next_one_ends_before_its_first_frame_is_named(room):
    for number in range(5):
        room.look(b"%d" % number)
    assert not room.look(b"late")
    assert not room.look(b"late")
    assert b"late" in room.beat() + room.beat()
    room.look(b"late")

    assert room.ended == [None] * 6 + [6, None]


def test_a_look_that_is_not_answered_at_once_is_with_the_next_beat(room):
    for number in range(5):
        assert room.look(b"%d" % number, frames=1)

    assert not room.look(b"late", frames=1)
    assert room.beat() == [b"late"]
    assert room.beat() == []


@pytest.mark.parametrize("outcome", [Sent.GONE, Sent.FULL])
def test_a_console_that_takes_no_frame_is_watched_for_no_more(room, outcome):
    room.look(b"one")
    room.outcome = outcome

    assert room.beat() == [b"one"]
    assert room.beat() == []
