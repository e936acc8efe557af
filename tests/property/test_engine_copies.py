"""Copies of engines in any order, with releases, commits, deaths and evictions between them.

Whatever the order: no page that a copy reads or writes is anybody else's before the copy is over,
what a load reads stays as it was, nothing joins the tree or is sent before a save of it is over,
and at the end nothing is left. A failure names its seed. ``KVD_SEEDS=first:last`` runs others.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvd.core import effects, inputs
from kvd.types import count, page_ids, slice_pages
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, pages_sum
from tests.core.side import PAGE, content, tokens
from tests.core.world import World
from tests.support.seeds import repeatable, seed_range

FIRST, LAST = seed_range("0:60")
STEPS = 120

done: Counter[str] = Counter()


class Mine:
    """One lease, as its engine knows it."""

    def __init__(self, run: Run) -> None:
        rng = run.rng
        # Few families of prompts: equal ones meet in the tree.
        self.toks = tokens((1000 * rng.randint(1, 4), rng.randint(1, 6 * PAGE)))
        self.n_tokens = count(self.toks)
        self.ranks = rng.choice((1, 1, 2))
        reply = run.p.call(client.OpenLease, self.toks, deadline_s=0.0, cache=rng.random() < 0.9)
        self.is_open = isinstance(reply, client.Leased)
        if not self.is_open:
            return
        assert isinstance(reply, client.Leased)
        self.lease, self.row, self.prefix = reply.lease, reply.pages, reply.prefix_tokens
        self.saved = [set(range(self.prefix // PAGE)) for _ in range(self.ranks)]
        """By rank, pages that it has saved."""
        self.send = 0

    def written(self) -> int:
        """Pages from the first on that all ranks have saved."""
        both = set.intersection(*self.saved)
        n = 0
        while n in both:
            n += 1
        return n


class Moving:
    """A copy under way."""

    def __init__(self, mine: Mine, rank: int, message: CopyBegins, pages: list[int]) -> None:
        self.mine, self.rank, self.message, self.pages = mine, rank, message, pages
        self.before: list[str | None] = []


class Run:
    """All of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(p_pages=28, d_pages=60, is_journaled=self.rng.random() < 0.5)
        self.p, self.d = self.world.p, self.world.d
        self.mine: list[Mine] = []
        self.moving: dict[tuple[int, int], Moving] = {}
        self.calls = 1000
        self.rooms = 0

    def worker(self, rank: int) -> int:
        return 10 + rank

    def check(self) -> None:
        """Pages under a copy are its lease's, or cached and locked by it."""
        node = self.p.node
        free = set(page_ids(node.leases.pool.free_ids()))
        for moving in self.moving.values():
            lease = node.leases.leases[moving.message.lease]
            held = set(page_ids(lease.held))
            anchor = lease.anchor
            path = set(page_ids(node.leases.tree.path_pages(anchor))) if anchor else set()
            for page in moving.pages:
                assert page not in free, f"page {page} is free under {moving.message}"
                where = held if moving.message.to_pages else held | path
                assert page in where, f"page {page} is not lease {lease.id}'s under a copy"
            if not moving.message.to_pages:
                now = [self.p.memory.get(page) for page in moving.pages]
                assert now == moving.before, "what a load reads has changed under it"

    # ---- what may happen ---------------------------------------------------------------------

    def open(self) -> None:
        mine = Mine(self)
        if mine.is_open:
            self.mine.append(mine)

    def begin(self, mine: Mine) -> None:
        rng = self.rng
        n_pages = count(mine.row)
        first = rng.randrange(n_pages)
        end = rng.randint(first + 1, n_pages)
        rank = rng.randrange(mine.ranks)
        is_save = rng.random() < 0.7
        self.calls += 1
        pages = slice_pages(mine.row, first, end)
        part = CopyPart("kv", first, end - first, pages_sum(pages))
        upto = min(end * PAGE, mine.n_tokens)
        message = CopyBegins(self.calls, mine.lease, is_save, (part,), upto if is_save else 0)
        worker = self.worker(rank)
        refusal = self.p.copy_said(message, rank=rank, ranks=mine.ranks, worker=worker)
        if refusal is not None:
            done["refused"] += 1
            return
        moving = Moving(mine, rank, message, page_ids(pages))
        moving.before = [self.p.memory.get(page) for page in moving.pages]
        if not is_save:
            wanted = [
                content(mine.toks, "", min((k + 1) * PAGE, mine.n_tokens))
                for k in range(first, end)
            ]
            assert moving.before == wanted, "a load was let read what nobody has written"
        if is_save:  # one that was not full is saved anew
            mine.saved[rank] -= set(range(first, end))
        self.moving[worker, message.call] = moving
        done["save" if is_save else "load"] += 1

    def end(self, key: tuple[int, int], *, is_done: bool) -> None:
        moving = self.moving.pop(key)
        part = moving.message.parts[0]
        if moving.message.to_pages and is_done:
            moving.mine.saved[moving.rank].update(
                range(part.first_page, part.first_page + part.n_pages)
            )
            self.fill(moving.mine, moving.pages, part.first_page)
        elif moving.message.to_pages:
            for page in moving.pages:
                self.p.memory[page] = "half"
        self.calls += 1
        message = CopyEnds(self.calls, key[1], is_done)
        refusal = self.p.copy_said(
            message, rank=moving.rank, ranks=moving.mine.ranks, worker=key[0]
        )
        assert refusal is None, refusal
        done["ended" if is_done else "failed"] += 1

    def fill(self, mine: Mine, pages: list[int], first: int) -> None:
        """A page is whole when each rank has saved its part."""
        both = set.intersection(*mine.saved)
        for k, page in enumerate(pages, first):
            if k in both:
                upto = min((k + 1) * PAGE, mine.n_tokens)
                self.p.memory[page] = content(mine.toks, "", upto)

    def commit(self, mine: Mine) -> None:
        row = self.p.call(client.CommitLease, lease=mine.lease)
        assert isinstance(row, client.PageTable), row
        mine.row = mine.row[: row.first * 4] + row.pages
        done["commit"] += 1

    def release(self, mine: Mine) -> None:
        self.mine.remove(mine)
        kind = self.rng.choice((client.ReleaseLease, client.CommitAndRelease))
        # One that never said a word would share all that it knows.
        if kind is client.CommitAndRelease and not self.has_said(mine):
            kind = client.ReleaseLease
        assert isinstance(self.p.call(kind, lease=mine.lease), client.Done)
        done["release"] += 1

    def has_said(self, mine: Mine) -> bool:
        return bool(self.p.node.leases.leases[mine.lease].said)

    def die(self, rank: int) -> None:
        worker = self.worker(rank)
        for key in [key for key in self.moving if key[0] == worker]:
            moving = self.moving.pop(key)
            if moving.message.to_pages:
                for page in moving.pages:
                    self.p.memory[page] = "half"
        self.p.feed(inputs.WorkerGone(self.world.now_s, 1, worker))
        done["death"] += 1

    def send(self, mine: Mine) -> None:
        self.rooms += 1
        room = self.rooms
        reply = self.p.call(client.SendRequest, mine.toks, room=room, lease=mine.lease)
        assert isinstance(reply, client.Sending), reply
        mine.send = reply.send
        self.d.call(client.ReceiveRequest, mine.toks, room=room, source=("p",), deadline_s=2.0)
        done["send"] += 1

    def step(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.15 or not self.mine:
            self.open()
        elif dice < 0.5:
            self.begin(rng.choice(self.mine))
        elif dice < 0.8 and self.moving:
            self.end(rng.choice(list(self.moving)), is_done=rng.random() < 0.85)
        elif dice < 0.86:
            mine = rng.choice(self.mine)
            if self.has_said(mine):
                self.commit(mine)
        elif dice < 0.94:
            self.release(rng.choice(self.mine))
        elif dice < 0.96:
            self.die(rng.randrange(2))
        else:
            mine = rng.choice(self.mine)
            if not mine.send and self.has_said(mine):
                self.send(mine)
        self.check()

    def finish(self) -> None:
        while self.moving:
            self.end(next(iter(self.moving)), is_done=self.rng.random() < 0.5)
            self.check()
        for mine in list(self.mine):
            self.release(mine)
        self.world.pass_time(70.0, 1.0)
        node = self.p.node
        assert not node.leases.leases, node.leases.leases
        assert not list(node.engine_copies)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_nothing_is_given_away_under_a_copy(seed):
    with repeatable(seed, __file__):
        run = Run(seed)
        original = run.p.post

        def checked(order: effects.Post) -> None:
            for page in page_ids(order.source):
                told = run.p.memory.get(page)
                assert told not in {None, "half"}, f"page {page} is sent with {told}"
            original(order)

        run.p.post = checked
        for _ in range(STEPS):
            run.step()
        run.finish()


def test_each_of_it_has_happened():
    if LAST - FIRST >= 40:
        assert (
            min(done[what] for what in ("save", "load", "failed", "release", "death", "send")) > 9
        )
