"""Older versions of vLLM as their texts have them: what they say less, or otherwise, than 0.32.

Facts of 0.29 and 0.28 (``Scheduler.__init__``, ``_update_requests_with_invalid_blocks``), and of
0.32 where it says so. The engines themselves: ``tests/engines/test_core.py``.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvd.connectors.vllm import versions
from kvd.connectors.vllm.orders import StepOrders
from tests.connectors.vllm.played_vllm import connector_module
from tests.connectors.vllm.test_connector import engine as any_engine
from tests.connectors.vllm.test_connector import started as started_one
from tests.engines.versions import PAGE, VERSIONS, passed, table

TRIED = {"kvd.any_version": True}
"""Not each of the versions that are played here was run."""


def engine():
    return any_engine(**TRIED)


def started(module, role="WORKER"):
    return started_one(module, role, **TRIED)


@pytest.fixture
def load(monkeypatch):
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(connector_module(monkeypatch, **how))


class Manager:
    """Of vLLM's ``KVCacheManager`` what is asked."""

    def __init__(self, rows):
        self.rows = rows
        self.block_pool = SimpleNamespace(blocks=[], touch=list, free_blocks=list)

    def get_block_ids(self, request_id):
        return self.rows[request_id]

    def reset_prefix_cache(self):
        return True


class Scheduler:
    """Of vLLM's, before 0.30, how it binds what it has."""

    def __init__(self, connector, manager):
        self.kv_cache_manager = manager
        connector.bind_gpu_block_pool(self.kv_cache_manager.block_pool)


def test_the_manager_of_a_pool_is_found_where_vllm_gives_the_pool_alone(load):
    connector = started(load(version="0.29.0"), "SCHEDULER")
    manager = Manager({"r1": ([3, 4],)})

    Scheduler(connector, manager)

    assert connector._blocks.of("r1") == ([3, 4],)
    assert connector._blocks.can_be_held
    with pytest.raises(LookupError, match="no KV cache manager"):
        connector.bind_gpu_block_pool(object())
    connector.shutdown()


class Core:
    """Of vLLM's ``EngineCore`` what makes a scheduler, and loads an adapter: facts of 0.32."""

    def __init__(self, make):
        self.loaded, self.removed, self.called = [], [], []
        self.model_executor = SimpleNamespace(
            add_lora=self.loaded.append,
            remove_lora=self.removed.append,
            sleep=lambda level=1: self.called.append(f"sleep at level {level}"),
        )
        self.connector = make()

    def add_lora(self, adapter):
        self.model_executor.add_lora(adapter)

    def remove_lora(self, number):
        self.model_executor.remove_lora(number)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.called.append(method)


def test_an_engine_that_loads_an_adapter_says_so_before_it_does(load):
    module = load(version="0.32.0")
    config, cache = any_engine()
    config.lora_config = SimpleNamespace()
    core = Core(lambda: module.KvdConnector(config, module.KVConnectorRole["SCHEDULER"], cache))
    forgotten = []
    core.connector._adapters.on_other_weights = lambda number: forgotten.append(
        (number, len(core.loaded))
    )
    for path, inplace in (("/a", False), ("/a", False), ("/b", True)):
        core.add_lora(
            SimpleNamespace(lora_name="a", lora_int_id=5, lora_path=path, load_inplace=inplace)
        )

    assert forgotten == [(5, 2)]
    assert len(core.loaded) == 3
    core.connector.shutdown()


@pytest.mark.parametrize(
    ("keys_of", "is_by_name"),
    [
        (lambda adapter: [adapter.lora_name], True),  # 0.28
        (lambda adapter: [("lora", adapter.lora_name, adapter.lora_path)], False),  # 0.32
        (None, True),  # it was moved: then what is sure
    ],
)
def test_what_vllms_own_cache_knows_an_adapter_by(monkeypatch, keys_of, is_by_name):
    module = ModuleType("vllm.v1.core.kv_cache_utils")
    if keys_of is not None:
        module._gen_lora_extra_hash_keys = lambda request: keys_of(request.lora_request)
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert versions._adapters_by_name() is is_by_name


def test_an_engine_whose_weights_may_be_changed_says_so_before_they_are(load):
    module = load(version="0.32.0")
    config, cache = any_engine()
    core = Core(lambda: module.KvdConnector(config, module.KVConnectorRole["SCHEDULER"], cache))
    half, heard = core.connector._scheduler, []
    half.weights_change = lambda by: heard.append((by, len(core.called))) or True
    for method in ("check_health", "reload_weights", "remove_lora", print, "a_method_of_tomorrow"):
        core.collective_rpc(method)

    named = ["reload_weights", "remove_lora", "a function", "a_method_of_tomorrow"]
    assert heard == [(method, n) for n, method in enumerate(named, 1)]
    assert len(core.called) == 5
    core.connector.shutdown()


def test_an_engine_that_gives_its_weights_away_says_so_before_they_are(load):
    """``sleep`` of vLLM's core has its executor do it; at level 1 they are there again."""
    module = load(version="0.32.0")
    config, cache = any_engine()
    core = Core(lambda: module.KvdConnector(config, module.KVConnectorRole["SCHEDULER"], cache))
    half, heard = core.connector._scheduler, []
    half.weights_change = heard.append
    half.weights_go = lambda by: heard.append((by, len(core.called)))
    for how in ({}, {"level": 0}, {"level": 1}, {"level": 2}):
        core.model_executor.sleep(**how)
        core.collective_rpc("sleep", kwargs=how)

    assert heard == [("sleep at level 2", 6), ("sleep at level 2", 7)]
    core.connector.shutdown()


def orders(*, loads=(), failed=()):
    made = (SimpleNamespace(request=name, blocks=(blocks,)) for name, blocks in loads)
    return SimpleNamespace(loads=tuple(made), failed=tuple(failed))


def test_a_load_that_fails_is_told_by_its_blocks(load):
    """Of these the first is the first one to be computed anew: none that vLLM had itself."""
    module = load(version="0.29.0")
    scheduler, worker = started(module, "SCHEDULER"), started(module)
    rows = {"r1": ([3, 4, 5, 6],), "r2": ([7, 8],), "r3": ([9],)}
    Scheduler(scheduler, Manager(rows))
    request = SimpleNamespace(request_id="r1", num_computed_tokens=0)
    scheduler._scheduler = SimpleNamespace(
        matched=lambda request, n: (80, True),
        given_blocks=lambda request, n: None,
        spoiled=lambda blocks: None,
        reported=lambda report: None,
        step=lambda scheduled, preempted: orders(
            loads=[("r2", (7, 8)), ("r3", (9,))], failed=["r1"]
        ),
    )
    scheduler._tell_of_adapters = lambda: None
    # Of its tokens vLLM has 32 itself, and 80 are to be loaded.
    scheduler.get_num_new_matched_tokens(request, 32)
    scheduler.update_state_after_alloc(request, None, 80)
    output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
    metadata = scheduler.build_connector_meta(output)
    assert metadata.unfilled == {"r1": (4, 5, 6)}

    worker._worker = SimpleNamespace(
        load=lambda orders: None,
        take_results=lambda: ({"r1", "r2", "r3"}, {"r1", "r2"}),
        take_freed=set,
    )
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)

    assert worker.get_finished(set()) == (set(), {"r1", "r2", "r3"})
    assert worker.get_block_ids_with_load_errors() == {4, 5, 6, 7, 8}
    assert worker.get_block_ids_with_load_errors() == set()

    # What vLLM then passes on names no requests.
    scheduler.update_connector_output(
        SimpleNamespace(
            finished_recving={"r1"}, invalid_block_ids={4, 5, 6}, kv_connector_worker_meta=None
        )
    )
    assert scheduler._failed.of(["r1"], scheduler._blocks.of) == {}


def test_a_load_that_fails_is_told_by_its_request(load):
    """From 0.30 on, where a number of a block may be of several groups."""
    worker = started(load(version="0.30.0"))
    worker._worker = SimpleNamespace(
        take_results=lambda: ({"r1"}, {"r1"}),
        take_freed=set,
        load=lambda orders: None,
    )
    worker.bind_connector_metadata(SimpleNamespace(orders=StepOrders))
    assert worker.get_transfer_results(set()).failed_recving == {"r1"}
    assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize(("version", "is_served"), [("0.29.0", False), ("0.30.0", True)])
def test_layers_in_several_groups_where_a_load_that_fails_would_end_vllm(load, version, is_served):
    module = load(version=version)
    config, cache = engine()
    cache.kv_cache_groups *= 2
    role = module.KVConnectorRole.WORKER
    if is_served:
        module.KvdConnector(config, role, cache)
        return
    with pytest.raises(module.Unfit, match="--disable-hybrid-kv-cache-manager"):
        module.KvdConnector(config, role, cache)


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
@pytest.mark.parametrize(("version", "is_served"), [("0.32.0", False), ("0.33.0", True)])
def test_sleep_where_nobody_says_when_memory_is_given_away(load, version, is_served, option):
    """``Worker.sleep`` of 0.32 unmaps the blocks, whatever copies them; 0.33 says so before.

    It does so where they were allocated in a way that can be, without a look at the other option.
    """
    module = load(version=version)
    config, cache = engine()
    setattr(config.model_config, option, True)
    role = module.KVConnectorRole.WORKER
    if is_served:
        module.KvdConnector(config, role, cache)
        return
    with pytest.raises(module.Unfit, match=r"0\.33 vLLM tells no connector"):
        module.KvdConnector(config, role, cache)


@pytest.mark.parametrize(
    ("version", "config", "told"),
    [
        ("0.32.0", SimpleNamespace(kv_cache_layout="LBHNC"), "LBHNC"),
        ("0.28.0", SimpleNamespace(), "HND"),
    ],
)
def test_the_layout_of_the_cache_is_named_in_the_words_of_the_version(load, version, config, told):
    assert load(version=version).layout_name(config) == told


def test_a_version_between_two_that_were_run_was_not(monkeypatch):
    monkeypatch.setattr(versions, "TESTED", ((0, 27), (0, 32)))
    assert versions.untested("0.29.0") == "vLLM 0.29.0: kvd's connector was tested with 0.27, 0.32"
    assert versions.untested("0.27.1") == ""


def test_the_versions_that_are_taken_are_those_that_passed():
    """What a run of the engines has written down decides: ``tests.engines.versions --record``."""
    assert tuple(passed()) == versions.TESTED
    newest = tuple(map(int, VERSIONS[0].split(".")[:2]))
    assert newest == versions.TESTED[-1]


def test_the_page_has_the_table_of_what_was_run():
    assert table() in PAGE.read_text()
