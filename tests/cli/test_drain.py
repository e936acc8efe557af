"""``kvd drain``: what it asks, what it follows, and how it ends."""

from __future__ import annotations

import getpass
import json

import msgspec
import pytest

from kvd.wire.admin import (
    Drain,
    EventPage,
    ListEvents,
    Rehearse,
    Report,
    ShowStatus,
    Status,
    Undrain,
)
from kvd.wire.events import Drained
from kvd.wire.snapshot import DrainState

UNDER_WAY = DrainState("root", "new switch", 3.0, None, False, False, 2, 1, 0, 4)
OVER = msgspec.structs.replace(UNDER_WAY, is_drained=True, receives=0, sends=0)


@pytest.fixture
def drained_later(daemon, snapshot):
    """The daemon drains, and is drained after the first event that somebody waits for."""
    states = [UNDER_WAY, OVER]

    def answer(request):
        match request:
            case ShowStatus():
                return Status(0, msgspec.structs.replace(snapshot, drain=states.pop(0)))
            case ListEvents():
                return EventPage(
                    0, 0, (Drained(request.after_seq + 1, 1.0, lasted_s=3.0, cut=0, leases=4),)
                )
            case _:
                return Report(0, {"sends_under_way": 1}, ())

    daemon.answer = answer


def test_drain_asks_in_the_name_of_who_calls(run, daemon):
    daemon.answer = lambda _request: Report(0, {"sends_under_way": 1}, ())

    done = run("drain", "--why", "new switch", "--deadline", "60")

    assert (done.exit_code, done.stderr) == (0, "")
    assert daemon.asked == [Drain(0, getpass.getuser(), "new switch", 60.0)]
    assert done.stdout.splitlines() == ["sends under way: 1"]


def test_undrain_asks_once(run, daemon):
    daemon.answer = lambda _request: Report(0, {"drains_ended": 1}, ())

    done = run("undrain", "--format", "json")

    assert daemon.asked == [Undrain(0)]
    assert json.loads(done.stdout)["changed"] == {"drains_ended": 1}


def test_a_dry_run_is_a_rehearsal_and_waits_for_nothing(run, daemon):
    daemon.answer = lambda _request: Report(0, {"sends_under_way": 1}, ())

    run("drain", "--dry-run", "--wait")

    assert daemon.asked == [Rehearse(0, Drain(1, getpass.getuser()))]


@pytest.mark.usefixtures("drained_later")
def test_wait_follows_until_nothing_is_under_way(run):
    done = run("drain", "--wait")

    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "under way: 2 receives, 1 sends, 0 waiting",
        "drained after 3.00s; engines hold 4 leases",
    ]


def test_wait_fails_when_somebody_else_ends_the_drain(run, daemon, snapshot):
    daemon.answer = lambda request: (
        Status(0, snapshot) if isinstance(request, ShowStatus) else Report(0, {}, ())
    )

    done = run("drain", "--wait")

    assert done.exit_code == 1
    assert "is not drained any more" in done.stderr


def test_status_says_who_drains_the_node_and_how_to_end_it(run, daemon, snapshot):
    daemon.answer = lambda _request: Status(0, msgspec.structs.replace(snapshot, drain=UNDER_WAY))

    done = run("status")

    assert (
        "! drained for 3.00s by root (new switch): 2 receives, 1 sends and 0 requests under way; "
        "kvd undrain serves again"
    ) in done.stdout.splitlines()


def test_status_says_what_a_stop_still_writes(run, daemon, snapshot):
    drain = DrainState("", "SIGTERM", 3.0, None, True, True, 0, 0, 0, 0, unwritten=120)
    daemon.answer = lambda _request: Status(0, msgspec.structs.replace(snapshot, drain=drain))

    done = run("status")

    shown = " ".join(done.stdout.split())
    assert "it stops, asked 3.00s ago (SIGTERM): 120 cached pages to be written to tiers" in shown
