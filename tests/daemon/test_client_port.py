"""The client socket: what it counts."""

from __future__ import annotations

import re
import urllib.request

import pytest

from kvd.wire import client
from kvd.wire.codec import CLIENT_REQUESTS
from tests.daemon.intruder import TOKENS, RawSession


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


def test_what_is_asked_at_once_is_answered_in_order_and_in_few_messages(engines):
    """Refusals of what cannot be read have their place among the answers."""
    session = RawSession(engines.pair.decode)
    session.request(client.ReleaseLease(1, 2**40))
    frames = []
    for call in range(10, 210):
        request = (
            client.AbortSend(call, 1, "x" * 2000) if call % 7 == 0 else client.MatchPrefix(call)
        )
        frames.append([CLIENT_REQUESTS.encode(request)])
        if isinstance(request, client.MatchPrefix):
            frames[-1].append(TOKENS)

    for one in frames:
        session.say(*one)
    heard = [session.hear() for _ in frames]

    assert [one.call for one in heard] == list(range(10, 210))
    kinds = {True: client.Failed, False: client.MatchReply}
    assert [type(one) for one in heard] == [kinds[call % 7 == 0] for call in range(10, 210)]
    assert session.n_messages < len(frames)
    session.close()
