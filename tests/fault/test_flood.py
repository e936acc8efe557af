"""What the flood says of its figures, and that it makes them."""

from __future__ import annotations

import pytest

from tests.fault import flood
from tests.fault.flood import Beside, Row, judge

CALM_MS = [1.0] * 100


def row(flooded_ms, *, echo_ms=1.0, grown=0):
    daemon = Beside(CALM_MS, [flooded_ms] * 100, connections=5, frames=5)
    echo = Beside(CALM_MS, [echo_ms] * 100, connections=5, frames=5)
    found = Row("client", daemon, echo, before_bytes=1000, peak_bytes=1000 + grown)
    judge(found, 5, 5)
    return found


@pytest.mark.parametrize(
    ("flooded_ms", "echo_ms", "word"),
    [
        (2.0, 1.0, "ok"),
        (2.1, 1.0, "goal MISSED"),
        (5.0, 5.1, "ok"),  # of this machine an echo has no more
        (5.0, 4.9, "goal MISSED"),
        (10.1, 1.0, "FAILED"),
    ],
)
def test_an_engine_may_wait_twice_as_long_or_as_much_longer_as_for_an_echo(
    flooded_ms, echo_ms, word
):
    assert flood._word(row(flooded_ms, echo_ms=echo_ms)) == word


def test_memory_that_grows_is_a_finding():
    assert row(1.0, grown=flood.MOST_GROWTH_BYTES + 1).troubles


def test_a_flood_of_a_socket_comes_to_the_daemon_and_to_the_echo(tmp_path, monkeypatch):
    monkeypatch.setattr(flood, "CALM_S", 0.2)
    monkeypatch.setattr(flood, "FLOOD_S", 0.5)
    found = flood.flooded("peers, no key", tmp_path, 200, 100, 60.0)

    assert not found.troubles
    assert found.daemon.connections >= 200
    assert found.daemon.frames >= 100
    assert found.echo.calm_ms
    assert found.echo.flood_ms
