"""``python -m kvd.demo.daemon serve ...``: ``kvd``, but it ends when the demo does, however.

A daemon must outlive whoever started it; these two must not, even if the demo is killed outright.
"""

from __future__ import annotations

import ctypes
import signal

from kvd.cli import main

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send us SIGTERM when the parent's thread that started us ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main()
