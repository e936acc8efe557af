"""Whatever happens, and wherever the process is killed: what is read was so, and nothing else is.

Steps are drawn that a node could take: leases take free pages, extend, commit, end; leaves are
evicted; sums come late or never; the journal is read and carried on in between. Each store is one
call, so a kill is a store that is done by half and none after it. Every reading is compared with
the model, at every kill.

The seed of a failure is in the name of its test; ``KVD_SEEDS=first:last`` runs others.
"""

from __future__ import annotations

import operator
import random

import msgspec
import numpy as np
import pytest

from kvd.core.effects import NoteCached
from kvd.journal.engines import Process
from kvd.journal.identity import RefusedJournal
from kvd.journal.layout import Journal, make_journal, open_journal
from kvd.journal.reader import FoundJournal, Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.types import NO_PAGES, NO_TOKENS, Pages, pack_ids, page_ids
from tests.journal.journaled import (
    PAGE_SIZE,
    Place,
    cached,
    ended,
    freed,
    held,
    identity,
    made,
    packed_sums,
    places_in,
    read,
)
from tests.support.seeds import seed_range

FIRST, LAST = seed_range("0:24")
SEEDS = range(FIRST, LAST)
N_PAGES = 48
STEPS = 60


class Killed(BaseException):
    """The process ends in the middle of a store."""


class Fuse:
    """Stores until it blows: the last store is done by half."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.left = -1

    def store(self, array, where, what) -> None:
        if self.left == 0:
            self._half(array, where, what)
            raise Killed
        self.left -= 1
        operator.setitem(array, where, what)

    def _half(self, array, where, what) -> None:
        """Some of a store of several words, in order; all or nothing of a store of one."""
        if isinstance(where, slice):
            part = range(*where.indices(len(array)))
            n_done = self._rng.randint(0, len(part))
            if isinstance(what, bytes):
                array[where.start : where.start + n_done] = what[:n_done]
            else:
                array[where.start : where.start + n_done] = what
        elif isinstance(where, np.ndarray):
            n_done = self._rng.randint(0, where.size)
            array[where[:n_done]] = what[:n_done] if isinstance(what, np.ndarray) else what
        elif isinstance(where, tuple):
            n_done = self._rng.randint(0, where[0].size)
            array[where[0][:n_done], where[1]] = what[:n_done]
        elif self._rng.random() < 0.5:
            array[where] = what


class Own:
    """A lease of the model: its path in the cache, its own pages, the tokens it knows."""

    def __init__(self, session: int, path: list[int], own: list[int]) -> None:
        self.session = session
        self.path = path
        self.own = own


class Model:
    """What a node would know, told to a writer as its notes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ours = identity(pages=N_PAGES)
        self.buffer, journal = made(self.ours)
        self.fuse = Fuse(rng)
        self.writer = JournalWriter(journal, None, self.fuse.store)
        self.free = list(range(1, N_PAGES))
        self.cached: dict[int, Place] = {}
        self.before: dict[int, int] = {}
        self.proven: set[int] = set()
        self.asked: list[tuple[Pages, object, dict[int, Place]]] = []
        self.leases: dict[int, Own] = {}
        self.unproven: set[int] = set()
        self.last_lease = 0
        self.generation = 1
        self.allowed: set[int] = set()
        """Pages whose proof is being stored: they may be found or not."""
        for session in (1, 2):
            self.writer.engines.session_opened(
                session, b"%16d" % session, f"e{session}", Process(70, 1)
            )

    def step(self) -> None:
        """One thing that a node does."""
        do = self.rng.choice(
            (
                *(self.open, self.open, self.extend, self.end, self.arrive),
                *(self.commit, self.commit, self.commit, self.evict, self.use),
                *(self.ask, self.ask, self.answer, self.answer),
            )
        )
        do()

    def take(self, n: int) -> list[int]:
        self.rng.shuffle(self.free)
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def path_of(self, page: int) -> list[int]:
        path = []
        while page:
            path.append(page)
            page = self.before[page]
        return path[::-1]

    def open(self) -> None:
        pages = self.take(self.rng.choice((1, 2, 5, 8)))
        if not pages:
            return
        anchor = self.rng.choice([0, *self.cached]) if self.cached else 0
        self.last_lease += 1
        lease = Own(self.rng.choice((1, 2)), self.path_of(anchor), pages)
        self.leases[self.last_lease] = lease
        self.writer.held(held(self.last_lease, pages, session=lease.session, anchor=anchor))

    def extend(self) -> None:
        if self.leases and self.free:
            number = self.rng.choice(list(self.leases))
            lease, more = self.leases[number], self.take(self.rng.randint(1, 6))
            lease.own += more
            anchor = lease.path[-1] if lease.path else 0
            self.writer.held(held(number, more, session=lease.session, anchor=anchor))

    def commit(self) -> None:
        if not self.leases:
            return
        number = self.rng.choice(list(self.leases))
        lease = self.leases[number]
        pages = lease.own[: self.rng.randint(0, len(lease.own))]
        if not pages:
            anchor = lease.path[-1] if lease.path else 0
            note = NoteCached(number, anchor, "", 0, 0, NO_PAGES, NO_TOKENS)
            self.writer.cached(note)
            return
        del lease.own[: len(pages)]
        self.join(lease.path, pages, number)

    def join(self, path: list[int], pages: list[int], number: int) -> None:
        """``pages`` join the tree behind ``path``, which grows by them."""
        before = path[-1] if path else 0
        where = self.cached[before] if before else Place(self.rng.choice(("", "lora")), ())
        first_before, tokens = before, where.path
        for page in pages:
            tokens += tuple(self.rng.randrange(1000) for _ in range(PAGE_SIZE))
            self.cached[page] = Place(where.namespace, tokens)
            self.before[page], before = before, page
        path += pages
        note = cached(pages, tokens, namespace=where.namespace, before=first_before, lease=number)
        self.writer.cached(note)

    def arrive(self) -> None:
        """A delta of a remote joins the tree; no lease was noted for it."""
        if self.free:
            path = self.path_of(self.rng.choice([0, *self.cached]))
            self.join(path, self.take(self.rng.choice((1, 3, 7))), 0)

    def end(self) -> None:
        if self.leases:
            number = self.rng.choice(list(self.leases))
            lease = self.leases.pop(number)
            self.writer.ended(ended(number))
            self.writer.freed(freed(lease.own))
            self.free += lease.own

    def evict(self) -> None:
        kept = {page for lease in self.leases.values() for page in lease.path}
        inner = {self.before[page] for page in self.cached}
        leaves = [page for page in self.cached if page not in kept and page not in inner]
        if leaves:
            path = self.path_of(self.rng.choice(leaves))
            gone = []
            while path and path[-1] not in kept and len(gone) < 4:
                if sum(self.before[page] == path[-1] for page in self.cached) > 0:
                    break
                page = path.pop()
                gone.append(page)
                self.forget(page)
            self.writer.freed(freed(gone))
            self.free += gone

    def forget(self, page: int) -> None:
        del self.cached[page], self.before[page]
        self.proven.discard(page)

    def ask(self) -> None:
        if self.cached:
            some = self.rng.sample(sorted(self.cached), self.rng.randint(1, len(self.cached)))
            pages, words = self.writer.pending(Pages(pack_ids(some)))
            self.asked.append((pages, words, dict(self.cached)))

    def answer(self) -> None:
        if self.asked:
            pages, words, then = self.asked.pop(self.rng.randrange(len(self.asked)))
            same = {
                page
                for page in page_ids(pages)
                if page in self.cached and self.cached[page] is then[page]
            }
            self.allowed = same
            self.writer.summed(pages, words, packed_sums(pages, then))
            self.allowed: set[int] = set()
            self.proven |= same

    def use(self) -> None:
        order = list(self.cached)
        self.rng.shuffle(order)
        self.writer.restamp(Pages(pack_ids(order)))

    def free_unproven(self) -> None:
        """The last lease of before has ended."""
        gone = sorted(self.unproven)
        self.unproven = set()
        self.writer.freed(freed(gone))
        self.free += gone

    # ---- reading ---------------------------------------------------------------------------

    def kept(self, proven: set[int]) -> dict[int, Place]:
        """What must be found if these were proven: those with all before them."""
        return {
            page: place
            for page, place in self.cached.items()
            if all(one in proven for one in self.path_of(page))
        }

    def restart(self) -> None:
        """The next process reads it and goes on; nothing is being stored."""
        reading, found = self.read()
        must = self.kept(self.proven)
        assert places_in(found) == must
        mine = {page for lease in self.leases.values() for page in lease.own}
        assert set(page_ids(found.unproven)) == (set(self.cached) - set(must)) | self.unproven
        leases = {lease.id: lease for one in found.sessions for lease in one.leases}
        assert set(leases) == set(self.leases)
        for number, lease in self.leases.items():
            former = leases[number]
            assert sorted(page_ids(former.held)) == sorted(lease.own)
            part = [page for page in lease.path if page in must]
            prefix = must[part[-1]] if part else Place("", ())
            assert (former.namespace, tuple(page_ids(Pages(former.prefix)))) == (
                prefix.namespace,
                prefix.path,
            )
            lease.path = part
        assert found.last_lease == self.last_lease
        assert not mine & set(page_ids(found.unproven))
        self.unproven |= set(self.cached) - set(must)
        for page in set(self.cached) - set(must):
            self.forget(page)
        self.asked = []
        self.writer = reading.carry_on(self.fuse.store)
        self.generation += 1
        assert found.generation == self.generation
        if not self.leases or self.rng.random() < 0.5:
            self.free_unproven()

    def read(self) -> tuple[Reading, FoundJournal]:
        verify = self.rng.choice(list(VerifyDepth))
        contents = self.cached
        return read(self.buffer, self.ours, verify, contents)


class Moment(msgspec.Struct, frozen=True):
    """What was so between two steps."""

    cached: dict[int, Place]
    kept: dict[int, Place]
    used: frozenset[int]
    """Pages that an engine may touch: its leases' own, and their paths."""


def moment(model: Model, also_proven: frozenset[int] = frozenset()) -> Moment:
    used = {page for lease in model.leases.values() for page in lease.own + lease.path}
    kept = model.kept(model.proven | also_proven)
    return Moment(dict(model.cached), kept, frozenset(used))


def pages_taken(found: FoundJournal) -> set[int]:
    """Every page that is not free."""
    leases = [lease for one in found.sessions for lease in one.leases]
    held = [page for lease in leases for page in page_ids(lease.held)]
    return {*places_in(found), *page_ids(found.unproven), *held}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_read_between_two_steps_is_what_was_so(seed):
    rng = random.Random(seed)
    model = Model(rng)
    for _ in range(STEPS):
        model.step()
        if rng.random() < 0.1:
            model.restart()
    model.restart()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_inside_a_store_leaves_nothing_that_was_not_so(seed):
    rng = random.Random(seed)
    model = Model(rng)
    for _ in range(rng.randrange(STEPS)):
        model.step()
        if rng.random() < 0.05:
            model.restart()
    model.fuse.left = rng.randrange(12)
    before, is_killed = moment(model), False
    while not is_killed:
        before = moment(model)
        try:
            rng.choice((model.step, model.step, model.step, model.restart))()
        except Killed:
            is_killed = True
    after = moment(model, frozenset(model.allowed))

    reading, found = read(model.buffer, model.ours)
    places = places_in(found)

    for page, place in places.items():
        assert place in (before.kept.get(page), after.kept.get(page)), f"page {page} was never that"
    assert before.kept.keys() & moment(model).kept.keys() <= places.keys()
    assert before.used & after.used <= pages_taken(found)
    reading.carry_on()
    assert places_in(read(model.buffer, model.ours)[1]) == places


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_bytes_never_make_a_page_what_it_was_not(seed):
    rng = random.Random(seed)
    model = Model(rng)
    for _ in range(STEPS):
        model.step()
    for _ in range(rng.choice((1, 5, 50))):
        damage(model, rng)

    journal = open_journal(model.buffer, model.ours)
    if not isinstance(journal, Journal):
        return
    reading = Reading(journal, VerifyDepth.NONE)
    places = places_in(reading.found())

    assert places.items() <= model.kept(model.proven).items()
    reading.carry_on()
    assert places_in(read(model.buffer, model.ours)[1]) == places


def damage(model: Model, rng: random.Random) -> None:
    """Flip a bit, zero a range or write noise, where something lies."""
    sizes = model.writer.journal.sizes
    areas = (
        (0, 256),
        (sizes.words_at, sizes.leases_at),
        (sizes.leases_at + 8 * 4 * 65_500, sizes.engines_at),
        (sizes.engines_at, sizes.engines_at + 2000),
        (sizes.spaces_at + 288 * 60, sizes.rows_at),
        (sizes.rows_at, sizes.size_bytes),
    )
    start, stop = rng.choice(areas[1:] if rng.random() < 0.95 else areas)
    at = rng.randrange(start, stop)
    n_bytes = min(rng.choice((1, 4, 8, 30)), stop - at)
    kind = rng.randrange(3)
    if kind == 0:
        model.buffer[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        model.buffer[at : at + n_bytes] = bytes(n_bytes)
    else:
        model.buffer[at : at + n_bytes] = rng.randbytes(n_bytes)


def test_every_single_byte_of_a_proven_row_matters():
    ours = identity()
    buffer, journal = made(ours)
    writer = JournalWriter(journal)
    writer.cached(cached([3], (1, 2, 3, 4)))
    pages, words = writer.pending(Pages(pack_ids([3])))
    writer.summed(pages, words, bytes(range(8)))
    sizes = journal.sizes
    row_at = sizes.rows_at + 3 * 8 * sizes.row_words
    stamp = range(row_at + 32, row_at + 40)
    row = range(row_at, row_at + 8 * sizes.row_words)
    word = range(sizes.words_at + 24, sizes.words_at + 32)

    for at in (*row, *word):
        whole = bytearray(buffer)
        whole[at] ^= 0x10
        is_kept = len(places_in(read(whole, ours)[1])) == 1
        assert is_kept == (at in stamp), f"byte {at}"


def test_a_kill_while_a_journal_is_made_leaves_the_old_one_or_none():
    ours = identity()
    old, journal = made(ours)
    writer = JournalWriter(journal)
    writer.engines.session_opened(1, b"t" * 16, "e", Process(70, 1))
    writer.cached(cached([3, 9], (1, 2, 3, 4, 5, 6, 7, 8)))
    pages, words = writer.pending(Pages(pack_ids([3, 9])))
    writer.summed(pages, words, bytes(16))
    _, whole = read(old, ours)

    for n_stores in range(8):
        for seed in range(5):
            buffer = bytearray(old)
            fuse = Fuse(random.Random(seed))
            fuse.left = n_stores
            try:
                make_journal(buffer, ours, fuse.store)
            except Killed:
                left = open_journal(buffer, ours)
                assert isinstance(left, RefusedJournal) or read(buffer, ours)[1] == whole
                if n_stores:
                    assert isinstance(left, RefusedJournal)
