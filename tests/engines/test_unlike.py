"""Real engines that differ in what decides KV, in turn at one daemon: none finds another's.

Every answer is compared with that of the same engine without kvd, and one that is alike does find
what was cached: what is compared would be found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.connectors.vllm.configs import RECORDED
from tests.engines.engine import TO_DECODE
from tests.engines.environment import PYTHON
from tests.engines.forks import IDS, WARM
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

HERE = Path(__file__).parent
CACHED = 288
"""Whole blocks of that."""


def pool_of(bytes_of_an_element):
    return {
        "pool.family": "raw",
        "pool.layers": "8",
        "pool.page_size": "32",
        "pool.page_bytes": str(32 * 4 * 2 * 32 * bytes_of_an_element),
        "pool.pages": "400",
    }


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with one_daemon(tmp_path_factory.mktemp("wide"), pool_of(4)) as found:
        yield found


@pytest.fixture
def model(models, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(models / "model", tmp_path / "model")
    return tmp_path / "model"


def is_own(found, alone):
    """It has computed all of it, and nothing else."""
    assert [one["cached"] for one in found] == [0] * len(found)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]


def test_an_engine_that_is_alike_finds_it(forks, daemon, model, models):
    (first,) = forks.answers(model, daemon)
    assert first["cached"] == 0
    (again,) = forks.answers(model, daemon)
    assert (again["cached"], again["tokens"]) == (CACHED, first["tokens"])
    # What its files hold counts, not where they are or when they were written.
    (elsewhere,) = forks.answers(models / "model", daemon, enable_lora=True, max_lora_rank=8)
    assert (elsewhere["cached"], elsewhere["tokens"]) == (CACHED, first["tokens"])


def test_other_weights_under_the_same_path(forks, daemon, model, models):
    forks.answers(model, daemon)
    weights = model / "model.safetensors"
    told = weights.stat()
    shutil.copyfile(models / "other" / "model.safetensors", weights)
    os.utime(weights, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert weights.stat().st_size == told.st_size
    is_own(forks.answers(model, daemon), forks.answers(model))


@pytest.mark.parametrize(
    "engine",
    [
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}},
        {"hf_overrides": {"rms_norm_eps": 0.01}},
    ],
)
def test_another_configuration_of_the_same_files(forks, daemon, models, engine):
    forks.answers(models / "model", daemon)
    is_own(
        forks.answers(models / "model", daemon, **engine),
        forks.answers(models / "model", **engine),
    )


@pytest.mark.parametrize(
    ("n_bytes", "engines"),
    [
        (2, [{"dtype": "bfloat16"}, {"dtype": "float16"}]),
        (1, [{"dtype": "bfloat16", "kv_cache_dtype": f"fp8_{kind}"} for kind in ("e4m3", "e5m2")]),
    ],
)
def test_another_type_of_as_many_bytes(forks, models, tmp_path, n_bytes, engines):
    with one_daemon(tmp_path, pool_of(n_bytes)) as narrow:
        for engine in engines:
            alone, log = forks.run(models / "model", **engine)
            if "requires x86 with AVX-512" in log:
                pytest.skip("vLLM has no such KV cache for this processor")
            is_own(forks.answers(models / "model", narrow, **engine), alone)


def test_a_pool_that_says_another_type_is_refused_with_the_key_and_its_value(
    forks, models, tmp_path
):
    pool = pool_of(2) | {"pool.tag": "vllm 0.32 LBHNC bfloat16"}
    with one_daemon(tmp_path, pool) as narrow:
        forks.answers(models / "model", narrow, dtype="bfloat16")
        refused, _ = forks.run(models / "model", narrow, dtype="float16")
    assert "tag = 'vllm 0.32 LBHNC float16 CPU_ATTN" in refused["error"]
    assert "it is 'vllm 0.32 LBHNC bfloat16'" in refused["error"]


def test_weights_that_nobody_can_see(forks, daemon, models):
    for _ in range(2):
        found, log = forks.run(models / "model", daemon, load_format="dummy")
        assert found[0]["cached"] == 0
        assert "is for itself alone" in log
    named = {"options": {"kvd.weights": "drawn by seed 0"}, "load_format": "dummy"}
    first, again = (forks.answers(models / "model", daemon, **named)[0] for _ in range(2))
    assert (first["cached"], again["cached"]) == (0, CACHED)
    assert first["tokens"] == again["tokens"]


def test_a_partition_of_its_user(forks, daemon, models):
    blue, other = ({"options": {"kvd.namespace": name}} for name in ("blue", "green"))
    assert forks.answers(models / "model", daemon, **blue)[0]["cached"] == 0
    assert forks.answers(models / "model", daemon, **other)[0]["cached"] == 0
    assert forks.answers(models / "model", daemon, **blue)[0]["cached"] == CACHED
    # And it brings nothing together that is unlike.
    assert forks.answers(models / "other", daemon, **blue)[0]["cached"] == 0


LORA = {"enable_lora": True, "max_lora_rank": 8}


def test_another_adapter_under_the_same_name_and_path(forks, daemon, models, tmp_path):
    path = tmp_path / "adapter"
    shutil.copytree(models / "adapter", path)
    lora = ["mine", 1, str(path)]
    # What an engine has not read it loads nothing for.
    asks = [WARM | {"lora": lora}, {"lora": lora}]
    _, first = forks.answers(models / "model", daemon, asks, **LORA)
    _, again = forks.answers(models / "model", daemon, asks, **LORA)
    assert (first["cached"], again["cached"]) == (0, CACHED)
    assert first["tokens"] == again["tokens"]
    shutil.copy2(models / "adapter-2" / "adapter_model.safetensors", path)
    is_own(
        forks.answers(models / "model", daemon, asks, **LORA),
        forks.answers(models / "model", None, asks, **LORA),
    )


def test_another_adapter_is_loaded_in_place_while_a_request_runs(forks, daemon, models):
    """As ``/v1/load_lora_adapter`` does it with ``load_inplace``."""
    mine, other = (["mine", 1, str(models / name)] for name in ("adapter", "adapter-2"))
    play = [["ask", "ran", IDS, mine, {"max_tokens": 150}], ["steps", 10], ["load_in_place", other]]
    (ran,) = forks.answers(models / "model", daemon, [{"play": play}], **LORA)
    ids = [*IDS, *ran["ran"]["tokens"]]
    asks = [WARM | {"lora": mine}, {"lora": mine, "ids": ids}]
    (_, found), (_, alone) = (
        forks.answers(models / "model", where, asks, **LORA) for where in (daemon, None)
    )
    assert found["tokens"] == alone["tokens"]
    assert found["cached"] == CACHED, "what is of its own weights is found"


def test_the_log_says_what_an_engine_is_of_and_where_two_differ(forks, daemon, models):
    def parts(**engine):
        _, log = forks.run(models / "model", daemon, **engine)
        (line,) = [line for line in log.splitlines() if "kvd namespace " in line]
        name, _, told = line.partition("kvd namespace ")[2].partition(" is of ")
        return name, dict(part.split("=", 1) for part in told.split(", ") if "=" in part)

    one, its_parts = parts()
    other, other_parts = parts(max_model_len=1024)
    assert one.startswith("model:float32:")
    assert one != other
    differ = {name for name in its_parts if its_parts[name] != other_parts[name]}
    assert differ == {"model_options"}


def test_a_reset_looks_at_the_files_once_more(forks, daemon, model, models):
    names = re.compile(r"kvd namespace (\S+) is of")
    asks = [{}, {"reset": True}, {}]
    found, log = forks.run(model, daemon, asks, options={"kvd.namespace": "reset"})
    assert [one["cached"] for one in found[:2]] == [0, 0]
    assert len(names.findall(log)) == 1
    weights = model / "model.safetensors"
    asks = [{}, {"reset": True, "copy": [str(models / "other" / weights.name), str(weights)]}, {}]
    found, log = forks.run(model, daemon, asks, options={"kvd.namespace": "reset"})
    before, after = names.findall(log)
    assert before != after
    assert "is for itself alone" in log
    assert found[1]["cached"] == 0


BESIDE = {
    "kv_connector": "BesideConnector",
    "kv_connector_module_path": "beside",
    "kv_role": "kv_both",
}


@pytest.mark.parametrize("order", [["kvd", BESIDE], [BESIDE, "kvd"]])
@pytest.mark.parametrize("handoffs", [True, False])
def test_beside_a_connector_that_hands_over(forks, daemon, models, order, handoffs):
    options = {"kvd.handoffs": handoffs, "kvd.namespace": f"{handoffs} {order[0] == 'kvd'}"}
    how = {"options": options, "beside": order}
    # How blocks are packed is said by the first step: what comes before it is not cached.
    asks = [{"ids": IDS[:50]}, {"params": TO_DECODE}]
    _, told = forks.answers(models / "model", daemon, asks, **how)
    assert told["params"]["remote_engine_id"] == "x"
    assert ("kvd" in told["params"]) is handoffs
    asks = [{"ids": IDS[:50]}, {"abort": 1}, {"abort": 3}, {}, {"reset": True}]
    (_, again, anew) = forks.answers(models / "model", daemon, asks, **how)
    assert (again["cached"], anew["cached"]) == (CACHED, 0)
    assert again["tokens"] == anew["tokens"] == told["tokens"]
    assert not daemon.snapshot().leases


METRICS = """
from types import SimpleNamespace
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from kvd.connectors.vllm.stats import KvdPromMetrics, KvdStats

types = {one: one for one in (Counter, Gauge, Histogram)}
config = SimpleNamespace(kv_transfer_config=None)
metrics = KvdPromMetrics(config, types, ["engine"], {0: ["0"]})
first = KvdStats(data={"hit_tokens": 3}).with_namespace("model:float32:1")
both = first.aggregate(KvdStats(data={"hit_tokens": 4}))
assert both.reduce() == {"hit_tokens": 7}
metrics.observe(both.data)
metrics.observe({"hit_tokens": 1})
labels = {"engine": "0", "namespace": "model:float32:1"}
assert REGISTRY.get_sample_value("vllm:kvd_namespace_info", labels) == 1
assert REGISTRY.get_sample_value("vllm:kvd_hit_tokens_total", {"engine": "0"}) == 8
metrics.observe({"namespace": "model:float32:2"})
assert REGISTRY.get_sample_value("vllm:kvd_namespace_info", labels) == 0
labels["namespace"] = "model:float32:2"
assert REGISTRY.get_sample_value("vllm:kvd_namespace_info", labels) == 1
"""


def test_the_namespace_is_a_label_of_a_metric():
    done = subprocess.run([PYTHON, "-c", METRICS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_configuration_was_recorded_from_these_classes():
    found = subprocess.run(
        [PYTHON, str(HERE / "vllm_record.py")], capture_output=True, check=True, text=True
    )
    assert json.loads(found.stdout) == RECORDED
