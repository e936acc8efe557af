"""What a node notes for its next process: whole steps, every effect in order, and nothing else."""

from __future__ import annotations

from kvd.core import effects, inputs
from kvd.core.effects import AnswerEngine, NoteCached, NoteEnded, NoteFreed, NoteHeld, SendToPeer
from kvd.types import NO_PAGES, NO_TOKENS, Pages, Tokens, count, pack_ids
from kvd.wire import admin, client
from kvd.wire.peer import Closed, Integrity, Offer, ReceiveOutcome, Settled
from tests.core.engines import PROMPT, Sender, cached
from tests.core.side import incarnation
from tests.core.world import Side, World, tokens

P, D = incarnation("p", 1), incarnation("d", 1)
NOW_S = 100.0
FIRST_PAGE = tokens((1, 16))
LAST_PAGE = tokens((17, 16))
TWO_PAGES = tokens((1, 32))
OTHER = tokens((500, 16))
FIVE_PAGES = tokens((1000, 80))


def journaled(**more: object) -> World:
    return World(is_journaled=True, **more)


def ids(*numbers: int) -> Pages:
    return Pages(pack_ids(list(numbers)))


def from_engine(
    side: Side, message: client.Request, toks: bytes = b"", session: int = 1
) -> list[effects.Effect]:
    return side.feed(inputs.FromClient(NOW_S, session, message, Tokens(toks)))


def leased(side: Side, toks: Tokens, **fields: object) -> int:
    return side.lease(toks, **fields).lease


def notes(found: list[effects.Effect]) -> list[effects.Effect]:
    kinds = NoteHeld | NoteCached | NoteFreed | NoteEnded
    return [one for one in found if isinstance(one, kinds)]


# ---- leases of engines ---------------------------------------------------------------------------


def test_a_lease_is_noted_before_its_engine_hears_of_it():
    d = journaled().d
    assert from_engine(d, client.OpenLease(5), TWO_PAGES) == [
        NoteHeld(1, 1, 0, ids(62, 63)),
        AnswerEngine(1, client.Leased(5, 1, 0, ids(62, 63))),
    ]


def test_a_lease_with_a_cached_prefix_is_noted_with_the_page_where_that_ends():
    d = journaled().d
    cached(d, FIRST_PAGE)
    assert from_engine(d, client.OpenLease(5), TWO_PAGES) == [
        NoteHeld(2, 1, 63, ids(62)),
        AnswerEngine(1, client.Leased(5, 2, 16, ids(63, 62))),
    ]


def test_a_commit_notes_the_pages_that_join_and_where_the_lock_ends_now():
    d = journaled().d
    lease = leased(d, TWO_PAGES)
    assert from_engine(d, client.CommitLease(5, lease)) == [
        NoteCached(1, 63, "", 0, 0, ids(62, 63), TWO_PAGES),
        AnswerEngine(1, client.PageTable(5, 0, ids(62, 63))),
    ]


def test_a_commit_behind_a_prefix_notes_the_new_page_and_the_one_before_it():
    d = journaled().d
    cached(d, FIRST_PAGE)
    lease = leased(d, TWO_PAGES)
    assert from_engine(d, client.CommitLease(5, lease)) == [
        NoteCached(2, 62, "", 63, 1, ids(62), LAST_PAGE),
        AnswerEngine(1, client.PageTable(5, 1, ids(62))),
    ]


def test_a_commit_names_its_namespace():
    d = journaled().d
    lease = leased(d, FIRST_PAGE, namespace="blue")
    assert notes(from_engine(d, client.CommitLease(5, lease))) == [
        NoteCached(1, 63, "blue", 0, 0, ids(63), FIRST_PAGE)
    ]


def test_a_commit_of_what_is_cached_already_moves_the_anchor_and_frees_the_duplicates():
    d = journaled().d
    first, second = leased(d, TWO_PAGES), leased(d, TWO_PAGES)
    from_engine(d, client.CommitLease(5, first))

    assert from_engine(d, client.CommitLease(6, second)) == [
        NoteCached(2, 63, "", 0, 0, NO_PAGES, NO_TOKENS),
        NoteFreed(ids(60, 61)),
        AnswerEngine(1, client.PageTable(6, 0, ids(62, 63))),
    ]


def test_a_commit_that_is_partly_cached_notes_only_what_joined():
    d = journaled().d
    first, second = leased(d, FIRST_PAGE), leased(d, TWO_PAGES)
    from_engine(d, client.CommitLease(5, first))

    assert from_engine(d, client.CommitLease(6, second)) == [
        NoteCached(2, 62, "", 63, 1, ids(62), LAST_PAGE),
        NoteFreed(ids(61)),
        AnswerEngine(1, client.PageTable(6, 0, ids(63, 62))),
    ]


def test_a_commit_without_a_whole_page_notes_nothing():
    d = journaled().d
    lease = leased(d, tokens((1, 8)), reserve_tokens=8)
    assert notes(from_engine(d, client.CommitLease(5, lease))) == []


def test_a_commit_that_shall_not_be_cached_notes_nothing():
    d = journaled().d
    lease = leased(d, TWO_PAGES, cache=False)
    assert notes(from_engine(d, client.CommitLease(5, lease))) == []


def test_an_extension_notes_only_the_new_pages():
    d = journaled().d
    lease = leased(d, TWO_PAGES)
    assert from_engine(d, client.ExtendLease(5, lease, 16)) == [
        NoteHeld(1, 1, 0, ids(61)),
        AnswerEngine(1, client.PageTable(5, 2, ids(61))),
    ]


def test_an_extension_that_fits_the_last_page_notes_nothing():
    d = journaled().d
    lease = leased(d, tokens((1, 8)))
    assert notes(from_engine(d, client.ExtendLease(5, lease, 8))) == []


def test_a_release_notes_the_end_and_the_free_pages_before_it_is_answered():
    d = journaled().d
    lease = leased(d, TWO_PAGES)
    assert from_engine(d, client.ReleaseLease(5, lease)) == [
        NoteEnded(1),
        NoteFreed(ids(62, 63)),
        AnswerEngine(1, client.Done(5)),
    ]


def test_a_commit_with_its_release_notes_what_stays_cached_and_what_is_free():
    d = journaled().d
    lease = leased(d, FIRST_PAGE, reserve_tokens=16)
    assert from_engine(d, client.CommitAndRelease(5, lease)) == [
        NoteCached(1, 62, "", 0, 0, ids(62), FIRST_PAGE),
        NoteEnded(1),
        NoteFreed(ids(63)),
        AnswerEngine(1, client.Done(5)),
    ]


def test_an_engine_that_dies_frees_all_it_had():
    d = journaled().d
    leased(d, FIRST_PAGE)
    leased(d, OTHER)
    assert d.feed(inputs.ClientHungUp(NOW_S, 1)) == [
        NoteEnded(1),
        NoteFreed(ids(63)),
        NoteEnded(2),
        NoteFreed(ids(62)),
    ]


# ---- pages that change hands ---------------------------------------------------------------------


def test_an_evicted_page_is_noted_as_free_before_the_next_lease_has_it():
    d = journaled(d_pages=4).d
    cached(d, TWO_PAGES)
    assert from_engine(d, client.OpenLease(5), tokens((500, 48))) == [
        NoteFreed(ids(2, 3)),
        NoteHeld(2, 1, 0, ids(1, 2, 3)),
        AnswerEngine(1, client.Leased(5, 2, 0, ids(1, 2, 3))),
    ]


def test_an_evicted_page_is_noted_as_free_before_a_peer_is_offered_it():
    world = journaled(d_pages=8)
    cached(world.d, FIVE_PAGES)

    first, second = from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)[::2]

    assert first == NoteFreed(ids(3, 4, 5, 6, 7))
    assert isinstance(second, SendToPeer)
    assert isinstance(second.message, Offer)
    assert second.message.grants[0].pages == ids(1, 2, 3, 4, 5, 6, 7)


def test_what_a_queued_request_gets_is_noted_when_it_is_admitted():
    d = journaled(d_pages=4).d
    first = leased(d, tokens((1, 48)))
    from_engine(d, client.OpenLease(5, deadline_s=9.0), OTHER)
    assert from_engine(d, client.ReleaseLease(6, first)) == [
        NoteEnded(1),
        NoteFreed(ids(1, 2, 3)),
        AnswerEngine(1, client.Done(6)),
        NoteHeld(2, 1, 0, ids(3)),
        AnswerEngine(1, client.Leased(5, 2, 0, ids(3))),
    ]


def test_an_operator_who_evicts_is_told_after_the_note():
    d = journaled().d
    cached(d, TWO_PAGES)
    noted, report = d.feed(inputs.FromOperator(NOW_S, b"op", admin.Evict(1, 2)))
    assert noted == NoteFreed(ids(62, 63))
    assert isinstance(report, effects.AnswerOperator)


def test_an_operator_who_flushes_is_told_after_the_note():
    d = journaled().d
    cached(d, TWO_PAGES)
    noted, report = d.feed(inputs.FromOperator(NOW_S, b"op", admin.Flush(1)))
    assert noted == NoteFreed(ids(62, 63))
    assert isinstance(report, effects.AnswerOperator)


def test_a_flush_of_nothing_notes_nothing():
    d = journaled().d
    assert notes(d.feed(inputs.FromOperator(NOW_S, b"op", admin.Flush(1)))) == []


# ---- receives ------------------------------------------------------------------------------------


def receiving(world: World) -> list[effects.Effect]:
    return from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)


def test_a_receive_is_not_noted_before_its_engine_has_it():
    world = journaled()
    world.hold_posts = True
    assert notes(receiving(world)) == []


def test_a_delivered_prompt_is_noted_as_its_engines_then_as_cached_and_then_told():
    world = journaled()
    receiving(world)
    pages = ids(57, 58, 59, 60, 61, 62, 63)
    settled = Settled(P, D, 1, ReceiveOutcome.DELIVERED, None, b"", 896)

    assert world.d.feed(inputs.FromPeer(NOW_S, "out:p", settled)) == [
        NoteHeld(1, 1, 0, pages),
        NoteCached(1, 62, "", 0, 0, pages[: 6 * 4], PROMPT[: 96 * 4]),
        AnswerEngine(1, client.Received(1, 1, pages, b"")),
        SendToPeer("out:p", Closed(D, P, 1, ReceiveOutcome.COMMITTED)),
    ]


def test_what_was_given_up_while_it_was_verified_is_noted_as_cached_and_as_nobodys_lease():
    world = journaled(integrity=Integrity.FULL)
    world.hold_verify = True
    sender = Sender(world)
    receiving(world)
    sender.finish()
    world.run()
    from_engine(world.d, client.CancelReceive(6, 1))
    (asked,) = world.d.asked
    pages = ids(57, 58, 59, 60, 61, 62, 63)

    made = world.d.feed(inputs.Verified(NOW_S, asked.ticket, ()))

    assert notes(made) == [
        NoteCached(0, 0, "", 0, 0, pages[: 6 * 4], PROMPT[: 96 * 4]),
        NoteFreed(ids(63)),
    ]


# ---- posts that read -----------------------------------------------------------------------------


def test_a_lease_that_only_a_send_still_holds_is_free_for_the_next_process():
    world = journaled()
    sender = Sender(world)
    lease = sender.lease
    assert from_engine(world.p, client.ReleaseLease(50, lease.lease)) == [
        NoteEnded(1),
        NoteFreed(Pages(lease.pages)),
        AnswerEngine(1, client.Done(50)),
    ]


def test_replaced_pages_are_noted_when_the_last_post_has_read_them():
    world = journaled()
    world.hold_posts = True
    sender = Sender(world)
    receiving(world)
    sender.advance(100)
    cached(world.p, PROMPT)
    made = from_engine(world.p, client.CommitLease(60, sender.lease.lease))
    assert [type(one) for one in notes(made)] == [NoteCached]

    (post,) = world.p.node.prefiller.posts.parts
    over = world.p.feed(inputs.PostDone(NOW_S, post, 896))

    assert NoteFreed(Pages(sender.lease.pages[: 6 * 4])) in over


# ---- retraction ----------------------------------------------------------------------------------


def test_a_retracted_lease_ends_for_the_next_process():
    d = journaled().d
    lease = leased(d, TWO_PAGES)
    assert from_engine(d, client.RetractLease(5, lease, "nothing")) == [
        NoteEnded(1),
        NoteFreed(ids(62, 63)),
        AnswerEngine(1, client.Retracted(5, 0, 0)),
    ]


def test_a_saved_lease_ends_when_its_bytes_are_saved():
    world = journaled()
    world.hold_copies = True
    lease = leased(world.d, TWO_PAGES)
    assert notes(from_engine(world.d, client.RetractLease(5, lease))) == []

    made = world.d.feed(inputs.Copied(NOW_S, 1, 256))

    assert made[:2] == [NoteEnded(1), NoteFreed(ids(62, 63))]
    assert isinstance(made[2], AnswerEngine)


def test_a_lease_that_is_resumed_is_noted_before_its_bytes_are_copied_back():
    world = journaled()
    lease = leased(world.d, TWO_PAGES)
    world.d.call(client.RetractLease, lease=lease)
    world.hold_copies = True

    noted, copy = from_engine(world.d, client.ResumeLease(9, lease))

    assert noted == NoteHeld(1, 1, 0, ids(62, 63))
    assert isinstance(copy, effects.Copy)


def test_a_retracted_lease_that_is_released_is_not_noted_again():
    d = journaled().d
    lease = leased(d, TWO_PAGES)
    d.call(client.RetractLease, lease=lease)
    assert notes(from_engine(d, client.ReleaseLease(9, lease))) == []


# ---- nothing -------------------------------------------------------------------------------------


def test_a_pool_that_ends_with_its_process_notes_nothing():
    world = World(d_pages=4)
    cached(world.d, TWO_PAGES)
    cached(world.d, tokens((500, 48)))
    world.d.ask(admin.Flush(1))
    assert notes(world.d.effects) == []
    assert count(world.d.node.leases.pool.free_ids()) == 3
