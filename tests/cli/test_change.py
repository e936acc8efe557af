"""The changing verbs: what they ask, what they say, and when a refusal is a failure."""

from __future__ import annotations

import json

import pytest

from kvd.wire.admin import AbortRoom, Audit, Evict, Fence, Flush, Report

VERBS = {
    "flush": (("flush",), Flush(0, "unlocked")),
    "strict": (("flush", "--strict"), Flush(0, "strict")),
    "evict": (("evict", "64"), Evict(0, 64)),
    "abort": (("abort", "9117", "--reason", "stuck"), AbortRoom(0, 9117, "stuck")),
    "fence": (("fence",), Fence(0)),
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


@pytest.mark.parametrize("name", VERBS)
def test_json_has_what_changed_and_what_was_refused(run, daemon, name):
    daemon.answer = lambda _request: Report(0, {"freed_pages": 12}, ("2 pages: lease 7",))

    done = run(*VERBS[name][0], "--format", "json")

    assert json.loads(done.stdout) == {
        "changed": {"freed_pages": 12},
        "refused": ["2 pages: lease 7"],
    }


@pytest.mark.parametrize("name", VERBS)
def test_a_refusal_fails_except_where_skipping_is_the_point(run, daemon, name):
    """scenario A40: flush skips what is locked and says so; flush --strict is refused."""
    daemon.answer = lambda _request: Report(0, {}, ("page 9 is locked by lease 7 of decode-0",))

    done = run(*VERBS[name][0])

    assert done.exit_code == (0 if name == "flush" else 1)
    assert "page 9 is locked by lease 7 of decode-0" in done.stdout
    assert done.stderr.count("\n") == (0 if name == "flush" else 1)


@pytest.mark.parametrize(
    "arguments",
    [("evict", "0"), ("evict", "many"), ("abort", "0"), ("abort", str(2**63)), ("why", "pie", "1")],
)
def test_wrong_arguments_end_with_2_before_anyone_is_asked(run, daemon, arguments):
    done = run(*arguments)

    assert done.exit_code == 2
    assert daemon.asked == []
