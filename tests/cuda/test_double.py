"""What the double does and no test can make a real device do: late, broken, orphaned, undefined."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess

import numpy as np
import pytest

from kvd.device.cuda import CALLS, Runtime
from kvd.device.cuda_library import load
from tests.cuda.double import compiled
from tests.gpu import face
from tests.gpu.face import Face, address_of
from tests.gpu.memory import FILLED, PIECE, lone

QUIET = {
    *("cudaRuntimeGetVersion", "cudaDriverGetVersion", "cudaGetLastError"),
    "cudaThreadExchangeStreamCaptureMode",
}
"""Calls that tell of no error of before."""


@pytest.fixture
def painted(host):
    """The host's memory, each piece with a number of its own."""
    for number in range(16):
        host[number * PIECE : (number + 1) * PIECE] = 101 + number
    return host


def scattered(device: int, host: np.ndarray, count: int = 16) -> list[tuple[int, int, int]]:
    """Pieces that go where they were."""
    low = address_of(host)
    return [(device + at * PIECE, low + at * PIECE, PIECE) for at in range(count)]


def firsts(runtime: Face, device: int) -> list[int]:
    """The first byte of each piece."""
    return runtime.read(device, 16 * PIECE)[::PIECE].tolist()


# ---- what it is told to do -----------------------------------------------------------------------


def test_the_next_call_fails_and_the_one_after_does_not(double, runtime, device):
    double.fail_next(face.LAUNCH_FAILURE)

    first = runtime.call("cudaMemset", device, 9, PIECE)

    assert first == face.LAUNCH_FAILURE
    assert firsts(runtime, device)[0] == FILLED
    runtime.fill(device, 9, PIECE)


def test_a_copy_that_breaks_leaves_a_part_and_the_process_has_no_device_any_more(
    double, runtime, device, painted, stream, monkeypatch
):
    monkeypatch.setenv("DOUBLE_SEED", "1")
    double.break_next(3 * PIECE + 100)
    try:
        assert runtime.batch(stream, scattered(device, painted)) == face.OK, "it was only begun"
        ended = runtime.call("cudaStreamSynchronize", stream)
        later = runtime.call("cudaMemset", device, 9, PIECE)
    finally:
        double.poison(0)
    found = runtime.read(device, 16 * PIECE)

    assert ended == later == face.LAUNCH_FAILURE
    assert np.count_nonzero(found != FILLED) == 3 * PIECE + 100


def test_a_poisoned_process_is_told_by_every_call(double, runtime):
    double.poison(face.ILLEGAL_ADDRESS)
    try:
        room = [ctypes.create_string_buffer(4096) for _ in range(3)]
        told = {name: runtime.call(name, *room[: len(CALLS[name])]) for name in CALLS}
        taken = [runtime.call("cudaGetLastError") for _ in range(2)]
    finally:
        double.poison(0)

    assert {name for name, number in told.items() if number != face.ILLEGAL_ADDRESS} <= QUIET
    assert taken == [face.ILLEGAL_ADDRESS] * 2, "taking it does not end it"


# ---- order and time ------------------------------------------------------------------------------


def test_copies_of_a_batch_are_done_in_an_order_of_the_seed(double):
    """What broke in the middle shows what came first; of a seed it is the same each time."""
    program = """
        import itertools
        lib = ctypes.CDLL(os.environ["CUDART_LIBRARY"])
        with cuda.registered(1 << 16) as host, cuda.stream() as stream:
            host[:] = 1
            low = address_of(host)
            pieces = [(device + at * 4096, low + at * 4096, 4096) for at in range(16)]
            lib.double_break_next(ctypes.c_size_t(4096))
            cuda.batch(stream, pieces)
            cuda.call("cudaStreamSynchronize", stream)
            lib.double_poison(0)
            found = cuda.read(device, 1 << 16)[::4096].tolist()
            say(found.index(1))
        os._exit(0)
    """
    found = {}
    for seed in ("1", "2", "3", "4", "5"):
        runs = {lone(os.fspath(double.path), program, DOUBLE_SEED=seed).stdout for _ in range(2)}
        assert len(runs) == 1, "of a seed it is always alike"
        found[seed] = runs.pop()

    assert len(set(found.values())) > 1, found


def test_a_copy_is_late_and_nothing_says_that_it_is_there_before(
    runtime, device, painted, stream, monkeypatch
):
    monkeypatch.setenv("DOUBLE_LATE_US", "200000")
    runtime.batch(stream, scattered(device, painted))
    assert runtime.call("cudaStreamQuery", stream) == face.NOT_READY

    runtime.good("cudaStreamSynchronize", stream)

    assert firsts(runtime, device) == list(range(101, 117))


def test_streams_that_block_wait_for_the_default_stream_and_it_for_them(runtime, device, host):
    low = address_of(host)
    blocking = runtime.made("cudaStreamCreateWithFlags", 0)
    with runtime.held(blocking):
        runtime.good("cudaMemcpyAsync", device, low, PIECE, face.ANY_WAY, blocking)
        runtime.good("cudaMemset", device, 77, PIECE)
        assert runtime.call("cudaStreamQuery", 0) == face.NOT_READY
    runtime.good("cudaDeviceSynchronize")

    assert firsts(runtime, device)[0] == 77
    runtime.good("cudaStreamDestroy", blocking)


def test_a_batch_whose_pieces_depend_on_one_another_is_refused(runtime, device, host, stream):
    low = address_of(host)
    chained = [(device, low, PIECE), (low + PIECE, device, PIECE)]
    twice = [(device, low, PIECE), (device + 100, low + PIECE, PIECE)]
    read_twice = [(device, low, PIECE), (device + PIECE, low, PIECE)]

    assert runtime.batch(stream, chained) == face.INVALID_VALUE
    assert runtime.batch(stream, twice) == face.INVALID_VALUE
    assert runtime.batch(stream, read_twice) == face.OK
    runtime.good("cudaStreamSynchronize", stream)


@pytest.mark.parametrize("name", ["cudaStreamQuery", "cudaEventQuery", "cudaEventDestroy"])
def test_a_handle_that_is_none_any_more_is_told(runtime, name):
    stream = runtime.made("cudaStreamCreateWithFlags", face.NON_BLOCKING)
    runtime.good("cudaStreamDestroy", stream)
    event = runtime.made("cudaEventCreateWithFlags", face.DISABLE_TIMING)
    runtime.good("cudaEventDestroy", event)

    assert runtime.call(name, stream if "Stream" in name else event) == face.INVALID_HANDLE


def test_an_event_is_recorded_in_streams_of_its_device_alone(runtime):
    with runtime.event() as event:
        runtime.good("cudaSetDevice", 1)
        with runtime.stream() as other:
            assert runtime.call("cudaEventRecord", event, other) == face.INVALID_HANDLE
        runtime.good("cudaSetDevice", 0)


# ---- who is gone ---------------------------------------------------------------------------------

SHARED = """
fd = int(sys.argv[1])
import mmap, signal
import numpy as np
pool = np.frombuffer(mmap.mmap(fd, 1 << 20), np.uint8)
cuda.good("cudaHostRegister", address_of(pool), 1 << 20, 0)
stream = cuda.made("cudaStreamCreateWithFlags", 1)
cuda.batch(stream, [(address_of(pool), device, 1 << 20)])
import time
time.sleep(0.2)
say("begun")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("outlives", [True, False])
def test_a_copy_lands_after_its_caller_was_killed_and_reaped(double, outlives):
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 2**20)
    pool = np.frombuffer(mmap.mmap(fd, 2**20), np.uint8)
    settings = {"DOUBLE_LATE_US": "4000000", "DOUBLE_SEED": "3"}

    done = lone(
        os.fspath(double.path),
        SHARED,
        str(fd),
        fds=(fd,),
        **settings,
        DOUBLE_OUTLIVES=str(int(outlives)),
    )

    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "begun\n"), done.stderr
    assert not pool.any(), "its caller is gone, and nothing has landed"
    os.close(fd)
    if outlives:
        assert landed(pool), "it never landed"


def landed(pool: np.ndarray) -> bool:
    """Whether bytes come within ten seconds."""
    with subprocess.Popen(["sleep", "10"]) as clock:
        while clock.poll() is None:
            if pool.all():
                clock.kill()
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                clock.wait(0.02)
    return False


def test_a_process_that_was_forked_has_no_device(double):
    done = lone(
        os.fspath(double.path),
        """
        child = os.fork()
        if not child:
            os._exit(cuda.call("cudaMemset", device, 1, 16))
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )

    assert done.stdout == "3\n", done.stderr


def test_a_runtime_of_before_has_no_batch_and_serves(tmp_path):
    old = compiled(tmp_path, "WITHOUT_BATCH")

    assert isinstance(load(old.environment), Runtime)
    assert not hasattr(ctypes.CDLL(os.fspath(old.path)), "cudaMemcpyBatchAsync")
