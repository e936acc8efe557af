"""The CUDA runtime itself: what the binding promises, on a real device."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from kvd.device.copies import CopyStream, KnownMemory, Pieces, Stretch
from kvd.device.cuda import CudaError, MemorySide
from tests.gpu.conftest import DEVICE
from tests.gpu.face import address_of, shared

MIB = 2**20


def test_there_is_a_device_with_memory(cuda):
    room = cuda.room(DEVICE)

    assert cuda.device_count() >= 1
    assert 0 < room.free_bytes <= room.total_bytes
    assert cuda.device_at(cuda.bus_id(DEVICE)) == DEVICE
    assert float(cuda.driver_version()) >= float(cuda.version().partition(".")[0])


def test_memory_is_of_the_device_zeroed_and_copied_there_and_back(cuda, is_double):
    address = cuda.allocate(DEVICE, 4 * MIB)
    try:
        assert is_double or cuda.side(address) is MemorySide.DEVICE
        back = np.ones(4 * MIB, np.uint8)
        assert cuda.side(back.ctypes.data) is MemorySide.HOST
        cuda.copy(back.ctypes.data, address, back.size)
        assert not back.any()
        out = np.random.default_rng(1).integers(0, 256, 4 * MIB, np.uint8)
        cuda.copy(address, out.ctypes.data, out.size)
        cuda.copy(back.ctypes.data, address, back.size)
        assert np.array_equal(out, back)
    finally:
        cuda.free(address)


def test_scattered_pieces_are_copied_both_ways_by_the_copy_engine(cuda):
    piece, pages = 64 * 2**10, 256
    size = pages * piece
    address, host = cuda.allocate(DEVICE, size), shared(size)
    known = KnownMemory(cuda)
    known.add(Stretch(address, size, "the device"))
    known.register(address_of(host), size)
    host[:] = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    before = host.reshape(pages, piece).copy()
    to, of = np.random.default_rng(4).permutation(pages).reshape(2, -1).astype(np.uint64)
    there, here = (
        at * np.uint64(piece) + np.uint64(base)
        for at, base in ((to, address), (of, address_of(host)))
    )
    stream = CopyStream(cuda, DEVICE, known)
    try:
        stream.begin(Pieces(there, here, np.full(to.size, piece, np.uint64)))
        stream.wait()
        host[:] = 0
        stream.begin(Pieces(here, there, np.full(to.size, piece, np.uint64)))
        stream.wait()

        back = host.reshape(pages, piece)
        assert np.array_equal(back[of], before[of])
        assert not np.delete(back, of, 0).any()
    finally:
        stream.close()
        known.forget(address_of(host))
        cuda.free(address)


def test_too_much_memory_is_refused_and_the_device_goes_on(cuda):
    with pytest.raises(CudaError, match="cudaErrorMemoryAllocation"):
        cuda.allocate(DEVICE, cuda.room(DEVICE).total_bytes * 2)
    cuda.free(cuda.allocate(DEVICE, MIB))


def other(verb: str, handle: bytes) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cuda.other", verb, str(DEVICE), handle.hex()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(os.environ))


def asked(child: subprocess.Popen[str], line: str) -> str:
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_another_process_opens_the_memory_and_writes_into_it(cuda):
    address = cuda.allocate(DEVICE, 2 * MIB)
    try:
        with other("open", cuda.share(address)) as child:
            assert child.stdout.readline() == "open\n"
            assert asked(child, "write 4096 7") == "written"
            assert asked(child, "close") == "closed"
            found = ctypes.create_string_buffer(4096)
            cuda.use(DEVICE)
            cuda.copy(ctypes.addressof(found), address, 4096)
            assert found.raw == bytes([7]) * 4096
            child.stdin.close()
    finally:
        cuda.free(address)


def test_an_event_is_seen_by_another_process(cuda):
    event = cuda.event(DEVICE)
    cuda.record(event)
    cuda.synchronize()
    with other("open_event", cuda.share_event(event)) as child:
        assert child.stdout.readline() == "open\n"
        assert asked(child, "has_come") == "True"
        child.stdin.close()
    cuda.destroy(event)
