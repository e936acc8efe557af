"""Rooms that are kept, pulls and engines that want the same few pages: nobody gets others' KV.

Invariants are checked after every step of each node, by the world.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvd.core.audit.invariants import faults
from kvd.types import Tokens, count, page_ids
from kvd.wire import client, events
from kvd.wire.peer import Closed, Offer, PrefixFound, Withdrawn
from tests.core.world import PAGE, World, tokens

if TYPE_CHECKING:
    from tests.core.side import Side

PROMPTS = [tokens((1_000 * n, 3 * PAGE + 7 * (n % 3))) for n in range(1, 7)]
STEPS = 120

SHORT = tokens((1_000, 2 * PAGE))  # begins as the first of them


class Walk:
    """What two nodes and their engines do, as the dice say."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(
            names=("d", "e"), p_pages=20, d_pages=40, pull_offer_s=1.0, max_peer_pulls=4
        )
        self.leases: list[int] = []
        self.asked: dict[str, dict[int, Tokens]] = {"d": {}, "e": {}}
        self.received = 0

    def lease(self) -> None:
        prompt = self.rng.choice([*PROMPTS, SHORT])
        side = self.world.p
        # Now and then nearly all that there is.
        n_pages = self.rng.choice((0, 4, 14, 15))
        if n_pages > 4:
            while self.leases:
                self.release()
        reply = side.call(client.OpenLease, prompt, reserve_tokens=n_pages * PAGE, deadline_s=0.0)
        if not isinstance(reply, client.Leased):
            return
        # All of it, the reserve too: whoever still reads a page that is this one's now sees that.
        side.write(reply.pages, prompt, start=reply.prefix_tokens)
        for page in page_ids(reply.pages)[-(-count(prompt) // PAGE) :]:
            side.memory[page] = "somebody's"
        if self.rng.random() < 0.6:
            self.hand_over(reply.lease)
        elif self.rng.random() < 0.7:
            side.call(client.CommitAndRelease, lease=reply.lease)
        else:
            self.leases.append(reply.lease)

    def hand_over(self, lease: int) -> None:
        keeping = self.rng.choice(({"ttl_s": 3.0}, {"ttl_s": 3.0, "takers": 1}, {"takers": 2}, {}))
        self.world.p.call(
            client.HandOver,
            room=self.rng.randrange(1, 5),
            lease=lease,
            deadline_s=3.0,
            ends_lease=self.rng.random() < 0.8,
            **keeping,
        )
        if lease in self.world.p.node.leases.leases:
            self.leases.append(lease)

    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.world.p.call(client.ReleaseLease, lease=lease)

    def receive(self) -> None:
        side = self.world.sides[self.rng.choice("de")]
        prompt = self.rng.choice([*PROMPTS, SHORT])
        room = self.rng.choice((0, 0, 1, 2, 3, 4))
        self.asked[side.name][side.calls + 1] = prompt
        side.call(
            client.ReceiveRequest,
            prompt,
            room=room,
            source=("p",),
            cache=self.rng.random() < 0.5,
            deadline_s=2.0,
        )

    def look(self, side: Side) -> None:
        """What was received is what was asked for; then it is let go."""
        prompts = self.asked[side.name]
        numbers = {}
        for reply in side.answers:
            if isinstance(reply, client.Receiving):
                numbers[reply.receive] = prompts[reply.call]
        for reply in [one for one in side.answers if isinstance(one, client.Received)]:
            prompt, lease = numbers[reply.receive], side.node.leases.leases.get(reply.lease)
            if lease is None:
                continue
            assert prompt.startswith(lease.tokens)
            assert side.holds(reply.pages, lease.tokens), (side.name, reply)
            self.received += count(lease.tokens) > 0
            side.call(client.ReleaseLease, lease=reply.lease)

    def step(self) -> None:
        world, rng = self.world, self.rng
        rng.choice((self.lease, self.receive, self.receive, self.release))()
        if rng.random() < 0.3:
            world.lost = rng.choice((set(), {Offer}, {Offer, Withdrawn}, {Closed}, {PrefixFound}))
        if rng.random() < 0.15:
            world.hold_posts = not world.hold_posts
            if not world.hold_posts:
                world.land_posts()
        if rng.random() < 0.12:
            world.pass_time(rng.choice((0.1, 0.5, 1.5)))
        for name in ("d", "e"):
            self.look(world.sides[name])

    def end(self) -> None:
        world = self.world
        world.lost, world.hold_posts = set(), False
        world.land_posts()
        for lease in self.leases:
            world.p.call(client.ReleaseLease, lease=lease)
        world.pass_time(40, tick_s=0.5)
        for name in ("d", "e"):
            self.look(world.sides[name])


def test_leases_do_give_way_in_these_walks():
    gone = received = 0
    for seed in range(6):
        walk = Walk(seed)
        for _ in range(STEPS):
            walk.step()
        released = [one for one in walk.world.p.events if isinstance(one, events.LeaseReleased)]
        gone += sum(one.cause == "gave-way" for one in released)
        received += walk.received
    assert gone > 4
    assert received > 20


@pytest.mark.parametrize("seed", range(16))
def test_nobody_gets_the_kv_of_others_and_nothing_is_left(seed):
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    walk.end()

    for side in walk.world.sides.values():
        assert faults(side.node) == []
        assert side.node.leases.leases == side.node.leases.giving_way.leases == {}
    assert walk.world.p.node.prefiller.rooms.by_room == {}
    assert not walk.world.p.node.pull_source.open_pulls()
