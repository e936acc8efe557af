"""The log: one line per event, and the only place that writes one.

Every event is a tagged struct; its tag is the line's ``event`` and its fields are the line's
fields, so a new event needs nothing here unless its level is not ``info``. Lines go to the
standard error, where journald or a terminal takes them: JSON for programs, columns for people.

Invariants: a line that cannot be written is counted, never raised, because the log must not stop
what it describes; the next one that can be comes after a line that says how many are lost; an
event below the level costs one look-up; the loop never waits for whoever reads the log.

Whoever reads the log may stop reading: a pager, a stopped terminal, a full pipe. The loop of the
daemon must not stop with them: a thread writes, and a bounded queue is between. What does not fit
is lost and counted, and told when there is room. The thread gathers what comes for ``GATHER_S``
before it writes, so that a busy loop wakes it some fifty times a second and not with each line. A
line of level warning or above is written at once, and with it all that were before it. So a daemon
that is killed may lose the lines below warning of its last ``GATHER_S``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger


CLOSE_PATIENCE_S = 1.0

GATHER_S = 0.02
"""A line below warning waits so long for others to be written with."""

RANKS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

LEVELS = {
    "lease-opened": "debug",
    "lease-extended": "debug",
    "lease-written": "debug",
    "lease-committed": "debug",
    "lease-released": "debug",
    "evicted": "debug",
    "waiting": "debug",
    "moved": "debug",
    "demoted": "debug",
    "promoted": "debug",
    "agent-changed": "debug",
    "slow-path": "warning",
    "quarantined": "warning",
    "pages-corrupt": "warning",
    "peer-suspect": "warning",
    "peer-lost": "warning",
    "peer-refused": "warning",
    "handshake-failed": "warning",
    "message-refused": "warning",
    "recording-ended": "warning",
    "client-hung-up-on": "warning",
    "client-outlived": "warning",
    "drain-began": "warning",
    "peer-draining": "warning",
    "tier-down": "warning",
    "tier-away": "warning",
    "cache-thrashing": "warning",
    "floor-broken": "warning",
    "config-refused": "warning",
    "violation": "error",
    "violation-healed": "warning",
    "crashed": "error",
    "watchdog-unfed": "error",
    "watchdog-fed": "warning",
}
"""Levels by tag: debug is what every request does, warning is what an operator may want to see."""


# Lines that are no events: they are written even when the core does not step.


class Crashed(msgspec.Struct, frozen=True, tag="crashed"):
    """A task of the daemon ended by an exception: a bug. ``exception`` is its traceback."""

    task: str
    error: str
    exception: str


class Unfed(msgspec.Struct, frozen=True, tag="watchdog-unfed"):
    """systemd's watchdog is not fed any more; unless ``why`` ends, it kills the daemon."""

    why: str


class Fed(msgspec.Struct, frozen=True, tag="watchdog-fed"):
    """It is fed again, after ``unfed_s``."""

    unfed_s: float


class LinesLost(msgspec.Struct, frozen=True, tag="lines-lost"):
    """So many lines before this one could not be written."""

    lines: int


class EventLog:
    """Writes events, each whole, through structlog: ``processors`` make its line.

    ``lost_lines`` is how many were not taken since one was last written. Without a ``spill`` lines
    go to ``stream`` at once, in whose hands it lies how long that takes.
    """

    def __init__(
        self, *, level: str, processors: Sequence[Processor], stream: TextIO, spill: Spill | None
    ) -> None:
        self._processors = processors
        self._spill = spill
        self._lines = structlog.WriteLogger(stream) if spill is None else SpillLogger(spill)
        self._kinds: dict[type[msgspec.Struct], tuple[int, str]] = {}
        self.lost_lines = 0
        self.set_level(level)

    def is_written(self, kind: type[msgspec.Struct]) -> bool:
        """Whether events of this kind are important enough."""
        return self._kind(kind)[0] >= self._threshold

    def write(self, event: msgspec.Struct) -> None:
        """Write one event, unless its level is below the configured one."""
        rank, tag = self._kind(type(event))
        if rank < self._threshold:
            return
        if self._spill is not None:
            self.lost_lines += self._spill.take_lost()
        try:
            if self.lost_lines:
                least = max(self._threshold, RANKS["warning"])
                self._logger.log(least, "lines-lost", struct=LinesLost(self.lost_lines))
                self.lost_lines = 0
            self._logger.log(rank, tag, struct=event)
        except (OSError, ValueError):  # the reader hung up, the disk is full, the file is closed
            self.lost_lines += 1

    def _kind(self, kind: type[msgspec.Struct]) -> tuple[int, str]:
        known = self._kinds.get(kind)
        if known is None:
            tag = str(kind.__struct_config__.tag)
            known = self._kinds[kind] = (RANKS[LEVELS.get(tag, "info")], tag)
        return known

    def set_level(self, level: str) -> None:
        """Write from this level on; whoever remembers ``is_written`` must ask again."""
        self._threshold = RANKS[level]
        # Bound once, not per line, and without structlog's global configuration.
        self._logger: FilteringBoundLogger = structlog.wrap_logger(
            self._lines,
            processors=self._processors,
            wrapper_class=structlog.make_filtering_bound_logger(self._threshold),
            context_class=dict,
        ).bind()

    def close(self) -> None:
        """Write what still waits, unless its reader does not read."""
        if self._spill is not None:
            self._spill.close(CLOSE_PATIENCE_S)

    def crashed(self, task: str, error: BaseException) -> None:
        """Write the traceback of a task that should not have ended."""
        trace = "".join(traceback.format_exception(error))
        self.write(Crashed(task=task, error=repr(error), exception=trace))


def configure(*, form: str, level: str, node: str, stream: TextIO | None = None) -> EventLog:
    """The log of this process.

    Args:
        form: ``console``, ``json``, or ``auto``: console if the stream is a terminal.
        level: the least important level that is written.
        node: this node's name, in every line.
        stream: written to at once; if left out, the standard error, by a thread that may wait for
            its reader while nobody else does.
    """
    spill = Spill(sys.stderr) if stream is None else None
    stream = sys.stderr if stream is None else stream
    processors: Sequence[Processor] = [JsonLines(node)]
    if form == "console" or (form == "auto" and stream.isatty()):
        processors = [
            Fields(node),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False),
        ]
    return EventLog(level=level, processors=processors, stream=stream, spill=spill)


# ---- lines ---------------------------------------------------------------------------------------


class Timestamps:
    """The present, as ISO 8601 in UTC with microseconds; the second is spelled once."""

    def __init__(self) -> None:
        self._second = -1
        self._spelled = ""

    def now(self) -> str:
        """The time as ISO 8601 in UTC; date and second are spelled once a second."""
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second = second
            self._spelled = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._spelled}.{nanoseconds // 1000:06d}Z"


class JsonLines:
    """The only processor of JSON: lines that begin with when, how important and what.

    An event is encoded as it is, and its tag, with which that begins, gives way to the head.
    structlog's own renderer takes fields, and a line by way of them takes twice as long.
    """

    def __init__(self, node: str) -> None:
        self._node = msgspec.json.encode(node).decode()
        self._time = Timestamps()
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, _logger: WrappedLogger, level: str, line: EventDict) -> str:
        """As ``Processor``."""
        tag = line["event"]
        body = self._encode(line["struct"])[len('{"type":""') + len(tag) :].decode()
        return (
            f'{{"timestamp":"{self._time.now()}","level":"{level}","event":"{tag}",'
            f'"node":{self._node}{body}'
        )


class Fields:
    """The first processor of columns: the fields of an event, and behind them the node.

    What a peer may have put into a text to move the cursor of whoever reads it is escaped.
    """

    def __init__(self, node: str) -> None:
        self._node = node

    def __call__(self, _logger: WrappedLogger, _level: str, line: EventDict) -> EventDict:
        """As ``Processor``."""
        fields = msgspec.to_builtins(line["struct"])
        del fields["type"]
        for name, value in fields.items():
            # A traceback has lines of its own; whoever raised it wrote them.
            if isinstance(value, str) and not value.isprintable() and name != "exception":
                fields[name] = value.encode("unicode_escape").decode()
        return {"event": line["event"], **fields, "node": self._node}


# ---- where they go -------------------------------------------------------------------------------

MAX_WAITING_CHARS = 4 * 2**20
"""Some twenty thousand lines."""


class SpillLogger:
    """Where structlog leaves a line: whoever reads the log should have a warning at once."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill

    def info(self, line: str) -> None:
        """Queue the line, to be written together with others."""
        self._spill.put(line + "\n")

    def warning(self, line: str) -> None:
        """Queue it, and have it written with all before it."""
        self._spill.put(line + "\n", is_urgent=True)

    debug = info
    error = warning


class Spill:
    """Writes lines to ``stream`` in the order given, from a thread of its own.

    The two threads share a queue, and each counts for itself: there is no lock where no one sleeps.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque()
        self._taken_chars = self._done_chars = 0
        """Counted by whoever puts, and by the thread: what is between is in memory."""
        self._refused = self._unwritten = self._told = 0
        """Lines lost: counted by whoever puts, and by the thread; and told of both."""
        self._is_closed = False
        self._is_asleep = False
        """The thread waits for a line, or is about to: who puts one must wake it."""
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, text: str, *, is_urgent: bool = False) -> None:
        """Queue a line; lost, and counted, where the reader is too far behind."""
        if self._taken_chars - self._done_chars + len(text) > MAX_WAITING_CHARS:
            self._refused += 1
            return
        self._taken_chars += len(text)
        self._waiting.append(text)
        if is_urgent:
            self._hurry.set()
        # Behind the line, which the thread looks for once it has said that it sleeps.
        if self._is_asleep:
            self._wake()

    def take_lost(self) -> int:
        """Lines lost since the last call."""
        lost = self._refused + self._unwritten - self._told
        self._told += lost
        return lost

    def close(self, patience_s: float) -> None:
        """Write what is left, for ``patience_s`` at most."""
        self._is_closed = True
        self._hurry.set()
        self._wake()
        self._thread.join(patience_s)

    def _wake(self) -> None:
        with self._changed:
            self._is_asleep = False
            self._changed.notify()

    def _run(self) -> None:
        waiting = self._waiting
        while True:
            with self._changed:
                self._is_asleep = True
                while not waiting and not self._is_closed:
                    self._changed.wait()
                self._is_asleep = False
            self._hurry.wait(GATHER_S)
            # Before the lines are taken: one that comes behind them is in a hurry of its own.
            if not self._is_closed:
                self._hurry.clear()
            if not waiting:
                return
            self._put_out([waiting.popleft() for _ in range(len(waiting))])

    def _put_out(self, lines: list[str]) -> None:
        """The lines count as waiting until they are written, for they are still in memory."""
        text = "".join(lines)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader hung up, the disk is full, the file is closed
            self._unwritten += len(lines)
        self._done_chars += len(text)


# structlog loads rich, for coloured tracebacks, wherever it finds it. Nobody here asks it for one,
# and a daemon would pay 4 MB and 60 ms of its start. Nothing is done where either is loaded.
if "rich" in sys.modules or "structlog" in sys.modules:
    import structlog
else:
    sys.modules["rich"] = None  # type: ignore[assignment]  # what makes an import of it fail
    try:
        import structlog
    finally:
        del sys.modules["rich"]

__all__ = ["structlog"]
