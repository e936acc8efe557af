"""What every test of the console has: a pilot that waits until the app is still."""

from __future__ import annotations

import pytest

from tests.tui.stillness import until_still


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's own pilot waits until the processor seems idle.

    That takes 20 ms or more each time; and where the machine is busy, it is over too early.
    """
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_still)
    monkeypatch.setattr("textual.app.wait_for_idle", until_still)
