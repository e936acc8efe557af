"""Where pages come from when they are short: who gives way, in which order, and never in vain."""

from __future__ import annotations

import pytest

from kvd.core.cache.lease import ENGINE, PIN
from tests.core.keeping import cached, check, claim, opened, table_of
from tests.core.side import tokens

PAGE = 4


@pytest.fixture
def table():
    return table_of(PAGE, 8)


def giving_way(table, first: int, *, as_pin: bool = False):
    """A lease of two pages that nobody would miss at once."""
    lease = opened(table, claim(tokens((first, 2 * PAGE))))
    if as_pin:
        lease.holders = {PIN}
        table.giving_way.let_pin_give_way(lease)
        return lease
    table.holders.hold_for_send(lease, "send 1", 2 * PAGE)
    table.giving_way.let_give_way(lease, "send 1")
    table.holders.release(lease, ENGINE, "normal")
    return lease


def test_leases_go_oldest_first_and_no_more_of_them_than_it_takes(table):
    first, second = giving_way(table, 100), giving_way(table, 200)

    assert table.supply.obtain(6) == 6

    assert table.giving_way.gone == [first]
    assert table.giving_way.leases == {second.id: second}
    check(table)


def test_a_pin_goes_after_what_is_younger(table):
    pin, send = giving_way(table, 100, as_pin=True), giving_way(table, 200)

    table.supply.obtain(6)

    assert table.giving_way.gone == [send]
    assert table.giving_way.leases == {pin.id: pin}


def test_nobody_goes_where_that_would_not_be_enough(table):
    opened(table, claim(tokens((1, 4 * PAGE))))
    giving_way(table, 100)

    assert table.supply.obtain(5) == 2

    assert table.giving_way.gone == []


def test_nobody_goes_while_what_is_cached_is_enough(table):
    giving_way(table, 100)
    cached(table, tokens((1, 4 * PAGE)))

    assert table.supply.obtain(6) == 6

    assert table.giving_way.gone == []


def test_a_lease_whose_pages_are_read_stays(table):
    lease = giving_way(table, 100)
    table.holders.begin_read(lease)

    assert table.supply.obtain(8) == 6

    assert table.giving_way.gone == []


def test_who_is_needed_after_all_stays(table):
    lease = giving_way(table, 100)
    table.giving_way.keep_for(lease, "send 1")

    assert table.supply.obtain(8) == 6

    assert table.giving_way.leases == {}


def test_room_is_made_of_cached_pages_and_only_where_that_is_enough(table):
    cached(table, tokens((1, 6 * PAGE)))

    table.supply.make_room(9, 1, "lease")
    assert table.pool.free_pages == 2

    table.supply.make_room(3, 1, "lease")
    assert table.pool.free_pages >= 3
    assert table.evictor.evicted_pages == table.pool.free_pages - 2
    check(table)


def test_a_lease_that_went_is_let_go_of_once(table):
    lease = giving_way(table, 100)
    table.supply.obtain(8)

    table.holders.release(lease, "send 1", "late")

    assert table.released == 1
    check(table)
