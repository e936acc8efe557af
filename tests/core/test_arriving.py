"""A receive whose engine uses what has come: how far that is, what it may read, and how it ends."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import faults
from kvd.core.cache.lease import ARRIVAL, COPY, ENGINE
from kvd.core.layout.seal import chosen
from kvd.errors import Code
from kvd.types import page_ids, slice_pages
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, pages_sum
from kvd.wire.peer import Integrity, Progress
from tests.core.engines import PROMPT, Sender, cached
from tests.core.world import PAGE, World, tokens

ROOM = 7


class Coming:
    """Room 7 with pages 2 to 6 of the prompt on their way, in two posts, of two of them each."""

    def __init__(
        self, *, as_it_comes: bool = True, upto: tuple[int, int] = (64, 96), **more: object
    ) -> None:
        self.world = world = World(**{"integrity": Integrity.FULL, "sum_ahead_bytes": 1, **more})
        cached(world.d, tokens((1, 32)))
        request = client.ReceiveRequest
        reply = world.d.call(request, PROMPT, room=ROOM, source=("p",), as_it_comes=as_it_comes)
        assert isinstance(reply, client.Receiving), reply
        self.sender = Sender(world)
        world.hold_posts = True
        for n_tokens in upto:
            self.sender.advance(n_tokens)
        self.first, self.second = world.p.flights.values()
        self.calls = 100

    @property
    def lease(self):
        (lease,) = [one for one in self.world.d.node.leases.leases.values() if one.room == ROOM]
        return lease

    def land(self, flight) -> None:
        self.world.p.land(flight)
        self.world.run()

    def told(self) -> list[client.Arriving]:
        return [one for one in self.world.d.take() if isinstance(one, client.Arriving)]

    def begins(self, first: int, end: int) -> CopyBegins:
        self.calls += 1
        pages = slice_pages(self.lease.page_table, first, end)
        part = CopyPart("kv", first, end - first, pages_sum(pages))
        return CopyBegins(self.calls, self.lease.id, False, (part,), 0)

    def load(self, first: int, end: int) -> CopyBegins | Code:
        """What is asked of the pages, or why it is refused."""
        message = self.begins(first, end)
        refusal = self.world.d.copy_said(message)
        return message if refusal is None else refusal.code

    def over(self, copy: CopyBegins) -> Code | None:
        self.calls += 1
        refusal = self.world.d.copy_said(CopyEnds(self.calls, copy.call, True, 512, 10, 20))
        return None if refusal is None else refusal.code

    def finish(self) -> client.Received:
        self.sender.finish()
        self.world.land_posts()
        (received,) = [one for one in self.world.d.take() if isinstance(one, client.Received)]
        return received

    def sound(self) -> None:
        for side in (self.world.d, self.world.p):
            assert not list(faults(side.node))


@pytest.fixture
def coming() -> Coming:
    return Coming()


def test_an_engine_hears_how_far_it_has_come_and_is_what_was_sent(coming):
    coming.land(coming.first)
    (first,) = coming.told()
    coming.land(coming.second)
    (second,) = coming.told()

    assert (first.tokens, second.tokens) == (64, 96)
    assert first.pages == coming.lease.page_table
    assert not second.pages
    assert coming.finish().pages == first.pages
    coming.sound()


def test_pages_of_which_none_is_sampled_count_as_well():
    coming = Coming(integrity=Integrity.SAMPLED, upto=(48, 80))
    seal = coming.second.post.seal
    assert (seal.first, seal.end, chosen(seal, 3, 5).size) == (2, 7, 0), "none of the second post"
    coming.land(coming.first)
    coming.land(coming.second)

    assert [one.tokens for one in coming.told()] == [48, 80]
    coming.finish()
    coming.sound()


def test_what_lies_behind_a_page_that_is_not_there_has_not_come(coming):
    coming.land(coming.second)
    assert coming.told() == []
    coming.land(coming.first)
    assert [one.tokens for one in coming.told()] == [96]


def test_nothing_is_told_to_who_does_not_ask_nor_without_sums():
    for coming in (Coming(as_it_comes=False), Coming(integrity=Integrity.OFF)):
        coming.land(coming.first)
        assert coming.told() == []
        assert coming.load(2, 4) is Code.BAD_PAGES
        coming.finish()


def test_a_page_that_is_not_what_was_sent_is_told_to_nobody(coming):
    coming.world.p.land(coming.first)
    coming.world.d.memory[page_ids(coming.first.post.destination)[1]] = "torn"
    coming.world.run()
    coming.land(coming.second)

    assert coming.told() == []
    assert coming.load(2, 3) is Code.BAD_PAGES
    coming.sender.finish()
    coming.world.land_posts()
    assert [one.refusal.code for one in coming.world.d.take()] == [Code.CORRUPT]


def test_what_has_come_may_be_loaded_and_no_more(coming):
    assert coming.load(0, 2) not in list(Code), "the prefix was cached here"
    coming.land(coming.first)

    assert coming.load(2, 5) is Code.BAD_PAGES
    copy = coming.load(2, 4)
    assert coming.lease.holders == {ARRIVAL, COPY}
    assert coming.over(copy) is None
    coming.sound()


def test_nothing_is_saved_into_pages_that_are_received(coming):
    coming.land(coming.first)
    part = CopyPart("kv", 2, 1, pages_sum(slice_pages(coming.lease.page_table, 2, 3)))
    refusal = coming.world.d.copy_said(CopyBegins(9, coming.lease.id, True, (part,), 48))
    assert refusal is not None
    assert refusal.code is Code.UNKNOWN_LEASE


def test_a_copy_that_ends_leaves_what_comes_as_it_is(coming):
    coming.land(coming.first)
    assert coming.over(coming.load(2, 4)) is None
    assert coming.lease.holders == {ARRIVAL}
    coming.finish()
    assert coming.lease.holders == {ENGINE}
    coming.sound()


def test_a_copy_goes_on_behind_the_end_and_its_pages_stay_until_it_is_over(coming):
    """Others have cached the same prompt meanwhile, so the lease gets theirs for its own."""
    coming.land(coming.first)
    copy = coming.load(2, 4)
    read = page_ids(slice_pages(coming.lease.page_table, 2, 4))
    late = coming.begins(2, 4)
    cached(coming.world.d, PROMPT)

    assert not {*page_ids(coming.finish().pages)} & {*read}
    assert coming.lease.holders == {ENGINE, COPY}
    assert {*read} <= {*page_ids(coming.lease.deferred)}
    refusal = coming.world.d.copy_said(late)
    assert refusal is not None
    assert "swapped" in refusal.message
    coming.sound()
    assert coming.over(copy) is None
    assert not coming.lease.deferred
    coming.world.d.call(client.ReleaseLease, lease=coming.lease.id)
    coming.sound()


@pytest.mark.parametrize("is_over_first", [False, True])
def test_a_receive_that_fails_while_it_is_loaded_from_leaves_nothing(coming, is_over_first):
    world = coming.world
    before = world.d.node.leases.pool.free_pages + len(page_ids(coming.lease.held))
    coming.land(coming.first)
    assert len(coming.told()) == 1
    copy = coming.load(2, 4)
    if is_over_first:
        assert coming.over(copy) is None

    world.d.call(client.CancelReceive, receive=1)
    coming.sound()
    if not is_over_first:
        # It is forgotten, and reads what it likes: nobody uses that.
        assert coming.over(copy) is Code.BAD_REQUEST
    assert coming.told() == []
    world.land_posts()
    world.run()

    assert world.d.node.leases.pool.free_pages == before
    coming.sound()


def test_a_writer_that_says_more_than_it_has_sent_is_not_believed(coming):
    (part,) = coming.world.d.node.decoder.open.parts.values()
    told = Progress(part.incarnation, coming.world.d.incarnation, part.handoff, 64, (1,))
    for more in (
        {"summed": (0, 2), "checksums": bytes(16)},
        {"summed": (1, 1), "checksums": bytes(8)},
        {"summed": (2, 1)},
        {"summed": (0, 1), "checksums": bytes(16)},
        {"summed": (0, 1, 0, 1), "checksums": bytes(16)},
        {"summed": (1,), "checksums": bytes(8)},
        {"summed": (0, 1)},
    ):
        said = msgspec.structs.replace(told, **more)
        coming.world.d.feed(inputs.FromPeer(coming.world.now_s, "out:p", said))
        coming.world.run()
    orders = [one for one in coming.world.d.effects if isinstance(one, effects.SumLanded)]
    assert not any(one.sums for one in orders)
    assert coming.told() == []


def test_sums_are_said_ahead_only_where_that_is_asked():
    for is_asked in (False, True):
        coming = Coming(as_it_comes=is_asked)
        coming.land(coming.first)
        said = [
            one.message
            for one in coming.world.p.effects
            if isinstance(one, effects.SendToPeer) and isinstance(one.message, Progress)
        ]
        assert [one.landed for one in said] == [(2,)]
        assert [(one.summed, len(one.checksums)) for one in said] == (
            [((0, 2), 16)] if is_asked else [((), 0)]
        )


def said_ahead(coming: Coming) -> list[tuple[int, int, bytes]]:
    """From which page to which one the writer has said sums, and these."""
    progress = [
        one.message
        for one in coming.world.p.effects
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Progress)
    ]
    return [(*one.summed, one.checksums) for one in progress if one.checksums]


def told_to_transfer(coming: Coming) -> list[tuple[int, bytes]]:
    """Up to which page our transfer process hears what the writer says, and that."""
    orders = [one for one in coming.world.d.effects if isinstance(one, effects.SumLanded)]
    return [(one.summed, one.sums) for one in orders if one.sums]


def test_the_sum_of_each_page_is_said_once_and_passed_on_once(coming):
    coming.land(coming.first)
    coming.land(coming.second)

    (first, second) = said_ahead(coming)
    assert (first[:2], second[:2]) == ((0, 2), (2, 4))
    assert told_to_transfer(coming) == [(2, first[2]), (4, second[2])]
    assert len(first[2] + second[2]) == 4 * 8
    coming.finish()
    assert [one.tokens for one in coming.told()] == []


def test_behind_sums_that_were_lost_nothing_is_told_before_the_end(coming):
    (part,) = coming.world.d.node.decoder.open.parts.values()
    told = Progress(part.incarnation, coming.world.d.incarnation, part.handoff, 64, landed=(4,))
    said = msgspec.structs.replace(told, summed=(2, 4), checksums=bytes(16))
    coming.world.d.feed(inputs.FromPeer(coming.world.now_s, "out:p", said))
    coming.world.run()

    assert not part.heard
    assert told_to_transfer(coming) == coming.told() == []


def test_sums_that_are_not_worth_a_word_yet_are_passed_on_with_those_behind_them():
    coming = Coming()
    verifying = coming.world.d.node.decoder.verifying
    verifying._arrived_bytes = 3 * verifying._payload.parts[0].page_bytes
    coming.land(coming.first)
    assert told_to_transfer(coming) == []
    coming.land(coming.second)

    (first, second) = said_ahead(coming)
    assert told_to_transfer(coming) == [(4, first[2] + second[2])]
    assert [one.tokens for one in coming.told()] == [96]


assert PAGE == 16
