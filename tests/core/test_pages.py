"""The page pool: all or nothing, the null page stays where it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvd.core.cache.pages import OutOfPages, PagePool
from kvd.types import NO_PAGES, PageRun, Pages, pack_ids, page_ids, runs_of
from tests.core.sentences import sentence_of


def pages(*ids: int) -> Pages:
    return Pages(pack_ids(list(ids)))


def test_pool_never_hands_out_the_null_page():
    """scenario R13."""
    pool = PagePool("kv", 8)

    assert sorted(page_ids(pool.take_pages(7))) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.free_pages == 0


def misgiven(pool: PagePool) -> list[str]:
    """Why what was given back was not taken, once told."""
    told = [one.why for one in pool.misgiven]
    pool.misgiven.clear()
    return told


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((0,), "page 0, the null page: this pool hands out 1 to 299"),
        ((298, 299, 0), "page 0, the null page: this pool hands out 1 to 299"),
        ((300,), "page 300: this pool hands out 1 to 299"),
        ((299, 300), "page 300: this pool hands out 1 to 299"),
        ((299, 4_000_000_000), "page 4000000000: this pool hands out 1 to 299"),
        ((7,), "page 7, which is free already"),
        ((299, 7), "page 7, which is free already"),
        ((7, 8, 9), "page 7, which is free already"),
        ((299, 299), "page 299, twice in one call"),
        ((*range(299, 219, -1), 250), "page 250, twice in one call"),
        ((*range(299, 219, -1), 7), "page 7, which is free already"),
        ((*range(299, 219, -1), 400), "page 400: this pool hands out 1 to 299"),
        ((*range(299, 219, -1), 0), "page 0, the null page: this pool hands out 1 to 299"),
        ((*range(299, 40, -1), 60), "page 60, twice in one call"),
    ],
)
def test_give_takes_nothing_of_a_call_that_has_one_wrong_page(given, why):
    """scenario R13. One page, a run, a few, many: each has its own way to be looked at."""
    pool = PagePool("kv", 300)
    pool.take_pages(260)
    before = pool.free_ids()

    pool.return_pages(Pages(np.array(given, "<u4").tobytes()))

    assert (misgiven(pool), pool.free_ids()) == ([why], before)
    pool.return_pages(pages(*range(299, 39, -1)))
    assert (misgiven(pool), pool.free_pages) == ([], 299), "the others are out as before"


@pytest.mark.parametrize("n_pages", [1, 5, 64, 300])
def test_give_refuses_what_was_just_given(n_pages):
    pool = PagePool("kv", 1000)
    taken = pool.take_pages(n_pages)
    pool.return_pages(taken)

    pool.return_pages(taken, "who")

    assert pool.free_pages == 999
    (told,) = pool.misgiven
    assert (told.pages, told.giver) == (taken, "who")


@pytest.mark.parametrize("seed", range(5))
def test_every_wrong_give_is_found_as_it_is_done(seed):
    """Against a set of pages that are out: runs, single pages and whatever churn makes of them."""
    rng, pool = random.Random(seed), PagePool("kv", 600)
    out: list[int] = []
    for _ in range(400):
        if rng.random() < 0.5:
            out += page_ids(
                pool.take_pages(min(pool.free_pages, rng.choice([0, 1, 3, 8, 40, 300])))
            )
            continue
        rng.shuffle(out)
        n_given = rng.choice([0, 1, 3, 9, 60, 280])
        given = sorted(out[:n_given]) if rng.random() < 0.5 else out[:n_given]
        wrong = rng.random() < 0.3
        if wrong:
            given = [*given, rng.choice([0, 600, *given, *page_ids(pool.free_ids())[:5]])]
            rng.shuffle(given)
        is_good = len(set(given)) == len(given) and set(given) <= set(out)
        pool.return_pages(pages(*given))
        assert (misgiven(pool) == []) == is_good, f"seed {seed}"
        if is_good:
            out = [page for page in out if page not in set(given)]
        assert sorted([*out, *page_ids(pool.free_ids())]) == list(range(1, 600)), f"seed {seed}"


def test_a_condemned_page_is_never_taken_again():
    pool = PagePool("kv", 8)
    taken = pool.take_pages(3)
    condemned = Pages(taken[:4] + pool.free_ids()[:4])

    assert (pool.condemn(condemned), pool.condemn(condemned)) == (2, 0)
    pool.return_pages(taken)

    assert (misgiven(pool), pool.free_pages, pool.condemned_pages) == ([], 5, 2)
    assert pool.condemned_ids() == pages(*sorted(page_ids(condemned)))
    assert not set(page_ids(pool.take_pages(5))) & set(page_ids(condemned))


def test_take_takes_nothing_when_one_page_is_missing():
    """scenario R10."""
    pool = PagePool("kv", 8)
    pool.take_pages(4)
    before = pool.free_ids()

    with pytest.raises(OutOfPages) as caught:
        pool.take_pages(4)

    refused = caught.value
    assert (refused.wanted_pages, refused.free_pages, refused.total_pages) == (4, 3, 8)
    assert str(refused) == sentence_of("take takes nothing when one page is missing")
    assert pool.free_ids() == before


def test_take_refuses_a_negative_count():
    with pytest.raises(OutOfPages):
        PagePool("kv", 8).take_pages(-1)


def test_take_of_nothing_gives_no_pages():
    assert PagePool("kv", 8).take_pages(0) == NO_PAGES


def test_take_from_a_fresh_pool_is_one_ascending_run():
    pool = PagePool("kv", 100)

    assert runs_of(pool.take_pages(30)) == [PageRun(70, 30)]
    assert runs_of(pool.take_pages(30)) == [PageRun(40, 30)]


def test_given_pages_are_taken_again_first_and_in_order():
    pool = PagePool("kv", 100)
    first, second = pool.take_pages(5), pool.take_pages(5)

    pool.return_pages(first)

    assert pool.take_pages(5) == first
    assert pool.free_pages == 89
    assert page_ids(second) == [90, 91, 92, 93, 94]


def test_pool_of_the_null_page_alone_is_empty():
    assert PagePool("kv", 1).free_pages == 0


def test_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="0 pages"):
        PagePool("kv", 0)
