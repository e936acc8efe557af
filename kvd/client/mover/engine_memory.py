"""Where the blocks of an engine's KV cache lie, whoever made its tensors.

A layer is a torch tensor, or anything else that says where it lies; or that is said in its place
(``LayerMemory``). Its first dimension is the block. What lies inside a block is the engine's own:
here a block is bytes, and has to be one stretch of them.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST: Final = "cpu"
"""The device whose memory a processor can read."""


class LayerMemory(msgspec.Struct, frozen=True):
    """Memory that an engine describes itself; it stays where it is as long as its blocks are used.

    ``strides`` are in elements of ``itemsize`` bytes. ``device``: ``cpu``, or ``cuda:N``.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str = HOST

    def data_ptr(self) -> int:
        """Where it begins; as a tensor of torch says it, as the two below."""
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self.strides

    def element_size(self) -> int:
        """Bytes."""
        return self.itemsize


@runtime_checkable
class TensorView(Protocol):
    """What is read of a layer's tensor: torch has it. One without a ``device`` is host memory."""

    @property
    def shape(self) -> Sequence[int]:
        """How many of what; blocks first."""
        ...

    def stride(self) -> Sequence[int]:
        """In elements."""
        ...

    def element_size(self) -> int:
        """Bytes."""
        ...

    def data_ptr(self) -> int:
        """Where it begins."""
        ...


@runtime_checkable
class NamesDevice(Protocol):
    """A tensor that says where its memory is: torch's do."""

    @property
    def device(self) -> object:
        """As text, like ``cpu`` and ``cuda:0``."""
        ...


@runtime_checkable
class HostArray(Protocol):
    """What numpy takes for an array of host memory."""

    @property
    def __array_interface__(self) -> Mapping[str, Any]: ...


@runtime_checkable
class CudaArray(Protocol):
    """What CUDA's libraries for Python take for an array of a device."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


@runtime_checkable
class DlpackTensor(Protocol):
    """What tensors of other frameworks are exchanged by."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        """A capsule with where it lies."""
        ...

    def __dlpack_device__(self) -> tuple[int, int]:
        """What kind of device, and its number."""
        ...


class _Dlpack(ctypes.Structure):
    """The head of a DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DLPACK_DEVICES: Final = {1: HOST, 3: HOST, 2: "cuda", 13: "cuda"}
"""kDLCPU and kDLCUDAHost; kDLCUDA and kDLCUDAManaged."""
_ADDRESSES: Final = 2**64
_NO_STREAM: Final = -1  # whoever orders a copy gives a mark, so nothing need be waited for

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class BlockLayout:
    """How the blocks of one layer lie: ``n_blocks`` of ``block_bytes``, ``step_bytes`` apart."""

    __slots__ = ("address", "block_bytes", "device", "n_blocks", "step_bytes")

    def __init__(
        self, address: int, n_blocks: int, block_bytes: int, step_bytes: int, device: str = HOST
    ) -> None:
        self.address = address
        self.n_blocks = n_blocks
        self.block_bytes = block_bytes
        self.step_bytes = step_bytes
        self.device = device

    @property
    def end(self) -> int:
        """Where its last block ends."""
        return self.address + (self.n_blocks - 1) * self.step_bytes + self.block_bytes


def block_layout(name: str, tensor: object) -> BlockLayout:
    """How the blocks of this tensor lie, be they of the host or of a device.

    Raises:
        KvdError: ``layout-mismatch``: the bytes of a block are not one stretch; ``bad-request`` for
            what does not say where it lies.
    """
    seen = seen_as(name, tensor)
    shape, strides, width = _numbers_of(name, seen)
    inside = sorted(zip(strides[1:], shape[1:], strict=True))
    dense = 1
    for stride, n in inside:
        if n > 1 and stride != dense:
            raise unfit(
                f"layer {name} has the shape {tuple(shape)} and the strides {tuple(strides)}: the "
                "bytes of a block are not one stretch; use a KV cache layout with blocks outside, "
                "such as LBHNC or BLHNC"
            )
        dense *= n
    if len(shape) < 2 or strides[0] < dense:
        raise unfit(
            f"layer {name} has the shape {tuple(shape)} and the strides {tuple(strides)}: its "
            "first dimension is not the block"
        )
    if not shape[0] or not dense:
        raise unfit(f"layer {name} has the shape {tuple(shape)}: there is no block in it")
    device = str(seen.device) if isinstance(seen, NamesDevice) else HOST
    if device.split(":", maxsplit=1)[0] == HOST:
        device = HOST
    layout = BlockLayout(seen.data_ptr(), shape[0], dense * width, strides[0] * width, device)
    if layout.address <= 0 or layout.end > _ADDRESSES:
        raise _bad(
            f"layer {name} lies from {layout.address:#x} to {layout.end:#x}: no memory is there; "
            "give a tensor whose memory is allocated, and as long as its blocks are used"
        )
    return layout


def _numbers_of(name: str, seen: TensorView) -> tuple[list[int], list[int], int]:
    """Its shape, its strides and the width of an element, which go together."""
    try:
        shape = [operator.index(size) for size in seen.shape]
        strides = [operator.index(step) for step in seen.stride()]
        operator.index(seen.data_ptr())
        width = operator.index(seen.element_size())
    except TypeError as error:
        raise _bad(
            f"layer {name}: its shape, strides, pointer and itemsize are ints: {error}"
        ) from None
    if len(shape) != len(strides) or width < 1 or min(shape, default=0) < 0:
        raise unfit(
            f"layer {name} has the shape {tuple(shape)}, the strides {tuple(strides)} and elements "
            f"of {width} bytes: no memory lies like that"
        )
    return shape, strides, width


def seen_as(name: str, tensor: object) -> TensorView:
    """Where a layer's tensor lies.

    Raises:
        KvdError: ``bad-request`` for what does not say it.
    """
    if isinstance(tensor, TensorView):
        return tensor
    # Of a device first: what has both would be copied to the host by whoever asks for the other.
    if isinstance(tensor, CudaArray):
        return _described(name, tensor.__cuda_array_interface__, "cuda")
    if isinstance(tensor, HostArray):
        return _described(name, tensor.__array_interface__, HOST)
    if isinstance(tensor, DlpackTensor):
        return _exchanged(name, tensor)
    raise _bad(
        f"layer {name} is a {type(tensor).__name__}: it is a torch tensor, or has "
        "__cuda_array_interface__, __array_interface__ or __dlpack__, or is a "
        "LayerMemory(pointer, shape, strides, itemsize, device)"
    )


def _described(name: str, interface: Mapping[str, Any], device: str) -> LayerMemory:
    """As both interfaces say it: strides in bytes, or none for what is dense."""
    try:
        kind, said = interface["typestr"][1], re.sub(r"\[.*", "", interface["typestr"][2:])
        itemsize = 0 if kind == "O" else int(said)
        pointer, is_read_only = interface["data"]
        shape = tuple(int(size) for size in interface["shape"])
        steps = interface.get("strides")
        strides = _dense(shape) if steps is None else tuple(int(step) // itemsize for step in steps)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise _bad(f"layer {name} does not say where it lies: {error!r} in its interface") from None
    if kind == "O":
        raise _bad(f"layer {name} is an array of Python's objects: their bytes are no KV")
    if is_read_only:
        raise _bad(f"layer {name} may only be read: loads write the engine's tensors")
    return LayerMemory(
        pointer=int(pointer), shape=shape, strides=strides, itemsize=itemsize, device=device
    )


def _exchanged(name: str, tensor: DlpackTensor) -> LayerMemory:
    """By DLPack: the capsule says where, and the tensor that stays here keeps it there."""
    kind, number = tensor.__dlpack_device__()
    if kind not in DLPACK_DEVICES:
        raise KvdError(
            Refusal(
                Code.NOT_SUPPORTED,
                f"layer {name} is on a device of kind {kind} of DLPack: kvd copies host memory, "
                "and memory of CUDA devices",
                side="client",
            )
        )
    device = DLPACK_DEVICES[kind]
    is_host = device == HOST
    capsule = tensor.__dlpack__() if is_host else tensor.__dlpack__(stream=_NO_STREAM)
    found = _Dlpack.from_address(_pointer_in(capsule, b"dltensor"))
    shape = tuple(found.shape[axis] for axis in range(found.ndim))
    return LayerMemory(
        pointer=(found.data or 0) + found.byte_offset,
        shape=shape,
        strides=tuple(found.strides[axis] for axis in range(found.ndim))
        if found.strides
        else _dense(shape),
        itemsize=found.bits * found.lanes // 8,
        device=device if is_host else f"{device}:{number}",
    )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _bad(message: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, message, side="client"))


def unfit(message: str) -> KvdError:
    """Memory that cannot be blocks, or not of that pool."""
    return KvdError(Refusal(Code.LAYOUT_MISMATCH, message, side="client"))
