"""What arrives is kept when it is what was sent, and not before: seals, sums, and the verdict.

scenario G23.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvd.core import effects, inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.seal import SUM_BYTES, Seal, chosen, page_sum, seal_of
from kvd.errors import Code
from kvd.types import page_ids
from kvd.wire import admin, client, events
from kvd.wire.peer import Closed, Integrity, Progress, ReceiveOutcome, Settled
from tests.core.engines import FULL, PROMPT, PageTotals, Sender, cached, offered, totals
from tests.core.sentences import sentence_of
from tests.core.world import PAGE, World, content, tokens

N_PAGES = 7
ROOM = 7


def asked(world: World) -> int:
    """Ask for the prompt; the number of the receive."""
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    assert isinstance(reply, client.Receiving), reply
    return reply.receive


def verifying(**more: object) -> World:
    """A world whose decode side has every byte of room 7 and is being asked about them."""
    world = World(**{"integrity": Integrity.FULL, **more})
    world.hold_verify = True
    asked(world)
    Sender(world).finish()
    assert room_states(world) == ["verifying"]
    world.d.take()
    return world


def room_states(world: World) -> list[str]:
    return [part.state for part in snapshot(world.d.node).rooms if part.side == "decode"]


def answer(world: World) -> None:
    """Our transfer process says what it found."""
    world.d.answer_verify()
    world.run()


def damage(world: World, *logical: int) -> list[int]:
    """These pages of the delta are not what was sent; their ids."""
    pages = page_ids(world.d.asked[0].pages)
    bad = [pages[one] for one in logical]
    for page in bad:
        world.d.memory[page] = "torn"
    return bad


# ---- seals and sums ------------------------------------------------------------------------------


def test_both_sides_work_out_one_seal_from_the_offer():
    world = World(integrity=Integrity.FULL)
    cached(world.d, tokens((1, 32)))
    asked(world)

    offer = offered(world)
    (part,) = world.d.node.decoder.open.parts.values()

    assert offer.integrity is Integrity.FULL
    (seal,) = part.seals
    assert seal == seal_of(offer, "kv", (2, N_PAGES))
    assert (seal.integrity, seal.first, seal.end) == (Integrity.FULL, 2, N_PAGES)


@pytest.mark.parametrize(
    ("field", "value"),
    [("source", "another"), ("handoff", 2), ("digest", b"d" * 16), ("component", "idx")],
)
def test_a_seal_is_bound_to_component_incarnation_handoff_and_prompt(field, value):
    world = World(integrity=Integrity.FULL)
    asked(world)
    offer = offered(world)
    is_offers = field != "component"
    other = msgspec.structs.replace(offer, **{field: value}) if is_offers else offer

    one, two = seal_of(offer, "kv", (2, 7)), seal_of(other, "kv" if is_offers else value, (2, 7))

    assert one.key != two.key


def test_a_sum_is_bound_to_its_page_and_its_seal():
    seal, other = (Seal(Integrity.FULL, key * 16, 0, 9) for key in (b"a", b"b"))
    sums = [
        page_sum(seal, 3, [b"one", b"two"]),
        page_sum(seal, 4, [b"one", b"two"]),
        page_sum(other, 3, [b"one", b"two"]),
        page_sum(seal, 3, [b"two", b"one"]),
    ]

    assert len(set(sums)) == 4
    assert page_sum(seal, 3, [b"onetwo"]) == sums[0]


def test_sampling_takes_the_ends_and_one_page_in_sixteen_of_the_rest():
    counts = []
    keys = np.random.default_rng(1)
    for _ in range(50):
        seal = Seal(Integrity.SAMPLED, keys.bytes(16), 3, 1603)
        picked = chosen(seal, 3, 1603)
        assert (picked[0], picked[-1]) == (3, 1602)
        cut = np.concatenate([chosen(seal, 3, 800), chosen(seal, 800, 1603)])
        assert np.array_equal(cut, picked), "posts of a part choose what the whole chooses"
        counts.append(picked.size)

    assert 90 < np.mean(counts) < 110
    keys = (b"a", b"b", b"c")
    seals = [Seal(Integrity.SAMPLED, key * 16, 0, 160) for key in keys]
    assert len({chosen(seal, 0, 160).tobytes() for seal in seals}) == len(keys)


def test_nothing_is_chosen_when_it_is_off_and_everything_when_it_is_full():
    assert chosen(Seal(Integrity.OFF, b"k" * 16, 3, 9), 0, 99).tolist() == []
    assert chosen(Seal(Integrity.FULL, b"k" * 16, 3, 9), 0, 99).tolist() == [3, 4, 5, 6, 7, 8]


# ---- the prefill side ----------------------------------------------------------------------------


def test_posts_name_their_place_in_the_prompt_and_settled_brings_the_sums_of_all():
    """scenario G23: the cached prefix is in neither side's sums."""
    world = World(integrity=Integrity.FULL)
    cached(world.d, tokens((1, 32)))
    asked(world)
    sender = Sender(world)
    sender.advance(70)
    world.lost = {Closed}
    sender.finish()

    posts = [one for one in world.p.effects if isinstance(one, effects.Post)]
    seal = posts[0].seal
    sent = [one.message for one in world.p.effects if isinstance(one, effects.SendToPeer)]
    settled = [one for one in sent if isinstance(one, Settled)]

    assert [(one.first_page, len(one.source) // 4) for one in posts] == [(2, 2), (4, 3)]
    assert {one.seal for one in posts} == {seal}
    wanted = [
        page_sum(seal, k, [content(PROMPT, "", min((k + 1) * PAGE, 100)).encode()])
        for k in range(2, N_PAGES)
    ]
    assert np.frombuffer(settled[0].checksums, "<u8").tolist() == wanted


def test_nothing_is_summed_when_the_decode_side_does_not_ask_for_it():
    """The decode side decides, whatever is configured here."""
    world = World(integrity=Integrity.OFF)
    world.p.node.settings = msgspec.structs.replace(world.p.config, integrity=Integrity.FULL)
    asked(world)
    Sender(world).finish()

    (post,) = [one for one in world.p.effects if isinstance(one, effects.Post)]
    assert (post.seal.integrity, post.first_page) == (Integrity.OFF, 0)
    assert not [one for one in world.d.effects if isinstance(one, effects.Verify)]
    assert room_states(world) == ["ready"]


# ---- ahead of the end ----------------------------------------------------------------------------


def landing(**more: object) -> tuple[World, Sender]:
    """Room 7 with four pages written: two posts of two pages, of which none has landed."""
    world = World(**{"integrity": Integrity.FULL, "sum_ahead_bytes": 1, **more})
    cached(world.d, tokens((1, 32)))
    asked(world)
    sender = Sender(world)
    world.hold_posts = True
    sender.advance(64)
    sender.advance(96)
    assert [len(flight.pairs) for flight in world.p.flights.values()] == [2, 2]
    return world, sender


def orders(world: World) -> list[effects.SumLanded | effects.ForgetSums | effects.Verify]:
    kinds = effects.SumLanded | effects.ForgetSums | effects.Verify
    return [one for one in world.d.effects if isinstance(one, kinds)]


def test_what_has_landed_is_summed_while_the_rest_is_on_its_way():
    world, sender = landing()
    first, second = world.p.flights.values()

    world.p.land(second)
    world.run()
    assert not orders(world), "what lies behind a page that is not there has not landed"
    world.p.land(first, 1)
    world.p.feed(inputs.PostMoved(world.now_s, first.post.post, 128, 1))
    world.run()
    world.p.land(first)
    world.run()
    sender.finish()
    world.land_posts()

    early, more, verify = orders(world)
    assert (early.ticket, early.landed) == (more.ticket, 1) == (verify.ticket, 1)
    assert more.landed == 4
    assert (verify.seal, verify.pages) == (early.seal, early.pages)
    assert room_states(world) == ["ready"]


def test_a_page_that_was_damaged_ahead_of_the_end_is_found():
    world, sender = landing()
    first, _ = world.p.flights.values()
    world.p.land(first)
    world.d.memory[page_ids(first.post.destination)[1]] = "torn"
    world.run()

    sender.finish()
    world.land_posts()

    (corrupt,) = [one for one in world.d.events if isinstance(one, events.PagesCorrupt)]
    assert corrupt.logical_pages == (3,)


def test_little_that_has_landed_is_left_for_the_end():
    world, sender = landing(sum_ahead_bytes=2**30)

    world.land_posts()
    sender.finish()
    world.land_posts()

    (verify,) = orders(world)
    assert isinstance(verify, effects.Verify)


def test_nothing_is_summed_ahead_of_an_older_peer_or_of_one_that_tells_of_other_routes():
    world, _ = landing()
    (part,) = world.d.node.decoder.open.parts.values()

    for landed in ((), (4, 4)):
        said = Progress(part.incarnation, world.d.incarnation, part.handoff, 256, landed)
        world.d.feed(inputs.FromPeer(world.now_s, "out:p", said))

    assert not orders(world)


def test_what_was_summed_for_a_handoff_that_fails_is_forgotten():
    world, _ = landing()
    first, _ = world.p.flights.values()
    world.p.land(first)
    world.run()
    (early,) = orders(world)

    world.d.call(client.CancelReceive, receive=1)
    world.land_posts()
    world.run()

    assert orders(world) == [early, effects.ForgetSums(early.ticket)]
    assert not world.d.ahead


# ---- the decode side -----------------------------------------------------------------------------


def test_delivered_pages_are_verified_before_they_are_cached():
    world = verifying()
    before = totals(world.d)
    (verify,) = [one for one in world.d.effects if isinstance(one, effects.Verify)]

    world.d.answer_verify()
    (good,) = world.d.inbox
    heard = world.d.node.step(msgspec.structs.replace(good, at_s=world.now_s)).effects

    assert (before.free, before.held, before.cached) == (56, N_PAGES, 0)
    assert len(verify.sums) == SUM_BYTES * N_PAGES
    assert verify.pages == world.d.node.leases.leases[1].page_table
    assert heard == [
        effects.AnswerEngine(1, client.Received(1, 1, verify.pages, b"aux")),
        effects.SendToPeer(
            "out:p", Closed(world.d.incarnation, world.p.incarnation, 1, ReceiveOutcome.COMMITTED)
        ),
    ]
    after = totals(world.d)
    assert (after.free, after.held, after.cached) == (56, 1, 6)


def test_a_full_hit_is_ready_at_once():
    world = World(integrity=Integrity.FULL)
    cached(world.d, FULL)
    world.d.call(client.ReceiveRequest, FULL, room=ROOM, source=("p",))
    Sender(world, FULL).finish()

    assert not [one for one in world.d.effects if isinstance(one, effects.Verify)]
    assert room_states(world) == ["ready"]


def test_a_wrong_page_fails_the_room_and_is_named_and_nothing_is_cached():
    world = verifying()
    world.hold_quiet = True
    bad = damage(world, 2)

    answer(world)

    (failed,) = world.d.take()
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CORRUPT
    assert f"page {bad[0]} (page 2 of the prompt, tokens [32, 48))" in failed.refusal.message
    assert "1 of 7 verified pages (full, 7 were sent)" in failed.refusal.message
    assert failed.refusal.numbers == {
        "bad_pages": 1,
        "checked_pages": 7,
        "total_pages": 7,
        "pages": str(bad[0]),
        "logical_pages": "2",
        "page_size": PAGE,
    }
    assert totals(world.d) == PageTotals(free=56, quarantined=N_PAGES)
    (told,) = [one for one in world.d.events if isinstance(one, events.PagesCorrupt)]
    assert (told.pages, told.logical_pages, told.bad_pages) == ((bad[0],), (2,), 1)
    (finished,) = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert finished.failure is not None
    assert finished.failure.code is Code.CORRUPT
    assert room_states(world) == []

    world.d.be_quiet()
    world.run()
    assert totals(world.d) == PageTotals(free=63)


def test_many_wrong_pages_are_counted_and_the_first_are_named():
    world = World(integrity=Integrity.FULL)
    world.hold_verify = True
    long = tokens((1, 40 * PAGE))
    world.d.call(client.ReceiveRequest, long, room=ROOM, source=("p",))
    Sender(world, long).finish()
    damage(world, *range(5, 25))

    answer(world)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert "20 of 40 verified pages" in failed.refusal.message
    assert failed.refusal.message.count("of the prompt") == 8
    assert "and 12 more; nothing of it was cached" in failed.refusal.message


def test_other_rooms_go_on_when_one_is_corrupt():
    world = verifying()
    other = tokens((5000, 100))
    world.d.call(client.ReceiveRequest, other, room=8, source=("p",))
    Sender(world, other, room=8).finish()
    damage(world, 0)

    answer(world)
    answer(world)

    heard = world.d.take()
    assert [type(one) for one in heard if not isinstance(one, client.Receiving)] == [
        client.ReceiveFailed,
        client.Received,
    ]
    assert room_states(world) == ["ready"]


@pytest.mark.parametrize("sums", [b"", b"\0" * 8, b"\0" * 57, b"\0" * 64])
def test_sums_that_are_missing_or_too_many_fail_the_room_with_their_own_sentence(sums):
    """An older peer, or a hostile one."""
    world = World(integrity=Integrity.FULL)
    asked(world)
    world.d.take()
    settled = Settled(
        world.p.incarnation,
        world.d.incarnation,
        1,
        ReceiveOutcome.DELIVERED,
        aux=b"x",
        checksums=sums,
    )

    world.inject(world.d, settled)

    (failed,) = world.d.take()
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CORRUPT
    assert f"p sent {len(sums)} bytes of page sums where 56 are needed" in failed.refusal.message
    assert totals(world.d) == PageTotals(free=63)


def test_what_cannot_be_summed_is_not_kept():
    world = verifying()
    world.d.feed(inputs.Verified(world.now_s, 1, (), "there is no region 'kv' here"))
    world.run()

    (failed,) = world.d.take()
    assert isinstance(failed, client.ReceiveFailed)
    assert "cannot be verified: there is no region 'kv' here" in failed.refusal.message


# ---- who leaves meanwhile ------------------------------------------------------------------------


def test_a_cancel_while_verifying_is_heard_at_once_and_what_was_delivered_is_cached():
    world = verifying()

    world.d.call(client.CancelReceive, receive=1)
    done, failed = world.d.take()
    assert isinstance(done, client.Done)
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CANCELLED
    assert room_states(world) == ["verifying"]

    answer(world)
    assert world.d.take() == []
    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)
    (finished,) = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert finished.failure is None
    assert (room_states(world), world.d.node.leases.leases) == ([], {})


def test_a_cancelled_room_that_is_corrupt_fails_once_and_caches_nothing():
    world = verifying()
    world.d.call(client.CancelReceive, receive=1)
    world.d.take()
    damage(world, 1)

    answer(world)

    assert world.d.take() == []
    assert totals(world.d) == PageTotals(free=63)
    (finished,) = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert finished.failure is not None
    assert finished.failure.code is Code.CORRUPT


def test_the_deadline_passes_while_verifying():
    world = verifying(max_deadline_s=2.0)

    world.pass_time(2.5)
    (failed,) = world.d.take()
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.DEADLINE
    assert "our transfer process is verifying them" in failed.refusal.message

    answer(world)
    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)


def test_the_engine_dies_while_verifying():
    world = verifying()

    world.d.hang_up()
    answer(world)

    assert world.d.node.leases.leases == {}
    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)


# ---- processes that end meanwhile ----------------------------------------------------------------


def test_the_next_transfer_process_is_asked_again():
    """The writer has settled, so the pages are as safe as before."""
    world = verifying()
    first = world.d.asked[0]

    world.d.restart_transfer("it crashed")
    world.run()

    assert world.d.asked == [first]
    answer(world)
    (received,) = world.d.take()
    assert isinstance(received, client.Received)
    assert world.d.holds(received.pages, PROMPT)


def test_what_is_delivered_while_no_transfer_process_serves_is_asked_of_the_next():
    world = World(integrity=Integrity.FULL)
    world.hold_verify = world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    world.hold_wire = False
    world.run()
    world.hold_wire = True
    Sender(world).finish()
    (settled,) = [one for one in world.wire if isinstance(one.message, Settled)]

    world.d.stop_transfer("it crashed")
    world.deliver(settled)
    assert (room_states(world), world.d.asked) == (["verifying"], [])
    world.d.start_transfer("it crashed")

    assert len(world.d.asked) == 1


def test_the_writer_restarts_while_we_verify():
    world = verifying()

    world.restart(world.p)
    world.pass_time(1.0)
    assert [one for one in world.d.events if isinstance(one, events.PeerReplaced)]
    assert room_states(world) == ["verifying"]
    answer(world)

    (received,) = world.d.take()
    assert isinstance(received, client.Received)
    assert world.d.holds(received.pages, PROMPT)
    assert world.d.node.decoder.outcomes.kept == {}


@pytest.mark.parametrize("outcome", [ReceiveOutcome.DELIVERED, ReceiveOutcome.FAILED])
def test_a_second_last_word_while_verifying_changes_nothing(outcome):
    world = verifying()
    effects_before = len(world.d.effects)

    world.inject(
        world.d, Settled(world.p.incarnation, world.d.incarnation, 1, outcome, aux=b"forged")
    )
    assert len(world.d.effects) == effects_before

    answer(world)
    (received,) = world.d.take()
    assert isinstance(received, client.Received)
    assert received.aux == b"aux"


# ---- what people see -----------------------------------------------------------------------------


def test_rooms_and_why_say_what_is_verified_and_how_it_ended():
    world = verifying()
    (room,) = [part for part in snapshot(world.d.node).rooms if part.side == "decode"]
    said = world.d.ask(admin.Why(1, "room", ROOM))

    assert room.waiting_for == sentence_of("rooms and why say what is verified and how it ended")
    assert isinstance(said, admin.Because)
    assert "waits for its pages to be verified (7 pages)" in said.sentence
    assert said.facts[-1].endswith("7 of 7 pages to verify")


def test_a_quarantine_after_a_corrupt_page_says_what_ends_it():
    world = verifying()
    world.hold_quiet = True
    damage(world, 0)
    answer(world)

    (lease,) = snapshot(world.d.node).leases

    assert lease.state == "quarantined"
    assert lease.waiting_for == sentence_of("a quarantine after a corrupt page says what ends it")
