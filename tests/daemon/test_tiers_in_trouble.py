"""A real daemon and a real disk of which everything fails in turn: found is what belongs there.

More of it: ``KVD_TROUBLE_SEEDS=100 python -m pytest tests/daemon/test_tiers_in_trouble.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvd.harness.child import ChildFailed
from kvd.storage.sizes import HEAD_BYTES
from tests.daemon.test_tiers import (
    LIMIT_S,
    N_PROMPTS,
    OBJECT_BYTES,
    PROMPT_TOKENS,
    Tiered,
    settings,
)
from tests.support.daemons import Daemon, DaemonFailed
from tests.support.disks import LoopDisk, loop_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEEDS = int(os.environ.get("KVD_TROUBLE_SEEDS", "2"))
STEPS = 25
DISK_OBJECTS = 220
"""There is room for so many on the file system; the tier may have more than that:"""
MOST_OBJECTS = 300


FILES_BYTES = 3 * 2**20
"""What a file system takes for itself."""


@pytest.fixture
def disk(tmp_path) -> Iterator[LoopDisk]:
    """A file system of its own for the tier."""
    with loop_disk(tmp_path / "tier", DISK_OBJECTS * OBJECT_BYTES + FILES_BYTES) as found:
        yield found


class Trouble:
    """What may happen to a tier, each at any time."""

    def __init__(self, tiered: Tiered, disk: LoopDisk, source: random.Random) -> None:
        self.tiered = tiered
        self.disk = disk
        self.place = disk.place
        self.source = source
        self.frozen: list[int] = []
        self.done: list[str] = []
        self.kinds: tuple[Callable[[], None], ...] = (
            *(self.kill_storage, self.freeze_storage, self.kill_daemon, self.stop_daemon),
            *(self.cut, self.damage, self.swap, self.lose, self.fill, self.protect, self.heal),
            *(self.slow, self.hang),
        )

    def happen(self) -> None:
        kind = self.source.choice(self.kinds)
        self.done.append(kind.__name__)
        kind()

    def _object(self) -> Path | None:
        objects = self.tiered.objects()
        return self.source.choice(objects) if objects else None

    def _storage(self) -> int:
        with contextlib.suppress(ChildFailed, DaemonFailed):
            return self.tiered.daemon.storage_pid()
        return 0

    def kill_storage(self) -> None:
        pid = self._storage()
        if pid:
            os.kill(pid, signal.SIGKILL)

    def freeze_storage(self) -> None:
        pid = self._storage()
        if pid:
            os.kill(pid, signal.SIGSTOP)
            self.frozen.append(pid)

    def kill_daemon(self) -> None:
        self.tiered.daemon.kill()
        self.start()

    def stop_daemon(self) -> None:
        self.thaw()  # a disk that hangs delays a stop by its bound, which is another test
        self.tiered.daemon.stop()
        self.start()

    def start(self) -> None:
        self.disk.thaw()  # else the one before has its lock still, which is another test
        self.tiered.start()
        for pid in filter(None, [self.tiered.daemon.pid, self._storage()]):
            self.disk.take(pid)

    def slow(self) -> None:
        self.disk.forget()
        self.disk.read_at(self.source.choice((1, 4, 40)) * OBJECT_BYTES)

    def hang(self) -> None:
        self.disk.thaw()  # it may be frozen once only
        self.disk.freeze()

    def cut(self) -> None:
        self._spoil(lambda path: os.truncate(path, self.source.randrange(OBJECT_BYTES)))

    def damage(self) -> None:
        def flip(path: Path) -> None:
            with path.open("r+b") as file:
                file.seek(self.source.choice((0, 30, HEAD_BYTES + 1000)))
                file.write(b"damaged")

        self._spoil(flip)

    def swap(self) -> None:
        other = self._object()
        if other is not None:
            self._spoil(lambda path: path.write_bytes(other.read_bytes()))

    def lose(self) -> None:
        self._spoil(lambda path: path.unlink())

    def _spoil(self, how: Callable[[Path], object]) -> None:
        self.disk.thaw()  # or who writes there hangs too
        for _ in range(3):
            path = self._object()
            # It may go meanwhile, and the disk may be read-only or full.
            with contextlib.suppress(OSError):
                if path is not None:
                    how(path)

    def fill(self) -> None:
        self.disk.thaw()
        free = shutil.disk_usage(self.place).free
        with contextlib.suppress(OSError):
            (self.place / "writing" / "filler").write_bytes(
                bytes(max(0, free - self.source.randrange(OBJECT_BYTES)))
            )

    def protect(self) -> None:
        self._remount("ro")

    def heal(self) -> None:
        self.thaw()
        self.disk.read_at(0)
        self._remount("rw")
        with contextlib.suppress(OSError):
            (self.place / "writing" / "filler").unlink()

    def _remount(self, how: str) -> None:
        self.disk.thaw()
        # Refused while somebody writes: then nothing happens.
        subprocess.run(
            ["mount", "-o", f"remount,{how}", self.place], capture_output=True, check=False
        )

    def thaw(self) -> None:
        self.disk.thaw()
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.frozen.clear()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_to_a_disk_what_is_found_belongs_there(tmp_path, disk, seed):
    source = random.Random(seed)
    size = f"{MOST_OBJECTS * OBJECT_BYTES // 1024}KiB"
    sets = {"tiers.disk.size": size, "tiers.disk.wait_s": "1"}
    tiered = Tiered(Daemon("solo", tmp_path, settings(tmp_path, **sets)), tmp_path)
    trouble = Trouble(tiered, disk, source)
    trouble.start()
    tiered.fill()
    digests = dict(tiered.digests)
    found, longest_s = 0, 0.0
    try:
        for _ in range(STEPS):
            if source.random() < 0.5:
                trouble.happen()
            began_s = time.monotonic()
            number = source.randrange(N_PROMPTS)
            found += tiered.lease(number)  # compares every page
            tiered.compute(number)
            assert tiered.digests == digests
            longest_s = max(longest_s, time.monotonic() - began_s)
            assert len(tiered.objects()) <= MOST_OBJECTS
        trouble.heal()
        tiered.compute(0)
        tiered.until_found(0)
        tiered.until(lambda: tiered.tier.state == "serving", "does not serve again")
        tiered.assert_nothing_is_held()
    finally:
        trouble.thaw()
        tiered.daemon.stop()
        told = (f"seed {seed}: {found // PROMPT_TOKENS} prompts found", *trouble.done)
        sys.stderr.write(" ".join(told) + f"; the slowest took {longest_s:.1f} s\n")
    assert found
    assert longest_s < LIMIT_S
