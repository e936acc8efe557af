"""A double of NIXL's binding that moves memory of the double of CUDA, between processes of a host.

Strict: a device is given to the runtime to copy, never to the processor; memory that says it is
another's kind, or was not registered, is refused. A write is done by a thread of its agent, piece
by piece, some time after it was posted. Host memory of another process is written as UCX writes it
on one host, by process_vm_writev.

NIXL_DOUBLE_SOCKETS: an agent has a connection of its own, as UCX's have. What it sends through it
is ``none`` (control alone), or ``emulated``: what UCX has no way for, which is all between memory
of a device and of the host, and with ``forced`` between devices too.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import select
import socket
import threading
from typing import Any, NamedTuple

from kvd.device.cuda import MemorySide, Runtime
from kvd.device.cuda_library import load

DRAM_SEG, VRAM_SEG = "dram", "vram"
NIXL_WRITE = "write"
NIXL_IN_PROG, NIXL_SUCCESS = "in progress", "success"
NIXL_THREAD_SYNC_STRICT = "strict"

_libc = ctypes.CDLL(None, use_errno=True)


class nixlInvalidParamError(Exception):  # noqa: N801 - as NIXL names them
    """What was given does not fit."""


class nixlNotFoundError(Exception):  # noqa: N801 - as above
    """Memory that was not registered."""


class nixlBackendError(Exception):  # noqa: N801 - as above
    """It could not be moved."""


class nixlAgentConfig:  # noqa: N801 - as above
    """Takes every setting."""


class _Span(NamedTuple):
    """Registered memory; ``handle`` opens that of a device elsewhere."""

    segment: str
    address: int
    size: int
    device: int
    handle: str = ""
    bus_id: str = ""


class nixlRegDList:  # noqa: N801 - as above
    """Memory to register."""

    def __init__(self, segment: str, rows: Any) -> None:
        self.spans = [_Span(segment, int(at), int(size), int(dev)) for at, size, dev, _ in rows]


class nixlXferDList:  # noqa: N801 - as above
    """Memory to read or to write."""

    def __init__(self, segment: str, rows: Any) -> None:
        self.spans = [_Span(segment, *map(int, row)) for row in rows.tolist()]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _runtime() -> Runtime:
    found = load()
    if not isinstance(found, Runtime):
        raise nixlBackendError(found.why)
    return found


class _Connection:
    """A connection whose sending end an epoll descriptor watches, inside of another, as in UCX."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._out = socket.create_connection(listener.getsockname())
            self._in, _ = listener.accept()
        self._inner, self._outer = select.epoll(), select.epoll()
        self._inner.register(self._out, select.EPOLLIN)
        self._outer.register(self._inner.fileno(), select.EPOLLIN)

    def pass_through(self, n_bytes: int) -> None:
        while n_bytes:
            done = self._out.send(bytes(min(n_bytes, 16 * 2**10)))
            while done:
                got = len(self._in.recv(done))
                done, n_bytes = done - got, n_bytes - got


class _Mover:
    """Moves pieces, on one thread; what it has opened stays open."""

    def __init__(self) -> None:
        self.emulates = os.environ.get("NIXL_DOUBLE_SOCKETS", "")
        self.connection: _Connection | None = None
        self.ends = threading.Event()
        self.wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.states: dict[int, str] = {}
        self._opened: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def begin(self, handle: int, pairs: list[tuple[_Span, _Span, int]], pid: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self.states[handle] = NIXL_IN_PROG
        self.wanted.put((handle, pairs, pid))

    def end(self) -> None:
        """Nothing is written any more when this returns."""
        self.ends.set()
        self.wanted.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (work := self.wanted.get()) is not None and not self.ends.is_set():
            handle, pairs, pid = work
            try:
                for source, onto, size in pairs:
                    if self.ends.is_set():
                        return
                    self._move(source, onto, size, pid)
                if any(VRAM_SEG in (one.segment, onto.segment) for one, onto, _ in pairs):
                    _runtime().synchronize()
                self.states[handle] = NIXL_SUCCESS
            except Exception as exc:  # noqa: BLE001 - told to whoever asks
                self.states[handle] = f"{type(exc).__name__} {exc}"

    def _move(self, source: _Span, onto: _Span, size: int, pid: int) -> None:
        far = (source.segment, onto.segment).count(VRAM_SEG)
        emulated = {"emulated": {1}, "forced": {1, 2}}.get(self.emulates, set())
        if self.connection is not None and far in emulated:
            self.connection.pass_through(size)
        if onto.segment == VRAM_SEG:
            runtime = _runtime()
            base = self._open(runtime, onto) if pid != os.getpid() else int(onto.bus_id)
            runtime.use(onto.device)
            runtime.copy(base + onto.address, source.address, size)
            return
        bounce = None
        at = source.address
        if source.segment == VRAM_SEG:
            runtime = _runtime()
            runtime.use(source.device)
            bounce = ctypes.create_string_buffer(size)
            at = ctypes.addressof(bounce)
            runtime.copy(at, source.address, size)
        ours, theirs = _Iovec(at, size), _Iovec(onto.address, size)
        done = _libc.process_vm_writev(
            pid, ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), 0
        )
        if done != size:
            raise nixlBackendError(os.strerror(ctypes.get_errno()))

    def _open(self, runtime: Runtime, span: _Span) -> int:
        if span.handle not in self._opened:
            device = runtime.device_at(span.bus_id)
            self._opened[span.handle] = runtime.open(device, bytes.fromhex(span.handle))
        return self._opened[span.handle]


class nixlAgent:  # noqa: N801 - as above
    """One agent."""

    _numbers = itertools.count(1)

    def __init__(self, name: str, config: Any) -> None:
        self._name = name
        self._spans: list[_Span] = []
        self._peers: dict[str, tuple[int, list[_Span]]] = {}
        self._ready: dict[int, tuple[list[tuple[_Span, _Span, int]], int]] = {}
        self._mover = _Mover()
        self._has_progress = config.useProgThread
        if config.useProgThread:
            # What watches a progress thread must find one.
            threading.Thread(target=self._mover.ends.wait, daemon=True).start()

    def __del__(self) -> None:
        self._mover.end()

    def createBackend(self, name: str, settings: dict[str, str]) -> None:  # noqa: N802 - as NIXL
        """The one that there is."""
        if self._mover.emulates and not self._has_progress:
            self._mover.connection = _Connection()

    def registerMem(self, memory: nixlRegDList) -> None:  # noqa: N802 - as NIXL
        """Take note of memory, of the kind that it is."""
        for span in memory.spans:
            if span.segment == VRAM_SEG:
                runtime = _runtime()
                if runtime.side(span.address) is not MemorySide.DEVICE:
                    raise nixlInvalidParamError(f"{span.address:#x} is no memory of a device")
                handle = runtime.share(span.address).hex()
                noted = span._replace(handle=handle, bus_id=runtime.bus_id(span.device))
            else:
                noted = span
            self._spans.append(noted)

    def getLocalMD(self) -> bytes:  # noqa: N802 - as NIXL
        return json.dumps([self._name, os.getpid(), self._spans]).encode()

    def loadRemoteMD(self, blob: bytes) -> bytes:  # noqa: N802 - as NIXL
        name, pid, spans = json.loads(blob)
        self._peers[name] = pid, [_Span(*one) for one in spans]
        return str(name).encode()

    def createXferReq(  # noqa: N802 - as NIXL
        self, kind: str, ours: nixlXferDList, theirs: nixlXferDList, peer: str
    ) -> int:
        if kind != NIXL_WRITE or len(ours.spans) != len(theirs.spans):
            raise nixlInvalidParamError(f"{kind} of {len(ours.spans)} to {len(theirs.spans)}")
        pid, spans = self._peers[peer]
        pairs = []
        for source, onto in zip(ours.spans, theirs.spans, strict=True):
            _registered(source, self._spans)
            there = _registered(onto, spans)
            if source.size != onto.size:
                raise nixlInvalidParamError(f"{source.size} bytes to {onto.size}")
            if onto.segment == VRAM_SEG and pid != os.getpid():
                target = there._replace(address=onto.address - there.address)
            else:
                target = onto._replace(bus_id="0")
            pairs.append((source, target, source.size))
        handle = next(self._numbers)
        self._ready[handle] = pairs, pid
        return handle

    def postXferReq(self, handle: int) -> str:  # noqa: N802 - as NIXL
        self._mover.begin(handle, *self._ready.pop(handle))
        return NIXL_IN_PROG

    def getXferStatus(self, handle: int) -> str:  # noqa: N802 - as NIXL
        state = self._mover.states[handle]
        if state not in {NIXL_IN_PROG, NIXL_SUCCESS}:
            raise nixlBackendError(state)
        return state

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802 - as NIXL
        del self._mover.states[handle]

    def getNotifs(self, found: dict[str, list[bytes]]) -> dict[str, list[bytes]]:  # noqa: N802
        return found


def _registered(wanted: _Span, spans: list[_Span]) -> _Span:
    for span in spans:
        if span.segment == wanted.segment and (
            span.address <= wanted.address
            and wanted.address + wanted.size <= span.address + span.size
        ):
            return span
    raise nixlNotFoundError(f"{wanted.size} bytes of {wanted.segment} at {wanted.address:#x}")
