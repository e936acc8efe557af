"""A quarantine says what would end it, and a configured policy ends it by a fence, not by time."""

from __future__ import annotations

from kvd.core.inspect.snapshot import snapshot
from kvd.types import short
from kvd.wire import admin, client
from tests.core.engines import PROMPT, PageTotals, totals
from tests.core.world import World


def quarantined(**more: object) -> World:
    """A receive that was cancelled while its writer is silent."""
    world = World(**more)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.cut = {"p"}
    world.d.call(client.CancelReceive, receive=1)
    assert totals(world.d) == PageTotals(free=56, quarantined=7)
    return world


def test_no_time_alone_frees_a_quarantine():
    world = quarantined()
    world.pass_time(600, 0.5)
    assert totals(world.d) == PageTotals(free=56, quarantined=7)
    assert world.d.node.peers.generation == 1


def test_a_quarantine_says_for_whom_since_when_and_what_would_free_it():
    world = quarantined(fence_after_s=60.0)
    world.pass_time(4)

    (lease,) = snapshot(world.d.node).leases
    (room,) = snapshot(world.d.node).rooms
    said = world.d.ask(admin.Why(1, "lease", lease.id))

    writer = f"p ({short(world.p.incarnation)})"
    waits = f"{writer} to settle, to restart, or a fence, which comes by itself in 56.0 s"
    assert (lease.waiting_for, room.waiting_for) == (waits, waits)
    assert (lease.quarantined_s, lease.because) == (4.0, "the decode engine cancelled it")
    assert isinstance(said, admin.Because)
    assert said.facts[-2:] == (
        "in quarantine for 4.0 s, because the decode engine cancelled it",
        f"waits for {waits}",
    )


def test_the_policy_fences_once_and_the_pages_are_free():
    world = quarantined(fence_after_s=10.0)

    world.pass_time(9.9)
    assert totals(world.d) == PageTotals(free=56, quarantined=7)
    world.pass_time(0.6)

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.node.peers.generation == 2
    world.pass_time(60)
    assert world.d.node.peers.generation == 2
