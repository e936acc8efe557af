"""The daemon's memory in this process: mapped once, seen as torch tensors, never copied.

What lives here: the mapping and the views. What must not: sockets, sessions.

Theory of operation. Huge pages need a mapping at a multiple of 2 MiB, and ``mmap.mmap`` cannot be
told an address. So an ordinary private mapping reserves address space, 2 MiB more than needed, and
the descriptor is mapped over the aligned part of it (MAP_FIXED)::

    |<- slack ->|<------------- the descriptor, shared ------------->|<- slack ->|
    ^ mmap.mmap  ^ multiple of 2 MiB

A file on a hugetlbfs is mapped in whole pages of its own, at a multiple of them, whatever length
was asked for: so the space that is reserved is counted in those, or the rest of the last page would
lie over something else of this process.

The ``mmap.mmap`` object owns the whole range, so its bookkeeping guards it: a numpy array made from
it blocks ``close``, a tensor made by ``torch.from_numpy`` keeps that array, and so no view can
outlive its memory. (``torch.frombuffer`` would not block it, and the next access would crash.)

The daemon has reserved every page, but a process that maps them has no entry in its page tables for
any: the first write to each costs a fault, which makes the first copies several times slower than
all later ones, and it is a user's request that meets it. So the entries are asked for beforehand,
in the background. Huge pages take a fault for each 2 MiB, so there it is over at once.

Invariants: a view never reaches beyond ``total_bytes``; element addresses are multiples of the
element size; bytes written through a view are the bytes every other process sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from numpy.typing import NDArray

    from kvd.wire.memory import TensorPlace

ALIGNMENT_BYTES: Final = 2 * 1024 * 1024

_ARRAY_DTYPES: Final = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "uint8": "|u1",
    "int8": "|i1",
}
"""What numpy sees; the bits, as unsigned integers, of what it has no numbers for."""

STEP_BYTES: Final = 2 * 2**20
"""Of a prefault: less than a millisecond, in which nothing else of this process can be mapped."""

_MADV_POPULATE_WRITE: Final = 23
_NICENESS: Final = 15
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefault:
    """Fills in page tables from its beginning on; ``stop`` it before the memory is unmapped.

    A thread at low priority, from the start of the memory, where the pages lie that are given
    first. The kernel may not know how (before 5.14), or refuse: then pages come one by one.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        """The memory is mapped writable at ``address``, a page border."""
        self.over = threading.Event()
        """All of it is there, or no more will be."""
        self.done_bytes = 0
        self._address = address
        self._size_bytes = size_bytes
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kvd-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Touch nothing any more; returns within a step; repeatable."""
        self._is_stopped = True
        # A child that was forked has no such thread.
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for offset in range(0, self._size_bytes, STEP_BYTES):
            step = min(STEP_BYTES, self._size_bytes - offset)
            if self._is_stopped or _libc.madvise(
                self._address + offset, step, _MADV_POPULATE_WRITE
            ):
                break
            self.done_bytes += step
        self.over.set()


class Mapping:
    """``total_bytes`` of shared memory in this process, at a multiple of 2 MiB."""

    def __init__(self, fd: int, total_bytes: int) -> None:
        """Map the first ``total_bytes`` of ``fd``, whose ownership stays with the caller.

        Raises:
            KvdError: ``internal`` when the kernel refuses; the message says why.
        """
        self.total_bytes = total_bytes
        page = _page_bytes(fd)
        unit = max(ALIGNMENT_BYTES, page)
        size = -(-total_bytes // page) * page
        self._range = mmap.mmap(
            -1,
            size + unit,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        start = _address(self._range)
        self._skip = -start % unit
        _map_over(start + self._skip, size, fd)
        self.bytes = self._see()
        self._size = size
        self.prefault: Prefault | None = None

    def begin_prefault(self) -> None:
        """Have the pages of it at hand soon, by a thread of its own; see ``Prefault``."""
        if self.prefault is None:
            self.prefault = Prefault(self.bytes.ctypes.data, self._size)

    def tensor(self, place: TensorPlace, pages: int) -> torch.Tensor:
        """The strided view ``(pages, *page_shape)`` that ``place`` describes.

        Raises:
            KvdError: ``internal`` when the description does not fit the memory: it would reach
                beyond it, or its elements would not be aligned.
        """
        flat = with_torch().from_numpy(self.bytes)
        return view_of(flat, place, pages=pages, total_bytes=self.total_bytes)

    def array(self, place: TensorPlace, pages: int) -> NDArray[np.generic]:
        """As ``tensor``, as a numpy array; bits where numpy has no such number.

        Raises:
            KvdError: as ``tensor``.
        """
        dtype = _array_dtype(place)
        item = dtype.itemsize
        _check_fit(place, pages=pages, item_bytes=item, total_bytes=self.total_bytes)
        inner = [math.prod(place.page_shape[axis + 1 :]) for axis in range(len(place.page_shape))]
        return np.ndarray(
            (pages, *place.page_shape),
            dtype,
            buffer=self.bytes,
            offset=place.offset_bytes,
            strides=(place.page_stride_bytes, *(item * step for step in inner)),
        )

    def close(self) -> None:
        """Unmap; repeatable.

        Raises:
            KvdError: ``wrong-state`` while a view of it is alive; it stays mapped.
        """
        if self.prefault is not None:
            self.prefault.stop()
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._range.close()
        except BufferError:
            self.bytes = self._see()
            raise still_seen(self.total_bytes) from None

    def _see(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._range, dtype=np.uint8, count=self.total_bytes, offset=self._skip)


def view_of(
    flat: torch.Tensor, place: TensorPlace, *, pages: int, total_bytes: int
) -> torch.Tensor:
    """The strided view ``(pages, *page_shape)`` of memory that ``flat`` has as bytes.

    Raises:
        KvdError: ``internal`` when the description does not fit the memory.
    """
    torch = with_torch()
    dtypes = {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "uint8": torch.uint8,
        "int8": torch.int8,
    }
    if place.dtype not in dtypes:
        raise _unknown(place.dtype)
    dtype = dtypes[place.dtype]
    item = dtype.itemsize
    _check_fit(place, pages=pages, item_bytes=item, total_bytes=total_bytes)
    whole = total_bytes - total_bytes % item
    inner = [math.prod(place.page_shape[axis + 1 :]) for axis in range(len(place.page_shape))]
    return (
        flat[:whole]
        .view(dtype)
        .as_strided(
            (pages, *place.page_shape),
            (place.page_stride_bytes // item, *inner),
            place.offset_bytes // item,
        )
    )


def with_torch() -> ModuleType:
    """torch, which whoever only talks to the daemon need not have.

    Raises:
        KvdError: ``not-supported`` where it is not installed.
    """
    try:
        import torch  # noqa: PLC0415 - as above
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise KvdError(
            Refusal(
                Code.NOT_SUPPORTED,
                f"torch is not installed in {sys.prefix}, and a tensor was asked for: take numpy "
                "arrays of the same memory with pool.arrays(...), or install torch",
                side="client",
            )
        ) from exc
    return torch


def still_seen(total_bytes: int) -> KvdError:
    """Why memory stays mapped."""
    return KvdError(
        Refusal(
            Code.WRONG_STATE,
            f"the {total_bytes} bytes of this pool are still seen by a tensor or an "
            "array of this process: drop every view of it first",
            side="client",
        )
    )


def _check_fit(place: TensorPlace, *, pages: int, item_bytes: int, total_bytes: int) -> None:
    page = math.prod(place.page_shape) * item_bytes
    end = place.offset_bytes + (pages - 1) * place.page_stride_bytes + page
    if min(place.offset_bytes, place.page_stride_bytes, *place.page_shape) < 0 or (
        end > total_bytes
    ):
        raise _misfit(
            f"layer {place.layer} {place.part} ends at byte {end} of {total_bytes} that were passed"
        )
    if place.offset_bytes % item_bytes or place.page_stride_bytes % item_bytes:
        raise _misfit(
            f"layer {place.layer} {place.part} starts at byte {place.offset_bytes} with a stride "
            f"of {place.page_stride_bytes}, no multiples of the {item_bytes} bytes of {place.dtype}"
        )


def _page_bytes(fd: int) -> int:
    """What a file is mapped in: huge pages on a hugetlbfs, else those of this machine."""
    try:
        return max(mmap.PAGESIZE, os.fstat(fd).st_blksize)
    except OSError:
        return mmap.PAGESIZE  # mapping it will say what is wrong with it


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map_over(address: int, size: int, fd: int) -> None:
    """Map ``fd`` at ``address``, over whatever this process has there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found != address:
        why = os.strerror(ctypes.get_errno())
        raise _misfit(f"mapping {size} bytes of the pool failed: {why}")


def _array_dtype(place: TensorPlace) -> np.dtype[np.generic]:
    if place.dtype not in _ARRAY_DTYPES:
        raise _unknown(place.dtype)
    return np.dtype(_ARRAY_DTYPES[place.dtype])


def bytes_per_page(place: TensorPlace) -> int:
    """What a page has of one tensor.

    Raises:
        KvdError: ``internal`` for a dtype that is not known here.
    """
    return math.prod(place.page_shape) * _array_dtype(place).itemsize


def _unknown(dtype: str) -> KvdError:
    return _misfit(f"dtype {dtype} is none this client knows: install the same kvd")


def _misfit(message: str) -> KvdError:
    return KvdError(Refusal(Code.INTERNAL, message, side="client"))
