"""The log: one line per event, and the only place that writes one.

Every event is a tagged struct; its tag is the line's ``event`` and its fields are the line's
fields, so a new event needs nothing here unless its level is not ``info``. Lines go to the
standard error, where journald or a terminal takes them: JSON for programs, columns for people.

Invariants: a line that cannot be written is counted, never raised, because the log must not stop
what it describes; the next one that can be comes after a line that says how many are lost; an
event below the level costs one look-up; the loop never waits for whoever reads the log.

Whoever reads the log may stop reading: a pager, a stopped terminal, a full pipe. The loop of the
daemon must not stop with them: a thread writes, and a bounded queue is between. What does not fit
is lost and counted, and told when there is room.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, TextIO, cast

import msgspec

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger


CLOSE_PATIENCE_S = 1.0

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
    "agent-changed": "debug",
    "quarantined": "warning",
    "pages-corrupt": "warning",
    "peer-suspect": "warning",
    "peer-lost": "warning",
    "peer-refused": "warning",
    "handshake-failed": "warning",
    "message-refused": "warning",
    "recording-ended": "warning",
    "client-hung-up-on": "warning",
    "drain-began": "warning",
    "peer-draining": "warning",
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


class EventLog:
    """Writes events. ``lost_lines`` is how many were not taken since one was last written."""

    def __init__(self, *, level: str, spill: Spill | None) -> None:
        self._spill = spill
        self._threshold = RANKS[level]
        self._ranks: dict[type[msgspec.Struct], int] = {}
        self._logger = structlog.get_logger().bind()  # resolved once, not per line
        self.lost_lines = 0

    def is_written(self, kind: type[msgspec.Struct]) -> bool:
        """Whether events of this kind are important enough."""
        return self._rank(kind) >= self._threshold

    def write(self, event: msgspec.Struct) -> None:
        """Write one event, unless its level is below the configured one."""
        rank = self._rank(type(event))
        if rank < self._threshold:
            return
        fields = msgspec.to_builtins(event)
        name = fields.pop("type")
        if self._spill is not None:
            self.lost_lines += self._spill.take_lost()
        try:
            if self.lost_lines:
                least = max(self._threshold, RANKS["warning"])
                self._logger.log(least, "lines-lost", lines=self.lost_lines)
                self.lost_lines = 0
            self._logger.log(rank, name, **fields)
        except (OSError, ValueError):  # the reader hung up, the disk is full, the file is closed
            self.lost_lines += 1

    def _rank(self, kind: type[msgspec.Struct]) -> int:
        rank = self._ranks.get(kind)
        if rank is None:
            level = LEVELS.get(str(kind.__struct_config__.tag), "info")
            rank = self._ranks[kind] = RANKS[level]
        return rank

    def set_level(self, level: str) -> None:
        """Write from this level on; whoever remembers ``is_written`` must ask again."""
        self._threshold = RANKS[level]
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(RANKS[level]))
        self._logger = structlog.get_logger().bind()

    def close(self) -> None:
        """Write what still waits, unless its reader does not read."""
        if self._spill is not None:
            self._spill.close(CLOSE_PATIENCE_S)

    def crashed(self, task: str, error: BaseException) -> None:
        """Write the traceback of a task that should not have ended."""
        trace = "".join(traceback.format_exception(error))
        self.write(Crashed(task=task, error=repr(error), exception=trace))


def configure(*, form: str, level: str, node: str, stream: TextIO | None = None) -> EventLog:
    """Set up structlog for this process, once, and give the log.

    Args:
        form: ``console``, ``json``, or ``auto``: console if the stream is a terminal.
        level: the least important level that is written.
        node: this node's name, in every line.
        stream: written to at once; if left out, the standard error, by a thread that may wait for
            its reader while nobody else does.
    """
    spill = None
    if stream is None:
        stream = sys.stderr
        spill = Spill(stream)
    sink = cast("TextIO", spill) if spill else stream
    is_console = form == "console" or (form == "auto" and stream.isatty())
    renderers: list[Processor] = [_json_line]
    if is_console:
        columns = structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False)
        renderers = [_printable, columns]

    def with_node(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
        fields["node"] = node
        return fields

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            with_node,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(RANKS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sink),
        cache_logger_on_first_use=False,
    )
    return EventLog(level=level, spill=spill)


def _printable(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
    """Escape what a peer may have put into a text to move the cursor of whoever reads it."""
    for name, value in fields.items():
        if isinstance(value, str) and not value.isprintable() and name != "exception":
            fields[name] = value.encode("unicode_escape").decode()
    return fields


def _json_line(_logger: WrappedLogger, _method: str, fields: EventDict) -> str:
    """One line of JSON that begins with when, how important and what."""
    head = {key: fields.pop(key) for key in ("timestamp", "level", "event", "node")}
    return msgspec.json.encode({**head, **fields}).decode()


MAX_WAITING_CHARS = 4 * 2**20
"""Some twenty thousand lines."""


class Spill:
    """Writes text to ``stream`` in the order given, from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []
        self._chars = 0
        self._lost = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a line; lost, and counted, where the reader is too far behind."""
        with self._changed:
            if self._chars + len(text) > MAX_WAITING_CHARS:
                self._lost += 1
            else:
                self._waiting.append(text)
                self._chars += len(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread flushes what it writes."""

    def take_lost(self) -> int:
        """Lines lost since the last call."""
        with self._changed:
            lost, self._lost = self._lost, 0
        return lost

    def close(self, patience_s: float) -> None:
        """Write what is left, for ``patience_s`` at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                lines, self._waiting = self._waiting, []
                if not lines:
                    return
            self._put(lines)

    def _put(self, lines: list[str]) -> None:
        """The lines count as waiting until they are written, for they are still in memory."""
        text = "".join(lines)
        try:
            self._stream.write(text)
            self._stream.flush()
            lost = 0
        except (OSError, ValueError):  # the reader hung up, the disk is full, the file is closed
            lost = len(lines)
        with self._changed:
            self._chars -= len(text)
            self._lost += lost


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
