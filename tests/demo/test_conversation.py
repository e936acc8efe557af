"""The script of the demo, and the prefix cache it is checked by."""

from __future__ import annotations

import pytest

from kvd.demo.conversation import ExpectedCache, write_script


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_script_repeats_a_prompt_of_whole_pages(page_size: int) -> None:
    """scenario A4: the retry finds every token of its prompt cached."""
    script = write_script(turns=5, vocabulary=2048, page_size=page_size, seed=1)
    messages = {(turn.conversation, turn.number): turn.message for turn in script.turns}

    assert [(turn.conversation, turn.number) for turn in script.turns] == [
        *(("first", number) for number in range(1, 6)),
        ("second", 1),
        ("second", 2),
        ("retry", 1),
    ]
    assert messages["retry", 1] == messages["second", 1]
    assert (len(script.system) + len(messages["retry", 1])) % page_size == 0
    assert script == write_script(turns=5, vocabulary=2048, page_size=page_size, seed=1)


def test_script_bounds_what_it_needs() -> None:
    script = write_script(turns=3, vocabulary=2048, page_size=16, seed=1)

    assert script.cached_tokens_at_most() == 4 * 300 + 3 * 56 + (52 + 16) + 56 + (52 + 16) + 56


@pytest.mark.parametrize(
    ("cached", "prompt", "prefix"),
    [
        ((), tuple(range(100)), 0),
        (tuple(range(64)), tuple(range(100)), 64),
        (tuple(range(70)), tuple(range(70)) + (999,) * 30, 64),
        (tuple(range(96)), tuple(range(96)), 96),
        (tuple(range(96)), tuple(range(97)), 96),
        (tuple(range(15)), tuple(range(100)), 0),
        (tuple(range(96)), tuple(range(40)) + (999,) * 60, 32),
    ],
)
def test_expected_cache_finds_the_longest_prefix_in_whole_pages(
    cached: tuple[int, ...], prompt: tuple[int, ...], prefix: int
) -> None:
    """scenario A1 to A5, as the demo works them out without a daemon."""
    cache = ExpectedCache(16)
    cache.add((5, 5, 5))
    cache.add(cached)

    assert cache.prefix_tokens(prompt) == prefix


def test_script_has_a_control_for_each_part_of_the_pool() -> None:
    one = write_script(turns=2, vocabulary=2048, page_size=16, seed=1)
    two = write_script(turns=2, vocabulary=2048, page_size=16, seed=1, controls=2)

    assert [turn.conversation for turn in two.controls] == ["control 1", "control 2"]
    assert two.controls[:1] == one.controls
    assert two.turns == one.turns
    assert two.cached_tokens_at_most() == one.cached_tokens_at_most() + 300 + 56
