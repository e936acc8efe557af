"""The connector behind vLLM's interface, called by a played vLLM: what it answers to which hook."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest

from kvd.connectors.vllm.versions import TESTED
from tests.connectors.vllm.played_vllm import connector_module


@pytest.fixture
def load(monkeypatch):
    """The connector's module, beside a vLLM of that version and device."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(connector_module(monkeypatch, **how))


def engine(kind="FullAttentionSpec", **options):
    """What vLLM gives a connector: its configuration, and that of its cache."""
    spec = type(kind, (), {"block_size": 32, "page_size_bytes": 4096, "non_causal": False})()
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec)
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        pipeline_parallel_size=1,
    )
    extra = {"kvd.endpoint": "ipc:///nowhere/kvd/client.sock", **options}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="e")
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        lora_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )
    return config, SimpleNamespace(kv_cache_groups=[group], num_blocks=9)


def started(module, role="WORKER", **options):
    config, cache = engine(**options)
    return module.KvdConnector(config, module.KVConnectorRole[role], cache)


# ---- layouts -------------------------------------------------------------------------------------


def test_all_layers_of_a_block_are_wished_in_one_stretch(load):
    module = load(device="cuda")
    config, _ = engine()

    assert module.KvdConnector.get_required_kvcache_layout(config) == "BLHNC"
    config.kv_transfer_config = None
    assert module.KvdConnector.get_required_kvcache_layout(config) == "BLHNC"


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"device": "cpu"}, {}),  # its backend has none, and would say so with a warning
        ({"device": "cuda", "layouts": ("LBHNC",)}, {}),  # this vLLM has none of that name
        # Beside another connector, which may wish another one: vLLM refuses two wishes.
        ({"device": "cuda"}, {"kvd.handoffs": False}),
    ],
)
def test_no_layout_is_wished_where_it_would_be_in_the_way(load, how, options):
    module = load(**how)
    config, _ = engine(**options)

    assert module.KvdConnector.get_required_kvcache_layout(config) is None


# ---- versions ------------------------------------------------------------------------------------

FIRST, LAST = (f"{major}.{minor}" for major, minor in (TESTED[0], TESTED[-1]))
TOLD = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
BEFORE, AFTER = f"0.{TESTED[0][1] - 1}.2", f"0.{TESTED[-1][1] + 1}.0"


@pytest.mark.parametrize("version", [BEFORE, AFTER, "1.0.0rc1", "some build"])
def test_a_version_that_was_not_tested_is_refused_and_may_be_tried(load, version, caplog):
    module = load(version=version)

    with pytest.raises(module.Unfit, match=f"vLLM {version}: .* tested with {TOLD}; set .*any_ver"):
        started(module)

    caplog.set_level(logging.WARNING)
    connector = started(module, **{"kvd.any_version": True})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"vLLM {version}: kvd's connector was tested with {TOLD}; it is tried, since "
        "kvd.any_version says so"
    )
    connector.shutdown()


@pytest.mark.parametrize("version", [f"{FIRST}.0", f"{LAST}.0", f"{LAST}.1.post2", f"{LAST}.0+cpu"])
def test_a_version_that_was_tested_starts_without_a_word(load, version, caplog):
    module = load(version=version)
    caplog.set_level(logging.WARNING)
    started(module).shutdown()
    assert not caplog.records


def test_sleep_is_asked_of_the_class_before_there_is_an_engine(load):
    """vLLM 0.33 does: as its text has it, for no engine of 0.33 was run."""
    connector = load().KvdConnector
    assert connector.supports_sleep_mode(SimpleNamespace()) is True


def test_memory_that_vllm_takes_back_is_taken_from_the_worker(load):
    connector = started(load())
    told = []
    connector._worker = SimpleNamespace(
        take_back=lambda: told.append("taken"), give_again=lambda: told.append("given")
    )
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert told == ["taken", "given"]


# ---- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "told"), [(0, {"HOST": 64}), (24, {"HOST": 40, "P2P": 24}), (64, {"P2P": 64})]
)
def test_where_the_kv_of_a_prompt_came_from(load, sent, told):
    connector = started(load())
    connector._scheduler = SimpleNamespace(sent_tokens=lambda request, n: sent)
    request = SimpleNamespace(request_id="r1")

    found = connector.get_external_cache_hit_sources(request, 64)

    assert {source.name: n for source, n in found.items()} == told
