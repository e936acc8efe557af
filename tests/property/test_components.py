"""Leases over pages, windows, states and buffers in every order: who reads finds what was written.

A lease table with engines that compute, remotes that send, copies that are slow, and operators that
evict and flush. Each page of each component holds the tokens that it was written for, and a free
page holds nothing, so that no reader is right by luck. After every step everything that the table
and its keepers count is counted again from scratch, and

- each node of the tree has exactly its tokens on its pages, in its windows and in its snapshot;
- each engine finds what it looks at before it computes, and writes to pages of its own alone;
- a copy finds its source as it was when it was ordered.

The seed of a failure is in the message; ``KVD_SEEDS=first:last`` runs others and
``KVD_COMPONENT_STEPS`` sets the steps of each: 24 seeds of 4200 make 100,800 in all.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvd.core.cache.eviction import Policy
from kvd.core.cache.lease import ENGINE, Claim, Quarantine, Shortage, Writer
from kvd.core.cache.lease_state import LeaseStage, LeaseTransition
from kvd.errors import Refusal
from kvd.types import ID_BYTES, Tokens, count, pack_ids, page_ids
from tests.core.keeping import arrival, check, claim, table_of
from tests.support.seeds import repeatable, seed_range

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.saved_area import SavedMove

FIRST, LAST = seed_range("0:24")
STEPS = int(os.environ.get("KVD_COMPONENT_STEPS", "130"))
A_TEST = 8

done: Counter[str] = Counter()
"""How often each thing happened, over all seeds."""


class Owner:
    """A lease as whoever has it knows it."""

    def __init__(self, lease: LeaseRecord, text: Tokens, step: int) -> None:
        self.lease = lease
        self.text = text
        """What it computes, far beyond what it has named so far."""
        self.computed = lease.prefix_tokens
        """Tokens of it that are in its pages."""
        self.step = step
        self.upto = lease.prefix_tokens
        self.is_arriving = ENGINE not in lease.holders
        self.copies: list[tuple[SavedMove, list[object], list[object]]] = []
        """Under way: what is moved, and what its pages and its slots held when it was ordered."""

    @property
    def running(self) -> bool:
        return self.lease.state is LeaseStage.RUNNING and self.lease.quarantine is None


class Storm:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.promises = random.Random(f"promises {seed}")
        self.page = page = rng.choice((1, 2, 4, 16))
        self.window = rng.choice((1, page, 2 * page, 3 * page - 1, 5 * page))
        has_states = rng.random() < 0.5
        saved = (rng.randint(5, 60), rng.randint(3, 40), *((4,) if has_states else ()), 0)
        self.table = table_of(
            page,
            rng.randint(20, 80),
            rng.choice(list(Policy)),
            window=self.window,
            swa=rng.randint(10, 60),
            states=rng.randint(2, 8) if has_states else 0,
            buffer_tokens=2 * page,
            buffers=20,
            saved=saved,
        )
        self.texts = [[rng.randrange(3) for _ in range(80 * page)] for _ in range(3)]
        self.owners: list[Owner] = []
        self.memory: dict[str, dict[int, object]] = {
            name: {} for name in ("kv", "swa", "state", "kv.saved", "swa.saved", "state.saved")
        }

    # ---- what pages hold -------------------------------------------------------------------------

    def at(self, text: bytes, upto_tokens: int) -> int:
        """What a page holds that ends, or is filled, at that token."""
        return hash(text[: upto_tokens * ID_BYTES])

    def rows(self, lease: LeaseRecord) -> tuple[list[int], list[int], list[int]]:
        """Of pages, windows, and states."""
        beside = {
            one.component.name: page_ids(one.page_table(lease))
            for one in self.table.components.each
        }
        return page_ids(lease.page_table), beside["swa"], beside.get("state", [])

    def forget_free(self) -> None:
        """A free page holds nothing."""
        table = self.table
        pools = {"kv": table.pool}
        pools |= {one.component.name: one.pool for one in table.components.each}
        pools |= {f"{name}.saved": pool for name, pool in table.saved.pools.items()}
        for name, memory in self.memory.items():
            if name in pools:
                for page in page_ids(pools[name].free_ids()):
                    memory.pop(page, None)

    def look(self) -> None:
        """Everything that is cached, and everything that somebody has, is what it stands for."""
        tree = self.table.tree
        keepers = {one.component.name: one for one in self.table.components.each}
        for node in tree.nodes():
            text, first = tree.path_tokens(node), node.end_tokens // self.page - count(node.pages)
            wanted = [self.at(text, (first + k + 1) * self.page) for k in range(count(node.pages))]
            assert [self.memory["kv"].get(page) for page in page_ids(node.pages)] == wanted
            windows = page_ids(keepers["swa"].pages_at(node))
            assert [self.memory["swa"].get(page) for page in windows] == wanted[: len(windows)]
            if "state" in keepers:
                for page in page_ids(keepers["state"].pages_at(node)):
                    assert self.memory["state"].get(page) == wanted[-1]
        for one in self.owners:
            if one.running and not one.is_arriving:
                self.look_at(one)

    def look_at(self, one: Owner) -> None:
        """What the lease has of the tokens that are computed."""
        kv, swa, _ = self.rows(one.lease)
        for name, row in (("kv", kv), ("swa", swa)):
            for k, page in enumerate(row[: -(-one.computed // self.page)]):
                if page or name == "kv":
                    wanted = self.at(one.text, min((k + 1) * self.page, one.computed))
                    assert self.memory[name].get(page) == wanted, (name, k, one.computed)

    # ---- engines -----------------------------------------------------------------------------

    def text(self) -> Tokens:
        """One of a few beginnings, and an end of one's own."""
        ids = self.rng.choice(self.texts)
        fork = self.rng.randint(0, len(ids))
        return Tokens(pack_ids([*ids[:fork], *(self.rng.randrange(3) for _ in ids[fork:])]))

    def begin(self) -> None:
        rng, text = self.rng, self.text()
        toks = Tokens(text[: rng.randint(1, 30 * self.page) * ID_BYTES])
        if rng.random() < 0.5:
            toks = Tokens(toks[: max(1, count(toks) // self.page) * self.page * ID_BYTES])
        step = rng.choice((0, 0, 1, self.page, 3 * self.page))
        more = {
            "reserve": rng.choice((0, 0, 2 * self.page)),
            "cache": rng.random() < 0.85,
            "step": step,
            "promise": self.promises.choice((0, 0, 1, 2 * self.page, 9 * self.page)),
        }
        is_sent = rng.random() < 0.35
        asked = arrival(self.table, toks, **more) if is_sent else claim(toks, **more)
        lease = self.table.grants.open_lease(asked)
        if isinstance(lease, Shortage):
            done[f"short of {lease.budget}"] += 1
            return
        done["receive" if is_sent else "lease"] += 1
        one = Owner(lease, text, step)
        if is_sent:
            one.upto = count(toks)
        elif lease.prefix_tokens:
            done["prefix gone on from"] += 1
        self.owners.append(one)

    def compute(self, one: Owner) -> None:
        """So many tokens more, as far as there is room; a window is slid where it must be."""
        rng, lease = self.rng, one.lease
        end = min(one.computed + rng.randint(1, 4 * self.page), lease.room_tokens)
        while one.computed < end:
            upto = min(end, one.computed + one.step) if one.step else end
            if one.step or rng.random() < 0.3:
                refusal = self.table.grants.slide(lease, one.computed)
                assert refusal is None, refusal
                done["slide"] += 1
            self.write(one, upto)

    def write(self, one: Owner, end: int) -> None:
        """Compute ``[computed, end)``: look at what is before, write to one's own pages."""
        lease, start = one.lease, one.computed
        self.look_at(one)
        kv, swa, state = self.rows(lease)
        first = max(0, start - self.window + 1) // self.page
        assert all(swa[first : -(-end // self.page)]), "a window page is missing that is looked at"
        own = {
            "kv": set(page_ids(lease.held)),
            "swa": set(page_ids(self.table.components.each[0].own_pages(lease))),
        }
        if state:
            reads = state[0] if start == lease.prefix_tokens and state[0] else state[1]
            if start:
                assert self.memory["state"].get(reads) == self.at(one.text, start)
            self.memory["state"][state[1]] = self.at(one.text, end)
        for k in range(start // self.page, -(-end // self.page)):
            for name, row in (("kv", kv), ("swa", swa)):
                assert row[k] in own[name], f"{name} page {row[k]} is not its own"
                self.memory[name][row[k]] = self.at(one.text, min((k + 1) * self.page, end))
        one.computed = end
        done["compute"] += 1

    def new_tokens(self, one: Owner) -> Tokens | None:
        """What is computed beyond what is named; None before the named tokens are computed."""
        known = count(one.lease.tokens)
        if one.computed < known:
            return None
        return Tokens(one.text[known * ID_BYTES : one.computed * ID_BYTES])

    def commit(self, one: Owner) -> bool:
        new = self.new_tokens(one)
        if new is None:
            return False
        assert isinstance(self.table.commits.commit(one.lease, new), int)
        done["commit"] += 1
        return True

    def extend(self, one: Owner) -> None:
        n_tokens = self.rng.randint(0, 3 * self.page)
        if one.lease.room_tokens + n_tokens <= count(one.text):
            promise = one.lease.promise
            upto = promise.upto_tokens if promise is not None and promise.pages else 0
            is_sure = one.lease.room_tokens + n_tokens <= upto
            short = self.table.grants.extend(one.lease, n_tokens)
            assert not is_sure or short is None, short
            done["extend" if short is None else "extend refused"] += 1
            done["extend by what was promised"] += is_sure and n_tokens > 0

    def release(self, one: Owner) -> None:
        if one.lease.state is not LeaseStage.RUNNING or one.is_arriving:
            is_committed = False
        else:
            is_committed = self.rng.random() < 0.7 and self.commit(one)
        if is_committed:
            one.lease.is_whole = True
        self.table.holders.release(one.lease, next(iter(one.lease.holders)), "normal")
        if one.lease.id not in self.table.leases:
            self.owners.remove(one)
        done["release"] += 1

    # ---- remotes -----------------------------------------------------------------------------

    def arrive(self, one: Owner) -> None:
        """Everything of the prompt is written, and the lease is the engine's."""
        lease, table = one.lease, self.table
        n_tokens = count(lease.tokens)
        kv, swa, state = self.rows(lease)
        fresh = table.components.fresh_tokens(n_tokens, cached=lease.cache) or 0
        for k in range(lease.owned, -(-n_tokens // self.page)):
            self.memory["kv"][kv[k]] = self.at(one.text, min((k + 1) * self.page, n_tokens))
        for k in range(fresh // self.page, -(-n_tokens // self.page)):
            self.memory["swa"][swa[k]] = self.at(one.text, min((k + 1) * self.page, n_tokens))
        if state:
            self.memory["state"][state[1]] = self.at(one.text, n_tokens)
        one.computed = n_tokens
        one.is_arriving = False
        assert isinstance(table.commits.commit(lease, Tokens(b"")), int)
        table.holders.hand_over(lease, "lease")
        done["arrive"] += 1

    def abort(self, one: Owner) -> None:
        self.table.ends.quarantine(one.lease, Quarantine((Writer("p", "i"),), 0.0, "cancelled"))
        done["quarantine"] += 1

    def late(self, one: Owner) -> None:
        """A remote writes once more, or is over."""
        if self.rng.random() < 0.5:
            self.table.ends.end_quarantine(one.lease, "settled")
            self.owners.remove(one)
            return
        owned = [("kv", one.lease.page_table)]
        owned += [
            (keeper.component.name, keeper.own_pages(one.lease))
            for keeper in self.table.components.each
        ]
        for name, pages in owned:
            for page in page_ids(pages):
                self.memory.setdefault(name, {})[page] = "late"

    # ---- retraction --------------------------------------------------------------------------

    def retract(self, one: Owner) -> None:
        new = self.new_tokens(one)
        if new is None:
            return
        tokens, retracted = Tokens(one.lease.tokens + new), self.table.retracted
        if self.rng.random() < 0.2:
            retracted.leave(one.lease, tokens)
            done["retract, nothing kept"] += 1
            return
        found = retracted.begin_save(one.lease, tokens)
        if found is not None:
            assert isinstance(found, Shortage), found
            done[f"short of saved {found.budget}"] += 1
            return
        self.order(one, self.table.saved.to_save(one.lease))
        done["save"] += 1

    def order(self, one: Owner, moved: list[SavedMove]) -> None:
        for each in moved:
            pages, slots = self.memory[each.component], self.memory[f"{each.component}.saved"]
            one.copies.append(
                (
                    each,
                    [pages.get(page) for page in page_ids(each.pages)],
                    [slots.get(slot) for slot in page_ids(each.slots)],
                )
            )

    def copy(self, one: Owner) -> None:
        """The next copy is over; or the transfer process is, with all of them."""
        retracted, is_out = self.table.retracted, one.lease.state is LeaseStage.SAVING
        if self.rng.random() < 0.1:
            one.copies.clear()
            if is_out:
                retracted.cut_save(one.lease)
                done["save cut"] += 1
            else:
                retracted.undo_restore(one.lease)
                done["restore undone"] += 1
            self.gone(one)
            return
        moved, pages_held, slots_held = one.copies.pop()
        pages, slots = self.memory[moved.component], self.memory[f"{moved.component}.saved"]
        ids = list(zip(page_ids(moved.pages), page_ids(moved.slots), strict=True))
        if is_out:
            assert [pages.get(page) for page, _ in ids] == pages_held
            slots.update({slot: pages.get(page) for page, slot in ids})
        else:
            assert [slots.get(slot) for _, slot in ids] == slots_held
            pages.update({page: slots.get(slot) for page, slot in ids})
        if not one.copies and is_out:
            retracted.end_save(one.lease)
            done["saved"] += 1
        elif not one.copies:
            retracted.end_restore(one.lease)
            done["restored"] += 1
        self.gone(one)

    def gone(self, one: Owner) -> None:
        if one.lease.id not in self.table.leases:
            self.owners.remove(one)

    def resume(self, one: Owner) -> None:
        table, lease = self.table, one.lease
        fresh = lease.saved.fresh_tokens if lease.saved is not None else None
        n_tokens = count(lease.tokens)
        asked = Claim(
            1, 1, "lease", 0, "", lease.tokens, lease.room_tokens - n_tokens, 0, lease.cache,
            promise_tokens=lease.promised_tokens, resumes=lease.id,
            match_tokens=None if lease.cache else lease.prefix_tokens,
            fresh_tokens=fresh, step_tokens=lease.step_tokens,
        )  # fmt: skip
        table.retracted.turn(lease, LeaseTransition.RESUME)
        if isinstance(table.grants.open_lease(asked), Shortage):
            table.retracted.turn(lease, LeaseTransition.GIVEN_UP)
            done["resume refused"] += 1
            return
        one.computed = n_tokens if lease.saved is not None else lease.prefix_tokens
        moved = table.saved.to_restore(lease)
        assert not isinstance(moved, Refusal), moved
        if moved:
            table.retracted.begin_restore(lease)
            self.order(one, moved)
            done["restore"] += 1
        else:
            table.retracted.complete(lease)
            done["resume, nothing to restore"] += 1

    # ---- all of it ---------------------------------------------------------------------------

    def step(self) -> None:
        self.table.out.drain()
        rng = self.rng
        dice = rng.random()
        if dice < 0.02:
            self.table.evictor.flush()
        elif dice < 0.06:
            self.table.evictor.evict(rng.randint(1, 10), "operator")
        elif dice < 0.08:
            keeper = rng.choice(self.table.components.each)
            if keeper.evictable_pages:
                keeper.make_room(keeper.pool.free_pages + rng.randint(1, keeper.evictable_pages))
        elif dice < 0.3 or not self.owners:
            self.begin()
        else:
            self.act(rng.choice(self.owners), rng.random())
        self.forget_free()
        check(self.table)
        self.look()

    def act(self, one: Owner, dice: float) -> None:
        if one.lease.quarantine is not None:
            self.late(one)
        elif one.is_arriving:
            self.arrive(one) if dice < 0.8 else self.abort(one)
        elif one.copies:
            self.release(one) if dice < 0.05 and ENGINE in one.lease.holders else self.copy(one)
        elif one.lease.state is LeaseStage.RETRACTED:
            self.resume(one) if dice < 0.8 else self.release(one)
        elif dice < 0.5:
            self.compute(one)
        elif dice < 0.6:
            self.commit(one)
        elif dice < 0.7:
            self.extend(one)
        elif dice < 0.85:
            self.retract(one)
        else:
            self.release(one)

    def calm(self) -> None:
        """Everybody lets go: nothing is held of any component."""
        while self.owners:
            one = self.owners[0]
            if one.lease.quarantine is not None:
                self.table.ends.end_quarantine(one.lease, "settled")
                self.owners.remove(one)
            elif one.copies:
                self.copy(one)
            else:
                self.release(one)
        self.forget_free()
        check(self.table)
        self.look()
        for keeper in self.table.components.each:
            assert keeper.pool.free_pages + keeper.evictable_pages == keeper.pool.total_pages - 1
        self.table.evictor.flush()
        assert self.table.pool.free_pages == self.table.capacity_pages
        assert all(
            one.pool.free_pages == one.pool.total_pages - 1 for one in self.table.components.each
        )


@pytest.mark.parametrize("first", range(FIRST, LAST, A_TEST))
def test_who_reads_finds_what_was_written(first):
    for seed in range(first, min(first + A_TEST, LAST)):
        with repeatable(seed, __file__):
            storm = Storm(seed)
            for _ in range(STEPS):
                storm.step()
            storm.calm()


def test_everything_happened():
    """What no storm does is not tested by them."""
    if (FIRST, LAST) != (0, 24) or not done:
        pytest.skip("only the whole default run covers everything")
    wanted = {
        "lease", "receive", "prefix gone on from", "slide", "compute", "commit", "arrive", "extend",
        "extend by what was promised",
        "extend refused", "release", "quarantine", "save", "saved", "save cut", "restore",
        "restored", "restore undone", "retract, nothing kept", "resume, nothing to restore",
        "resume refused", "short of kv", "short of swa", "short of state", "short of saved kv",
        "short of saved swa",
    }  # fmt: skip
    assert wanted - done.keys() == set()
