"""Two real daemons for all tests here, and two engine sessions for each test.

Daemons are started once; every test ends with an audit of both and must leave nothing held.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
import pytest_asyncio

import kvd.client
from kvd.wire import admin
from tests.daemon.kv import SHAPE, digest, tokens_of, write
from tests.support.daemons import Daemon, Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvd.client import Node, SyncNode

SETTLE_S = 10.0
_rooms = itertools.count(1)


class Engines(NamedTuple):
    """A session with each daemon."""

    pair: Pair
    p: Node
    d: Node

    def room(self) -> int:
        """A room that nobody used before."""
        return next(_rooms)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two daemons with page-first pools, recorded."""
    settings = {**SHAPE, "recorder.enabled": "true"}
    with two_daemons(tmp_path_factory.mktemp("pf"), settings) as both:
        yield both


@pytest_asyncio.fixture
async def engines(pair: Pair) -> AsyncIterator[Engines]:
    """Two sessions; afterwards nothing may be held, and no invariant broken."""
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(pair.decode.client, name="decode-engine") as d,
    ):
        yield Engines(pair, p, d)
    settle(pair)


@pytest.fixture
def nodes(pair: Pair) -> Iterator[tuple[SyncNode, SyncNode]]:
    """A blocking session with each of two daemons; afterwards nothing may be held."""
    with (
        kvd.client.connect_sync(pair.prefill.client, name="prefill-scheduler") as p,
        kvd.client.connect_sync(pair.decode.client, name="decode-scheduler") as d,
    ):
        yield p, d
    settle(pair)


@pytest_asyncio.fixture
async def undisturbed(engines):
    """A handoff that is half done when the abuse begins, and ends well after it."""
    tokens, room = tokens_of(320, seed=77), engines.room()
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens, upto=160)
    receive = await engines.d.receive(room, tokens, "p")
    send = await engines.p.send(room, tokens, lease=lease, to="d")
    await send.accepted()
    await send.advance(160)
    pids = [one.pid for one in (engines.pair.prefill, engines.pair.decode)]
    processes = [one.transfer_pid() for one in (engines.pair.prefill, engines.pair.decode)]

    yield

    write(engines.p, lease, tokens)
    outcome = await send.finish(b"undisturbed")
    await receive.done()
    assert outcome.committed
    assert receive.aux == b"undisturbed"
    assert digest(engines.p, lease.pages) == digest(engines.d, receive.lease.pages)
    both = (engines.pair.prefill, engines.pair.decode)
    assert [one.pid for one in both if one.is_running] == pids
    assert [one.transfer_pid() for one in both] == processes
    assert [findings(one) for one in both] == [(), ()]


def settle(pair: Pair) -> None:
    """Wait until nothing is held on either node, and audit both; then empty their trees."""
    for daemon in (pair.prefill, pair.decode):
        daemon.wait_for(lambda one=daemon: _is_at_rest(one), "still holds something", SETTLE_S)
        assert findings(daemon) == ()
        assert daemon.snapshot().audit.found == (), "a false alarm of the standing audit"
        daemon.ask(admin.Flush(1), admin.Report)
        state = daemon.snapshot().pools[0]
        assert (state.free_pages, state.cached_pages) == (state.total_pages - 1, 0)


def findings(daemon: Daemon) -> tuple[str, ...]:
    """What an audit finds."""
    return daemon.ask(admin.Audit(1), admin.Report).refused


def until(is_so, within_s: float = SETTLE_S) -> None:
    """Look until ``is_so()``; for what another process does."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so after {within_s} s"
        time.sleep(0.005)


def _is_at_rest(daemon: Daemon) -> bool:
    now = daemon.snapshot()
    return not (now.clients or now.leases or now.rooms or now.waiting)
