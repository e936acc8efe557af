"""The CUDA runtime, by ctypes: memory, its sharing between processes, copies, events and streams.

What lives here: one ``Runtime`` for one loaded libcudart, and the errors it gives, by name and
number. What must not: where a library is found (``cuda_library``), torch, what lies in the memory.

A piece of memory shared by an IPC handle belongs to the process that allocated it and ends with
it; whoever opens a handle has a mapping. Only the base of a plain ``cudaMalloc`` can be shared so:
memory of expandable segments cannot.

Every call that concerns a device makes it current first: what is current is a matter of a thread,
and calls come from several. Addresses are integers.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES: Final = 64
"""Of an IPC handle, of memory as of an event."""

_SUCCESS: Final = 0
_NOT_READY: Final = 600
_COPY_DEFAULT: Final = 4  # the runtime sees from the addresses which way a copy goes
_EVENT_UNTIMED: Final = 2
_EVENT_INTERPROCESS: Final = 2 | 4  # cudaEventDisableTiming, without which it cannot be shared
_CAPTURE_RELAXED: Final = 2
_LAZY_PEER_ACCESS: Final = 1
_NON_BLOCKING: Final = 1  # a stream that neither waits for the legacy one nor holds it up
_PORTABLE: Final = 1  # pinned for every device of this process
_IN_STREAM_ORDER: Final = 1  # of when a source is read: in any other order it may be read too early
_WITHOUT_FAIL_INDEX: Final = 13  # the major of CUDA whose cudaMemcpyBatchAsync lost that argument
_BUS_ID_BYTES: Final = 32
_ATTRIBUTES_BYTES: Final = 256  # struct cudaPointerAttributes has 24 in CUDA 12, 88 in 13


class CudaError(Exception):
    """A call failed; the message says what was being done, the error's name, number and words."""

    def __init__(self, doing: str, name: str, number: int, words: str) -> None:
        self.name = name
        self.number = number
        super().__init__(f"{doing}: {name} ({number}): {words}")


class MemorySide(enum.Enum):
    """Whose memory an address is of, as the runtime says."""

    HOST = "host"
    DEVICE = "device"


class CopyColumns(NamedTuple):
    """Where three arrays of words begin: piece by piece, where to, where from, how many bytes."""

    to: int
    source: int
    sizes: int


class Room(NamedTuple):
    """Memory of a device."""

    free_bytes: int
    total_bytes: int


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t: passed by value."""

    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


class _Attributes(ctypes.Structure):
    """struct cudaMemcpyAttributes; the hints are for memory that lies nowhere yet."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_P = ctypes.c_void_p
_OUT = ctypes.c_void_p  # addresses of results are passed by byref, whatever their type
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_UINT = ctypes.c_uint

CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cudaRuntimeGetVersion": (_OUT,),
    "cudaDriverGetVersion": (_OUT,),
    "cudaGetLastError": (),
    "cudaGetDeviceCount": (_OUT,),
    "cudaDeviceGetPCIBusId": (_P, _INT, _INT),
    "cudaDeviceGetByPCIBusId": (_OUT, ctypes.c_char_p),
    "cudaGetDevice": (_OUT,),
    "cudaSetDevice": (_INT,),
    "cudaMemGetInfo": (_OUT, _OUT),
    "cudaMalloc": (_OUT, _SIZE),
    "cudaFree": (_P,),
    "cudaMemset": (_P, _INT, _SIZE),
    "cudaMemcpy": (_P, _P, _SIZE, _INT),
    "cudaMemcpyAsync": (_P, _P, _SIZE, _INT, _P),
    "cudaDeviceSynchronize": (),
    "cudaHostRegister": (_P, _SIZE, _UINT),
    "cudaHostUnregister": (_P,),
    "cudaStreamCreateWithFlags": (_OUT, _UINT),
    "cudaStreamQuery": (_P,),
    "cudaStreamSynchronize": (_P,),
    "cudaStreamDestroy": (_P,),
    "cudaStreamIsCapturing": (_P, _OUT),
    "cudaThreadExchangeStreamCaptureMode": (_OUT,),
    "cudaPointerGetAttributes": (_P, _P),
    "cudaIpcGetMemHandle": (_OUT, _P),
    "cudaIpcOpenMemHandle": (_OUT, _Handle, _UINT),
    "cudaIpcCloseMemHandle": (_P,),
    "cudaEventCreateWithFlags": (_OUT, _UINT),
    "cudaEventRecord": (_P, _P),
    "cudaEventQuery": (_P,),
    "cudaEventDestroy": (_P,),
    "cudaIpcGetEventHandle": (_OUT, _P),
    "cudaIpcOpenEventHandle": (_OUT, _Handle),
}
"""Every entry point that is needed, and its arguments; each returns a number."""

BATCH: Final = "cudaMemcpyBatchAsync"
"""Of CUDA 12.8 on, and not needed."""
_BATCH_ARGUMENTS: Final = (_P, _P, _P, _SIZE, _P, _P, _SIZE)
"""Those of every major: behind them come failIdx, in CUDA 12 alone, and the stream."""


class Runtime:
    """One loaded CUDA runtime. Its calls let go of the interpreter."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        """Use ``cuda_library.load``.

        Raises:
            AttributeError: the library lacks an entry point.
        """
        self.path = path
        self._entries = {name: library[name] for name in CALLS}
        for name, arguments in CALLS.items():
            self._entries[name].argtypes = arguments
            self._entries[name].restype = _INT
        self._name_of, self._words_of = library["cudaGetErrorName"], library["cudaGetErrorString"]
        for entry in (self._name_of, self._words_of):
            entry.argtypes = (_INT,)
            entry.restype = ctypes.c_char_p
        self._batch: Any = None
        with contextlib.suppress(AttributeError):
            self._batch = library[BATCH]
            major = self._number("cudaRuntimeGetVersion", "asking for its version") // 1000
            self._has_fail_index = major < _WITHOUT_FAIL_INDEX
            more = (_OUT, _P) if self._has_fail_index else (_P,)
            self._batch.argtypes, self._batch.restype = (*_BATCH_ARGUMENTS, *more), _INT

    # ---- what there is -----------------------------------------------------------------------

    def version(self) -> str:
        """Of the runtime, like ``12.8``.

        Raises:
            CudaError: as every call here may; it says what was being done.
        """
        return _dotted(self._number("cudaRuntimeGetVersion", "asking for its version"))

    def driver_version(self) -> str:
        """The newest CUDA that the driver can serve; ``0.0`` where there is no driver."""
        return _dotted(self._number("cudaDriverGetVersion", "asking for the driver's version"))

    def device_count(self) -> int:
        """Devices that this process may use."""
        return self._number("cudaGetDeviceCount", "counting devices")

    def bus_id(self, device: int) -> str:
        """Where the device sits: the same in processes that number their devices differently."""
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        doing = f"asking where cuda:{device} sits"
        self._call("cudaDeviceGetPCIBusId", (text, _BUS_ID_BYTES, device), doing)
        return text.value.decode()

    def device_at(self, bus_id: str) -> int:
        """The number that this process has for the device there."""
        found = _INT(-1)
        doing = f"looking for the device at {bus_id}"
        self._call("cudaDeviceGetByPCIBusId", (ctypes.byref(found), bus_id.encode()), doing)
        return found.value

    def room(self, device: int) -> Room:
        """How much memory the device has, and how much of it is free; makes a context there."""
        self.use(device)
        free, total = _SIZE(0), _SIZE(0)
        doing = f"asking for the memory of cuda:{device}"
        self._call("cudaMemGetInfo", (ctypes.byref(free), ctypes.byref(total)), doing)
        return Room(free.value, total.value)

    def use(self, device: int) -> None:
        """Make a device the one of this thread."""
        self._call("cudaSetDevice", (device,), f"choosing cuda:{device}")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the one of this thread for a while: an engine's threads have their own."""
        before = self._number("cudaGetDevice", "asking for the device of this thread")
        self.use(device)
        try:
            yield
        finally:
            self.use(before)

    # ---- memory ------------------------------------------------------------------------------

    def allocate(self, device: int, size_bytes: int) -> int:
        """The address of zeroed memory of a device, which a handle can share."""
        self.use(device)
        found = _P(0)
        doing = f"allocating {size_bytes / 2**20:,.0f} MiB on cuda:{device}"
        self._call("cudaMalloc", (ctypes.byref(found), size_bytes), doing)
        address = found.value or 0
        self.zero(address, size_bytes)
        return address

    def zero(self, address: int, size_bytes: int) -> None:
        """Make every byte 0; they are when this returns."""
        self._call("cudaMemset", (address, 0, size_bytes), f"zeroing {size_bytes} bytes")
        self.synchronize()

    def free(self, address: int) -> None:
        """Give back what ``allocate`` gave."""
        self._call("cudaFree", (address,), f"freeing memory at {address:#x}")

    def side(self, address: int) -> MemorySide:
        """Whether the memory at an address is of the host or of a device."""
        content = (ctypes.c_ubyte * _ATTRIBUTES_BYTES)()
        doing = f"asking what lies at {address:#x}"
        self._call("cudaPointerGetAttributes", (content, address), doing)
        return MemorySide.DEVICE if _INT.from_buffer(content).value in {2, 3} else MemorySide.HOST

    def device_of(self, address: int) -> int | None:
        """The device whose memory lies at an address; None for the host's, and where there is none.

        Of device memory that was freed it says None too.
        """
        content = (_INT * (_ATTRIBUTES_BYTES // ctypes.sizeof(_INT)))()
        doing = f"asking what lies at {address:#x}"
        self._call("cudaPointerGetAttributes", (content, address), doing)
        return int(content[1]) if content[0] in {2, 3} else None

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Copy bytes between any two of host and devices. ``synchronize`` says that they are there.

        A copy within one device returns before it is done.
        """
        doing = f"copying {size_bytes} bytes from {source:#x} to {to:#x}"
        self._call("cudaMemcpy", (to, source, size_bytes, _COPY_DEFAULT), doing)

    def synchronize(self) -> None:
        """Wait for everything that this process has begun on the device of this thread."""
        self._call("cudaDeviceSynchronize", (), "waiting for the device")

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory of the host, so that devices copy it by themselves.

        It is done by the device of this thread, which gets a context if it has none.
        """
        doing = f"registering {size_bytes:,} bytes of host memory at {address:#x}"
        self._call("cudaHostRegister", (address, size_bytes, _PORTABLE), doing)

    def unregister(self, address: int) -> None:
        """Unpin what ``register`` pinned from there on."""
        self._call("cudaHostUnregister", (address,), f"unregistering host memory at {address:#x}")

    # ---- streams -----------------------------------------------------------------------------

    def stream(self, device: int) -> int:
        """A new stream of a device, beside all others; ``end_stream`` it."""
        self.use(device)
        found = _P(0)
        doing = f"making a stream on cuda:{device}"
        self._call("cudaStreamCreateWithFlags", (ctypes.byref(found), _NON_BLOCKING), doing)
        return found.value or 0

    def is_over(self, stream: int) -> bool:
        """Whether everything that was given to the stream is done."""
        return self._has_ended("cudaStreamQuery", stream, "asking whether a stream is done")

    def wait(self, stream: int) -> None:
        """Return when it is."""
        self._call("cudaStreamSynchronize", (stream,), "waiting for a stream")

    def end_stream(self, stream: int) -> None:
        """Let go of it; what is in it is done all the same."""
        self._call("cudaStreamDestroy", (stream,), "destroying a stream")

    def is_capturing(self, stream: int) -> bool:
        """Whether what is given to the stream goes into a graph, and is not done."""
        found = _INT(0)
        doing = "asking whether a stream is captured"
        self._call("cudaStreamIsCapturing", (stream, ctypes.byref(found)), doing)
        return found.value != 0

    def ignore_captures(self) -> None:
        """From now on, what this thread asks is no matter of graphs that other threads capture.

        Without it an event that is asked for here would spoil a capture of the engine.
        """
        mode = _INT(_CAPTURE_RELAXED)
        doing = "keeping a thread out of captures"
        self._call("cudaThreadExchangeStreamCaptureMode", (ctypes.byref(mode),), doing)

    def begin_copy(self, stream: int, to: int, source: int, size_bytes: int) -> None:
        """Let a stream copy bytes between devices and registered memory of the host."""
        doing = f"beginning to copy {size_bytes:,} bytes from {source:#x} to {to:#x}"
        self._call("cudaMemcpyAsync", (to, source, size_bytes, _COPY_DEFAULT, stream), doing)

    @property
    def has_batches(self) -> bool:
        """Whether ``begin_copies`` can be called: this runtime is of CUDA 12.8 or later."""
        return self._batch is not None

    def begin_copies(self, stream: int, columns: CopyColumns, pieces: int) -> None:
        """As ``begin_copy``, of many pieces, which are in no order among themselves.

        A source is read when the stream comes to it. Only where ``has_batches``.

        Raises:
            CudaError: a piece was refused, which CUDA 12 names, or all of them; none is copied.
        """
        assert self._batch is not None
        attributes, first, failed = _Attributes(_IN_STREAM_ORDER), _SIZE(0), _SIZE(pieces)
        more = (ctypes.byref(failed), stream) if self._has_fail_index else (stream,)
        attributed = (ctypes.byref(attributes), ctypes.byref(first), 1)
        number = int(self._batch(*columns, pieces, *attributed, *more))
        doing = f"beginning to copy {pieces:,} pieces"
        if number != _SUCCESS and failed.value < pieces:
            to, source, size = (
                _SIZE.from_address(one + failed.value * ctypes.sizeof(_SIZE)).value
                for one in columns
            )
            where = f"from {source:#x} to {to:#x}"
            doing += f", of which number {failed.value}, {size:,} bytes {where}, was refused"
        self._check(number, doing)

    # ---- memory of other processes -----------------------------------------------------------

    def share(self, address: int) -> bytes:
        """The handle of memory that ``allocate`` gave."""
        handle = _Handle()
        doing = f"sharing the memory at {address:#x}"
        self._call("cudaIpcGetMemHandle", (ctypes.byref(handle), address), doing)
        return bytes(handle.content)

    def open(self, device: int, handle: bytes) -> int:
        """The address here of another process's memory on that device; ``close`` it."""
        self.use(device)
        found = _P(0)
        arguments = (ctypes.byref(found), _handle(handle), _LAZY_PEER_ACCESS)
        doing = f"opening memory of another process on cuda:{device}"
        self._call("cudaIpcOpenMemHandle", arguments, doing)
        return found.value or 0

    def close(self, address: int) -> None:
        """Let go of what ``open`` gave."""
        doing = f"closing memory of another process at {address:#x}"
        self._call("cudaIpcCloseMemHandle", (address,), doing)

    # ---- events ------------------------------------------------------------------------------

    def event(self, device: int, *, is_shared: bool = True) -> int:
        """A new event, which other processes can open if it ``is_shared``."""
        self.use(device)
        found = _P(0)
        arguments = (ctypes.byref(found), _EVENT_INTERPROCESS if is_shared else _EVENT_UNTIMED)
        self._call("cudaEventCreateWithFlags", arguments, f"making an event on cuda:{device}")
        return found.value or 0

    def record(self, event: int, stream: int = 0) -> None:
        """Let the event come when what is in the stream by now is done."""
        self._call("cudaEventRecord", (event, stream), "recording an event")

    def share_event(self, event: int) -> bytes:
        """Its handle for other processes."""
        handle = _Handle()
        self._call("cudaIpcGetEventHandle", (ctypes.byref(handle), event), "sharing an event")
        return bytes(handle.content)

    def open_event(self, device: int, handle: bytes) -> int:
        """Another process's event; ``destroy`` ours when it is not needed."""
        self.use(device)
        found = _P(0)
        doing = f"opening an event of another process on cuda:{device}"
        self._call("cudaIpcOpenEventHandle", (ctypes.byref(found), _handle(handle)), doing)
        return found.value or 0

    def has_come(self, event: int) -> bool:
        """Whether everything before the event is done; an event never recorded has come."""
        return self._has_ended("cudaEventQuery", event, "asking whether an event has come")

    def destroy(self, event: int) -> None:
        """Let go of an event, made or opened here."""
        self._call("cudaEventDestroy", (event,), "destroying an event")

    # ---- calls -------------------------------------------------------------------------------

    def _number(self, name: str, doing: str) -> int:
        found = _INT(0)
        self._call(name, (ctypes.byref(found),), doing)
        return found.value

    def _has_ended(self, name: str, handle: int, doing: str) -> bool:
        number = int(self._entries[name](handle))
        if number == _NOT_READY:
            self._entries["cudaGetLastError"]()
            return False
        self._check(number, doing)
        return True

    def _call(self, name: str, arguments: tuple[object, ...], doing: str) -> None:
        self._check(int(self._entries[name](*arguments)), doing)

    def _check(self, number: int, doing: str) -> None:
        if number == _SUCCESS:
            return
        self._entries["cudaGetLastError"]()  # or the next call would tell of it again
        name: bytes = self._name_of(number) or b"unknown error"
        words: bytes = self._words_of(number) or b""
        raise CudaError(doing, name.decode(), number, words.decode())


def _handle(content: bytes) -> _Handle:
    """A handle as it came from another process.

    Raises:
        CudaError: it has another length.
    """
    if len(content) != HANDLE_BYTES:
        doing = f"reading an IPC handle of {len(content)} bytes"
        raise CudaError(doing, "cudaErrorInvalidValue", 1, f"handles have {HANDLE_BYTES}")
    return _Handle.from_buffer_copy(content)


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
