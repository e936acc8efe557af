"""A peer that knows the room and not the prompt, in every order with what an honest pair does."""

from __future__ import annotations

import random

import pytest

from kvd.wire import client
from tests.core.engines import PROMPT
from tests.core.test_hostile_messages import shower, strangers
from tests.core.world import Side, World, tokens

OTHER = tokens((1, 99), (7, 1))


def meddle(world: World, stranger: Side, rng: random.Random) -> None:
    """Messages of any kind, Offers for the room by the rules, a restart, or only time."""
    for _ in range(rng.randint(0, 2)):
        dice = rng.random()
        if dice < 0.3:
            shower(world, (world.p, world.d), rng.randrange(2**20), stranger)
        elif dice < 0.7:
            deadline_s = rng.choice((0.3, 5.0))
            asked = {"room": 7, "source": ("p",), "deadline_s": deadline_s}
            stranger.call(client.ReceiveRequest, OTHER, **asked)
        elif dice < 0.9:
            world.pass_time(rng.choice((0.1, 0.4, 1.2)))
        else:
            world.restart(stranger)
            stranger.attach()


@pytest.mark.parametrize("seed", range(12))
def test_a_stranger_does_not_keep_two_engines_from_meeting(seed):
    rng = random.Random(seed)
    world, stranger = strangers()
    p, d = world.p, world.d
    lease = p.lease(PROMPT)
    p.write(lease.pages, PROMPT)
    peer = rng.choice(("d", None))
    meddle(world, stranger, rng)
    steps = [
        lambda: p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, peer=peer),
        lambda: d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)),
    ]
    rng.shuffle(steps)

    told = []
    for step in steps:
        told.append(step())
        meddle(world, stranger, rng)

    (send,) = [one.send for one in told if isinstance(one, client.Sending)]
    p.call(client.Finish, send=send, aux=b"x")
    meddle(world, stranger, rng)
    world.pass_time(1)
    (got,) = [one for one in d.take() if isinstance(one, client.Received)]
    assert d.holds(got.pages, PROMPT)
    assert got.aux == b"x"
