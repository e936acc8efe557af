"""By what an open receive is found, from its first part to its lease."""

from __future__ import annotations

import pytest

from kvd.core.handoff.open_receives import OpenReceives
from kvd.core.handoff.parts import NamedRequest, ReceiveAttempt, ReceivePart
from kvd.core.handoff.protocol import Decode


def attempt_of(table, *sources: str, session: int = 1, request: NamedRequest | None = None):
    numbers = [table.next_number() for _ in sources]
    attempt = ReceiveAttempt(
        numbers[0],
        room=9,
        session=session,
        since_s=0.0,
        deadline_s=1.0,
        prompt_tokens=4,
        is_preloaded=False,
        request=request,
    )
    pairs = zip(numbers, sources, strict=True)
    attempt.parts = tuple([ReceivePart(number, source, attempt) for number, source in pairs])
    table.add(attempt)
    return attempt


def offer(table, attempt):
    for part in attempt.parts:
        part.incarnation, part.handoff = f"{part.peer}-1", table.next_handoff()
        part.state = Decode.OFFERED
    table.offered(attempt)


@pytest.fixture
def table():
    return OpenReceives()


def test_a_part_is_found_by_its_handoff_once_it_is_offered(table):
    attempt = attempt_of(table, "p")
    assert not table.by_handoff

    offer(table, attempt)

    assert table.by_handoff == {1: attempt.parts[0]}


def test_an_attempt_stays_until_its_last_part_is_closed(table):
    attempt = attempt_of(table, "p", "q")
    offer(table, attempt)
    first, last = attempt.parts

    assert not table.close(first)
    assert table.attempts == {attempt.id: attempt}

    assert table.close(last)
    assert table.attempts == table.parts == table.by_handoff == {}


def test_what_was_never_offered_is_dropped_whole(table):
    attempt, other = attempt_of(table, "p", "q"), attempt_of(table, "p", session=2)

    table.drop(attempt)

    assert list(table.parts.values()) == list(other.parts)
    assert table.of_session(1) == []
    assert table.of_session(2) == [other]


def test_a_name_is_that_of_the_last_attempt_which_bears_it(table):
    request = NamedRequest("r", verb="receive", namespace="", digest=b"", n_tokens=4)
    first = attempt_of(table, "p", request=request)
    second = attempt_of(table, "p", request=request)

    table.unname(first)
    assert table.named == {second.name: second}

    table.unname(second)
    assert not table.named


def test_the_floor_is_the_lowest_handoff_of_which_there_is_something_to_say(table):
    assert table.offer_floor("p-1") == 1
    waits, goes = attempt_of(table, "p"), attempt_of(table, "p")
    offer(table, goes)

    assert table.offer_floor("p-1") == 1
    table.close(goes.parts[0])

    assert table.offer_floor("p-1") == 2, "the next id: who waits has none yet"
    assert waits.parts[0].state is Decode.QUEUED
