"""Fetches: host pages in the device buffer, by what they hold and by what is ordered for it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.components.device_buffer import Buffers
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import Buffer, Component, Host, Mha, Mla, PageOrder, PoolSpec, page_bytes
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.errors import Code
from kvd.types import pack_ids, page_ids
from kvd.wire import client
from tests.core.engines import cached
from tests.core.sentences import sentence_of
from tests.core.world import PAGE, World, content, tokens

if TYPE_CHECKING:
    from kvd.core.components.residency import Residency

SLOTS = 4
LONG = tokens((1, 100))
"""Six whole pages, and one of 4 tokens."""

KV = Component("kv", 1, Mla(8, 4, "float32"), PAGE, tier=Host())
HISPARSE = PoolSpec(
    "main",
    "hisparse",
    PageOrder.PAGE_FIRST,
    (
        KV,
        Component("index", 1, Mha(1, 2, 0, "float32"), PAGE),
        Component("buffer", 1, Mla(8, 4, "float32"), PAGE, Buffer(SLOTS * PAGE)),
    ),
    (64, 64, 2 * SLOTS + 1),
    (13, 0, 0),
)


class Decode:
    """A decode engine with one lease, whose KV it has written and committed."""

    def __init__(self, world: World, toks: bytes = LONG, **fields: object) -> None:
        self.world, self.side, self.toks = world, world.d, toks
        leased = self.side.lease(toks, **fields)
        self.lease, self.row, self.slots = leased.lease, leased.pages, leased.beside[0]
        self.side.write(self.row, toks)
        self.commit()

    def commit(self, toks: bytes = b"") -> None:
        row = self.side.call(client.CommitLease, toks, lease=self.lease)
        assert isinstance(row, client.PageTable), row
        self.row = self.row[: row.first * 4] + row.pages
        self.toks += toks

    def fetch(self, *pages: int, ahead: tuple[int, ...] = ()) -> client.Reply | None:
        return self.side.call(
            client.FetchPages,
            lease=self.lease,
            pages=pack_ids(list(pages)),
            ahead=pack_ids(list(ahead)),
        )

    def answer(self) -> client.Reply | None:
        """To the last call."""
        return self.side.answer(self.side.calls)

    def fetched(self, *pages: int, ahead: tuple[int, ...] = ()) -> client.FetchReply:
        """The answer, its bytes compared with what host memory has."""
        reply = self.fetch(*pages, ahead=ahead)
        assert isinstance(reply, client.FetchReply), reply
        self.check(reply, *pages)
        return reply

    def check(self, reply: client.FetchReply, *pages: int) -> None:
        there = self.side.memory_of("buffer")
        end = len(self.toks) // 4
        wanted = [content(self.toks, "", min((p + 1) * PAGE, end)) for p in pages]
        assert [there.get(page) for page in page_ids(reply.pages)] == wanted
        assert set(page_ids(reply.pages)) <= set(page_ids(self.slots))

    def copies(self) -> list[effects.Copy]:
        """Ordered since this was asked last."""
        found = [one for one in self.side.effects if isinstance(one, effects.Copy)]
        self.side.effects.clear()
        return found

    @property
    def resident(self) -> Residency:
        return buffers(self.world).resident[self.lease]


def buffers(world: World) -> Buffers:
    (keeper,) = world.d.node.leases.components.each
    assert isinstance(keeper, Buffers)
    return keeper


@pytest.fixture
def world() -> World:
    return World(spec=HISPARSE)


@pytest.fixture
def engine(world: World) -> Decode:
    return Decode(world)


def host(engine: Decode, *pages: int) -> bytes:
    row = page_ids(engine.row)
    return pack_ids([row[page] for page in pages])


def device(engine: Decode, *slots: int) -> bytes:
    held = page_ids(engine.slots)
    return pack_ids([held[slot] for slot in slots])


# ---- hits and misses -----------------------------------------------------------------------------


def test_a_fetch_copies_what_is_missing_in_one_piece_and_answers_then(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.copies()

    assert engine.fetch(5, 2) is None
    copies = engine.copies()
    engine.side.finish_copy()
    engine.world.run()

    assert copies == [
        effects.Copy(1, "kv", host(engine, 5, 2), "buffer", device(engine, 0, 1)),
    ]
    copied_bytes = page_bytes(HISPARSE.components[0])
    assert engine.answer() == client.FetchReply(
        engine.side.calls, device(engine, 0, 1), 0, 2, 2 * copied_bytes
    )
    engine.check(engine.answer(), 5, 2)


def test_hits_alone_are_answered_at_once(engine: Decode) -> None:
    engine.fetched(5, 2)
    engine.world.hold_copies = True
    engine.copies()

    reply = engine.fetched(2, 5)

    assert (reply.hits, reply.misses, reply.copied_bytes) == (2, 0, 0)
    assert engine.copies() == []


def test_the_pages_unused_for_longest_make_place(engine: Decode) -> None:
    engine.fetched(0, 1, 2, 3)
    engine.fetched(0, 1)
    engine.copies()

    reply = engine.fetched(4, 5, 0)

    assert (reply.hits, reply.misses) == (1, 2)
    assert reply.pages == device(engine, 2, 3, 0)
    assert [one.destination for one in engine.copies()] == [device(engine, 2, 3)]


def test_a_page_that_is_asked_for_twice_in_one_call_has_one_slot(engine: Decode) -> None:
    reply = engine.fetched(3, 3)

    assert (reply.hits, reply.misses) == (1, 1)
    assert reply.pages == device(engine, 0, 0)


def test_a_page_that_is_wanted_and_named_ahead_too_is_copied_once(engine: Decode) -> None:
    engine.world.hold_copies = True
    assert engine.fetch(1, ahead=(1,)) is None
    assert [one.source for one in engine.copies()] == [host(engine, 1)]

    engine.side.finish_copy()
    engine.world.run()

    reply = engine.answer()
    assert isinstance(reply, client.FetchReply)
    assert (reply.hits, reply.misses) == (0, 1)


def test_nothing_wanted_is_an_answer(engine: Decode) -> None:
    reply = engine.fetched()

    assert reply == client.FetchReply(engine.side.calls, b"", 0, 0, 0)


def test_hits_and_misses_are_counted_by_lease_and_in_total(engine: Decode) -> None:
    engine.fetched(0, 1, 2)
    engine.fetched(1, 2, 3, ahead=(5,))
    other = Decode(engine.world, tokens((900, 40)))
    other.fetched(0)

    state = snapshot(engine.side.node)
    copied_bytes = page_bytes(HISPARSE.components[0])
    assert [(one.beside[0].hits, one.beside[0].misses) for one in state.leases] == [(2, 4), (0, 1)]
    assert state.pools[1].buffer is not None
    assert msgspec.structs.astuple(state.pools[1].buffer)[1:] == (2, 5, 6 * copied_bytes)


# ---- pages ahead ---------------------------------------------------------------------------------


def test_pages_ahead_are_copied_and_nobody_waits_for_them(engine: Decode) -> None:
    engine.fetched(0)
    engine.world.hold_copies = True
    engine.copies()

    reply = engine.fetched(0, ahead=(3, 4))

    assert (reply.hits, reply.misses, reply.copied_bytes) == (1, 0, 0)
    assert [(one.source, one.destination) for one in engine.copies()] == [
        (host(engine, 3, 4), device(engine, 1, 2))
    ]
    assert snapshot(engine.side.node).leases[0].waiting_for == ""


def test_a_fetch_of_a_page_on_its_way_waits_for_it_and_orders_nothing(engine: Decode) -> None:
    engine.fetched(0)
    engine.world.hold_copies = True
    engine.fetched(0, ahead=(3, 4))
    engine.copies()

    assert engine.fetch(4, 3) is None
    assert engine.copies() == []
    engine.side.finish_copy()
    engine.world.run()

    assert engine.answer() == client.FetchReply(engine.side.calls, device(engine, 2, 1), 2, 0, 0)
    engine.check(engine.answer(), 4, 3)


def test_pages_ahead_take_no_slot_that_is_wanted_or_under_a_copy(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.copies()

    engine.fetch(0, 1, ahead=(2, 3, 4, 5))

    assert [(one.source, one.destination) for one in engine.copies()] == [
        (host(engine, 0, 1), device(engine, 0, 1)),
        (host(engine, 2, 3), device(engine, 2, 3)),
    ]


def test_a_fetch_waits_for_the_slots_that_copies_ahead_have(engine: Decode) -> None:
    engine.fetched(0)
    engine.world.hold_copies = True
    engine.fetched(0, ahead=(1, 2, 3))
    engine.copies()

    assert engine.fetch(4, 5) is None
    assert engine.copies() == []
    engine.side.finish_copy()
    engine.world.run()

    assert [one.source for one in engine.copies()] == [host(engine, 4, 5)]
    engine.side.finish_copy()
    engine.world.run()
    assert isinstance(engine.answer(), client.FetchReply)
    engine.check(engine.answer(), 4, 5)


def test_fetches_of_one_lease_take_turns(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.copies()

    engine.fetch(0, 1, 2, 3)
    first = engine.side.calls
    engine.fetch(4)
    assert len(engine.copies()) == 1
    engine.side.finish_copy()
    engine.world.run()

    reply = engine.side.answer(first)
    assert isinstance(reply, client.FetchReply)
    engine.check(reply, 0, 1, 2, 3)
    assert len(engine.copies()) == 1
    engine.side.finish_copy()
    engine.world.run()
    engine.check(engine.answer(), 4)


def test_the_fetches_of_two_leases_do_not_wait_for_each_other(engine: Decode) -> None:
    other = Decode(engine.world, tokens((900, 40)))
    other.fetched(0)
    engine.world.hold_copies = True
    engine.fetch(0)

    reply = other.fetched(0)

    assert (reply.hits, reply.misses) == (1, 0)


# ---- the page that is being written --------------------------------------------------------------


def test_the_unfinished_page_is_copied_at_each_fetch(engine: Decode) -> None:
    first = engine.fetched(6)
    engine.side.memory[page_ids(engine.row)[6]] = "as the engine has written since"

    second = engine.fetch(6)

    assert isinstance(second, client.FetchReply)
    assert second.pages == first.pages
    assert (second.hits, second.misses) == (0, 1)
    (page,) = page_ids(second.pages)
    assert engine.side.memory_of("buffer")[page] == sentence_of(
        "the unfinished page is copied at each fetch"
    )


def test_a_page_that_became_whole_is_copied_once_more(engine: Decode) -> None:
    engine.fetched(6)
    engine.side.write(engine.row, engine.toks + tokens((101, 12)))
    engine.commit(tokens((101, 12)))

    assert engine.fetched(6).misses == 1
    assert engine.fetched(6).misses == 0


def test_the_unfinished_page_is_not_copied_ahead(engine: Decode) -> None:
    engine.copies()

    engine.fetched(0, ahead=(5, 6))

    assert [one.source for one in engine.copies()] == [host(engine, 0), host(engine, 5)]


def test_a_commit_that_swaps_pages_leaves_what_is_there_right(engine: Decode) -> None:
    engine.side.call(client.RetractLease, lease=engine.lease)
    engine.side.node.leases.evictor.flush()
    resumed = engine.side.call(client.ResumeLease, lease=engine.lease)
    assert isinstance(resumed, client.Resumed)
    engine.row, engine.slots = resumed.pages, resumed.beside[0]
    engine.fetched(1)
    twin = Decode(engine.world)

    engine.commit()

    assert engine.row[: 6 * 4] == twin.row[: 6 * 4] != resumed.pages[: 6 * 4]
    assert engine.fetched(1).hits == 1


def test_replaced_pages_are_nobodys_while_a_copy_reads_them(world: World) -> None:
    mine = Decode(world, tokens((1, 40)), reserve_tokens=60)
    more = tokens((41, 60))
    twin = Decode(world)
    world.hold_copies = True
    mine.fetch(2)
    world.d.write(mine.row, mine.toks + more)
    own = page_ids(mine.row)[2]
    assert own != page_ids(twin.row)[2]

    mine.commit(more)

    assert page_ids(mine.row)[2] == page_ids(twin.row)[2]
    assert own not in page_ids(world.d.node.leases.pool.free_ids())
    world.d.finish_copy()
    world.run()
    assert own in page_ids(world.d.node.leases.pool.free_ids())


# ---- refusals ------------------------------------------------------------------------------------


def refused(engine: Decode, *pages: int, ahead: tuple[int, ...] = ()) -> client.Failed:
    reply = engine.fetch(*pages, ahead=ahead)
    assert isinstance(reply, client.Failed), reply
    return reply


def test_more_pages_than_the_buffer_has_are_refused_with_both_numbers(engine: Decode) -> None:
    why = refused(engine, 0, 1, 2, 3, 4).refusal

    assert why.code is Code.TOO_LARGE
    assert why.numbers == {"wanted_pages": 5, "buffer_pages": 4}
    assert why.message == sentence_of(
        "more pages than the buffer has are refused with both numbers"
    )


@pytest.mark.parametrize("page", [7, -1, 2**31 - 1])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_is_no_page_of_the_lease_is_refused(engine: Decode, page: int, is_ahead: bool) -> None:
    why = refused(engine, *([] if is_ahead else [page]), ahead=(page,)).refusal

    assert why.code is Code.BAD_PAGES
    assert why.numbers == {"page": page, "pages": 7}
    assert engine.resident.slots == {}


def test_half_a_page_number_is_refused(engine: Decode) -> None:
    reply = engine.side.call(client.FetchPages, lease=engine.lease, pages=b"\0" * 6)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_PAGES


def test_more_numbers_than_the_lease_has_pages_are_none_of_it(engine: Decode) -> None:
    why = refused(engine, 0, ahead=(1,) * 8).refusal

    assert why.code is Code.BAD_PAGES
    assert why.message == sentence_of("more numbers than the lease has pages are none of it")


def test_a_page_that_nobody_wrote_is_refused(world: World) -> None:
    engine = Decode(world, tokens((1, 40)), reserve_tokens=60)

    why = refused(engine, 3).refusal

    assert why.code is Code.BAD_PAGES
    assert why.numbers == {"page": 3, "written_pages": 3}
    assert "KV of 40 tokens" in why.message


def test_only_the_cached_prefix_of_a_new_lease_is_written(world: World) -> None:
    cached(world.d, tokens((1, 48)))
    leased = world.d.lease(LONG)
    asked = {"lease": leased.lease, "pages": pack_ids([3])}

    refusal = world.d.call(client.FetchPages, **asked)
    reply = world.d.call(client.FetchPages, **(asked | {"pages": pack_ids([2])}))

    assert isinstance(refusal, client.Failed)
    assert refusal.refusal.numbers == {"page": 3, "written_pages": 3}
    assert isinstance(reply, client.FetchReply)


def test_a_pool_without_a_buffer_refuses_to_fetch() -> None:
    world = World()
    leased = world.d.lease(LONG)

    reply = world.d.call(client.FetchPages, lease=leased.lease, pages=pack_ids([0]))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.NOT_SUPPORTED


def test_a_lease_of_another_session_is_refused(engine: Decode) -> None:
    engine.side.attach("other")

    reply = engine.side.call(client.FetchPages, session=2, lease=engine.lease, pages=pack_ids([0]))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.UNKNOWN_LEASE


# ---- a copy under way when the lease goes --------------------------------------------------------


@pytest.mark.parametrize("ends", ["release", "death"])
def test_no_page_is_given_away_while_a_copy_writes_it(engine: Decode, ends: str) -> None:
    world, keeper = engine.world, buffers(engine.world)
    world.hold_copies = True
    engine.fetch(0, 1, ahead=(2,))
    waiting = engine.side.calls

    if ends == "release":
        engine.side.call(client.ReleaseLease, lease=engine.lease)
    else:
        engine.side.hang_up()

    if ends == "release":
        reply = engine.side.answer(waiting)
        assert isinstance(reply, client.Failed)
        assert reply.refusal.code is Code.CANCELLED
    assert keeper.pool.free_pages == SLOTS
    lease = snapshot(engine.side.node).leases[0]
    assert (lease.state, lease.waiting_for) == (
        "lingering",
        "the last copy into its device buffer",
    )
    engine.side.finish_copy()
    world.run()
    assert keeper.pool.free_pages == SLOTS
    engine.side.finish_copy()
    world.run()
    assert keeper.pool.free_pages == 2 * SLOTS
    assert engine.side.node.leases.leases == {}


def test_a_retraction_waits_for_the_copies_and_for_no_tick(engine: Decode) -> None:
    world, keeper = engine.world, buffers(engine.world)
    engine.fetched(0)
    world.hold_copies = True
    engine.fetched(0, ahead=(1,))
    call = client.RetractLease

    assert engine.side.call(call, lease=engine.lease, keep="nothing") is None
    assert keeper.pool.free_pages == SLOTS
    engine.side.finish_copy()
    world.run()

    assert engine.answer() == client.Retracted(engine.side.calls, 0, 0)
    assert keeper.pool.free_pages == 2 * SLOTS


def test_a_retraction_that_waited_may_be_refused_then(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.fetch(0)

    assert engine.side.call(client.RetractLease, lease=engine.lease, keep="moon") is None
    engine.side.finish_copy()
    engine.world.run()

    reply = engine.answer()
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST


def test_a_retraction_is_refused_when_a_commit_has_overtaken_it(world: World) -> None:
    """Its tokens would follow themselves, and nobody has written that."""
    engine = Decode(world, reserve_tokens=12)
    world.hold_copies = True
    engine.fetch(0)
    assert engine.side.call(client.RetractLease, tokens((9, 4)), lease=engine.lease) is None
    call = engine.side.calls
    engine.commit(tokens((9, 4)))

    engine.side.finish_copy()
    world.run()

    reply = engine.side.answer(call)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.WRONG_STATE
    assert engine.side.node.leases.leases[engine.lease].saved is None


def test_a_fetch_behind_a_retraction_is_refused(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.fetch(0)
    engine.side.call(client.RetractLease, lease=engine.lease, keep="nothing")

    assert engine.fetch(1) is None
    engine.side.finish_copy()
    engine.world.run()

    reply = engine.answer()
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.WRONG_STATE
    assert engine.side.node.fetcher.turns == {}


def test_a_resumed_lease_begins_with_an_empty_buffer_and_all_that_was_saved(
    engine: Decode,
) -> None:
    engine.fetched(0, 6)
    engine.side.call(client.RetractLease, lease=engine.lease)

    resumed = engine.side.call(client.ResumeLease, lease=engine.lease)

    assert isinstance(resumed, client.Resumed)
    engine.row, engine.slots = resumed.pages, resumed.beside[0]
    assert engine.fetched(6, 0).misses == 2


def test_a_lease_that_kept_nothing_has_what_the_tree_kept(engine: Decode) -> None:
    engine.side.call(client.RetractLease, lease=engine.lease, keep="nothing")

    resumed = engine.side.call(client.ResumeLease, lease=engine.lease)

    assert isinstance(resumed, client.Resumed)
    engine.row, engine.slots = resumed.pages, resumed.beside[0]
    assert engine.fetched(5).misses == 1
    assert refused(engine, 6).refusal.numbers == {"page": 6, "written_pages": 6}


# ---- the transfer process ------------------------------------------------------------------------


def test_what_a_dying_transfer_process_was_copying_is_copied_by_the_next(engine: Decode) -> None:
    world = engine.world
    engine.fetched(0)
    world.hold_copies = True
    engine.fetch(0, 1, 2, ahead=(3,))
    engine.copies()

    engine.side.stop_transfer("killed")
    assert engine.side.node.leases.leases[engine.lease].holders == {"engine"}
    assert dict(engine.resident.slots) == {0: 0}
    world.hold_copies = False
    engine.side.start_transfer("killed")
    world.run()

    reply = engine.answer()
    assert isinstance(reply, client.FetchReply)
    engine.check(reply, 0, 1, 2)
    assert (reply.hits, reply.misses) == (1, 2)
    assert [one.source for one in engine.copies()] == [host(engine, 1, 2)]


def test_hits_need_no_transfer_process(engine: Decode) -> None:
    engine.fetched(0, 1)
    engine.side.stop_transfer("killed")

    reply = engine.fetched(1, 0, ahead=(4,))
    assert engine.fetch(2) is None

    assert (reply.hits, reply.misses) == (2, 0)
    engine.side.start_transfer("killed")
    engine.world.run()
    engine.check(engine.answer(), 2)


def test_a_released_lease_ends_when_the_process_that_copied_for_it_is_reaped(
    engine: Decode,
) -> None:
    engine.world.hold_copies = True
    engine.fetch(0, 1, ahead=(2,))
    engine.side.call(client.ReleaseLease, lease=engine.lease)

    engine.side.stop_transfer("killed")

    assert engine.side.node.leases.leases == {}
    assert buffers(engine.world).pool.free_pages == 2 * SLOTS


def test_a_refused_copy_fails_its_fetch_and_frees_the_slots(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.fetch(0, 1)

    engine.side.refuse_copy("no such region")
    engine.world.run()

    reply = engine.answer()
    assert isinstance(reply, client.Failed)
    assert (reply.refusal.code, reply.refusal.message) == (
        Code.INTERNAL,
        f"the transfer process refused to copy pages of lease {engine.lease}: no such region",
    )
    assert engine.resident.slots == {}
    engine.world.hold_copies = False
    assert engine.fetched(0).misses == 1


def test_a_fetch_that_hoped_for_a_refused_copy_orders_its_own(engine: Decode) -> None:
    engine.fetched(0)
    engine.world.hold_copies = True
    engine.fetched(0, ahead=(1,))
    engine.fetch(1)
    engine.copies()

    engine.side.refuse_copy("just this once")
    engine.world.run()

    assert [one.source for one in engine.copies()] == [host(engine, 1)]
    engine.side.finish_copy()
    engine.world.run()
    reply = engine.answer()
    assert isinstance(reply, client.FetchReply)
    assert (reply.hits, reply.misses) == (0, 1)


def test_a_node_that_is_thawed_answers_what_was_being_fetched(engine: Decode) -> None:
    engine.world.hold_copies = True
    engine.fetch(0, 1, ahead=(2,))
    engine.fetch(3)
    over = [inputs.Copied(engine.world.now_s, copy.ticket, 64) for copy in engine.side.copies]

    again = thaw(freeze(engine.side.node))

    steps = [[node.step(one) for one in over] for node in (engine.side.node, again)]
    assert steps[0] == steps[1]
    assert isinstance(steps[0][0].effects[0].message, client.FetchReply)
    assert state_hash(again) == state_hash(engine.side.node)


# ---- anything ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_meanwhile_a_fetch_answers_with_the_right_bytes(seed: int) -> None:
    rng = random.Random(seed)
    world = World(spec=HISPARSE)
    world.hold_copies = True
    engines = [Decode(world, tokens((1000 * k, 100))) for k in range(2)]
    asked: dict[int, tuple[Decode, list[int]]] = {}
    for _ in range(300):
        engine = rng.choice(engines)
        match rng.randrange(8):
            case 0 | 1 | 2:
                pages = rng.sample(range(7), rng.randint(0, SLOTS))
                ahead = tuple(rng.sample(range(7), rng.randint(0, 4)))
                engine.fetch(*pages, ahead=ahead)
                asked[engine.side.calls] = engine, pages
            case 3 | 4 | 5 if world.d.copies:
                world.d.finish_copy()
                world.run()
            case 6 if world.d.copies and rng.random() < 0.3:
                world.d.refuse_copy("sometimes")
                world.run()
            case 7 if rng.random() < 0.2:
                world.d.stop_transfer("killed")
                world.d.start_transfer("killed")
                world.run()
            case _:
                pass
        for reply in world.d.take():
            if isinstance(reply, client.FetchReply):
                one, pages = asked.pop(reply.call)
                one.check(reply, *pages)
            elif isinstance(reply, client.Failed):
                del asked[reply.call]
                assert reply.refusal.code is Code.INTERNAL
    while world.d.copies:
        world.d.finish_copy()
        world.run()
    answered = {reply.call for reply in world.d.take() if isinstance(reply, client.FetchReply)}
    assert answered == set(asked)
    assert world.d.node.fetcher.turns == world.d.node.fetcher.copies == {}
