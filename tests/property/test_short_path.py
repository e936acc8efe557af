"""The short path of a lease does what the general one does: effects, events, and all state.

The short path serves pools with nothing beside the first component. So the same inputs go into a
node that may take it and into one that may not, and after each they must not be told apart.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from typing_extensions import override

from kvd.core.cache.eviction import Policy
from kvd.core.inputs import ClientHungUp, ClientJoined, FromClient, Tick
from kvd.core.leases.grants import Grants
from kvd.core.leases.holders import Holders
from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze
from kvd.types import Tokens, pack_ids
from kvd.wire import client
from tests.core.side import settings, spec
from tests.property.recorded import recorded
from tests.support.compiled import IS_COMPILED

PAGE = 4
SESSIONS = (1, 2)
STEPS = 400


class Pair:
    """Two nodes that take the same inputs; the second never takes the short path."""

    def __init__(self, of_settings, at_s=0.0):
        self.short, self.general = NodeState(of_settings, at_s), NodeState(of_settings, at_s)

    def step(self, happened):
        self.general.leases.has_short_path = False
        short, general = self.short.step(happened), self.general.step(happened)
        assert short.effects == general.effects, happened
        assert short.events == general.events, happened
        return short

    def compare(self):
        self.general.leases.has_short_path = self.short.leases.has_short_path
        assert freeze(self.short) == freeze(self.general)


@pytest.fixture
def taken(monkeypatch):
    """How often a lease was opened and ended on the short path."""
    counts = {"opened": 0, "ended": 0}
    opens, ends = Grants.open_lease, Holders.commit_and_release

    def opened(grants, claim):
        counts["opened"] += grants._leased.has_short_path
        return opens(grants, claim)

    def ended(holders, lease, new_tokens):
        is_done = ends(holders, lease, new_tokens)
        counts["ended"] += is_done
        return is_done

    monkeypatch.setattr(Grants, "open_lease", opened)
    monkeypatch.setattr(Holders, "commit_and_release", ended)
    return counts


class QueueingPair(Pair):
    """As above; and at the second everybody stands in the queue, if only for a moment."""

    OF_THE_QUEUE = ("_count", "_seen", "_soonest_s", "looks")
    """What it alone remembers of those who have gone."""

    def __init__(self, of_settings, at_s=0.0):
        super().__init__(of_settings, at_s)
        self.general.admission.at_once = lambda claim: None

    @override
    def compare(self):
        del self.general.admission.at_once
        for name in self.OF_THE_QUEUE:
            setattr(self.general.admission, name, getattr(self.short.admission, name))
        for short, general in zip(
            self.short.admission.queue, self.general.admission.queue, strict=True
        ):
            general.number = short.number
        aside = self.general.admission.side_queue
        for by_number in (aside.waiters, *aside.by_name.values()):
            waiters = list(by_number.values())
            by_number.clear()
            by_number.update({waiter.number: waiter for waiter in waiters})
        super().compare()
        self.general.admission.at_once = lambda claim: None


class Engines:
    """Two engines that ask for whatever comes to mind; prompts share beginnings."""

    def __init__(self, pair, seed):
        self.pair, self.random, self.at_s, self.call = pair, random.Random(seed), 1.0, 0
        self.leases = {}
        """By number, the session that has it."""
        self.asks = (
            (self.opens, 6), (self.commits_and_releases, 6), (self.commits, 2), (self.releases, 2),
            (self.extends, 2), (self.says, 1), (self.matches, 1), (self.retracts, 1),
            (self.resumes, 1), (self.sends, 1), (self.cancels, 1),
        )  # fmt: skip
        for session in SESSIONS:
            self.pair.step(ClientJoined(0.0, session, f"engine {session}", session))

    def act(self):
        draw = self.random
        self.at_s += draw.choice((0.0, 0.25, 1.0))
        if draw.random() < 0.1:
            self.pair.step(Tick(self.at_s))
        if draw.random() < 0.02:
            self.attach_again(draw.choice(SESSIONS))
        self.call += 1
        does, weights = zip(*self.asks, strict=True)
        draw.choices(does, weights)[0]()

    def attach_again(self, session):
        self.pair.step(ClientHungUp(self.at_s, session))
        self.pair.step(ClientJoined(self.at_s, session, f"engine {session}", session))

    def asks_for(self, message, tokens=b"", session=None):
        session = session or self.random.choice(SESSIONS)
        step = self.pair.step(FromClient(self.at_s, session, message, Tokens(tokens)))
        for effect in step.effects:
            answer = getattr(effect, "message", None)
            if isinstance(answer, client.Leased):
                self.leases[answer.lease] = effect.session

    def prompt(self, most=40):
        n_tokens = self.random.randrange(most)
        kind = self.random.randrange(3)
        at = self.random.randrange(0, 40)
        return pack_ids([kind + 10 * (place >= at) for place in range(n_tokens)])

    def a_lease(self):
        """Mostly a living one of its own session."""
        if not self.leases or self.random.random() < 0.03:
            return self.random.randrange(1, 30), self.random.choice(SESSIONS)
        return self.random.choice(list(self.leases.items()))

    def more(self):
        return self.prompt(6) if self.random.random() < 0.4 else b""

    def opens(self):
        draw = self.random
        message = client.OpenLease(
            self.call,
            draw.choice(("", "a")),
            draw.choice((0, 0, 3, 9)),
            draw.choice((0, 0, 0, 2)),
            draw.choice((0.5, 2.0)),
            draw.random() < 0.9,
        )
        self.asks_for(message, self.prompt())

    def commits_and_releases(self):
        lease, session = self.a_lease()
        message = client.CommitAndRelease(self.call, lease)
        if self.random.random() < 0.1:
            message = client.ReleaseUpTo(self.call, lease, self.random.randrange(40))
        self.asks_for(message, self.more(), session)

    def commits(self):
        lease, session = self.a_lease()
        message = client.CommitLease(self.call, lease)
        if self.random.random() < 0.5:
            upto, swaps = self.random.choice((None, 4, 8, 16)), self.random.random() < 0.5
            message = client.CommitUpTo(self.call, lease, upto, swaps)
        self.asks_for(message, self.more(), session)

    def releases(self):
        lease, session = self.a_lease()
        self.asks_for(client.ReleaseLease(self.call, lease), b"", session)

    def extends(self):
        lease, session = self.a_lease()
        self.asks_for(client.ExtendLease(self.call, lease, self.random.randrange(9)), b"", session)

    def says(self):
        lease, session = self.a_lease()
        upto, ranks = self.random.randrange(30), self.random.choice((1, 1, 2))
        message = client.SayWritten(self.call, lease, upto, self.random.randrange(ranks), ranks)
        self.asks_for(message, b"", session)

    def matches(self):
        self.asks_for(client.MatchPrefix(self.call, self.random.choice(("", "a"))), self.prompt())

    def retracts(self):
        lease, session = self.a_lease()
        self.asks_for(
            client.RetractLease(self.call, lease, self.random.choice(("host", "nothing"))),
            b"",
            session,
        )

    def resumes(self):
        lease, session = self.a_lease()
        self.asks_for(client.ResumeLease(self.call, lease), b"", session)

    def sends(self):
        lease, session = self.a_lease()
        known = self.pair.short.leases.leases.get(lease)
        tokens = known.tokens if known is not None else b"\0\0\0\0"
        namespace = known.namespace if known is not None else ""
        message = client.SendRequest(self.call, self.call, lease, namespace)
        self.asks_for(message, tokens, session)

    def cancels(self):
        self.asks_for(client.CancelCall(self.call, self.call - 1))


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("is_journaled", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_short_path_says_and_leaves_what_the_general_one_does(
    seed, is_journaled, policy, taken
):
    of_settings = msgspec.structs.replace(
        settings("p", 48, spec=spec(48, PAGE)), policy=policy, is_journaled=is_journaled
    )
    pair = Pair(of_settings)
    engines = Engines(pair, seed)
    for number in range(STEPS):
        engines.act()
        if number % 20 == 0:
            pair.compare()
    pair.compare()
    # What a compiled node has taken cannot be counted by methods of ours.
    assert IS_COMPILED or taken["opened"] > 10
    assert IS_COMPILED or taken["ended"] > 5


@pytest.mark.parametrize(
    ("seed", "profile"),
    [*((seed, "storm") for seed in range(300, 306)), *((seed, "calm") for seed in (306, 307))],
)
def test_a_storm_ends_the_same_without_the_short_path(seed, profile, taken):
    for life in recorded(seed, profile):
        pair = Pair(life.settings, life.born_s)
        effects, events = [], []
        for happened in life.log:
            step = pair.step(happened)
            effects += step.effects
            events += step.events
        pair.compare()
        assert effects == life.effects
        assert events == life.said
    assert IS_COMPILED or taken["opened"] > 0


@pytest.mark.skipif(IS_COMPILED, reason="a method of a compiled class cannot be replaced")
@pytest.mark.parametrize(
    ("seed", "profile"),
    [*((seed, "storm") for seed in range(308, 314)), *((seed, "calm") for seed in (314, 315))],
)
def test_a_storm_ends_the_same_where_everybody_queues(seed, profile):
    """A receive that is served at once hears and leaves what one does that waited for nothing."""
    n_offered = 0
    for life in recorded(seed, profile):
        pair = QueueingPair(life.settings, life.born_s)
        for happened in life.log:
            for effect in pair.step(happened).effects:
                n_offered += isinstance(getattr(effect, "message", None), client.Receiving)
        pair.compare()
    assert n_offered > 3
