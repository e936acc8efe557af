"""Device buffers: a fixed number of pages per lease, never cached, never in quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core.cache.lease import Quarantine, Shortage, Writer
from tests.core.keeping import (
    arrival,
    cached,
    check,
    claim,
    finish,
    opened,
    pages_left,
    row,
    table_of,
)
from tests.core.world import tokens

if TYPE_CHECKING:
    from kvd.core.leases.lease_table import LeaseTable

PAGE = 4


@pytest.fixture
def table() -> LeaseTable:
    """Three buffer pages per request, seven in all."""
    return table_of(PAGE, 40, buffer_tokens=12, buffers=7)


@pytest.mark.parametrize(("n_tokens", "pages"), [(1, 1), (4, 1), (9, 3), (12, 3), (100, 3)])
def test_a_lease_has_as_many_as_its_sequence_up_to_the_configured_number(table, n_tokens, pages):
    lease = opened(table, claim(tokens((1, n_tokens))))

    assert len(row(table, lease, "buffer")) == pages
    assert 0 not in row(table, lease, "buffer")


def test_buffers_are_counted_from_the_first_token_on_whatever_is_cached(table):
    cached(table, tokens((1, 40)))

    lease = opened(table, claim(tokens((1, 41))))

    assert (lease.prefix_tokens, len(row(table, lease, "buffer"))) == (40, 3)


def test_an_extension_takes_more_up_to_the_configured_number(table):
    lease = opened(table, claim(tokens((1, 4))))
    before = row(table, lease, "buffer")

    table.grants.extend(lease, 40)

    assert len(row(table, lease, "buffer")) == 3
    assert row(table, lease, "buffer")[:1] == before
    check(table)


def test_a_claim_is_short_of_buffers_and_nothing_is_touched(table):
    for first in (1, 100):
        opened(table, claim(tokens((first, 12))))

    assert table.grants.open_lease(claim(tokens((200, 8)))) == Shortage(2, 1, "buffer")

    check(table)
    assert pages_left(table) == {"kv": (34, 0), "buffer": (1, 0)}


def test_nothing_in_a_buffer_is_cached(table):
    finish(table, opened(table, claim(tokens((1, 40)))))

    assert pages_left(table) == {"kv": (30, 10), "buffer": (7, 0)}


def test_a_quarantine_keeps_no_buffer_because_no_remote_writes_one(table):
    lease = opened(table, arrival(table, tokens((1, 40))))

    table.ends.quarantine(lease, Quarantine((Writer("p", "i"),), 0.0, "cancelled"))
    check(table)

    assert pages_left(table) == {"kv": (30, 0), "buffer": (7, 0)}
    table.ends.end_quarantine(lease, "settled")
    check(table)


def test_a_slide_leaves_buffers_as_they_are(table):
    lease = opened(table, claim(tokens((1, 40))))
    before = row(table, lease, "buffer")

    assert table.grants.slide(lease, 40) is None

    assert row(table, lease, "buffer") == before
