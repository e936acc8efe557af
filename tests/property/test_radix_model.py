"""The tree and a pool against a dict model, step by step.

Covers scenario R1, scenario R3, scenario R5, scenario R10, scenario R13, scenario R14.

The model is one dict: (namespace, the tokens of a whole-page prefix) -> the page that holds its
last page of tokens. After every step the tree must hold exactly what the model holds, on the same
pages, under the same locks, and every page must be in exactly one place.

``KVD_RADIX_STEPS`` sets the steps per case: 4200 make 100,800 in all, in about a minute.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from kvd.core.audit.rules import tree_faults
from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.pages import PagePool
from kvd.core.cache.radix import RadixTree
from kvd.core.cache.radix_node import LockUnderflow, RadixNode
from kvd.types import NO_PAGES, Pages, Tokens, count, pack_ids, page_ids

STEPS = int(os.environ.get("KVD_RADIX_STEPS", "300"))
NAMESPACES = ("", "m", "m+lora")
ALPHABET = (0, 1, 2**31 - 1)

Key = tuple[str, bytes]


class Owner:
    """A lease of the test: an anchor, the tokens it wants, the pages it holds for them."""

    def __init__(self, anchor: RadixNode, tokens: Tokens, held: Pages) -> None:
        self.anchor = anchor
        self.tokens = tokens
        self.held = held


class Machine:
    """Random operations on a tree, a pool and the model; ``audit`` compares them."""

    def __init__(self, page: int, policy: Policy, seed: int) -> None:
        self.random = random.Random(seed)
        self.page = page
        self.tree = RadixTree(page, eviction_order(policy))
        self.pool = PagePool("kv", 120)
        self.model: dict[Key, int] = {}
        self.owners: list[Owner] = []
        self.families = [self.fresh(6 * page) for _ in range(3)]
        self.operations = [
            (self.admit, 8),
            (self.commit, 4),
            (self.release, 4),
            (self.abort, 2),
            (self.look, 3),
            (self.match_only, 2),
            (self.evict, 3),
            (self.underflow, 1),
            (self.flush, 0.2),
        ]

    # --- random input

    def fresh(self, n_tokens: int) -> Tokens:
        return Tokens(pack_ids(self.random.choices(ALPHABET, k=n_tokens)))

    def prompt(self) -> Tokens:
        """A family's prefix of any length, then tokens of its own."""
        family = self.random.choice(self.families)
        shared = self.random.randint(0, count(family))
        own = self.random.randint(0, 3 * self.page)
        return Tokens(family[: 4 * shared] + self.fresh(own))

    # --- the model

    def keys(self, namespace: str, tokens: Tokens) -> list[Key]:
        """One key per whole page of ``tokens``."""
        step = 4 * self.page
        return [(namespace, tokens[:end]) for end in range(step, len(tokens) + 1, step)]

    def cached(self, namespace: str, tokens: Tokens) -> list[int]:
        """The pages of the longest prefix of ``tokens`` in the model."""
        out = []
        for key in self.keys(namespace, tokens):
            if key not in self.model:
                break
            out.append(self.model[key])
        return out

    def insert(
        self, namespace: str, tokens: Tokens, mine: list[int]
    ) -> tuple[list[int], list[int]]:
        """Puts the whole pages of ``tokens`` on ``mine``; the duplicates and the pages that count.

        ``mine`` belongs to the last whole pages; those before are in the model.
        """
        keys = self.keys(namespace, tokens)
        duplicates = []
        for key, page in zip(keys[len(keys) - len(mine) :], mine, strict=True):
            if self.model.setdefault(key, page) != page:
                duplicates.append(page)
        return duplicates, [self.model[key] for key in keys[len(keys) - len(mine) :]]

    # --- operations

    def look(self) -> None:
        namespace, tokens = self.random.choice(NAMESPACES), self.prompt()
        limit = self.random.choice([None, self.random.randint(0, count(tokens))])
        cut = tokens if limit is None else Tokens(tokens[: 4 * limit])

        found = self.tree.probe(tokens, namespace, limit)

        assert found == self.page * len(self.cached(namespace, cut))

    def match_only(self) -> None:
        namespace, tokens = self.random.choice(NAMESPACES), self.prompt()
        limit = self.random.choice([None, self.random.randint(0, count(tokens))])
        cut = tokens if limit is None else Tokens(tokens[: 4 * limit])

        node = self.tree.match(tokens, namespace, limit)

        assert page_ids(self.tree.path_pages(node)) == self.cached(namespace, cut)
        assert node.namespace == namespace

    def admit(self) -> None:
        """Match and lock, make room, hold the pages of the rest (the last one may be partial)."""
        namespace, tokens = self.random.choice(NAMESPACES), self.prompt()
        expected = self.cached(namespace, tokens)
        if self.random.random() < 0.5:
            anchor = self.tree.hold(tokens, namespace)
        else:
            anchor = self.tree.match(tokens, namespace)
            self.tree.lock(anchor)
        assert page_ids(self.tree.path_pages(anchor)) == expected
        assert anchor.end_tokens == self.page * len(expected)
        need = -(-(count(tokens) - anchor.end_tokens) // self.page)
        self.make_room(need)
        if need > self.pool.free_pages:
            self.tree.unlock(anchor)
            return
        self.owners.append(Owner(anchor, tokens, self.pool.take_pages(need)))

    def commit(self) -> None:
        """Whole pages join the tree, the lock moves down, the owner keeps a partial page."""
        owner = self.pick()
        if owner is None:
            return
        old = owner.anchor
        namespace, start = old.namespace, old.end_tokens
        n_whole = (count(owner.tokens) - start) // self.page
        if n_whole <= 0:
            return
        some = self.random.randint(1, n_whole)
        mine = Pages(owner.held[: 4 * some])
        upto = Tokens(owner.tokens[: 4 * (start + some * self.page)])
        duplicates, on = self.insert(namespace, upto, page_ids(mine))

        if self.random.random() < 0.5:
            grown = self.tree.extend(old, owner.tokens, mine, start_tokens=start)
        else:
            grown = self.tree.extend(old, Tokens(owner.tokens[4 * start :]), mine)
        self.tree.relock(old, grown.node)

        assert page_ids(grown.duplicates) == duplicates
        assert page_ids(grown.tree_pages) == on
        assert grown.node.end_tokens == start + some * self.page
        self.pool.return_pages(grown.duplicates)
        owner.anchor, owner.held = grown.node, Pages(owner.held[4 * some :])

    def release(self) -> None:
        """Commit everything whole, then unlock and free the rest; the other order of verbs."""
        owner = self.pick()
        if owner is None:
            return
        old, tokens = owner.anchor, owner.tokens
        n_whole = (count(tokens) - old.end_tokens) // self.page
        mine, rest = Pages(owner.held[: 4 * n_whole]), Pages(owner.held[4 * n_whole :])
        upto = Tokens(tokens[: 4 * (old.end_tokens + n_whole * self.page)])
        duplicates, _ = self.insert(old.namespace, upto, page_ids(mine))

        priority = self.random.randint(0, 3)
        start = old.end_tokens
        grown = self.tree.extend(old, tokens, mine, start_tokens=start, priority=priority)
        self.tree.unlock(old)

        assert page_ids(grown.duplicates) == duplicates
        self.pool.return_pages(Pages(grown.duplicates + rest))
        self.owners.remove(owner)

    def abort(self) -> None:
        owner = self.pick()
        if owner is None:
            return
        self.tree.unlock(owner.anchor)
        self.pool.return_pages(owner.held)
        self.owners.remove(owner)

    def evict(self) -> None:
        self.make_room(self.pool.free_pages + self.random.randint(0, 12))

    def make_room(self, n_pages: int) -> None:
        """Evicts until ``n_pages`` are free, and holds the victims against the model."""
        short = n_pages - self.pool.free_pages
        before = self.tree.evictable_pages
        ends = {node.id: self.tree.path_tokens(node) for node in self.tree.nodes()}
        locked = {node.id for node in self.tree.nodes() if node.lock_ref}

        evicted = self.tree.evict(short)

        freed = count(evicted.pages)
        assert freed >= min(max(short, 0), before)
        assert freed == sum(victim.n_pages for victim in evicted.victims)
        gone = []
        for victim in evicted.victims:
            assert victim.id not in locked
            keys = self.keys(victim.namespace, ends[victim.id])[-victim.n_pages :]
            gone += [self.model.pop(key) for key in keys]
        assert page_ids(evicted.pages) == gone
        self.pool.return_pages(evicted.pages)

    def flush(self) -> None:
        namespace = self.random.choice([None, *NAMESPACES])
        names = None if namespace is None else {namespace}
        flushed = self.tree.flush(names)
        gone = set(page_ids(flushed.pages))
        self.model = {key: page for key, page in self.model.items() if page not in gone}
        self.pool.return_pages(flushed.pages)
        left = list(self.tree.nodes(names))
        assert all(node.lock_ref for node in left)
        assert flushed.kept_pages == sum(count(node.pages) for node in left)

    def underflow(self) -> None:
        idle = [node for node in self.tree.nodes() if not node.lock_ref]
        if idle:
            with pytest.raises(LockUnderflow):
                self.tree.unlock(self.random.choice(idle))

    def pick(self) -> Owner | None:
        return self.random.choice(self.owners) if self.owners else None

    # --- what must hold after every step

    def step(self) -> None:
        operations, weights = zip(*self.operations, strict=True)
        self.random.choices(operations, weights)[0]()
        self.audit()

    def audit(self) -> None:
        assert tree_faults(self.tree) == []
        found: dict[Key, int] = {}
        for node in self.tree.nodes():
            ids = page_ids(node.pages)
            keys = self.keys(node.namespace, self.tree.path_tokens(node))
            found.update(zip(keys[-len(ids) :], ids, strict=True))
        assert found == self.model
        owned = [page for owner in self.owners for page in page_ids(owner.held)]
        free = page_ids(self.pool.free_ids())
        assert sorted([*free, *owned, *self.model.values()]) == list(range(1, 120))
        assert self.expected_locks() == Counter(
            {node: node.lock_ref for node in self.tree.nodes() if node.lock_ref}
        )

    def expected_locks(self) -> Counter[RadixNode]:
        """I2: a node's lock_ref is the number of owners anchored in its subtree."""
        out: Counter[RadixNode] = Counter()
        for owner in self.owners:
            step: RadixNode | None = owner.anchor
            while step is not None and step.parent is not None:
                out[step] += 1
                step = step.parent
        return out


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(2))
def test_tree_and_pool_agree_with_the_model_at_every_step(page: int, policy: Policy, seed: int):
    """scenario R14; the seed is in the test's name."""
    machine = Machine(page, policy, seed)

    for _ in range(STEPS):
        machine.step()

    while machine.owners:
        machine.abort()
    machine.make_room(119)
    assert machine.pool.free_pages == 119
    assert machine.model == {}
    assert machine.tree.path_pages(machine.tree.match(machine.prompt(), "m")) == NO_PAGES
