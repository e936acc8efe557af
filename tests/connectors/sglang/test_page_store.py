"""Pages by their chain, through real daemons, from host memory as SGLang has it."""

from __future__ import annotations

import pytest

from kvd.client import KvdError
from kvd.connectors.sglang.chains import PageChain
from kvd.connectors.sglang.host_pages import HostPages, UnfitHostPool
from kvd.connectors.sglang.options import StorageOptions
from kvd.connectors.sglang.storage_link import StorageLink
from tests.connectors.sglang.world import (
    PAGE_SIZE,
    PlayedHostPool,
    daemon_for,
    names_of,
    nothing_is_held,
    stored,
)

PAGE_BYTES = HostPages("kv", PlayedHostPool()).page_bytes


@pytest.fixture(scope="module")
def daemon():
    with daemon_for(PAGE_BYTES) as found:
        yield found


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_as_they_were(daemon, layout) -> None:
    names = names_of(20, layout)
    with stored(daemon, layout, namespace=layout) as rank:
        assert rank.found(names) == 0
        assert rank.save(names)
        assert rank.found([*names, *names_of(3, "else")]) == 20
        assert rank.load(names) == 20
        assert rank.load(names[:7]) == 7
    with stored(daemon, layout, namespace=layout) as another_engine:
        assert another_engine.load(names) == 20
    nothing_is_held(daemon)


def test_only_pages_that_are_new_are_copied(daemon) -> None:
    names = names_of(8, "twice")
    with stored(daemon) as rank:
        assert rank.save(names[:5])
        assert rank.save(names)
        assert rank.store.counts["saved"] == 8
        assert rank.store.counts["there"] == 5


def test_pages_behind_others_are_found_with_the_names_of_those(daemon) -> None:
    names = names_of(9, "behind")
    with stored(daemon) as rank:
        assert rank.save(names[:4])
        assert rank.save(names[4:], before=names[:4])
        assert rank.found(names[6:], before=names[:6]) == 3
        assert rank.load(names[6:], before=names[:6]) == 3
        assert rank.load(names) == 9


def test_pages_whose_start_is_nowhere_are_kept_and_found(daemon) -> None:
    """As when the daemon has lost what SGLang has itself, and does not write again."""
    names = names_of(12, "hole")
    with stored(daemon) as rank:
        assert rank.save(names[4:8], before=names[:4])
        assert rank.save(names[8:], before=names[:8])
        assert rank.found(names) == 0
        assert rank.load(names[4:], before=names[:4]) == 8
        # Once the start is there too all of it is one, in two strands.
        assert rank.save(names[:4])
        assert rank.found(names) == 12
        assert rank.load(names) == 12


def test_no_page_is_found_in_another_namespace(daemon) -> None:
    names = names_of(4, "apart")
    with stored(daemon, namespace="m:bf16:1") as rank, stored(daemon, namespace="m:bf16:2") as two:
        assert rank.save(names)
        assert two.found(names) == 0
        assert two.load(names) == 0


def test_nothing_of_before_is_found_once_it_is_cleared(daemon) -> None:
    names = names_of(4, "cleared")
    with stored(daemon, namespace="cleared") as rank:
        assert rank.save(names)
        rank.store.clear()
        assert rank.found(names) == 0
        assert rank.save(names)
        assert rank.load(names) == 4


def test_a_smaller_page_leaves_the_rest_of_kvds_page_alone(daemon) -> None:
    names = names_of(4, "small")
    with stored(daemon, namespace="small", layers=1) as rank:
        assert rank.store.pages.page_bytes * 3 == PAGE_BYTES
        assert rank.save(names)
        assert rank.load(names) == 4


def test_a_larger_page_is_refused_with_the_pool_that_fits(daemon) -> None:
    pages = HostPages("kv", PlayedHostPool(layers=4))
    link = StorageLink("rank-0", StorageOptions(socket=daemon.client))
    with pytest.raises(KvdError, match=f"page_bytes = {pages.page_bytes}") as refused:
        link.open(pages)
    assert refused.value.code == "layout-mismatch"
    link.close()


def test_a_pool_that_is_full_of_locked_pages_stores_nothing_and_serves() -> None:
    names, others = names_of(6, "kept"), names_of(30, "more")
    with daemon_for(PAGE_BYTES, pages=21) as daemon, stored(daemon) as rank:
        assert rank.save(names)
        assert not rank.save(others)
        assert rank.load(names) == 6
        assert rank.save(others[:8])
        nothing_is_held(daemon)


def test_pages_that_are_not_whole_are_refused() -> None:
    import numpy as np

    pages = HostPages("kv", PlayedHostPool())
    assert pages.blocks_of(np.arange(PAGE_SIZE * 2, PAGE_SIZE * 4)) == [2, 3]
    with pytest.raises(ValueError, match="whole pages"):
        pages.blocks_of(np.arange(8, 8 + PAGE_SIZE))


def test_pages_at_uneven_distances_are_refused() -> None:
    class Uneven(PlayedHostPool):
        def get_page_buffer_meta(self, indices):
            addresses, sizes = super().get_page_buffer_meta(indices)
            return [address + int(indices[0]) ** 2 for address in addresses], sizes

    with pytest.raises(UnfitHostPool, match="even distances"):
        HostPages("kv", Uneven())


def test_a_chain_says_where_it_begins() -> None:
    chain = PageChain(["ab" * 32, "no hash"], ["cd" * 32])
    assert chain.first == 1
    assert chain.end == 3
    assert {len(key) for key in chain.keys} == {32}
    assert len(set(chain.keys)) == 3
