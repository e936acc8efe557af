"""Locks that are no use: the tree is whole under them, and without others nothing has changed."""

from __future__ import annotations

import random

import pytest

from kvd.core.audit.rules import tree_faults
from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.quiet_locks import QuietLocks
from kvd.core.cache.radix import RadixTree
from kvd.types import Pages, Tokens, pack_ids
from tests.support.seeds import repeatable, seed_range

POLICIES = list(Policy)
MOST_PAGES = 60


def prompt(rng):
    return Tokens(pack_ids([rng.randint(0, 1) for _ in range(rng.randint(1, 12))]))


class Walk:
    """A tree of pages of one token, with locks of both kinds."""

    def __init__(self, rng, policy):
        self.rng = rng
        self.tree = RadixTree(1, eviction_order(policy))
        self.quiet = QuietLocks(self.tree)
        self.locked, self.kept = [], []
        self.page = 0

    def insert(self):
        tokens = prompt(self.rng)
        node = self.tree.hold(tokens, "")
        n_more = len(tokens) // 4 - node.end_tokens
        self.page += n_more
        pages = Pages(pack_ids(list(range(self.page - n_more + 1, self.page + 1))))
        if n_more:
            end = self.tree.extend(node, tokens, pages, start_tokens=node.end_tokens).node
            self.tree.unlock_from(node, end)
        else:
            self.tree.unlock(node)

    def step(self):
        rng, tree = self.rng, self.tree
        match rng.randint(0, 6):
            case 0 | 1:
                self.insert()
            case 2:
                self.locked.append(tree.hold(prompt(rng), ""))
            case 3 if self.locked:
                tree.unlock(self.locked.pop(rng.randrange(len(self.locked))))
            case 4:
                nodes = list(tree.nodes())
                if nodes:
                    node = rng.choice(nodes)
                    self.quiet.lock(node)
                    self.kept.append(node)
            case 5 if self.kept:
                self.quiet.unlock(self.kept.pop(rng.randrange(len(self.kept))))
            case _:
                self.evict(rng.randint(1, 6))
        if tree.cached_pages > MOST_PAGES:
            self.evict(tree.cached_pages - MOST_PAGES)

    def evict(self, n_pages):
        for node in self.tree.evict(n_pages).victims:
            assert not node.children, "whoever goes has nothing below it"
            assert node not in self.locked
            assert node not in self.kept


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(*seed_range("0:15")))
def test_the_tree_is_whole_under_quiet_locks(seed, policy):
    with repeatable(seed, __file__):
        walk = Walk(random.Random(seed), policy)
        for _ in range(400):
            walk.step()
            assert not tree_faults(walk.tree)
        while walk.locked:
            walk.tree.unlock(walk.locked.pop())
        while walk.kept:
            walk.quiet.unlock(walk.kept.pop())
        assert not walk.quiet.by_node
        assert not tree_faults(walk.tree)
        assert not walk.tree.protected_pages
        walk.evict(walk.tree.cached_pages)
        assert not list(walk.tree.nodes())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(*seed_range("0:15")))
def test_a_lock_under_which_nobody_used_anything_changes_no_order(seed, policy):
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        walk = Walk(rng, policy)
        for _ in range(40):
            walk.insert()
        tree = walk.tree
        before = [node for node in tree.order.ahead() if node is not None]
        hits = {node.id: node.hits for node in tree.nodes()}
        chosen = rng.sample(before, min(5, len(before)))
        for node in chosen:
            walk.quiet.lock(node)
        # Some of the others go meanwhile, which passes those that are kept.
        if rng.random() < 0.5 and tree.evictable_pages:
            walk.evict(1)
        for node in rng.sample(chosen, len(chosen)):
            walk.quiet.unlock(node)
        after = [node for node in tree.order.ahead() if node is not None]
        left = set(tree.nodes())
        assert after == [node for node in before if node in left]
        assert {node.id: node.hits for node in left} == {node.id: hits[node.id] for node in left}
