"""Lines of those who wait for their turn, and who does not wait for them."""

from __future__ import annotations

import asyncio
import socket

from kvd.zmtp.acceptor import Acceptor
from kvd.zmtp.turns import FairTurns, TurnTaker, WriteBatch
from tests.zmtp.inn import Inn, on_uvloop, until


class Crowd(TurnTaker):
    """Stands in a line again and again, until it is told to stop."""

    def __init__(self, line, look):
        self.line, self.look = line, look
        self.is_over = False
        line.wait(self)

    def turn(self, messages):
        self.look()
        if not self.is_over:
            self.line.wait(self)


@on_uvloop
async def test_what_was_answered_goes_out_before_anybody_in_a_line_has_a_turn():
    """Else each call of an engine waits for a whole turn of a flood after it was carried out."""
    inn = Inn()
    guest = await inn.guest()
    (connection,) = inn.host.here
    await guest.hears()
    inn.host.answer = lambda who, message: who.send(message)
    unsent = []
    crowd = Crowd(FairTurns(inn.batch, 0.0005), lambda: unsent.append(connection.unsent_bytes))
    for _ in range(100):
        await guest.say(b"\0\1?")
        assert await guest.hears() == b"\0\1?"
    crowd.is_over = True

    assert len(unsent) > 100
    assert not any(unsent)


@on_uvloop
async def test_who_is_not_kept_is_timed_from_the_first_on():
    batch = WriteBatch(asyncio.get_running_loop())
    strangers, kept = FairTurns(batch, 0.0, untimed=1), FairTurns(batch, 0.0)

    assert [strangers.is_open() for _ in range(3)] == [True, False, False]
    assert [kept.is_open() for _ in range(9)] == [True] * 8 + [False]
    await asyncio.sleep(0.01)
    assert strangers.is_open()
    assert kept.is_open()


@on_uvloop
async def test_connections_are_accepted_in_the_line_of_those_who_come():
    """What it takes to accept them is a part of what strangers may take in a round."""
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    address = listening.getsockname()
    rounds = [set()]
    line = FairTurns(WriteBatch(loop), 0.0, untimed=1)  # one turn in each round
    crowd = Crowd(line, lambda: rounds[-1].add("a turn"))
    came = []

    def take(sock, _):
        rounds[-1].add("accepted")
        came.append(sock)

    def next_round():
        rounds.append(set())
        if not crowd.is_over:
            loop.call_soon(next_round)

    acceptor = Acceptor(loop, listening, take, turns=line)
    next_round()
    guests = [socket.create_connection(address) for _ in range(32)]
    await until(lambda: len(came) == len(guests))
    crowd.is_over = True
    acceptor.close()
    await asyncio.sleep(0.01)
    for sock in (*came, *guests):
        sock.close()

    assert {"accepted"} in rounds
    assert {"accepted", "a turn"} not in rounds


@on_uvloop
async def test_who_closes_while_it_stands_in_line_accepts_nobody():
    loop, raised = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    listening = socket.create_server(("127.0.0.1", 0))
    line, came = FairTurns(WriteBatch(loop), 0.0, untimed=1), []
    acceptor = Acceptor(loop, listening, lambda sock, _: came.append(sock), turns=line)
    with socket.create_connection(listening.getsockname()):
        line.wait(acceptor)
        acceptor.close()
        await asyncio.sleep(0.01)

    assert not raised
    assert not came
