"""``examples/engine``: each runs with real daemons, and goes on when they are gone."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvd.client import connect, connect_sync, join
from tests.support.daemons import one_daemon, two_daemons

HERE = Path(__file__).parents[2] / "examples" / "engine"


@pytest.fixture
def example(monkeypatch):
    """One of them as a module, whose functions can be called."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(HERE) in str(vars(sys.modules[name]).get("__file__")):
            del sys.modules[name]


def said(name, *words):
    """What it says, by lines."""
    done = subprocess.run(
        [sys.executable, f"{name}.py", *words],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def held(daemon):
    return sum(pool.held_pages + pool.locked_pages for pool in daemon.snapshot().pools)


def nothing_is_held(daemon):
    daemon.wait_for(lambda: held(daemon) == 0, "something is held", 30)


@contextmanager
def stopped(daemon):
    """It is there and does not answer."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.fixture
def daemon(tmp_path):
    with one_daemon(tmp_path, {}) as started:
        yield started


@pytest.fixture
def pair(tmp_path):
    with two_daemons(tmp_path, {}) as started:
        yield started


def test_all_of_them_are_in_the_page_that_lists_them() -> None:
    files = {path.name for path in HERE.glob("*.py")}
    page = (HERE / "README.md").read_text("utf-8")
    assert {name for name in files if f"`{name}`" in page} == files
    assert all(f"python {name} ipc" in page for name in files - {"model.py"})


def test_kv_of_other_tokens_or_of_another_place_is_noticed(example) -> None:
    """The negative control of all others here."""
    model = example("model")
    memory = [np.zeros((8, 16, 2, 4), np.uint16) for _ in range(4)]
    places, tokens = np.array([5, 1, 3]), np.arange(40)
    model.compute(memory, places, tokens, 0)
    assert model.wrong(memory, places, tokens) == 0
    assert model.wrong(memory, places[[1, 0, 2]], tokens) == 32
    assert model.wrong(memory, places, np.append([7], tokens[1:])) == 40
    memory[2][1, 3, 1, 2] += 1
    assert model.wrong(memory, places, tokens) == 1


# ---- the smallest --------------------------------------------------------------------------------


def test_the_smallest_finds_what_it_has_left(daemon) -> None:
    wanted = "tokens were there, the rest is computed; 0 of 100 are wrong"
    assert said("smallest", daemon.client) == ["match: 0 tokens are cached", f"lease: 0 {wanted}"]
    again = said("smallest", daemon.client)
    assert again == ["match: 96 tokens are cached", f"lease: 96 {wanted}"]
    nothing_is_held(daemon)
    daemon.kill()
    assert said("smallest", daemon.client) == ["computed without kvd: unreachable"]


# ---- the scheduler -------------------------------------------------------------------------------


def stepped(scheduler, requests, within_s=60.0):
    """Step until all are computed; how many steps that were."""
    until_s, steps = time.monotonic() + within_s, 0
    while running := [one for one in requests if one.computed < len(one.tokens)]:
        assert time.monotonic() < until_s, running
        scheduler.step(running)
        steps += 1
        time.sleep(0.002)
    return steps


def test_the_scheduler_serves_what_begins_alike(daemon) -> None:
    lines = said("scheduler", daemon.client, "4")
    found = [int(line.split()[2]) for line in lines[:-1]]
    assert sorted(found) == found
    assert found[-1] >= 512
    assert [line for line in lines[:-1] if not line.endswith(", 0 wrong")] == []
    nothing_is_held(daemon)


def test_a_daemon_that_hangs_is_not_waited_for(example, daemon) -> None:
    """Steps go on while it is asked, and the request is computed when it has not answered."""
    module = example("scheduler")
    scheduler = module.Scheduler(daemon.client)
    scheduler.start()
    request = module.Request(1, np.arange(200))
    with stopped(daemon):
        scheduler.step([request])
        assert request.asked is not None
        assert stepped(scheduler, [request]) > 3
    assert (request.why_alone, request.lease) == ("deadline", None)
    scheduler.close()
    nothing_is_held(daemon)


def test_what_was_computed_in_pages_that_are_lost_is_computed_again(example, daemon) -> None:
    """A daemon that is killed amid a request, and another one behind it."""
    module = example("scheduler")
    scheduler = module.Scheduler(daemon.client)
    scheduler.start()
    request = module.Request(1, np.arange(1000))
    while request.computed < module.CHUNK:
        scheduler.step([request])
    first = scheduler.node
    daemon.kill()
    scheduler.step([request])
    assert (request.lease, request.computed) == (None, 0)
    assert request.why_alone == "before-restart"
    stepped(scheduler, [request])

    daemon.start()
    daemon.wait_ready()
    while scheduler.node in {first, None}:
        scheduler.step([])
        time.sleep(0.01)
    again = module.Request(2, np.arange(1000))
    stepped(scheduler, [again])
    assert (again.why_alone, again.found, again.wrong) == ("", 0, 0)
    scheduler.close()
    nothing_is_held(daemon)


def test_without_a_daemon_the_scheduler_computes(tmp_path) -> None:
    lines = said("scheduler", f"ipc://{tmp_path}/client.sock", "2")
    assert lines[:-1] == ["request 0: no session", "request 1: no session"]


# ---- blocks --------------------------------------------------------------------------------------


def test_blocks_are_loaded_with_what_was_saved(daemon) -> None:
    assert said("blocks", daemon.client) == [
        *("0 tokens loaded, 0 wrong", "saved"),
        *("96 tokens loaded, 0 wrong", "saved"),
    ]
    nothing_is_held(daemon)
    daemon.kill()
    assert said("blocks", daemon.client) == ["computed without kvd: unreachable"]


def test_a_rank_whose_daemon_is_gone_computes_what_it_cannot_load(example, daemon) -> None:
    blocks = example("blocks")
    with connect_sync(daemon.client, name="blocks", key="k", on_unreachable="miss") as node:
        worker = join(daemon.client, key="k", rank=0, ranks=1)
        rank = blocks.Rank(worker)

        def order():
            lease = node.lease(blocks.PROMPT, deadline_s=0)
            return lease, blocks.Order(
                lease.key, lease.pages.copy(), blocks.PROMPT, lease.prefix_len
            )

        lease, first = order()
        assert rank.save(first, *rank.compute(first)[1:]) == "saved"
        lease.release(())
        lease, second = order()
        assert second.cached_tokens == 96
        daemon.kill()
        text, *where = rank.compute(second)
        assert text == "0 tokens loaded (unreachable), 0 wrong"
        assert rank.save(second, *where) == "not saved (unreachable)"
        lease.leave(())
        assert len(rank._free) == blocks.BLOCKS
        rank.close()
        worker.close()


# ---- a pull --------------------------------------------------------------------------------------


def test_a_prefix_is_pulled_once(pair) -> None:
    words = pair.decode.client, pair.prefill.client
    right = ["prefill: 0 of 256 tokens are wrong", "decode: 0 of 333 tokens are wrong"]
    first, again = said("pull", *words), said("pull", *words)
    assert first[::2] == again[::2] == right
    assert first[1] == "pulled: 256 tokens are here, 0 were before"
    assert again[1] == "pulled: 320 tokens are here, 320 were before"
    nothing_is_held(pair.decode)
    nothing_is_held(pair.prefill)


def test_a_source_that_is_gone_costs_a_prefill(pair) -> None:
    pair.prefill.kill()
    gone, refused, right = said("pull", pair.decode.client, pair.prefill.client)
    assert gone == "nothing was computed there: unreachable"
    assert refused == "not pulled: peer-unknown"
    assert right == "decode: 0 of 333 tokens are wrong"
    nothing_is_held(pair.decode)


# ---- an arena ------------------------------------------------------------------------------------


def test_a_prompt_goes_from_arena_to_arena(pair) -> None:
    words = pair.decode.client, pair.prefill.client
    for _ in range(2):
        assert sorted(said("arena", *words)) == [
            "decode: 0 of 200 tokens are wrong",
            "decode: it has come, with b'first token'",
            "prefill: it was taken",
        ]
    nothing_is_held(pair.decode)
    pair.prefill.kill()
    assert said("arena", *words) == ["without kvd: unreachable"]


def test_what_does_not_come_is_computed_in_other_pages(example, pair, capsys) -> None:
    arena = example("arena")

    async def decode_alone():
        async with connect(pair.decode.client, name="decode") as node:
            ours = await node.arena(arena.PAGES)
            pair.prefill.kill()
            await arena.decode(node, ours, arena.PROMPT, "p")

    asyncio.run(decode_alone())
    computed, right = capsys.readouterr().out.splitlines()
    assert computed.startswith("decode: computed, ")
    assert right == "decode: 0 of 200 tokens are wrong"
