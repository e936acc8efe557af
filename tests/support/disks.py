"""File systems of a size, for what fills a disk; and one whose disk is slow, or does not answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BLKIO = Path("/sys/fs/cgroup/blkio")
"""The first version of cgroups; the second one slows no loop device down."""


@contextlib.contextmanager
def small_disk(place: Path, n_bytes: int) -> Iterator[Path]:
    """A file system of its own there, in memory; skips where this user may mount nothing."""
    place.mkdir(mode=0o700)
    size = f"size={n_bytes},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this user may mount nothing here")
    try:
        yield place
    finally:
        unmount(place)


def protect(place: Path) -> None:
    """Let nothing be written there, until it is unmounted, whoever has something open there.

    By a second mount over the first.
    """
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def unmount(place: Path) -> None:
    """The uppermost of what is mounted there goes, whoever has it open."""
    subprocess.run(["umount", "-l", place], check=True)


class LoopDisk:
    """An ext4 in a file. What it does to whoever uses it is the kernel's own doing."""

    can_be_slow = BLKIO.is_dir()
    """Whether ``read_at`` does anything."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._cgroup = BLKIO / f"kvd-test-{os.getpid()}"
        self._device = os.stat(place).st_dev

    def take(self, pid: int) -> None:
        """Of this process and of those that it starts the reads can be made slow."""
        if not self.can_be_slow:
            return
        self._cgroup.mkdir(exist_ok=True)
        (self._cgroup / "cgroup.procs").write_text(str(pid))

    def read_at(self, bytes_per_s: int) -> None:
        """So fast and no faster, of what is not in memory; 0: as fast as it is."""
        if not self.can_be_slow:
            return
        device = f"{os.major(self._device)}:{os.minor(self._device)}"
        (self._cgroup / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_s}")

    def forget(self) -> None:
        """Nothing of it is in memory any more."""
        subprocess.run(["sync", "-f", self.place], check=True)
        for top, _, names in os.walk(self.place):
            for name in names:
                with contextlib.suppress(OSError):
                    fd = os.open(Path(top, name), os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)

    def freeze(self) -> None:
        """Whoever writes from now on hangs in the kernel, and no signal ends it."""
        subprocess.run(["fsfreeze", "--freeze", self.place], check=True)

    def thaw(self) -> None:
        """It answers again; what was wanted meanwhile is done."""
        subprocess.run(["fsfreeze", "--unfreeze", self.place], capture_output=True, check=False)

    def close(self) -> None:
        """Whoever was slowed down has ended."""
        self.thaw()
        unmount(self.place)
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()


@contextlib.contextmanager
def loop_disk(place: Path, n_bytes: int) -> Iterator[LoopDisk]:
    """Such a disk there; skips where this host has none to give."""
    if os.geteuid() or not shutil.which("fsfreeze"):
        pytest.skip("this user may mount nothing here, or has no fsfreeze")
    image = place.with_name(f"{place.name}.image")
    place.mkdir(mode=0o700)
    with image.open("wb") as file:
        file.truncate(n_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-N4096", "-O^has_journal", image], check=True)
    mounting = ["mount", "-o", "loop", image, place]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing here")
    place.chmod(0o700)
    disk = LoopDisk(place)
    try:
        yield disk
    finally:
        disk.close()
