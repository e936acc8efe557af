"""A field is said once: in the snapshot, as a column, and by ``why``."""

from __future__ import annotations

import pytest

from kvd.console.server import VIEWS
from kvd.core.inspect.schema import (
    CLIENT,
    LEASE,
    PEER,
    POOL,
    ROOM,
    WAITING,
    StateField,
    StateTable,
)
from kvd.wire import admin, client
from kvd.wire.snapshot import (
    ClientState,
    LeaseState,
    PeerState,
    PoolState,
    RoomState,
    WaitingState,
)
from tests.core.engines import PROMPT
from tests.core.world import World

TABLES = {
    "leases": (LEASE, LeaseState),
    "rooms": (ROOM, RoomState),
    "peers": (PEER, PeerState),
    "clients": (CLIENT, ClientState),
    "pools": (POOL, PoolState),
    "waiting": (WAITING, WaitingState),
}
BY_NAME = pytest.mark.parametrize("name", TABLES)


def widened(kind):
    """The snapshot's struct with fields that no row speaks of."""

    class More(kind, frozen=True):
        owned: int = 0
        waited_long_s: float = 0.0
        lost_pages: int = 0
        note: str = ""

    return More


class Stand:
    """As much of a row as the fields that were added."""

    owned, waited_long_s, lost_pages, note = 3, 0.5, 7, "new"


def names(fields):
    return [field.column for field in fields]


@BY_NAME
def test_an_attribute_of_a_row_is_shown_when_the_snapshot_declares_it(name):
    table, kind = TABLES[name]
    found = StateTable(widened(kind), *table.rows)

    added = found.plain[len(table.plain) :]
    assert [(field.column, field.unit) for field in added] == [
        ("owned", "count"),
        ("waited_long_s", "seconds"),
        ("lost_pages", "pages"),
        ("note", "text"),
    ]
    assert [field.get(None, Stand()) for field in added] == [3, 0.5, 7, "new"]
    assert names(found.columns) == [*names(table.columns), *names(added)]


@BY_NAME
def test_every_field_is_said_once(name):
    table, kind = TABLES[name]
    on_wire = [row.wire for row in table.rows if row.wire]
    columns = [row.column for row in table.columns]

    assert len(on_wire) == len(set(on_wire))
    assert set(on_wire) <= set(kind.__struct_fields__)
    assert len(columns) == len(set(columns))
    assert [column.name for column in VIEWS[name].columns] == columns


@BY_NAME
def test_what_is_not_known_is_nothing_of_its_unit_in_the_snapshot(name):
    table, kind = TABLES[name]
    optional = {"window", "buffer"}  # which a pool has or has not
    texts = {one for one in kind.__struct_fields__ if kind.__annotations__[one] == "str"}
    nothing = {
        field: unknown
        for field, (_, _, unknown) in zip(kind.__struct_fields__, table._read, strict=True)
    }

    assert {field for field, unknown in nothing.items() if unknown is None} <= {
        *optional,
        "companions",
        "shards",
    }
    assert {field for field, unknown in nothing.items() if unknown == ""} >= texts


@pytest.mark.parametrize(
    ("kind", "number", "name", "table"),
    [
        ("lease", 1, "", LEASE),
        ("receive", 1, "", ROOM),
        ("client", 1, "", CLIENT),
        ("peer", 0, "p", PEER),
    ],
)
def test_why_says_a_field_that_no_sentence_speaks_of(kind, number, name, table, monkeypatch):
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    monkeypatch.setattr(table, "plain", (StateField("owned", "count", lambda *_: 3),))
    said = world.d.ask(admin.Why(1, kind, number, name=name))

    assert "owned: 3" in said.facts
