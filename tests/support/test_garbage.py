"""What other tests have left fails none that comes later."""

from __future__ import annotations

import subprocess
import sys

LEFT_OPEN = """
import socket, sys, warnings

from tests.support.garbage import collect_of_others

class Cycle:
    def __init__(self):
        self.own, self.left_open = self, socket.socket()

warnings.simplefilter("error")
sys.unraisablehook = lambda told: print(repr(told.exc_value))
descriptor = Cycle().left_open.fileno()
collect_of_others()
try:
    socket.socket(fileno=descriptor)
except OSError:
    print("closed")
"""
"""In a process of its own: others of this one may have left more."""


def test_what_others_left_open_is_closed_without_a_word() -> None:
    command = [sys.executable, "-c", LEFT_OPEN]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout == "closed\n"
