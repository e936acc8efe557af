"""Receives from several sources by chance: whatever is lost, dies or changes its mind.

Checked after every step: I1 to I9, and that each page that lands is kept for that handoff. At the
end nothing is held, every delivered prompt is what was written, and the decode side's log replays,
frozen and thawed on the way. A failure names its seed. scenario A32, scenario F1, scenario G13.
"""

from __future__ import annotations

import random

import pytest

from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.wire import admin, client
from kvd.wire.peer import Abort, Accept, Closed, Integrity, Offer, Settled
from tests.core.engines import totals
from tests.core.world import Side, World, tokens

NAMES = ("p", "p1", "p2", "p3")
LOSABLE = (Abort, Accept, Closed, Offer, Settled)
PAGES = 200


class Weather:
    """One world and its dice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        names = NAMES[: self.rng.randint(2, 4)]
        self.world = World(
            sources=names,
            p_pages=PAGES,
            d_pages=PAGES,
            integrity=self.rng.choice((Integrity.OFF, Integrity.FULL, Integrity.SAMPLED)),
            sum_ahead_bytes=1,
            max_deadline_s=20.0,
        )
        self.names = names
        self.sends: list[tuple[Side, int, int, client.Leased, bytes]] = []
        self.prompts: dict[int, bytes] = {}
        self.room = 0
        self.delivered = 0

    def run(self, steps: int) -> None:
        verbs = (
            *(self.hand_off,) * 3,
            *(self.go_on,) * 16,
            *(self.wait,) * 3,
            self.cancel,
            self.weather,
            self.weather,
            self.restart,
            self.fence,
            self.land,
        )
        for _ in range(steps):
            self.rng.choice(verbs)()
            self.read()

    def hand_off(self) -> None:
        """A prompt, some of which may be cached here; from two sources or more, in any order."""
        rng, world = self.rng, self.world
        self.room += 1
        shared = rng.choice((0, 0, 16, 40, 64))
        toks = tokens((1, shared), (1000 * self.room, rng.randint(1, 120)))
        some = tuple(rng.sample(self.names, rng.randint(2, len(self.names))))
        reply = world.d.call(
            client.ReceiveRequest,
            toks,
            room=self.room,
            source=some,
            deadline_s=rng.choice((1.0, 3.0, 10.0)),
            cache=rng.random() < 0.9,
        )
        if isinstance(reply, client.Receiving):
            self.prompts[reply.receive] = toks
        for name in some:
            if rng.random() < 0.95:
                self.open(world.sides[name], toks)

    def open(self, side: Side, toks: bytes) -> None:
        lease = side.call(client.OpenLease, toks, session=side.sessions)
        if not isinstance(lease, client.Leased):
            return
        reply = side.call(
            client.SendRequest,
            toks,
            session=side.sessions,
            room=self.room,
            lease=lease.lease,
            deadline_s=self.rng.choice((2.0, 10.0)),
        )
        if isinstance(reply, client.Sending):
            self.sends.append((side, side.life, reply.send, lease, toks))
        else:
            side.call(client.ReleaseLease, session=side.sessions, lease=lease.lease)

    def go_on(self) -> None:
        """An engine advances, finishes or gives up."""
        if not self.sends:
            return
        index = self.rng.randrange(len(self.sends))
        side, life, send, lease, toks = self.sends[index]
        n_tokens, dice = len(toks) // 4, self.rng.random()
        session = side.sessions
        if life != side.life:
            self.sends.pop(index)
        elif dice < 0.4:
            upto = self.rng.randint(0, n_tokens)
            side.write(lease.pages, toks, end=upto)
            side.call(client.Advance, session=session, send=send, upto_tokens=upto)
        else:
            self.sends.pop(index)
            if dice < 0.98:
                side.write(lease.pages, toks)
                side.call(client.Finish, session=session, send=send, aux=side.name.encode())
            else:
                side.call(client.AbortSend, session=session, send=send, reason="no more")
            side.call(client.ReleaseLease, session=session, lease=lease.lease)

    def wait(self) -> None:
        self.world.pass_time(self.rng.choice((0.1, 0.3, 1.0)))

    def cancel(self) -> None:
        open_ones = list(self.world.d.node.decoder.open.attempts)
        if open_ones:
            number, session = self.rng.choice(open_ones), self.world.d.sessions
            self.world.d.call(client.CancelReceive, session=session, receive=number)

    def weather(self) -> None:
        """What is lost from now on, or that nothing is."""
        rng, world = self.rng, self.world
        world.lost = {rng.choice(LOSABLE)} if rng.random() < 0.2 else set()
        world.cut = {rng.choice(self.names)} if rng.random() < 0.1 else set()
        world.hold_posts = rng.random() < 0.3
        world.doubts = rng.random() < 0.3

    def restart(self) -> None:
        if self.rng.random() < 0.3:
            side = self.world.sides[self.rng.choice(self.names)]
            self.world.restart(side)
            side.attach()

    def fence(self) -> None:
        if self.rng.random() < 0.3:
            self.world.d.ask(admin.Fence(1))

    def land(self) -> None:
        self.world.hold_posts = False
        self.world.land_posts()

    def read(self) -> None:
        """Whatever was delivered is the prompt that was written, with the aux of a source."""
        for got in self.world.d.take():
            if isinstance(got, client.Received):
                assert self.world.d.holds(got.pages, self.prompts[got.receive])
                assert got.aux.decode() in self.names
                self.delivered += 1
                self.world.d.call(client.ReleaseLease, lease=got.lease)

    def calm(self) -> None:
        world = self.world
        world.lost, world.cut, world.doubts = set(), set(), False
        self.land()
        world.pass_time(45.0, tick_s=0.5)
        self.read()


def replayed(side: Side) -> None:
    """The log makes the same node, though it was frozen on the way."""
    again = NodeState(side.config, side.born_s)
    for number, happened in enumerate(side.log):
        if number % 50 == 25:
            frozen = freeze(again)
            again = thaw(frozen)
            assert freeze(again) == frozen
        again.step(happened)
    assert state_hash(again) == state_hash(side.node)


@pytest.mark.parametrize("first", range(0, 9, 3))
def test_receives_from_several_sources_are_whole_or_nothing_in_any_weather(first):
    delivered = 0
    for seed in range(first, first + 3):
        one = Weather(seed)
        try:
            one.run(steps=110)
            one.calm()
            node = one.world.d.node
            assert node.decoder.open.attempts == {}
            assert node.decoder.open.parts == {}
            free, held, cached, quarantined, evictable = totals(one.world.d)
            assert (held, quarantined) == (0, 0)
            assert (free + cached, evictable) == (PAGES - 1, cached)
            replayed(one.world.d)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        delivered += one.delivered
    assert delivered >= 4
