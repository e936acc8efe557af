"""Processes of the demo end with whoever started them, even if that is killed outright."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send us SIGTERM when the parent's thread that started us ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
