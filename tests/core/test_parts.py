"""One receive from several sources: who sends what, and that they succeed or fail together."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.handoff.protocol import Decode
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import count
from kvd.wire import admin, client, events
from kvd.wire.peer import Accept, Integrity, Offer, Settled
from tests.core.engines import FULL, PROMPT, PageTotals, Sender, cached, totals
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens

TWO = ("p", "p1")
FOUR = ("p", "p1", "p2", "p3")


def receive(world: World, toks: bytes = PROMPT, sources: tuple[str, ...] = TWO) -> int:
    reply = world.d.call(client.ReceiveRequest, toks, room=7, source=sources)
    assert isinstance(reply, client.Receiving), reply
    return reply.receive


def senders(world: World, toks: bytes = PROMPT, names: tuple[str, ...] = TWO) -> list[Sender]:
    return [Sender(world, toks, side=world.sides[name]) for name in names]


def shares(world: World, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """The token range that each engine was told."""
    found = []
    for name in names:
        (told,) = [one for one in world.sides[name].answers if isinstance(one, client.Accepted)]
        assert told.share is not None
        found.append((told.share.start_tokens, told.share.end_tokens))
    return found


def states(world: World) -> list[Decode]:
    return [part.state for part in world.d.node.decoder.open.known()]


def closed(world: World, name: str) -> events.HandoffEnded:
    """How the send of that source ended over there."""
    (end,) = [one for one in world.sides[name].events if isinstance(one, events.HandoffEnded)]
    return end


def failed(world: World) -> client.ReceiveFailed:
    (one,) = [one for one in world.d.answers if isinstance(one, client.ReceiveFailed)]
    return one


# ---- who sends what ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_tree", "prompt", "names", "ranges"),
    [
        (0, 100, TWO, [(0, 64), (64, 100)]),
        (0, 100, FOUR, [(0, 32), (32, 64), (64, 96), (96, 100)]),  # scenario F1
        (0, 48, FOUR, [(0, 16), (16, 32), (32, 48), (0, 0)]),  # scenario F1: rank 3 is empty
        (96, 160, TWO, [(96, 128), (128, 160)]),  # scenario F3
        (96, 160, FOUR, [(96, 112), (112, 128), (128, 144), (144, 160)]),  # scenario F3
        (96, 96, TWO, [(96, 96), (96, 96)]),  # scenario F4
    ],
)
def test_equal_sources_divide_the_pages_that_are_not_cached(in_tree, prompt, names, ranges):
    """scenario F1, F3, F4: pages of what is missing are cut, in order, each to one source."""
    world = World(sources=names)
    toks = tokens((1, prompt))
    if in_tree:
        cached(world.d, toks[: in_tree * 4])
    receive(world, toks, names)
    sending = senders(world, toks, names)
    for one in sending:
        one.finish(b"of " + one.side.name.encode())

    assert shares(world, names) == ranges
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert got.receive == 1
    assert got.aux == b"of p"
    assert world.d.holds(got.pages, toks)
    for one, (start, end) in zip(sending, ranges, strict=True):
        pages = -(-end // 16) - start // 16
        finished = one.side.answer(one.finish_call)
        assert isinstance(finished, client.Finished)
        assert (finished.failure, finished.sent_pages) == (None, pages)
        assert closed(world, one.side.name).outcome == "committed"


def test_nothing_is_committed_before_every_source_has_sent_its_part():
    world = World(sources=TWO)
    receive(world)
    first, second = senders(world)

    first.finish()

    assert states(world) == [Decode.VERIFYING, Decode.RECEIVING]
    assert totals(world.d) == PageTotals(free=56, held=7)
    assert first.side.answer(first.finish_call) is None

    second.finish()

    assert states(world) == [Decode.READY, Decode.READY]
    assert totals(world.d) == PageTotals(free=56, held=1, cached=6)
    lease = world.d.node.decoder.open.known()[0].lease
    world.d.call(client.ReleaseLease, lease=lease.id)
    assert states(world) == []


def test_a_source_whose_share_ends_inside_the_prompt_settles_when_its_engine_finishes():
    world = World(sources=TWO)
    receive(world)
    first, second = senders(world)

    first.advance(100)
    second.advance(100)

    flights = {
        name: world.sides[name].node.prefiller.rooms.by_room[7].posted_tokens for name in TWO
    }
    assert flights == {"p": 64, "p1": 96}
    assert states(world) == [Decode.RECEIVING, Decode.RECEIVING]
    second.finish(b"dropped")
    first.finish(b"kept")
    assert world.d.take()[-1].aux == b"kept"


def test_an_engine_is_told_which_share_it_has():
    world = World(sources=TWO)
    receive(world)
    senders(world)

    told = [
        one.share
        for name in TWO
        for one in world.sides[name].answers
        if isinstance(one, client.Accepted)
    ]
    assert [(one.rank, one.ranks, one.is_dummy, one.is_authoritative) for one in told] == [
        (0, 2, False, True),
        (1, 2, False, False),
    ]


def test_pages_that_other_sources_send_are_not_posted_by_chunks_either():
    world = World(sources=TWO)
    receive(world)
    world.hold_posts = True
    _, second = senders(world)
    for upto in (40, 80, 100):
        second.advance(upto)

    posts = [flight.post for flight in second.side.flights.values()]
    assert [count(post.source) for post in posts] == [1, 1]  # tokens 64..80, then 80..96


# ---- together or not at all ----------------------------------------------------------------------


def half_sent() -> tuple[World, Sender, Sender]:
    """The first source has sent all of its part, the second one a page, under way."""
    world = World(sources=TWO)
    receive(world)
    first, second = senders(world)
    first.finish()
    world.hold_posts = True
    second.advance(80)
    return world, first, second


def test_one_engine_that_fails_ends_the_receive_and_names_its_source():
    world, first, second = half_sent()
    second.side.call(client.AbortSend, send=second.send, reason="out of memory")
    assert totals(world.d) == PageTotals(
        free=56, held=7
    )  # its post is under way: it has not settled
    world.land_posts()

    refusal = failed(world).refusal
    assert refusal.message == sentence_of(
        "one engine that fails ends the receive and names its source"
    )
    assert refusal.numbers["source"] == "p1"
    assert closed(world, "p").reason.startswith("p1 (source 2 of 2)")
    assert first.side.answer(first.finish_call).failure.code is Code.ABORTED
    assert totals(world.d) == PageTotals(free=63)


def test_the_pages_of_a_cancelled_receive_wait_for_every_writer_that_may_still_write():
    world = World(sources=TWO)
    number = receive(world)
    first, second = senders(world)
    world.hold_posts = True
    for one in (first, second):
        one.advance(80)
    world.lost = {Settled}
    world.d.call(client.CancelReceive, receive=number)
    (lease,) = world.d.node.leases.leases.values()

    assert [writer.peer for writer in lease.quarantine.writers] == ["p", "p1"]
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.land_posts()
    world.lost = set()
    world.cut = {"p1"}
    world.pass_time(1.2)

    assert [writer.peer for writer in lease.quarantine.writers] == ["p1"]
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.cut = set()
    world.pass_time(2.0)

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.node.decoder.open.attempts == {}


def test_a_corrupt_part_ends_the_receive_and_drops_what_the_others_have_sent():
    world = World(sources=TWO, integrity=Integrity.FULL)
    receive(world)
    first, second = senders(world)
    first.finish()
    world.hold_verify = True
    second.finish()
    pages = world.d.node.leases.leases[1].page_table
    world.d.memory[int.from_bytes(pages[5 * 4 : 6 * 4], "little")] = "torn"
    world.d.answer_verify()
    world.run()

    refusal = failed(world).refusal
    assert refusal.code is Code.CORRUPT
    assert refusal.message.startswith("p1 (source 2 of 2): room 7 from p1: 1 of 3 verified pages")
    assert "page 5 of the prompt" in refusal.message
    assert (closed(world, "p1").outcome, closed(world, "p").outcome) == ("delivered", "delivered")
    assert closed(world, "p1").code == "corrupt"
    assert totals(world.d) == PageTotals(free=63)


def test_a_source_that_refuses_ends_the_receive():
    world = World(sources=TWO)
    receive(world)
    first = Sender(world)
    with pytest.raises(AssertionError, match="prompt-mismatch"):
        Sender(world, tokens((500, 100)), side=world.sides["p1"], peer="d")
    assert failed(world).refusal.code is Code.PROMPT_MISMATCH
    assert failed(world).refusal.numbers["source"] == "p1"
    assert totals(world.d) == PageTotals(free=63)
    assert first.side.node.prefiller.rooms.by_room == {}


def test_a_source_that_restarts_ends_the_receive_and_frees_it_when_the_others_have_settled():
    world, _, second = half_sent()
    world.restart(second.side)
    world.pass_time(1.0)

    assert failed(world).refusal.code is Code.PEER_LOST
    assert failed(world).refusal.numbers["source"] == "p1"
    assert totals(world.d) == PageTotals(free=63)


def test_the_deadline_names_the_first_source_that_is_late():
    world = World(sources=TWO)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=TWO, deadline_s=1.0)
    first, _ = senders(world)
    first.finish()
    world.pass_time(1.2)

    refusal = failed(world).refusal
    assert refusal.code is Code.DEADLINE
    assert refusal.message.startswith("p1 (source 2 of 2): room 7 from p1 took longer than 1.0 s")
    assert totals(world.d) == PageTotals(free=63)


def test_a_deadline_ends_every_part_at_once_and_frees_no_page_for_one_alone():
    """scenario G20: one clock decides, that of the node that waits; its ranks have none."""
    world = World(sources=TWO)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=TWO, deadline_s=1.0)
    world.hold_posts = True
    for one in senders(world):
        one.advance(80)
    world.lost = {Settled}
    world.pass_time(1.1)

    assert states(world) == [Decode.DRAINING, Decode.DRAINING]
    assert failed(world).refusal.code is Code.DEADLINE
    (lease,) = world.d.node.leases.leases.values()
    assert [writer.peer for writer in lease.quarantine.writers] == ["p", "p1"]
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.cut = {"p"}
    world.lost = set()
    world.land_posts()
    world.pass_time(1.2)

    assert [writer.peer for writer in lease.quarantine.writers] == ["p"]
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.cut = set()
    world.pass_time(2.0)

    assert totals(world.d) == PageTotals(free=63)


def test_giving_up_when_all_has_arrived_keeps_it_in_the_cache():
    world = World(sources=TWO, integrity=Integrity.FULL)
    world.hold_verify = True
    number = receive(world)
    for one in senders(world):
        one.finish()
    world.d.call(client.CancelReceive, receive=number)
    assert states(world) == [Decode.VERIFYING, Decode.VERIFYING]
    while world.d.asked:
        world.d.answer_verify()
    world.run()

    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)
    assert states(world) == []


def test_giving_up_when_one_part_is_missing_drops_what_was_verified():
    world, _, _ = half_sent()
    world.d.call(client.CancelReceive, receive=1)

    assert states(world) == [Decode.DRAINING]
    assert closed(world, "p").outcome == "delivered"
    assert closed(world, "p").code == "cancelled"


def test_an_operator_aborts_every_part_of_a_room():
    world, _, _ = half_sent()
    reply = world.d.ask(admin.AbortRoom(1, 7, "no more"))

    assert isinstance(reply, admin.Report)
    assert reply.changed["quarantined_pages"] == 7
    assert states(world) == [Decode.DRAINING]
    world.land_posts()
    assert totals(world.d) == PageTotals(free=63)


def test_a_fence_ends_every_draining_part():
    world, _, _ = half_sent()
    world.d.call(client.CancelReceive, receive=1)
    world.d.ask(admin.Fence(1))
    world.run()

    assert states(world) == []
    assert totals(world.d) == PageTotals(free=63)


def test_bytes_in_doubt_of_one_source_keep_the_pages_until_this_host_is_quiet():
    world = World(sources=TWO)
    world.hold_posts = True
    world.hold_quiet = True
    world.doubts = True
    number = receive(world)
    first, second = senders(world)
    first.advance(80)
    second.advance(80)
    world.d.call(client.CancelReceive, receive=number)
    world.pass_time(7.0)  # both destroy their agents at the drain deadline

    assert totals(world.d) == PageTotals(free=56, quarantined=7)
    assert len(world.d.node.decoder.quarantines.leases) == 1


def in_doubt() -> World:
    """Given up; the first source has destroyed its agent and left bytes, the second writes on."""
    world = World(sources=TWO)
    world.hold_posts = world.hold_quiet = world.doubts = True
    number = receive(world)
    first, second = senders(world)
    first.advance(80)
    second.advance(80)
    world.cut = {"p1"}
    world.d.call(client.CancelReceive, receive=number)
    world.pass_time(1.0)
    prefiller = first.side.node.prefiller
    prefiller._peers.drop_agent(world.d.incarnation, world.d.generation, "a test")
    world.pass_time(1.0)
    assert states(world) == [Decode.DRAINING]
    world.doubts = False
    return world


def test_bytes_in_doubt_of_the_first_writer_outlast_the_last_one():
    world = in_doubt()
    world.hold_posts = False
    world.land_posts()
    world.cut = set()
    world.pass_time(3.0)

    assert states(world) == []
    assert totals(world.d) == PageTotals(free=56, quarantined=7)  # until this host is quiet
    assert list(world.d.node.decoder.quarantines.leases) == [1]


def test_a_fence_ends_the_doubt_of_every_writer():
    world = in_doubt()
    world.d.ask(admin.Fence(1))
    world.run()

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.node.decoder.quarantines.leases == {}


def test_the_aux_of_a_source_that_is_not_asked_for_it_stays_at_home():
    world = World(sources=TWO)
    receive(world)
    said: list[Settled] = []
    world.is_lost = lambda letter: (  # type: ignore[method-assign]
        isinstance(letter.message, Settled) and bool(said.append(letter.message))
    )
    for one in senders(world):
        one.finish(b"of " + one.side.name.encode())

    assert [one.aux for one in said] == [b"of p", b""]


# ---- what is said of them ------------------------------------------------------------------------


def test_a_room_says_which_part_each_source_sends_and_what_it_waits_for():
    world, _, _ = half_sent()

    rooms = {room.peer: room for room in snapshot(world.d.node).rooms}
    assert {name: room.share for name, room in rooms.items()} == {
        "p": "part 1 of 2, pages 0..4, aux",
        "p1": "part 2 of 2, pages 4..7",
    }
    assert rooms["p"].waiting_for == sentence_of(
        "a room says which part each source sends and what it waits for"
    )
    assert [room.share for room in snapshot(world.sides["p1"].node).rooms] == [
        "part 2 of 2, pages 4..7"
    ]
    reply = world.d.ask(admin.Why(1, "room", 7))
    assert isinstance(reply, admin.Because)
    assert "part 2 of 2, pages 4..7" in reply.facts
    assert {"receive:1", "receive:2", "peer:p", "peer:p1"} <= set(reply.links)


# ---- decode_prefix_len ---------------------------------------------------------------------------


def test_every_offer_says_the_same_prefix_and_every_accept_echoes_it():
    world = World(sources=TWO)
    cached(world.d, FULL)
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, tokens((1, 160)), room=7, source=TWO)
    offers = [letter.message for letter in world.held(Offer)]

    assert [one.decode_prefix_len for one in offers] == [96, 96]
    world.hold_wire = False
    world.lost = {Accept}
    world.run()
    accepts = []
    world.lost = set()
    world.is_lost = lambda letter: (  # type: ignore[method-assign]
        isinstance(letter.message, Accept) and not accepts.append(letter.message)
    )
    senders(world, tokens((1, 160)))
    assert [one.decode_prefix_len for one in accepts] == [96, 96]


def test_a_source_that_begins_elsewhere_fails_the_receive_with_both_numbers():
    """scenario G13: one of two is wrong, and both fail at once."""
    world = World(sources=TWO)
    receive(world)
    wrong = Accept(world.sides["p1"].incarnation, world.d.incarnation, 2, 48)
    world.inject(world.d, wrong, world.sides["p1"])

    refusal = failed(world).refusal
    assert refusal.code is Code.BAD_PREFIX
    assert refusal.numbers == {"offered": 0, "accepted": 48, "source": "p1"}


def test_an_offer_that_comes_again_with_another_prefix_is_refused():
    world = World(sources=TWO)
    cached(world.d, FULL)
    receive(world, tokens((1, 160)))
    part = world.d.node.decoder.open.by_handoff[2]
    offer = part.unanswered
    senders(world, tokens((1, 160)))
    before = len(world.sides["p1"].effects)
    again = msgspec.structs.replace(offer, decode_prefix_len=80)
    world.inject(world.sides["p1"], again, world.d)
    told = [one for one in world.sides["p1"].events if isinstance(one, events.MessageRefused)]

    assert len(world.sides["p1"].effects) > before
    assert told[-1].code == "bad-prefix"
    assert "decode_prefix_len=80, accepted was 96" in told[-1].why


# ---- shares that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"rank": 2}, Code.BAD_REQUEST, "rank 2 of 2"),
        ({"part": 2}, Code.BAD_REQUEST, "source 2 of 2"),
        ({"ranks": 3}, Code.BAD_REQUEST, "rank 1 of 3 among 2 sources"),
        ({"rank": 0}, Code.BAD_PAGES, "what is sent of it is [0, 64)"),
        ({"ranks": 1, "rank": 0}, Code.BAD_PAGES, "what is sent of it is [0, 100)"),
    ],
)
def test_a_share_that_is_none_is_refused(change, code, words):
    world = World(sources=TWO)
    world.lost = {Offer}
    receive(world)
    offer = world.d.node.decoder.open.by_handoff[2].unanswered
    share = msgspec.structs.replace(offer.share, **change)
    world.lost = set()
    world.inject(world.sides["p1"], msgspec.structs.replace(offer, share=share), world.d)

    refusal = failed(world).refusal
    assert refusal.code is code
    assert words in refusal.message


def test_the_source_that_is_done_first_waits_for_closed_as_long_as_the_others_may_take():
    """Its decode side says nothing before all have settled; and may be silent meanwhile."""
    world = World(sources=TWO, linger_s=2.0, lost_s=100.0)
    receive(world)
    first, last = senders(world)
    last.advance(0)
    first.finish()
    world.cut = {"d"}
    world.pass_time(15.0)
    assert closed_yet(world, "p") == []

    world.cut = set()
    last.finish()
    world.pass_time(2.0)

    assert [closed(world, name).outcome for name in TWO] == ["committed", "committed"]


def closed_yet(world: World, name: str) -> list[events.HandoffEnded]:
    return [one for one in world.sides[name].events if isinstance(one, events.HandoffEnded)]
