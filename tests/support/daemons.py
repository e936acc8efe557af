"""Real daemons for tests: whoever in ``tests`` needs one takes it from here.

How a daemon is started and stopped is ``kvd.harness``, which ``kvd bench`` uses too.
"""

from __future__ import annotations

from kvd.harness.daemons import (
    HERE,
    LLAMA_8B,
    START_S,
    DaemonFailed,
    Pair,
    free_port,
    is_linked,
    one_daemon,
    two_daemons,
)
from kvd.harness.daemons import DaemonPlace as Place
from kvd.harness.daemons import DaemonProcess as Daemon

__all__ = [
    "HERE",
    "LLAMA_8B",
    "START_S",
    "Daemon",
    "DaemonFailed",
    "Pair",
    "Place",
    "free_port",
    "is_linked",
    "one_daemon",
    "two_daemons",
]
