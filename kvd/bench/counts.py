"""What a call takes that is counted and not timed: its system calls, its messages.

What lives here: system calls of processes for as long as a block lasts, and messages of a daemon in
spans of time, as its flight recorder has them. What must not: anything that is timed, for a traced
process is many times slower.

Where strace may not be used, only ``syscr`` and ``syscw`` of /proc/PID/io are left: calls that read
and write. Those of sockets that are received and sent with calls of their own are not in it, so the
two ways cannot be compared, and whoever shows a figure says which one it is.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core import effects
from kvd.core.inputs import FromClient, FromPeer
from kvd.recorder import recording, replay
from kvd.recorder.input_records import input_of
from kvd.recorder.player import Player
from kvd.wire import admin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvd.harness.daemons import DaemonProcess

Span = tuple[float, float]
"""From, to: on the monotonic clock of the host."""

HASH_NOTHING: Final = 0
STRACE: Final = "strace -f -c"
ASK_AGAIN_S: Final = 0.2
READS_AND_WRITES: Final = "reads and writes of /proc/PID/io"


class SystemCalls:
    """Of some processes, by name. ``counts`` are there after the block of ``count``."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self.way = STRACE if _may_trace(*processes.values()) else READS_AND_WRITES
        """How they are counted."""
        self.counts: dict[str, int] = {}

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count the calls of the block."""
        if self.way == STRACE:
            with _traced(self._processes, self.counts):
                yield
            return
        before = {name: _reads_and_writes(pid) for name, pid in self._processes.items()}
        yield
        for name, pid in self._processes.items():
            self.counts[name] = _reads_and_writes(pid) - before[name]


@contextlib.contextmanager
def _traced(processes: Mapping[str, int], counts: dict[str, int]) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        files = {name: Path(directory) / str(pid) for name, pid in processes.items()}
        tracers = [_trace(pid, files[name]) for name, pid in processes.items()]
        try:
            yield
        finally:
            _end(tracers)
        counts.update((name, total_in(file.read_text("ascii"))) for name, file in files.items())


def _may_trace(*pids: int) -> bool:
    if shutil.which("strace") is None:
        return False
    with tempfile.NamedTemporaryFile(prefix="kvd-bench-") as file:
        ended = _end([_trace(pid, Path(file.name)) for pid in pids])
        # Asked to end it dies of that signal; refused, it has ended by itself.
        return all(status in {0, -signal.SIGINT} for status in ended)


def _end(tracers: list[subprocess.Popen[str]]) -> list[int]:
    """End them all, and wait for each; what they ended with."""
    for tracer in tracers:
        tracer.send_signal(signal.SIGINT)
    for tracer in tracers:
        # Asked while it looks at what it traces, it may forget, and then waits for the next stop.
        while tracer.poll() is None:
            tracer.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracer.wait(ASK_AGAIN_S)
        tracer.communicate()
    return [tracer.returncode for tracer in tracers]


def _trace(pid: int, file: Path) -> subprocess.Popen[str]:
    """A tracer that has attached, or has been refused."""
    tracer = subprocess.Popen(
        [*STRACE.split(), "-o", str(file), "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    tracer.stderr.readline()
    return tracer


def total_in(summary: str) -> int:
    """All calls of a summary of ``strace -c``; a process that made none has an empty one."""
    rows = [line.split() for line in summary.splitlines()]
    heads = [row for row in rows if "calls" in row]
    if not heads:
        return 0
    # "% time" are two words and one column.
    column = heads[0].index("calls") - 1
    return int(next(row for row in rows if row[-1:] == ["total"])[column])


def _reads_and_writes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["syscr"]) + int(fields["syscw"])


class MessageCount(msgspec.Struct):
    """Messages on the sockets of one daemon."""

    from_engines: int = 0
    to_engines: int = 0
    from_peers: int = 0
    to_peers: int = 0


def messages_of(daemon: DaemonProcess, spans: Sequence[Span]) -> list[MessageCount]:
    """What it took and sent in each of these spans; its recorder has to hold all of them.

    The recording has what came in; stepping it again makes what went out.
    """
    saved = daemon.ask(admin.Record(1, hash_objects=HASH_NOTHING), admin.Recorded)
    whole = recording.read(Path(saved.path))
    counts = [MessageCount() for _ in spans]
    player = Player(replay.begin(whole))
    for record in recording.records_in(whole.records):
        step = player.play(record)
        if step is None:
            continue
        happened = input_of(record)
        for (first_s, last_s), count in zip(spans, counts, strict=True):
            if not first_s <= record.at_s < last_s:
                continue
            count.from_engines += isinstance(happened, FromClient)
            count.from_peers += isinstance(happened, FromPeer)
            for effect in step.effects:
                count.to_engines += isinstance(effect, effects.AnswerEngine)
                count.to_peers += isinstance(effect, effects.SendToPeer)
    return counts
