"""Pools in huge pages that were set apart, on a hugetlbfs of the test's own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.pools.arena import NotReserved
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.mounts import first_hugetlbfs, free_huge_bytes, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = 2 * 2**20
PAGES = 16
NUMBER = Path("/proc/sys/vm/nr_hugepages")
CHECKOUT = Path(__file__).parents[2]


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Sixteen of them, set apart for now; what the host had is put back."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a hugetlbfs of its own needs root, and unshare")
    with NUMBER.open("r+") as number:
        fcntl.flock(number, fcntl.LOCK_EX)
        before = int(NUMBER.read_text())
        try:
            with contextlib.suppress(OSError):
                NUMBER.write_text(str(before + PAGES))
            if free_huge_bytes(HUGE) < PAGES * HUGE:
                pytest.skip("this host has no 16 huge pages of 2 MiB to spare")
            yield
        finally:
            with contextlib.suppress(OSError):
                NUMBER.write_text(str(before))


def test_a_pool_in_huge_pages_is_made_found_locked_and_mapped(tmp_path: Path) -> None:
    """In a mount namespace, so that this host never sees the mount."""
    mount = tmp_path / "huge pages"
    mount.mkdir()
    script = 'mount -t hugetlbfs -o mode=1777 none "$1" && exec "$2" -m tests.pools.huge'
    with huge_pages():
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", mount, sys.executable],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if "permission denied" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("this host lets nobody mount a hugetlbfs")

    assert done.returncode == 0, done.stderr
    own = f"{mount}/kvd-{os.geteuid()}-run-kvd"
    assert json.loads(done.stdout) == {
        "life": {
            "made": ["made", f"made in {own}: there was none"],
            "sizes": [2 * HUGE],
            "found": ["found", "kept"],
            "taken": 3 * HUGE,
            "refused": f"the pool needs 370 MiB in {own}; 13 huge pages of 2 MiB are free on this "
            "host: raise vm.nr_hugepages (sysctl), or lower pool.pages or pool.size",
        },
        "mappings": {"address": 0, "bytes": HUGE, "seen": [7], "intact": True},
        "is_locked": True,
    }


MOUNTS = """\
22 1 0:21 / /proc rw - proc proc rw
30 1 0:33 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24684096k
41 1 0:40 / /dev/read\\040only ro - hugetlbfs none rw,pagesize=2M
42 1 0:41 / /dev/huge\\040pages rw,relatime shared:5 - hugetlbfs none rw,pagesize=2M
43 1 0:42 / /dev/later rw - hugetlbfs none rw,pagesize=1024M
"""


def test_the_first_hugetlbfs_that_may_be_written_to_is_taken(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)

    assert first_hugetlbfs(tmp_path) == Path("/dev/huge pages")
    assert [kind_of(os.makedev(0, minor), tmp_path) for minor in (33, 42, 99)] == [
        "tmpfs",
        "hugetlbfs",
        "unknown",
    ]


def test_without_a_hugetlbfs_there_is_a_way_out() -> None:
    if first_hugetlbfs() is not None:
        pytest.skip("this host has one mounted")

    with pytest.raises(NotReserved, match=r"^pool.backing = hugetlbfs needs a mounted hugetlbfs, "):
        PoolLocation(Backing.HUGETLBFS, None, "/run/kvd").path()
