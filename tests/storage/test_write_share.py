"""The threads that write rest beside handoffs, and only where a thread waits for its core."""

from __future__ import annotations

import threading
import time

import pytest

from kvd.core.effects import PaceWrites
from kvd.core.inputs import Demoted
from kvd.storage.lane import WriteShare
from tests.storage.site import LIMIT_S, key


class Cores:
    """In place of what the kernel counts, which a test cannot choose."""

    def __init__(self, *, is_scarce: bool) -> None:
        self._is_scarce = is_scarce

    def is_scarce(self) -> bool:
        return self._is_scarce


SCARCE, SPARE = Cores(is_scarce=True), Cores(is_scarce=False)


def rested_s(share: WriteShare, cores: Cores, worked_s: float) -> float:
    began_s = time.monotonic()
    share.rest(began_s - worked_s, cores)
    return time.monotonic() - began_s


def test_it_rests_as_long_as_leaves_it_its_share():
    share = WriteShare()
    share.set(0.25)
    assert rested_s(share, SCARCE, worked_s=0.05) >= 0.15


@pytest.mark.parametrize(("part", "cores"), [(1.0, SCARCE), (0.001, SPARE)])
def test_it_does_not_rest_without_need(part, cores):
    share = WriteShare()
    share.set(part)
    assert rested_s(share, cores, worked_s=1.0) < 1.0


def test_who_rests_goes_on_when_all_of_the_time_is_given_again():
    share = WriteShare()
    share.set(0.001)
    resting = threading.Thread(target=share.rest, args=(time.monotonic() - 100.0, SCARCE))
    resting.start()
    # Another share ends no rest: it was meted out by the one before.
    share.set(0.5)
    resting.join(0.1)
    assert resting.is_alive()

    share.set(1.0)
    resting.join(LIMIT_S)

    assert not resting.is_alive()


async def test_an_order_that_makes_way_is_answered_once_and_whole(make):
    """So small a share that it would take a minute, if it were not given all of it."""
    site = make()
    await site.start()
    site.process.order(PaceWrites(site.tier, 0.01))
    ticket = site.order_demote([key(number) for number in range(30)], [*range(1, 31)])
    promoted = await site.promote([key(1000)], [1])
    assert promoted.bad == (0,), "it is not there, and that is said at once"

    site.process.order(PaceWrites(site.tier, 1.0))
    (demoted,) = await site.until(lambda: site.heard(Demoted, ticket=ticket))

    assert demoted.written == tuple(range(30))
    assert len(site.files()) == 30
