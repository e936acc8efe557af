"""The short form of the campaign, the restarts, the deaths; ``make soak`` is the long one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.fault import deaths, kept
from tests.fault.campaign import Campaign, one_round
from tests.fault.cluster import cluster
from tests.fault.faults import plan_short
from tests.fault.restarts import restart_often
from tests.support.daemons import Pair

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_261
FAULTS = 7
DEATHS = 6


@pytest.mark.slow
async def test_faults_restarts_and_deaths_lose_nothing_and_leave_nothing_stuck(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, SEED, nodes="pdh") as made:
        source = random.Random(SEED)
        campaign = Campaign(made, SEED)
        await campaign.calm(0.3)
        faults = plan_short(source, campaign.kinds, FAULTS)
        await one_round(campaign, faults)
        calls = source.sample(deaths.cases(), DEATHS)
        restarted = [await restart_often(made, side, 1) for side in "dp"]
        await made.load.stop()
        pair = Pair(made.servers["p"].daemon, made.servers["d"].daemon)
        died = await deaths.run(pair, calls, SEED)

    assert len(campaign.outcome.recovered) == FAULTS
    assert campaign.outcome.conclusions["delivered"] > 0
    assert campaign.outcome.pages_checked > 0
    assert [len(one.back_s) for one in restarted] == [1, 1]
    assert [(one.verb, one.moment) for one in died] == calls
    assert max(one.released_s for one in died) < deaths.LIMIT_S


@pytest.mark.slow
async def test_kills_of_daemons_whose_pools_outlive_them_make_no_page_wrong_and_leak_none(
    tmp_path: Path,
) -> None:
    found = await kept.run(tmp_path, SEED, 3, sides="d", rest_every=3)

    (one,) = found
    assert isinstance(one, kept.Kept)
    assert len(one.pages) == 3
    assert min(one.pages) > 0
    assert one.former > 0
    assert one.compared > 0
    assert (one.damaged, one.gone) == (2, 1)
