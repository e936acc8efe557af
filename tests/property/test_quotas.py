"""The order of eviction where namespaces have quotas, against what it is defined to be.

The oracle sorts all unlocked nodes of each share at each victim; the order has heaps that are out
of date. Without a quota it takes what the plain order of its policy takes.
"""

from __future__ import annotations

import random

import pytest

from kvd.core.audit.rules import tree_faults
from kvd.core.cache.eviction import Policy, eviction_order, victims
from kvd.core.cache.quiet_locks import QuietLocks
from kvd.core.cache.quota_order import QuotaOrder
from kvd.core.cache.quotas import FLOOR, OVER, USUAL
from kvd.core.cache.radix import RadixTree, drop
from kvd.core.layout.quota import Quota
from kvd.types import ID_BYTES, Pages, Tokens, pack_ids
from tests.support.seeds import repeatable, seed_range

POLICIES = list(Policy)
MOST_PAGES = 60
NAMESPACES = ("a", "a#1", "a#2\x1f7", "b", "b\x1f3", "", "c", "#x")
QUOTAS = (Quota("a", 6, 12), Quota("a#1", 3, None), Quota("b", 0, 4), Quota("", 5, 5))
HAS = {policy: policy is not Policy.LRU for policy in Policy}
"""Whether it is the plain order to the node under quiet locks too, which LRU by ranks need not be:
it knows of a use of what they lock."""


class Walk:
    """A tree of pages of one token, with locks of both kinds, in namespaces."""

    def __init__(self, rng: random.Random, orders: list, *, has_quiet: bool = True) -> None:
        self.rng = rng
        self.has_quiet = has_quiet
        self.trees = [RadixTree(1, order) for order in orders]
        self.quiet = [QuietLocks(tree) for tree in self.trees]
        self.locked: list[list] = []
        self.kept: list[list] = []
        self.page = 0

    @property
    def tree(self) -> RadixTree:
        return self.trees[0]

    def prompt(self) -> tuple[Tokens, str]:
        rng = self.rng
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
        return Tokens(pack_ids(tokens)), rng.choice(NAMESPACES)

    def insert(self) -> None:
        tokens, namespace = self.prompt()
        priority = self.rng.choice((0, 0, 2))
        for tree in self.trees:
            node = tree.hold(tokens, namespace)
            n_more = len(tokens) // ID_BYTES - node.end_tokens
            pages = Pages(pack_ids(list(range(self.page + 1, self.page + 1 + n_more))))
            start = node.end_tokens
            grown = tree.extend(node, tokens, pages, start_tokens=start, priority=priority)
            tree.unlock_from(node, grown.node)
        self.page += len(tokens)

    def step(self) -> None:
        rng = self.rng
        match rng.randint(0, 9):
            case 0 | 1 | 2 | 3:
                self.insert()
            case 4:
                tokens, namespace = self.prompt()
                self.locked.append([tree.hold(tokens, namespace) for tree in self.trees])
            case 5 if self.locked:
                found = self.locked.pop(rng.randrange(len(self.locked)))
                for tree, node in zip(self.trees, found, strict=True):
                    tree.unlock(node)
            case 6 | 7 if self.has_quiet:
                self.step_quiet()
            case 8 if rng.random() < 0.1:
                names = {rng.choice(NAMESPACES)}
                for tree in self.trees:
                    tree.flush(names)
            case _:
                self.evict(rng.randint(1, 6))
        if self.tree.cached_pages > MOST_PAGES:
            self.evict(self.tree.cached_pages - MOST_PAGES)

    def step_quiet(self) -> None:
        """Somebody reads a node because it will be evicted, or has read one."""
        rng, ids = self.rng, [node.id for node in self.tree.nodes()]
        if ids and (not self.kept or rng.random() < 0.5):
            number = rng.choice(ids)
            found = [next(n for n in tree.nodes() if n.id == number) for tree in self.trees]
            for quiet, node in zip(self.quiet, found, strict=True):
                quiet.lock(node)
            self.kept.append(found)
        elif self.kept:
            found = self.kept.pop(rng.randrange(len(self.kept)))
            for quiet, node in zip(self.quiet, found, strict=True):
                quiet.unlock(node)

    def evict(self, n_pages: int) -> None:
        gone = [[node.id for node in tree.evict(n_pages).victims] for tree in self.trees]
        assert all(ids == gone[0] for ids in gone)


class QuotaWalk(Walk):
    """One tree with quotas."""

    def __init__(self, rng: random.Random, policy: Policy) -> None:
        self.order = QuotaOrder(policy, QUOTAS)
        self.quotas = {quota.namespace: quota for quota in QUOTAS}
        super().__init__(rng, [self.order])

    def counts(self) -> dict[str | None, int]:
        found = dict.fromkeys([*self.quotas, None], 0)
        for node in self.tree.nodes():
            found[self.of(node)] += node.n_pages
        return found

    def of(self, node) -> str | None:
        names = (node.namespace.partition("\x1f")[0], node.namespace.partition("#")[0])
        bare = [name.partition("\x1f")[0] for name in names]
        return next((name for name in bare if name in self.quotas), None)

    def turn(self, whose: str | None, there: int, n_pages: int) -> int:
        if whose is None:
            return USUAL
        quota = self.quotas[whose]
        if there - n_pages < quota.floor_pages:
            return FLOOR
        over = quota.ceiling_pages is not None and there > quota.ceiling_pages
        return OVER if over else USUAL

    def expected(self, n_pages: int) -> list[int]:
        """By the definition: the first of some share, at the lowest turn, then by the policy."""
        left = self.counts()
        queues: dict[str | None, list] = {whose: [] for whose in left}
        for node in self.tree.nodes():
            if not node.lock_ref:
                queues[self.of(node)].append(self.order._entry(node))
        for queue in queues.values():
            queue.sort(key=lambda entry: entry[:2])
        out, wanted = [], min(n_pages, self.tree.evictable_pages)
        while wanted > 0:
            fronts = [
                (self.turn(whose, left[whose], queue[0][2].n_pages), *queue[0][:2], whose or "")
                for whose, queue in queues.items()
                if queue
            ]
            best = min(fronts)
            whose = next(w for w, queue in queues.items() if queue and queue[0][1] == best[2])
            node = queues[whose].pop(0)[2]
            left[whose] -= node.n_pages
            wanted -= node.n_pages
            out.append(node.id)
        return out

    def evict(self, n_pages: int) -> None:
        expected = self.expected(n_pages)
        wanted = min(n_pages, self.tree.evictable_pages) * ID_BYTES
        ahead = [node.id for node in victims(self.order, wanted)]
        gone = self.tree.evict(n_pages).victims
        assert [node.id for node in gone] == expected
        assert ahead == expected
        assert not any(node.children for node in gone)

    def check(self) -> None:
        assert tree_faults(self.tree) == []
        assert {who: pair[0] for who, pair in self.order.counted().items()} == self.counts()
        assert all(counted == there for counted, there in self.order.counted().values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(*seed_range("0:10")))
def test_victims_are_the_first_of_the_lowest_turn(seed, policy):
    with repeatable(seed, __file__):
        walk = QuotaWalk(random.Random(seed), policy)
        for _ in range(250):
            walk.step()
            walk.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(*seed_range("0:10")))
def test_without_a_quota_it_is_the_order_of_the_policy(seed, policy):
    with repeatable(seed, __file__):
        orders = [eviction_order(policy), QuotaOrder(policy, ())]
        walk = Walk(random.Random(seed), orders, has_quiet=HAS[policy])
        for _ in range(250):
            walk.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(*seed_range("0:10")))
def test_quotas_may_change_at_any_time(seed, policy):
    """From none at all too; and what is in the tree counts for the new ones at once."""
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        walk = QuotaWalk(rng, policy)
        plain = Walk(random.Random(seed), [eviction_order(policy)])
        for _ in range(60):
            plain.step()
        order = QuotaOrder(policy, QUOTAS)
        order.take_over(plain.tree.order)
        plain.tree.reorder(order)
        walk.trees, walk.order = plain.trees, order
        walk.quiet, walk.locked, walk.kept, walk.page = (
            plain.quiet,
            plain.locked,
            plain.kept,
            plain.page,
        )
        for _ in range(150):
            walk.check()
            walk.step()
            if rng.random() < 0.1:
                some = rng.sample(QUOTAS, rng.randint(0, len(QUOTAS)))
                walk.quotas = {quota.namespace: quota for quota in some}
                order.share_out(some)
            if rng.random() < 0.02:
                idle = [node for node in walk.tree.nodes() if not node.lock_ref]
                if idle:
                    drop(walk.tree, rng.choice(idle))
