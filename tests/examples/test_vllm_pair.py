"""The files of ``examples/vllm-pair`` fit each other; ``tests/engines`` has them run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli.config import config_group
from kvd.cli.proxy import proxy_command
from kvd.config import Config, load
from kvd.connectors.vllm.versions import untested
from tests.engines.versions import VERSIONS

HERE = Path(__file__).parents[2] / "examples" / "vllm-pair"
ROLES = ("prefill", "decode")
SAYS_ITS_ARGUMENTS = '#!/bin/sh\nfor word in "$@"; do printf \'%s\\0\' "$word"; done\n'


def module_of(name):
    spec = importlib.util.spec_from_file_location(f"vllm_pair_{name}", HERE / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def demo():
    return module_of("demo")


@pytest.fixture(scope="module")
def configs():
    found = {role: load(HERE / f"{role}.toml", {}, ()) for role in ROLES}
    assert all(isinstance(each, Config) for each in found.values()), found
    return found


@pytest.fixture
def arguments(tmp_path):
    """What a script would start its command with."""
    stub = tmp_path / "stub"
    stub.write_text(SAYS_ITS_ARGUMENTS)
    stub.chmod(0o755)

    def of(*words, **variables):
        done = subprocess.run(
            ["sh", *words],
            cwd=HERE,
            env={"PATH": os.environ["PATH"], "PYTHON": str(stub), "KVD": str(stub), **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split("\0")[:-1]

    return of


@pytest.mark.parametrize("role", ROLES)
def test_config_check_passes_a_daemon_of_the_pair(role):
    done = CliRunner().invoke(config_group, ["check", "--config", str(HERE / f"{role}.toml")])
    assert done.exit_code == 0, done.output


def test_the_two_daemons_have_one_pool_and_nothing_else_in_common(configs):
    prefill, decode = configs["prefill"], configs["decode"]
    assert decode.peers.connect == {"prefill": prefill.peers.listen}
    assert prefill.pool.directory != decode.pool.directory
    pools = [
        (each.pool.layers, each.pool.page_size, each.pool.page_bytes, each.pool.backing)
        for each in (prefill, decode)
    ]
    assert pools[0] == pools[1]
    for one, other in zip(_addresses(prefill), _addresses(decode), strict=True):
        assert one != other


def _addresses(config):
    return config.node.name, config.sockets.client, config.sockets.admin, config.peers.listen


@pytest.mark.parametrize("role", ROLES)
def test_an_engine_is_started_for_the_pool_of_its_daemon(role, configs, arguments):
    pool, words = configs[role].pool, arguments("engine.sh", role)
    option = dict(itertools.pairwise(words))
    assert (words[0], option["--model"]) == ("-m", "/tmp/kvd-vllm-pair/model")
    assert int(option["--block-size"]) == pool.page_size
    model, bytes_of_an_element = module_of("model"), {"float32": 4}[option["--dtype"]]
    of_a_token = 2 * model.KV_HEADS * (model.HIDDEN // model.HEADS) * bytes_of_an_element
    assert (pool.layers, pool.page_bytes) == (model.LAYERS, pool.page_size * of_a_token)

    transfer = json.loads(option["--kv-transfer-config"])
    assert transfer["kv_connector_module_path"] == "kvd.connectors.vllm"
    assert transfer["kv_connector_extra_config"]["kvd.endpoint"] == configs[role].sockets.client


def test_the_vllm_alone_differs_by_nothing_but_kvd(arguments):
    alone = arguments("engine.sh", "alone", PORT="1")
    assert arguments("engine.sh", "decode", PORT="1")[:-2] == alone
    assert not [word for word in alone if "kvd." in word]


def test_the_proxy_is_told_of_the_engines_and_their_daemons(configs, arguments):
    verb, *words = arguments("proxy.sh")
    assert verb == "proxy"
    proxy_command.make_parser(_context()).parse_args(list(words))
    for role in ROLES:
        port = dict(itertools.pairwise(arguments("engine.sh", role)))["--port"]
        address = f"http://127.0.0.1:{port},daemon={configs[role].sockets.client}"
        assert words[words.index(f"--{role}") + 1] == address


def _context():
    import click  # noqa: PLC0415

    return click.Context(proxy_command)


def test_the_tokenizer_splits_what_it_has_joined():
    known = module_of("model").words()
    assert len(known) == len(set(known)) > 2000
    assert known[0] == "<unk>"
    assert not [word for word in known[1:] if re.findall(r"\w+|[^\w\s]+", word) != [word]]


def test_the_version_that_is_set_up_is_the_newest_that_was_tested():
    found = re.search(r"^newest=(.*)$", (HERE / "setup.sh").read_text(), flags=re.M)
    assert found[1] == VERSIONS[0]
    assert untested(found[1]) == ""


def set_up(folder, **variables):
    bare = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHON": sys.executable}
    bare |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    return subprocess.run(
        ["sh", str(HERE / "setup.sh"), str(folder)],
        env=bare | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_set_up_without_a_registry_says_what_to_do(tmp_path):
    done = set_up(tmp_path / "made")
    assert done.returncode == 1
    assert "torch 2.13.0+cpu could not be installed" in done.stdout
    assert "KVD_VLLM_PYTHON=PYTHON make demo-vllm" in done.stdout
    assert "No matching distribution" in done.stderr


def test_what_is_set_up_is_left_alone(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / ".ready-0.32.0").touch()
    done = set_up(folder)
    assert (done.returncode, done.stdout) == (0, f"setup-vllm: {folder} is ready\n")


def test_an_interpreter_that_is_named_is_looked_at(tmp_path):
    done = set_up(tmp_path / "made", KVD_VLLM_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "KVD_VLLM_PYTHON=/nowhere/python cannot be run" in done.stderr
    assert not (tmp_path / "made").exists()


def row(demo, **changed):
    sound = demo.Row(1, "", 100, 24, moved_bytes=5, saved_bytes=5, took_s=0.1, is_equal=True)
    return sound._replace(**changed)


def test_all_turns_must_be_equal(demo):
    rows = [row(demo), row(demo, turn=2)]
    assert demo.problems(rows, 2) == []
    rows[1] = rows[1]._replace(is_equal=False)
    assert demo.problems(rows, 2) == ["turn 2: other tokens than one vLLM alone"]
    assert demo.problems(rows[:1], 2) == ["1 of 2 turns were answered"]


def test_turns_that_were_computed_are_named_where_both_nodes_were_there(demo):
    away = row(demo, turn=demo.ENGINE_KILLED, moved_bytes=0, saved_bytes=0)
    alone = row(demo, turn=2, moved_bytes=0, saved_bytes=0)
    assert demo.computed_alone([row(demo), alone, away]) == "2"


def test_kv_that_did_not_travel_is_no_success(demo):
    assert demo.problems([row(demo, moved_bytes=0)], 1) == [
        "no KV was handed over: the engines computed everything"
    ]
    assert demo.problems([row(demo, saved_bytes=0)], 1) == [
        "nothing was saved: each prompt was moved in whole"
    ]


def test_a_process_of_a_session_is_found_until_it_has_ended(demo):
    own = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    demo.wait_until(lambda: len(demo.session(own.pid)) == 2, lambda: "no child", 10)
    os.killpg(own.pid, 9)
    own.wait()
    demo.wait_until(lambda: not demo.session(own.pid), lambda: "it lives on", 10)


def test_what_looks_at_it_needs_no_package():
    """`make setup-vllm` does that by the interpreter it was given, which may have none."""
    look = [sys.executable, "-S", "-m", "tests.engines.environment"]
    named = {"PYTHONPATH": str(HERE.parents[1]), "KVD_VLLM_PYTHON": "/nowhere/python"}
    done = subprocess.run(look, env=named, capture_output=True, text=True, check=False)
    assert "KVD_VLLM_PYTHON=/nowhere/python cannot be run" in done.stderr
