"""Rows of page ids: how the pages of a component are known, and page numbers as a frame.

A lease has the row of the first component and, beside it, the row of every other component with a
page pool of its own. A companion of the first has none: its pages follow, see ``along``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    PageNumbers = Sequence[int] | NDArray[np.integer] | torch.Tensor

MAX_PAGE: Final = 2**31 - 1


class Along(msgspec.Struct, frozen=True):
    """In lockstep with the first component: each page of that owns ``pages_each`` of this."""

    pages_each: int


class ComponentRow(msgspec.Struct, frozen=True):
    """A page pool of its own: the row at ``index`` beside that of the first component."""

    index: int


def along(pages: NDArray[np.int32], pages_each: int) -> NDArray[np.int32]:
    """The companion's pages: ``p`` of the first component owns ``p*k .. p*k+k-1``; read-only."""
    if pages_each == 1:
        return pages
    owned = (pages[:, np.newaxis] * pages_each + np.arange(pages_each)).astype(np.int32).reshape(-1)
    owned.flags.writeable = False
    return owned


def swapped(before: NDArray[np.int32], now: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where two rows of equal length differ: a row ``[old, new]`` for each such place."""
    at = np.flatnonzero(before[: len(now)] != now[: len(before)])
    return np.column_stack((before[at], now[at]))


def page_frame(pages: PageNumbers) -> bytes:
    """Page numbers as one frame of little-endian int32, in the order given.

    Args:
        pages: any sequence of ints, or a one-dimensional integer numpy array or torch tensor.

    Raises:
        KvdError: ``bad-pages``, with what is none of page numbers.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(pages, torch.Tensor):
        pages = pages.detach().cpu().numpy()
    numbers = _array(pages)
    if not numbers.size and numbers.ndim == 1:
        return b""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise _bad(
            f"an array of {numbers.dtype} with the shape {numbers.shape} is none of page numbers: "
            "pass ints, in one dimension"
        )
    values = numbers.astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > MAX_PAGE:
        raise _bad(f"page numbers are 0 to {MAX_PAGE}; among these is {low if low < 0 else high}")
    return values.astype("<i4").tobytes()


def _array(pages: PageNumbers) -> NDArray[np.generic]:
    try:
        return np.asarray(pages)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _bad(f"these are no page numbers: {exc}") from exc


def _bad(message: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_PAGES, message, side="client"))
