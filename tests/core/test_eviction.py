"""The eviction orders, through the tree that uses them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvd.core.audit.rules import tree_faults
from kvd.core.cache.eviction import (
    HEAP_SLACK,
    PEEK_STALE,
    Policy,
    RankedOrder,
    eviction_order,
    peek,
)
from kvd.core.cache.radix import RadixTree
from kvd.types import Pages, Tokens, pack_ids

if TYPE_CHECKING:
    from kvd.core.cache.radix_node import RadixNode

PAGE = 4
NAMESPACE = "m"


class Shelf:
    """A tree with a page counter, for scripted accesses. A letter is one page of tokens."""

    def __init__(self, policy: Policy) -> None:
        self.order = eviction_order(policy)
        self.tree = RadixTree(PAGE, self.order)
        self._next_page = 1

    def tokens(self, word: str) -> Tokens:
        return Tokens(pack_ids([ord(letter) for letter in word for _ in range(PAGE)]))

    def put(self, word: str, priority: int = 0) -> RadixNode:
        tokens = self.tokens(word)
        anchor = self.tree.match(tokens, NAMESPACE)
        n_new = len(word) - anchor.end_tokens // PAGE
        pages = Pages(pack_ids(list(range(self._next_page, self._next_page + n_new))))
        self._next_page += n_new
        start = anchor.end_tokens
        grown = self.tree.extend(anchor, tokens, pages, start_tokens=start, priority=priority)
        assert tree_faults(self.tree) == []
        return grown.node

    def get(self, word: str) -> None:
        """One lease that reads ``word``."""
        node = self.tree.match(self.tokens(word), NAMESPACE)
        self.tree.lock(node)
        self.tree.unlock(node)

    def word(self, node: RadixNode) -> str:
        return "".join(map(chr, memoryview(self.tree.path_tokens(node)).cast("i")[::PAGE]))

    def drain(self) -> list[str]:
        """Evicts page by page; the words of the victims in order."""
        words = {node.id: self.word(node) for node in self.tree.nodes()}
        out = []
        while evicted := self.tree.evict(1).victims:
            out += [words[victim.id] for victim in evicted]
            assert tree_faults(self.tree) == []
        return out


def script(policy: Policy) -> Shelf:
    """A, b, c inserted in that order; then a read twice, b once, long ago; c never."""
    shelf = Shelf(policy)
    shelf.put("a", priority=1)
    shelf.put("b", priority=3)
    shelf.put("c", priority=2)
    shelf.get("b")
    shelf.get("a")
    shelf.get("a")
    return shelf


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Policy.LRU, ["c", "b", "a"]),
        (Policy.LFU, ["c", "b", "a"]),
        (Policy.SLRU, ["c", "b", "a"]),
        (Policy.FIFO, ["a", "b", "c"]),
        (Policy.PRIORITY, ["a", "c", "b"]),
    ],
)
def test_order_follows_the_policy_for_scripted_accesses(policy: Policy, order: list[str]):
    """scenario R6."""
    assert script(policy).drain() == order


def test_lru_and_lfu_differ_when_the_often_read_is_older():
    """scenario R6."""
    drained = {}
    for policy in (Policy.LRU, Policy.LFU):
        shelf = script(policy)
        shelf.get("c")
        drained[policy] = shelf.drain()

    assert drained == {Policy.LRU: ["b", "a", "c"], Policy.LFU: ["b", "c", "a"]}


def test_lfu_breaks_ties_by_recency():
    shelf = Shelf(Policy.LFU)
    for word in ("a", "b", "c"):
        shelf.put(word)
    for word in ("b", "c", "a"):
        shelf.get(word)

    assert shelf.drain() == ["b", "c", "a"]


def test_slru_takes_what_one_lease_has_used_before_what_two_have_however_long_ago():
    """scenario R7."""
    shelf = Shelf(Policy.SLRU)
    for word, n_leases in (("a", 2), ("b", 3), ("c", 1), ("d", 0)):
        shelf.put(word)
        for _ in range(n_leases):
            shelf.get(word)
    shelf.get("a")

    # From two on it does not count how many they were: b goes before a, which was used later.
    assert shelf.drain() == ["c", "d", "b", "a"]


def test_slru_protects_a_shared_beginning_and_not_its_continuations():
    """scenario R7."""
    shelf = Shelf(Policy.SLRU)
    shelf.put("xa")
    shelf.get("xa")
    shelf.put("xb")
    shelf.get("xb")
    shelf.put("y")

    assert shelf.drain() == ["xa", "xb", "y", "x"]


def test_what_several_leases_have_used_outlives_a_scan_of_what_one_has():
    """scenario R7: as many new prompts as the pool holds, each used once."""
    kept = {}
    for policy in (Policy.LRU, Policy.SLRU):
        shelf = Shelf(policy)
        shelf.put("a")
        shelf.get("a")
        shelf.get("a")
        for word in "bcdef":
            shelf.put(word)
            shelf.get(word)
            while shelf.tree.cached_pages > 4:
                shelf.tree.evict(1)
        kept[policy] = "".join(sorted(map(shelf.word, shelf.tree.nodes())))

    assert kept == {Policy.LRU: "cdef", Policy.SLRU: "adef"}


def test_priority_breaks_ties_by_recency():
    shelf = Shelf(Policy.PRIORITY)
    for word in ("a", "b", "c"):
        shelf.put(word, priority=5)
    shelf.get("a")

    assert shelf.drain() == ["b", "c", "a"]


def test_priority_of_a_shared_prefix_is_the_highest_of_what_uses_it():
    shelf = Shelf(Policy.PRIORITY)
    shelf.put("xxa", priority=9)
    shelf.put("xxb", priority=1)
    shelf.put("y", priority=4)

    assert shelf.drain() == ["xxb", "y", "xxa", "xx"]


def test_priority_rises_when_the_same_tokens_come_again_more_urgently():
    shelf = Shelf(Policy.PRIORITY)
    shelf.put("a", priority=1)
    shelf.put("b", priority=2)
    shelf.put("a", priority=3)

    assert shelf.drain() == ["b", "a"]


@pytest.mark.parametrize("policy", list(Policy))
def test_parent_follows_its_last_child(policy: Policy):
    """scenario R3."""
    shelf = Shelf(policy)
    shelf.put("xxaa")
    shelf.put("xxbb")
    shelf.put("xxbbcc")

    drained = shelf.drain()

    assert sorted(drained) == ["xx", "xxaa", "xxbb", "xxbbcc"]
    assert drained.index("xxbbcc") < drained.index("xxbb") < drained.index("xx")
    assert drained.index("xxaa") < drained.index("xx")


def test_fifo_takes_the_old_trunk_right_after_its_last_branch():
    shelf = Shelf(Policy.FIFO)
    shelf.put("xx")
    shelf.put("a")
    shelf.put("xxb")
    shelf.put("c")
    shelf.get("xx")

    assert shelf.drain() == ["a", "xxb", "xx", "c"]


@pytest.mark.parametrize("policy", list(Policy))
def test_upper_half_of_a_split_goes_after_the_lower(policy: Policy):
    shelf = Shelf(policy)
    shelf.put("xxyy")
    shelf.get("xx")

    assert shelf.drain() == ["xxyy", "xx"]


@pytest.mark.parametrize("policy", list(Policy))
def test_locked_nodes_are_passed_over(policy: Policy):
    shelf = Shelf(policy)
    kept = shelf.put("xxa")
    shelf.put("xxb")
    shelf.put("c")
    shelf.tree.lock(kept)

    assert sorted(shelf.drain()) == ["c", "xxb"]
    assert len(shelf.order) == 2
    shelf.tree.unlock(kept)
    assert shelf.drain() == ["xxa", "xx"]


def test_lru_counts_a_release_as_use():
    shelf = Shelf(Policy.LRU)
    held = shelf.put("a")
    shelf.tree.lock(held)
    shelf.put("b")
    shelf.tree.unlock(held)

    assert shelf.drain() == ["b", "a"]


def test_fifo_does_not_count_a_release_as_use():
    shelf = Shelf(Policy.FIFO)
    held = shelf.put("a")
    shelf.tree.lock(held)
    shelf.put("b")
    shelf.tree.unlock(held)

    assert shelf.drain() == ["a", "b"]


def test_heap_stays_small_when_nodes_are_locked_again_and_again():
    shelf = Shelf(Policy.LFU)
    node = shelf.put("a")
    assert type(shelf.order) is RankedOrder

    for _ in range(1000):
        shelf.tree.lock(node)
        shelf.tree.unlock(node)

    assert len(shelf.order._heap) <= HEAP_SLACK + 4
    assert shelf.drain() == ["a"]


def test_order_asked_for_nothing_has_no_victims():
    assert [eviction_order(policy).take_victims(0) for policy in Policy] == [[]] * len(Policy)


def busy(policy: Policy, seed: int) -> tuple[Shelf, list[RadixNode]]:
    """A shelf after many accesses, some of its nodes locked, many of its keys out of date."""
    rng = random.Random(seed)
    shelf = Shelf(policy)
    locked: list[RadixNode] = []
    for _ in range(120):
        word = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 5)))
        match rng.randrange(6):
            case 0 | 1:
                shelf.put(word, priority=rng.randrange(3))
            case 2 | 3:
                shelf.get(word)
            case 4 if len(locked) < 4:
                locked.append(shelf.tree.match(shelf.tokens(word), NAMESPACE))
                shelf.tree.lock(locked[-1])
            case 5 if locked:
                shelf.tree.unlock(locked.pop(rng.randrange(len(locked))))
            case _:
                shelf.tree.evict(rng.randrange(2))
    return shelf, locked


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(8))
def test_unlocked_nodes_of_a_peek_are_the_next_victims(policy: Policy, seed: int):
    shelf, _ = busy(policy, seed)

    seen = peek(shelf.order, 1000)
    victims = shelf.tree.evict(shelf.tree.evictable_pages).victims

    assert [node for node in seen if node.lock_ref == 0] == victims
    assert len(victims) > 0


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(8))
def test_a_peek_changes_no_later_victim(policy: Policy, seed: int):
    peeked, left_alone = busy(policy, seed)[0], busy(policy, seed)[0]

    for limit in (0, 1, 3, 1000):
        peek(peeked.order, limit)

    assert peeked.drain() == left_alone.drain()


@pytest.mark.parametrize("policy", list(Policy))
def test_a_peek_names_so_many_nodes_and_the_locked_ones_among_them(policy: Policy):
    shelf = Shelf(policy)
    nodes = [shelf.put(word) for word in "abcd"]
    shelf.tree.lock(nodes[1])

    assert peek(shelf.order, 0) == []
    assert peek(shelf.order, 3) == nodes[:3]


def test_a_peek_gives_up_when_the_heap_is_out_of_date_from_end_to_end():
    shelf = Shelf(Policy.PRIORITY)
    words = [chr(0x100 + number) for number in range(PEEK_STALE + 10)]
    for word in words:
        shelf.put(word)
    for word in words[:-1]:
        shelf.tree.match(shelf.tokens(word), NAMESPACE)  # used: its key grew, its entry did not

    assert peek(shelf.order, 5) == []
    assert [shelf.word(node) for node in peek(shelf.order, 20)] == [words[-1], *words[:10]]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("lost", ["a", "ab", "abc"])
def test_a_node_that_the_order_had_lost_goes_after_what_is_below_it(policy, lost):
    shelf = Shelf(policy)
    for word in ("x", "a", "ab", "abc", "abd"):
        shelf.put(word, priority=len(word))
    node = shelf.tree.match(shelf.tokens(lost), NAMESPACE)
    shelf.order.remove(node)

    shelf.order.restore(node)

    assert tree_faults(shelf.tree) == []
    gone = shelf.drain()
    assert sorted(gone) == ["a", "ab", "abc", "abd", "x"]
    assert gone.index("abc") < gone.index("ab") < gone.index("a")


@pytest.mark.parametrize("policy", list(Policy))
def test_a_locked_node_that_the_order_had_lost_is_unlocked_as_every_other(policy):
    shelf = Shelf(policy)
    for word in ("a", "ab", "abc"):
        shelf.put(word)
    node = shelf.tree.match(shelf.tokens("abc"), NAMESPACE)
    shelf.tree.lock(node)
    shelf.order.remove(node.parent)

    shelf.order.restore(node.parent)
    shelf.tree.unlock(node)

    assert shelf.drain() == ["abc", "ab", "a"]
