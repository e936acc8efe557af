"""Which pages are in a device buffer: the longest unused go, those under a copy stay."""

from __future__ import annotations

import random

import pytest

from kvd.core.components.residency import Residency

WHOLE = 1000
"""So many pages are whole where a test does not say otherwise."""


def filled(n_slots: int, *pages: int) -> Residency:
    """These pages are there, the first one used longest ago."""
    made = Residency(n_slots)
    for page in pages:
        assert made.want([page], WHOLE) == [page]
    return made


def test_the_first_pages_take_the_slots_in_order() -> None:
    made = Residency(4)

    assert made.want([7, 3, 5], WHOLE) == [7, 3, 5]

    assert dict(made.slots) == {7: 0, 3: 1, 5: 2}


def test_what_is_there_is_not_copied_again() -> None:
    made = filled(4, 1, 2)

    assert made.want([2, 9, 1], WHOLE) == [9]

    assert dict(made.slots) == {2: 1, 9: 2, 1: 0}


def test_the_page_unused_for_longest_gives_its_slot() -> None:
    made = filled(3, 1, 2, 3)
    made.want([1], WHOLE)

    assert made.want([4, 5], WHOLE) == [4, 5]

    assert dict(made.slots) == {1: 0, 4: 1, 5: 2}


def test_a_wanted_page_is_not_evicted_for_another_one() -> None:
    made = filled(3, 1, 2, 3)

    assert made.want([9, 1, 8], WHOLE) == [9, 8]

    assert dict(made.slots) == {9: 1, 1: 0, 8: 2}


def test_a_page_under_a_copy_keeps_its_slot() -> None:
    made = filled(3, 1, 2, 3)
    made.copying([1, 2], 7)

    assert made.want([4], WHOLE) == [4]

    assert dict(made.slots) == {1: 0, 2: 1, 4: 2}


def test_more_than_is_free_of_copies_must_wait_and_changes_nothing() -> None:
    made = filled(3, 1, 2, 3)
    made.copying([1, 2], 7)
    before = list(made.slots.items())

    assert made.want([4, 5], WHOLE) is None
    assert list(made.slots.items()) == before

    made.copied(7)
    assert made.want([4, 5], WHOLE) == [4, 5]


def test_a_page_is_there_when_its_copy_is_over() -> None:
    made = Residency(3)
    made.copying(made.want([1, 2], WHOLE) or [], 7)
    assert not made.is_there([1])

    made.copied(7)

    assert made.is_there([1, 2])
    assert not made.is_there([1, 3])


def test_the_slots_of_a_lost_copy_are_free_again() -> None:
    made = filled(3, 9)
    made.copying(made.want([1, 2], WHOLE) or [], 7)

    made.not_copied(7)

    assert dict(made.slots) == {9: 0}
    assert made.want([1, 2], WHOLE) == [1, 2]
    assert made.n_copying == 0


def test_an_unfinished_page_is_copied_again_into_its_slot() -> None:
    made = Residency(3)
    assert made.want([4, 5], 5) == [4, 5]

    assert made.want([4, 5], 5) == [5]

    assert dict(made.slots) == {4: 0, 5: 1}


def test_a_page_that_became_whole_is_copied_once_more_and_then_stays() -> None:
    made = Residency(3)
    made.want([5], 5)

    assert made.want([5], 6) == [5]
    assert made.want([5], 6) == []


def test_an_unfinished_page_under_a_copy_must_wait() -> None:
    made = Residency(3)
    made.copying(made.want([5], 5) or [], 7)

    assert made.want([5], 6) is None


def test_an_unfinished_page_that_was_evicted_comes_back_as_any_other() -> None:
    made = Residency(1)
    made.want([5], 5)
    made.want([1], 5)

    assert made.want([5], 6) == [5]
    assert made.want([5], 6) == []


def test_pages_ahead_take_what_the_wanted_ones_leave() -> None:
    made = filled(4, 1, 2, 3, 4)
    made.want([3], WHOLE)
    made.copying([1], 7)

    assert made.want_ahead([5, 6, 7], WHOLE, [3]) == [5, 6]

    assert dict(made.slots) == {1: 0, 3: 2, 5: 1, 6: 3}


def test_pages_ahead_do_not_take_the_slots_of_each_other() -> None:
    made = filled(2, 1, 2)

    assert made.want_ahead([3, 2, 4], WHOLE, []) == [3]

    assert dict(made.slots) == {2: 1, 3: 0}


def test_a_page_ahead_that_is_there_counts_as_used() -> None:
    made = filled(3, 1, 2, 3)
    made.want_ahead([1], WHOLE, [])

    made.want([4], WHOLE)

    assert dict(made.slots) == {3: 2, 1: 0, 4: 1}


def test_an_unfinished_page_is_not_copied_ahead() -> None:
    made = Residency(4)

    assert made.want_ahead([4, 5], 5, []) == [4]


def test_a_larger_buffer_has_more_slots() -> None:
    made = filled(2, 1, 2)

    made.grow(4)

    assert made.want([3, 4], WHOLE) == [3, 4]
    assert dict(made.slots) == {1: 0, 2: 1, 3: 2, 4: 3}


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_wants_and_copies_keeps_pages_and_slots_one_to_one(seed: int) -> None:
    rng = random.Random(seed)
    made = Residency(rng.randint(1, 4))
    tickets: dict[int, list[int]] = {}
    whole = 6
    for ticket in range(1, 400):
        wanted = rng.sample(range(12), rng.randint(0, made.n_slots))
        match rng.randrange(6):
            case 0 | 1:
                before = dict(made.slots)
                missing = made.want(wanted, whole)
                if missing is None:
                    assert dict(made.slots) == before
                else:
                    assert set(wanted) <= set(made.slots)
                    assert set(wanted) - set(before) <= set(missing) <= set(wanted)
                    tickets[ticket] = missing
                    made.copying(missing, ticket)
            case 2:
                kept = [page for page in made.slots if rng.random() < 0.5]
                missing = made.want_ahead(wanted, whole, kept)
                assert set(kept) <= set(made.slots)
                tickets[ticket] = missing
                made.copying(missing, ticket)
            case 3 | 4 if tickets:
                over = rng.choice(list(tickets))
                del tickets[over]
                (made.copied if rng.random() < 0.8 else made.not_copied)(over)
            case _:
                made.grow(min(8, made.n_slots + rng.randint(0, 1)))
                whole += rng.randint(0, 1)
        under = {page for pages in tickets.values() for page in pages}
        assert under <= set(made.slots)
        assert made.n_copying == len(under)
        used = list(made.slots.values())
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(made.n_slots))
        assert len(used) + len(made._free) == made.n_slots
        assert not set(used) & set(made._free)
        assert made._unfinished <= set(made.slots)
