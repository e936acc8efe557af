"""The tail of a prompt that has window pages, and what a slide leaves behind: exact numbers.

scenario C1, scenario C3, scenario C5, scenario C6, scenario C19, scenario C20.
"""

from __future__ import annotations

import pytest

from kvd.core.components.tail import most_pages, slid_start, span, tail_start

TAILS = [
    # prompt, window, page, tail without a cache, tail with one, longest reusable prefix with one
    (0, 128, 64, 0, 0, 0),
    (50, 128, 64, 50, 50, 0),
    (128, 128, 64, 128, 128, 0),
    (129, 128, 64, 129, 129, 0),
    (191, 128, 64, 191, 191, 0),
    (192, 128, 64, 128, 192, 0),
    (193, 128, 64, 129, 129, 64),
    (1000, 128, 64, 168, 168, 832),
    (1000, 100, 64, 104, 104, 896),
    (4097, 4096, 256, 4097, 4097, 0),
    (10_000, 128, 256, 272, 272, 9728),
    (10_000, 4096, 256, 4112, 4112, 5888),
]


@pytest.mark.parametrize(("prompt", "window", "page", "tail"), [row[:4] for row in TAILS])
def test_the_tail_of_a_prompt_that_is_not_cached(prompt, window, page, tail):
    assert prompt - tail_start(prompt, window, page, cached=False) == tail


@pytest.mark.parametrize(("prompt", "window", "page", "_", "tail", "prefix"), TAILS)
def test_the_tail_of_a_prompt_that_is_cached(prompt, window, page, _, tail, prefix):
    assert prompt - tail_start(prompt, window, page, cached=True) == tail
    assert tail_start(prompt, window, page, cached=True) == prefix


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("prompt", [0, 1, 128, 1000])
def test_with_pages_of_one_token_every_token_has_a_window_page(prompt, cached):
    assert tail_start(prompt, 128, 1, cached=cached) == 0
    assert slid_start(prompt, 128, 1, cached=cached) == 0


@pytest.mark.parametrize(
    ("upto", "window", "page", "cached", "start"),
    [
        (1000, 128, 64, True, 832),
        (1000, 100, 64, True, 832),
        (1000, 100, 64, False, 896),
        (1000, 128, 64, False, 832),
        (128, 128, 64, True, 0),
        (193, 128, 64, True, 64),
        (0, 128, 64, True, 0),
    ],
)
def test_what_is_behind_the_window_while_decoding(upto, window, page, cached, start):
    assert slid_start(upto, window, page, cached=cached) == start


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("window", "page"), [(128, 64), (100, 64), (1, 16), (128, 256), (7, 2)])
def test_a_prompt_that_was_computed_while_sliding_still_has_its_tail(window, page, cached):
    for prompt in range(700):
        tail = tail_start(prompt, window, page, cached=cached)
        slid = slid_start(prompt, window, page, cached=cached)
        assert slid <= tail
        assert tail % page == slid % page == 0
        assert prompt - slid >= min(prompt, window)


@pytest.mark.parametrize(
    ("window", "page", "tokens"), [(128, 64, 128), (100, 64, 128), (1, 16, 16)]
)
def test_a_sequence_goes_on_from_a_boundary_with_whole_pages_of_window_before_it(
    window, page, tokens
):
    assert span(window, page) == tokens


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("window", "page", "step"), [(128, 64, 64), (100, 64, 1), (5, 4, 9)])
def test_as_many_pages_are_promised_as_a_step_after_a_slide_ever_maps(window, page, step, cached):
    most = 0
    for upto in range(600):
        first = slid_start(upto, window, page, cached=cached) // page
        most = max(most, -(-(upto + step) // page) - first)

    assert most <= most_pages(window, step, page) <= most + 1


def test_a_window_shorter_than_a_page_counts_as_a_page_where_the_tail_is_cached():
    # 9900 - 1 - 256 is token 9643; the last whole page, from 9728 on, has a whole one before it.
    assert tail_start(9900, 128, 256, cached=True) == 9472
    assert tail_start(9900, 128, 256, cached=False) == 9728
