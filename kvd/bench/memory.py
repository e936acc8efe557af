"""What the kernel says of a process: its memory, its huge pages, the time it computed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd.harness.child import ChildFailed

if TYPE_CHECKING:
    from kvd.harness.daemons import Pair

COLLAPSE_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
KIB: Final = 1024
_PROCESS_CPU: Final = 2


def resident(pid: int) -> dict[str, int]:
    """What a process has in memory now, by what is behind it.

    Shared memory is the pool here; anonymous memory and files (the interpreter and libraries, part
    of which other processes share) are what there is beyond it.
    """
    fields = _fields(f"/proc/{pid}/status")
    names = {"anonymous_bytes": "RssAnon", "file_bytes": "RssFile", "shared_bytes": "RssShmem"}
    return {name: fields[field] for name, field in names.items()}


def proportional_bytes(pid: int) -> int:
    """Its memory without the pool, where a page that n processes share counts as 1/n."""
    fields = _fields(f"/proc/{pid}/smaps_rollup")
    return fields["Pss_Anon"] + fields["Pss_File"]


def huge_bytes(pid: int) -> int:
    """Bytes of shared memory that the process has mapped as 2 MiB pages."""
    return _fields(f"/proc/{pid}/smaps_rollup")["ShmemPmdMapped"]


def busy_s(pid: int) -> float:
    """Seconds that all threads of a process have computed so far, also those that have ended.

    Raises:
        ChildFailed: it has ended.
    """
    # As clock_getcpuclockid(3) makes it: the clock of a process is read without a file.
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CPU)
    except OSError:
        raise ChildFailed(f"process {pid}, which was measured, has ended") from None


def switches(pid: int) -> int:
    """How often its threads have given up a core, or lost one."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends meanwhile
            lines = (task / "status").read_text("ascii").splitlines()
            found += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


def when_collapsed(pair: Pair, pool_bytes: int) -> None:
    """Return when both transfer processes see their whole pool in huge pages, or will not."""
    deadline_s = time.monotonic() + COLLAPSE_S
    while time.monotonic() < deadline_s:
        found = [huge_bytes(daemon.transfer_pid()) for daemon in (pair.prefill, pair.decode)]
        if all(size >= pool_bytes for size in found):
            return
        time.sleep(LOOK_EVERY_S)


def _fields(file: str) -> dict[str, int]:
    """The ``Name: n kB`` lines of a file of /proc, in bytes."""
    with open(file, encoding="ascii", errors="replace") as lines:
        pairs = (line.split() for line in lines)
        return {
            words[0].rstrip(":"): int(words[1]) * KIB
            for words in pairs
            if len(words) == 3 and words[2] == "kB"
        }
