"""Prompts of which pages lie in a tier below the pool: both halves with real daemons and a disk."""

from __future__ import annotations

import itertools
import time

import pytest

from kvd.client import connect_sync
from tests.connectors.vllm.stand_ins import BLOCK, COMES_S, Call, MiniEngine, Request, StandInNode
from tests.connectors.vllm.test_daemons import (  # noqa: F401 - the last two are fixtures
    POOL,
    PROMPT,
    engine_of,
    leases_of,
    patience,
)
from tests.support.daemons import one_daemon, two_daemons

NAMESPACE = "model"
WRITTEN_S = 0.1
"""What is next to be evicted is written in that time, most often; what was not is done anew."""


def with_disk(directory):
    """A pool, and a disk below it."""
    disk = {
        "directory": str(directory / "disk"),
        "size": "64MiB",
        "max_moving": "1MiB",
        "wait_s": "60",
    }
    return POOL | {"pool.pages": "128"} | {f"tiers.disk.{key}": disk[key] for key in disk}


def other(number):
    """A prompt that does not begin as ``PROMPT`` does, nor as any other one."""
    return [7000 + 128 * number + n for n in range(128)]


def push_out(engine, daemon):
    """Compute others until ``PROMPT`` lies in the tier, and not in the pool any more."""
    end_s = time.monotonic() + COMES_S
    with connect_sync(daemon.client, name="looks") as node:
        for number in itertools.count():
            told = node.match(PROMPT, namespace=NAMESPACE)
            if not told.tokens and told.tier_tokens == len(PROMPT):
                return
            assert time.monotonic() < end_s, told
            is_lost = told.tokens + told.tier_tokens < len(PROMPT)
            prompt = PROMPT if is_lost else other(number)
            engine.run(Request(f"pushes {number}", prompt))
            time.sleep(WRITTEN_S)


@pytest.fixture
def pushed_out(tmp_path, engine_of):  # noqa: F811
    """An engine whose daemon has ``PROMPT`` on its disk alone."""
    with one_daemon(tmp_path, with_disk(tmp_path)) as daemon:
        engine = engine_of(daemon, computes_per_s=1.0)  # what moves is looked at, not how soon
        push_out(engine, daemon)
        yield engine, daemon


def test_a_prompt_that_lies_on_a_disk_is_read_and_not_computed(pushed_out):
    engine, daemon = pushed_out

    found, _ = engine.run(Request("again", PROMPT))

    assert found == len(PROMPT) - 1
    engine.until(lambda: leases_of(daemon) == [])


def test_a_prompt_that_another_node_sends_comes_though_a_disk_has_it_too(tmp_path, engine_of):  # noqa: F811
    (tmp_path / "disks").mkdir()
    of_p = POOL | {"pool.pages": "128"}
    with two_daemons(tmp_path, with_disk(tmp_path / "disks"), prefill=of_p) as pair:
        p, d = engine_of(pair.prefill), engine_of(pair.decode)
        push_out(d, pair.decode)
        _, told = p.run(Request("sent", PROMPT, {"do_remote_decode": True}))

        found, _ = d.run(Request("again", PROMPT, told))

        assert found == len(PROMPT) - 1
        assert d.unmet == []


# ---- with a daemon that is played ----------------------------------------------------------------

SHORT = list(range(500, 500 + 8 * BLOCK))


@pytest.fixture
def engine(patience):  # noqa: F811
    """Its node has half of ``SHORT`` in its pool, and more of it in a tier."""
    patience.lose()  # no time passes here but as the test says
    engine = MiniEngine(StandInNode(), computes_per_s=100.0)
    engine.node.share(SHORT[: 3 * BLOCK])
    engine.node.tier.append(tuple(SHORT[: 6 * BLOCK]))
    return engine


def found_of(engine, request, steps=40):
    """How many tokens the engine is told of, in the end."""
    engine.half.arrived(request, lora=None, extra={})
    for _ in range(steps):
        found, _ = engine.half.matched(request, 0)
        if found is not None:
            return found
        engine.half.step({})
        engine.clock_s += 0.01
    raise AssertionError("it is asked again for ever")


def test_what_a_tier_has_is_waited_for_no_longer_than_it_takes_to_compute(engine):
    assert found_of(engine, Request(1, SHORT)) == 6 * BLOCK
    assert engine.node.waited_s == [3 * BLOCK / 100.0]


@pytest.mark.parametrize(
    ("most", "found", "waits"),
    [(12, 3 * BLOCK, []), (16, 4 * BLOCK, [0.04]), (100, 6 * BLOCK, [0.12])],
)
def test_a_tier_is_waited_for_where_more_of_it_may_be_loaded(engine, most, found, waits):
    assert found_of(engine, Request(1, SHORT, {"max_load_tokens": most})) == found
    assert engine.node.waited_s == waits


def test_it_is_told_how_much_was_read_from_a_tier(engine):
    request = Request(1, SHORT)
    found = found_of(engine, request)
    engine.half.given_blocks(request, found)

    assert engine.half.tier_tokens(request.request_id, found) == 3 * BLOCK
    assert engine.half.counts.tier_tokens == 3 * BLOCK


@pytest.mark.parametrize(("ms", "rate"), [(121.0, 100.0), (1.0, 0.0)])
def test_what_comes_later_than_it_would_be_computed_is(engine, ms, rate):
    engine.half._claims._computes_per_s, engine.node.tier_ms = rate, ms

    assert found_of(engine, Request(1, SHORT)) == 3 * BLOCK
    assert engine.node.waited_s == []


def test_what_does_not_come_in_that_time_is_computed_and_what_is_cached_is_used(engine):
    request = Request(1, SHORT)
    begin_lease = engine.node.begin_lease

    def begin(*asked, deadline_s, **more):
        if not deadline_s:
            return begin_lease(*asked, deadline_s=0, **more)
        return Call(engine.node, lambda: None, lambda _: None, hangs=True)

    engine.node.begin_lease = begin

    assert found_of(engine, request) == 3 * BLOCK
    assert 0.12 < engine.clock_s < 0.25


def test_behind_many_that_wait_it_is_waited_for_too(engine):
    engine.half._claims.most_ahead = 0

    assert found_of(engine, Request(1, SHORT)) == 6 * BLOCK


def test_one_that_is_taken_back_while_it_waits_leaves_nothing(engine):
    request = Request(1, SHORT)
    engine.half.arrived(request, lora=None, extra={})
    engine.node.holds = True
    assert engine.half.matched(request, 0)[0] is None

    engine.half.finished(request)
    engine.node.holds = False
    engine.node.come()
    engine.half.step({})

    assert engine.node.leases == {}
