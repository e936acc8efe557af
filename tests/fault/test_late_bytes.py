"""The short form of the late bytes' campaign; ``make soak`` has a longer one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvd.zmtp.connection import UNHEARD_S
from tests.fault.late_bytes import plan
from tests.fault.late_trial import Found, Trial
from tests.fault.late_world import FAULTS, Attempt, Where, sent_since, world
from tests.fault.shuttle import Command, Flow, Order
from tests.fault.slow_link import FAST
from tests.support.netns import NoNamespaces

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_261
SLOW = 2e6


def _attempt(number: int, fault: str) -> Attempt:
    """Control overtakes megabytes that wait, most of them in the wire."""
    return Attempt(
        number=number,
        fault=fault,
        rate=SLOW,
        order=Order.AHEAD,
        delay_s=0.0,
        share=0.1,
        after_s=0.3,
        pause_s=0.1,
        heals=False,
        where=Where(9000, "wide"),
    )


def test_what_a_handoff_has_sent_counts_no_connection_that_ends_meanwhile():
    before = {"0 7 1": Flow(5_000), "0 7 2": Flow(300), "1 7 1": Flow(9)}
    now = {
        "0 7 1": Flow(5_000, is_over=True),
        "0 7 2": Flow(200),
        "0 7 3": Flow(1_000),
        "1 7 1": Flow(99),
    }

    assert sent_since(before, now) == 1_200


@pytest.mark.slow
async def test_no_byte_of_a_writer_that_was_killed_lands_in_pages_of_another_lease(
    tmp_path: Path,
) -> None:
    """Eight megabytes at 2 MB/s: their sender is dead for a second before the last has come."""
    found: list[Found] = []
    try:
        async with world(tmp_path, Where(9000, "wide"), SEED) as made:
            for number, fault in enumerate(
                ("transfer process killed", "aborted, then killed", "daemon killed and restarted")
            ):
                found.append(await Trial(made, _attempt(number + 1, fault)).run())
    except NoNamespaces as why:
        pytest.skip(f"a slow link needs two network namespaces: {why}")

    assert [one for one in found if not one.is_good] == []
    assert all(one.late_bytes > 0 for one in found if not one.is_delivered)
    assert not all(one.is_delivered for one in found)


@pytest.mark.slow
async def test_a_node_that_restarts_behind_a_cut_is_met_again_over_a_slow_network(
    tmp_path: Path,
) -> None:
    """A second for each round trip, and a handshake takes several: until it is over nobody says
    that the writer is gone, and its pages are away."""
    fault = "killed behind a cut"
    attempt = _attempt(1, fault)._replace(
        rate=10e6, order=Order.DELAYED, delay_s=0.5, after_s=0.0, pause_s=0.06, heals=True
    )
    try:
        async with world(tmp_path, attempt.where, SEED) as made:
            found = await Trial(made, attempt).run()
    except NoNamespaces as why:
        pytest.skip(f"a slow link needs two network namespaces: {why}")

    assert found.is_good, str(found)
    assert found.late_bytes > 0


CUT_S = 1.4 * UNHEARD_S
AT_ONCE_S = 3.0


@pytest.mark.slow
async def test_a_link_is_there_again_soon_after_a_cut_and_not_as_long_after_as_that_was(
    tmp_path: Path,
) -> None:
    """Its kernel would try the old connections again when as much time has passed once more."""
    try:
        async with world(tmp_path, Where(9000, "wide"), SEED) as made:
            await made.linked()
            made.link.carry(Command(FAST, is_cut=True))
            await asyncio.sleep(CUT_S)
            made.link.carry(Command(FAST))
            healed_s = time.monotonic()
            await made.linked()
            away_s = time.monotonic() - healed_s
    except NoNamespaces as why:
        pytest.skip(f"a slow link needs two network namespaces: {why}")

    assert away_s < AT_ONCE_S


def test_a_plan_is_the_same_for_the_same_seed_and_has_every_fault() -> None:
    planned = plan(SEED, 200)

    assert planned == plan(SEED, 200)
    assert planned != plan(SEED + 1, 200)
    assert {one.fault for one in planned} == FAULTS.keys()
    assert len({one.number for one in planned}) == 200
    assert {one.order for one in planned} == set(Order)
