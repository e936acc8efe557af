"""What the CUDA runtime does, rule by rule: the same tests for a real device and for the double.

``tests/cuda`` runs them against the double, as CUDA 12 and as CUDA 13. What kills a process, or
poisons it, is done in one of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from kvd.device.cuda_library import VARIABLE
from tests.gpu import face
from tests.gpu.face import Face, address_of, shared

MIB = 2**20
PIECE = 64 * 2**10
BEGIN = """
import ctypes, os, sys
from tests.gpu import face
from tests.gpu.face import Face, address_of, shared
cuda = Face(os.environ["CUDART_LIBRARY"])
cuda.good("cudaSetDevice", 0)
device = cuda.made("cudaMalloc", 1 << 20)
cuda.fill(device, 7, 1 << 20)
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture(scope="module")
def runtime(cuda):
    found = Face(cuda.path)
    if not hasattr(found._library, "cudaMemcpyBatchAsync"):
        pytest.skip("a CUDA runtime of before 12.8 has no cudaMemcpyBatchAsync")
    return found


@pytest.fixture(autouse=True)
def current(runtime):
    """The first device, and no error of before."""
    runtime.good("cudaSetDevice", 0)
    runtime.call("cudaGetLastError")


@pytest.fixture
def device(runtime):
    with runtime.memory(MIB) as address:
        runtime.fill(address, 7, MIB)
        yield address


@pytest.fixture
def stream(runtime):
    with runtime.stream() as found:
        yield found


@pytest.fixture
def host(runtime):
    with runtime.registered(MIB) as found:
        yield found


def lone(cuda, program: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, behind ``BEGIN``."""
    environment = {**os.environ, VARIABLE: cuda.path}
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(program)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("touch", ["ctypes.string_at(device, 1)", "ctypes.memset(device, 1, 1)"])
def test_a_processor_that_touches_device_memory_dies(cuda, runtime, device, touch):
    if runtime.side(device) != face.DEVICE:
        pytest.skip("the processor reaches this memory, which says so")

    done = lone(cuda, f"say('begun')\n{touch}\nsay('alive')")

    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "begun\n"), done.stderr


def test_the_kernel_takes_no_bytes_from_device_memory(runtime, device):
    if runtime.side(device) != face.DEVICE:
        pytest.skip("the processor reaches this memory, which says so")
    out, into = os.pipe()

    with pytest.raises(OSError, match="Bad address"):
        os.write(into, (ctypes.c_char * 16).from_address(device))
    for one in (out, into):
        os.close(one)


def test_the_runtime_tells_device_memory_from_registered_and_other_memory(runtime, device, host):
    other = shared(PIECE)

    assert runtime.side(device + MIB - 1) in {face.DEVICE, face.HOST}
    assert runtime.side(address_of(host) + PIECE) == face.HOST
    assert runtime.side(address_of(other)) == face.UNREGISTERED


def test_a_device_has_a_uuid_that_every_process_knows_it_by(cuda, runtime):
    mine = runtime.uuid(0)

    done = lone(cuda, "say(cuda.uuid(0).hex())")

    assert any(mine)
    assert done.stdout.strip() == mine.hex()


def test_memory_is_registered_once_and_unregistered_once(runtime):
    memory = shared(2 * PIECE)
    low = address_of(memory)

    runtime.good("cudaHostRegister", low, PIECE, 0)
    again = [runtime.call("cudaHostRegister", low + at, PIECE, 0) for at in (0, PIECE // 2)]
    runtime.good("cudaHostUnregister", low)
    after = runtime.call("cudaHostUnregister", low)

    assert again == [face.ALREADY_REGISTERED] * 2
    assert after == face.NOT_REGISTERED


def test_nothing_and_no_memory_cannot_be_registered(runtime):
    memory = shared(PIECE)

    assert runtime.call("cudaHostRegister", address_of(memory), 0, 0) == face.INVALID_VALUE
    assert runtime.call("cudaHostRegister", 0, PIECE, 0) == face.INVALID_VALUE


# ---- a batch -------------------------------------------------------------------------------------


def test_a_batch_copies_scattered_pieces_both_ways(runtime, device, host, stream):
    low = address_of(host)
    order = [3, 0, 2, 5]
    for number in range(8):
        host[number * PIECE : (number + 1) * PIECE] = number + 1
    onto = [(device + to * PIECE, low + number * PIECE, PIECE) for number, to in enumerate(order)]

    assert runtime.batch(stream, onto) == face.OK
    runtime.good("cudaStreamSynchronize", stream)
    found = runtime.read(device, MIB)
    back = [
        (low + (8 + number) * PIECE, device + to * PIECE, PIECE) for number, to in enumerate(order)
    ]
    assert runtime.batch(stream, back) == face.OK
    runtime.good("cudaStreamSynchronize", stream)

    for number, to in enumerate(order):
        assert (found[to * PIECE : (to + 1) * PIECE] == number + 1).all()
    assert (found[PIECE : 2 * PIECE] == 7).all(), "nobody's piece"
    assert (host[8 * PIECE : 12 * PIECE] == host[: 4 * PIECE]).all()


@pytest.mark.parametrize("legacy", [0, face.LEGACY])
def test_a_batch_is_never_of_the_legacy_stream(runtime, device, host, legacy):
    assert runtime.batch(legacy, [(device, address_of(host), PIECE)]) == face.INVALID_VALUE


def test_a_batch_with_an_empty_piece_is_refused_whole(runtime, device, host, stream):
    low = address_of(host)
    host[:] = 1

    number = runtime.batch(stream, [(device, low, PIECE), (device + PIECE, low + PIECE, 0)])

    assert number == face.INVALID_VALUE
    runtime.good("cudaStreamSynchronize", stream)
    assert (runtime.read(device, PIECE) == 7).all()


@pytest.mark.parametrize(
    ("order", "firsts"),
    [(0, (0,)), (9, (0,)), (1, (1,)), (1, (0, 0)), (1, (0, 2)), (1, (0, 1, 2))],
    ids=["no order", "unknown order", "not from the first", "twice", "beyond", "too many"],
)
def test_a_batch_whose_attributes_do_not_fit_is_refused(
    runtime, device, host, stream, order, firsts
):
    low = address_of(host)
    pieces = [(device, low, PIECE), (device + PIECE, low + PIECE, PIECE)]

    assert runtime.batch(stream, pieces, order=order, firsts=firsts) == face.INVALID_VALUE
    assert runtime.batch(stream, pieces, firsts=(0, 1)) == face.OK
    runtime.good("cudaStreamSynchronize", stream)


@pytest.mark.parametrize("start", [PIECE // 2, 3 * PIECE // 2], ids=["over two", "half of one"])
@pytest.mark.parametrize("way", ["(device, at, size)", "(at, device, size)"])
def test_a_range_over_two_registrations_or_half_of_one_is_refused(cuda, start, way):
    done = lone(
        cuda,
        f"""
        size = {PIECE}
        memory = shared(4 * size)
        low = address_of(memory)
        for register in (low, low + size):
            cuda.good("cudaHostRegister", register, size, 0)
        with cuda.stream() as stream:
            at = low + {start}
            say(cuda.batch(stream, [{way}]))
            inside = [(device, low, size), (device + size, low + size, size)]
            say(cuda.batch(stream, inside))
            say(cuda.call("cudaStreamSynchronize", stream))
        """,
    )

    numbers = [int(word) for word in done.stdout.split()]
    assert numbers == [face.INVALID_VALUE, face.OK, face.OK], done


def test_memory_that_is_not_registered_is_refused_in_stream_order(cuda, runtime):
    """CUDA's words leave it open: a runtime that takes it must bring the bytes."""
    done = lone(
        cuda,
        """
        memory = shared(4096)
        memory[:] = 1
        with cuda.stream() as stream:
            number = cuda.batch(stream, [(device, address_of(memory), 4096)])
            cuda.good("cudaStreamSynchronize", stream)
            say(number, *set(cuda.read(device, 4096).tolist()))
        """,
    )

    numbers = [int(word) for word in done.stdout.split()]
    refused = [face.INVALID_VALUE, 7]
    assert numbers == refused or (numbers == [face.OK, 1] and not runtime.is_double), done


def test_a_call_by_the_signature_of_the_other_major_copies_nothing(cuda, runtime):
    other = 12 if runtime.major >= 13 else 13
    done = lone(
        cuda,
        f"""
        with cuda.registered(4096) as host, cuda.stream() as stream:
            host[:] = 1
            number = cuda.batch(stream, [(device, address_of(host), 4096)], major={other})
            cuda.call("cudaStreamSynchronize", stream)
            say(number, set(cuda.read(device, 4096).tolist()))
        """,
    )

    number, _, bytes_ = done.stdout.strip().partition(" ")
    assert done.returncode != 0 or (int(number) != face.OK and bytes_ == "{7}"), done.stderr


@pytest.mark.parametrize("order", [face.IN_STREAM_ORDER, face.DURING_CALL, face.IN_ANY_ORDER])
def test_the_order_of_the_source_says_when_it_is_read(runtime, device, host, stream, order):
    host[:PIECE] = 1
    with runtime.held(stream):
        assert runtime.batch(stream, [(device, address_of(host), PIECE)], order=order) == face.OK
        host[:PIECE] = 2
    runtime.good("cudaStreamSynchronize", stream)

    (found,) = set(runtime.read(device, PIECE).tolist())

    # In any order it may have been read at any time: in the double, at the worst one.
    may = {face.IN_STREAM_ORDER: {2}, face.DURING_CALL: {1}, face.IN_ANY_ORDER: {1, 2}}[order]
    assert found in ({1} if runtime.is_double and order == face.IN_ANY_ORDER else may)


def test_a_batch_out_of_the_range_of_its_memory_is_never_done(cuda):
    """Refused, or the process is poisoned: every call fails from then on, for good."""
    done = lone(
        cuda,
        """
        with cuda.registered(1 << 21) as host, cuda.stream() as stream:
            number = cuda.batch(stream, [(device, address_of(host), 1 << 21)])
            say(number)
            say(cuda.call("cudaStreamSynchronize", stream))
            out = ctypes.c_uint64(0)
            say(cuda.call("cudaMalloc", ctypes.byref(out), 4096))
            say(cuda.call("cudaMemcpy", address_of(host), device, 4096, 4))
            say(cuda.call("cudaGetLastError"), cuda.call("cudaGetLastError"))
            os._exit(0)
        """,
    )

    words = [int(word) for word in done.stdout.split()]
    poisoned = [face.OK] + [face.ILLEGAL_ADDRESS] * 5
    assert words == poisoned or words[:2] == [face.INVALID_VALUE, face.OK], done


# ---- one copy ------------------------------------------------------------------------------------


def test_one_copy_out_of_the_range_of_its_memory_is_refused_and_nothing_is_lost(cuda):
    done = lone(
        cuda,
        """
        with cuda.registered(1 << 20) as host, cuda.stream() as stream:
            low = address_of(host)
            say(cuda.call("cudaMemcpy", device + 4096, low, 1 << 20, 4))
            say(cuda.call("cudaMemcpyAsync", device + 4096, low, 1 << 20, 4, stream))
            say(cuda.call("cudaStreamSynchronize", stream))
            say(*set(cuda.read(device, 1 << 20).tolist()))
        """,
    )

    numbers = [int(word) for word in done.stdout.split()]
    assert numbers == [face.INVALID_VALUE, face.INVALID_VALUE, face.OK, 7], done


def test_an_empty_copy_is_nothing(runtime, device, host, stream):
    runtime.good("cudaMemcpyAsync", device, address_of(host), 0, face.ANY_WAY, stream)
    runtime.good("cudaStreamSynchronize", stream)


def test_other_memory_may_be_written_over_once_it_was_given_away(runtime, device, stream):
    memory = shared(MIB)
    memory[:] = 1
    runtime.good("cudaMemcpyAsync", device, address_of(memory), MIB, face.HOST_TO_DEVICE, stream)
    memory[:] = 2
    runtime.good("cudaStreamSynchronize", stream)
    assert (runtime.read(device, MIB) == 1).all()

    runtime.good("cudaMemcpyAsync", address_of(memory), device, MIB, face.DEVICE_TO_HOST, stream)
    assert (memory == 1).all(), "it returns when they are there"


def test_a_copy_to_registered_memory_lands_when_its_stream_comes_to_it(
    runtime, device, host, stream
):
    low = address_of(host)
    host[:] = 1
    with runtime.held(stream):
        runtime.good("cudaMemcpyAsync", low, device, MIB, face.DEVICE_TO_HOST, stream)
        assert (host == 1).all()
        assert runtime.call("cudaStreamQuery", stream) == face.NOT_READY
    runtime.good("cudaStreamSynchronize", stream)

    assert (host == 7).all()
    assert runtime.call("cudaStreamQuery", stream) == face.OK


# ---- streams and events --------------------------------------------------------------------------


def test_a_stream_does_one_thing_after_the_other(runtime, device, host, stream):
    low = address_of(host)
    for number in range(16):
        host[number * PIECE : (number + 1) * PIECE] = number
        assert runtime.batch(stream, [(device, low + number * PIECE, PIECE)]) == face.OK
    runtime.good("cudaStreamSynchronize", stream)

    assert (runtime.read(device, PIECE) == 15).all()


def test_a_stream_does_not_wait_for_another(runtime, device, host, stream):
    host[:] = 1
    with runtime.stream() as other, runtime.held(stream):
        runtime.good(
            "cudaMemcpyAsync", device, address_of(host), PIECE, face.HOST_TO_DEVICE, stream
        )
        assert runtime.batch(other, [(device + PIECE, address_of(host), PIECE)]) == face.OK
        runtime.good("cudaStreamSynchronize", other)
        assert runtime.call("cudaStreamQuery", stream) == face.NOT_READY
    runtime.good("cudaStreamSynchronize", stream)


def test_an_event_comes_when_what_was_before_it_is_done(runtime, device, host, stream):
    with runtime.event() as event:
        assert runtime.call("cudaEventQuery", event) == face.OK, "never recorded"
        with runtime.held(stream):
            runtime.good("cudaEventRecord", event, stream)
            assert runtime.call("cudaEventQuery", event) == face.NOT_READY
        runtime.good("cudaEventSynchronize", event)
        assert runtime.call("cudaEventQuery", event) == face.OK
        with runtime.held(stream):
            runtime.good("cudaEventRecord", event, stream)
            assert runtime.call("cudaEventQuery", event) == face.NOT_READY, "recorded again"


def test_a_stream_that_waits_for_an_event_goes_on_behind_it(runtime, device, host, stream):
    host[:PIECE] = 1
    with runtime.stream() as other, runtime.event() as event:
        with runtime.held(stream):
            runtime.good("cudaEventRecord", event, stream)
            runtime.good("cudaStreamWaitEvent", other, event, 0)
            assert runtime.batch(other, [(device, address_of(host), PIECE)]) == face.OK
            time.sleep(0.02)
            assert runtime.call("cudaStreamQuery", other) == face.NOT_READY
            host[:PIECE] = 2
        runtime.good("cudaStreamSynchronize", other)

    assert (runtime.read(device, PIECE) == 2).all()


def test_a_stream_that_is_destroyed_brings_to_an_end_what_is_in_it(runtime, device, host):
    host[:] = 3
    stream = runtime.made("cudaStreamCreateWithFlags", face.NON_BLOCKING)
    with runtime.event() as event:
        with runtime.held(stream):
            assert runtime.batch(stream, [(device, address_of(host), PIECE)]) == face.OK
            runtime.good("cudaEventRecord", event, stream)
            runtime.good("cudaStreamDestroy", stream)
            assert runtime.call("cudaEventQuery", event) == face.NOT_READY
        runtime.good("cudaEventSynchronize", event)

    assert (runtime.read(device, PIECE) == 3).all()


def test_an_error_is_told_once_more_until_it_was_taken(runtime, device, host):
    assert runtime.batch(0, [(device, address_of(host), PIECE)]) == face.INVALID_VALUE

    told = [runtime.call(f"cuda{how}AtLastError") for how in ("Peek", "Peek")]
    taken = [runtime.call("cudaGetLastError") for _ in range(2)]

    assert told == [face.INVALID_VALUE] * 2
    assert taken == [face.INVALID_VALUE, face.OK]


def test_an_event_cannot_be_shared_and_timed(runtime):
    found = ctypes.c_uint64(0)
    both = 4  # cudaEventInterprocess without cudaEventDisableTiming
    number = runtime.call("cudaEventCreateWithFlags", ctypes.byref(found), both)
    assert number == face.INVALID_VALUE


# ---- a graph that is captured --------------------------------------------------------------------


def captured(runtime, stream) -> int:
    """End it; the number that ends it."""
    graph = ctypes.c_uint64(0)
    number = runtime.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    if graph.value:
        runtime.call("cudaGraphDestroy", graph.value)
    return number


def capture_status(runtime, stream) -> int:
    found = ctypes.c_int(-1)
    runtime.good("cudaStreamIsCapturing", stream, ctypes.byref(found))
    return found.value


def test_a_batch_in_a_stream_that_captures_is_refused_and_the_capture_goes_on(
    runtime, device, host, stream
):
    host[:] = 1
    assert capture_status(runtime, stream) == 0
    runtime.good("cudaStreamBeginCapture", stream, face.CAPTURE_RELAXED)
    number = runtime.batch(stream, [(device, address_of(host), PIECE)])
    status = capture_status(runtime, stream)

    assert (number, status) == (face.CAPTURE_UNSUPPORTED, 1)
    assert captured(runtime, stream) == face.OK
    assert (runtime.read(device, PIECE) == 7).all()


def test_a_copy_in_a_stream_that_captures_is_taken_and_not_done(runtime, device, host, stream):
    host[:] = 1
    runtime.good("cudaStreamBeginCapture", stream, face.CAPTURE_RELAXED)
    runtime.good("cudaMemcpyAsync", device, address_of(host), PIECE, face.ANY_WAY, stream)
    assert captured(runtime, stream) == face.OK
    runtime.good("cudaStreamSynchronize", stream)

    assert (runtime.read(device, PIECE) == 7).all()


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaStreamQuery"])
def test_a_stream_that_captures_can_be_neither_waited_for_nor_asked(runtime, stream, name):
    runtime.good("cudaStreamBeginCapture", stream, face.CAPTURE_RELAXED)
    number = runtime.call(name, stream)
    ended = captured(runtime, stream)

    assert number == face.CAPTURE_UNSUPPORTED
    assert ended == face.CAPTURE_INVALIDATED


def test_the_default_stream_is_out_of_use_while_a_stream_that_waits_for_it_captures(runtime):
    blocking = runtime.made("cudaStreamCreateWithFlags", 0)
    runtime.good("cudaStreamBeginCapture", blocking, face.CAPTURE_RELAXED)
    found = ctypes.c_int(-1)
    number = runtime.call("cudaStreamIsCapturing", face.LEGACY, ctypes.byref(found))
    ended = captured(runtime, blocking)
    runtime.good("cudaStreamDestroy", blocking)

    assert (number, ended) == (face.CAPTURE_IMPLICIT, face.OK)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cudaMalloc", (ctypes.byref(ctypes.c_uint64(0)), 4096)),
        ("cudaStreamSynchronize", "stream"),
        ("cudaStreamQuery", "stream"),
        ("cudaDeviceSynchronize", ()),
    ],
)
def test_what_waits_or_allocates_spoils_a_capture(runtime, stream, name, arguments):
    runtime.good("cudaStreamBeginCapture", stream, face.CAPTURE_GLOBAL)
    number = runtime.call(name, *((stream,) if arguments == "stream" else arguments))
    ended = captured(runtime, stream)

    assert number == face.CAPTURE_UNSUPPORTED
    assert ended == face.CAPTURE_INVALIDATED


PORTABLE = 1


# ---- threads and devices -------------------------------------------------------------------------


def test_a_stream_takes_copies_from_any_thread_and_is_asked_by_any(runtime, device, host, stream):
    host[:] = 1
    numbers = []

    def begin() -> None:
        numbers.append(runtime.call("cudaSetDevice", 0))
        numbers.append(runtime.batch(stream, [(device, address_of(host), PIECE)]))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    while (number := runtime.call("cudaStreamQuery", stream)) == face.NOT_READY:
        time.sleep(0.001)

    assert (numbers, number) == ([face.OK, face.OK], face.OK)
    assert (runtime.read(device, PIECE) == 1).all()


def test_memory_is_registered_beside_copies_that_are_under_way(runtime, device, host, stream):
    """As a pool is, part by part, while it serves: whether they wait for one another is open."""
    host[:] = np.arange(MIB, dtype=np.uint8)
    other = shared(8 * MIB)
    low = address_of(host)
    for _ in range(64):
        for at in range(0, MIB, MIB // 4):
            assert runtime.batch(stream, [(device + at, low + at, MIB // 4)]) == face.OK
    for at in range(0, 8 * MIB, MIB):
        runtime.good("cudaHostRegister", address_of(other) + at, MIB, PORTABLE)
    other[:] = 3
    pieces = [(address_of(other) + MIB, device, MIB)]
    assert runtime.batch(stream, pieces) == face.OK
    runtime.good("cudaStreamSynchronize", stream)
    for at in range(0, 8 * MIB, MIB):
        runtime.good("cudaHostUnregister", address_of(other) + at)

    assert np.array_equal(other[MIB : 2 * MIB], host)
    assert (np.delete(other, slice(MIB, 2 * MIB)) == 3).all()


def test_memory_that_one_device_registered_is_copied_by_every_other(runtime):
    if runtime.number_of("cudaGetDeviceCount") < 2:
        pytest.skip("there is one device")
    found = shared(MIB)
    found[:] = 1
    runtime.good("cudaHostRegister", address_of(found), MIB, PORTABLE)
    runtime.good("cudaSetDevice", 1)
    with runtime.memory(MIB) as other, runtime.stream() as stream:
        runtime.fill(other, 7, MIB)
        pieces = [(other, address_of(found), PIECE), (address_of(found) + PIECE, other + PIECE, 9)]
        number = runtime.batch(stream, pieces)
        runtime.good("cudaStreamSynchronize", stream)
        there = runtime.read(other, PIECE)
    runtime.good("cudaSetDevice", 0)
    runtime.good("cudaHostUnregister", address_of(found))

    assert number == face.OK
    assert (there == 1).all()
    assert (found[PIECE : PIECE + 9] == 7).all()
    assert (found[PIECE + 9 :] == 1).all()


@pytest.mark.parametrize("name", ["cudaStreamQuery", "cudaEventQuery", "cudaHostRegister"])
def test_a_thread_that_keeps_out_of_captures_spoils_none(runtime, device, host, stream, name):
    """So copies go on while an engine captures its graphs, in another thread."""
    other = runtime.made("cudaStreamCreateWithFlags", 1)
    event = runtime.made("cudaEventCreateWithFlags", 2)
    memory = shared(4096)
    arguments = {
        "cudaStreamQuery": (other,),
        "cudaEventQuery": (event,),
        "cudaHostRegister": (address_of(memory), 4096, 0),
    }
    found = []

    def keep_out() -> None:
        mode = ctypes.c_int(face.CAPTURE_RELAXED)
        runtime.good("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        found.append(mode.value)
        found.append(runtime.batch(other, [(device, address_of(host), PIECE)]))
        found.append(runtime.call("cudaEventRecord", event, other))
        found.append(runtime.call(name, *arguments[name]))

    runtime.good("cudaStreamBeginCapture", stream, face.CAPTURE_GLOBAL)
    thread = threading.Thread(target=keep_out)
    thread.start()
    thread.join()
    ended = captured(runtime, stream)
    runtime.good("cudaStreamSynchronize", other)
    if name == "cudaHostRegister":
        runtime.good("cudaHostUnregister", address_of(memory))
    runtime.good("cudaEventDestroy", event)
    runtime.good("cudaStreamDestroy", other)

    assert found[:3] == [face.CAPTURE_GLOBAL, face.OK, face.OK]
    assert found[3] in {face.OK, face.NOT_READY}
    assert ended == face.OK
