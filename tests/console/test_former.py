"""What consoles show of engines and leases of before a restart."""

from __future__ import annotations

import pytest

from kvd.console.concerns import concerns
from kvd.core import inputs
from kvd.core.inputs import Branch, FormerLease, FormerSession
from kvd.types import Pages, pack_ids
from tests.console.sentences import sentence_of
from tests.console.stage import Stage
from tests.core.world import World, tokens

WAITS = "the leases of before the restart to end, and their engines to come back"
PROMPT = tokens((1, 32))


def ids(*numbers: int) -> Pages:
    return Pages(pack_ids(list(numbers)))


@pytest.fixture
def stage() -> Stage:
    """A daemon that was restarted: works-0 had a lease on two cached pages and two of its own."""
    world = World()
    world.restart(world.d)
    works = FormerSession(3, "works-0", (4711,), (FormerLease(7, "", PROMPT, ids(3, 4)),))
    tree = (Branch(-1, "", PROMPT, ids(1, 2)),)
    world.d.feed(inputs.PoolAdopted(world.now_s, 1, tree, (works,), ids(5), 9))
    return Stage(world.d)


def test_its_client_is_awaited_until_it_is_back(stage):
    assert stage.row("clients", "client:3")["state"] == "awaited"
    stage.side.feed(inputs.ClientCameBack(stage.side.world.now_s, 3, 4711, (7,)))
    row = stage.row("clients", "client:3")
    assert (row["state"], row["leases"], row["held"], row["locked"]) == ("alive", 1, 2, 32)


def test_pages_that_were_not_proven_are_no_client(stage):
    assert set(stage.rows("clients")) == {"client:3"}


def test_its_leases_say_what_they_wait_for(stage):
    found = {
        key: (row["state"], row["owner"], row["client"], row["held"], row["waiting_for"])
        for key, row in stage.rows("leases").items()
    }
    assert found == {
        "lease:7": ("former", "works-0", "client:3", 2, "its engine to come back or to end"),
        "lease:10": ("former", "", None, 1, WAITS),
    }


def test_one_that_does_not_come_back_is_a_concern_and_a_dead_process_of_it_no_other(stage):
    stage.shell.dead = {4711}
    assert concerns(stage.now()) == []
    stage.side.world.pass_time(11)
    [found] = concerns(stage.now())
    assert (found.severity, found.kind, found.subject) == ("low", "awaited", "client:3")
    assert found.evidence == sentence_of(
        "one that does not come back is a concern and a dead process of it no other"
    )
    stage.side.feed(inputs.ClientHungUp(stage.side.world.now_s, 3))
    assert concerns(stage.now()) == []
