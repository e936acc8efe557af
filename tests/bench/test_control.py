"""``kvd bench control`` at its smallest: who is measured, and what is counted exactly."""

from __future__ import annotations

import pytest

from kvd.bench.control import run


@pytest.mark.slow
def test_every_process_and_every_message_of_a_call_is_counted():
    _, found = run(lambda _: None, rounds=1, keys=False)

    kinds = [(row["what"].split(",")[0], row["in_flight"]) for row in found.times]
    assert [
        kinds.count((what, 1))
        for what in ("match", "blocking match", "lease + release", "full-hit handoff")
    ] == [2, 1, 1, 1]
    (pending,) = found.pending
    assert min(pending["begin_us"], pending["poll_us"], pending["pump_us"]) > 0
    for row in found.costs:
        assert min(row["client_us"], row["prefill_us"], row["echo_server_us"]) > 0, row
    counts = dict(zip(kinds, found.counts, strict=True))
    sockets = ("prefill_from_engines", "prefill_to_engines", "decode_from_engines")
    assert [counts["match", 1][key] for key in sockets] == [1, 1, 0]
    assert [counts["lease + release", 64][key] for key in sockets] == [2, 2, 0]
    # Heartbeats are in it, so links may have some more.
    handoff = counts["full-hit handoff", 16]
    assert 1 <= handoff["prefill_to_peers"] < 3
    assert 1 <= handoff["decode_to_peers"] < 3
    assert all(row["prefill_calls"] > 0 for row in found.counts)
    assert len(found.goals) == 11
