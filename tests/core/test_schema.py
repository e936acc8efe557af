"""A field is said once: in the snapshot, as a column, and by ``why``."""

from __future__ import annotations

from kvd.console.leases import LEASES
from kvd.core.inspect.schema import LEASE, LEASE_COLUMNS, PLAIN_OF_LEASE, plain_fields
from kvd.wire.snapshot import LeaseState


class MoreOfALease(LeaseState, frozen=True):
    """A snapshot's lease with fields that no row speaks of."""

    owned: int = 0
    waited_s: float = 0.0
    lost_pages: int = 0
    note: str = ""


def test_an_attribute_of_a_lease_is_shown_when_the_snapshot_declares_it():
    found = plain_fields(MoreOfALease, LEASE)

    assert [(field.column, field.unit) for field in found] == [
        ("written_tokens", "tokens"),
        ("owned", "count"),
        ("waited_s", "seconds"),
        ("lost_pages", "pages"),
        ("note", "text"),
    ]


def test_every_field_of_a_lease_is_said_once():
    rows = (*LEASE, *PLAIN_OF_LEASE)
    on_wire = [row.wire for row in rows if row.wire]
    columns = [row.column for row in rows if row.column]

    assert sorted(on_wire) == sorted(LeaseState.__struct_fields__)
    assert len(columns) == len(set(columns))
    assert [column.name for column in LEASES.columns] == [row.column for row in LEASE_COLUMNS]
