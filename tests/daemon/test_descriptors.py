"""A daemon whose descriptors run out: engines are refused in words, operators are let in."""

from __future__ import annotations

import pytest

import kvd.client
from kvd.client import KvdError
from tests.support.daemons import Daemon, Place

SMALL = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "64"}
FEW = Place(prefix=("bash", "-c", 'ulimit -n 80; exec "$@"', "kvd"))


def test_engines_that_would_take_the_last_descriptors_are_refused_with_the_numbers(tmp_path):
    daemon = Daemon("d", tmp_path, SMALL, FEW)
    sessions = []
    try:
        daemon.start()
        daemon.wait_ready()

        def fill():
            for number in range(60):
                sessions.append(kvd.client.connect_sync(daemon.client, name=f"e{number}"))
                assert sessions[-1].lease([1] * 16).prefix_len == 0

        with pytest.raises(KvdError) as refused:
            fill()
        assert refused.value.code == "no-room"
        assert "of 80 descriptors of d are open" in str(refused.value)
        assert len(sessions) > 8
        assert len(daemon.snapshot().clients) == len(sessions), "operators are let in"

        sessions.pop().close()
        daemon.wait_for(lambda: len(daemon.snapshot().clients) == len(sessions), "one has left", 10)
        sessions.append(kvd.client.connect_sync(daemon.client, name="again"))
        assert "Traceback" not in daemon.quoted_log()
    finally:
        for one in sessions:
            one.close()
        daemon.stop()
