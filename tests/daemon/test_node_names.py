"""Real daemons that have one name, at once or one after another, and whom the third believes."""

from __future__ import annotations

import os

import pytest

from kvd.wire import admin
from tests.support.daemons import Daemon, Place, free_port, is_linked

SMALL = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "8", "pool.pages": "64"}
WITHIN_S = 20.0

AHEAD = """import time
now = time.time_ns
time.time_ns = lambda: now() + 86400 * 10**9
from kvd.__main__ import main
main()
"""


@pytest.fixture
def started():
    """Starts daemons, and stops them when the test ends."""
    every = []

    def start(*daemons):
        for one in daemons:
            every.append(one)
            one.start()
        for one in daemons:
            one.wait_ready()

    yield start
    for one in every:
        one.stop()


def incarnation_of(daemon):
    """Of whom ``daemon`` takes for p, while that one is up."""
    (peer,) = [one for one in daemon.snapshot().peers if one.name == "p"]
    return peer.incarnation if peer.state == "up" else ""


def own_incarnation(daemon):
    return daemon.snapshot().incarnation


def named_p(directory, which, decode, **changes):
    place = directory / which
    place.mkdir()
    one = Daemon("p", place, SMALL, **changes)
    one.knows(decode)
    return one


def why_peer(daemon, name):
    return daemon.ask(admin.Why(1, "peer", 0, name=name), admin.Because)


def log_of(daemon):
    return (daemon.directory / "log").read_text().splitlines()


def test_of_two_daemons_of_one_name_the_second_waits_and_comes_in_by_itself(tmp_path, started):
    decode = Daemon("d", tmp_path, SMALL)
    first, second = (named_p(tmp_path, which, decode) for which in ("first", "second"))
    started(decode, first)
    decode.wait_for(lambda: is_linked(decode), "no link", WITHIN_S)
    mine = own_incarnation(first)
    started(second)
    second.wait_for(
        lambda: any("two daemons call themselves" in line for line in log_of(second)),
        "is not told",
        WITHIN_S,
    )
    before = len(log_of(decode))
    assert incarnation_of(decode) == mine
    said = why_peer(decode, "p")
    assert any("two daemons call themselves 'p'" in fact for fact in said.facts), said

    first.kill()

    theirs = own_incarnation(second)
    decode.wait_for(lambda: incarnation_of(decode) == theirs, "is not let in", WITHIN_S)
    assert len(log_of(decode)) - before < 8, decode.quoted_log()

    third = named_p(tmp_path, "third", decode)  # the first one's node, started again
    started(third)
    assert incarnation_of(decode) == theirs
    second.stop()
    mine = own_incarnation(third)
    decode.wait_for(lambda: incarnation_of(decode) == mine, "does not come back", WITHIN_S)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_node_whose_clock_was_a_day_ahead_comes_back_on_another_disk(
    tmp_path, started, is_killed, monkeypatch
):
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "__init__.py").touch()
    (tmp_path / "ahead" / "__main__.py").write_text(AHEAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    place = Place(port=free_port())
    decode = Daemon("d", tmp_path, SMALL)
    (tmp_path / "first").mkdir()
    before = Daemon("p", tmp_path / "first", SMALL, place, module="ahead")
    (tmp_path / "second").mkdir()
    after = Daemon("p", tmp_path / "second", SMALL, place)
    decode.knows(before)
    started(decode, before)
    decode.wait_for(lambda: is_linked(decode), "no link", WITHIN_S)
    former = own_incarnation(before)

    if is_killed:
        before.kill()
    else:
        before.stop()
    started(after)

    now = own_incarnation(after)
    assert now < former
    decode.wait_for(lambda: incarnation_of(decode) == now, "is not let in", WITHIN_S)
    assert len(log_of(decode)) < 20, decode.quoted_log()
    decode.wait_for(lambda: is_linked(decode), "no link", WITHIN_S)


def test_a_peer_whose_host_cannot_be_resolved_is_told_by_that_reason_once(tmp_path, started):
    decode = Daemon("d", tmp_path, {**SMALL, "peers.connect.p": "tcp://kvd-no-host.invalid:7402"})
    (tmp_path / "keys").mkdir()
    decode.make_keys()
    decode.trusts("p", Daemon("p", tmp_path / "keys", SMALL).make_keys())
    started(decode)
    told = "the name kvd-no-host.invalid cannot be resolved"
    decode.wait_for(
        lambda: any(told in fact for fact in why_peer(decode, "p").facts), "no reason", WITHIN_S
    )
    assert sum(told in line for line in log_of(decode)) == 1
