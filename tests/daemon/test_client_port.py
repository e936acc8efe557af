"""The client socket: what it counts."""

from __future__ import annotations

import re
import urllib.request

import pytest

from kvd.wire import client
from tests.daemon.intruder import RawSession


def refused(daemon) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    found = (re.fullmatch(r"kvd_rpc_errors_total\{(.*)\} (.*)", line) for line in lines)
    return {one[1]: float(one[2]) for one in found if one}


@pytest.mark.parametrize(
    ("message", "labels"),
    [
        (client.ReleaseLease(1, 2**40), 'code="unknown-lease",op="release"'),
        (client.Finish(1, 2**40), 'code="unknown-handoff",op="finish"'),
        (client.AbortSend(1, 1, "x" * 2000), 'code="bad-request",op="client"'),
    ],
)
def test_refused_request_is_counted_under_what_was_asked(engines, message, labels):
    session = RawSession(engines.pair.decode)
    before = refused(engines.pair.decode)

    session.request(message)
    session.close()

    after = refused(engines.pair.decode)
    assert {k: v for k, v in after.items() if v != before.get(k, 0)} == {
        labels: before.get(labels, 0) + 1
    }
