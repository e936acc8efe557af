"""Frames as a daemon would send them, by hand: for tests of what a console makes of them."""

from __future__ import annotations

import msgspec

from kvd.wire.admin import Frame
from kvd.wire.console import (
    Column,
    Latency,
    Level,
    PageMap,
    Query,
    Sources,
    Table,
    TableRow,
    Vitals,
)
from kvd.wire.snapshot import Totals

LEASES = Query("leases", limit=10)
COLUMNS = (
    Column("id", "ref"),
    Column("state", "state"),
    Column("owner", "text"),
    Column("held", "pages"),
    Column("since", "since"),
)
TOTALS = Totals(*([0] * 12))


def vitals(at_s=100.0, *, incarnation="a" * 32, node="decode-0", **fields):
    """The head of a daemon in which nothing is wrong."""
    plain = Vitals(
        at_s=at_s,
        node=node,
        incarnation=incarnation,
        version="0.1.0",
        state="serving",
        transport="up",
        generation=1,
        started_s=1.0,
        lag_s=0.0005,
        clients=1,
        leases=2,
        rooms=0,
        waiting=0,
        peers=0,
        peers_up=0,
        findings=0,
        worst="",
        last_event=0,
        totals=TOTALS,
        sources=Sources(),
        latency=Latency(),
    )
    return msgspec.structs.replace(plain, **fields)


def lease(number, held=4, since_s=90.0, *, state="held", owner="engine-1"):
    """One row of ``COLUMNS``."""
    return TableRow(f"lease:{number}", (f"lease:{number}", state, owner, held, since_s))


def table(*rows, revision=1, at_s=100.0, **fields):
    whole = Table(
        view="leases",
        revision=revision,
        since=0,
        at_s=at_s,
        total=len(rows),
        of=len(rows),
        columns=COLUMNS,
        order=tuple(row.key for row in rows),
        rows=rows,
    )
    return msgspec.structs.replace(whole, **fields)


def changes(*rows, since, revision, order=None, total=2, at_s=101.0):
    """What became of the leases since."""
    return Table("leases", revision, since, at_s, total, total, (), order, rows)


def page_map(cells=b"\x00\x01", revision=1, **fields):
    plain = PageMap(
        component="kv",
        lens="state",
        revision=revision,
        at_s=100.0,
        took_s=0.01,
        total_pages=8,
        page_bytes=4096,
        first_page=0,
        pages_each=4,
        levels=(Level(".", "free", 6), Level("H", "held", 2)),
        cells=cells,
    )
    return msgspec.structs.replace(plain, **fields)


def frame(call, *answers, head=None, events=(), lost=0, skipped=0, upto=0):
    """The answer to the look of that call."""
    encoded = tuple(
        one if isinstance(one, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(one))
        for one in answers
    )
    return Frame(
        call, head if head is not None else vitals(), encoded, tuple(events), lost, skipped, upto
    )
