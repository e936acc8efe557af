"""The binding of the CUDA runtime, against a double that is strict where the real one is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvd.device.cuda import HANDLE_BYTES, CudaError, MemorySide
from kvd.device.cuda_library import VARIABLE, NoCuda, candidates, load

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20


class Other:
    """A process that has opened a handle."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.said = self._line()

    def asks(self, line: str) -> str:
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()
        return self._line()

    def _line(self) -> str:
        return self.child.stdout.readline().strip()


@contextlib.contextmanager
def other(double, verb: str, device: int, handle: bytes) -> Iterator[Other]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cuda.other", verb, str(device), handle.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **double.environment},
    ) as child:
        try:
            yield Other(child)
        finally:
            child.stdin.close()


def content(cuda, address: int, size: int) -> bytes:
    found = ctypes.create_string_buffer(size)
    cuda.copy(ctypes.addressof(found), address, size)
    return found.raw


def test_a_runtime_says_what_there_is(cuda):
    assert (cuda.version(), cuda.driver_version(), cuda.device_count()) == ("12.8", "12.9", 2)
    assert cuda.bus_id(1) == "0000:02:00.0"
    assert cuda.device_at("0000:02:00.0") == 1
    assert cuda.room(1).total_bytes == 256 * MIB


def test_a_device_that_is_not_there_is_named_with_its_error(cuda):
    with pytest.raises(CudaError, match=r"choosing cuda:7: cudaErrorInvalidDevice \(101\)"):
        cuda.use(7)


def test_a_thread_gets_its_device_back_whatever_happened_meanwhile(cuda):
    cuda.use(0)
    with cuda.on(1):
        assert cuda._number("cudaGetDevice", "") == 1
    with contextlib.suppress(CudaError), cuda.on(1):
        cuda.free(12345)

    assert cuda._number("cudaGetDevice", "") == 0


def test_memory_is_zeroed_and_given_back(cuda):
    before = cuda.room(0).free_bytes
    address = cuda.allocate(0, 2 * MIB)
    try:
        assert content(cuda, address, 2 * MIB) == bytes(2 * MIB)
        assert cuda.side(address + MIB) is MemorySide.DEVICE
        assert cuda.room(0).free_bytes == before - 2 * MIB
    finally:
        cuda.free(address)
    assert cuda.room(0).free_bytes == before


def test_too_much_memory_is_an_error_with_numbers(cuda):
    with pytest.raises(CudaError, match=r"allocating 300 MiB on cuda:1: cudaErrorMemory") as found:
        cuda.allocate(1, 300 * MIB)
    assert found.value.number == 2


def test_another_process_sees_the_memory_and_writes_into_it(cuda, double):
    address = cuda.allocate(1, MIB)
    try:
        cuda.copy(address, id_of(b"kvd!"), 4)
        with other(double, "open", 1, cuda.share(address)) as engine:
            assert engine.said == "open"
            assert bytes.fromhex(engine.asks("read 4")) == b"kvd!"
            assert engine.asks("write 4 7") == "written"
            assert content(cuda, address, 4) == bytes([7] * 4)
            assert engine.asks("close") == "closed"
    finally:
        cuda.free(address)


@pytest.mark.parametrize(
    ("device", "spoil", "error"),
    [
        (0, lambda handle: handle, "cudaErrorInvalidDevice"),
        (1, lambda _: bytes(HANDLE_BYTES), "cudaErrorInvalidValue"),
        (1, lambda handle: handle[:-1], "cudaErrorInvalidValue"),
    ],
)
def test_a_handle_that_is_none_is_refused(cuda, double, device, spoil, error):
    address = cuda.allocate(1, MIB)
    try:
        with other(double, "open", device, spoil(cuda.share(address))) as engine:
            assert engine.said == error
    finally:
        cuda.free(address)


def test_only_a_whole_allocation_can_be_shared(cuda):
    address = cuda.allocate(0, MIB)
    try:
        with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
            cuda.share(address + 4096)
    finally:
        cuda.free(address)


def test_an_event_comes_when_its_stream_does_in_every_process(cuda, double):
    event = cuda.event(0)
    assert cuda.has_come(event), "never recorded"
    cuda.record(event, double.held())
    with other(double, "open_event", 0, cuda.share_event(event)) as transfer:
        assert (cuda.has_come(event), transfer.asks("has_come")) == (False, "False")
        double.let_come(event)
        assert (cuda.has_come(event), transfer.asks("has_come")) == (True, "True")
        double.break_event(event)
        assert transfer.asks("has_come") == "cudaErrorLaunchFailure"
    cuda.destroy(event)


def test_an_event_of_the_default_stream_comes_when_that_is_waited_for(cuda):
    event = cuda.event(1)
    cuda.record(event)
    cuda.synchronize()
    assert cuda.has_come(event)
    cuda.destroy(event)


def test_without_a_library_the_reason_says_what_was_tried(tmp_path):
    missing = str(tmp_path / "libcudart.so")
    found = load({VARIABLE: missing})
    assert isinstance(found, NoCuda)
    assert missing in found.why
    assert "install the NVIDIA driver" in found.sentence


def test_a_library_that_is_no_cuda_runtime_is_told_apart():
    found = load({VARIABLE: "libc.so.6"})
    assert isinstance(found, NoCuda)
    assert "is no CUDA runtime that kvd knows" in found.why


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("DOUBLE_COUNT_ERROR=100", "counting devices: cudaErrorNoDevice (100)"),
        ("DOUBLE_DEVICES=0", "finds no device"),
    ],
)
def test_a_host_whose_driver_finds_nothing_has_no_cuda(double, monkeypatch, setting, why):
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    found = load(double.environment)
    assert isinstance(found, NoCuda)
    assert why in found.why


def test_packages_are_looked_at_newest_first_before_the_loader(tmp_path):
    for package in ("nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/cu13/lib/libcudart.so.13"):
        (tmp_path / package).parent.mkdir(parents=True)
        (tmp_path / package).touch()
    found = list(candidates({}, [str(tmp_path)]))
    assert found[:2] == [
        str(tmp_path / "nvidia/cuda_runtime/lib/libcudart.so.12"),
        str(tmp_path / "nvidia/cu13/lib/libcudart.so.13"),
    ]
    assert found[2:] == ["libcudart.so.13", "libcudart.so.12", "libcudart.so"]


def id_of(content_: bytes) -> int:
    """The address of these bytes, as long as the caller holds them."""
    return ctypes.cast(ctypes.c_char_p(content_), ctypes.c_void_p).value
