"""A daemon at rest beats when something is due, and no promise of time is kept later for it."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.inputs import FromClient, FromPeer, Tick
from kvd.core.peers.peer import Life
from kvd.core.rest import TICK_S
from kvd.daemon.beats import REST_S, Beats
from kvd.daemon.reactor import Reactor
from kvd.observe.bus import Bus
from kvd.wire import admin, client
from kvd.wire.peer import Ping
from tests.core.side import tokens
from tests.core.test_message_cost import D, meeting


class Timer:
    """A timer that can be cancelled."""

    def __init__(self):
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class Clock:
    """A loop that has timers only, each of them a little late."""

    def __init__(self, seed):
        self.now_s = 0.0
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._timers = []

    def call_later(self, wait_s, call, *args):
        timer = Timer()
        late_s = self._random.random() * 1e-3
        due = (self.now_s + max(0.0, wait_s) + late_s, next(self._numbers))
        heapq.heappush(self._timers, (*due, timer, call, args))
        return timer

    def run(self, until_s):
        while self._timers and self._timers[0][0] <= until_s:
            self.now_s, _, timer, call, args = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                call(*args)
        self.now_s = until_s


class Resting:
    """A node that serves, with one peer that it hears every half second, and its beats."""

    def __init__(self, seed=0):
        self.clock = Clock(seed)
        self.node = meeting(serves_pulls=True)
        loaded = inputs.AgentLoaded(0.0, D, 1, path=inputs.WritePath.SAME_HOST)
        joined = inputs.ClientJoined(0.0, 1, "engine", 1001)
        for before in (loaded, joined):
            self.node.step(before)
        self.peer = self.node.peers.by_name["d"]
        self.reactor = Reactor(
            self.node, Bus(), clock=lambda: self.clock.now_s, on_bug=self.crashed
        )
        self.reactor.perform = dict.fromkeys(
            (effects.AnswerEngine, effects.AnswerOperator, effects.SendToPeer, effects.LoadAgent),
            lambda _: None,
        )
        self.beats_s = []
        self.is_watched = False
        self.beats = Beats(self.clock, self.reactor, beat=self.beat, dues=self.dues)
        self.beats.begin()

    def crashed(self, what, error):
        raise AssertionError(what) from error

    def dues(self):
        return [] if self.is_watched else [self.node.audit.due_s]

    def beat(self, now_s, lag_s):
        assert 0.0 <= lag_s < 2e-3
        self.beats_s.append(now_s)
        self.reactor.feed(Tick(now_s))
        self.reactor.feed(inputs.AuditTurn(now_s, 100_000, 0.0))

    def ping(self):
        ping = Ping(
            source=D,
            target=self.node.settings.incarnation,
            number=1,
            echo=1,
            offer_floor=0,
            settled_floor=0,
        )
        self.reactor.feed(FromPeer(self.clock.now_s, "in:d", ping))

    def run(self, until_s, *, pings=True):
        while self.clock.now_s + 0.5 <= until_s:
            self.clock.run(self.clock.now_s + 0.5)
            if pings:
                self.ping()
        self.clock.run(until_s)

    def gaps_s(self, since_s):
        late = [at_s for at_s in self.beats_s if at_s >= since_s]
        return [b - a for a, b in itertools.pairwise(late)]

    def request(self):
        self.reactor.feed(
            FromClient(self.clock.now_s, 1, client.OpenLease(call=1), tokens((1, 32)))
        )


def late_s(bound_s):
    """A beat that is due by then comes a moment later: the timers are late."""
    return bound_s + 2e-3


@pytest.mark.parametrize("seed", range(5))
def test_beats_are_few_at_rest_and_sweeps_and_pings_as_often_as_ever(seed):
    resting = Resting(seed)
    resting.run(1.0)
    sweeps, pings = resting.node.audit.sweeps, resting.node.peers.pulse.last_ping

    resting.run(31.0)

    assert max(resting.gaps_s(1.0)) <= late_s(REST_S)
    assert len(resting.gaps_s(1.0)) < 30 * 10
    assert resting.node.audit.sweeps - sweeps >= 30 / late_s(EVERY_S + TICK_S)
    assert resting.node.peers.pulse.last_ping - pings >= int(30 / late_s(0.5 + TICK_S))


@pytest.mark.parametrize("seed", range(20))
def test_a_silent_peer_is_suspected_and_lost_as_soon_as_with_beats_that_come_often(seed):
    resting = Resting(seed)
    resting.run(2.0 + random.Random(seed).random())
    resting.ping()
    heard_s, settings = resting.clock.now_s, resting.node.settings
    seen = {}
    while len(seen) < 2 and resting.clock.now_s < heard_s + 5.0:
        resting.clock.run(resting.clock.now_s + 1e-3)
        if resting.peer.life is not Life.UP:
            seen.setdefault(resting.peer.life, resting.clock.now_s - heard_s)

    assert settings.suspect_s <= seen[Life.SUSPECT] <= late_s(settings.suspect_s + TICK_S)
    assert settings.lost_s <= seen[Life.LOST] <= late_s(settings.lost_s + TICK_S)


def test_the_first_input_after_a_rest_has_its_beat_within_a_tick_and_so_have_all_behind_it():
    resting = Resting()
    resting.run(5.01)
    begun_s = resting.clock.now_s

    for _ in range(200):
        resting.request()
        resting.clock.run(resting.clock.now_s + 7e-3)

    assert min(at_s for at_s in resting.beats_s if at_s > begun_s) <= late_s(begun_s + TICK_S)
    assert max(resting.gaps_s(begun_s)) <= late_s(TICK_S)


def test_what_waits_with_a_deadline_keeps_beats_coming():
    resting = Resting()
    resting.run(5.01)
    everything = tokens((1, 63 * 16))
    open_all = client.OpenLease(call=1)
    resting.reactor.feed(FromClient(resting.clock.now_s, 1, open_all, everything))
    resting.reactor.feed(
        FromClient(resting.clock.now_s, 1, client.OpenLease(call=2), tokens((5000, 32)))
    )
    begun_s = resting.clock.now_s
    assert resting.node.admission.queue

    resting.run(begun_s + 3.0)

    assert max(resting.gaps_s(begun_s)) <= late_s(TICK_S)


def test_a_pull_that_nobody_answers_is_asked_again_and_ends_as_with_beats_that_come_often():
    resting = Resting()
    resting.run(5.01)
    begun_s = resting.clock.now_s
    asked = client.ReceiveRequest(call=1, room=0, source=("d",), deadline_s=2.0)
    resting.reactor.feed(FromClient(begun_s, 1, asked, tokens((1, 32))))
    assert resting.node.pulls.asks.by_id

    resting.run(begun_s + 3.0)

    waiting = [at_s for at_s in resting.beats_s if begun_s <= at_s <= begun_s + 2.0]
    assert max(b - a for a, b in itertools.pairwise(waiting)) <= late_s(TICK_S)
    assert not resting.node.pulls.asks.by_id


@pytest.mark.parametrize("ttl_s", [0.01, 1.3, 2.0, 7.77])
def test_a_pin_ends_as_soon_as_with_beats_that_come_often(ttl_s):
    resting = Resting()
    resting.request()
    lease = next(iter(resting.node.leases.leases.values()))
    resting.reactor.feed(
        FromClient(resting.clock.now_s, 1, client.CommitLease(call=2, lease=lease.id))
    )
    resting.run(5.01)
    begun_s = resting.clock.now_s
    edge = next(iter(resting.node.leases.tree.nodes()))
    pin = admin.Pin(call=3, kind="node", id=edge.id, ttl_s=ttl_s, who="ops")
    resting.reactor.feed(inputs.FromOperator(begun_s, b"ops", pin))
    assert resting.node.pins.by_id

    resting.run(begun_s + ttl_s + late_s(TICK_S))

    assert not resting.node.pins.by_id


def test_a_console_that_waits_for_frames_keeps_beats_coming():
    resting = Resting()
    resting.run(5.01)
    begun_s = resting.clock.now_s
    resting.is_watched = True
    resting.beats.stir()

    resting.run(begun_s + 1.0)

    assert max(resting.gaps_s(begun_s)) <= late_s(TICK_S)


def test_no_beat_comes_after_the_end():
    resting = Resting()
    resting.run(5.01)
    resting.beats.end()
    n_beats = len(resting.beats_s)

    resting.run(6.0)

    assert len(resting.beats_s) == n_beats
