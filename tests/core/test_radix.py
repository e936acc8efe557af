"""The radix tree: matching, splitting, locks, duplicates, eviction and flush."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.audit.rules import tree_faults
from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.radix import RadixTree
from kvd.core.cache.radix_node import LockUnderflow, RadixNode
from kvd.core.cache.tree_changes import Extension
from kvd.types import NO_PAGES, NO_TOKENS, Pages, Tokens, pack_ids, page_ids

PAGE = 16


def tree_of(page: int = PAGE) -> RadixTree:
    return RadixTree(page, eviction_order(Policy.LRU))


def text(n_tokens: int, seed: int = 1) -> Tokens:
    """Tokens of one conversation; equal seeds share every prefix."""
    random = np.random.default_rng(seed)
    return Tokens(random.integers(0, 2**31, n_tokens, dtype="<i4").tobytes())


def fork(tokens: Tokens, at_token: int, n_tokens: int, seed: int = 2) -> Tokens:
    """The first ``at_token`` tokens, then others."""
    return Tokens(tokens[: 4 * at_token] + text(n_tokens - at_token, seed))


def pages(first: int, n_pages: int) -> Pages:
    return Pages(pack_ids(list(range(first, first + n_pages))))


def put(tree: RadixTree, tokens: Tokens, first_page: int, namespace: str = "m") -> Extension:
    """Caches the whole pages of ``tokens`` on pages from ``first_page``."""
    n_pages = len(tokens) // 4 // tree.match_page_tokens
    anchor = tree.match(NO_TOKENS, namespace)
    out = tree.extend(anchor, tokens, pages(first_page, n_pages))
    assert tree_faults(tree) == []
    return out


def shape(tree: RadixTree) -> dict[int, list[int]]:
    """Node id to its page ids."""
    return {node.id: page_ids(node.pages) for node in tree.nodes()}


def locks(node: RadixNode) -> list[int]:
    """lock_ref from the node up to the root."""
    out = []
    step: RadixNode | None = node
    while step is not None:
        out.append(step.lock_ref)
        step = step.parent
    return out


def test_insert_stores_whole_pages_and_leaves_the_tail():
    """scenario R1: 40 tokens at page 16 store 32; the 8 tail tokens stay with their owner."""
    tree = tree_of()

    put(tree, text(40), 1)

    assert tree.match(text(40), "m").end_tokens == 32
    assert (tree.cached_pages, tree.evictable_pages, tree.protected_pages) == (2, 2, 0)


def test_match_is_floored_to_a_page_when_text_is_shared_further():
    """scenario A3: 70 common tokens match 64, never 70."""
    tree = tree_of()
    put(tree, text(70), 1)

    assert tree.match(text(200), "m").end_tokens == 64


def test_match_stops_where_the_tokens_diverge():
    """scenario A3: the divergence is inside an edge and inside a page."""
    tree = tree_of()
    stored = put(tree, text(128), 1).node
    query = fork(text(128), 70, 128)

    hit = tree.match(query, "m")

    assert (hit.end_tokens, page_ids(tree.path_pages(hit))) == (64, [1, 2, 3, 4])
    assert (stored.end_tokens, page_ids(stored.pages)) == (128, [5, 6, 7, 8])
    assert stored.parent is hit
    assert tree_faults(tree) == []


@pytest.mark.parametrize("at_page", [1, 2, 63, 64, 65, 511, 999])
def test_match_finds_a_divergence_anywhere_in_a_long_edge(at_page: int):
    tree = tree_of()
    put(tree, text(16_000), 1)
    query = fork(text(16_000), at_page * PAGE + 3, 16_000)

    assert tree.probe(query, "m") == at_page * PAGE
    assert tree.match(query, "m").end_tokens == at_page * PAGE


def test_match_of_a_shorter_query_splits_the_edge():
    tree = tree_of()
    put(tree, text(128), 1)

    hit = tree.match(text(40), "m")

    assert page_ids(hit.pages) == [1, 2]
    assert list(shape(tree).values()) == [[1, 2], [3, 4, 5, 6, 7, 8]]


def test_match_stops_at_the_limit():
    tree = tree_of()
    put(tree, text(128), 1)

    assert tree.match(text(128), "m", 100).end_tokens == 96
    assert tree.match(text(128), "m", 96).end_tokens == 96
    assert tree.match(text(128), "m", 15).end_tokens == 0


def test_match_of_nothing_is_the_root_of_the_namespace():
    tree = tree_of()

    root = tree.match(text(5), "m")

    assert (root.end_tokens, root.parent, tree.path_pages(root)) == (0, None, NO_PAGES)
    assert tree.match(text(64), "m") is root


def test_match_keeps_namespaces_apart():
    """scenario A9: equal tokens under another adapter or salt match nothing."""
    tree = tree_of()
    put(tree, text(64), 1, "m")
    put(tree, text(32), 5, "m+lora")

    found = {name: tree.probe(text(64), name) for name in ("m", "m+lora", "", "M")}

    assert found == {"m": 64, "m+lora": 32, "": 0, "M": 0}
    assert page_ids(tree.path_pages(tree.match(text(64), "m+lora"))) == [5, 6]


def test_probe_changes_nothing_at_all():
    tree = tree_of()
    old = put(tree, text(64, 5), 1).node
    put(tree, text(64, 6), 5)
    before = shape(tree)

    found = [
        tree.probe(text(40, 5), "m"),
        tree.probe(fork(text(64, 5), 50, 90), "m"),
        tree.probe(text(64, 5), "m", 30),
        tree.probe(text(64), "elsewhere"),
    ]

    assert found == [32, 48, 16, 0]
    assert (shape(tree), old.hits, list(tree.roots)) == (before, 0, ["m"])
    assert tree.evict(4).victims == [old]


def test_lock_counts_on_the_whole_path_and_unlock_takes_it_back():
    tree = tree_of()
    put(tree, text(64), 1)
    deep = tree.match(text(64), "m")
    high = tree.match(text(32), "m")

    tree.lock(deep)
    tree.lock(deep)
    tree.lock(high)

    assert (deep.lock_ref, high.lock_ref) == (2, 3)
    assert (tree.evictable_pages, tree.protected_pages) == (0, 4)
    tree.unlock(deep)
    tree.unlock(deep)
    assert (deep.lock_ref, high.lock_ref) == (0, 1)
    assert (tree.evictable_pages, tree.protected_pages) == (2, 2)
    assert tree_faults(tree) == []


def test_unlock_below_zero_is_refused_and_changes_nothing():
    """scenario R5."""
    tree = tree_of()
    node = put(tree, text(64), 1).node
    tree.lock(node)
    tree.unlock(node)
    root = node.parent
    assert root is not None

    with pytest.raises(LockUnderflow, match=r"node 2 \('m', ends at token 64, 4 pages"):
        tree.unlock(node)
    with pytest.raises(LockUnderflow):
        tree.unlock(root)

    assert locks(node) == [0, 1]
    assert tree_faults(tree) == []


def test_relock_changes_only_the_nodes_between():
    tree = tree_of()
    put(tree, text(96), 1)
    top = tree.match(text(32), "m")
    middle = tree.match(text(64), "m")
    bottom = tree.match(text(96), "m")
    tree.lock(top)

    tree.relock(top, bottom)

    assert locks(bottom) == [1, 1, 1, 2]
    tree.relock(bottom, bottom)
    assert locks(bottom) == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="a lock only moves down"):
        tree.relock(bottom, middle)
    assert locks(bottom) == [1, 1, 1, 2]
    assert tree_faults(tree) == []


def test_split_under_a_lock_keeps_the_holders_node():
    tree = tree_of()
    held = put(tree, text(128), 1).node
    tree.lock(held)

    upper = tree.match(text(48), "m")

    assert (held.end_tokens, upper.end_tokens) == (128, 48)
    assert (held.lock_ref, upper.lock_ref) == (1, 1)
    assert tree.evict(100).victims == []
    tree.unlock(held)
    assert (tree.evictable_pages, tree_faults(tree)) == (8, [])


def test_extend_continues_from_the_locked_node():
    """scenario A21: 64 of 100 were cached; the commit adopts pages of [64, 96)."""
    tree = tree_of()
    put(tree, text(64), 1)
    prompt = text(100)
    anchor = tree.match(prompt, "m")
    tree.lock(anchor)

    grown = tree.extend(anchor, prompt, pages(50, 2), start_tokens=64)
    tree.relock(anchor, grown.node)

    assert grown == Extension(grown.node, NO_PAGES, pages(50, 2), pages(50, 2))
    assert page_ids(tree.path_pages(grown.node)) == [1, 2, 3, 4, 50, 51]
    assert (grown.node.end_tokens, locks(grown.node)) == (96, [1, 1, 2])
    tree.unlock(grown.node)
    assert tree_faults(tree) == []


def test_extend_accepts_the_continuation_alone():
    tree = tree_of()
    anchor = put(tree, text(64), 1).node

    grown = tree.extend(anchor, Tokens(text(100)[4 * 64 :]), pages(50, 2))

    assert tree.path_tokens(grown.node) == text(100)[: 4 * 96]


def test_extend_returns_duplicates_when_another_was_first():
    """scenario A22: two handoffs of one prompt; the second's pages lose, its row is rewritten."""
    tree = tree_of()
    root = tree.match(text(100), "m")
    tree.lock(root)
    tree.lock(root)
    first = tree.extend(root, text(100), pages(1, 6))
    tree.relock(root, first.node)

    second = tree.extend(root, text(100), pages(20, 6))
    tree.relock(root, second.node)

    assert second == Extension(first.node, pages(20, 6), pages(1, 6), NO_PAGES)
    assert (tree.cached_pages, locks(first.node)) == (6, [2, 3])


def test_extend_takes_only_what_lies_behind_a_divergence():
    tree = tree_of()
    put(tree, text(128), 1)
    root = tree.match(NO_TOKENS, "m")

    grown = tree.extend(root, fork(text(128), 70, 160), pages(20, 10))

    assert grown.duplicates == pages(20, 4)
    assert page_ids(grown.tree_pages) == [1, 2, 3, 4, 24, 25, 26, 27, 28, 29]
    assert tree.path_pages(grown.node) == grown.tree_pages
    assert sorted(shape(tree).values()) == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [24, 25, 26, 27, 28, 29],
    ]
    assert tree_faults(tree) == []


def test_extend_does_not_call_the_trees_own_pages_duplicates():
    tree = tree_of()
    put(tree, text(64), 1)
    root = tree.match(NO_TOKENS, "m")
    mine = Pages(pages(1, 3) + pages(30, 3))

    grown = tree.extend(root, text(96), mine)

    assert grown.duplicates == pages(30, 1)
    assert page_ids(grown.tree_pages) == [1, 2, 3, 4, 31, 32]
    assert tree_faults(tree) == []


def test_extend_by_nothing_stays_at_the_anchor():
    tree = tree_of()
    anchor = put(tree, text(64), 1).node

    grown = tree.extend(anchor, text(70), NO_PAGES, start_tokens=64)

    assert grown == Extension(anchor, NO_PAGES, NO_PAGES, NO_PAGES)


def test_extend_refuses_more_pages_than_tokens():
    tree = tree_of()
    root = tree.match(NO_TOKENS, "m")

    with pytest.raises(ValueError, match="from token 0 on need 48 tokens, 40 came"):
        tree.extend(root, text(40), pages(1, 3))

    assert tree.cached_pages == 0


def test_extend_keeps_a_new_buffer_without_a_copy():
    tree = tree_of()
    tokens, row = text(64), pages(1, 4)

    node = tree.extend(tree.match(NO_TOKENS, "m"), tokens, row).node

    assert node.edge is tokens
    assert node.pages is row


def test_evict_takes_the_unlocked_sibling_and_no_parent_before_its_child():
    """scenario R3."""
    tree = tree_of()
    locked = put(tree, text(128), 1).node
    sibling = put(tree, fork(text(128), 64, 96), 20).node
    tree.lock(locked)

    evicted = tree.evict(100)

    assert evicted.victims == [sibling]
    assert page_ids(evicted.pages) == [24, 25]
    assert (tree.evictable_pages, tree.protected_pages) == (0, 8)
    tree.unlock(locked)
    parent = locked.parent
    assert parent is not None
    assert tree.evict(8).victims == [locked, parent]
    assert tree_faults(tree) == []


def test_evict_takes_whole_leaves_and_stops_when_enough():
    tree = tree_of()
    for seed in range(4):
        put(tree, text(48, seed), 1 + 3 * seed)

    evicted = tree.evict(4)

    assert page_ids(evicted.pages) == [1, 2, 3, 4, 5, 6]
    assert tree.evictable_pages == 6
    assert tree.evict(0).pages == NO_PAGES


def test_evict_spares_what_was_matched_lately_and_both_halves_of_a_split():
    tree = tree_of()
    split = put(tree, text(64, 1), 1).node
    old = put(tree, text(64, 2), 5).node
    tree.match(text(32, 1), "m")

    evicted = tree.evict(100)

    assert [page_ids(evicted.pages)] == [[5, 6, 7, 8, 3, 4, 1, 2]]
    assert evicted.victims[:2] == [old, split]


def test_flush_drops_what_is_unlocked_and_counts_the_rest():
    """scenario A40: the tree's share; its caller names the holders."""
    tree = tree_of()
    locked = put(tree, text(64), 1).node
    put(tree, text(128), 10)
    put(tree, text(64, 9), 20, "other")
    tree.lock(locked)

    flushed = tree.flush()

    assert sorted(page_ids(flushed.pages)) == [14, 15, 16, 17, 20, 21, 22, 23]
    assert (flushed.kept_pages, tree.evictable_pages, tree.protected_pages) == (4, 0, 4)
    assert list(tree.roots) == ["m"]
    assert tree_faults(tree) == []


def test_flush_of_one_namespace_leaves_the_others():
    tree = tree_of()
    put(tree, text(128), 1, "a")
    tree.match(text(64), "a")
    put(tree, text(64), 20, "b")

    flushed = tree.flush({"a"})

    assert (sorted(page_ids(flushed.pages)), flushed.kept_pages) == ([1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert (tree.probe(text(64), "a"), tree.probe(text(64), "b")) == (0, 64)
    assert tree_faults(tree) == []


def test_empty_namespaces_are_swept():
    tree = tree_of()
    held = tree.match(text(5), "held")
    tree.lock(held)
    for number in range(1000):
        tree.match(text(64), f"salt-{number}")

    assert len(list(tree.roots)) < 200
    assert tree.match(NO_TOKENS, "held") is held


def test_hits_count_the_locks_ever_taken_across_a_node():
    tree = tree_of()
    deep = put(tree, text(64), 1).node
    high = tree.match(text(32), "m")
    for node in (deep, high, deep):
        tree.lock(node)
        tree.unlock(node)
    tree.hold(text(32), "m")
    tree.relock(high, deep)

    assert (high.hits, deep.hits) == (4, 3)


def test_hold_is_match_and_lock_in_one():
    tree = tree_of()
    put(tree, text(128), 1)

    held = tree.hold(text(200), "m", 100)

    assert (held.end_tokens, locks(held)) == (96, [1, 2])
    assert (tree.evictable_pages, tree.protected_pages, tree_faults(tree)) == (2, 6, [])


def test_nodes_carry_the_time_of_the_input_that_last_ended_at_them():
    tree = tree_of()
    tree.at = 5.0
    node = put(tree, text(64), 1).node
    made_at = node.touched_at
    tree.at = 9.0
    tree.match(text(64), "m")
    tree.at = 12.0
    upper = tree.match(text(32), "m")

    assert (made_at, node.touched_at, upper.touched_at) == (5.0, 9.0, 12.0)


def test_check_names_each_violation():
    tree = tree_of()
    put(tree, text(64), 1)
    put(tree, text(64, 2), 10)
    first, second = tree.nodes()
    first.pages = Pages(second.pages[:-4])
    second.lock_ref = -1
    tree.evictable_bytes += 4

    words = "\n".join(fault.sentence for fault in tree_faults(tree))

    assert "I4: page 1 is in the tree more than once" in words
    assert "64 tokens on its pages" in words
    assert "has less than no lock" in words
    assert "I3: 9 evictable and 0 protected pages are counted" in words


def test_tree_without_a_page_size_is_refused():
    with pytest.raises(ValueError, match="match_page_tokens is 0"):
        tree_of(0)
