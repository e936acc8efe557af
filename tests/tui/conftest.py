"""What every test of the console has: a pilot that waits until the app is still.

And for those of its link a daemon behind a socket, in this process or in one of its own.
"""

from __future__ import annotations

import time

import pytest

from tests.cli.admin_peer import Daemon
from tests.tui.links import answer, processes
from tests.tui.stillness import until_still
from tui.endpoint import Local


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's own pilot waits until the processor seems idle.

    That takes 20 ms or more each time; and where the machine is busy, it is over too early.
    """
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_still)
    monkeypatch.setattr("textual.app.wait_for_idle", until_still)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "admin.sock"


@pytest.fixture
def endpoint(path):
    return Local(f"ipc://{path}")


@pytest.fixture
def daemon(endpoint):
    one = Daemon(endpoint.endpoint)
    one.answer = answer
    yield one
    one.close()


@pytest.fixture
def process(endpoint):
    with processes(endpoint) as start:
        yield start
