"""``kvd events``: order, paging, gaps, following over a restart."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import msgspec
import pytest

from kvd.wire.admin import EventPage, ListEvents, ShowStatus, Status
from kvd.wire.events import ClientAttached, Evicted
from tests.cli.admin_peer import Daemon
from tests.cli.sentences import sentence_of

EVENTS = tuple(
    ClientAttached(seq, seq / 2, session=3, name="decode 0", pid=4711) for seq in range(1, 6)
)


@pytest.fixture
def ring(daemon, snapshot):
    """A ring that has lost its first event and answers two events at a time."""

    def answer(request):
        match request:
            case ShowStatus():
                return Status(0, snapshot)
            case ListEvents(after_seq=after):
                rest = [event for event in EVENTS if event.seq > max(1, after)]
                return EventPage(0, 1 if after < 1 else 0, tuple(rest[:2]))

    daemon.answer = answer
    return daemon


def test_events_are_printed_in_order_one_a_line(run, ring):
    done = run("events", "--after", "3")

    assert done.stdout.splitlines() == [
        '       4        2.000  client-attached    session=3 name="decode 0" pid=4711',
        '       5        2.500  client-attached    session=3 name="decode 0" pid=4711',
    ]


def test_a_gap_is_reported(run, ring):
    done = run("events", "--after", "0")

    assert done.stdout.splitlines()[0] == sentence_of("a gap is reported")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["2", "3", "4", "5"]


def test_last_counts_from_the_end(run, ring):
    assert [line.split()[0] for line in run("events", "--last", "2").stdout.splitlines()] == [
        "4",
        "5",
    ]
    assert run("events", "--last", "0").stdout == ""


def test_json_is_one_object_a_line_gaps_included(run, ring):
    done = run("events", "--after", "0", "--format", "json")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"type": "gap", "lost": 1}
    assert lines[1:] == [
        {"type": "client-attached", **msgspec.to_builtins(event, builtin_types=())} | {}
        for event in EVENTS[1:]
    ]


def test_following_goes_on_after_a_restart_of_the_daemon(daemon, snapshot):
    """The new incarnation counts from 1 again; both are shown, with a line between them."""
    again = msgspec.structs.replace(snapshot, incarnation="c" * 32, last_event=1)
    first = Evicted(6, 3.0, pages=4, nodes=1, reason="room")
    second = Evicted(1, 0.1, pages=8, nodes=2, reason="room")
    restarted = False

    def answer(request):
        nonlocal restarted
        match request:
            case ShowStatus():
                return Status(0, again if restarted else snapshot)
            case ListEvents(after_seq=5):
                return EventPage(0, 0, (first,))
            case ListEvents(after_seq=6):
                restarted = True
                return EventPage(0, 0, ())
            case ListEvents(after_seq=0):
                return EventPage(0, 0, (second,))
            case ListEvents():
                return EventPage(0, 0, ())

    daemon.answer = answer
    command = [sys.executable, "-m", "kvd", "events", "--connect", daemon.endpoint]
    with subprocess.Popen(
        [*command, "--last", "0", "-f"], stdout=subprocess.PIPE, text=True
    ) as follower:
        lines = [follower.stdout.readline().split() for _ in range(3)]
        follower.send_signal(signal.SIGINT)

    assert follower.returncode == 0
    assert [line[0] for line in lines] == ["6", "--", "1"]
    assert lines[1][-1] == "cccccccc"


def test_following_waits_for_a_daemon_that_is_down(daemon, snapshot):
    """Nobody listens for a while; the new incarnation has lost the beginning of its ring."""
    again = msgspec.structs.replace(snapshot, incarnation="c" * 32, last_event=9)

    def before(request):
        match request:
            case ShowStatus():
                return Status(0, snapshot)
            case ListEvents(after_seq=5):
                return EventPage(0, 0, (Evicted(6, 3.0, pages=4, nodes=1, reason="room"),))
            case ListEvents():
                return EventPage(0, 0, ())

    def after(request):
        match request:
            case ShowStatus():
                return Status(0, again)
            case ListEvents(after_seq=0):
                return EventPage(0, 7, (Evicted(8, 0.1, pages=8, nodes=2, reason="room"),))
            case ListEvents(after_seq=after_seq):
                return EventPage(
                    0,
                    0,
                    (Evicted(9, 0.2, pages=8, nodes=2, reason="room"),) if after_seq < 9 else (),
                )

    daemon.answer = before
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "kvd", "events", "--connect", daemon.endpoint),
            *("--timeout", "0.2", "--last", "0", "-f"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as follower:
        lines = [follower.stdout.readline()]
        daemon.close()
        complaint = [follower.stderr.readline() for _ in range(2)]
        revived = Daemon(daemon.endpoint, after)
        lines += [follower.stdout.readline() for _ in range(4)]
        follower.send_signal(signal.SIGINT)
        rest = follower.stderr.read()
        revived.close()

    assert (follower.returncode, rest) == (0, "")
    assert complaint[0].startswith(f"no daemon answers at {daemon.endpoint}: ")
    assert complaint[1] == "waiting until one answers; Ctrl-C ends it\n"
    assert [line.split()[0] for line in lines] == ["6", "--", "--", "8", "9"]
    assert lines[1] == (
        "-- the daemon was restarted: what happened before that and after event 6 is lost; "
        "now incarnation cccccccc\n"
    )
    assert lines[2] == "-- 7 events are lost: they had left the daemon's ring\n"


def test_not_following_a_daemon_that_is_down_ends_at_once(run, daemon):
    daemon.close()

    done = run("events")

    assert (done.exit_code, done.stdout) == (3, "")
    assert "start it with kvd serve" in done.stderr
