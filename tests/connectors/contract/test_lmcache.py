"""What a call of LMCache's costs: objects are asked for together."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvd.client.session_sockets import SessionSockets
from kvd.connectors.daemon_link import ConnectorSession
from kvd.connectors.lmcache.names import ChunkName, Naming
from kvd.connectors.lmcache.objects import ChunkCache, ChunkPages
from tests.support.daemons import one_daemon

OBJECT_BYTES = 300
POOL = {"pool.family": "raw", "pool.layers": "1", "pool.page_size": "16"}


@pytest.fixture
def cache(tmp_path):
    """One whose calls write to a daemon; ``link`` is its session."""
    with one_daemon(tmp_path, POOL | {"pool.page_bytes": "256", "pool.pages": "128"}) as daemon:
        link = ConnectorSession(
            daemon.client,
            name="lmcache",
            kind="lmcache 0.5.6",
            fit=lambda node: ChunkPages(node.pool("main")),
            logger=logging.getLogger("kvd.connectors.lmcache"),
            without="LMCache goes on without the node's cache",
        )
        link.open()
        yield ChunkCache(link, Naming("lmcache 0.5.6").namespace)
        link.close()


@pytest.fixture
def writes(monkeypatch):
    """What was written to a daemon, by how many messages."""
    found, plain = [], SessionSockets.flush

    def counted(self):
        found.append(len(self._connection.queued))
        plain(self)

    monkeypatch.setattr(SessionSockets, "flush", counted)
    return found


def named(count):
    return [
        ChunkName(number.to_bytes(32, "big"), "model", 0, 0, "", "(300,) torch.uint8", OBJECT_BYTES)
        for number in range(count)
    ]


def test_objects_of_a_call_are_asked_for_with_one_write(cache, writes) -> None:
    names = named(16)
    objects = [np.full(OBJECT_BYTES, n, np.uint8) for n in range(16)]
    assert all(cache.store(names, objects))
    assert writes[0] == 16
    writes.clear()

    assert all(cache.hold(names))
    assert writes == [16]
    into = [np.zeros(OBJECT_BYTES, np.uint8) for _ in names]
    assert all(cache.load(names, into))
    assert all((a == b).all() for a, b in zip(objects, into, strict=True))


def test_a_call_of_nothing_leaves_nothing_behind(cache, writes) -> None:
    """What is said after it leaves at once, as ever."""
    names = named(1)
    cache.store(names, [np.zeros(OBJECT_BYTES, np.uint8)])
    assert cache.hold(names) == [True]
    assert cache.hold([]) == []
    writes.clear()
    cache.release(names)
    assert writes == [1]
    assert not cache.held


def test_one_name_is_one_namespace_and_what_differs_is_another() -> None:
    (one,) = named(1)
    naming = Naming("lmcache 0.5.6")
    assert naming.namespace(one) == Naming("lmcache 0.5.6").namespace(named(2)[1])
    others = [
        ChunkName(b"c" * 32, **{**what, key: value})
        for what in [
            {"model": "model", "rank": 0, "group": 0, "salt": "", "layout": "l", "n_bytes": 300}
        ]
        for key, value in (
            *(("model", "m2"), ("rank", 1), ("group", 1)),
            *(("salt", "s"), ("layout", "k"), ("n_bytes", 299)),
        )
    ]
    spaces = {naming.namespace(other) for other in others}
    spaces |= {Naming(*words).namespace(one) for words in (("b",), ("a", "w"), ("a", "", "p"))}
    assert len(spaces) == len(others) + 3
