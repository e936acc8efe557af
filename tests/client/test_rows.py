"""Page numbers as a frame, and companions in lockstep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvd.client.rows import along, page_frame, swapped
from kvd.core.layout.spec import companion_pages
from kvd.errors import KvdError
from kvd.types import Pages, pack_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


def ids(*pages: int) -> NDArray[np.int32]:
    return np.frombuffer(pack_ids(pages), dtype="<i4")


@pytest.mark.parametrize(
    ("pages_each", "owned"),
    [(1, [3, 0, 5]), (2, [6, 7, 0, 1, 10, 11]), (4, [12, 13, 14, 15, 0, 1, 2, 3, 20, 21, 22, 23])],
)
def test_along_names_the_pages_that_each_page_owns(pages_each: int, owned: list[int]) -> None:
    found = along(ids(3, 0, 5), pages_each)

    assert (found.tolist(), found.dtype, found.flags.writeable) == (owned, np.int32, False)
    assert found.tobytes() == companion_pages(Pages(pack_ids([3, 0, 5])), pages_each)


def test_along_of_no_pages_is_none() -> None:
    assert along(ids(), 4).tolist() == []


@pytest.mark.parametrize(
    "pages",
    [[7, 0, 9], (7, 0, 9), np.array([7, 0, 9]), torch.tensor([7, 0, 9]), np.array([7, 0, 9], "u2")],
    ids=["list", "tuple", "int64", "tensor", "uint16"],
)
def test_page_frame_keeps_the_order(pages: Any) -> None:
    assert page_frame(pages) == pack_ids([7, 0, 9])


@pytest.mark.parametrize("pages", [(), [], np.array([], np.int64), np.array([])])
def test_page_frame_of_nothing_is_empty(pages: Any) -> None:
    assert page_frame(pages) == b""


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([1, -1], "page numbers are 0 to 2147483647; among these is -1"),
        ([1, 2**31], "among these is 2147483648"),
        ([1, 2**70], "none of page numbers"),
        ([1.0], "an array of float64"),
        ([True], "an array of bool"),
        ([[1]], r"with the shape \(1, 1\)"),
        ([[1], [2, 3]], "these are no page numbers"),
        (np.array(3), r"with the shape \(\)"),
        (["1"], "none of page numbers"),
    ],
    ids=str,
)
def test_page_frame_refuses_what_is_no_list_of_page_numbers(pages: Any, words: str) -> None:
    with pytest.raises(KvdError, match=words) as caught:
        page_frame(pages)

    assert caught.value.code == "bad-pages"


def test_page_frame_does_not_wrap_large_unsigned_numbers() -> None:
    with pytest.raises(KvdError, match="page numbers are 0 to 2147483647"):
        page_frame(np.array([2**63 + 1], np.uint64))


def test_pages_that_differ_are_swapped_ones() -> None:
    assert swapped(ids(4, 5, 6), ids(1, 5, 3)).tolist() == [[4, 1], [6, 3]]
    assert swapped(ids(4, 5), ids(4, 5)).shape == (0, 2)
