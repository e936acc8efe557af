"""The recorder process: it follows the ring, and saves when it is told to or when the daemon dies.

It is started by the daemon but outlives it on purpose: signals that are meant for the group do not
end it, the end of the daemon's socket does, after the file is written. It runs only when nobody
else wants the processor, until the daemon is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd.core.replay.thaw import thaw
from kvd.recorder import input_records, orders, player
from kvd.recorder.ring import RecordRing
from kvd.recorder.shadow_node import ShadowNode
from kvd.types import short

if TYPE_CHECKING:
    from kvd.recorder.recording import Header

LOOK_S: Final = 0.25
"""How long new records may lie in the ring before they are counted."""

TURN_S: Final = 0.05
"""How long it steps before it listens to the daemon again."""

TELL_S: Final = 2.0
"""How often it says how far back it reaches."""

KEPT_FILES: Final = 8
"""In the directory; the oldest goes. What kvd record --out has moved away stays."""

SUFFIX: Final = ".kvdrec"


class RecorderProcess:
    """One life of the recorder process."""

    def __init__(self, connection: socket.socket, ring: RecordRing, base: bytes) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        begin = orders.ORDERS.decode(connection.recv(orders.PACKET_BYTES))
        if not isinstance(begin, orders.BeginRecording):
            raise TypeError(f"the daemon began with {type(begin).__name__}")
        self._begin = begin
        self._ring = ring
        self._shadow = ShadowNode(thaw(base), ring, begin)
        self._is_over = False

    def run(self) -> None:
        """Follow the ring until the daemon says goodbye, or is gone."""
        tell_s = 0.0
        while not self._is_over:
            now_s = time.monotonic()
            self._shadow.look()
            if now_s >= tell_s:
                self._tell(self._shadow.covered())
                tell_s = now_s + TELL_S
            while self._shadow.is_due(now_s) and time.monotonic() < now_s + TURN_S:
                self._step()
            self._listen(0.0 if self._shadow.is_due(now_s) else LOOK_S)

    def _step(self) -> None:
        try:
            self._shadow.step()
        except (player.Strayed, input_records.Unknown) as error:
            self._tell(orders.ShadowStrayed(str(error)))
            raise

    def _listen(self, wait_s: float) -> None:
        if not self._poll.poll(wait_s * 1000):
            return
        try:
            packet = self._connection.recv(orders.PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            self._daemon_gone()
            return
        match orders.ORDERS.decode(packet):
            case orders.Save() as order:
                self._save(order)
            case orders.Goodbye() | orders.BeginRecording():
                self._is_over = True

    def _save(self, order: orders.Save) -> None:
        path = self._path(order.kind)
        report: orders.Report
        self._hurry()
        try:
            header = self._write(path, order.why, order.upto, order.state_hash)
        except OSError as error:
            report = orders.NotSaved(order.ticket, f"{path}: {error.strerror}")
        else:
            report = orders.SavedFile(
                ticket=order.ticket,
                path=str(path),
                why=order.why,
                seconds=header.seconds,
                inputs=header.inputs,
                n_bytes=path.stat().st_size,
            )
        self._tell(report)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def _hurry(self) -> None:
        """Somebody waits: compete for the processor like anybody, where that is allowed."""
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def _daemon_gone(self) -> None:
        self._is_over = True
        self._hurry()
        # Whoever waits for a next recording looks at the directory; there is nobody to tell.
        why = "the daemon ended without a goodbye: it was killed, or it crashed"
        self._write(self._path("crash"), why, self._ring.end, "")

    def _write(self, path: Path, why: str, upto: int, state_hash: str) -> Header:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = self._shadow.save(path, why, upto, state_hash)
        self._tidy(path.parent)
        return header

    def _path(self, kind: str) -> Path:
        now = datetime.datetime.now(datetime.UTC)
        name = f"{self._begin.node}-{kind}-{now:%Y%m%dT%H%M%S.%fZ}-{short(self._begin.incarnation)}"
        return Path(self._begin.directory) / f"{name}{SUFFIX}"

    def _tidy(self, directory: Path) -> None:
        """Keep the newest of what this node saved; times in names sort as they passed."""
        own = [
            (path.name.split("-")[-2], path)
            for kind in ("bug", "crash", "record")
            for path in directory.glob(f"{self._begin.node}-{kind}-*{SUFFIX}")
        ]
        for _, path in sorted(own)[:-KEPT_FILES]:
            path.unlink(missing_ok=True)

    def _tell(self, report: orders.Report) -> None:
        # It may be gone; or stopped, and its socket full. The poll finds out which.
        with contextlib.suppress(OSError):
            self._connection.send(orders.encode(report), socket.MSG_DONTWAIT)


def main(connection: int, ring: int, base: int) -> None:
    """Run on these descriptors; all others were closed by whoever started it."""
    for number in orders.DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, orders.DEAF_TO)
    with os.fdopen(base, "rb") as file:
        frozen = file.read()
    recorder = RecorderProcess(socket.socket(fileno=connection), RecordRing(ring), frozen)
    os.close(ring)
    recorder.run()
