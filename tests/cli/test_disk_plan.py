"""``kvd config plan --disk --store``: what tiers keep below the pool, and their sections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import disk_plan
from kvd.cli.config import config_group
from kvd.cli.disk_plan import PlannedPages
from kvd.config import Config, load, pool_spec
from kvd.core.layout.spec import lockstep_bytes
from kvd.families.model import NotPlanned
from kvd.storage.sizes import object_bytes
from tests.config.test_plan import DEEPSEEK_V3, GEMMA_3_27B, LLAMA_3_8B

GIB, MIB, KIB = 2**30, 2**20, 2**10


def run(tmp_path, config, *args):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(config_group, ["plan", str(file), *args])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("config", "args"),
    [
        (LLAMA_3_8B, ("--memory", "80GiB")),
        (LLAMA_3_8B, ("--memory", "1GiB", "--page-size", "1", "--tp-size", "2")),
        (DEEPSEEK_V3, ("--memory", "80GiB")),
        (LLAMA_3_8B, ("--memory", "16GiB", "--engine", "vllm")),
        (LLAMA_3_8B, ("--pages", "9", "--engine", "vllm", "--tp-size", "2")),
    ],
)
def test_what_is_to_be_pasted_is_taken_by_the_check_and_holds_what_was_said(
    tmp_path, config, args, monkeypatch
):
    status, told = run(tmp_path, config, *args, "--disk", "500GiB")
    found = json.loads(run(tmp_path, config, *args, "--disk", "500GiB", "--format", "json")[1])

    assert status == 0, told
    pool, tier = told[told.index("[pool]") :].split("a disk of")
    file = tmp_path / "kvd.toml"
    file.write_text(pool + tier[tier.index("[tiers.disk]") :])
    read = load(file, {}, [])
    assert isinstance(read, Config), read
    one = lockstep_bytes(pool_spec(read))
    tokens = 500 * GIB // object_bytes(one) * read.pool.page_size
    assert found["disk"]["page_bytes"] == one
    assert found["disk"]["tokens"] == tokens
    assert f"500GiB keeps {tokens} tokens below it" in told
    eighth = max(one, one * pool_spec(read).pages[0] // 8)
    assert read.tiers_disk.max_moving == found["disk"]["max_moving"]
    moving = disk_plan.size_bytes(read.tiers_disk.max_moving)
    assert min(256 * MIB, eighth) <= moving < min(256 * MIB, eighth) + KIB


@pytest.mark.parametrize("engine", [(), ("--engine", "vllm")])
def test_a_store_is_planned_beside_a_disk_and_its_section_is_taken_by_the_check(tmp_path, engine):
    asked = ("--memory", "16GiB", "--disk", "500GiB", "--store", "10TiB", *engine)

    status, told = run(tmp_path, LLAMA_3_8B, *asked)
    found = json.loads(run(tmp_path, LLAMA_3_8B, *asked, "--format", "json")[1])

    assert status == 0, told
    file = tmp_path / "kvd.toml"
    file.write_text(told[told.index("[cache]") :])
    read = load(file, {}, [])
    assert isinstance(read, Config), read
    store = found["store"]
    assert store["objects"] == 10 * 2**40 // store["object_bytes"]
    assert f"a store of 10TiB keeps {store['tokens']} tokens for all nodes" in told
    assert read.tiers_store.max_moving == store["max_moving"] == "64MiB"
    assert found["disk"]["object_bytes"] == store["object_bytes"]


def test_pages_that_are_slow_are_told_so_with_the_size_that_is_not(tmp_path):
    asked = ("--memory", "80GiB", "--disk", "500GiB", "--page-size")

    small, large = (run(tmp_path, LLAMA_3_8B, *asked, size)[1] for size in ("1", "16"))
    there = run(tmp_path, LLAMA_3_8B, *asked, "16")[1]

    assert "small pages are slow on a disk" in small
    assert "--page-size 16 makes them so large" in small
    assert "large enough for a disk" in large
    assert "makes them" not in there


def test_a_family_without_tiers_is_planned_and_says_why_it_has_no_disk(tmp_path):
    status, told = run(tmp_path, GEMMA_3_27B, "--memory", "640GiB", "--disk", "500GiB")

    assert status == 0
    assert "no disk below swa: the window of a sequence has pages of its own" in told
    assert "[tiers.disk]" not in told
    assert (
        "[tiers.disk]"
        in run(tmp_path, GEMMA_3_27B, "--memory", "640GiB", "--disk", "500GiB", "--family", "mha")[
            1
        ]
    )


def test_a_disk_that_is_smaller_than_what_moves_is_refused():
    with pytest.raises(NotPlanned, match="less than twice what moves at a time, which is 256MiB"):
        disk_plan.disk_plan(PlannedPages(16, 2 * MIB, 4096), "511MiB")


def test_the_figures_are_those_of_the_benchmark():
    stored = json.loads(Path("docs/benchmarks/tiers.json").read_text())
    (table,) = stored["result"]["found"]["tables"]
    ratios = {
        row["page_kib"] * KIB: round(row["ratio"], 2)
        for row in table["rows"]
        if row["way"] == "write"
    }

    assert disk_plan.WRITTEN_OVER_BARE.items() <= ratios.items()
    assert ratios[disk_plan.QUICK_BYTES] >= 0.8
