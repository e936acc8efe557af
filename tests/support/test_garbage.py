"""What other tests have left fails none that comes later."""

from __future__ import annotations

import gc
import socket
import sys

import pytest

from tests.support.garbage import collect_of_others


class Cycle:
    """Freed by the collector only."""

    def __init__(self) -> None:
        self.own = self
        self.left_open = socket.socket()


def test_what_others_left_open_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: heard.append(repr(told.exc_value)))
    gc.disable()
    try:
        descriptor = Cycle().left_open.fileno()
        collect_of_others()
    finally:
        gc.enable()
    assert heard == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        socket.socket(fileno=descriptor).close()
