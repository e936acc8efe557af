"""What stands before a page, as far as prompts were told."""

from __future__ import annotations

from kvd.connectors.sglang.chains import KnownChains
from tests.connectors.sglang.world_names import names_of


def test_a_page_of_a_prompt_that_was_told_has_those_before_it():
    chains, names = KnownChains(), names_of(6)
    chains.tell(names[:4])
    chains.tell(names)
    assert [chains.before(name) for name in names] == [names[:end] for end in range(6)]


def test_of_any_other_it_is_not_known():
    chains, names = KnownChains(), names_of(6)
    chains.tell(names[:4])
    assert chains.before(names[4]) is None
    assert chains.before("") is None


def test_a_start_that_was_forgotten_is_not_known():
    chains, names = KnownChains(most=4), names_of(6)
    chains.tell(names)
    assert [chains.before(name) for name in names[2:]] == [None] * 4
    other = names_of(3, seed="b")
    chains.tell(other)
    assert chains.before(other[2]) == other[:2]
