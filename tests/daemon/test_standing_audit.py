"""A real daemon under load: no false alarm; what is broken in it is found within a second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

import kvd.client
from kvd.client.admin import AdminClient
from kvd.errors import KvdError
from kvd.wire.admin import Why
from tests.core.breakage import BREAKAGES
from tests.core.breakage_beside import BESIDE_BREAKAGES
from tests.daemon.kv import SHAPE, tokens_of
from tests.support.daemons import Daemon, Place, one_daemon

ROOT = Path(__file__).parents[2]
FOUND_S = 1.0
BROKEN_HERE = (
    *("lost_page", "lost_unlock", "lease_of_the_dead", "cached_page_in_free_list"),
    *("evictable_off", "wrong_child_key"),
)


class Breakable(NamedTuple):
    """A daemon, and the file that says how it breaks at the next SIGUSR1."""

    daemon: Daemon
    wish: Path


@contextlib.contextmanager
def breakable_daemon(directory, **more):
    wish = directory / "wish"
    prefix = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.daemon.breaking", str(wish))
    settings = {**SHAPE, "pool.pages": "2048", "log.level": "error", **more}
    with one_daemon(directory, settings, place=Place(prefix)) as daemon:
        yield Breakable(daemon, wish)


@pytest.fixture(scope="module")
def breakable(tmp_path_factory):
    with breakable_daemon(tmp_path_factory.mktemp("breakable")) as found:
        yield found


@pytest.fixture
def load(breakable):
    """Leases, commits and releases as fast as one engine can, until the test is over."""
    is_over = threading.Event()

    def work():
        with kvd.client.connect_sync(breakable.daemon.client, name="load") as node:
            kept = [node.lease(tokens_of(96, seed=seed)) for seed in (9001, 9002)]
            for lease in kept:
                lease.commit()
            for seed in range(10**9):
                if is_over.is_set():
                    break
                lease = node.lease(tokens_of(160, seed=seed % 50))
                lease.release(())
            for lease in kept:
                with contextlib.suppress(KvdError):  # one was taken from this session
                    lease.release()

    thread = threading.Thread(target=work)
    thread.start()
    breakable.daemon.wait_for(
        lambda: breakable.daemon.snapshot().totals.leases_released > 100, "has no load", 20.0
    )
    yield
    is_over.set()
    thread.join(20.0)
    assert not thread.is_alive()


def metric(daemon: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def test_breakages_are_found_within_a_second_by_metric_and_by_name(breakable, load, capsys):
    daemon = breakable.daemon
    daemon.wait_for(lambda: daemon.snapshot().audit.sweeps >= 4, "does not sweep", 20.0)
    assert daemon.snapshot().audit.found == ()
    assert metric(daemon, "kvd_audit_findings") == 0
    took = {}

    for name in BROKEN_HERE:
        check = BREAKAGES[name].check
        breakable.wish.write_text(name)
        begun_s = time.monotonic()
        os.kill(daemon.pid, signal.SIGUSR1)
        daemon.wait_for(lambda check=check: check in checks(daemon), f"finds no {check}", 10.0)
        took[name] = time.monotonic() - begun_s

    with capsys.disabled():
        print("\nfound after", {name: round(took_s, 2) for name, took_s in took.items()})  # noqa: T201
    assert max(took.values()) < FOUND_S
    assert len(daemon.snapshot().audit.found) >= len(BROKEN_HERE)
    assert metric(daemon, "kvd_audit_findings") >= 2, "what is only told of stays broken"
    assert daemon.is_running


def test_audit_verb_prints_what_is_broken_and_fails(breakable):
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "audit", "--connect", breakable.daemon.admin],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "broken: I1: page 1 is nowhere" in done.stdout
    assert "done: 1 pages no longer free" in done.stdout
    assert "which is gone" in done.stdout
    assert "lease-opened lease=" in done.stdout


def test_what_breaks_beside_the_first_component_is_found_and_its_page_explained(tmp_path):
    windows = {"pool.family": "swa", "pool.window_tokens": "64", "pool.window_layers": "4"}
    prompt = tokens_of(160, seed=1)
    with (
        breakable_daemon(tmp_path, **windows, **{"pool.window_pages": "64"}) as (daemon, wish),
        kvd.client.connect_sync(daemon.client, name="engine") as node,
    ):
        first = node.lease(prompt)
        first.commit()
        first.release()
        lease = node.lease([*prompt, 1, 2, 3])
        page = next(int(one) for one in lease.pages_of("swa") if one)
        daemon.wait_for(lambda: daemon.snapshot().audit.sweeps >= 2, "does not sweep", 20.0)
        assert daemon.snapshot().audit.found == ()

        for name in ("window_page_lost", "window_lock_too_many", "window_sum_off"):
            check = BESIDE_BREAKAGES[name].check
            wish.write_text(name)
            os.kill(daemon.pid, signal.SIGUSR1)
            daemon.wait_for(lambda check=check: check in checks(daemon), f"no {check}", 10.0)
        with AdminClient(daemon.admin) as operator:
            said = operator.request(Why(1, "page", page, "swa"))

        locks = next(one for one in daemon.snapshot().audit.found if one.check == "beside-locks")
        assert (locks.component, locks.owner, locks.pid) == ("swa", "engine", os.getpid())
        assert said.sentence.startswith(f"page {page} of swa is cached beside node ")
        assert said.facts[0].startswith(f"needed by lease {lease.id} of engine (pid {os.getpid()})")


def checks(daemon: Daemon) -> set[str]:
    """Of what was found, broken still or contained by now."""
    return {one.check for one in daemon.snapshot().audit.found}


def test_paranoid_daemon_finds_a_page_in_two_leases_at_the_step_and_tells_both(tmp_path):
    """Without the standing audit: it is off here."""
    paranoid = {"audit.budget": "0", "audit.paranoid": "true"}
    with (
        breakable_daemon(tmp_path, **paranoid) as (daemon, wish),
        kvd.client.connect_sync(daemon.client, name="engine") as node,
    ):
        kept = [node.lease(tokens_of(160, seed=seed)) for seed in (1, 2)]
        wish.write_text("page_in_two_plain_leases")
        os.kill(daemon.pid, signal.SIGUSR1)
        daemon.wait_for(lambda: "page-double" in checks(daemon), "finds nothing", 10.0)

        for lease in kept:
            with pytest.raises(KvdError, match=r"^condemned: lease \d+ was found broken"):
                lease.commit()
            lease.release()
        pool = daemon.snapshot().pools[0]
        assert pool.condemned_pages == 20
        assert 1 + pool.free_pages + pool.condemned_pages == pool.total_pages
        assert node.lease(tokens_of(160, seed=3)).pages.size == 10
        assert daemon.is_running
