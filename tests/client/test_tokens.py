"""Tokens: every good form gives the same frame, every bad one its position."""

from __future__ import annotations

import array
import collections
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvd.client.tokens import MAX_TOKEN_ID, token_frame
from kvd.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD_FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    collections.deque,
    lambda ids: array.array("i", ids),
    lambda ids: array.array("q", ids),
    lambda ids: [np.int64(value) for value in ids],
    lambda ids: np.array(ids, dtype=np.int32),
    lambda ids: np.array(ids, dtype=np.int64),
    lambda ids: np.array(ids, dtype=np.uint32),
    lambda ids: np.array(ids, dtype=">i4"),
    lambda ids: np.repeat(np.array(ids, dtype=np.int32), 2)[::2],
    lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: torch.tensor(ids, dtype=torch.int64),
    lambda ids: torch.tensor(ids, dtype=torch.int64).repeat_interleave(2)[::2],
]

token_lists = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=100)


@given(token_lists)
def test_every_form_of_the_same_tokens_gives_the_same_frame(ids: list[int]) -> None:
    wanted = b"".join(value.to_bytes(4, "little") for value in ids)

    assert [token_frame(form(ids)) for form in GOOD_FORMS] == [wanted] * len(GOOD_FORMS)


@given(token_lists, token_lists, st.sampled_from([-1, -(2**31), 2**31, 2**32 + 5, 2**63 - 1]))
def test_the_first_id_out_of_range_is_named(before: list[int], after: list[int], bad: int) -> None:
    ids = [*before, bad, *after, -7]

    for form in (list, np.array, torch.tensor):
        with pytest.raises(KvdError) as caught:
            token_frame(form(ids))
        assert caught.value.code == "bad-tokens"
        assert caught.value.numbers == {"position": len(before), "value": str(bad)}


@given(token_lists, st.sampled_from([True, False, 1.0, "1", None, b"1", [1], 1j]))
def test_the_first_element_that_is_no_int_is_named(before: list[int], bad: Any) -> None:
    with pytest.raises(KvdError) as caught:
        token_frame([*before, bad, 3])

    assert caught.value.code == "bad-tokens"
    assert caught.value.numbers == {"position": len(before)}
    assert f"token {len(before)} of {len(before) + 2} is {bad!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("text", "a str is no sequence of token ids"),
        (b"\0\0\0\0", r"for raw bytes np.frombuffer\(data, '<i4'\)"),
        ({1: 2}, "a dict is no sequence"),
        ({1, 2}, "a set is no sequence"),
        (iter([1]), "a list_iterator is no sequence"),
        (7, "an? int is no sequence"),
        (None, "a NoneType is no sequence"),
        (np.array([1.0]), "an array of float64"),
        (np.array([True]), "an array of bool"),
        (np.array(["a"]), "an array of <U1"),
        (np.array(7), r"has the shape \(\)"),
        (np.array([[1, 2]]), r"has the shape \(1, 2\)"),
        (torch.tensor([1.0]), "a tensor of torch.float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "a tensor of torch.bfloat16"),
        (torch.tensor([True]), "an array of bool"),
        (torch.tensor([[1]]), r"has the shape \(1, 1\)"),
    ],
)
def test_what_is_no_sequence_of_ints_is_refused_in_words(tokens: Any, words: str) -> None:
    with pytest.raises(KvdError, match=words) as caught:
        token_frame(tokens)

    assert (caught.value.code, caught.value.retryable) == ("bad-tokens", False)


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([], dtype=np.int32)])
def test_no_tokens_are_an_empty_frame(empty: Any) -> None:
    assert token_frame(empty) == b""
