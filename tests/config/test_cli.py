from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvd.cli.config import config_group
from tests.config.pools import POOLS, PREFILL_ONLY

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvd.toml"
    path.write_text('[node]\nname = "decode-0"\n[pool]\npages = 9\n')
    return path


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(config_group, args)
    return result.exit_code, result.stdout, result.stderr


def test_check_says_what_would_be_served(file: Path) -> None:
    assert run("check", "--config", str(file)) == (
        0,
        "ok: node decode-0, pool main of 9 pages\n",
        "",
    )
    status, out, err = run("check", "--config", str(file), "--format", "json")
    assert (status, json.loads(out), err) == (0, {"ok": True, "errors": []}, "")


@pytest.mark.parametrize(
    ("sets", "pool"),
    [
        (POOLS["swa"], "main of 9 pages of kv and 10 pages of swa"),
        (POOLS["recurrent"], "main of 9 pages of kv and 3 pages of state"),
        (
            PREFILL_ONLY,
            "main counts 128 tokens and holds 0 B; a placeholder of one page has 32.0 KiB",
        ),
    ],
)
def test_check_says_what_each_budget_has(file: Path, sets: list[str], pool: str) -> None:
    options = [word for text in sets for word in ("--set", text)]

    status, out, err = run("check", "--config", str(file), *options)

    assert (status, out, err) == (0, f"ok: node decode-0, pool {pool}\n", "")


def test_check_exits_78_with_every_error(file: Path) -> None:
    args = ["check", "--config", str(file), "--set", "pool.layers=-1", "--set", "a.b=1"]

    status, out, err = run(*args)

    assert (status, out) == (78, "")
    assert err.splitlines() == [
        "Error: 2 errors in the configuration",
        "--set pool.layers=-1: pool.layers = -1: must be a whole number from 0 to 1024; "
        "the default is 4",
        "--set a.b=1: a.b = 1: is no key of kvd; remove it; kvd config explain lists every key",
    ]
    status, out, err = run(*args, "--format", "json")
    assert (status, err) == (78, "")
    assert [error["key"] for error in json.loads(out)["errors"]] == ["pool.layers", "a.b"]


def test_explain_shows_value_origin_documentation_and_rule(file: Path) -> None:
    status, out, _ = run("explain", "--config", str(file), "pool.pages", "node")

    assert (status, out.splitlines()) == (
        0,
        [
            f'node.name = "decode-0"   ({file}:2)',
            "    Name of this node: what peers, leases and events call it. Default: the host name.",
            "    Rule: 1 to 64 letters, digits, '.', '_' or '-', beginning with no sign.",
            f"pool.pages = 9   ({file}:4)",
            "    Number of pages, the null page included. Excludes pool.size.",
            "    Rule: a whole number from 2 to 2147483647.",
        ],
    )
    status, out, _ = run("explain", "--config", str(file), "log.level", "--format", "json")
    [row] = json.loads(out)
    assert (status, row["key"], row["value"], row["origin"]) == (0, "log.level", "info", "default")


def test_explain_refuses_a_key_that_does_not_exist(file: Path) -> None:
    status, _, err = run("explain", "--config", str(file), "nonsense")

    assert status == 2
    assert "no key or section is named nonsense" in err


def test_show_prints_toml_or_json(file: Path) -> None:
    status, out, _ = run("show", "--config", str(file))
    assert status == 0
    assert out.startswith('[node]\nname = "decode-0"\n\n[sockets]\nclient = ')

    status, out, _ = run("show", "--config", str(file), "--format", "json")
    assert (status, json.loads(out)["pool"]["pages"]) == (0, 9)


@pytest.mark.parametrize("verb", ["explain", "show"])
def test_verbs_exit_78_when_there_is_no_valid_configuration(verb: str, file: Path) -> None:
    status, out, err = run(verb, "--config", str(file), "--set", "pool.heads=0")

    assert (status, out) == (78, "")
    assert err.startswith("Error: one error in the configuration\n")
