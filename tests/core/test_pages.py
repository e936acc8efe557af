"""The page pool: all or nothing, the null page stays where it is."""

from __future__ import annotations

import pytest

from kvd.core.pages import BadPages, OutOfPages, PagePool
from kvd.types import NO_PAGES, PageRun, Pages, pack_ids, page_ids, runs_of


def pages(*ids: int) -> Pages:
    return Pages(pack_ids(list(ids)))


def test_pool_never_hands_out_the_null_page():
    """scenario R13."""
    pool = PagePool("kv", 8)

    assert sorted(page_ids(pool.take(7))) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.free_pages == 0


def test_give_refuses_the_null_page():
    """scenario R13."""
    pool = PagePool("kv", 8)
    taken = pool.take(3)

    with pytest.raises(BadPages, match="null page"):
        pool.give(Pages(taken + pack_ids([0])))

    assert pool.free_pages == 4


def test_take_takes_nothing_when_one_page_is_missing():
    """scenario R10."""
    pool = PagePool("kv", 8)
    pool.take(4)
    before = pool.free_ids()

    with pytest.raises(OutOfPages) as caught:
        pool.take(4)

    refused = caught.value
    assert (refused.wanted_pages, refused.free_pages, refused.total_pages) == (4, 3, 8)
    assert str(refused) == (
        "pool kv: 4 pages wanted, 3 free of 8: nothing was taken; evict or refuse before taking"
    )
    assert pool.free_ids() == before


def test_take_refuses_a_negative_count():
    with pytest.raises(OutOfPages):
        PagePool("kv", 8).take(-1)


def test_take_of_nothing_gives_no_pages():
    assert PagePool("kv", 8).take(0) == NO_PAGES


def test_take_from_a_fresh_pool_is_one_ascending_run():
    pool = PagePool("kv", 100)

    assert runs_of(pool.take(30)) == [PageRun(70, 30)]
    assert runs_of(pool.take(30)) == [PageRun(40, 30)]


def test_given_pages_are_taken_again_first_and_in_order():
    pool = PagePool("kv", 100)
    first, second = pool.take(5), pool.take(5)

    pool.give(first)

    assert pool.take(5) == first
    assert pool.free_pages == 89
    assert page_ids(second) == [90, 91, 92, 93, 94]


def test_give_refuses_more_pages_than_the_pool_has():
    pool = PagePool("kv", 8)

    with pytest.raises(BadPages, match="1 pages given back, 7 were free already of 8"):
        pool.give(pages(3))

    assert pool.free_pages == 7


def test_pool_of_the_null_page_alone_is_empty():
    assert PagePool("kv", 1).free_pages == 0


def test_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="0 pages"):
        PagePool("kv", 0)
