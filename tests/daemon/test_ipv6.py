"""Two daemons that reach each other by IPv6."""

from __future__ import annotations

import socket

import pytest

from tests.daemon.kv import SHAPE
from tests.support.daemons import Place, two_daemons


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")
def test_daemons_listen_and_dial_by_ipv6(tmp_path):
    with two_daemons(tmp_path, SHAPE, places=(Place(host="[::1]"), Place(host="[::1]"))) as pair:
        seen = [one.snapshot().peers for one in (pair.prefill, pair.decode)]

    assert [(one.name, one.state) for [one] in seen] == [("d", "up"), ("p", "up")]
