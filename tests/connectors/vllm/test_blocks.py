"""VLLM's blocks, as its scheduler counts who needs them: held by orders, also over a reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvd.connectors.vllm.layout import LayerGroup
from kvd.connectors.vllm.under_way import SchedulerBlocks

GROUPS = (LayerGroup(("layer",), 8),)


class Pool:
    """As vLLM's ``BlockPool``: what nobody needs is free, and is given away from the front."""

    def __init__(self, n=8):
        self.blocks = [SimpleNamespace(number=one, ref_cnt=0, block_hash=one) for one in range(n)]
        self.free = list(self.blocks)

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered):
        for block in ordered:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)

    def evict_blocks(self, numbers):
        for number in numbers:
            self.blocks[number].block_hash = None


class Manager:
    """As vLLM's ``KVCacheManager``."""

    def __init__(self, pool):
        self.block_pool = pool

        self.rows = {}

    def get_block_ids(self, request_id):
        return (self.rows.get(request_id) or [int(request_id)],)

    def give(self, request_id, row):
        self.rows[request_id] = row
        self.block_pool.touch([self.block_pool.blocks[one] for one in row])
        return SimpleNamespace(request_id=request_id, num_computed_tokens=16)

    def free(self, request):
        row = self.rows.pop(request.request_id)
        self.block_pool.free_blocks([self.block_pool.blocks[one] for one in reversed(row)])

    def reset_prefix_cache(self):
        """It resets nothing while anybody needs a block."""
        pool = self.block_pool
        if len(pool.free) < len(pool.blocks):
            return False
        for block in pool.blocks:
            block.block_hash = None
        return True


@pytest.fixture
def manager():
    return Manager(Pool())


@pytest.fixture
def blocks(manager):
    blocks = SchedulerBlocks(GROUPS)
    blocks.bind(manager)
    assert blocks.can_be_held
    return blocks


def free(manager):
    return [block.number for block in manager.block_pool.free]


def test_what_an_order_names_is_not_given_away(manager, blocks):
    manager.block_pool.touch(manager.block_pool.blocks[2:4])  # a request has them
    blocks.hold([2, 3])
    blocks.hold([3, 5])
    manager.block_pool.free_blocks(reversed(manager.block_pool.blocks[2:4]))  # and is over
    assert free(manager) == [0, 1, 4, 6, 7]
    blocks.free([2, 3])
    assert free(manager) == [0, 1, 4, 6, 7, 2]
    blocks.free([3, 5])
    # The tail first: prefixes are found as long as they can be.
    assert free(manager) == [0, 1, 4, 6, 7, 2, 5, 3]
    assert blocks.of("4") == ([4],)


def test_the_cache_is_reset_beside_copies_and_they_keep_their_blocks(manager, blocks):
    blocks.hold([2, 3])
    blocks.hold([3])
    assert manager.reset_prefix_cache()
    assert all(block.block_hash is None for block in manager.block_pool.blocks)
    assert free(manager) == [0, 1, 4, 5, 6, 7]
    assert manager.block_pool.blocks[3].ref_cnt == 2
    blocks.free([3])
    blocks.free([2, 3])
    assert len(free(manager)) == 8


def test_a_request_that_runs_is_in_the_way_of_a_reset_as_ever(manager, blocks):
    manager.block_pool.touch(manager.block_pool.blocks[1:2])
    blocks.hold([1, 2])
    assert not manager.reset_prefix_cache()
    assert [block.ref_cnt for block in manager.block_pool.blocks[:4]] == [0, 2, 1, 0]


@pytest.fixture
def told(blocks):
    told = []
    blocks.on_reset = told.append
    return told


def test_a_request_whose_blocks_are_being_filled_is_in_no_resets_way_and_computes(
    manager, blocks, told
):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.hold([3])  # by the order that fills it

    assert manager.reset_prefix_cache()

    assert told == [["7"]], "it loads KV of before"
    # What moves goes on moving to its blocks, and they are nobody else's.
    assert free(manager) == [0, 1, 4, 5, 6, 7]
    assert [manager.block_pool.blocks[one].ref_cnt for one in (2, 3)] == [1, 2]
    assert request.num_computed_tokens == 16


@pytest.mark.parametrize("is_first_over", [True, False])
def test_one_that_is_over_while_its_blocks_are_filled_is_in_no_resets_way_either(
    manager, blocks, told, is_first_over
):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    if is_first_over:
        blocks.settled("7", is_over=True)
        assert manager.reset_prefix_cache()
        assert free(manager) == [0, 1, 4, 5, 6, 7]
    blocks.filled("7")
    if not is_first_over:
        blocks.settled("7", is_over=True)
    manager.free(request)  # as vLLM does once it has heard
    assert manager.reset_prefix_cache()
    assert len(free(manager)) == 8
    assert request.num_computed_tokens == 16, "nobody goes on with it"
    assert told[-1] == []


def test_one_whose_blocks_are_filled_and_whom_vllm_has_not_seen_since_begins_anew(
    manager, blocks, told
):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.filled("7")

    assert manager.reset_prefix_cache()

    assert request.num_computed_tokens == 0
    assert len(free(manager)) == 8
    assert told == [[]]


@pytest.fixture
def cached(manager):
    """Which blocks prompts find."""
    return lambda: [block.number for block in manager.block_pool.blocks if block.block_hash]


def test_what_is_loaded_and_not_used_is_taken_back_and_found_by_nobody(manager, blocks, cached):
    """The first one of its blocks is vLLM's own, and stays."""
    request = manager.give("7", [2, 3, 4])
    request.num_computed_tokens = 24
    blocks.fills(request, 16)
    blocks.filled("7")

    assert blocks.take_back("7")

    assert request.num_computed_tokens == 0
    assert len(free(manager)) == 8
    assert cached() == [1, 2, 5, 6, 7]
    assert not blocks.take_back("7")


def test_what_is_being_loaded_is_taken_back_once_it_is(manager, blocks):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)

    assert blocks.take_back("7")

    assert request.num_computed_tokens == 16
    assert free(manager) == [0, 1, 4, 5, 6, 7], "copies go on writing there"
    blocks.filled("7")
    assert request.num_computed_tokens == 0
    assert len(free(manager)) == 8
    manager.give("7", [5])
    blocks.fills(request, 8)
    blocks.filled("7")
    assert free(manager) == [0, 1, 4, 6, 7, 3, 2], "it is loaded anew"


def test_of_one_that_has_run_nothing_is_taken_back(manager, blocks, cached):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.filled("7")
    blocks.settled("7")

    assert not blocks.take_back("7")

    blocks.settled("7", is_over=True)
    assert request.num_computed_tokens == 16
    assert cached() == list(range(1, 8))


@pytest.mark.parametrize("is_stale", [True, False])
def test_one_that_leaves_while_its_blocks_are_filled_leaves_them_to_vllm(manager, blocks, is_stale):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.settled("7", is_over=True)
    if is_stale:
        blocks.take_back("7")
    blocks.filled("7")
    assert request.num_computed_tokens == 16
    manager.free(request)  # as vLLM does once it has heard
    assert len(free(manager)) == 8


def test_what_was_loaded_for_one_that_left_before_its_first_step_is_found_by_nobody(
    manager, blocks, cached
):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.filled("7")
    blocks.settled("7", is_over=True)
    assert cached() == [1, 4, 5, 6, 7]
    assert request.num_computed_tokens == 16
    assert free(manager) == [0, 1, 4, 5, 6, 7], "vLLM frees them itself"


def test_one_that_goes_on_with_its_filled_blocks_is_as_any_that_runs(manager, blocks, told):
    request = manager.give("7", [2, 3])
    blocks.fills(request, 16)
    blocks.filled("7")
    blocks.settled("7")

    assert not manager.reset_prefix_cache()

    assert request.num_computed_tokens == 16
    assert not told


def test_a_reset_that_does_not_come_about_changes_nothing_of_those_that_load(manager, blocks, told):
    manager.give("5", [5])  # it runs
    waiting, filled = manager.give("7", [2, 3]), manager.give("8", [3, 4])
    for request in (waiting, filled):
        blocks.fills(request, 16)
    blocks.filled("8")

    assert not manager.reset_prefix_cache()

    assert not told
    assert [one.num_computed_tokens for one in (waiting, filled)] == [16, 16]
    assert [block.ref_cnt for block in manager.block_pool.blocks] == [0, 0, 1, 2, 1, 1, 0, 0]


def test_a_reset_that_ends_in_an_error_gives_nothing_away(manager):
    def fails():
        raise RuntimeError("no")

    manager.reset_prefix_cache = fails
    blocks = SchedulerBlocks()
    blocks.bind(manager)
    blocks.hold([2])
    with pytest.raises(RuntimeError):
        manager.reset_prefix_cache()
    assert free(manager) == [0, 1, 3, 4, 5, 6, 7]


def test_a_version_that_counts_otherwise_is_seen():
    blocks = SchedulerBlocks()
    manager = Manager(SimpleNamespace(blocks=[]))
    reset = manager.reset_prefix_cache
    blocks.bind(manager)
    assert not blocks.can_be_held
    assert manager.reset_prefix_cache == reset
