"""The bounds of a proxy on the command line."""

from __future__ import annotations

import pytest

from kvd.errors import KvdError
from kvd.proxy.limits import ProxyLimits, parse_limits


def test_each_bound_can_be_said():
    given = ["prefill_s=1.5", "body-bytes=1e6", "body_values=10"]
    expected = ProxyLimits(prefill_s=1.5, body_bytes=1_000_000, body_values=10)
    assert parse_limits(given) == expected
    assert parse_limits([]) == ProxyLimits()


@pytest.mark.parametrize(
    "text",
    [
        "prefill=1",
        "prefill_s",
        "prefill_s=",
        "prefill_s=0",
        "prefill_s=-1",
        "idle_s=nan",
        "body_bytes=.5",
    ],
)
def test_a_bound_that_is_none_is_refused_in_words(text):
    with pytest.raises(KvdError, match="--limit"):
        parse_limits([text])


def test_a_bound_is_said_once():
    with pytest.raises(KvdError, match="once"):
        parse_limits(["idle_s=1", "idle-s=2"])
