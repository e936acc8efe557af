"""Which failures may be looked at again: a broken core never passes because of it."""

from __future__ import annotations

import json

import pytest

from tests.support import second_look

CORE = "tests/core/test_radix.py::test_a"
DAEMON = "tests/daemon/test_reactor.py::test_b[x/y]"
ONE_FILE = "tests/test_curve.py::test_c"


@pytest.mark.parametrize("failed", [[CORE], [ONE_FILE], [DAEMON, CORE]])
def test_a_test_that_waits_for_nobody_failed(failed):
    assert set(second_look.without_a_second_look(failed)) == set(failed) - {DAEMON}


def test_a_busy_host_explains_a_few():
    few = [f"{DAEMON}{n}" for n in range(second_look.MOST)]
    assert second_look.without_a_second_look(few) == []
    assert second_look.without_a_second_look([*few, DAEMON]) == sorted([*few, DAEMON])


@pytest.mark.parametrize(
    ("failed", "alone", "status"),
    [({}, True, 1), ({DAEMON: True}, True, 0), ({DAEMON: True}, False, 1), ({CORE: True}, True, 1)],
)
def test_the_exit_status(failed, alone, status, tmp_path, monkeypatch):
    kept = tmp_path / "lastfailed"
    kept.write_text(json.dumps(failed))
    monkeypatch.setattr(second_look, "LAST_FAILED", kept)
    monkeypatch.setattr(second_look, "passes_alone", lambda _: alone)
    assert second_look.main() == status


def test_nothing_is_known_of_a_run_that_kept_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(second_look, "LAST_FAILED", tmp_path / "lastfailed")
    assert second_look.main() == 1


def test_the_rooms_are_there():
    rooms = {path.parts[1] for path in second_look.Path("tests").glob("*/**/test_*.py")}
    assert rooms >= second_look.WAITS_FOR_PROCESSES
