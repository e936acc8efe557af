"""The recorder process: it follows the ring, and saves when it is told to or when the daemon dies.

It is started by the daemon but outlives it on purpose: signals that are meant for the group do not
end it, the end of the daemon's socket does, after the file is written. It runs only when nobody
else wants the processor, until the daemon is gone.

    WATCHING --the oldest record must give way, or a file is wanted--> FOLLOWING
    FOLLOWING --all that was due is stepped, and the node is small--> WATCHING

WATCHING it counts what comes, and holds the node as the bytes that it was given: a third of the
memory. FOLLOWING it has loaded the core, and steps. Code is not unloaded, so it goes back by
executing itself anew: the number, the descriptors and what is ignored stay.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.recorder import orders
from kvd.recorder.kept_records import KeptRecords
from kvd.recorder.ring import RecordRing
from kvd.types import short

if TYPE_CHECKING:
    from kvd.recorder.recording import Header
    from kvd.recorder.shadow_node import ShadowNode

LOOK_S: Final = 0.25
"""How long new records may lie in the ring before they are counted."""

TURN_S: Final = 0.05
"""How long it steps before it listens to the daemon again."""

TELL_S: Final = 2.0
"""How often it says how far back it reaches."""

FULL_SHARE: Final = 0.75
"""Of the ring may be records; the rest is for what comes while a file is written."""

WATCHED_SHARE: Final = 0.5
"""And so much while it only watches: the core is loaded while the next ones come."""

WATCHED_TIMES: Final = 2.0
"""So many times as old as they have to be records may become before the core is loaded for them."""

SMALL_OBJECTS: Final = 2000
"""A larger node is not made bytes in passing: that would cost more time than it is worth."""

FOLLOWED_S: Final = 10.0
"""So long it follows at least before it goes back to watching."""

LARGE_S: Final = 60.0
"""Until it is asked again whether a large node has become small."""

KEPT_FILES: Final = 8
"""In the directory; the oldest goes. What kvd record --out has moved away stays."""

SUFFIX: Final = ".kvdrec"


class RecorderProcess:
    """One life of the recorder process."""

    def __init__(
        self,
        connection: socket.socket,
        ring: RecordRing,
        base: bytes,
        begin: orders.BeginRecording,
    ) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._begin = begin
        self._records = KeptRecords(ring, begin.at_s)
        self._base = base
        """The node before the oldest record, while it is not loaded."""
        self._shadow: ShadowNode | None = None
        self._watch_at_s = 0.0
        """When it may go back to watching."""
        self._is_over = False

    def run(self) -> None:
        """Follow the ring until the daemon says goodbye, or is gone."""
        tell_s = 0.0
        while not self._is_over:
            now_s = time.monotonic()
            self._records.look()
            if now_s >= tell_s:
                self._tell(self._records.covered())
                tell_s = now_s + TELL_S
            if self._is_due(now_s):
                self._follow(now_s)
            is_behind = self._is_due(now_s)
            if self._shadow is not None and not is_behind and self._may_watch(now_s):
                self._watch_again(self._shadow)
            self._listen(0.0 if is_behind else LOOK_S)

    def _is_due(self, now_s: float) -> bool:
        if self._shadow is None:
            keep_s = WATCHED_TIMES * self._begin.keep_s
            return self._records.is_due(now_s, keep_s=keep_s, full_share=WATCHED_SHARE)
        return self._records.is_due(now_s, keep_s=self._begin.keep_s, full_share=FULL_SHARE)

    def _may_watch(self, now_s: float) -> bool:
        """Whether it has followed for a while, and the ring will not be full at once again."""
        # Half of what ends watching: records as old as they have to be take twice as much by then.
        most = WATCHED_SHARE / 2 * self._records.ring.size
        return now_s >= self._watch_at_s and self._records.covered().n_bytes < most

    def _follow(self, now_s: float) -> None:
        """Step what is due, for a while."""
        from kvd.recorder.input_records import Unknown  # noqa: PLC0415 - see ``_loaded``
        from kvd.recorder.player import Strayed  # noqa: PLC0415

        shadow = self._loaded()
        try:
            while self._is_due(now_s) and time.monotonic() < now_s + TURN_S:
                shadow.step()
        except (Strayed, Unknown) as error:
            self._tell(orders.ShadowStrayed(str(error)))
            raise

    def _loaded(self) -> ShadowNode:
        """The shadow, made of its bytes where it has not been needed yet."""
        if self._shadow is None:
            # Here and not above: most of the time nothing of the core is needed.
            from kvd.core.replay.thaw import thaw  # noqa: PLC0415
            from kvd.recorder.shadow_node import ShadowNode  # noqa: PLC0415

            self._shadow = ShadowNode(thaw(self._base), self._records, self._begin)
            self._base = b""
            self._watch_at_s = time.monotonic() + FOLLOWED_S
        return self._shadow

    def _watch_again(self, shadow: ShadowNode) -> None:
        """Begin anew with the shadow as bytes, if it is small; return if not."""
        from kvd.core.replay.freeze import TooManyObjects  # noqa: PLC0415 - see ``_loaded``

        self._watch_at_s = time.monotonic() + LARGE_S
        try:
            base = shadow.frozen(SMALL_OBJECTS)
        except TooManyObjects:
            return
        begin = msgspec.structs.replace(self._begin, at_s=self._records.oldest_s)
        descriptor = os.memfd_create("kvd-recorder-base")
        try:
            os.pwrite(descriptor, base, 0)
            inherited = (self._connection.fileno(), self._records.ring.descriptor, descriptor)
            for kept in inherited:
                os.set_inheritable(kept, True)  # noqa: FBT003 - its only form
            os.execv(sys.executable, orders.command(inherited, begin))
        except OSError:  # it goes on as it is
            os.close(descriptor)

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
        self._write(self._path("crash"), why, self._records.ring.end, "")

    def _write(self, path: Path, why: str, upto: int, state_hash: str) -> Header:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = self._loaded().save(path, why, upto, state_hash)
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


def main(connection: int, ring: int, base: int, said: str = "") -> None:
    """Run on these descriptors; all others were closed by whoever started it."""
    for number in orders.DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, orders.DEAF_TO)
    with os.fdopen(base, "rb") as file:
        file.seek(0)
        frozen = file.read()
    link = socket.socket(fileno=connection)
    begin = orders.ORDERS.decode(bytes.fromhex(said) or link.recv(orders.PACKET_BYTES))
    if not isinstance(begin, orders.BeginRecording):
        raise TypeError(f"the daemon began with {type(begin).__name__}")
    RecorderProcess(link, RecordRing(ring), frozen, begin).run()
