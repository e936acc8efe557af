"""A device pool of SGLang's as ``HostPages`` reads a host pool: of each layer some buffers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceBuffers:
    """Buffers in which page N lies N times the size of a page behind the start.

    Args:
        pointers: of each buffer.
        n_bytes: it has so many.
        page_bytes: of them a page has so many.
        page_size: a page has so many tokens.
    """

    shared_allocation_domain = None
    dcp_size = 1
    layout = "device"

    def __init__(
        self,
        pointers: Sequence[int],
        n_bytes: Sequence[int],
        page_bytes: Sequence[int],
        page_size: int,
    ) -> None:
        self.page_size = page_size
        self._buffers = list(zip(pointers, page_bytes, strict=True))
        self.page_num = min(
            size // of_page for size, of_page in zip(n_bytes, page_bytes, strict=True)
        )

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Where the buffers of these pages lie, and how many bytes each has of a page."""
        numbers = (indices[:: self.page_size] // self.page_size).tolist()
        addresses = [at + number * size for number in numbers for at, size in self._buffers]
        return addresses, [size for _ in numbers for _, size in self._buffers]


class TransferPool(DeviceBuffers):
    """The pool that SGLang gives to a backend of transfers, by its ``KVArgs``."""

    def __init__(self, args: Any) -> None:
        super().__init__(
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, int(args.page_size)
        )
        self.dtype = args.kv_cache_dtype_str
        self.storage_format_tag = args.kv_layout or ""


class _RowBytes(msgspec.Struct, frozen=True, array_like=True):
    sizes: tuple[int, ...]
    data: bytes


class MetadataRows:
    """SGLang's rows of what goes with a prompt's KV: its first token and more, in host memory.

    Args:
        pointers: of the first row of each buffer.
        row_bytes: of one row of each.
    """

    def __init__(self, pointers: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._pointers = tuple(pointers)
        self._sizes = tuple(row_bytes)

    def read(self, row: int) -> bytes:
        """All of a row, for ``write`` on the other side."""
        parts = [ctypes.string_at(at, size) for at, size in self._places(row)]
        return msgspec.msgpack.encode(_RowBytes(self._sizes, b"".join(parts)))

    def write(self, row: int, told: bytes) -> None:
        """Fill a row with what ``read`` gave.

        Raises:
            ValueError: the other side has other rows.
        """
        try:
            found = msgspec.msgpack.decode(told, type=_RowBytes)
        except msgspec.DecodeError:
            raise ValueError("what came beside the KV is no row of SGLang's metadata") from None
        if found.sizes != self._sizes or len(found.data) != sum(self._sizes):
            raise ValueError(
                f"rows of metadata have {list(found.sizes)} bytes there and {list(self._sizes)} "
                "here: give both servers the same options (checksums, sampling masks, drafts)"
            )
        start = 0
        for at, size in self._places(row):
            ctypes.memmove(at, found.data[start : start + size], size)
            start += size

    def _places(self, row: int) -> list[tuple[int, int]]:
        return [
            (at + row * size, size) for at, size in zip(self._pointers, self._sizes, strict=True)
        ]
