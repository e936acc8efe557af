"""What pages are found by: three sorts that never meet, and what is refused of each."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.radix import RadixTree
from kvd.errors import Code, Refusal
from kvd.types import Tokens
from kvd.wire.page_address import (
    MAX_EXTRA_BYTES,
    MIN_PAGE_TOKENS,
    in_words,
    of_keys,
    with_extra,
)

PAGE = 16
PAGE_TOKENS = st.sampled_from([8, 9, 16, 17, 64])
EXTRA = st.binary(min_size=1, max_size=40)


def frame(*ids):
    return Tokens(np.array(ids, dtype="<i4").tobytes())


def key(number, size=32):
    return hashlib.blake2b(str(number).encode(), digest_size=size).digest()


def words(address):
    return np.frombuffer(address, dtype="<i4")


@st.composite
def addressed(draw):
    """Two pages' worth of one page size, each of any sort, and what they were made of."""
    page_tokens = draw(PAGE_TOKENS)
    made = []
    for _ in range(2):
        ids = frame(*draw(st.lists(st.integers(0, 3), min_size=page_tokens, max_size=page_tokens)))
        sort = draw(st.sampled_from(["tokens", "key", "extra"]))
        if sort == "key":
            size = draw(st.sampled_from([16, 32, 64]))
            said = draw(st.sampled_from([bytes(size), b"\xff" * size, key(1, size), key(2, size)]))
            made.append((("key", said), of_keys([said], page_tokens)))
        elif sort == "extra":
            extra = draw(EXTRA)
            made.append((("extra", extra, ids), with_extra(ids, extra, page_tokens)))
        else:
            made.append((("tokens", ids), ids))
    return made


@given(addressed())
def test_two_pages_are_equal_only_if_they_were_made_of_the_same(made):
    (one, first), (other, second) = made
    assert len(first) == len(second)
    assert (first == second) == (one == other)


@given(PAGE_TOKENS, st.data())
def test_what_is_said_in_pieces_is_what_is_said_at_once(page_tokens, data):
    """A prompt ends inside a page, and what is generated goes on there."""
    ids = frame(*range(3 * page_tokens + 5))
    cut = data.draw(st.integers(0, 3 * page_tokens + 5))
    head, tail = Tokens(ids[: 4 * cut]), Tokens(ids[4 * cut :])
    extra = data.draw(EXTRA)
    whole = with_extra(ids, extra, page_tokens)
    assert with_extra(head, extra, page_tokens) + with_extra(tail, extra, page_tokens, cut) == whole
    page = cut // page_tokens
    one = with_extra(ids, {page: extra}, page_tokens)
    begun = {page: extra} if cut % page_tokens else {}
    assert (
        with_extra(head, begun, page_tokens) + with_extra(tail, {page: extra}, page_tokens, cut)
        == one
    )


def test_a_key_that_fits_is_the_page():
    said = key(7)
    page = words(of_keys([said, key(8)], PAGE))
    assert page[0] == -32
    assert page[1:9].tobytes() == said
    assert not page[9:PAGE].any()
    assert page[PAGE] == -32


def test_a_key_longer_than_a_page_is_digested():
    said = key(7, 64)
    page = words(of_keys([said], MIN_PAGE_TOKENS))
    assert page[0] == -1
    assert page[1:].tobytes() == hashlib.blake2b(said, digest_size=28).digest()


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ([bytes(15)], {"position": 0, "bytes": 15}),
        ([bytes(65)], {"position": 0, "bytes": 65}),
        ([bytes(16), bytes(32)], {"position": 1, "bytes": 32}),
        (["0" * 32], {"position": 0, "bytes": 0}),
        (bytes(32), {}),
    ],
)
def test_keys_of_a_wrong_size_are_refused_with_the_numbers(keys, numbers):
    refusal = of_keys(keys, PAGE)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.numbers) == (Code.BAD_KEYS, numbers)


@pytest.mark.parametrize(
    ("extra", "numbers"),
    [
        (b"", {"page": "0", "bytes": 0}),
        ({1: bytes(MAX_EXTRA_BYTES + 1)}, {"page": "1", "bytes": MAX_EXTRA_BYTES + 1}),
        ({2: b"x"}, {"page": "2", "pages": 2}),
        ({-1: b"x"}, {"page": "-1", "pages": 2}),
        ({True: b"x"}, {"page": "True", "pages": 2}),
        ({0: "x"}, {"page": "0", "bytes": 0}),
        (["x"], {}),
    ],
)
def test_extra_keys_that_fit_no_page_are_refused_with_the_numbers(extra, numbers):
    refusal = with_extra(frame(*range(PAGE + 1)), extra, PAGE)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.numbers) == (Code.BAD_KEYS, numbers)


@pytest.mark.parametrize("call", [lambda: of_keys([key(1)], 4), lambda: with_extra(b"", b"x", 4)])
def test_short_pages_are_refused(call):
    refusal = call()
    assert isinstance(refusal, Refusal)
    assert refusal.numbers == {"page_tokens": 4, "needed_tokens": MIN_PAGE_TOKENS}


def test_nothing_has_no_pages():
    assert of_keys([], PAGE) == b""
    assert with_extra(Tokens(b""), b"x", PAGE) == b""


def test_only_the_named_pages_change():
    ids = frame(*range(3 * PAGE))
    said = with_extra(ids, {1: b"image"}, PAGE)
    assert said[: 4 * PAGE] == ids[: 4 * PAGE]
    assert said[8 * PAGE :] == ids[8 * PAGE :]
    assert not np.any(words(said)[PAGE : 2 * PAGE] == words(ids)[PAGE : 2 * PAGE])


def test_the_tree_shares_the_pages_before_an_image_and_none_after():
    tree = RadixTree(PAGE, eviction_order(Policy.LRU))
    ids = frame(*range(4 * PAGE))
    cat, dog = (with_extra(ids, {1: image}, PAGE) for image in (b"cat", b"dog"))
    node = tree.match(cat, "")
    tree.lock(node)
    tree.extend(node, cat, Tokens(np.arange(1, 5, dtype="<i4").tobytes()))
    assert [tree.probe(one, "") // PAGE for one in (cat, dog, ids)] == [4, 1, 1]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (frame(*range(PAGE)), "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
        (of_keys([bytes(range(32))], PAGE), "key 0001020304050607"),
        (of_keys([bytes(64)], PAGE), "digest"),
        (with_extra(frame(*range(PAGE)), b"x", PAGE), "tokens with an extra key"),
        (b"", ""),
    ],
)
def test_what_an_operator_reads(page, said):
    assert in_words(page).startswith(said)


def test_keys_of_another_type_are_named_with_what_to_do():
    said = [
        (
            of_keys(["0" * 32], PAGE),
            "key 0 is a str: give bytes, for a text those of text.encode()",
        ),
        (of_keys("0" * 32, PAGE), "keys are a sequence of bytes, one for each page, and no str"),
        (
            with_extra(frame(*range(PAGE)), {0: "x"}, PAGE),
            "the extra key of page 0 is a str: give bytes, for a text those of text.encode()",
        ),
    ]
    for refusal, words in said:
        assert isinstance(refusal, Refusal)
        assert refusal.message == words
