"""How far, how fast, how long still; and how a handoff, a peer and a client read."""

from __future__ import annotations

import math

import pytest

from kvd.wire.admin import Because, Mark
from kvd.wire.console import Column, Query, TableRow
from tui.draw import phases
from tui.model import cells, handoffs, peers
from tui.model.columns import ComputedColumns, NamedRow, named_row_of
from tui.model.rates import RowRates
from tui.model.tables import TableData

KINDS = {
    **dict.fromkeys(("state", "side", "peer", "waiting_for", "name", "pids", "layout"), "text"),
    **dict.fromkeys(("done_bytes", "total_bytes", "leases", "held", "failed"), "count"),
    **dict.fromkeys(("oldest", "moved"), "since"),
    "until": "until",
}


def data(at_s: float = 100.0, key: str = "receive:4", **cells_by_name) -> TableData:
    columns = tuple(Column(name, KINDS[name]) for name in cells_by_name)
    row = TableRow(key, tuple(cells_by_name.values()))
    return TableData(Query("rooms"), columns, (key,), {key: row}, 1, 1, at_s, 1)


def facts(**cells_by_name) -> NamedRow:
    found = named_row_of(data(**cells_by_name), "receive:4")
    assert found is not None
    return found


def moving(at_s: float, done_bytes: int, state: str = "receiving") -> TableData:
    return data(at_s, state=state, done_bytes=done_bytes, total_bytes=4000)


def dressed(*tables: TableData) -> NamedRow:
    rates = RowRates("done_bytes")
    computed = ComputedColumns(handoffs.COLUMNS, lambda row: handoffs.made(row, rates))
    for one in tables:
        rates.take(one)
        last = computed.extend(one)
    found = named_row_of(last, "receive:4")
    assert found is not None
    return found


def test_the_rest_takes_as_long_as_the_bytes_of_the_last_second_say():
    row = dressed(moving(100.0, 1000), moving(101.0, 2000))
    assert [row.number(name) for name in ("progress", "rate", "eta")] == [0.5, 1000, 2.0]
    assert row.text("done") == "1.95Ki/3.91Ki"
    assert handoffs.rate(row) == ("1000B/s", "plain")
    assert handoffs.eta(row) == ("~2.00s", "plain")


def test_bytes_that_have_stopped_stand_out_and_end_never():
    row = dressed(moving(100.0, 1000), moving(101.0, 1000))
    assert handoffs.rate(row) == ("0B/s", "warn")
    assert handoffs.eta(row) == (cells.NOTHING, "dim")


def test_one_that_has_ended_has_no_rate_and_is_dim():
    row = dressed(moving(100.0, 1000), moving(101.0, 4000, "delivered"))
    assert (row.number("progress"), row.number("rate"), row.number("eta")) == (1.0, None, None)
    assert handoffs.progress(row, 4) == ("        -", "dim")
    assert handoffs.state(row) == ("+ delivered", "dim")


def test_a_room_that_is_kept_says_how_many_had_it_and_when_it_ends():
    row = dressed(data(state="kept 1 of 3", until=141.0))
    assert handoffs.state(row) == ("K kept 1 of 3", "dim")
    assert handoffs.until(row) == ("ends in 41s", "plain")


def test_bytes_that_came_after_the_last_change_of_state_are_the_last_that_was_heard():
    story = handoffs.HandoffStory("receive:4").with_here(
        100.0, Because(0, "", (), marks=(Mark(90.0, "offered -> receiving (accepted)"),))
    )
    row = dressed(data(state="receiving", side="decode", moved=60.0, waiting_for="bytes"))
    (ours, _) = handoffs.ends(story, row, "here", 100.0)
    assert phases.silence([ours])[1] == 50.0
    assert "".join(part.text for part in phases.draw([ours], 60)[0]).startswith(
        "nothing for 40.0s: here waits for bytes"
    )
    assert ours.marks[-1] == Mark(40.0, handoffs.LAST_BYTES)
    at_once = dressed(data(state="receiving", side="decode", moved=10.2))
    assert len(handoffs.ends(story, at_once, "here", 100.0)[0].marks) == 1


@pytest.mark.parametrize(
    ("done", "total", "bar"),
    [
        (0, 4000, "░░░░   0%"),
        (2500, 4000, "██▌░  62%"),
        (9000, 4000, "████ 100%"),
        (-5, 4000, "░░░░   0%"),
        (5, 0, "        -"),
        (math.inf, 4000, "        -"),
        (5, None, "        -"),
    ],
)
def test_a_bar_is_as_long_as_the_share_whatever_the_daemon_says(done, total, bar):
    row = dressed(data(state="receiving", done_bytes=done, total_bytes=total))
    assert handoffs.progress(row, 4)[0] == bar


def test_a_state_has_a_letter_and_an_unknown_one_is_told_as_it_is():
    assert handoffs.state(facts(state="receiving")) == ("R receiving", "arriving")
    assert handoffs.state(facts(state="new\x1b[31m"))[0] == r"? new\x1b[31m"
    assert len(set(handoffs.LETTERS.values())) == len(handoffs.LETTERS)


def test_the_arrow_says_where_the_bytes_go():
    assert handoffs.peer(facts(side="decode", peer="peer:p\x1b0"))[0] == r"← p\x1b0"
    assert handoffs.peer(facts(side="prefill", peer="peer:d0"))[0] == "→ d0"
    assert handoffs.peer(facts(side="decode", peer=""))[0] == "← nobody yet"


def test_what_went_between_us_and_a_peer_is_told_both_ways():
    traffic = peers.TrafficRates()
    for second, (got, gave) in enumerate([(0, 0), (4096, 0), (8192, 1024)]):
        columns = (Column("in_bytes", "bytes"), Column("out_bytes", "bytes"))
        row = TableRow("peer:p", (got, gave))
        one = TableData(
            Query("peers"), columns, ("peer:p",), {"peer:p": row}, 1, 1, 100.0 + second, 1
        )
        traffic.take(one)
    row = named_row_of(one, "peer:p")
    assert row is not None
    assert traffic.made(row, "tcp") == (4096, 1024, "←0 →0", "tcp")
    assert traffic.outgoing.per_second("peer:p", 4) == [0, 1024]


@pytest.mark.parametrize(
    ("words", "look"),
    [("same", ("same", "ok")), ("pages of 32 tokens\x1b", (r"pages of 32 tokens\x1b", "warn"))],
)
def test_a_layout_unlike_ours_is_said_in_words(words, look):
    assert peers.layout(facts(layout=words)) == look
