"""Whether a process of before is still the one that it was: its pid, and when it started.

A pid alone proves nothing, since it is given again. Together with the start time, in clock ticks
since boot, it is one process for as long as the host runs.
"""

from __future__ import annotations

from pathlib import Path

from kvd.journal.engines import Process

_PROC = Path("/proc")
_ENDED = {"Z", "X"}
_STATE, _START_TICKS = 0, 19
"""Fields of ``/proc/PID/stat`` behind the name, which may hold spaces and brackets itself."""


def process_of(pid: int, proc: Path = _PROC) -> Process:
    """The process that has this pid now.

    Its ``start_ticks`` are 0 where it has ended; pid 0 where nobody can tell.
    """
    try:
        fields = _fields(pid, proc)
    except (FileNotFoundError, ProcessLookupError):
        return Process(pid, 0)
    except OSError:
        return Process(0, 0)
    return Process(pid, int(fields[_START_TICKS]))


def may_live(process: Process, proc: Path = _PROC) -> bool:
    """Whether it lives, or nobody can prove that it does not."""
    if not process.pid:
        return True
    try:
        fields = _fields(process.pid, proc)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return int(fields[_START_TICKS]) == process.start_ticks and fields[_STATE] not in _ENDED


def _fields(pid: int, proc: Path) -> list[str]:
    if not pid:
        raise PermissionError("a process of another pid namespace")
    text = (proc / str(pid) / "stat").read_text(errors="replace")
    return text[text.rindex(")") + 2 :].split()
