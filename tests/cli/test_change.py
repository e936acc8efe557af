"""The changing verbs: what they ask, what they say, and when a refusal is a failure."""

from __future__ import annotations

import getpass
import json

import msgspec
import pytest

from kvd.wire.admin import (
    AbortRoom,
    Audit,
    Drain,
    Evict,
    Fence,
    Flush,
    Pin,
    RaiseEpoch,
    Rehearse,
    Report,
    Unpin,
)
from kvd.wire.snapshot import AuditState, Finding

VERBS = {
    "flush": (("flush",), Flush(0, "unlocked")),
    "strict": (("flush", "--strict"), Flush(0, "strict")),
    "pin": (
        ("pin", "node", "12", "--ttl", "60", "--owner", "ops"),
        Pin(0, "node", 12, 60.0, "ops"),
    ),
    "unpin": (("unpin", "3"), Unpin(0, 3)),
    "evict": (("evict", "64"), Evict(0, 64)),
    "abort": (("abort", "9117", "--reason", "stuck"), AbortRoom(0, 9117, "stuck")),
    "fence": (("fence",), Fence(0)),
    "epoch": (("epoch", "llama", "7"), RaiseEpoch(0, "llama", 7)),
    "next epoch": (("epoch", "llama"), RaiseEpoch(0, "llama")),
    "audit": (("audit",), Audit(0)),
}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_asks_once_and_says_what_changed(run, daemon, name):
    arguments, request = VERBS[name]
    daemon.answer = lambda _request: Report(0, {"freed_pages": 12}, ())

    done = run(*arguments)

    assert (done.exit_code, done.stderr) == (0, "")
    assert daemon.asked == [request]
    tail = ["every invariant holds"] if name == "audit" else []
    assert done.stdout.splitlines() == ["freed pages: 12", *tail]


def test_a_user_without_a_name_may_pin_and_drain(run, daemon, monkeypatch):
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    daemon.answer = lambda _request: Report(0, {}, ())

    ended = [run("pin", "node", "12").exit_code, run("drain").exit_code]

    assert ended == [0, 0]
    assert daemon.asked == [
        Pin(0, "node", 12, 3600.0, "an operator"),
        Drain(0, "an operator"),
    ]


@pytest.mark.parametrize("name", VERBS)
def test_json_has_what_changed_and_what_was_refused(run, daemon, name):
    daemon.answer = lambda _request: Report(0, {"freed_pages": 12}, ("2 pages: lease 7",))

    done = run(*VERBS[name][0], "--format", "json")

    more = {"standing": None} if name == "audit" else {"notes": [], "dry_run": False}
    assert json.loads(done.stdout) == {
        "changed": {"freed_pages": 12},
        "refused": ["2 pages: lease 7"],
        **more,
    }


@pytest.mark.parametrize("name", [name for name in VERBS if name != "audit"])
def test_a_dry_run_asks_for_a_rehearsal_and_says_that_it_is_one(run, daemon, name):
    arguments, request = VERBS[name]
    daemon.answer = lambda _request: Report(0, {"freed_pages": 12}, (), notes=("node 3 goes",))

    done = run(*arguments, "--dry-run")

    assert (done.exit_code, done.stderr) == (0, "")
    assert daemon.asked == [Rehearse(0, msgspec.structs.replace(request, call=1))]
    assert done.stdout.splitlines() == [
        "dry run: nothing was changed; it would be",
        "freed pages: 12",
        "node 3 goes",
    ]


def test_a_dry_run_ends_as_the_verb_would(run, daemon):
    daemon.answer = lambda _request: Report(0, {"evicted_pages": 0}, ("64 of 64 pages: locked",))

    done = run("evict", "64", "--dry-run", "--format", "json")

    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "changed": {"evicted_pages": 0},
        "refused": ["64 of 64 pages: locked"],
        "notes": [],
        "dry_run": True,
    }


@pytest.mark.parametrize("name", [name for name in VERBS if "epoch" not in name])
def test_a_refusal_fails_except_where_skipping_is_the_point(run, daemon, name):
    """scenario A40: flush skips what is locked and says so; flush --strict is refused."""
    daemon.answer = lambda _request: Report(0, {}, ("page 9 is locked by lease 7 of decode-0",))

    done = run(*VERBS[name][0])

    assert done.exit_code == (0 if name == "flush" else 1)
    assert "page 9 is locked by lease 7 of decode-0" in done.stdout
    assert done.stderr.count("\n") == (0 if name == "flush" else 1)


def test_an_empty_cache_is_not_said_to_be_locked(run, daemon):
    why = "64 of 64 pages: the rest of the cache is empty"
    daemon.answer = lambda _request: Report(0, {"evicted_pages": 0}, (why,))

    assert "is locked" not in run("evict", "64").stderr


FOUND = Finding(
    rule="I9",
    check="holder-gone",
    what="lease 7 is held for session 3, which is gone",
    state="broken",
    lease=7,
    node=12,
    owner="decode-0",
    pid=4711,
    room=9117,
    pages=9,
    first_pages=(4, 5, 6, 7, 8, 9, 10, 11),
    first_seen_ago_s=2.0,
    last_seen_ago_s=0.1,
    transitions=("3.000 s ago: offered -> receiving (accepted)",),
)
STANDING = AuditState(
    findings=1,
    sweeps=40,
    sweep_s=0.05,
    last_sweep_ago_s=0.1,
    objects=20,
    pages=2000,
    spent_s=0.5,
    share=0.004,
    found=(FOUND,),
)


def test_audit_prints_findings_of_the_standing_audit_and_fails(run, daemon):
    daemon.answer = lambda _request: Report(0, {"pages": 2000}, (), STANDING)

    done = run("audit")

    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "pages: 2000",
        "standing audit: 1 finding; the last sweep took 0.05s, ended 0.10s ago; 0.40 % of a core",
        "    40 sweeps, 0.50 s of processor time; 20 objects and 2000 pages in the last one, "
        "40,400 a second",
        "broken: I9: lease 7 is held for session 3, which is gone",
        "    lease 7, node 12, decode-0[4711], room 9117, 9 pages: 4 5 6 7 8 9 10 11 ..., "
        "first seen 2.00s ago, last 0.10s ago",
        "    3.000 s ago: offered -> receiving (accepted)",
    ]


def test_audit_is_content_where_everything_found_is_healed(run, daemon):
    healed = msgspec.structs.replace(FOUND, state="healed")
    state = msgspec.structs.replace(STANDING, findings=0, found=(healed,))
    daemon.answer = lambda _request: Report(0, {"pages": 2000}, (), state)

    done = run("audit")

    assert done.exit_code == 0
    assert "healed: I9: lease 7 is held for session 3, which is gone" in done.stdout
    assert done.stdout.splitlines()[-1] == "every invariant holds"


@pytest.mark.parametrize(
    "arguments",
    [("evict", "0"), ("evict", "many"), ("abort", "0"), ("abort", str(2**63)), ("why", "pie", "1")],
)
def test_wrong_arguments_end_with_2_before_anyone_is_asked(run, daemon, arguments):
    done = run(*arguments)

    assert done.exit_code == 2
    assert daemon.asked == []
