"""Engines' own copies in every order of a few steps; and daemons that are wrong are found out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvd.core.cache.lease import COPY
from kvd.wire.attach import CopyBegins
from tests.model import copies
from tests.support.compiled import replaces_methods

if TYPE_CHECKING:
    from tests.model.copies import Moment


def test_whatever_happens_in_a_few_steps_pages_are_safe_and_words_are_true() -> None:
    found = copies.explore(5)
    assert found.n_states > 800, found


def test_nor_is_a_page_given_away_over_a_restart_of_the_daemon() -> None:
    found = copies.explore(6, lambda: copies.after_restart("save 0"))
    assert found.n_states > 20, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.environ.get("KVD_MODEL") != "full", reason="KVD_MODEL=full explores it")
def test_and_in_many_steps() -> None:
    assert copies.explore(7).n_states > 2500


def lets_go_under_a_copy() -> Moment:
    """A copy does not hold the lease."""
    made = copies.began()
    begin = made.node.engine_copies.begin

    def loose(got, message):  # type: ignore[no-untyped-def]
        refusal = begin(got, message)
        if refusal is None:
            made.node.leases.leases[message.lease].holders.discard(COPY)
        return refusal

    made.node.engine_copies.begin = loose  # type: ignore[method-assign]
    return made


def counts_what_is_about_to_be_saved() -> Moment:
    """A save is written when it begins."""
    made = copies.began()
    of_all = made.node.engine_copies
    begin = of_all.begin

    def hasty(got, message):  # type: ignore[no-untyped-def]
        refusal = begin(got, message)
        if refusal is None and isinstance(message, CopyBegins) and message.to_pages:
            made.node.leases.leases[message.lease].written_tokens = message.upto_tokens
        return refusal

    of_all.begin = hasty  # type: ignore[method-assign]
    return made


def keeps_what_the_dead_copied() -> Moment:
    """Copies of a dead process are kept for."""
    made = copies.began()
    made.node.engine_copies.gone = lambda got: None  # type: ignore[method-assign]
    return made


def counts_beyond_a_gap() -> Moment:
    """A save counts whatever is lacking before it."""
    made = copies.began()
    of_all = made.node.engine_copies
    saved = of_all._saved

    def careless(copy, lease, copying):  # type: ignore[no-untyped-def]
        lease.said = (copy.from_token,)
        saved(copy, lease, copying)

    of_all._saved = careless  # type: ignore[method-assign]
    return made


@replaces_methods
@pytest.mark.parametrize(
    ("make", "depth", "words"),
    [
        (lets_go_under_a_copy, 4, "knows of 1 copies"),
        (counts_what_is_about_to_be_saved, 3, "no copy has reported"),
        (keeps_what_the_dead_copied, 5, "nothing copies it, and it is kept"),
        (counts_beyond_a_gap, 5, "no copy has reported"),
    ],
)
def test_a_daemon_that_is_wrong_is_found_out(make, depth, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(copies.CopiesViolated, match=words):
        copies.explore(depth, make)


def test_a_worker_that_comes_back_under_its_copies_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says with that that nothing of before moves any more: clients wait for that."""
    of_the_worker = copies._of_the_worker

    def hasty(moment):  # type: ignore[no-untyped-def]
        yield from of_the_worker(moment)
        plain = moment.plain
        if plain.life and not plain.is_connected and plain.is_back and "moving" in plain.orders:
            yield copies.Step("the worker comes back at once", _back_at_once)

    def _back_at_once(moment) -> None:  # type: ignore[no-untyped-def]
        moment.now(is_connected=True)
        moment.feed(copies.inputs.SessionWhole(copies.NOW_S, copies.ENGINE))

    monkeypatch.setattr(copies, "_of_the_worker", hasty)
    with pytest.raises(copies.CopiesViolated, match="moves"):
        copies.explore(5, lambda: copies.after_restart("save 0"))
