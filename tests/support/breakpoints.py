"""Real processes of a daemon that stop themselves at a step that a test names.

A daemon and its processes find a ``sitecustomize`` on the path that they inherit, so nothing of kvd
knows of this. It has each of their threads watched by a profile function. That looks for the
functions of ``steps``; at the one that was armed its process is stopped, as by SIGSTOP, all threads
together. What happens then is up to the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

PLACE = "BREAKPOINTS_OF_A_TEST"
"""In the environment: the directory by which both sides speak."""
ROOT = Path(__file__).parents[2]
PROCESSES = {"daemon": "serve", "storage": "kvd.storage.worker"}
"""By a word of their command line."""


class Step(NamedTuple):
    """Where a process is stopped: the ``nth`` time that a function begins or ends.

    Args:
        words: what has happened then.
        process: whose step it is, of ``PROCESSES``.
        at: ``file:function``.
        event: ``call``, ``return``, or ``c_call NAME`` of what it calls.
        of: a type that the function, or its caller, must have a value of.
    """

    words: str
    process: str
    at: str
    event: str
    nth: int = 1
    of: str = ""


class Breakpoints:
    """The test's side."""

    def __init__(self, directory: Path, steps: Sequence[Step]) -> None:
        self._directory = directory
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(f"import {__name__} as it\nit.install()\n")
        (directory / "steps").write_text(json.dumps(steps))

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Whoever is started within can be stopped."""
        path = f"{self._directory}:{ROOT}"
        before = {name: os.environ.get(name) for name in (PLACE, "PYTHONPATH")}
        os.environ[PLACE] = str(self._directory)
        os.environ["PYTHONPATH"] = ":".join(filter(None, (path, before["PYTHONPATH"])))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def arm(self, step: Step) -> None:
        """Whoever comes there next is stopped."""
        (self._directory / "reached").unlink(missing_ok=True)
        passing = self._directory / "arming"
        passing.write_text(json.dumps([step, time.monotonic()]))
        passing.rename(self._directory / "armed")

    def disarm(self) -> None:
        """Nobody is."""
        (self._directory / "armed").unlink(missing_ok=True)

    def stopped(self) -> int:
        """Who stands at the step that was armed last; 0: nobody yet."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self._directory / "reached").read_text())
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
        return 0


# ---- in the process that is stopped --------------------------------------------------------------


class _Watch:
    """A profile function, of all threads of one process."""

    def __init__(self, directory: str, process: str) -> None:
        self._directory = directory
        every = json.loads(Path(directory, "steps").read_text())
        steps = [Step(*step) for step in every]
        self._names = {step.at.partition(":")[2] for step in steps if step.process == process}
        self._process = process
        self._meant = ""
        self._left = 0

    def __call__(self, frame: FrameType, event: str, of_event: Any) -> None:
        if frame.f_code.co_name not in self._names:
            return
        try:
            armed = Path(self._directory, "armed").read_text()
        except FileNotFoundError:
            return
        step = Step(*json.loads(armed)[0])
        if step.process != self._process or not _is_at(step, frame, event, of_event):
            return
        if armed != self._meant:
            self._meant, self._left = armed, step.nth
        self._left -= 1
        if self._left:
            return
        os.unlink(Path(self._directory, "armed"))
        Path(self._directory, "reached").write_text(str(os.getpid()))
        # By this thread, so that it does not go on while the others are being stopped.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _is_at(step: Step, frame: FrameType, event: str, of_event: Any) -> bool:
    file, _, function = step.at.partition(":")
    if event.startswith("c_"):
        event = f"{event} {getattr(of_event, '__name__', '')}"
    if (function, event) != (frame.f_code.co_name, step.event):
        return False
    if not frame.f_code.co_filename.endswith(file):
        return False
    return not step.of or _has(step.of, frame) or (frame.f_back and _has(step.of, frame.f_back))


def _has(kind: str, frame: FrameType) -> bool:
    values = list(frame.f_locals.values())
    values += [each for value in values if isinstance(value, list) for each in value]
    return any(type(value).__name__ == kind for value in values)


def install() -> None:
    """Watch this process, where its steps are among those that may be armed."""
    for process, word in PROCESSES.items():
        if word in sys.orig_argv:
            watch = _Watch(os.environ[PLACE], process)
            threading.setprofile(watch)
            sys.setprofile(watch)
