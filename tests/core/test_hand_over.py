"""A prompt that is all computed is handed over with one request; the end of its lease rides along.

Held against the long way: what the two nodes have afterwards, and what both engines hear, is the
same as after send, finish and release in requests of their own.
"""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.handoff.protocol import Prefill
from kvd.errors import Code
from kvd.types import ID_BYTES, NO_TOKENS
from kvd.wire import client, events
from kvd.wire.peer import Accept, Settled
from tests.core.engines import FULL, PROMPT, PageTotals, Sender, cached, totals
from tests.core.families import SPECS
from tests.core.world import PAGE, Side, World, tokens


def computed(side: Side, toks: bytes = PROMPT, **fields: object) -> int:
    """A lease whose prompt is written."""
    leased = side.lease(toks, **fields)
    side.write(leased.pages, toks)
    return leased.lease


def hand_over(
    side: Side, lease: int, toks: bytes = PROMPT, **fields: object
) -> client.Reply | None:
    fields = {"room": 7, "aux": b"aux", **fields}
    return side.call(client.HandOver, toks, lease=lease, **fields)


def receive(world: World, toks: bytes = PROMPT) -> None:
    world.d.call(client.ReceiveRequest, toks, room=7, source=("p",))


def heard(side: Side) -> list[str]:
    return [type(one).__name__ for one in side.take()]


def the_long_way(toks: bytes, order: str, prefix: bytes) -> World:
    """Send, finish and release, each with its own request."""
    world = World()
    if prefix:
        cached(world.d, prefix)
    if order == "offer first":
        receive(world, toks)
    sender = Sender(world, toks)
    sender.finish()
    if order == "engine first":
        receive(world, toks)
    world.p.call(client.CommitAndRelease, lease=sender.lease.lease)
    return world


def what_is_left(world: World) -> object:
    """Of both nodes, and what the engines were given."""
    (received,) = [one for one in world.d.answers if isinstance(one, client.Received)]
    (finished,) = [one for one in world.p.answers if isinstance(one, client.Finished)]
    said = (finished.failure, finished.decode_prefix_len, finished.sent_pages, finished.sent_bytes)
    leases = [sorted(side.node.leases.leases) for side in world.sides.values()]
    return totals(world.p), totals(world.d), received, said, leases


@pytest.mark.parametrize("order", ["engine first", "offer first"])
@pytest.mark.parametrize(
    ("toks", "prefix"), [(PROMPT, NO_TOKENS), (PROMPT, tokens((1, 64))), (FULL, FULL)]
)
def test_a_hand_over_leaves_what_the_long_way_leaves(order, toks, prefix):
    world = World()
    if prefix:
        cached(world.d, prefix)
    if order == "offer first":
        receive(world, toks)
    lease = computed(world.p, toks)
    hand_over(world.p, lease, toks, ends_lease=True)
    if order == "engine first":
        receive(world, toks)

    assert what_is_left(world) == what_is_left(the_long_way(toks, order, prefix))
    assert heard(world.p)[-1:] == ["Finished"]


def test_a_finish_that_releases_leaves_what_the_long_way_leaves():
    world = World()
    sender = Sender(world)
    sender.advance(40)
    receive(world)
    world.p.write(sender.lease.pages, PROMPT)

    world.p.call(client.FinishAndRelease, send=sender.send, aux=b"aux")

    assert what_is_left(world) == what_is_left(the_long_way(PROMPT, "engine first", NO_TOKENS))
    assert world.p.node.leases.leases == {}


def test_one_request_has_one_answer_and_no_push():
    """Its engine hears of no number: a push about one would be about nothing that it knows."""
    world = World()
    lease = computed(world.p)
    world.p.take()

    assert hand_over(world.p, lease) is None
    receive(world)

    assert heard(world.p) == ["Finished"]


def test_a_hand_over_of_no_tokens_is_of_all_that_the_lease_knows():
    world = World()
    hand_over(world.p, computed(world.p), NO_TOKENS)

    receive(world)

    (received,) = [one for one in world.d.answers if isinstance(one, client.Received)]
    assert world.d.holds(received.pages, PROMPT)


def test_a_full_hit_that_is_handed_over_takes_one_message_of_the_writer():
    world = World()
    cached(world.d, FULL)
    hand_over(world.p, computed(world.p, FULL), FULL)
    world.hold_wire = True
    receive(world, FULL)

    world.deliver(world.wire.pop())

    assert len(world.held(Settled)) == 1
    assert world.held(Accept) == []


def test_posts_of_a_hand_over_read_pages_that_its_engine_has_let_go():
    world = World(p_pages=9)
    world.hold_posts = True
    hand_over(world.p, computed(world.p, cache=False), ends_lease=True)
    receive(world)

    assert totals(world.p).free == 1
    assert world.p.call(client.OpenLease, tokens((500, 40))) is None, "it waits for these pages"
    world.land_posts()
    (received,) = [one for one in world.d.answers if isinstance(one, client.Received)]
    assert world.d.holds(received.pages, PROMPT)
    assert totals(world.p) == PageTotals(free=5, held=3)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"aux": bytes(2**20)}, Code.TOO_LARGE),
        ({"after": b"short"}, Code.BAD_REQUEST),
        ({"after": bytes(64), "ends_lease": True}, Code.BAD_REQUEST),
        ({"namespace": "other"}, Code.PROMPT_MISMATCH),
        ({"lease": 99}, Code.UNKNOWN_LEASE),
        ({"room": 0}, Code.BAD_ROOM),
    ],
)
def test_a_hand_over_that_is_refused_changes_nothing(fields, code):
    world = World()
    lease = computed(world.p)
    asked = {"room": 7, "lease": lease, "aux": b"aux", "ends_lease": True, **fields}
    before = world.p.node.prefiller.known(), sorted(world.p.node.leases.leases)

    reply = world.p.call(client.HandOver, PROMPT, **asked)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is code
    assert (world.p.node.prefiller.known(), sorted(world.p.node.leases.leases)) == before
    assert not isinstance(hand_over(world.p, lease), client.Failed)


def test_a_hand_over_of_a_room_that_is_taken_is_refused():
    world = World()
    lease = computed(world.p)
    hand_over(world.p, lease)

    reply = hand_over(world.p, lease)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.DUPLICATE_ROOM


def test_a_hand_over_that_nobody_receives_ends_at_its_deadline_with_its_one_answer():
    world = World()
    hand_over(world.p, computed(world.p), ends_lease=True, deadline_s=0.5)
    world.p.take()

    world.pass_time(0.7)

    (finished,) = world.p.take()
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.code is Code.DEADLINE
    assert world.p.node.leases.leases == world.p.node.prefiller.by_send == {}
    assert totals(world.p).cached == 6


@pytest.mark.parametrize("when", ["no offer", "posting"])
def test_a_hand_over_that_nobody_waits_for_any_more_is_given_up(when):
    world = World()
    hand_over(world.p, computed(world.p))
    call = world.p.calls
    world.hold_posts = True
    if when == "posting":
        receive(world)
    world.p.take()

    world.p.call(client.CancelCall, of=call)
    world.land_posts()

    told = world.p.take()
    (finished,) = [one for one in told if isinstance(one, client.Finished)]
    assert finished.failure is not None
    assert finished.failure.code is Code.CANCELLED
    assert world.p.node.prefiller.by_send == {}
    assert world.p.node.prefiller.rooms.by_room == {}


class Unwalked(dict):
    """Looked into by key alone."""

    def __iter__(self):
        raise AssertionError("walked")

    values = items = keys = __iter__


def test_a_cancelled_call_is_looked_for_by_its_number():
    """A node of a thousand sends cancels one call, or one of none, for the price of a look-up."""
    world = World()
    hand_over(world.p, computed(world.p))
    call, node = world.p.calls, world.p.node
    node.prefiller.by_send = Unwalked(node.prefiller.by_send)

    for of in (call + 7, call):
        # Not by ``call``, after which the side looks at everything.
        node.step(inputs.FromClient(world.now_s, 1, client.CancelCall(call + 1, of)))

    assert len(node.prefiller.by_send) == len(node.prefiller.handed_over) == 0


def test_cancelling_a_finish_does_not_end_its_send():
    """Its engine knows its number, and has AbortSend for that."""
    world = World()
    sender = Sender(world)
    sender.finish()

    world.p.call(client.CancelCall, of=sender.finish_call)

    assert world.p.node.prefiller.by_send[sender.send].state is Prefill.AWAIT_OFFER


def test_a_finish_that_releases_ends_the_lease_of_a_send_that_had_failed():
    world = World()
    sender = Sender(world, deadline_s=0.5)
    world.p.write(sender.lease.pages, PROMPT)
    world.pass_time(0.7)
    world.p.take()

    finished = world.p.call(client.FinishAndRelease, send=sender.send, aux=b"aux")

    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.code is Code.DEADLINE
    assert world.p.node.leases.leases == world.p.node.prefiller.failed == {}
    assert totals(world.p).cached == 6


@pytest.mark.parametrize("family", ["swa", "recurrent"])
@pytest.mark.parametrize("known", [64, 80])
def test_what_lies_beside_is_kept_as_after_the_long_way(family, known):
    """A state only where it stands for exactly what was handed over."""
    kept = []
    for is_one in (True, False):
        side = World(spec=SPECS[family]).p
        leased, toks = side.lease(tokens((1, known))), tokens((1, 64))
        if is_one:
            hand_over(side, leased.lease, toks, ends_lease=True, deadline_s=0.5)
        else:
            sending = side.call(
                client.SendRequest, toks, room=7, lease=leased.lease, deadline_s=0.5
            )
            assert isinstance(sending, client.Sending)
            side.call(client.Finish, send=sending.send, aux=b"aux")
            side.call(client.CommitAndRelease, lease=leased.lease)
        side.world.pass_time(0.7)
        kept.append((totals(side), side.lease(tokens((1, 96))).prefix_tokens))

    assert kept[0] == kept[1]
    assert kept[0][1] == (64 if family == "swa" or known == 64 else 0)


@pytest.mark.parametrize("kind", ["hand over", "finish"])
def test_end_of_its_lease_shares_nothing_that_waits_for_an_event(kind):
    """A longer send of the same lease was promised more, and its event has not come."""
    world, shorter = World(), PROMPT[: 40 * ID_BYTES]
    long = Sender(world)
    short = world.p.call(client.SendRequest, shorter, room=8, lease=long.lease.lease)
    assert isinstance(short, client.Sending)
    world.p.write(long.lease.pages, PROMPT, end=40)
    long.promise(96, after=bytes(64))

    if kind == "hand over":
        world.p.call(client.AbortSend, send=short.send, reason="for room 8")
        hand_over(world.p, long.lease.lease, shorter, room=8, ends_lease=True)
    else:
        world.p.call(client.FinishAndRelease, send=short.send)

    world.p.call(client.AbortSend, send=long.send, reason="its step failed")
    assert totals(world.p).cached == 40 // PAGE


def test_a_finish_that_cannot_release_does_not_finish():
    world = World()
    sender = Sender(world)
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)

    reply = world.p.call(client.FinishAndRelease, send=sender.send, aux=b"aux")

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.UNKNOWN_LEASE
    assert world.p.node.prefiller.by_send[sender.send].aux is None


def test_a_finish_that_is_refused_does_not_release():
    world = World()
    sender = Sender(world)

    reply = world.p.call(client.FinishAndRelease, send=sender.send, aux=bytes(2**20))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.TOO_LARGE
    assert sender.lease.lease in world.p.node.leases.leases


def test_events_of_a_hand_over_name_the_same_owners():
    """Custody: each lease and each part is opened and ended, whichever way it was asked."""
    world = World()
    hand_over(world.p, computed(world.p), ends_lease=True)
    receive(world)
    ours = [one for one in world.p.events if isinstance(one, events.Moved | events.LeaseReleased)]
    long = the_long_way(PROMPT, "engine first", NO_TOKENS)
    theirs = [one for one in long.p.events if isinstance(one, events.Moved | events.LeaseReleased)]

    def told(of: list[events.Event]) -> list[object]:
        return [
            (one.after, one.trigger) if isinstance(one, events.Moved) else one.cause for one in of
        ]

    assert [one for one in told(ours) if isinstance(one, tuple)] == [
        one for one in told(theirs) if isinstance(one, tuple)
    ]
    assert told(ours).count("sent") + told(ours).count("normal") == 1
