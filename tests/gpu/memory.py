"""What the rules are tried on, and a process of its own for what kills or poisons one.

The fixtures are of whoever has a ``cuda``: ``tests/gpu`` a device, ``tests/cuda`` the double.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Final

import pytest

from kvd.device.cuda_library import VARIABLE
from tests.gpu.face import Face

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvd.device.cuda import Runtime

MIB: Final = 2**20
PIECE: Final = 64 * 2**10
FILLED: Final = 7
"""Every byte of ``device``."""

_BEGIN: Final = f"""
import ctypes, os, sys
from tests.gpu import face
from tests.gpu.face import Face, address_of, shared
cuda = Face(os.environ["{VARIABLE}"])
cuda.good("cudaSetDevice", 0)
device = cuda.made("cudaMalloc", {MIB})
cuda.fill(device, {FILLED}, {MIB})
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def runtime(cuda: Runtime) -> Face:
    """The runtime as it is, with the first device, and no error of before."""
    found = Face(cuda.path)
    if not cuda.has_batches:
        pytest.skip("a CUDA runtime of before 12.8 has no cudaMemcpyBatchAsync")
    found.good("cudaSetDevice", 0)
    found.call("cudaGetLastError")
    return found


@pytest.fixture
def device(runtime: Face) -> Iterator[int]:
    """A MiB of the device."""
    with runtime.memory(MIB) as address:
        runtime.fill(address, FILLED, MIB)
        yield address


@pytest.fixture
def stream(runtime: Face) -> Iterator[int]:
    with runtime.stream() as found:
        yield found


@pytest.fixture
def host(runtime: Face) -> Iterator[NDArray[np.uint8]]:
    """A MiB of registered memory, all 0."""
    with runtime.registered(MIB) as found:
        yield found


def lone(
    path: str, program: str, *words: str, fds: tuple[int, ...] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run it in a process that has the runtime there as ``cuda``, and a MiB as ``device``."""
    return subprocess.run(
        [sys.executable, "-c", _BEGIN + textwrap.dedent(program), *words],
        env={**os.environ, VARIABLE: path, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=fds,
    )
