"""Copies that engines make themselves: what they hold, what is refused, what counts as written."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.cache.lease import COPY, FORMER_COPY
from kvd.core.layout.shards import tp_shards
from kvd.core.layout.spec import (
    Component,
    HeldShards,
    Mha,
    Mla,
    PageOrder,
    PoolSpec,
    companion_pages,
)
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.types import Pages, count, slice_pages
from kvd.wire import admin, client, events
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, KeepsBlocks, pages_sum
from tests.core.engines import PROMPT, cached
from tests.core.families import SPECS
from tests.core.side import PAGE, Side
from tests.core.test_former_leases import NOW_S, WORKS, adopted, changed, ids
from tests.core.world import World, tokens

OTHER = tokens((5000, 64))


class Engine:
    """An engine with a lease of 100 tokens in 7 pages, and blocks of its own."""

    def __init__(
        self, world: World, side: Side | None = None, toks: bytes = PROMPT, **more: object
    ) -> None:
        self.world, self.side, self.toks = world, side or world.p, toks
        leased = self.side.lease(toks, **more)
        self.lease, self.row = leased.lease, leased.pages
        self.calls = 100

    @property
    def record(self):
        return self.side.node.leases.leases[self.lease]

    def part(self, first: int, end: int, row: Pages | None = None, name: str = "kv") -> CopyPart:
        pages = slice_pages(row or self.row, first, end)
        return CopyPart(name, first, end - first, pages_sum(pages))

    def begins(self, first: int, end: int, **more: object) -> CopyBegins:
        self.calls += 1
        upto = min(end * PAGE, count(self.toks))
        made = CopyBegins(self.calls, self.lease, True, (self.part(first, end),), upto)
        return msgspec.structs.replace(made, **more)

    def save(self, first: int, end: int, *, rank: int = 0, ranks: int = 1, worker: int = 1) -> int:
        message = self.begins(first, end)
        refusal = self.side.copy_said(message, rank=rank, ranks=ranks, worker=worker)
        assert refusal is None, refusal
        return message.call

    def keeps_blocks(self) -> None:
        self.calls += 1
        assert self.side.copy_said(KeepsBlocks(self.calls)) is None

    def load(self, first: int, end: int, worker: int = 1) -> int:
        message = self.begins(first, end, to_pages=False, upto_tokens=0)
        refusal = self.side.copy_said(message, worker=worker)
        assert refusal is None, refusal
        return message.call

    def over(self, copy: int, *, worker: int = 1, rank: int = 0, ranks: int = 1, **more) -> None:
        self.calls += 1
        message = CopyEnds(self.calls, copy, True, 512, 10, 20)
        message = msgspec.structs.replace(message, **more)
        refusal = self.side.copy_said(message, worker=worker, rank=rank, ranks=ranks)
        assert refusal is None, refusal

    def refused(self, message: CopyBegins | CopyEnds, code: Code, words: str) -> None:
        refusal = self.side.copy_said(message)
        assert refusal is not None
        assert refusal.code is code, refusal
        assert words in refusal.message, refusal


@pytest.fixture
def engine() -> Engine:
    return Engine(World())


def free(side: Side) -> int:
    return side.node.leases.pool.free_pages


# ---- what counts as written ----------------------------------------------------------------------


def test_a_save_counts_when_it_is_over(engine):
    copy = engine.save(0, 3)
    assert engine.record.written_tokens == 0
    assert engine.record.holders == {"engine", COPY}

    engine.over(copy)

    assert engine.record.written_tokens == 48
    assert engine.record.holders == {"engine"}
    copied = next(event for event in engine.side.events if type(event) is events.EngineCopied)
    assert (copied.way, copied.pages, copied.n_bytes, copied.moved_us) == ("save", 3, 512, 20)


def test_saves_end_in_any_order_and_count_without_a_gap(engine):
    first, second, third = engine.save(0, 2), engine.save(2, 4), engine.save(4, 7)
    seen = []
    for copy in (third, first, second):
        engine.over(copy)
        seen.append(engine.record.written_tokens)
    assert seen == [0, 32, 100]


def test_the_least_of_the_ranks_counts(engine):
    mine = engine.save(0, 4, rank=0, ranks=2, worker=1)
    other = engine.save(0, 4, rank=1, ranks=2, worker=2)
    engine.over(mine, worker=1, rank=0, ranks=2)
    assert engine.record.written_tokens == 0
    engine.over(other, worker=2, rank=1, ranks=2)
    assert engine.record.written_tokens == 64


def test_a_save_that_failed_raises_nothing_and_can_be_made_again(engine):
    engine.over(engine.save(0, 3), is_done=False, why="CUDA said no")
    assert engine.record.written_tokens == 0
    assert engine.side.events[-1].why == "CUDA said no"
    engine.over(engine.save(0, 3))
    assert engine.record.written_tokens == 48


def test_a_commit_without_a_number_shares_what_was_saved_and_no_more(engine):
    engine.over(engine.save(0, 2))
    copy = engine.save(2, 4)
    engine.side.call(client.CommitLease, lease=engine.lease)
    assert engine.record.owned == 2
    engine.over(copy)
    engine.side.call(client.CommitLease, lease=engine.lease)
    assert engine.record.owned == 4


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (client.ReleaseLease, {}),
        (client.CommitAndRelease, {}),
        (client.CommitAndRelease, {"toks": tokens((900, 12))}),
        (client.CommitLease, {}),
        (client.CommitAndExtend, {"extend_tokens": 16}),
        (client.CommitUpTo, {"swaps": False}),
    ],
)
@pytest.mark.parametrize("n_saved", [0, 3])
def test_with_blocks_no_commit_is_a_word_about_what_was_never_saved(kind, fields, n_saved):
    engine = Engine(World())
    engine.keeps_blocks()
    if n_saved:
        engine.over(engine.save(0, n_saved))

    reply = engine.side.call(kind, lease=engine.lease, **fields)

    assert not isinstance(reply, client.Failed), reply
    assert Engine(engine.world).record.prefix_tokens == n_saved * PAGE


def test_with_blocks_a_client_says_what_counts(engine):
    why = admin.Why(9, "client", 1)
    assert "blocks of its own" not in str(engine.side.ask(why))
    engine.keeps_blocks()
    assert "its KV is in blocks of its own first" in str(engine.side.ask(why))


def test_with_blocks_a_commit_with_a_number_and_a_word_are_taken_as_ever(engine):
    engine.keeps_blocks()
    side, lease = engine.side, engine.lease
    side.call(client.CommitUpTo, lease=lease, upto_tokens=32)
    assert engine.record.owned == 2
    side.call(client.SayWritten, lease=lease, upto_tokens=64)
    side.call(client.CommitLease, lease=lease)
    assert engine.record.owned == 4


def test_with_blocks_what_was_not_saved_is_not_kept_by_a_retraction(engine):
    engine.keeps_blocks()
    refused = engine.side.call(client.RetractLease, lease=engine.lease, keep="host")
    assert isinstance(refused, client.Failed)
    assert "of which 0 are said to be written" in refused.refusal.message


def test_with_blocks_what_was_cached_before_stays_so():
    world = World()
    cached(world.p, PROMPT)
    receiving = Engine(world)
    receiving.keeps_blocks()
    receiving.side.call(client.ReleaseLease, lease=receiving.lease)
    assert Engine(world).record.prefix_tokens == 96


def test_who_may_have_blocks_and_is_not_back_is_taken_at_what_is_said():
    daemon = adopted()
    by_word = daemon.node.leases.commits.by_word

    daemon.feed(inputs.ClientCameBack(NOW_S, 3, 4711, (7,), is_whole=False))
    assert by_word == {3}
    daemon.feed(inputs.SessionWhole(NOW_S, 3))
    assert by_word == set()

    daemon.feed(inputs.ClientJoined(NOW_S, 3, "", 4712, keeps_blocks=True))
    assert by_word == {3}
    daemon.feed(inputs.ClientHungUp(NOW_S, 3))
    assert by_word == set()


def test_who_comes_back_with_blocks_is_taken_at_what_is_said():
    daemon = adopted()
    daemon.feed(inputs.ClientCameBack(NOW_S, 3, 4711, (7,), keeps_blocks=True))
    assert daemon.node.leases.commits.by_word == {3}


def test_no_word_counts_what_a_save_is_still_writing(engine):
    side, lease = engine.side, engine.lease
    opened = side.call(client.SendRequest, PROMPT, room=7, lease=lease)
    assert isinstance(opened, client.Sending)
    engine.over(engine.save(0, 2))
    engine.save(2, 4)
    words = [
        (client.CommitUpTo, {"lease": lease, "upto_tokens": 64, "swaps": True}),
        (client.ReleaseUpTo, {"lease": lease, "upto_tokens": 33}),
        (client.SayWritten, {"lease": lease, "upto_tokens": 100}),
        (client.Advance, {"send": opened.send, "upto_tokens": 48}),
        (client.Finish, {"send": opened.send, "aux": b"a"}),
        (client.FinishAndRelease, {"send": opened.send, "aux": b"a"}),
        (client.HandOver, {"room": 8, "lease": lease}),
    ]
    for kind, fields in words:
        reply = side.call(kind, **fields)
        assert isinstance(reply, client.Failed), kind
        assert reply.refusal.code is Code.WRONG_STATE, reply
        assert "a save from token 32 on is under way" in reply.refusal.message
    assert engine.record.written_tokens == 32
    assert isinstance(side.call(client.CommitUpTo, lease=lease, upto_tokens=32), client.PageTable)


def test_a_send_goes_on_by_what_is_saved():
    world = World()
    engine = Engine(world)
    world.p.write(engine.row, PROMPT)
    sent = world.p.call(client.SendRequest, PROMPT, room=7, lease=engine.lease)
    assert isinstance(sent, client.Sending)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    def posted() -> int:
        posts = [one for one in world.p.effects if isinstance(one, effects.Post)]
        return sum(count(post.source) for post in posts)

    copies = [engine.save(0, 2), engine.save(2, 7)]
    assert posted() == 0
    engine.over(copies[1])
    assert posted() == 0
    engine.over(copies[0])
    assert posted() == 6
    world.p.call(client.Finish, send=sent.send, aux=b"aux")
    assert world.d.holds(world.d.take()[-1].pages, PROMPT)


# ---- what a copy holds ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_journaled", [False, True])
def test_a_release_gives_no_page_away_under_a_copy(is_journaled):
    engine = Engine(World(p_pages=20, is_journaled=is_journaled))
    side = engine.side
    before = free(side)
    copies = [engine.save(0, 3), engine.save(3, 7)]

    assert isinstance(side.call(client.ReleaseLease, lease=engine.lease), client.Done)
    assert free(side) == before
    assert engine.record.holders == {COPY}
    engine.over(copies[0])
    assert free(side) == before
    engine.over(copies[1])
    assert free(side) == before + 7


def test_what_a_send_does_not_need_stays_while_it_is_copied(engine):
    side = engine.side
    copy = engine.save(4, 7)
    opened = side.call(client.SendRequest, tokens((1, 32)), room=7, lease=engine.lease)
    assert isinstance(opened, client.Sending), opened
    before = free(side)

    side.call(client.ReleaseLease, lease=engine.lease)

    assert free(side) == before
    engine.over(copy)
    assert free(side) == before + 5


def test_a_release_in_the_middle_of_a_load_keeps_the_cached_pages_locked():
    world = World(p_pages=12)
    cached(world.p, PROMPT)
    engine = Engine(world)
    copy = engine.load(0, 6)
    world.p.call(client.ReleaseLease, lease=engine.lease)

    reply = world.p.call(client.OpenLease, OTHER + OTHER, deadline_s=0.0)
    assert isinstance(reply, client.Failed)  # the six pages cannot be evicted

    engine.over(copy)
    assert isinstance(world.p.call(client.OpenLease, OTHER, deadline_s=0.0), client.Leased)


def test_a_process_that_is_gone_ends_its_copies_and_no_others(engine):
    side = engine.side
    engine.save(0, 3, worker=1)
    other = engine.save(3, 7, worker=2)
    side.call(client.ReleaseLease, lease=engine.lease)

    side.feed(inputs.WorkerGone(side.world.now_s, 1, 1))
    assert engine.record.holders == {COPY}
    told = [event for event in side.events if type(event) is events.EngineCopied]
    assert [event.why for event in told] == ["the process that made it is gone"]
    engine.over(other, worker=2)
    assert engine.lease not in side.node.leases.leases


def test_the_end_of_a_session_ends_its_copies(engine):
    engine.save(0, 7)
    engine.side.hang_up()
    assert not engine.side.node.leases.leases
    assert not list(engine.side.node.engine_copies)


def test_a_session_that_was_hung_up_on_keeps_what_its_process_copies(engine):
    side = engine.side
    engine.save(0, 7)
    side.call(client.ReleaseLease, lease=engine.lease)
    why = Refusal(Code.CLIENT_GONE, "it reads no answers")
    side.feed(inputs.HungUpOn(side.world.now_s, 1, why, (1001,)))

    assert side.node.sessions.may_write(1)
    assert engine.record.holders == {COPY}
    side.hang_up()
    assert not side.node.leases.leases


def test_a_lease_is_neither_retracted_nor_slid_under_a_copy(engine):
    engine.save(0, 3)
    reply = engine.side.call(client.RetractLease, lease=engine.lease)
    assert isinstance(reply, client.Failed)
    assert "copy" in reply.refusal.message
    reply = engine.side.call(client.SlideLease, lease=engine.lease, upto_tokens=16)
    assert isinstance(reply, client.Failed)
    assert "copies under way" in reply.refusal.message


def test_equal_pages_that_a_commit_replaces_stay_while_they_are_loaded(engine):
    side = engine.side
    cached(side, PROMPT)
    before = free(side)
    engine.over(engine.save(0, 7))
    copy = engine.load(0, 6)
    row = side.call(client.CommitLease, lease=engine.lease)
    assert isinstance(row, client.PageTable)
    assert row.pages != engine.row
    assert free(side) == before
    engine.over(copy)
    assert free(side) == before + 6


# ---- what is refused -----------------------------------------------------------------------------


def test_an_order_that_names_no_pages_of_the_lease_is_refused(engine):
    part = engine.part(0, 2)
    wrong = [
        ({"lease": 99}, Code.UNKNOWN_LEASE, "holds no lease 99"),
        ({"parts": ()}, Code.BAD_REQUEST, "1 to 16 parts, this one 0"),
        ({"parts": (part, part)}, Code.BAD_PAGES, "two parts of one copy"),
        ({"parts": (engine.part(0, 2, name="gpu"),)}, Code.BAD_REQUEST, "no component 'gpu'"),
        ({"parts": (CopyPart("kv", 6, 2, 0),)}, Code.BAD_PAGES, "pages 6 to 7 of kv of lease 1"),
        ({"parts": (CopyPart("kv", -1, 2, 0),)}, Code.BAD_PAGES, "pages -1 to 0"),
        ({"parts": (CopyPart("kv", 0, 0, 0),)}, Code.BAD_PAGES, "has 7 pages"),
        ({"parts": (CopyPart("kv", 0, 2, 1),)}, Code.BAD_PAGES, "swapped since"),
        ({"upto_tokens": 16}, Code.BAD_REQUEST, "one of the tokens 17 to 32, not with 16"),
        ({"upto_tokens": 33}, Code.BAD_REQUEST, "not with 33"),
        ({"device": "a\nb"}, Code.BAD_REQUEST, "not printable"),
        ({"to_pages": False}, Code.BAD_PAGES, "are not all written: KV of 0 tokens is"),
    ]
    for fields, code, words in wrong:
        engine.refused(engine.begins(0, 2, **fields), code, words)
    assert not list(engine.side.node.engine_copies)
    assert engine.record.holders == {"engine"}


def test_a_page_is_under_one_copy_of_a_rank_where_one_writes(engine):
    engine.over(engine.save(0, 2))
    engine.load(0, 2)
    engine.load(0, 2)
    copy = engine.save(2, 4)
    words = "saving pages 2 to 3 of kv for its engine since 0 ms"
    engine.refused(engine.begins(3, 5), Code.WRONG_STATE, words)
    engine.over(copy)
    engine.save(4, 5)


def test_what_is_written_is_not_saved_over(engine):
    engine.over(engine.save(0, 3))
    engine.refused(engine.begins(2, 4), Code.BAD_PAGES, "save from page 3 on")
    engine.side.call(client.CommitLease, lease=engine.lease)
    engine.refused(engine.begins(2, 4), Code.BAD_PAGES, "save from page 3 on")


def test_a_page_is_saved_once(engine):
    engine.over(engine.save(3, 5))
    engine.refused(engine.begins(4, 6), Code.BAD_PAGES, "tokens 48 to 79 of lease 1 are saved")
    engine.refused(engine.begins(0, 4), Code.BAD_PAGES, "a page is saved once")
    engine.over(engine.save(0, 3))
    assert engine.record.written_tokens == 80


def test_a_page_that_was_not_full_is_saved_anew_and_is_not_written_meanwhile(engine):
    engine.side.call(client.SayWritten, lease=engine.lease, upto_tokens=20)
    copy = engine.save(1, 3)
    assert engine.record.written_tokens == 16
    again = engine.begins(1, 2, to_pages=False, upto_tokens=0)
    engine.refused(again, Code.BAD_PAGES, "are not all written: KV of 16 tokens is")
    engine.over(copy, is_done=False, why="half of it")
    assert engine.record.written_tokens == 16
    engine.over(engine.save(1, 3))
    assert engine.record.written_tokens == 48


def test_a_page_that_any_rank_loads_is_not_saved_anew(engine):
    engine.side.call(client.SayWritten, lease=engine.lease, upto_tokens=20, rank=0, ranks=2)
    engine.side.call(client.SayWritten, lease=engine.lease, upto_tokens=20, rank=1, ranks=2)
    load = engine.begins(0, 2, to_pages=False, upto_tokens=0)
    assert engine.side.copy_said(load, rank=1, ranks=2, worker=2) is None

    refusal = engine.side.copy_said(engine.begins(1, 3), rank=0, ranks=2)

    assert refusal is not None
    assert "loading pages 0 to 1 of kv for rank 1 of 2" in refusal.message


def test_a_rank_that_saves_again_is_not_dead(engine):
    side = engine.side
    engine.over(engine.save(0, 2, rank=0, ranks=2), rank=0, ranks=2)
    engine.save(0, 2, rank=1, ranks=2, worker=2)
    side.world.now_s += 1.0
    side.feed(inputs.WorkerGone(side.world.now_s, 1, 2))
    side.feed(inputs.RankLeft(side.world.now_s, 1, 1, 2, 4711))
    refused = side.call(client.SendRequest, PROMPT, room=7, lease=engine.lease)
    assert isinstance(refused, client.Failed)

    engine.over(engine.save(0, 2, rank=1, ranks=2, worker=3), rank=1, ranks=2, worker=3)

    opened = side.call(client.SendRequest, PROMPT, room=7, lease=engine.lease)
    assert isinstance(opened, client.Sending), opened


def test_a_page_that_was_not_full_is_saved_anew_beside_what_another_rank_saves_behind_it(engine):
    for rank in (0, 1):
        word = {"lease": engine.lease, "upto_tokens": 20, "rank": rank, "ranks": 2}
        engine.side.call(client.SayWritten, **word)
    engine.save(2, 4, rank=0, ranks=2, worker=1)
    engine.save(1, 4, rank=1, ranks=2, worker=2)
    assert engine.record.written_tokens == 16


def test_a_page_with_some_written_tokens_is_not_saved_over_while_it_is_sent(engine):
    engine.side.call(client.SayWritten, lease=engine.lease, upto_tokens=20)
    engine.side.call(client.SendRequest, PROMPT, room=7, lease=engine.lease)
    engine.refused(engine.begins(1, 3), Code.BAD_PAGES, "save from page 2 on")


def test_what_was_received_goes_on_in_its_last_page():
    world = World()
    sender = Engine(world)
    world.p.write(sender.row, PROMPT)
    sender.over(sender.save(0, 7))
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), reserve_tokens=28)
    world.p.call(client.HandOver, room=7, lease=sender.lease, aux=b"a")
    received = world.d.take()[-1]
    engine = Engine.__new__(Engine)
    engine.world, engine.side, engine.toks, engine.calls = world, world.d, tokens((1, 128)), 500
    engine.lease, engine.row = received.lease, received.pages

    engine.over(engine.load(0, 7))
    engine.over(engine.save(6, 8))
    world.d.call(client.CommitLease, tokens((101, 28)), lease=engine.lease)

    assert engine.record.owned == 8


def test_a_page_that_an_event_may_make_written_is_not_saved_anew(engine):
    engine.side.word(engine.lease, 20, 0, 1, after=b"e" * 64)
    engine.refused(engine.begins(1, 3), Code.BAD_PAGES, "save from page 2 on")


def test_what_an_event_may_make_written_is_not_saved_over(engine):
    engine.side.word(engine.lease, 48, 0, 1, after=b"e" * 64)
    engine.refused(engine.begins(0, 2), Code.BAD_PAGES, "save from page 3 on")


def test_a_copy_that_nobody_has_begun_does_not_end(engine):
    copy = engine.save(0, 2)
    engine.refused(CopyEnds(200, 77, True), Code.BAD_REQUEST, "has no copy 77 under way")
    refusal = engine.side.copy_said(CopyEnds(201, copy, True), worker=2)
    assert refusal is not None
    engine.over(copy)
    engine.refused(CopyEnds(202, copy, True), Code.BAD_REQUEST, f"no copy {copy} under way")


def test_a_pool_without_bytes_copies_nothing():
    engine = Engine(World(cache_mode=CacheMode.PREFILL_ONLY))
    engine.refused(engine.begins(0, 1), Code.NOT_SUPPORTED, "copy-begins needs KV")


def test_a_lease_written_by_other_ranks_is_not_saved_by_one(engine):
    engine.side.word(engine.lease, 16, 0, 2)
    engine.refused(engine.begins(2, 3), Code.BAD_REQUEST, "written by 2 ranks, not by 1")


# ---- what is said of it --------------------------------------------------------------------------


def test_why_names_each_copy(engine):
    side = engine.side
    message = engine.begins(2, 5, device="cuda:0")
    assert side.copy_said(message, rank=1, ranks=2, worker=4) is None
    side.world.now_s += 0.004
    side.feed(inputs.FromOperator(side.world.now_s, b"op", admin.Why(1, "lease", engine.lease)))
    report = side.reports[-1]
    assert isinstance(report, admin.Because)
    assert "saving pages 2 to 4 of kv for rank 1 of 2 on cuda:0 since 4 ms" in report.facts
    assert "holders: copy, engine" in report.facts


def test_who_keeps_pages_from_others_says_that_only_a_copy_does(engine):
    side = engine.side
    engine.save(0, 7)
    side.call(client.ReleaseLease, lease=engine.lease)
    side.feed(inputs.FromOperator(side.world.now_s, b"op", admin.Why(1, "lease", engine.lease)))
    report = side.reports[-1]
    assert isinstance(report, admin.Because)
    assert "for lease, 0.0 s, let go of and still copied" in report.sentence
    assert "waits for the last copy of its engine" in report.facts


def test_a_node_with_copies_under_way_is_thawed_as_it_was(engine):
    engine.over(engine.save(2, 4))
    engine.save(0, 2)
    engine.load(0, 0 + 1) if engine.record.written_tokens else None
    again = thaw(freeze(engine.side.node))
    assert state_hash(again) == state_hash(engine.side.node)


# ---- before and after a restart ------------------------------------------------------------------


def test_pages_of_before_stay_while_a_process_that_is_away_may_copy_them():
    daemon = adopted()
    daemon.feed(inputs.ClientCameBack(NOW_S, 3, 4711, (7,), is_whole=False))
    assert not {11, 12, 13, 14, 15} & set(daemon.free)
    assert daemon.node.leases.leases[9].holders == {FORMER_COPY}
    assert "which may still copy its pages" in " ".join(
        daemon.feed(inputs.FromOperator(NOW_S, b"op", admin.Why(1, "lease", 9)))[0].message.facts
    )

    assert isinstance(daemon.call(client.ReleaseLease, lease=7), client.Done)
    assert not {11, 12, 13, 14, 15} & set(daemon.free)

    freed = daemon.feed(inputs.SessionWhole(NOW_S, 3))
    assert {effects.NoteFreed(ids(11, 12)), effects.NoteFreed(ids(13))} <= {
        one for one in freed if isinstance(one, effects.NoteFreed)
    }
    assert {11, 12, 13, 14, 15} <= set(daemon.free)


def test_what_is_awaited_of_before_goes_with_the_last_process():
    daemon = adopted()
    daemon.feed(inputs.ClientCameBack(NOW_S, 3, 4711, (), is_whole=False))
    daemon.feed(inputs.ClientHungUp(NOW_S, 3))
    assert daemon.node.leases.leases == {}
    assert {11, 12, 13, 14, 15} <= set(daemon.free)


# ---- components in lockstep ----------------------------------------------------------------------

INDEXED = PoolSpec(
    "main",
    "mla",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 1, Mla(8, 4, "float32"), PAGE),
        Component("index", 1, Mha(1, 2, 0, "float32"), 4),
    ),
    (64, 256),
    (13, 0),
)
"""A page of kv has four of index."""


def test_pages_of_a_companion_are_its_own_and_go_with_those_of_the_first():
    engine = Engine(World(spec=INDEXED))
    row = companion_pages(engine.row, 4)
    kv, index = engine.part(0, 2), engine.part(0, 8, row, "index")

    engine.refused(engine.begins(0, 2), Code.BAD_REQUEST, "without index, which goes with it")
    wrong = engine.part(0, 2, engine.row, "index")
    engine.refused(engine.begins(0, 2, parts=(kv, wrong)), Code.BAD_PAGES, "swapped since")
    message = engine.begins(0, 2, parts=(kv, index))
    assert engine.side.copy_said(message) is None
    engine.over(message.call)
    assert engine.record.written_tokens == 32

    load = engine.begins(0, 2, parts=(index,), to_pages=False, upto_tokens=0)
    assert engine.side.copy_said(load) is None
    more = engine.part(4, 12, row, "index")
    beyond = engine.begins(0, 2, parts=(more,), to_pages=False, upto_tokens=0)
    engine.refused(beyond, Code.BAD_PAGES, "KV of 32 tokens is, which takes 8")


# ---- components beside ---------------------------------------------------------------------------

HALVES = PoolSpec(
    "main",
    "mha",
    PageOrder.PAGE_FIRST,
    (Component("kv", 1, Mha(1, 1, 1, "float32"), PAGE),),
    (64,),
    held=HeldShards(layers=1, heads=2, shards=tp_shards(2, 2, (0, 2), (0, 1))),
)
"""Each of two shards has a head of two."""

CONTINUED = PROMPT + tokens((900, 12))
"""Seven whole pages."""


def beside(engine: Engine, name: str, first: int, end: int) -> CopyPart:
    """Pages of its row of a component that lies beside."""
    keeper = engine.side.node.leases.components.named(name)
    row = keeper.page_table(engine.record)
    return CopyPart(name, first, end - first, pages_sum(slice_pages(row, first, end)))


def test_a_save_names_what_its_tokens_have_in_a_window():
    engine = Engine(World(spec=SPECS["swa"]))
    engine.keeps_blocks()
    kv, swa = engine.part(0, 7), beside(engine, "swa", 0, 7)
    words = "without pages 0 to 6 of swa, which are of the same tokens"

    for parts in (kv,), (kv, beside(engine, "swa", 0, 6)), (kv, beside(engine, "swa", 1, 7)):
        engine.refused(engine.begins(0, 7, parts=parts), Code.BAD_REQUEST, words)
    message = engine.begins(0, 7, parts=(kv, swa))
    assert engine.side.copy_said(message) is None
    engine.over(message.call)
    assert engine.record.written_tokens == 100


def test_what_has_left_a_window_is_not_asked_for():
    engine = Engine(World(spec=SPECS["swa"]))
    engine.keeps_blocks()
    engine.side.call(client.SlideLease, lease=engine.lease, upto_tokens=100)
    message = engine.begins(0, 7, parts=(engine.part(0, 7),))
    refusal = engine.side.copy_said(message)
    assert refusal is not None
    assert "without pages 3 to 6 of swa" in refusal.message, refusal


@pytest.mark.parametrize("saved_upto", [None, 96, 112])
def test_a_state_joins_only_where_it_was_saved_behind_the_same_tokens(saved_upto):
    engine = Engine(World(spec=SPECS["recurrent"]), toks=CONTINUED)
    engine.keeps_blocks()
    parts = (engine.part(0, 6), beside(engine, "state", 1, 2)) if saved_upto else ()
    if saved_upto == 96:
        message = engine.begins(0, 6, parts=parts, upto_tokens=96)
        assert engine.side.copy_said(message) is None
        engine.over(message.call)
    engine.over(engine.save(6 if saved_upto == 96 else 0, 7))
    if saved_upto == 112:
        state = (beside(engine, "state", 1, 2),)
        message = engine.begins(0, 7, parts=state, upto_tokens=112)
        assert engine.side.copy_said(message) is None
        engine.over(message.call)

    engine.side.call(client.CommitAndRelease, lease=engine.lease)

    states = engine.side.node.leases.components.named("state")
    assert [node.end_tokens for node in states.at] == ([112] if saved_upto == 112 else [])


def test_a_state_that_is_saved_anew_is_none_until_that_is_over():
    engine = Engine(World(spec=SPECS["recurrent"]), toks=CONTINUED)
    engine.keeps_blocks()
    message = engine.begins(
        0, 7, parts=(engine.part(0, 7), beside(engine, "state", 1, 2)), upto_tokens=112
    )
    assert engine.side.copy_said(message) is None
    engine.over(message.call)
    again = engine.begins(0, 7, parts=(beside(engine, "state", 1, 2),), upto_tokens=128)
    assert engine.side.copy_said(again) is None

    engine.side.call(client.CommitAndRelease, lease=engine.lease)
    engine.over(again.call)

    assert not engine.side.node.leases.components.named("state").at


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_state_that_was_received_is_found_again(has_blocks):
    world = World(spec=SPECS["recurrent"])
    sender = Engine(world, toks=CONTINUED)
    sent = world.p.call(client.SendRequest, CONTINUED, room=7, lease=sender.lease)
    world.d.call(client.ReceiveRequest, CONTINUED, room=7, source=("p",))
    world.p.call(client.Finish, send=sent.send, aux=b"")
    received = world.d.take()[-1]
    if has_blocks:
        assert world.d.copy_said(KeepsBlocks(99)) is None

    world.d.call(client.CommitAndRelease, lease=received.lease)

    states = world.d.node.leases.components.named("state")
    assert [node.end_tokens for node in states.at] == [112]


def test_a_save_of_what_a_window_has_not_mapped_is_refused():
    world = World(spec=SPECS["swa"])
    engine = Engine(world, toks=CONTINUED, step_tokens=16)
    engine.keeps_blocks()
    parts = (engine.part(0, 7), beside(engine, "swa", 0, 1))
    engine.refused(engine.begins(0, 7, parts=parts), Code.WRONG_STATE, "slide it to the token")
    first = (engine.part(0, 1), beside(engine, "swa", 0, 1))
    assert engine.side.copy_said(engine.begins(0, 1, parts=first)) is None


def test_pages_of_a_window_that_count_are_not_saved_again():
    engine = Engine(World(spec=SPECS["swa"]))
    engine.keeps_blocks()
    parts = (engine.part(0, 7), beside(engine, "swa", 0, 7))
    message = engine.begins(0, 7, parts=parts)
    assert engine.side.copy_said(message) is None
    engine.over(message.call)
    again = engine.begins(0, 7, parts=(beside(engine, "swa", 5, 6),))
    engine.refused(again, Code.BAD_PAGES, "written already")


def test_what_was_saved_behind_a_gap_is_gone_with_the_pages():
    engine = Engine(World())
    engine.keeps_blocks()
    engine.over(engine.save(3, 5))
    retracted = engine.side.call(client.RetractLease, lease=engine.lease, keep="nothing")
    assert isinstance(retracted, client.Retracted), retracted
    resumed = engine.side.call(client.ResumeLease, lease=engine.lease)
    assert isinstance(resumed, client.Resumed), resumed
    engine.row = engine.record.page_table

    engine.over(engine.save(0, 3))

    assert engine.record.written_tokens == 48


def test_each_shard_of_a_pool_has_a_rank_that_saves_it():
    engine = Engine(World(spec=HALVES))
    words = "this pool has 2 shards"
    engine.refused(engine.begins(0, 7), Code.BAD_REQUEST, words)
    assert engine.side.copy_said(engine.begins(0, 7), rank=1, ranks=2) is None


def test_that_there_are_blocks_is_known_over_a_restart_whoever_comes_back():
    daemon = adopted(changed(sessions=(msgspec.structs.replace(WORKS, keeps_blocks=True),)))
    assert daemon.node.leases.commits.by_word == set()
    daemon.feed(inputs.ClientCameBack(NOW_S, 3, 4711, (7,)))
    assert daemon.node.leases.commits.by_word == {3}
