"""How many messages a handoff and a lease take, on each socket: the table of the documentation.

A message costs both of its ends more than what is done because of it, so each one more is a choice.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from kvd.core import effects, inputs
from kvd.wire import client
from tests.core.engines import FULL, cached
from tests.core.world import World

if TYPE_CHECKING:
    from kvd.core.effects import Step
    from tests.core.side import Side


class Counting(World):
    """Counts messages from the moment on that it is told to."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        super().__init__()

    @override
    def happened(self, side: Side, happened: inputs.Input, step: Step) -> None:
        self.counts[f"{side.name} asked"] += isinstance(happened, inputs.FromClient)
        for effect in step.effects:
            self.counts[f"{side.name} told"] += isinstance(effect, effects.AnswerEngine)
            self.counts["peers"] += isinstance(effect, effects.SendToPeer)

    def counted(self) -> dict[str, int]:
        return {name: n for name, n in sorted(self.counts.items()) if n}


def full_hit(way: str, *, finished_first: bool) -> dict[str, int]:
    """From the lease of the prefill engine to the end of both leases."""
    world = Counting()
    p, d = world.p, world.d
    cached(p, FULL)
    cached(d, FULL)
    world.counts.clear()
    lease = p.lease(FULL).lease
    if not finished_first:
        d.call(client.ReceiveRequest, FULL, room=7, source=("p",))
    if way == "hand over":
        p.call(client.HandOver, room=7, lease=lease, aux=b"aux", ends_lease=True)
    else:
        sending = p.call(client.SendRequest, FULL, room=7, lease=lease)
        assert isinstance(sending, client.Sending)
        if way == "finish and release":
            p.call(client.FinishAndRelease, send=sending.send, aux=b"aux")
        else:
            p.call(client.Finish, send=sending.send, aux=b"aux")
            p.call(client.CommitAndRelease, lease=lease)
    if finished_first:
        d.call(client.ReceiveRequest, FULL, room=7, source=("p",))
    (received,) = [one for one in d.answers if isinstance(one, client.Received)]
    d.call(client.ReleaseLease, lease=received.lease)
    return world.counted()


@pytest.mark.parametrize(
    ("way", "asked", "told"),
    [("send, finish, release", 4, 5), ("finish and release", 3, 4), ("hand over", 2, 2)],
)
@pytest.mark.parametrize("finished_first", [True, False])
def test_messages_of_a_full_hit_are_those_of_the_table(way, asked, told, finished_first):
    # Where the offer waits a send is accepted before its engine can finish.
    peers = 3 if finished_first or way == "hand over" else 4

    counted = full_hit(way, finished_first=finished_first)

    assert counted == {"d asked": 2, "d told": 3, "p asked": asked, "p told": told, "peers": peers}


def test_messages_of_a_lease_are_those_of_the_table():
    world = Counting()
    world.counts.clear()

    lease = world.p.lease(FULL).lease
    world.p.call(client.CommitAndRelease, lease=lease)

    assert world.counted() == {"p asked": 2, "p told": 2}
