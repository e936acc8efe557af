"""The pool outlives the daemon under systemd: engines go on, and what was cached still is.

One engine stays for all tests with one backing, so each daemon takes over from the one before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.systemd.conftest import take_down

CLIENT = "ipc:///run/kvd/client.sock"
JOURNAL_WORDS_AT = 4096
PROVEN = np.uint64(63)
"""The bit of a page's word in the journal that says: its content is proven."""
PAGES = 256

GOES_ON = {
    "is_new_daemon": True,
    "is_same_session": True,
    "is_same_memory": True,
    "cached_tokens": 320,
    "is_cached_exact": True,
    "is_held_exact": True,
}


@pytest.fixture(scope="module", params=["shm", "fdstore"])
def engine(guest, request):
    """Asks an engine that has cached and holds pages since before all tests with this backing."""
    take_down(guest)
    for directory in guest.path("/dev/shm").glob("kvd-*"):
        shutil.rmtree(directory)  # what daemons of other tests have cached
    backing = f"Environment=KVD_POOL__BACKING={request.param}"
    guest.drop_in("kvd.service", f"[Service]\nWatchdogSec=3s\n{backing}\n")
    guest.systemctl("start", "kvd")
    with guest.running_engine("stay", CLIENT) as ask:
        yield ask
    take_down(guest)


def main_pid(guest):
    """Of the daemon, as this host counts."""
    group = guest.path("/sys/fs/cgroup/system.slice/kvd.service/cgroup.procs")
    for pid in group.read_text("ascii").split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0kvd\0serve\0"):
                return int(pid)
    return None


def journal(guest):
    """Where its journal can be read: a file, or the memory that the daemon has open."""
    for file in guest.path("/dev/shm").glob("kvd-*/kvd.journal"):
        return file
    for link in Path(f"/proc/{main_pid(guest)}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:kvd:journal" in os.readlink(link):
                return link
    return None


def proven_pages(guest):
    """How many pages the journal proves."""
    words = np.fromfile(journal(guest), np.uint64, PAGES, offset=JOURNAL_WORDS_AT)
    return int(np.count_nonzero(words >> PROVEN))


def all_proven(guest):
    guest.until(lambda: proven_pages(guest) == 20, "the pages are not proven")


def test_an_engine_goes_on_over_a_killed_daemon(guest, engine):
    all_proven(guest)

    os.kill(main_pid(guest), signal.SIGKILL)

    assert engine() == GOES_ON
    assert guest.show("kvd", "NRestarts") == "1"


def test_an_engine_goes_on_over_a_restart(guest, engine):
    guest.systemctl("restart", "kvd")

    assert engine() == GOES_ON


def test_an_engine_goes_on_over_a_daemon_that_hangs(guest, engine):
    all_proven(guest)
    pid = guest.show("kvd", "MainPID")

    os.kill(main_pid(guest), signal.SIGSTOP)

    assert engine() == GOES_ON
    said = guest.journal("kvd")
    assert "Watchdog timeout (limit 3s)!" in said
    assert f"Killing process {pid} (python) with signal SIGABRT" in said


def test_a_stop_and_a_start_find_the_pool_in_files_and_not_in_the_store(guest, engine, request):
    guest.systemctl("stop", "kvd")
    guest.systemctl("start", "kvd")

    if "shm" in request.node.name:
        assert engine() == GOES_ON
    else:
        assert engine() == {"code": "pool-changed"}
