"""Whether a thread finds a core when it wants one: what is done ahead, or for later, asks first."""

from __future__ import annotations

import os


class CoreWaits:
    """Whether the thread that made it finds a core when it wants one, as the kernel counts it."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # A kernel that does not count: then there is always a core.
            self._file = -1
        self._ran, self._waited = self._times()

    def is_scarce(self) -> bool:
        """Whether it has waited more than half as long as it ran, since this was asked last."""
        before_ran, before_waited = self._ran, self._waited
        self._ran, self._waited = self._times()
        return 2 * (self._waited - before_waited) > self._ran - before_ran

    def _times(self) -> tuple[int, int]:
        if self._file < 0:
            return 0, 0
        ran, waited, *_ = os.pread(self._file, 64, 0).split()
        return int(ran), int(waited)
