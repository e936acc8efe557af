"""One journal, one thing at a time."""

from __future__ import annotations

import operator
import struct

import msgspec
import pytest

from kvd.core.inputs import Branch, FormerLease, FormerSession
from kvd.journal.engines import EngineRecord, Process
from kvd.journal.identity import IdentityFlaw
from kvd.journal.layout import make_journal, open_journal
from kvd.journal.namespaces import NamespaceSlots
from kvd.journal.reader import VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.types import NO_TOKENS, Pages, pack_ids, page_ids
from tests.journal.journaled import (
    Place,
    cached,
    ended,
    freed,
    held,
    identity,
    made,
    n_summed,
    packed_sums,
    places_in,
    prove,
    read,
    tokens_of,
)

LONG = tuple(range(100, 140))
"""Ten pages."""


@pytest.mark.parametrize("n_pages", [3, 10])
def test_what_was_cached_and_proven_is_found_again(n_pages):
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    pages = list(range(7, 7 + n_pages))
    path = LONG[: 4 * n_pages]
    writer.cached(cached(pages, path, namespace="lora"))
    assert prove(writer, pages, {}) == n_pages

    _, found = read(buffer, ours)

    assert found.branches == (Branch(-1, "lora", tokens_of(path), Pages(pack_ids(pages))),)
    assert found.unproven == b""
    assert found.generation == 2


def test_what_was_not_summed_is_not_kept_and_not_free():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1, 2], LONG[:8]))
    prove(writer, [1], {})

    _, found = read(buffer, ours)

    assert found.branches == (Branch(-1, "", tokens_of(LONG[:4]), Pages(pack_ids([1]))),)
    assert page_ids(found.unproven) == [2]


def test_sums_of_a_page_that_was_freed_meanwhile_prove_nothing():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1], LONG[:4]))
    pages, words = writer.pending(Pages(pack_ids([1])))
    writer.freed(freed([1]))

    assert writer.summed(pages, words, bytes(8)) == 0
    assert read(buffer, ours)[1].branches == ()
    assert read(buffer, ours)[1].unproven == b""


def test_sums_of_a_page_that_was_cached_again_meanwhile_prove_nothing():
    ours = identity()
    _, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1], LONG[:4]))
    pages, words = writer.pending(Pages(pack_ids([1])))
    writer.freed(freed([1]))
    writer.cached(cached([1], LONG[:4]))

    assert writer.summed(pages, words, bytes(8)) == 0


def test_a_fork_is_cut_into_branches_parents_first_and_leaves_in_the_order_of_use():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    trunk, left, right = LONG[:8], LONG[:12], (*LONG[:8], 1, 2, 3, 4)
    writer.cached(cached([5, 6], trunk))
    writer.cached(cached([9], left, before=6))
    writer.cached(cached([4], right, before=6))
    prove(writer, [4, 5, 6, 9], {})
    writer.restamp(Pages(pack_ids([4, 9, 6, 5])))

    _, found = read(buffer, ours)

    assert found.branches == (
        Branch(-1, "", tokens_of(trunk), Pages(pack_ids([5, 6]))),
        Branch(0, "", tokens_of((1, 2, 3, 4)), Pages(pack_ids([4]))),
        Branch(0, "", tokens_of(LONG[8:12]), Pages(pack_ids([9]))),
    )


def test_places_of_processes_that_left_are_used_again():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(3, b"t" * 16, "vllm-0", Process(1000, 1))
    for pid in range(1001, 1040):  # each joins, and leaves when the next one is there
        writer.engines.session_joined(3, Process(pid, 7))
        writer.engines.session_joined(3, Process(pid, 7))
        writer.engines.process_left(3, pid - 1 if pid > 1001 else 0)
    writer.engines.process_left(3, 5)

    _, found = read(buffer, ours)

    (engine,) = found.engines
    assert set(engine.processes) == {Process(1000, 1), Process(1039, 7)}


def test_an_engine_of_more_processes_than_there_are_places_is_never_found_dead():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(3, b"t" * 16, "vllm-0", Process(1000, 1))
    for pid in range(1001, 1017):
        writer.engines.session_joined(3, Process(pid, 7))

    _, found = read(buffer, ours)

    (engine,) = found.engines
    assert len(engine.processes) == 16
    assert Process(0) in engine.processes


def test_a_child_does_not_follow_a_page_that_was_cached_anew():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1, 2], LONG[:8]))
    prove(writer, [1, 2], {})
    writer.freed(freed([1]))
    writer.cached(cached([1], (9, 9, 9, 9)))
    prove(writer, [1], {})

    _, found = read(buffer, ours)

    assert places_in(found) == {1: Place("", (9, 9, 9, 9))}
    assert page_ids(found.unproven) == [2]


def test_an_engine_comes_back_with_its_leases():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(3, b"t" * 16, "vllm-0", Process(70, 1234))
    writer.engines.session_joined(3, Process(72, 1250))
    writer.held(held(40, [1, 2, 3], session=3))
    writer.cached(cached([1, 2], LONG[:8], lease=40))
    prove(writer, [1, 2], {})
    writer.held(held(41, [8], session=3, anchor=1))
    writer.held(held(42, [9], session=3))
    writer.freed(freed([9]))
    writer.ended(ended(42))

    _, found = read(buffer, ours)

    leases = (
        FormerLease(40, "", tokens_of(LONG[:8]), Pages(pack_ids([3]))),
        FormerLease(41, "", tokens_of(LONG[:4]), Pages(pack_ids([8]))),
    )
    assert found.sessions == (FormerSession(3, "vllm-0", (70, 72), leases),)
    assert found.engines == (
        EngineRecord(3, b"t" * 16, "vllm-0", (Process(70, 1234), Process(72, 1250))),
    )
    assert (found.last_lease, found.last_session) == (42, 3)
    assert found.unproven == b""


def test_that_an_engine_keeps_blocks_is_noted_for_each_daemon_after():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(3, b"t" * 16, "vllm-0", Process(70, 1234))
    writer.engines.session_opened(4, b"u" * 16, "vllm-1", Process(71, 1235))
    writer.engines.session_keeps_blocks(3)
    writer.engines.session_keeps_blocks(99)  # nobody knows it

    for _ in range(2):
        reading, found = read(buffer, ours)
        assert {one.id: one.keeps_blocks for one in found.sessions} == {3: True, 4: False}
        assert [one.name for one in found.sessions] == ["vllm-0", "vllm-1"]
        reading.carry_on()


def test_a_lease_keeps_the_proven_part_of_its_path():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(70, 1))
    writer.held(held(1, [1, 2, 3]))
    writer.cached(cached([1, 2, 3], LONG[:12], lease=1))
    prove(writer, [1], {})

    _, found = read(buffer, ours)

    assert found.sessions[0].leases == (FormerLease(1, "", tokens_of(LONG[:4]), Pages(b"")),)
    assert page_ids(found.unproven) == [2, 3]


def test_pages_of_a_lease_whose_engine_is_not_known_are_not_free():
    ours = identity()
    buffer, journal = made(ours)
    JournalWriter(journal).held(held(1, [1, 2], session=9))

    _, found = read(buffer, ours)

    assert found.engines == ()
    assert page_ids(found.unproven) == [1, 2]


def test_what_is_carried_on_is_read_again_the_same():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(70, 1))
    writer.held(held(1, [1, 2, 3]))
    writer.cached(cached([1, 2], LONG[:8], lease=1))
    prove(writer, [1], {})
    reading, before = read(buffer, ours)
    reading.carry_on()

    _, after = read(buffer, ours)

    assert after == msgspec.structs.replace(before, generation=3)


def test_a_page_that_was_not_kept_is_never_adopted_later():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    contents = {1: Place("", LONG[:4]), 2: Place("", LONG[:8])}
    writer.cached(cached([1, 2], LONG[:8]))
    prove(writer, [1, 2], contents)
    reading, found = read(buffer, ours, VerifyDepth.ALL, {2: contents[2]})
    assert found.branches == ()
    writer = reading.carry_on()
    writer.freed(freed([1]))
    writer.cached(cached([1], LONG[:4]))
    prove(writer, [1], contents)

    _, found = read(buffer, ours)

    assert places_in(found) == {1: contents[1]}
    assert page_ids(found.unproven) == [2]


@pytest.mark.parametrize("bad", [0, 5, 9])
def test_a_bad_page_goes_with_all_that_follow_it(bad):
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    pages = list(range(1, 11))
    contents = {page: Place("", LONG[: 4 * page]) for page in pages}
    writer.cached(cached(pages, LONG))
    prove(writer, pages, contents)
    contents[pages[bad]] = Place("overwritten", ())

    _, found = read(buffer, ours, VerifyDepth.ALL, contents)

    assert list(places_in(found)) == pages[:bad]
    assert page_ids(found.unproven) == pages[bad:]


def test_one_bad_page_of_a_sample_has_all_the_others_summed():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    pages = list(range(1, 41))
    path = tuple(range(160))
    contents = {page: Place("", path[: 4 * page]) for page in pages}
    writer.cached(cached(pages, path))
    writer.cached(cached([50], (1, 1, 1, 1)))
    contents[50] = Place("", (1, 1, 1, 1))
    prove(writer, [*pages, 50], contents)

    first, whole = read(buffer, ours, VerifyDepth.SAMPLED, contents)
    contents[50] = Place("overwritten", ())
    second, found = read(buffer, ours, VerifyDepth.SAMPLED, contents)

    assert n_summed(first) < 20
    assert len(places_in(whole)) == 41
    assert n_summed(second) == 41
    assert list(places_in(found)) == pages


def test_nothing_is_summed_where_nobody_wants_it():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1], LONG[:4]))
    prove(writer, [1], {})

    assert n_summed(read(buffer, ours, VerifyDepth.NONE)[0]) == 0


@pytest.mark.parametrize(
    ("theirs", "flaw"),
    [
        (identity(pages=63), IdentityFlaw.RESIZED),
        (identity(page_size=8), IdentityFlaw.RESIZED),
        (identity(layout=b"m" * 32), IdentityFlaw.LAYOUT),
        (identity(node="n1"), IdentityFlaw.NODE),
        (identity(memory=b"m" * 16), IdentityFlaw.MEMORY),
    ],
)
def test_a_journal_of_something_else_is_refused(theirs, flaw):
    buffer, _ = made(identity())

    assert open_journal(buffer, theirs).flaw is flaw


@pytest.mark.parametrize(
    ("at", "what", "flaw"),
    [
        (0, bytes(4096), IdentityFlaw.BLANK),
        (0, b"\x7fELF", IdentityFlaw.FOREIGN),
        (0, bytes(8), IdentityFlaw.FOREIGN),
        (8, struct.pack("<I", 0), IdentityFlaw.VERSION),
        (16, struct.pack("<Q", 65), IdentityFlaw.TORN),
        (40, b"\x00", IdentityFlaw.TORN),
        (1024, b"\xff", IdentityFlaw.TORN),
    ],
)
def test_a_damaged_head_is_refused(at, what, flaw):
    buffer, _ = made(identity())
    buffer[at : at + len(what)] = what

    assert open_journal(buffer, identity()).flaw is flaw


def test_a_journal_that_was_cut_is_refused():
    buffer, _ = made(identity())

    assert open_journal(buffer[:-64], identity()).flaw is IdentityFlaw.RESIZED
    assert open_journal(buffer[:100], identity()).flaw is IdentityFlaw.FOREIGN


def test_a_journal_that_is_made_anew_is_empty():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(70, 1))
    writer.held(held(1, [2, 3]))
    writer.cached(cached([2], LONG[:4], lease=1))
    prove(writer, [2], {})
    make_journal(buffer, ours)

    _, found = read(buffer, ours)

    assert (found.branches, found.sessions, found.engines, found.unproven) == ((), (), (), b"")
    assert (found.generation, found.last_lease, found.last_session) == (1, 0, 0)


def test_a_name_that_finds_no_slot_costs_its_pages_their_next_life():
    ours = identity(pages=200)
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    for page in range(1, 66):
        writer.cached(cached([page], LONG[:4], namespace=f"n{page}"))
    prove(writer, list(range(1, 66)), {})
    assert writer.n_unkept_pages == 1
    writer.cached(cached([70], LONG[:4], namespace="n" * 300))
    assert writer.n_unkept_pages == 2

    _, found = read(buffer, ours)

    assert len(places_in(found)) == 64
    assert page_ids(found.unproven) == [65, 70]


def test_a_name_that_no_page_has_any_more_leaves_its_slot():
    ours = identity(pages=200)
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    for page in range(1, 65):
        writer.cached(cached([page], LONG[:4], namespace=f"n{page}"))
    writer.freed(freed([3, 4]))
    writer.cached(cached([70], LONG[:4], namespace="new"))
    prove(writer, [*range(1, 65), 70], {})

    places = places_in(read(buffer, ours)[1])

    assert places[70] == Place("new", LONG[:4])
    assert places[64] == Place("n64", LONG[:4])
    assert len(places) == 63


def test_a_page_is_not_kept_under_another_name():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([1], LONG[:4], namespace="a"))
    prove(writer, [1], {})
    NamespaceSlots(journal, operator.setitem, {}).slot_of("b")

    _, found = read(buffer, ours)

    assert found.branches == ()


def test_a_lease_that_finds_no_slot_keeps_its_own_pages():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(70, 1))
    for lease in range(1, 65_536):
        writer.held(held(lease, []))
    writer.held(held(70_000, [5]))

    assert writer.claims.n_unkept == 1
    writer.ended(ended(1))
    assert page_ids(read(buffer, ours)[1].unproven) == [5]


def test_a_lease_of_before_has_no_path_where_nothing_is_cached():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(0, 0))
    writer.held(held(1, [5]))

    _, found = read(buffer, ours)

    (session,), (engine,) = found.sessions, found.engines
    assert session.leases == (FormerLease(1, "", NO_TOKENS, Pages(pack_ids([5]))),)
    assert engine.processes == (Process(0, 0),)
    assert packed_sums(Pages(b""), {}) == b""


def test_what_was_cached_in_pieces_is_pieces_again():
    """Eviction goes by pieces, so other ones would be other hits."""
    ours = identity(pages=64)
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    for note in (cached([3, 4], LONG[:8]), cached([5, 6, 7], LONG[:20], before=4)):
        writer.cached(note)
        pages, words = writer.pending(note.pages)
        writer.summed(pages, words, packed_sums(pages, {}))

    _, found = read(buffer, ours)

    assert [(one.parent, page_ids(one.pages)) for one in found.branches] == [
        (-1, [3, 4]),
        (0, [5, 6, 7]),
    ]
