"""A room that is open while its prompt is computed, and finishes by itself; one that nobody has."""

from __future__ import annotations

import pytest

from kvd.core import effects
from kvd.core.handoff.protocol import Prefill
from kvd.errors import Code
from kvd.types import count
from kvd.wire import client
from tests.core.engines import PROMPT, Sender, begun, cached, totals
from tests.core.test_engine_copies import Engine
from tests.core.world import World, tokens


def opened(world: World, toks: bytes = PROMPT, **fields: object) -> tuple[Engine, client.Reply]:
    """An engine that computes, whose room is open."""
    engine = Engine(world, toks=toks)
    fields = {"room": 7, "ttl_s": 5.0, "takers": 1, "when_written": True, **fields}
    reply = world.p.call(client.SendRequest, toks, lease=engine.lease, **fields)
    return engine, reply


def saved(engine: Engine, first: int, end: int) -> None:
    """It has copied these pages."""
    upto = min(16 * end, len(engine.toks) // 4)
    engine.side.write(engine.row, engine.toks, end=upto)
    engine.over(engine.save(first, end))


def receive(world: World, toks: bytes = PROMPT, **fields: object) -> None:
    world.d.call(client.ReceiveRequest, toks, room=7, source=("p",), **fields)


def received(world: World) -> list[client.Received]:
    return [one for one in world.d.take() if isinstance(one, client.Received)]


def failure(world: World) -> client.ReceiveFailed:
    (one,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    return one


# ---- it finishes by itself -----------------------------------------------------------------------


def test_the_last_copy_of_its_prompt_finishes_it():
    world = World()
    engine, reply = opened(world)
    assert reply == client.Sending(world.p.calls, 1, finishes=True)
    receive(world)
    for first, end in ((0, 3), (3, 6)):
        saved(engine, first, end)
        assert received(world) == []
    (part,) = world.d.node.decoder.open.parts.values()
    assert part.moved_bytes == 6 * part.total_bytes // 7

    saved(engine, 6, 7)

    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)
    assert got.aux == b""
    assert world.p.node.prefiller.rooms.by_room == {}


def test_what_the_last_copy_has_written_leaves_in_one_post():
    """With the last page, which is not whole: behind two posts somebody waits for two turns."""
    world = World()
    engine, _ = opened(world)
    receive(world)
    saved(engine, 0, 3)
    world.p.effects.clear()

    saved(engine, 3, 7)

    (post,) = [one for one in world.p.effects if isinstance(one, effects.Post)]
    assert count(post.source) == 4
    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)


def test_it_is_kept_for_who_comes_when_it_is_written():
    world = World()
    engine, _ = opened(world)
    saved(engine, 0, 7)
    world.p.call(client.ReleaseLease, lease=engine.lease)
    world.pass_time(4.0)

    receive(world)

    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)


def test_its_time_begins_when_it_is_written():
    world = World()
    engine, _ = opened(world, ttl_s=2.0)
    world.pass_time(4.0)
    saved(engine, 0, 7)
    (part,) = world.p.node.prefiller.rooms.by_room.values()

    assert part.deadline_s == pytest.approx(world.now_s + 2.0)
    world.pass_time(2.5)
    assert world.p.node.prefiller.rooms.by_room == {}


def test_what_was_cached_at_its_start_leaves_at_once():
    world = World()
    cached(world.p, tokens((1, 96)))
    receive(world)

    engine, _ = opened(world)

    (part,) = world.d.node.decoder.open.parts.values()
    assert part.moved_bytes == 6 * part.total_bytes // 7
    saved(engine, 6, 7)
    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)


def test_a_prompt_that_is_cached_as_a_whole_is_finished_as_it_is_opened():
    world = World()
    whole = tokens((1, 96))
    cached(world.p, whole)
    receive(world, whole)

    opened(world, whole)

    (got,) = received(world)
    assert world.d.holds(got.pages, whole)


def test_a_word_of_the_engine_finishes_it_too():
    world = World()
    engine, _ = opened(world)
    receive(world)
    world.p.write(engine.row, PROMPT)

    assert isinstance(
        world.p.call(client.SayWritten, lease=engine.lease, upto_tokens=100), client.Done
    )

    assert len(received(world)) == 1


def test_an_engine_that_gives_up_ends_it_for_who_receives_it():
    world = World()
    engine, reply = opened(world)
    assert isinstance(reply, client.Sending)
    receive(world)
    saved(engine, 0, 3)
    world.p.call(client.AbortSend, send=reply.send, reason="the client hung up")

    assert failure(world).refusal.code is Code.ABORTED
    assert totals(world.d).quarantined == 0
    world.p.call(client.ReleaseLease, lease=engine.lease)
    assert world.p.node.prefiller.known() == []


def test_an_engine_that_dies_ends_it_for_who_receives_it():
    world = World()
    engine, _ = opened(world)
    receive(world)
    saved(engine, 0, 3)

    world.p.hang_up()

    assert failure(world).refusal.code is Code.CLIENT_GONE


def test_only_a_kept_room_finishes_by_itself():
    world = World()
    _, reply = opened(world, ttl_s=0.0, takers=0)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert "say ttl_s or takers" in reply.refusal.message


def test_finish_of_one_that_has_finished_is_refused():
    world = World()
    engine, reply = opened(world)
    assert isinstance(reply, client.Sending)
    saved(engine, 0, 7)

    late = world.p.call(client.Finish, send=reply.send, aux=b"late")

    assert isinstance(late, client.Failed)
    assert late.refusal.code is Code.WRONG_STATE


# ---- a room that was open ------------------------------------------------------------------------


def test_a_room_that_was_open_and_that_nobody_has_is_not_waited_for():
    world = World()
    receive(world, is_open=True)

    refusal = failure(world).refusal
    assert refusal.code is Code.UNKNOWN_HANDOFF
    assert refusal.side == "p"
    assert "no engine of p has room 7 open" in refusal.message
    assert totals(world.d) == totals(World().d)


def test_a_room_that_is_open_is_received():
    world = World()
    sender = Sender(world)
    receive(world, is_open=True)
    sender.finish()

    assert len(received(world)) == 1


def test_one_that_is_to_be_opened_is_waited_for():
    world, sender = begun()
    (part,) = world.p.node.prefiller.known()

    assert part.state is Prefill.STREAMING
    sender.finish()
    assert len(received(world)) == 1


def test_a_room_that_has_ended_says_how():
    world = World()
    sender = Sender(world)
    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")
    receive(world, is_open=True)

    assert failure(world).refusal.code is Code.ABORTED
