"""How late the event loop of a daemon is, from outside: its own histogram at /metrics, twice.

A daemon's beat, every 50 ms, records how late it came (``kvd_loop_lag_seconds``). Two readings give
the beats between them. A bucket tells a lag to within its bounds, so a percentile is the upper
bound of the bucket in which it lies: never less than the truth.
"""

from __future__ import annotations

import http.client
import math
import re
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import socket

_BUCKET: Final = re.compile(r'^kvd_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


class Beats(msgspec.Struct, frozen=True):
    """Beats by how late they were: ``at_most[i]`` of them by at most ``bounds_s[i]``."""

    bounds_s: tuple[float, ...]
    at_most: tuple[float, ...]

    @property
    def count(self) -> int:
        """All of them."""
        return int(self.at_most[-1])

    def since(self, earlier: Beats) -> Beats:
        """Only those after ``earlier``."""
        pairs = zip(self.at_most, earlier.at_most, strict=True)
        return Beats(self.bounds_s, tuple(now - then for now, then in pairs))

    def plus(self, other: Beats) -> Beats:
        """Those of two daemons, or of two times, together."""
        pairs = zip(self.at_most, other.at_most, strict=True)
        return Beats(self.bounds_s, tuple(one + two for one, two in pairs))

    def percentile_s(self, share: float) -> float:
        """The bound under which ``share`` of them lie; NaN if there are none."""
        if not self.count:
            return math.nan
        wanted = share * self.count
        return next(
            bound
            for bound, count in zip(self.bounds_s, self.at_most, strict=True)
            if count >= wanted
        )


def read_beats(connection: socket.socket) -> Beats:
    """All beats of the daemon at the other end of ``connection``, which is closed."""
    link = http.client.HTTPConnection("daemon")
    link.sock = connection
    try:
        link.request("GET", "/metrics", headers={"Connection": "close"})
        text = link.getresponse().read().decode()
    finally:
        link.close()
    found = [(float(bound), float(count)) for bound, count in _BUCKET.findall(text)]
    return Beats(tuple(bound for bound, _ in found), tuple(count for _, count in found))
