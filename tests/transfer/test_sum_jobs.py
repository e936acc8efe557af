"""Which sums belong to which post, when threads and reports come in any order."""

from __future__ import annotations

import msgspec

from kvd.core.inputs import PostDone
from kvd.core.layout.seal import Seal
from kvd.core.layout.shards import lanes
from kvd.core.layout.spec import PageOrder
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.sums import Summers, Sums
from kvd.wire.peer import Integrity
from tests.transfer.sharded import PAGES, post, sides

SEAL = Seal(Integrity.FULL, b"k" * 16, 0, len(PAGES))


def test_a_late_word_of_a_thread_concludes_no_later_post_of_the_same_number():
    here, there = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    (lane,) = lanes(here.shards, there.shards)
    order = msgspec.structs.replace(post(lane.copies[0], lane.peer_shard), seal=SEAL)
    reports = []
    summers = Summers(lambda job: None)
    sums = Sums(here.areas, summers, reports.append)
    sums.post(order)
    (first,) = summers._turns
    first.sum_slice(0, first.ids.size)
    first.left = 0
    sums.pass_on(PostDone(UNSTAMPED, order.post, 64, active_s=0.1))
    assert [type(one) for one in reports] == [PostDone]

    sums.post(order)
    sums.done(first)

    assert len(reports) == 1
