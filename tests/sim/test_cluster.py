"""A load over a cluster: figures that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvd.cli.sim import sim_command
from kvd.core.settings import Demotion
from kvd.sim.cluster import Balance, NodeShape, run
from kvd.sim.drive import DriveShape
from kvd.trace import TraceRequest

KV_BYTES = 2 * 32 * 8 * 128 * 2
"""Of one token: K and V, layers, heads, width, bfloat16."""


def request(at_ms, blocks, output=50):
    return TraceRequest(at_ms, 512 * len(blocks), output, list(blocks))


def shape(nodes=2, pool_tokens=16_384, drive=None, store=None):
    """512 tokens take a second to come in, 50 tokens a second to decode."""
    return NodeShape(nodes, pool_tokens, 16, 512.0, 50.0, drive=drive, store=store)


def store(tokens, **fields):
    """2048 tokens a second each way."""
    return DriveShape(tokens, 2048.0, is_shared=True, **fields)


def ran(routing, requests, **fields):
    return run(routing, requests, shape(**fields), lambda _: None)


PAIRS = [
    request(0, [1, 2]),  # in for 2 s wherever it goes
    request(1000, [7, 8]),
    request(10_000, [1, 2]),  # the first again
    request(20_000, [1, 2, 3]),  # and one block more
]


def test_round_robin_reuses_what_happens_to_be_there():
    """Nodes 0, 1, 0, 1: the third finds two blocks, the fourth is sent three."""
    routed = ran("round-robin", PAIRS)

    assert (routed.requests, routed.refused) == (4, 0)
    assert routed.reuse == pytest.approx(2 / 9)
    assert routed.saved_bytes == 2 * 512 * KV_BYTES
    assert routed.sent_tokens == 7 * 512
    assert routed.balance_requests == Balance(1.0, 0.0)
    assert routed.balance_sent_tokens.max_over_mean == pytest.approx(5 / 3.5)
    assert routed.balance_sent_tokens.variation == pytest.approx(1.5 / 3.5)
    assert routed.wait_p99_s == 0.0


def test_longest_match_goes_where_the_prefix_is_and_herds():
    """All to node 0, where 2 + 2 blocks are found; the second waits a second for the first."""
    routed = ran("longest-match", PAIRS)

    assert routed.reuse == pytest.approx(4 / 9)
    assert routed.balance_requests == Balance(2.0, 1.0)
    assert routed.wait_mean_s == pytest.approx(1 / 4)


def test_load_aware_takes_the_prefix_where_it_is_free_and_another_node_where_it_is_not():
    """The second goes to node 1, because node 0 is busy; the others find their prefix."""
    routed = ran("load-aware", PAIRS)

    assert routed.reuse == pytest.approx(4 / 9)
    assert routed.balance_requests.max_over_mean == pytest.approx(3 / 2)
    assert routed.wait_p99_s == 0.0


def test_a_request_waits_for_its_turn_at_the_input():
    """Two blocks each, 2 s each, at once: waits of 0, 2 and 4 s."""
    routed = ran("round-robin", [request(0, [2 * k, 2 * k + 1]) for k in range(3)], nodes=1)

    assert routed.wait_mean_s == pytest.approx(2.0)
    assert routed.wait_p50_s == pytest.approx(2.0)


def test_a_request_waits_for_memory_until_another_lets_go():
    """A pool of 1024 tokens holds one of them with its output: in at 1 s, gone at 1 + 2 s."""
    routed = ran(
        "round-robin",
        [request(0, [1], output=100), request(0, [2], output=100)],
        nodes=1,
        pool_tokens=1024,
    )

    assert routed.wait_mean_s == pytest.approx(3.0 / 2)


def test_what_left_the_pool_comes_back_from_the_drive_and_is_waited_for():
    """Three prompts of two blocks in a pool of two and a half: the first comes back as a whole.

    Two seconds each to come in and one to decode; 2 * 512 tokens take half a second to be read.
    """
    load = [request(at_ms, blocks) for at_ms, blocks in ((0, [1, 2]), (9e3, [3, 4]), (2e4, [1, 2]))]
    tight = {"nodes": 1, "pool_tokens": 1280}

    without = ran("round-robin", load, **tight)
    routed = ran("round-robin", load, drive=DriveShape(8192, 2048.0), **tight)

    assert (without.reuse, without.promoted, without.written_tokens) == (0.0, 0.0, 0)
    assert routed.promoted == routed.reuse == pytest.approx(1 / 3)
    assert routed.sent_tokens == 4 * 512
    assert routed.wait_mean_s == pytest.approx(0.5 / 3)


def test_a_pool_with_a_drive_reuses_what_a_pool_as_large_as_both_does():
    """Thirty prompts, each asked again after all the others, one node, time enough."""
    load = [request(20e3 * at, [2 * (at % 30), 2 * (at % 30) + 1]) for at in range(90)]

    both = ran("round-robin", load, nodes=1, pool_tokens=40_000)
    routed = ran("round-robin", load, nodes=1, pool_tokens=8_000, drive=DriveShape(32_000, 9000.0))
    alone = ran("round-robin", load, nodes=1, pool_tokens=8_000)

    assert both.reuse == pytest.approx(2 / 3)
    assert routed.reuse == pytest.approx(both.reuse, abs=0.01)
    assert alone.reuse == 0.0


TWICE = [
    request(1e4 * at, blocks)
    for at, blocks in enumerate([[1, 2], [1, 2], [5, 6], [5, 6], [1, 2], [5, 6]])
]
"""Of two nodes each; what fills a pool of two blocks and a half is written at once."""


def test_what_one_node_has_written_to_the_store_the_others_find():
    """The first to have either computes it; a question takes 10 ms, and two blocks half a second.

    In the end node 0 finds [1, 2] again, which it knows to be there, and node 1 has [5, 6].
    """
    without = ran("round-robin", TWICE, pool_tokens=1280, drive=DriveShape(8192, 2048.0))
    routed = ran("round-robin", TWICE, pool_tokens=1280, store=store(8192))

    assert without.reuse == pytest.approx(2 / 6)
    assert (without.store_read_tokens, without.store_written_tokens) == (0, 0)
    assert routed.reuse == pytest.approx(4 / 6)
    assert (routed.written_tokens, routed.store_written_tokens) == (0, 2 * 1024)
    assert routed.store_read_tokens == 3 * 1024
    assert routed.wait_mean_s == pytest.approx((0.01 + 0.51 + 0.01 + 0.51 + 0.5) / 6)


def test_what_nobody_has_found_is_not_written_to_a_store_for_second_use():
    once = TWICE[:3:2]
    second_use = store(8192, demotion=Demotion.SECOND_USE)

    assert ran("round-robin", once, pool_tokens=1280, store=second_use).store_written_tokens == 0
    assert ran("round-robin", once, pool_tokens=1280, store=store(8192)).store_written_tokens > 0


def test_what_was_written_to_the_store_longest_ago_goes_first_and_is_missed_by_who_knew_it():
    """The store has room for one of two prompts; node 0 believes that its own is there still."""
    load = [request(1e4 * at, blocks) for at, blocks in enumerate([[1, 2], [5, 6], [7, 8], [1, 2]])]

    small, large = (
        ran("round-robin", load, nodes=1, pool_tokens=1280, store=store(tokens))
        for tokens in (1024, 8192)
    )

    assert small.reuse == 0.0
    assert small.store_written_tokens == 4 * 1024
    assert large.reuse == pytest.approx(1 / 4)


def test_what_can_never_fit_is_refused_and_counted():
    routed = ran("load-aware", [request(0, [1, 2, 3]), request(0, [1])], pool_tokens=1024)

    assert (routed.requests, routed.refused) == (1, 1)


def test_the_command_prints_a_row_for_each_routing_and_writes_json(tmp_path):
    trace, file = tmp_path / "tiny.jsonl", tmp_path / "out.json"
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, PAIRS)))

    options = ["--trace", trace, "--nodes", "2", "--prefill-rate", "512", "--json", file]
    done = CliRunner().invoke(sim_command, [*map(str, options), "--pool-tokens", "16384"])

    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["round-robin"][1:4] == ["4", "0", "22.22%"]
    assert rows["longest-match"][3:7] == ["44.44%", "0.00%", "0.3", "2.00"]
    assert rows["load-aware"][3] == "44.44%"
    routings = json.loads(file.read_bytes())["routings"]
    assert [one["routing"] for one in routings] == ["round-robin", "longest-match", "load-aware"]
    assert routings[0]["saved_bytes"] == 2 * 512 * KV_BYTES


def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path):
    bad = Path(tmp_path / "bad.jsonl")
    bad.write_text("{}\n")

    done = CliRunner().invoke(sim_command, ["--trace", str(bad)])

    assert done.exit_code == 1
    assert "bad.jsonl:1" in done.stderr
