"""Prompts that a session has told and names by a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.inspect.snapshot import snapshot
from kvd.core.leases import prompts as rules
from kvd.core.leases.prompts import PromptBudget, ToldPrompts
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.errors import RETRYABLE, Code, Refusal
from kvd.types import Tokens, count
from kvd.wire import client
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 6 * PAGE))


def about(side, kind, number, known_tokens, more=b"", **fields):
    call = side.calls + 1
    return side.call(
        client.AboutPrompt,
        more,
        prompt=number,
        known_tokens=known_tokens,
        request=kind(call=call, **fields),
    )


def cached(side, prompt):
    lease = side.lease(prompt)
    side.call(client.CommitAndRelease, lease=lease.lease)


def test_a_known_prompt_is_asked_about_without_its_tokens():
    side = World().d
    cached(side, PROMPT)
    first = about(side, client.MatchPrefix, 5, 0, PROMPT)
    again = about(side, client.MatchPrefix, 5, 6 * PAGE)
    lease = about(side, client.OpenLease, 5, 6 * PAGE)
    assert [first.tokens, again.tokens, lease.prefix_tokens] == [6 * PAGE] * 3
    (session,) = [one for one in snapshot(side.node).clients if one.prompts]
    assert (session.prompts, session.prompt_bytes) == (1, len(PROMPT))


def test_it_goes_on_and_goes_another_way():
    side = World().d
    more, other = tokens((900, PAGE)), tokens((7000, 2 * PAGE))
    cached(side, Tokens(PROMPT + more))
    assert about(side, client.MatchPrefix, 5, 0, PROMPT).tokens == 6 * PAGE
    assert about(side, client.MatchPrefix, 5, 6 * PAGE, more).tokens == 7 * PAGE
    assert about(side, client.MatchPrefix, 5, 2 * PAGE, other).tokens == 2 * PAGE
    # What was behind it is dropped with that.
    assert about(side, client.MatchPrefix, 5, 4 * PAGE).tokens == 2 * PAGE
    assert about(side, client.MatchPrefix, 5, 5 * PAGE).refusal.code is Code.PROMPT_UNKNOWN


@pytest.mark.parametrize("known_pages", [0, 1, 2, 5])
def test_a_shorter_one_is_no_more_than_was_asked_about(known_pages):
    """Its engine has gone back in it: what is kept behind that is no part of what it asks."""
    side = World().d
    cached(side, PROMPT)
    about(side, client.MatchPrefix, 5, 0, PROMPT)
    n_tokens = known_pages * PAGE

    assert about(side, client.MatchPrefix, 5, n_tokens).tokens == n_tokens
    about(side, client.MatchPrefix, 6, 0, PROMPT)
    leased = about(side, client.OpenLease, 6, n_tokens, reserve_tokens=PAGE)

    assert side.node.leases.leases[leased.lease].tokens == PROMPT[: 4 * n_tokens]
    assert len(leased.pages) == 4 * (known_pages + 1)
    assert about(side, client.MatchPrefix, 6, 6 * PAGE).refusal.code is Code.PROMPT_UNKNOWN


def test_a_shorter_one_is_what_is_received_and_sent():
    world = World()
    short = Tokens(PROMPT[: 4 * 2 * PAGE])
    for side in (world.p, world.d):
        about(side, client.MatchPrefix, 5, 0, PROMPT)
    leased = world.p.lease(PROMPT)
    world.p.write(leased.pages, PROMPT)
    about(world.d, client.ReceiveRequest, 5, 2 * PAGE, room=7, source=("p",))
    about(world.p, client.HandOver, 5, 2 * PAGE, room=7, lease=leased.lease)
    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    assert world.d.node.leases.leases[got.lease].tokens == short
    assert len(got.pages) == 4 * 2


def test_what_is_not_kept_is_told_from_its_start_and_nothing_was_done():
    world = World()
    side = world.d
    refused = about(side, client.OpenLease, 5, PAGE)
    assert refused.refusal.code is Code.PROMPT_UNKNOWN
    assert Code.PROMPT_UNKNOWN in RETRYABLE
    assert refused.refusal.numbers == {"kept": 0, "known_tokens": PAGE}
    assert not side.node.leases.leases


def test_it_is_kept_whatever_comes_of_the_request():
    side = World(d_pages=4).d
    assert about(side, client.OpenLease, 5, 0, PROMPT).refusal.code is Code.TOO_LARGE
    assert about(side, client.MatchPrefix, 5, 6 * PAGE).tokens == 0


def test_it_is_of_its_session_and_ends_with_it():
    side = World().d
    about(side, client.MatchPrefix, 5, 0, PROMPT)
    own = next(one.session for one in snapshot(side.node).clients if one.prompts)
    other = side.attach("other")
    assert [one.prompts for one in snapshot(side.node).clients if one.session == other] == [0]
    side.hang_up(own)
    assert not [one for one in snapshot(side.node).clients if one.prompts]


def kept_bytes(side):
    return {one.session: one.prompt_bytes for one in snapshot(side.node).clients}


def test_all_sessions_together_have_a_bound_and_whoever_keeps_most_forgets():
    page = 4 * PAGE
    side = World(max_told_bytes=10 * page).d
    small, large = 1, side.attach("large")
    about(side, client.MatchPrefix, 1, 0, tokens((1, 2 * PAGE)))
    for number in range(5):
        prompt = tokens((100 * number, 2 * PAGE))
        said = side.calls + 1
        side.call(
            client.AboutPrompt,
            prompt,
            session=large,
            prompt=number,
            known_tokens=0,
            request=client.MatchPrefix(call=said),
        )
        assert sum(kept_bytes(side).values()) <= 10 * page
    assert kept_bytes(side) == {small: 2 * page, large: 8 * page}
    # It is the oldest of the large one that is told anew; of the small one nothing.
    assert about(side, client.MatchPrefix, 1, 2 * PAGE).tokens == 0
    mine = side.node.sessions.by_id[large].prompts
    assert list(mine.by_number) == [1, 2, 3, 4]
    side.hang_up(large)
    assert side.node.owners.sessions.prompts.n_bytes == 2 * page
    assert len(side.node.owners.sessions.prompts.sessions) == 1


def test_the_prompt_that_is_asked_about_stays_however_low_the_bound_is():
    side = World(max_told_bytes=0).d
    other = side.attach("other")
    about(side, client.MatchPrefix, 1, 0, PROMPT)
    assert about(side, client.MatchPrefix, 1, 6 * PAGE).tokens == 0
    about(side, client.MatchPrefix, 2, 0, PROMPT)
    assert kept_bytes(side) == {1: len(PROMPT), other: 0}
    assert about(side, client.MatchPrefix, 1, PAGE).refusal.code is Code.PROMPT_UNKNOWN


TOLD = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.booleans()), max_size=80
)


@given(TOLD, st.integers(0, 80))
def test_the_sum_of_all_is_what_it_says(steps, limit):
    budget = PromptBudget(limit)
    sessions = [ToldPrompts(budget) for _ in range(4)]
    for who, number, n_tokens, ends in steps:
        if ends and len(budget.sessions) > 1 and sessions[who] in budget.sessions:
            sessions[who].end()
        if sessions[who] not in budget.sessions:
            sessions[who] = ToldPrompts(budget)
        told = sessions[who].told(number, 0, tokens((1, n_tokens)), most=100)
        assert not isinstance(told, Refusal)
        assert sessions[who].by_number[number] == told
        sums = [sum(map(len, one.by_number.values())) for one in budget.sessions]
        assert sums == [one.n_bytes for one in budget.sessions]
        assert budget.n_bytes == sum(sums)
        assert budget.n_bytes <= max(limit, len(told))


def test_a_forgotten_one_is_unknown():
    side = World().d
    about(side, client.MatchPrefix, 5, 0, PROMPT)
    assert isinstance(side.call(client.ForgetPrompts, prompts=(5, 6)), client.Done)
    assert about(side, client.MatchPrefix, 5, PAGE).refusal.code is Code.PROMPT_UNKNOWN


def test_two_numbers_of_one_call_are_refused():
    side = World().d
    said = side.call(
        client.AboutPrompt,
        PROMPT,
        prompt=1,
        known_tokens=0,
        request=client.MatchPrefix(call=side.calls + 7),
    )
    assert said.refusal.code is Code.BAD_REQUEST


def test_a_replayed_node_knows_them():
    side = World().d
    about(side, client.MatchPrefix, 5, 0, PROMPT)
    copy = thaw(freeze(side.node))
    (mine,) = [one.prompts for one in copy.sessions.by_id.values() if one.prompts.by_number]
    assert (dict(mine.by_number), mine.n_bytes) == ({5: PROMPT}, len(PROMPT))


@pytest.mark.parametrize("known_tokens", [-1, 11])
def test_no_other_length_than_what_is_kept_is_believed(known_tokens):
    told = ToldPrompts()
    told.told(1, 0, tokens((1, 10)), most=100)
    refusal = told.told(1, known_tokens, tokens((1, 1)), most=100)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.PROMPT_UNKNOWN


def test_the_whole_of_it_has_the_limit_of_a_prompt():
    told = ToldPrompts()
    told.told(1, 0, tokens((1, 60)), most=100)
    refusal = told.told(1, 60, tokens((1, 41)), most=100)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.numbers) == (Code.TOO_LARGE, {"tokens": 101, "limit": 100})
    assert told.told(1, 60, tokens((1, 40)), most=100)


STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(0, 8), st.booleans()), max_size=60
)


@given(STEPS)
def test_it_is_what_was_told_and_stays_within_its_bounds(steps):
    """Beside a table without bounds: what is kept is equal to it, what is not is unknown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "MOST_PROMPTS", 4)
        patch.setattr(rules, "MOST_PROMPT_BYTES", 4 * 20)
        told, model = ToldPrompts(), {}
        for at, (number, known, n_more, forgets) in enumerate(steps):
            if forgets:
                told.forget(number)
                model.pop(number, None)
                continue
            more = tokens((100 * at, n_more)) if n_more else Tokens(b"")
            kept = model.get(number, b"")
            said = told.told(number, known, more, most=1000)
            if isinstance(said, Refusal):
                assert known > count(told.by_number.get(number, b""))
                continue
            assert said == kept[: 4 * known] + more
            model[number] = said
            assert dict(told.by_number).items() <= model.items()
            assert told.n_bytes == sum(map(len, told.by_number.values()))
            assert len(told.by_number) <= 4
            assert told.n_bytes <= 80 or len(told.by_number) == 1
            model = {key: model[key] for key in told.by_number}
