"""Memory of a device in this process: opened by its IPC handle, seen as torch tensors of it.

The daemon's transfer process allocated it and owns it; what is here is a mapping, which the driver
takes back when this process dies. Which number the device has here, and whether this process may
use it at all (CUDA_VISIBLE_DEVICES), is asked by where the device sits.

    DeviceMapping -> _Opened <- _Bytes <- every tensor that was made from it

torch keeps the object that it made a tensor of, so nothing is closed under a living tensor: the
mapping goes with the last one.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import numpy as np

from kvd.client.mapping import still_seen, view_of, with_torch
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from kvd.device.cuda import Runtime
    from kvd.wire.memory import DeviceMemory, TensorPlace


class DeviceMapping:
    """``total_bytes`` of a device's memory, which another process owns, in this one."""

    def __init__(self, place: DeviceMemory, total_bytes: int) -> None:
        """Open it.

        Raises:
            KvdError: ``not-supported`` where this process has no CUDA, or does not see that device;
                ``unreachable`` when its driver does not open the memory.
        """
        self.total_bytes = total_bytes
        self._opened: _Opened | None = _open(place)
        self._seen: weakref.ref[_Bytes] | None = None

    def tensor(self, place: TensorPlace, pages: int) -> torch.Tensor:
        """The strided view ``(pages, *page_shape)`` that ``place`` describes, on its device.

        Raises:
            KvdError: ``internal`` when the description does not fit the memory; ``wrong-state``
                after ``close``; ``not-supported`` where torch has no CUDA.
        """
        torch = with_torch()
        seen = self._bytes()
        device = seen.opened.device
        if seen.opened.is_of_host:
            flat = torch.from_numpy(np.asarray(seen))
        elif torch.cuda.is_available():
            flat = torch.as_tensor(seen, device=f"cuda:{device}")
        else:
            raise _failure(
                Code.NOT_SUPPORTED,
                f"the pool lies on cuda:{device}, and torch {torch.__version__} of this process "
                "has no CUDA: install a CUDA build of torch",
            )
        return view_of(flat, place, pages=pages, total_bytes=self.total_bytes)

    def array(self, place: TensorPlace, pages: int) -> NDArray[np.generic]:
        """None: numpy sees no memory of a device.

        Raises:
            KvdError: ``not-supported``, always.
        """
        raise _failure(
            Code.NOT_SUPPORTED,
            f"layer {place.layer} {place.part} of {pages} pages lies on a device, where numpy sees "
            "nothing: take tensors, with torch",
        )

    def close(self) -> None:
        """Let go of it; repeatable.

        Raises:
            KvdError: ``wrong-state`` while a view of it is alive; it stays open.
        """
        if self._seen is not None and self._seen() is not None:
            raise still_seen(self.total_bytes)
        self._opened = None

    def _bytes(self) -> _Bytes:
        seen = self._seen() if self._seen is not None else None
        if seen is not None:
            return seen
        if self._opened is None:
            raise KvdError(
                Refusal(Code.WRONG_STATE, "this memory was closed: ask for it anew", side="client")
            )
        seen = _Bytes(self._opened, self.total_bytes)
        self._seen = weakref.ref(seen)
        return seen


class _Opened:
    """An opened handle; closed when nobody has this object any more."""

    def __init__(self, runtime: Runtime, device: int, address: int, *, is_of_host: bool) -> None:
        self.device = device
        self.address = address
        self.is_of_host = is_of_host
        closing = weakref.finalize(self, _close, runtime, device, address)
        closing.atexit = False  # the driver may be gone by then, and the mapping goes anyway


class _Bytes:
    """The memory as numpy and torch take it over: they keep this object."""

    def __init__(self, opened: _Opened, size: int) -> None:
        self.opened = opened
        described: dict[str, object] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (opened.address, False),
            "version": 3,
        }
        if opened.is_of_host:
            self.__array_interface__ = described
        else:
            self.__cuda_array_interface__ = described


def _open(place: DeviceMemory) -> _Opened:
    from kvd.device.cuda import CudaError, MemorySide, Runtime  # noqa: PLC0415 - only where it is needed
    from kvd.device.cuda_library import load  # noqa: PLC0415 - as above

    runtime = load()
    if not isinstance(runtime, Runtime):
        raise _failure(Code.NOT_SUPPORTED, f"the pool lies on a device: {runtime.sentence}")
    try:
        device = runtime.device_at(place.bus_id)
    except CudaError as exc:
        raise _failure(
            Code.NOT_SUPPORTED,
            f"the pool lies on the device at {place.bus_id}, which this process does not see "
            f"({exc}): name it in CUDA_VISIBLE_DEVICES",
        ) from exc
    try:
        with runtime.on(device):
            address = runtime.open(device, place.handle)
            is_of_host = runtime.side(address) is MemorySide.HOST
            # What is on another device opens too, where the two reach each other: every access
            # would cross between them, and nobody would be told.
            found = device if is_of_host else runtime.device_of(address)
            if found != device:
                runtime.close(address)
                raise _elsewhere(runtime, place, device, found)
    except CudaError as exc:
        raise _failure(
            Code.UNREACHABLE,
            f"opening the pool on the device at {place.bus_id}, cuda:{device} here: {exc}: the "
            "daemon may just have ended; in a container, it must share the daemon's pid and ipc "
            "namespaces",
        ) from exc
    return _Opened(runtime, device, address, is_of_host=is_of_host)


def _elsewhere(runtime: Runtime, place: DeviceMemory, device: int, found: int | None) -> KvdError:
    """The handle is of memory on another device than the daemon says."""
    where = "on no device" if found is None else f"on cuda:{found}, at {runtime.bus_id(found)}"
    return _failure(
        Code.LAYOUT_MISMATCH,
        f"the daemon gave {place.component} of pool {place.pool} as memory of the device at "
        f"{place.bus_id}, cuda:{device} here, and what its handle opens is {where}: nothing is "
        "read or written there; restart the daemon, and see kvd doctor there",
    )


def _close(runtime: Runtime, device: int, address: int) -> None:
    from kvd.device.cuda import CudaError  # noqa: PLC0415 - only where it is needed

    # Wherever the last tensor was dropped, nobody can be told that the device has failed since:
    # whoever computes there has heard it from every call, and the mapping ends with the process.
    with contextlib.suppress(CudaError), runtime.on(device):
        runtime.close(address)


def _failure(code: Code, message: str) -> KvdError:
    return KvdError(Refusal(code, message, side="client"))
