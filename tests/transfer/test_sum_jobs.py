"""Which sums belong to which post, when threads and reports come in any order."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvd.core.effects import ForgetSums, SumLanded, Verify
from kvd.core.inputs import LandedGood, PostDone, Verified
from kvd.core.layout.seal import Seal
from kvd.core.layout.shards import lanes
from kvd.core.layout.spec import PageOrder
from kvd.transfer.orders import UNSTAMPED, Sum
from kvd.transfer.sums import Summers, Sums, verify_job
from kvd.types import Pages, pack_ids
from kvd.wire.peer import Integrity
from tests.transfer.sharded import PAGES, post, sides

SEAL = Seal(Integrity.FULL, b"k" * 16, 0, len(PAGES))


def sealed():
    """A post that is summed, who sums it, and what is reported of that."""
    here, there = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    (lane,) = lanes(here.shards, there.shards)
    order = msgspec.structs.replace(post(lane.copies[0], lane.peer_shard), seal=SEAL)
    reports = []
    summers = Summers(lambda job: None)
    sums = Sums(here.areas, summers, reports.append)
    return order, summers, sums, reports


def test_a_late_word_of_a_thread_concludes_no_later_post_of_the_same_number():
    order, summers, sums, reports = sealed()
    sums.post(order)
    sums.posting(order.post, 1.0)
    (first,) = summers._turns
    assert summers.step(are_awaited=False) is first
    sums.pass_on(PostDone(UNSTAMPED, order.post, 64, active_s=0.1))
    assert [type(one) for one in reports] == [PostDone]

    sums.post(order)
    sums.done(first)

    assert len(reports) == 1


def test_a_post_is_summed_no_further_than_it_is_posted():
    order, summers, sums, reports = sealed()

    sums.post(order)
    for share, n_pages in ((0.0, 0), (0.3, -(-len(PAGES) * 3 // 10)), (0.3, 0), (0.9, len(PAGES))):
        sums.posting(order.post, share)
        assert len(summers._turns) == bool(n_pages)
        if n_pages:
            (job,) = summers._turns
            summers.step(are_awaited=False)
            assert np.flatnonzero(job.sums).tolist() == list(range(n_pages))
    assert not sums.are_awaited
    assert not reports
    sums.pass_on(PostDone(UNSTAMPED, order.post, 64, active_s=0.1))

    (done,) = reports
    assert done.sums == job.packed()


def test_whoever_orders_a_sum_may_make_it_while_other_threads_sleep():
    here, _ = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    reports = []
    sums = Sums(here.areas, Summers(lambda job: None), reports.append)
    region = next(iter(here.areas))

    sums.sum(Sum(7, region, Pages(pack_ids([3, 1, 2]))))
    while sums.are_awaited:
        sums.step()

    (summed,) = reports
    assert (summed.ticket, len(summed.sums)) == (7, 24)


def summed_here():
    """A side, what is reported of its sums, their summers, and the sums."""
    here, _ = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    reports, summers = [], Summers(lambda job: None)
    sums = Sums(here.areas, summers, reports.append)
    return here, reports, summers, sums


@pytest.mark.parametrize("landed", [(), (0,), (1, 3), (2, len(PAGES)), (len(PAGES),)])
@pytest.mark.parametrize("is_summed", [False, True])
def test_what_has_landed_is_summed_once_before_it_is_asked_about(landed, is_summed):
    here, reports, summers, sums = summed_here()
    pages = Pages(pack_ids(PAGES))
    wanted = verify_job(SumLanded(7, "kv", SEAL, pages, 0), here.areas)
    wanted.sum_slice(0, len(PAGES))
    summed = 0

    for n_pages in landed:
        sums.landed(SumLanded(7, "kv", SEAL, pages, n_pages))
        while is_summed and summers._turns:
            (job,) = summers._turns
            done = summers.step(are_awaited=False)
            assert (job.begun, len(PAGES) - job.left) == (n_pages, n_pages)
            summed = n_pages
            if done is not None:
                sums.done(done)
    # Were they summed again, they would be found to be others.
    here.areas["kv"].pieces()[0][PAGES[:summed]] = 0
    assert not reports
    sums.verify(Verify(7, "kv", SEAL, pages, wanted.packed()))
    while sums.are_awaited:
        sums.step()

    assert reports == [Verified(UNSTAMPED, 7, ())]
    assert not sums._verifies


def test_nobody_hears_of_what_was_summed_for_a_question_that_never_comes():
    _, reports, summers, sums = summed_here()
    pages = Pages(pack_ids(PAGES))

    sums.landed(SumLanded(7, "kv", SEAL, pages, 3))
    sums.forget(ForgetSums(7))
    sums.forget(ForgetSums(8))
    sums.landed(SumLanded(9, "nowhere", SEAL, pages, 3))
    while summers._turns:
        summers.step(are_awaited=False)

    assert not reports
    assert not sums._verifies


@pytest.mark.parametrize("is_good", [True, False])
@pytest.mark.parametrize("is_summed_before", [True, False])
def test_sums_that_are_said_ahead_are_compared_once_these_pages_are_summed(
    is_good, is_summed_before
):
    here, reports, summers, sums = summed_here()
    pages = Pages(pack_ids(PAGES))
    wanted = verify_job(SumLanded(7, "kv", SEAL, pages, 0), here.areas)
    wanted.sum_slice(0, len(PAGES))
    said = wanted.packed()[: 3 * 8] if is_good else bytes(3 * 8)

    def sum_all():
        while summers._turns:
            done = summers.step(are_awaited=False)
            if done is not None:
                sums.done(done)

    if is_summed_before:
        sums.landed(SumLanded(7, "kv", SEAL, pages, 4))
        sum_all()
    sums.landed(SumLanded(7, "kv", SEAL, pages, 4, summed=3, sums=said))
    assert bool(reports) is (is_summed_before and is_good)
    sum_all()

    assert reports == ([LandedGood(UNSTAMPED, 7, 3)] if is_good else [])
    sums.landed(SumLanded(7, "kv", SEAL, pages, 4, summed=4, sums=wanted.packed()[3 * 8 : 4 * 8]))
    sum_all()
    assert reports == ([LandedGood(UNSTAMPED, 7, n) for n in (3, 4)] if is_good else [])
    sums.verify(Verify(7, "kv", SEAL, pages, wanted.packed()))
    while sums.are_awaited:
        sums.step()
    assert reports[-1] == Verified(UNSTAMPED, 7, ())


def test_pages_of_which_none_is_sampled_are_good_with_those_before_them():
    here, reports, summers, sums = summed_here()
    seal = msgspec.structs.replace(SEAL, integrity=Integrity.SAMPLED)
    pages = Pages(pack_ids(PAGES))
    job = verify_job(SumLanded(7, "kv", seal, pages, 0), here.areas)
    assert job.logical.tolist()[:2] != [seal.first, seal.first + 1]
    job.sum_slice(0, 1)

    sums.landed(SumLanded(7, "kv", seal, pages, 1, summed=1, sums=job.packed()[:8]))
    sums.landed(SumLanded(7, "kv", seal, pages, 2, summed=2))
    while summers._turns:
        sums.done(summers.step(are_awaited=False))
    assert reports == [LandedGood(UNSTAMPED, 7, 2)]
    sums.landed(SumLanded(7, "kv", seal, pages, 2, summed=2))
    assert len(reports) == 1, "nothing more"
