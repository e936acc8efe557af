"""The double of the CUDA runtime (``cudart.c``), compiled by whoever needs it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.device.cuda import Runtime
from kvd.device.cuda_library import VARIABLE, load

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = Path(__file__).with_name("cudart.c")
STREAM = 1
"""What is recorded in it comes when ``let_come`` says so."""


class Double:
    """A compiled double, for this process and for those that get ``environment``."""

    def __init__(self, path: Path) -> None:
        self.environment: Mapping[str, str] = {VARIABLE: str(path)}
        found = load(self.environment)
        assert isinstance(found, Runtime), found
        self.runtime = found
        self._library = ctypes.CDLL(str(path))
        self._library.double_set.argtypes = (ctypes.c_void_p, ctypes.c_int)

    def let_come(self, event: int) -> None:
        self._library.double_set(event, 0)

    def break_event(self, event: int) -> None:
        """What the stream did before the event has failed."""
        self._library.double_set(event, 719)


def compiled(into: Path) -> Double:
    """Compile it, or skip the test where nobody can."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the double of the CUDA runtime cannot be built")
    path = into / "libcudart.so"
    flags = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
    subprocess.run([compiler, *flags, "-o", str(path), str(SOURCE)], check=True)
    return Double(path)


def memory_of_devices(pid: int) -> set[int]:
    """The inodes of the device memory that a process holds or maps."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:double-cuda " in line:
                found.add(int(line.split()[4]))
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if "/memfd:double-cuda " in os.readlink(fd):
                found.add(fd.stat().st_ino)
    return found


def holders(memory: set[int]) -> set[int]:
    """The processes that hold or map any of this device memory."""
    pids = [int(one.name) for one in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if memory_of_devices(pid) & memory}
