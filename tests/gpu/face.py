"""The CUDA runtime as it is, by ctypes: every call returns its number, and nothing is mended.

The smallest face that the rules of ``test_rules`` can be written against, so that they say what a
runtime does and not what kvd makes of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

OK: Final = 0
INVALID_VALUE: Final = 1
INVALID_HANDLE: Final = 400
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713
LAUNCH_FAILURE: Final = 719
CAPTURE_UNSUPPORTED: Final = 900
CAPTURE_INVALIDATED: Final = 901
CAPTURE_IMPLICIT: Final = 906

HOST_TO_DEVICE, DEVICE_TO_HOST, ANY_WAY = 1, 2, 4
IN_STREAM_ORDER, DURING_CALL, IN_ANY_ORDER = 1, 2, 3
NON_BLOCKING: Final = 1
DISABLE_TIMING: Final = 2
UNREGISTERED, HOST, DEVICE = 0, 1, 2
CAPTURE_GLOBAL, CAPTURE_RELAXED = 0, 2
LEGACY: Final = 1
"""The legacy stream, by its other name; 0 is the first."""

_PROPERTIES_BYTES: Final = 4096
_NAME: Final = slice(0, 256)
_UUID: Final = slice(256, 272)
_WORD = ctypes.c_uint64
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Attributes(ctypes.Structure):
    """struct cudaMemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class Face:
    """One loaded runtime."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._kept: list[object] = []
        self.is_double = hasattr(self._library, "double_hold")
        self.major = self.number_of("cudaRuntimeGetVersion") // 1000

    def call(self, name: str, *arguments: object) -> int:
        """What it returns. Integers are passed as words of 64 bits, which fits any argument."""
        words = [_WORD(one) if isinstance(one, int) else one for one in arguments]
        return int(self._library[name](*words))

    def good(self, name: str, *arguments: object) -> None:
        """It succeeds."""
        number = self.call(name, *arguments)
        assert number == OK, f"{name} returned {number}"

    def number_of(self, name: str, *arguments: object) -> int:
        """What it writes where its first argument points to."""
        found = ctypes.c_int(-1)
        self.good(name, ctypes.byref(found), *arguments)
        return found.value

    def made(self, name: str, *arguments: object) -> int:
        """As ``number_of``, of a handle or an address."""
        found = _WORD(0)
        self.good(name, ctypes.byref(found), *arguments)
        return found.value

    # ---- what there is -----------------------------------------------------------------------

    def uuid(self, device: int) -> bytes:
        return self._properties(device)[_UUID]

    def name_of(self, device: int) -> str:
        """What it is called."""
        return self._properties(device)[_NAME].partition(b"\0")[0].decode()

    def _properties(self, device: int) -> bytes:
        found = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        name = "cudaGetDeviceProperties" + ("_v2" if self.major < 13 else "")
        self.good(name, found, device)
        return found.raw

    def side(self, address: int) -> int:
        """Of which kind the memory is."""
        found = (ctypes.c_int * 64)()
        self.good("cudaPointerGetAttributes", found, address)
        return found[0]

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        """Of the device of this thread."""
        address = self.made("cudaMalloc", size)
        yield address
        self.call("cudaFree", address)

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        found = self.made("cudaStreamCreateWithFlags", NON_BLOCKING)
        yield found
        self.call("cudaStreamDestroy", found)

    @contextlib.contextmanager
    def event(self) -> Iterator[int]:
        found = self.made("cudaEventCreateWithFlags", DISABLE_TIMING)
        yield found
        self.call("cudaEventDestroy", found)

    @contextlib.contextmanager
    def registered(self, size: int) -> Iterator[NDArray[np.uint8]]:
        """Shared memory of the host, registered."""
        found = shared(size)
        self.good("cudaHostRegister", address_of(found), size, 0)
        yield found
        self.call("cudaHostUnregister", address_of(found))

    @contextlib.contextmanager
    def held(self, stream: int) -> Iterator[threading.Event]:
        """Keep a stream from going on until the event is set, or the block ends."""
        go, begun = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            begun.set()
            go.wait(20.0)

        function = _HOST_FUNCTION(wait)
        self._kept.append(function)
        self.good("cudaLaunchHostFunc", stream, function, 0)
        assert begun.wait(20.0), "the stream did not come to it"
        try:
            yield go
        finally:
            go.set()

    # ---- copies ------------------------------------------------------------------------------

    def read(self, address: int, size: int) -> NDArray[np.uint8]:
        """What device memory holds."""
        found = np.zeros(size, np.uint8)
        self.good("cudaMemcpy", address_of(found), address, size, ANY_WAY)
        return found

    def fill(self, address: int, value: int, size: int) -> None:
        self.good("cudaMemset", address, value, size)
        self.good("cudaDeviceSynchronize")

    def batch(
        self,
        stream: int,
        pieces: Sequence[tuple[int, int, int]],
        *,
        order: int = IN_STREAM_ORDER,
        firsts: Sequence[int] = (0,),
        major: int | None = None,
    ) -> int:
        """cudaMemcpyBatchAsync of (to, from, size), by the signature of this runtime's major."""
        to, source, sizes = ((_WORD * len(pieces))(*row) for row in zip(*pieces, strict=True))
        attributes = (Attributes * len(firsts))(*(Attributes(order) for _ in firsts))
        known = (to, source, sizes, len(pieces), attributes)
        of = ((_WORD * len(firsts))(*firsts), len(firsts))
        failed = (ctypes.byref(_WORD(0)),) if (major or self.major) < 13 else ()
        return self.call("cudaMemcpyBatchAsync", *known, *of, *failed, stream)


def shared(size: int) -> NDArray[np.uint8]:
    """Fresh shared memory of the host, from a page's begin on."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def address_of(array: NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)
