"""The console's model: what it says after each piece of news."""

from __future__ import annotations

import msgspec

from kvd.wire.events import Evicted
from kvd.wire.snapshot import BufferState, CompanionState, HeldState, WindowState
from tui.old_model import MAX_ROWS, Answered, Console, Down, Question, Seen


def test_head_says_that_nobody_has_answered_yet():
    assert Console("ipc:///x").head() == "NOT REACHABLE ipc:///x: connecting - trying again"


def test_head_names_the_daemon_and_what_happens_to_it(snapshot):
    console = Console("ipc:///x")

    console.take(Seen(snapshot))
    assert console.head() == "decode-node  serving  kvd 0.1.0  up 1h02m"

    console.take(Down("no answer within 2 s"))
    assert console.head() == "NOT REACHABLE ipc:///x: no answer within 2 s - trying again"
    assert console.snapshot == snapshot

    console.take(Seen(snapshot))
    assert console.head() == "decode-node  serving  kvd 0.1.0  up 1h02m"


def test_overview_has_the_pools_and_whether_they_add_up(snapshot):
    console = Console("ipc:///x")
    console.take(Seen(snapshot))
    lines = console.overview().splitlines()

    assert lines[0] == "main/kv [HHHHCCCCCCCCCCQ.................................]"
    assert lines[1] == "    128 pages: 87 free, 10 held, 28 cached, 2 quarantined; adds up"
    assert lines[4] == "engines 1   leases 1   rooms 1   waiting for room 1   peers 1"


def test_overview_has_the_window_the_buffer_and_companions_of_a_pool(snapshot):
    kv = msgspec.structs.replace(
        snapshot.pools[0], companions=(CompanionState("index", 4, 96, 4, 512, "device"),)
    )
    swa = msgspec.structs.replace(kv, component="swa", companions=())
    swa = msgspec.structs.replace(swa, window=WindowState(1024, 12, 60, 3))
    buffer = msgspec.structs.replace(swa, component="buffer", window=None)
    buffer = msgspec.structs.replace(buffer, buffer=BufferState(256, 9, 1, 512))
    console = Console("ipc:///x")
    console.take(Seen(msgspec.structs.replace(snapshot, pools=(kv, swa, buffer))))
    lines = console.overview().splitlines()

    assert lines[2] == "    with index in lockstep"
    assert lines[5] == "    window of 1024 tokens, mapped of all: 12/60 20%"
    assert lines[8] == "    found of wanted pages: 9/10 90%"


def test_a_lease_shows_what_it_holds_of_each_component(snapshot):
    lease = msgspec.structs.replace(snapshot.leases[0], beside=(HeldState("swa", 4, 6),))
    console = Console("ipc:///x")
    console.take(Seen(msgspec.structs.replace(snapshot, leases=(lease,))))

    assert console.sheet("leases").rows[0].cells[4] == "6+4"


def test_a_lease_says_who_holds_what_since_when_and_can_be_asked_about(snapshot):
    console = Console("ipc:///x")
    console.take(Seen(snapshot))
    [row] = console.sheet("leases").rows

    assert row.cells == (
        *("7 held", r"evil\x1b[2J[bold]\u202etxt[4711]", "receive", "9117", "6", "0", "1m35s"),
        "engine decode-0, handoff 41",
    )
    assert row.question == Question("lease", 7)


def test_rooms_and_peers_have_their_rows(snapshot):
    console = Console("ipc:///x")
    console.take(Seen(snapshot))
    [room] = console.sheet("rooms").rows
    [peer] = console.sheet("peers").rows

    assert room.cells == (
        *("9117", "decode", "receiving", "prefill-0", "3/6 50%", "0.25s", "29.8s"),
        "prefill-0 to write 3 more pages",
    )
    assert room.question == Question("room", 9117)
    assert peer.cells == ("prefill-0", "suspect", "1.30s", "0.41", "1", "0", "tcp://127.0.0.1:7402")
    assert peer.question is None


def test_a_long_table_is_cut_and_says_so(snapshot):
    console = Console("ipc:///x")
    many = tuple(msgspec.structs.replace(snapshot.leases[0], id=n) for n in range(MAX_ROWS + 3))
    console.take(Seen(msgspec.structs.replace(snapshot, leases=many)))

    sheet = console.sheet("leases")

    assert (len(sheet.rows), sheet.left_out) == (MAX_ROWS, 3)


def test_events_gaps_and_restarts_are_lines(snapshot):
    console = Console("ipc:///x")
    console.take(Seen(snapshot, (Evicted(5, 1.0, 4, 1, "room"),)))
    again = msgspec.structs.replace(snapshot, incarnation="c" * 32)

    brought = console.take(Seen(again, (Evicted(3, 1.0, 4, 1, "room"),), lost=2))

    assert brought == (
        "-- the daemon was restarted: incarnation cccccccc",
        "-- 2 events are lost",
        "       3        1.000  evicted            pages=4 nodes=1 reason=room",
    )
    assert len(console.event_lines) == 4


def test_an_answer_is_made_safe():
    console = Console("ipc:///x")

    console.take(Answered(Question("lease", 7), ("held by \x1b[2J", "[red]since 3 s")))

    assert console.answer_text() == "held by \\x1b[2J\n[red]since 3 s"
