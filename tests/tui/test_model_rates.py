"""Counters into figures per second."""

from __future__ import annotations

import msgspec
import pytest

from tests.tui import frames
from tests.tui.frames import TOTALS, changes, lease, table, vitals
from tui.model.rates import MAX_POINTS, NodeRates, RowRates
from tui.model.tables import fold

OPENED = "leases_opened"


def head(at_s, leases, **fields):
    return vitals(at_s, totals=msgspec.structs.replace(TOTALS, leases_opened=leases), **fields)


def now(rates, name, *, over_s=1.0, end_s=None):
    """Growth per second over the last ``over_s``; 0 where that is not known."""
    (grown,), known_s = rates.grown((name,), over_s=over_s, end_s=end_s)
    return grown / known_s if known_s else 0


@pytest.fixture
def rates():
    """Ten leases a second from 100 s to 110 s, then none for five seconds; four frames a second."""
    made = NodeRates()
    for quarter in range(61):
        at_s = 100 + quarter / 4
        made.take(head(at_s, min(100, quarter * 2.5)))
    return made


def test_growth_is_told_per_second_with_the_latest_last(rates):
    assert rates.per_second(OPENED, 8) == [10, 10, 10, 0, 0, 0, 0, 0]


def test_there_are_no_more_steps_than_are_known(rates):
    assert len(rates.per_second(OPENED, 100)) == 15
    assert rates.per_second(OPENED, 100, step_s=5.0) == [10, 10, 0]
    assert NodeRates().per_second(OPENED, 10) == []


def test_steps_begin_at_whole_multiples_so_that_a_chart_moves_by_columns(rates):
    before = rates.per_second(OPENED, 8)
    rates.take(head(115.9, 900))

    assert rates.per_second(OPENED, 8) == before


def test_a_screen_that_stands_still_sees_only_what_was_before(rates):
    assert rates.per_second(OPENED, 3, end_s=111.0) == [10, 10, 0]
    assert now(rates, OPENED, end_s=105.0) == 10
    assert now(rates, OPENED) == 0


def test_a_late_frame_is_counted_over_the_time_that_it_took():
    rates = NodeRates()
    rates.take(head(100.0, 0))
    rates.take(head(104.0, 40))

    assert rates.per_second(OPENED, 9) == [10, 10, 10, 10]
    assert now(rates, OPENED) == 10


def test_a_frame_as_old_as_the_last_one_counts_for_nothing():
    rates = NodeRates()
    for at_s, leases in ((100.0, 0), (101.0, 10), (101.0, 10), (100.5, 99)):
        rates.take(head(at_s, leases))

    assert (now(rates, OPENED), len(rates)) == (10, 2)


def test_a_counter_that_falls_is_no_growth():
    """Bytes under way of a handoff that then failed are in neither counter."""
    rates = NodeRates()
    rates.take(vitals(100.0, moving_bytes_in=4096))
    rates.take(vitals(101.0))

    assert rates.per_second("in_bytes", 5) == [0]
    assert now(rates, "in_bytes") == 0


def test_bytes_under_way_count_once_when_they_have_arrived():
    rates = NodeRates()
    rates.take(vitals(100.0, moving_bytes_in=4000))
    delivered = msgspec.structs.replace(TOTALS, received_bytes=6000)
    rates.take(vitals(101.0, totals=delivered))

    assert now(rates, "in_bytes") == 2000


def test_of_twenty_frames_a_second_one_is_kept():
    rates = NodeRates()
    for frame in range(2001):
        rates.take(head(100 + frame / 20, frame))

    assert len(rates) <= 102
    assert rates.per_second(OPENED, 5) == pytest.approx([20] * 5)
    for frame in range(20_000):
        rates.take(head(300 + frame, frame))
    assert len(rates) == MAX_POINTS


def test_figures_that_are_no_numbers_are_nothing():
    rates = NodeRates()
    for at_s in (float("nan"), 100.0, 101.0, float("inf")):
        rates.take(vitals(at_s, lag_s=float("nan")))

    assert (len(rates), rates.per_second("in_bytes", 5)) == (2, [0])


def test_another_daemon_begins_from_nothing(rates):
    rates.forget()
    rates.take(head(1.0, 3))

    assert rates.per_second(OPENED, 8) == []
    assert now(rates, OPENED) == 0


def data(before, answer):

    return fold(before, frames.LEASES, answer)


def test_a_row_grows_per_second_of_the_daemons_clock():
    rates = RowRates("held")
    first = data(None, table(lease(1, 10), lease(2, 10), at_s=100.0))
    rates.take(first)
    assert rates.rate("lease:1") is None

    rates.take(data(first, changes(lease(1, 30), since=1, revision=2, at_s=100.5)))

    assert (rates.rate("lease:1"), rates.rate("lease:2")) == (40, 0)
    assert rates.rate("lease:9") is None


def test_a_row_that_left_or_began_again_is_new():
    rates = RowRates("held")
    rates.take(data(None, table(lease(1, 10), lease(2, 10), at_s=100.0)))
    rates.take(data(None, table(lease(1, 2), at_s=101.0)))
    rates.take(data(None, table(lease(1, 5), lease(2, 10), at_s=102.0)))

    assert (rates.rate("lease:1"), rates.rate("lease:2")) == (3, None)


def test_the_rate_of_a_row_is_of_the_last_second():
    rates = RowRates("held")
    for tenth in range(60):
        held = min(tenth, 30)
        rates.take(data(None, table(lease(1, held), at_s=100 + tenth / 10)))

    assert rates.rate("lease:1") == 0


def test_what_a_row_was_is_told_by_steps_and_as_of_then():
    rates = RowRates("held")
    for quarter in range(21):
        held = min(quarter, 8)
        rates.take(data(None, table(lease(1, held), at_s=100 + quarter / 4)))

    assert rates.per_second("lease:1", 4) == [4, 0, 0, 0]
    assert rates.per_second("lease:1", 9, end_s=102.0) == [4, 4]
    assert (rates.rate("lease:1"), rates.rate("lease:1", end_s=102.0)) == (0, 4)
    assert rates.per_second("lease:9", 4) == []


def test_a_row_is_known_for_a_quarter_of_an_hour():
    rates = RowRates("held")
    for second in range(2 * MAX_POINTS):
        rates.take(data(None, table(lease(1, second), at_s=100 + second)))

    assert rates.per_second("lease:1", 9999) == [1] * (MAX_POINTS - 1)
