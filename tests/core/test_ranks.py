"""Ranks that write a part of every page: their words move sends; nobody waits for a dead one."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.settings import CacheMode
from kvd.errors import Code
from kvd.wire import client, events
from tests.core.engines import PROMPT, Sender, begun
from tests.core.world import World

FIRST, SECOND, THIRD = (bytes([n]) * 64 for n in (1, 2, 3))


def posted(world: World) -> int:
    """Pages of the prompt that were ordered to be sent."""
    return sum(len(one.source) // 4 for one in world.p.effects if isinstance(one, effects.Post))


def say(sender: Sender, upto: int, rank: int, ranks: int = 2, after: bytes = b""):
    return sender.side.word(sender.lease.lease, upto, rank, ranks, after=after)


def leave(world: World, rank: int, ranks: int = 2, session: int = 1) -> None:
    world.p.feed(inputs.RankLeft(world.now_s, session, rank, ranks, 77))
    world.run()


# ---- what moves a send ---------------------------------------------------------------------------


def test_a_send_goes_as_far_as_the_last_rank():
    world, sender = begun()
    world.p.write(sender.lease.pages, PROMPT)
    seen = []

    for upto, rank in ((48, 0), (20, 1), (100, 0), (64, 1), (100, 1)):
        assert say(sender, upto, rank) is None
        seen.append(posted(world))

    assert seen == [0, 1, 1, 4, 6]  # the last page, which is not whole, goes with finish
    sender.finish()
    assert world.p.answer(sender.finish_call) == client.Finished(
        sender.finish_call, None, 0, 7, 896
    )
    assert world.d.holds(world.d.take()[-1].pages, PROMPT)


def test_the_word_of_an_engine_moves_a_send_too():
    world, sender = begun()
    world.p.write(sender.lease.pages, PROMPT)

    world.p.call(client.SayWritten, lease=sender.lease.lease, upto_tokens=50)

    assert posted(world) == 3


def test_a_send_that_is_opened_later_begins_with_what_was_said():
    world = World()
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    world.p.word(lease.lease, 64, 0, 2)
    world.p.word(lease.lease, 40, 1, 2)
    world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert posted(world) == 2


def test_a_word_moves_every_send_of_its_lease_and_no_other():
    world, sender = begun()
    other = Sender(world, room=8)
    world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    for one in (sender, other):
        world.p.write(one.lease.pages, PROMPT)
    again = world.p.call(client.SendRequest, PROMPT, room=9, lease=sender.lease.lease)

    say(sender, 48, 0, 1)

    cursors = {send: part.cursor_tokens for send, part in world.p.node.prefiller.by_send.items()}
    assert cursors == {sender.send: 48, other.send: 0, again.send: 48}


def test_a_longer_lease_than_its_send_moves_it_to_the_end_of_the_prompt():
    world = World()
    lease = world.p.lease(PROMPT, reserve_tokens=60)
    world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    assert world.p.word(lease.lease, 150, 0, 1) is None

    (part,) = world.p.node.prefiller.by_send.values()
    assert part.cursor_tokens == 100


def test_finish_is_a_word_for_every_rank():
    world, sender = begun()
    say(sender, 48, 0)

    sender.finish()

    assert world.p.node.leases.leases[sender.lease.lease].said == (100, 100)


# ---- bad words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("upto", "rank", "ranks", "numbers"),
    [
        (50, 2, 2, {"rank": 2, "ranks": 2}),
        (50, -1, 2, {"rank": -1, "ranks": 2}),
        (50, 0, 4097, {"rank": 0, "ranks": 4097}),
        (50, 0, 3, {"ranks": 3, "said_ranks": 2}),
        (31, 0, 2, {"upto_tokens": 31, "written_tokens": 32}),
        (-1, 1, 2, {"upto_tokens": -1, "room_tokens": 112}),
        (113, 1, 2, {"upto_tokens": 113, "room_tokens": 112}),
    ],
)
def test_a_word_that_cannot_be_changes_nothing(upto, rank, ranks, numbers):
    world, sender = begun()
    say(sender, 32, 0)
    lease = world.p.node.leases.leases[sender.lease.lease]
    before = lease.said, lease.written_tokens, posted(world)

    refusal = say(sender, upto, rank, ranks)

    assert refusal is not None
    assert (refusal.code, refusal.numbers) == (Code.BAD_REQUEST, numbers)
    assert (lease.said, lease.written_tokens, posted(world)) == before


@pytest.mark.parametrize("size", [1, 63])
def test_what_is_no_event_is_refused(size):
    _, sender = begun()

    refusal = say(sender, 32, 0, after=bytes(size))

    assert refusal is not None
    assert (refusal.code, refusal.numbers) == (Code.BAD_REQUEST, {"bytes": size})


def test_a_lease_of_another_session_is_none():
    world, sender = begun()
    other = world.p.attach("another")

    refusal = world.p.word(sender.lease.lease, 32, 0, 1, session=other)

    assert refusal is not None
    assert refusal.code is Code.UNKNOWN_LEASE
    assert world.p.node.leases.leases[sender.lease.lease].said == ()


def test_a_session_that_is_over_or_hung_up_on_says_nothing():
    world, sender = begun()
    assert world.p.word(sender.lease.lease, 32, 0, 1, session=9).code is Code.UNKNOWN_SESSION
    why = client.Failed(0, world.p.word(0, 0, 0, 1, session=9)).refusal

    world.p.feed(inputs.HungUpOn(world.now_s, 1, why, (1001,)))

    assert say(sender, 32, 0) == why


def test_a_node_without_kv_takes_no_word():
    world = World(cache_mode=CacheMode.PREFILL_ONLY)
    lease = world.p.lease(PROMPT)

    refusal = world.p.word(lease.lease, 32, 0, 1)

    assert refusal is not None
    assert refusal.code is Code.NOT_SUPPORTED


# ---- events --------------------------------------------------------------------------------------


def waits(world: World) -> set[bytes]:
    return {post.after for post in world.p.waiting.values()}


def test_a_post_waits_for_the_event_of_each_rank():
    world, sender = begun()
    lease = world.p.node.leases.leases[sender.lease.lease]
    say(sender, 48, 0, after=FIRST)
    say(sender, 64, 1, after=SECOND)

    assert waits(world) == {FIRST + SECOND}
    assert lease.written_tokens == 0
    world.p.write(sender.lease.pages, PROMPT)
    world.p.comes(FIRST)
    world.run()
    assert waits(world) == {FIRST + SECOND}
    world.p.comes(SECOND)
    world.run()

    assert waits(world) == set()
    assert lease.written_tokens == 48


def test_only_events_that_are_needed_are_waited_for():
    world, sender = begun()
    say(sender, 100, 0)
    say(sender, 64, 1, after=SECOND)

    assert waits(world) == {SECOND}


def test_one_event_of_all_ranks_is_waited_for_once():
    world, sender = begun()
    say(sender, 64, 0, after=FIRST)
    say(sender, 64, 1, after=FIRST)

    assert waits(world) == {FIRST}


def test_a_finished_post_is_a_word_for_the_kv_behind_its_event():
    """What was said behind it later waits for a later event, and is not written by this one."""
    world, sender = begun()
    world.p.write(sender.lease.pages, PROMPT)
    sender.promise(48, FIRST)
    sender.promise(80, SECOND)
    lease = world.p.node.leases.leases[sender.lease.lease]
    before = len(world.p.events)

    world.p.comes(FIRST)
    world.run()

    assert lease.written_tokens == 48
    told = [one for one in world.p.events[before:] if isinstance(one, events.LeaseWritten)]
    assert [one.written_tokens for one in told] == [48]
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    assert world.p.call(client.MatchPrefix, PROMPT).tokens == 48


def test_a_post_that_never_began_is_no_word():
    world, sender = begun()
    sender.promise(48, FIRST)
    (post,) = world.p.waiting
    lease = world.p.node.leases.leases[sender.lease.lease]

    world.p.waiting.clear()
    world.p.feed(inputs.Unposted(world.now_s, post, "its event cannot be waited for"))
    world.run()

    assert lease.written_tokens == 0


def test_what_is_certain_may_be_less_than_what_an_event_promises():
    world, sender = begun()
    say(sender, 64, 0, 1, after=FIRST)

    assert say(sender, 32, 0, 1) is None
    assert say(sender, 63, 0, 1, after=SECOND).numbers == {"upto_tokens": 63, "written_tokens": 64}

    assert world.p.node.leases.leases[sender.lease.lease].written_tokens == 32


# ---- deaths --------------------------------------------------------------------------------------


def test_a_send_that_waits_for_a_dead_rank_ends_and_says_why():
    world, sender = begun()
    world.p.write(sender.lease.pages, PROMPT)
    say(sender, 100, 0)
    say(sender, 40, 1)

    leave(world, 1)

    failed = next(one for one in world.p.take() if isinstance(one, client.SendFailed))
    assert failed.refusal.code is Code.CLIENT_GONE
    assert failed.refusal.numbers == {"rank": 1, "upto_tokens": 40, "prompt_tokens": 100}
    assert failed.refusal.message.startswith("rank 1 of 2 of engine (pid 77) is gone: it had ")
    received = world.d.take()[-1]
    assert isinstance(received, client.ReceiveFailed)
    # The lease is the session's: it lives, and shares what all ranks have written.
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    assert world.p.call(client.MatchPrefix, PROMPT).tokens == 32


@pytest.mark.parametrize("what", ["all said", "finished", "alone", "never spoken of", "another"])
def test_a_send_that_does_not_wait_for_it_goes_on(what):
    world, sender = begun()
    world.hold_posts = True
    world.p.write(sender.lease.pages, PROMPT)
    if what == "all said":
        say(sender, 20, 0)
        say(sender, 100, 1)
    elif what == "finished":
        say(sender, 20, 0)
        sender.finish()
    elif what == "alone":
        say(sender, 20, 0, 1)
    session = world.p.attach("another") if what == "another" else 1

    leave(world, 1, session=session)

    (part,) = world.p.node.prefiller.known()
    assert part.ended is None


def test_a_rank_of_a_session_that_is_over_is_nobodys_concern():
    world, _ = begun()

    leave(world, 1, session=9)

    (part,) = world.p.node.prefiller.known()
    assert part.ended is None


def test_a_send_that_would_wait_for_a_dead_rank_is_refused_at_once():
    """scenario: opened after the rank has died; it says again that it is there, and it is sent."""
    world = World()
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    world.p.word(lease.lease, 100, 0, 2)
    world.p.word(lease.lease, 20, 1, 2)
    world.pass_time(0.1)
    leave(world, 1)

    reply = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.CLIENT_GONE
    assert reply.refusal.numbers == {"rank": 1, "upto_tokens": 20, "prompt_tokens": 100}
    world.p.word(lease.lease, 64, 1, 2)
    reply = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(reply, client.Sending)
