"""A pool that outlives its daemon: what the next one takes over, and what it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvd.client import connect_sync as connect
from kvd.core.inputs import FormerSession
from kvd.daemon.warm_restart import past_of
from kvd.journal.engines import EngineRecord, Process
from kvd.journal.reader import FoundJournal
from kvd.types import Pages
from kvd.wire.admin import EventPage, ListEvents
from kvd.wire.events import Adopted
from tests.support.daemons import Daemon

SHAPE = {
    "pool.layers": "2",
    "pool.heads": "1",
    "pool.head_dim": "32",
    "pool.pages": "257",
    "pool.huge_pages": "off",
    "pool.backing": "shm",
}
PAGE = 16


@pytest.fixture
def memory():
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def daemon(tmp_path, memory):
    made = Daemon("solo", tmp_path, {**SHAPE, "pool.directory": str(memory)})
    made.start()
    made.wait_ready()
    yield made
    made.stop()


def prompt(number, pages):
    return np.random.default_rng(number).integers(0, 50_000, pages * PAGE, dtype=np.int32)


def cache(daemon, prompts):
    """Commit them as an engine does, and leave."""
    with connect(daemon.client, name="engine") as node:
        for tokens in prompts:
            node.lease(tokens).release(())


def hits(daemon, prompts):
    """Of each prompt, how many of its tokens are cached."""
    with connect(daemon.client, name="reader") as node:
        return [node.match(tokens).tokens for tokens in prompts]


def adopted(daemon):
    events = daemon.ask(ListEvents(1, 0), EventPage).events
    return [event for event in events if isinstance(event, Adopted)]


def all_summed(daemon, memory, pages):
    """Wait until the journal proves so many pages: a word above 2**63 for each."""
    journal = memory / "kvd.journal"

    def is_so():
        words = np.fromfile(journal, np.uint64, 257, offset=4096)
        return np.count_nonzero(words >> np.uint64(63)) == pages

    daemon.wait_for(is_so, f"has not summed {pages} pages", 10.0)


def again(daemon, how):
    if how == "kill":
        daemon.kill()
    else:
        daemon.stop()
    daemon.start()
    daemon.wait_ready()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_was_cached_is_cached_after_a_restart(daemon, memory, how):
    prompts = [prompt(1, 5), prompt(2, 3), np.concatenate([prompt(1, 5), prompt(3, 4)])]
    cache(daemon, prompts)
    all_summed(daemon, memory, 12)

    again(daemon, how)

    assert hits(daemon, prompts) == [5 * PAGE, 3 * PAGE, 9 * PAGE]
    (event,) = adopted(daemon)
    assert (event.generation, event.pages, event.leases) == (2, 12, 0)
    pool = daemon.snapshot().pools[0]
    assert (pool.cached_pages, pool.held_pages, pool.free_pages) == (12, 0, 244)


def test_a_page_that_was_written_without_a_lease_is_dropped_with_what_follows_it(daemon, memory):
    prompts = [prompt(1, 5), prompt(2, 3)]
    cache(daemon, prompts)
    all_summed(daemon, memory, 8)
    with connect(daemon.client, name="engine") as node:
        lease = node.lease(prompts[0])
        third = int(lease.pages[2])
        lease.release()
    daemon.kill()
    page_bytes = 2 * 2 * PAGE * 32 * 2
    with (memory / "kvd.kv").open("r+b") as pool:
        pool.seek(third * page_bytes + 100)
        pool.write(b"stray")
    daemon._settings["pool.verify"] = "all"

    daemon.start()
    daemon.wait_ready()

    assert hits(daemon, prompts) == [2 * PAGE, 3 * PAGE]


def test_pages_that_nobody_can_read_any_more_are_noted_as_free_by_the_next_daemon(daemon, memory):
    cache(daemon, [prompt(1, 5)])
    all_summed(daemon, memory, 5)
    daemon.kill()
    with (memory / "kvd.journal").open("r+b") as journal:
        words = np.fromfile(journal, np.uint64, 257, offset=4096)
        torn = int(np.flatnonzero(words)[0])
        journal.seek(4096 + 8 * torn)
        journal.write((int(words[torn]) ^ 1).to_bytes(8, "little"))

    daemon.start()
    daemon.wait_ready()

    noted = np.fromfile(memory / "kvd.journal", np.uint64, 257, offset=4096)
    pool = daemon.snapshot().pools[0]
    assert np.count_nonzero(noted) == pool.cached_pages < 5
    assert pool.held_pages == 0
    assert "crashed" not in (daemon.directory / "log").read_text("utf-8")


def test_a_pool_of_another_shape_is_made_anew(daemon, memory):
    cache(daemon, [prompt(1, 5)])
    all_summed(daemon, memory, 5)
    daemon.stop()
    daemon._settings["pool.heads"] = "2"
    daemon._settings["pool.head_dim"] = "16"

    daemon.start()
    daemon.wait_ready()

    assert hits(daemon, [prompt(1, 5)]) == [0]
    assert adopted(daemon) == []
    assert "laid out in another way" in daemon.quoted_log()


@pytest.mark.parametrize(
    "change",
    [{"pool.interior": "hnd"}, {"pool.interior": "opaque"}, {"pool.tag": "another engine"}],
    ids=str,
)
def test_bytes_that_another_engine_would_read_otherwise_are_not_adopted(daemon, memory, change):
    """They are as many, and where they were; what they mean is not what it was."""
    cache(daemon, [prompt(1, 5)])
    all_summed(daemon, memory, 5)
    daemon.stop()
    daemon._settings |= change

    daemon.start()
    daemon.wait_ready()

    assert hits(daemon, [prompt(1, 5)]) == [0]
    assert "laid out in another way" in daemon.quoted_log()


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
def test_opaque_bytes_are_there_after_a_restart(tmp_path, memory, order):
    raw = {"pool.family": "raw", "pool.page_bytes": "96", "pool.tag": "engine 1"}
    shared = {key: SHAPE[key] for key in SHAPE if "head" not in key}
    settings = {**shared, **raw, "pool.order": order, "pool.directory": str(memory)}
    daemon, tokens = Daemon("solo", tmp_path, settings), prompt(1, 5)
    content = np.random.default_rng(1).integers(0, 256, (2, 5, 96), dtype=np.uint8)
    daemon.start()
    try:
        daemon.wait_ready()
        with connect(daemon.client, name="writer") as node:
            lease = node.lease(tokens)
            for layer in range(2):
                (part,) = node.pool("main").view("kv", layer=layer)
                part.numpy()[lease.pages] = content[layer]
                del part
            lease.release(())
        all_summed(daemon, memory, 5)

        again(daemon, "kill")

        with connect(daemon.client, name="reader", expects={"tag": "engine 1"}) as node:
            lease = node.lease(np.append(tokens, 7))
            assert lease.prefix_len == 5 * PAGE
            for layer in range(2):
                (part,) = node.pool("main").view("kv", layer=layer)
                assert np.array_equal(part.numpy()[lease.pages[:5]], content[layer])
                del part
            lease.release(())
    finally:
        daemon.stop()


ENGINE = """
import sys, numpy as np
from kvd.client import connect_sync
with connect_sync(sys.argv[1], name="engine") as node:
    tokens = np.random.default_rng(1).integers(0, 50_000, 80, dtype=np.int32)
    lease = node.lease(tokens, reserve_tokens=64)
    lease.commit()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def engine(daemon):
    """Another process: a lease on five cached pages, and four pages of its own."""
    command = [sys.executable, "-c", ENGINE, daemon.client]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_pages_of_an_engine_that_lives_are_kept_for_it(daemon, memory, engine):
    all_summed(daemon, memory, 5)

    again(daemon, "kill")

    shot = daemon.snapshot()
    (lease,) = shot.leases
    assert (lease.owner, lease.pid, lease.held_pages) == ("engine", engine.pid, 4)
    assert (shot.pools[0].cached_pages, shot.pools[0].locked_pages) == (5, 5)
    assert [(client.name, client.former_leases) for client in shot.clients] == [("engine", 1)]


def test_pages_of_an_engine_that_died_with_its_daemon_are_free(daemon, memory, engine):
    all_summed(daemon, memory, 5)
    daemon.kill()
    engine.kill()
    engine.wait()

    daemon.start()
    daemon.wait_ready()

    assert hits(daemon, [prompt(1, 5)]) == [5 * PAGE]
    pool = daemon.snapshot().pools[0]
    assert (pool.held_pages, pool.cached_pages) == (0, 5)


def test_a_second_daemon_on_the_same_memory_does_not_start(daemon, tmp_path, memory):
    other = Daemon("other", tmp_path, {**SHAPE, "pool.directory": str(memory)})
    other.start()
    other._process.wait(20)

    assert other._process.returncode == 1
    assert "is in use by a daemon that runs" in other.quoted_log()


def test_a_daemon_whose_transfer_process_was_stopped_is_not_followed_before_it_is_gone(daemon):
    """SIGSTOP cannot keep it alive: it dies with its parent, and the lock goes with it."""

    os.kill(daemon.transfer_pid(), signal.SIGSTOP)

    again(daemon, "kill")

    assert daemon.snapshot().pools[0].free_pages == 256


def test_pids_of_another_pid_namespace_prove_nobody_dead():
    session = FormerSession(3, "engine", (70,), ())
    engine = EngineRecord(3, b"t" * 16, "engine", (Process(70, 1234),))
    found = FoundJournal(2, (), (session,), (engine,), Pages(b""), 7, 3, 4711)

    (known,) = past_of(found, 4711).engines
    (other,) = past_of(found, 4712).engines

    assert [(one.pid, one.start_ticks) for one in known.processes] == [(70, 1234)]
    assert [(one.pid, one.start_ticks) for one in other.processes] == [(0, 0)]
