"""Two daemons under siege, the healthy engine beside it, and what a siege must not change."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.wire import admin
from tests.fault.fuzz_engine import Report
from tests.support.daemons import Daemon, Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvd.wire.snapshot import PeerState

SETTINGS = {
    "pool.layers": "2",
    "pool.heads": "1",
    "pool.head_dim": "16",
    "pool.pages": "4096",
    "admission.max_deadline_s": "4",
}
"""2 KiB a page, 8 MiB a pool: large enough that a few greedy sessions leave room for others."""
POOL_PAGES = 4096
SETTLE_S = 20.0
MOST_GROWTH_BYTES = 5 * 2**20
MOST_FDS = 3
"""Descriptors may come and go with ZMQ's connections."""
SLOWEST_MS = 1000.0
SIGNS_OF_BUGS = ("Traceback", "a bug of the daemon", "crashed", "Exception in callback")


class Size(msgspec.Struct, frozen=True):
    """What a daemon and its transfer process take."""

    daemon_bytes: int
    transfer_bytes: int
    transfer_pid: int
    fds: int


class Target:
    """``d`` is besieged; ``p`` is its peer."""

    def __init__(
        self, pair: Pair, engine: subprocess.Popen[bytes], captured: list[list[bytes]]
    ) -> None:
        self.pair = pair
        self.daemon = pair.decode
        self.other = pair.prefill
        self._engine = engine
        self.captured = captured
        """Messages of the healthy engine to ``d``: leases, a send, a receive."""

    def healthy(self) -> Report:
        """What the healthy engine saw since the last time."""
        assert self._engine.stdin is not None
        assert self._engine.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._engine.stdin.write(b"?")
            self._engine.stdin.flush()
        line = self._engine.stdout.readline()
        if not line:
            return Report(troubles=["the healthy engine has ended"])
        return msgspec.json.decode(line, type=Report)

    def healthy_until_handoff(self) -> Report:
        """As ``healthy``, but not before a handoff was delivered; a short siege may see none."""
        seen = self.healthy()
        deadline_s = time.monotonic() + SETTLE_S
        while not seen.handoffs_ms and not seen.troubles and time.monotonic() < deadline_s:
            time.sleep(0.05)
            more = self.healthy()
            seen = Report(
                seen.calls_ms + more.calls_ms,
                more.handoffs_ms,
                seen.retried + more.retried,
                more.troubles,
            )
        return seen

    def sizes(self) -> tuple[Size, Size]:
        """Of ``p`` and ``d``, once the connections that were hung up on are closed there too."""
        last = 0
        for _ in range(20):
            found = size_of(self.other), size_of(self.daemon)
            if sum(one.fds for one in found) == last:
                break
            last = sum(one.fds for one in found)
            time.sleep(0.1)
        return found

    def refused(self, counter: str) -> int:
        """What ``d`` has refused, as /metrics shows it; ``counter`` is a family, maybe a label."""
        family, _, label = counter.partition(" ")
        found = [
            value
            for name, value in self.metrics()
            if name.startswith(family + "{") and label in name
        ]
        return int(sum(found))

    def metrics(self) -> list[tuple[str, float]]:
        """Every series of ``d``."""
        url = f"http://127.0.0.1:{self.daemon.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return [(name, float(value)) for name, _, value in found]

    def wait_at_rest(self, within_s: float = SETTLE_S) -> list[str]:
        """Wait until only the healthy engine is left; what remains otherwise, in words."""
        left: list[str] = []
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            left = [what for one in (self.other, self.daemon) for what in leftovers(one)]
            if not left:
                return []
            time.sleep(0.05)
        return left

    def faults(self) -> list[str]:
        """What is broken now: the audit, the processes, the log, the conservation of pages."""
        found = []
        for one in (self.other, self.daemon):
            if not one.is_running:
                return [f"{one.name} has ended\n{one.quoted_log()}"]
            found += [f"{one.name}: {what}" for what in findings(one)]
            log = one._log.read_text(errors="replace")
            found += [f"{one.name}: {sign!r} in its log" for sign in SIGNS_OF_BUGS if sign in log]
            state = one.snapshot()
            pool = state.pools[0]
            total = 1 + pool.free_pages + pool.held_pages + pool.cached_pages
            if total + pool.quarantined_pages != pool.total_pages:
                found.append(f"{one.name}: {total} pages are {pool}")
            if state.totals.violations:
                found.append(f"{one.name}: {state.totals.violations} violations so far")
        return found


def findings(daemon: Daemon) -> tuple[str, ...]:
    """What an audit finds."""
    return daemon.ask(admin.Audit(1), admin.Report).refused


def leftovers(daemon: Daemon) -> list[str]:
    """What somebody else than the healthy engine has or waits for."""
    now = daemon.snapshot()
    left = [f"client {one.name}" for one in now.clients if one.name != "healthy"]
    left += [f"{one.waited_s:.1f} s waiting of {one.owner}" for one in now.waiting] * bool(left)
    left += [f"agent of {one.name}" for one in now.peers if one.name in "pd" and not _is_up(one)]
    left += [f"lease {one.id} of {one.owner}" for one in now.leases if "healthy" not in one.owner]
    return [f"{daemon.name}: {what}" for what in left]


def _is_up(one: PeerState) -> bool:
    return one.state == "up" and one.agent == "loaded"


def size_of(daemon: Daemon) -> Size:
    """Resident bytes without shared memory, and open descriptors."""
    fds = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    child = transfer_pid(daemon)
    return Size(anonymous_bytes(daemon.pid), anonymous_bytes(child), child, fds)


def transfer_pid(daemon: Daemon) -> int:
    """Of its transfer process, also while that is being restarted."""
    for _ in range(100):
        with contextlib.suppress(IndexError):
            return daemon.transfer_pid()
        time.sleep(0.05)
    return daemon.transfer_pid()


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: the pool is shared and does not count."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return 1024 * int(fields["RssAnon"].split()[0])


@contextlib.contextmanager
def besieged(
    directory: Path, settings: Mapping[str, str] | None = None, *, with_keys: bool = False
) -> Iterator[Target]:
    """Two daemons with the healthy engine at work, for as long as the block lasts."""
    with two_daemons(directory, {**SETTINGS, **(settings or {})}, with_keys=with_keys) as pair:
        command = [sys.executable, "-m", "tests.fault.fuzz_engine"]
        with subprocess.Popen(
            [*command, pair.prefill.client, pair.decode.client],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as engine:
            try:
                assert engine.stdout is not None
                begun = engine.stdout.readline()
                assert begun, "the healthy engine did not begin"
                yield Target(pair, engine, msgspec.json.decode(begun, type=Report).captured)
            finally:
                assert engine.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    engine.stdin.close()
                engine.wait(30)


def percentile(values: list[float], share: float) -> float:
    """Of a list that may be empty."""
    return float(np.percentile(values, 100 * share)) if values else 0.0
