"""The binding held against a real CUDA runtime and its headers, where a toolkit is installed.

That needs no GPU: a runtime without a driver takes every call and refuses it by name.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.device import cuda
from kvd.device.cuda import CALLS, HANDLE_BYTES, CudaError, Runtime
from kvd.device.cuda_library import candidates

GPU = Path(__file__).parents[1] / "gpu"
HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda_runtime_api.h"))
PROBE = """
#include <stddef.h>
#include <stdio.h>
#include <cuda_runtime_api.h>
int main(void) {
    printf("%zu %zu %d %d %d %d %d %d %zu\\n", sizeof(cudaIpcMemHandle_t),
           sizeof(cudaIpcEventHandle_t), cudaEventDisableTiming | cudaEventInterprocess,
           cudaIpcMemLazyEnablePeerAccess, cudaMemcpyDefault, cudaErrorNotReady,
           cudaMemoryTypeDevice, cudaMemoryTypeManaged, sizeof(struct cudaPointerAttributes));
#if CUDART_VERSION >= 12080
    printf("%zu %zu %d %d\\n", sizeof(struct cudaMemcpyAttributes),
           offsetof(struct cudaMemcpyAttributes, flags), cudaMemcpySrcAccessOrderStream,
           cudaStreamNonBlocking);
#else
    printf("24 20 1 1\\n");
#endif
    return 0;
}
"""


@pytest.fixture
def real() -> Runtime:
    """Not the double: whatever is installed."""
    for path in candidates({}, sys.path):
        try:
            return Runtime(ctypes.CDLL(path), path)
        except OSError:
            continue
    pytest.skip("no CUDA runtime is installed here")


def test_a_real_runtime_has_every_entry_point(real):
    assert re.fullmatch(r"1[0-9]\.[0-9]+", real.version())


def test_a_real_runtime_has_every_call_that_the_rules_are_written_with(real):
    texts = [(GPU / name).read_text() for name in ("face.py", "test_rules.py")]
    named = {name for text in texts for name in re.findall(r'"(cuda[A-Z]\w+)"', text)}
    library = ctypes.CDLL(real.path)

    assert len(named) > 20
    assert not [name for name in sorted(named) if not hasattr(library, name)]


def test_every_call_is_taken_and_refused_by_name_where_there_is_no_driver(real):
    if real.driver_version() != "0.0":
        pytest.skip("there is a driver: tests/gpu goes on from here")
    handle = bytes(HANDLE_BYTES)
    room = ctypes.create_string_buffer(64)
    at = ctypes.addressof(room)
    calls = {
        "cudaGetDeviceCount": real.device_count,
        "cudaDeviceGetPCIBusId": lambda: real.bus_id(0),
        "cudaDeviceGetByPCIBusId": lambda: real.device_at("0000:01:00.0"),
        "cudaSetDevice": lambda: real.use(0),
        "cudaMemset": lambda: real.zero(at, 8),
        "cudaPointerGetAttributes": lambda: real.side(at),
        "cudaMemcpy": lambda: real.copy(at, at + 8, 8),
        "cudaDeviceSynchronize": real.synchronize,
        "cudaIpcGetMemHandle": lambda: real.share(at),
        "cudaIpcOpenMemHandle": lambda: real.open(0, handle),
        "cudaIpcOpenEventHandle": lambda: real.open_event(0, handle),
        "cudaEventCreateWithFlags": lambda: real.event(0),
        "cudaHostRegister": lambda: real.register(at, 8),
        "cudaStreamCreateWithFlags": lambda: real.stream(0),
    }
    for name, call in calls.items():
        with pytest.raises(CudaError, match=r"cuda\w+ \(\d+\): CUDA driver") as found:
            call()
        assert found.value.name == "cudaErrorInsufficientDriver", name


@pytest.mark.skipif(not HEADERS, reason="no CUDA toolkit is installed here")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_arguments_are_as_many_and_as_wide_as_the_header_says(name):
    text = HEADERS[-1].read_text(errors="replace")
    found = re.search(rf"cudaError_t CUDARTAPI {name}\(([^;]*)\);", text)
    assert found, f"{name} is not in {HEADERS[-1]}"
    words = [] if found[1].strip() == "void" else found[1].split(",")

    assert len(words) == len(CALLS[name])
    for word, ours in zip(words, CALLS[name], strict=True):
        assert ctypes.sizeof(ours) == width(word), f"{name}: {word}"


def width(word: str) -> int:
    """Bytes of an argument by its declaration."""
    if "Handle_t handle" in word and "*" not in word:
        return HANDLE_BYTES
    if "*" in word or "cudaStream_t" in word or "cudaEvent_t" in word or "size_t" in word:
        return 8
    return 4


@pytest.mark.skipif(not HEADERS, reason="no CUDA toolkit is installed here")
def test_numbers_are_those_of_the_header(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text(PROBE)
    include = os.fspath(HEADERS[-1].parent)
    subprocess.run([compiler, "-I", include, "-o", str(program), str(source)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    numbers = [int(word) for word in said.split()]

    assert numbers[:8] == [
        HANDLE_BYTES,
        HANDLE_BYTES,
        cuda._EVENT_INTERPROCESS,
        cuda._LAZY_PEER_ACCESS,
        cuda._COPY_DEFAULT,
        cuda._NOT_READY,
        2,
        3,
    ]
    assert numbers[8] <= cuda._ATTRIBUTES_BYTES
    assert numbers[9:] == [
        ctypes.sizeof(cuda._Attributes),
        cuda._Attributes.flags.offset,
        cuda._IN_STREAM_ORDER,
        cuda._NON_BLOCKING,
    ]


@pytest.mark.skipif(not HEADERS, reason="no CUDA toolkit is installed here")
def test_a_batch_has_the_arguments_of_its_major():
    text = HEADERS[-1].read_text(errors="replace")
    version = re.search(r"define CUDART_VERSION\s+(\d+)", text)
    found = re.search(rf"cudaError_t CUDARTAPI {cuda.BATCH}\(([^;]*)\);", text)
    if not found:
        pytest.skip("these headers are of before CUDA 12.8")
    words = [word.split()[-1].strip("*") for word in found[1].split(",")]

    has_fail_index = int(version[1]) // 1000 < cuda._WITHOUT_FAIL_INDEX
    assert words[len(cuda._BATCH_ARGUMENTS) :] == ["failIdx", "stream"][not has_fail_index :]
    for word, ours in zip(found[1].split(","), cuda._BATCH_ARGUMENTS, strict=False):
        assert ctypes.sizeof(ours) == width(word), word
