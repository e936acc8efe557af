"""``benchmarks radix``: both columns serve the same trace and agree about it."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.harness import BenchmarkFile
from benchmarks.radix import BareTree, RequestCost, WholeNode, command
from kvd.types import Tokens, pack_ids

PAGE = 4
TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
    {"timestamp": 1, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 2, "input_length": 512, "output_length": 1, "hash_ids": [1]},
]


@pytest.mark.parametrize("index", [BareTree, WholeNode])
def test_index_counts_hit_and_new_tokens_in_whole_pages(index):
    served = index(64, PAGE)
    prompts = [Tokens(pack_ids(list(range(n)))) for n in (10, 17, 17)]

    costs = [served.serve(prompt) for prompt in prompts]

    assert [(cost.hit_tokens, cost.new_tokens) for cost in costs] == [(0, 8), (8, 8), (16, 0)]
    assert all(isinstance(cost, RequestCost) and cost.ns > 0 for cost in costs)
    assert served.cached_tokens == 16


def test_command_measures_tree_and_node_on_the_same_requests(tmp_path):
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, TRACE)))

    ran = CliRunner().invoke(
        command, ["--trace", str(trace), "--capacity", "4096", "--json", str(result)]
    )

    assert ran.exit_code == 0, ran.output
    found = msgspec.json.decode(result.read_bytes(), type=BenchmarkFile).found
    assert "3 requests, 3012 tokens" in found.tables[0].title
    # Of 62, 93 and 32 whole pages 0, 62 and 32 were cached.
    assert [(row["index"], round(row["hit_rate"], 6)) for row in found.tables[0].rows] == [
        ("tree", round(94 / 187, 6)),
        ("node", round(94 / 187, 6)),
    ]


def test_command_names_the_line_when_the_trace_is_damaged(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(msgspec.json.encode(TRACE[0]) + b"\n{}\n")

    ran = CliRunner().invoke(command, ["--trace", str(trace)])

    assert ran.exit_code == 1
    assert f"{trace}:2:" in ran.output
