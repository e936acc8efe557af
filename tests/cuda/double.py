"""The double of the CUDA runtime (``cudart.c``), compiled by whoever needs it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.device.cuda import Runtime
from kvd.device.cuda_library import VARIABLE, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = Path(__file__).with_name("cudart.c")
NIXL = Path(__file__).with_name("nixl")
"""On the path of a process, it has the double of NIXL for the real one."""


MOST_MEMORY = 4096


class Double:
    """A compiled double, for this process and for those that get ``environment``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: Mapping[str, str] = {VARIABLE: str(path)}
        found = load(self.environment)
        assert isinstance(found, Runtime), found
        self.runtime = found
        self._library = ctypes.CDLL(str(path))
        self._library.double_set.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._library.double_hold.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._library.double_break_next.argtypes = (ctypes.c_size_t,)
        self._held: dict[int, int] = {}

    def held(self, device: int = 0) -> int:
        """A stream that does nothing: what is recorded in it comes when ``let_come`` says so."""
        if device not in self._held:
            stream = ctypes.c_void_p(0)
            with self.runtime.on(device):
                assert not self._library.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
            self._library.double_hold(stream, 1)
            assert stream.value
            self._held[device] = stream.value
        return self._held[device]

    def hold(self, stream: int) -> None:
        """Nothing more of a stream is done, until ``release``."""
        self._library.double_hold(stream, 1)

    def release(self, stream: int) -> None:
        """It goes on."""
        self._library.double_hold(stream, 0)

    def let_go(self) -> None:
        """Held streams come to their ends: a device is waited for with all that is left in them."""
        for stream in self._held.values():
            self.release(stream)
        self._held.clear()

    def let_come(self, event: int) -> None:
        self._library.double_set(event, 0)

    def break_event(self, event: int) -> None:
        """What the stream did before the event has failed."""
        self._library.double_set(event, 719)

    def fail_next(self, number: int) -> None:
        """The next call of this process fails with this error."""
        self._library.double_fail_next(number)

    def break_next(self, after_bytes: int) -> None:
        """The next copy of this process fails when so much of it is done, and all calls after."""
        self._library.double_break_next(after_bytes)

    def poison(self, number: int) -> None:
        """Every call of this process fails with this error; 0 ends it."""
        self._library.double_poison(number)

    def memory(self) -> set[int]:
        """Device memory that this process has allocated and not freed."""
        found = (ctypes.c_void_p * MOST_MEMORY)()
        n = self._library.double_memory(found, MOST_MEMORY)
        return {address for address in found[:n] if address}

    def give_back(self, kept: set[int]) -> None:
        """Free all but that."""
        for address in self.memory() - kept:
            self.runtime.free(address)

    def reached(self, address: int, size: int) -> mmap.mmap:
        """The device memory that begins there, mapped once more, as this process's kernels see it.

        At its own address no processor reaches it.
        """
        _, _, _, fd = struct.unpack_from("=IIii", self.runtime.share(address))
        return mmap.mmap(fd, size)

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """This process stands for kernels: its processor reaches the memory that it opens now."""
        self._library.double_reach(1)
        try:
            yield
        finally:
            self._library.double_reach(0)


def compiled(into: Path, *defined: str) -> Double:
    """Compile it, or skip the test where nobody can; ``defined`` is for the preprocessor."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the double of the CUDA runtime cannot be built")
    path = into / "libcudart.so"
    flags = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
    names = [f"-D{name}" for name in defined]
    subprocess.run([compiler, *flags, *names, "-o", str(path), str(SOURCE)], check=True)
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
