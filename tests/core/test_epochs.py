"""Namespaces that are flushed, and namespaces whose weights have changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.audit.invariants import violations
from kvd.core.inspect.snapshot import snapshot
from kvd.core.leases.epochs import MARK, MAX_EPOCH, MOST_EPOCHS, Epochs
from kvd.errors import Code, Refusal
from kvd.types import Tokens
from kvd.wire import admin, client, events
from tests.core.test_prompts import about
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 6 * PAGE))


def cached(side, prompt, namespace):
    lease = side.lease(prompt, namespace=namespace)
    side.call(client.CommitAndRelease, lease=lease.lease)


def found(side, namespace):
    return side.call(client.MatchPrefix, PROMPT, namespace=namespace).tokens


def test_a_flush_is_of_one_namespace_and_names_who_locks_what_stays():
    side = World().d
    for namespace in ("a", "b"):
        cached(side, PROMPT, namespace)
    held = side.lease(Tokens(PROMPT[: 8 * PAGE]), namespace="a")

    report = side.call(client.FlushNamespace, namespace="a")

    assert (report.freed_pages, report.kept_pages) == (4, 2)
    (kept,) = report.kept
    assert f"lease {held.lease}" in kept
    assert (found(side, "a"), found(side, "b")) == (2 * PAGE, 6 * PAGE)
    assert not violations(side.node)


def test_nothing_of_before_is_found_in_a_new_epoch_and_leases_of_before_go_on():
    world = World()
    side = world.d
    cached(side, PROMPT, "m")
    running = side.lease(Tokens(PROMPT + tokens((900, PAGE))), namespace="m")

    report = side.call(client.BeginEpoch, namespace="m", epoch=3)
    assert (report.freed_pages, report.kept_pages) == (0, 6)
    assert found(side, "m") == 0
    # What the old weights have computed is committed, and found by nobody.
    assert isinstance(side.call(client.CommitAndRelease, lease=running.lease), client.Done)
    assert found(side, "m") == 0

    cached(side, PROMPT, "m")
    assert found(side, "m") == 6 * PAGE
    assert snapshot(side.node).epochs == {"m": 3}
    (began,) = [one for one in world.d.events if isinstance(one, events.EpochBegan)]
    assert (began.namespace, began.epoch) == ("m", 3)
    assert not violations(side.node)


def test_another_namespace_stays_as_it_is():
    side = World().d
    cached(side, PROMPT, "")
    side.call(client.BeginEpoch, namespace="m", epoch=1)
    assert found(side, "") == 6 * PAGE


def test_the_same_epoch_is_no_news_and_an_earlier_one_is_refused():
    side = World().d
    side.call(client.BeginEpoch, namespace="m", epoch=5)
    cached(side, PROMPT, "m")
    again = side.call(client.BeginEpoch, namespace="m", epoch=5)
    back = side.call(client.BeginEpoch, namespace="m", epoch=4)
    assert (again.freed_pages, found(side, "m")) == (0, 6 * PAGE)
    assert (back.refusal.code, back.refusal.numbers) == (
        Code.WRONG_STATE,
        {"epoch": 4, "now": 5},
    )


def test_a_prompt_with_a_number_is_asked_about_in_the_epoch_of_now():
    side = World().d
    cached(side, PROMPT, "m")
    assert about(side, client.MatchPrefix, 1, 0, PROMPT, namespace="m").tokens == 6 * PAGE
    side.call(client.BeginEpoch, namespace="m", epoch=1)
    assert about(side, client.MatchPrefix, 1, 6 * PAGE, namespace="m").tokens == 0


def test_a_lease_of_before_is_not_sent_under_the_new_weights():
    side = World().p
    lease = side.lease(PROMPT, namespace="m")
    side.call(client.BeginEpoch, namespace="m", epoch=1)
    said = side.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, namespace="m")
    assert said.refusal.code is Code.PROMPT_MISMATCH


@pytest.mark.parametrize("namespace", [f"m{MARK}3", "x" * 250])
def test_names_that_cannot_have_an_epoch(namespace):
    side = World().d
    said = side.call(client.BeginEpoch, namespace=namespace, epoch=3)
    assert said.refusal.code is Code.BAD_REQUEST


def test_no_request_names_an_epoch_itself():
    side = World().d
    side.call(client.BeginEpoch, namespace="m", epoch=3)
    said = side.call(client.MatchPrefix, PROMPT, namespace=f"m{MARK}2")
    assert said.refusal.code is Code.BAD_REQUEST


def test_an_operator_says_it_too_and_rehearses_it_first():
    side = World().d
    cached(side, PROMPT, "m")
    verb = admin.RaiseEpoch(1, "m", 2)
    rehearsed = side.ask(admin.Rehearse(1, verb))
    assert found(side, "m") == 6 * PAGE
    report = side.ask(verb)
    assert (rehearsed.changed, report.changed) == ({"freed_pages": 6, "locked_pages": 0},) * 2
    assert found(side, "m") == 0
    flushed = side.ask(admin.Flush(1, namespace="m"))
    assert flushed.changed == {"freed_pages": 0, "locked_pages": 0}


def test_what_a_restart_finds_in_the_tree_is_the_epoch_again():
    epochs = Epochs("n")
    epochs.learn(["", "m", f"m{MARK}2", f"m{MARK}10", f"x{MARK}z", f"{MARK}4"])
    assert epochs.by_namespace == {"m": 10, "": 4}


@given(st.text(max_size=20), st.integers(-1, MAX_EPOCH + 1))
def test_the_name_in_the_tree_leads_back(namespace, epoch):
    epochs, after = Epochs("n"), Epochs("n")
    if epochs.flaw(namespace, epoch) is not None:
        return
    epochs.begin(namespace, epoch)
    name = epochs.internal(namespace)
    assert not isinstance(name, Refusal)
    after.learn([name])
    assert after.by_namespace == epochs.by_namespace


def test_there_are_only_so_many():
    epochs = Epochs("n")
    for number in range(MOST_EPOCHS):
        epochs.begin(f"n{number}", 1)
    assert epochs.flaw("one more", 1).code is Code.TOO_LARGE
    assert epochs.flaw("n7", 2) is None
