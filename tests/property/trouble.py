"""What else happens to two nodes in a storm: operators, faults, slow transfers; and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import inputs
from kvd.wire import admin, client
from kvd.wire.peer import Accept, Closed, Offer, Settled

if TYPE_CHECKING:
    from tests.core.side import Side
    from tests.property.storms import Storm


def operate(storm: Storm, side: Side, request: admin.AdminRequest) -> None:
    """An operator asks for something."""
    side.ask(request)
    storm.hear()


def die(storm: Storm, side: Side) -> None:
    """All engines of a node die, and others come."""
    for one in storm.sequences:
        one.is_over |= one.side is side
    storm.sequences = [one for one in storm.sequences if not one.is_over]
    storm.calls = [one for one in storm.calls if one.side is not side]
    for key in [key for key in storm.receives if key[0] == side.name]:
        del storm.receives[key]
    side.hang_up(storm.sessions[side.name])
    side.take()
    storm.sessions[side.name] = side.attach()
    storm.hear()


def crash(storm: Storm, side: Side) -> None:
    """The transfer process is killed, and another one comes."""
    side.stop_transfer("crash")
    if storm.rng.random() < 0.5:
        side.feed(inputs.Tick(storm.world.now_s))
    side.start_transfer("again")
    storm.world.run()
    storm.hear()


def refuse(storm: Storm, side: Side) -> None:
    """A copy does not succeed."""
    if side.copies:
        storm.may_break = True
        side.refuse_copy("no")
        storm.world.run()
        storm.hear()
        storm.may_break = False


def cancel(storm: Storm) -> None:
    """An engine gives up a receive."""
    here = [key for key in storm.receives if key[1] == storm.world.d.life]
    if here:
        storm.call(storm.world.d, client.CancelReceive, receive=storm.rng.choice(here)[2])


def trouble(storm: Storm, side: Side) -> None:
    world, dice = storm.world, storm.rng.random()
    if dice < 0.15:
        operate(storm, side, admin.Flush(1))
    elif dice < 0.35:
        operate(storm, side, admin.Evict(1, storm.rng.randint(1, 9)))
    elif dice < 0.42:
        operate(storm, side, admin.Fence(1))
    elif dice < 0.50:
        die(storm, side)
    elif dice < 0.88:
        held = storm.rng.choice(
            (
                "hold_posts",
                "hold_posts",
                "hold_copies",
                "hold_verify",
                "hold_quiet",
                "hold_network",
                "doubts",
            )
        )
        vars(world)[held] = not vars(world)[held]
    elif dice < 0.91:
        refuse(storm, side)
    elif dice < 0.94:
        cancel(storm)
    elif dice < 0.97:
        kinds = (Offer, Accept, Settled, Closed)
        world.lost = set() if world.lost else {storm.rng.choice(kinds)}
    else:
        crash(storm, side)


def let_some_go(storm: Storm) -> None:
    """Some of what is held comes to its end, or a part of it."""
    rng = storm.rng
    for side in storm.sides:
        if side.copies and rng.random() < 0.8:
            side.finish_copy()
        if side.asked and rng.random() < 0.8:
            side.answer_verify()
        for flight in list(side.flights.values()):
            if rng.random() < 0.7:
                side.land(flight, rng.choice((1, 2, None)))
    if rng.random() < 0.5:
        for side in storm.sides:
            side.arrive_all()
            side.be_quiet()
    storm.world.run()
    storm.hear()


def let_all_go(storm: Storm) -> None:
    for side in storm.sides:
        while side.copies:
            side.finish_copy()
        while side.asked:
            side.answer_verify()
        for flight in list(side.flights.values()):
            side.land(flight)
        side.be_quiet()
    storm.world.run()
    storm.hear()


def calm(storm: Storm) -> None:
    """Everything under way ends, all engines die, and every pool is whole again."""
    world = storm.world
    world.hold_posts = world.hold_copies = world.hold_verify = world.hold_quiet = False
    world.lost = set()
    world.hold_network = False
    world.flow()
    while any(side.copies or side.asked or side.flights for side in storm.sides):
        let_all_go(storm)
    while any(side.inflow.questions for side in storm.sides):
        world.pass_time(0.5, 0.25)  # until the living have said which connections are theirs
        let_all_go(storm)
    for side in storm.sides:
        side.hang_up(storm.sessions[side.name])
    storm.calls.clear()
    for seconds in (5, 3):
        world.pass_time(seconds, 0.25)
        let_all_go(storm)
    for side in storm.sides:
        check_empty(side)
        operate(storm, side, admin.Flush(1))
        table = side.node.leases
        pools = [
            table.pool,
            *[one.pool for one in table.components.each],
            *table.saved.pools.values(),
        ]
        for pool in pools:
            assert pool.free_pages == pool.total_pages - 1, (side.name, pool.name)


def check_empty(side: Side) -> None:
    """Nobody has a lease, nobody waits, nothing is under way."""
    node = side.node
    left = [(one.id, one.holders, one.state) for one in node.leases.leases.values()]
    assert left == [], side.name
    assert not node.admission.queue, side.name
    assert not node.copies.under_way
    assert not node.decoder.verifying.parts
    assert not node.fetcher.turns
    assert not node.fetcher.copies
    assert not node.retractor.callers
    assert not node.retractor.uncopied
    assert not node.retractor.copies.by_ticket


def check_nobody_waits_alone(side: Side) -> None:
    """In a node without a lease there is room for whoever waits for room."""
    node = side.node
    if not node.leases.leases:
        stuck = [one for one in node.admission.queue if one.blocked() is None]
        assert not stuck, f"waits in idle {side.name}: {node.admission.shortage(stuck[0])}"
