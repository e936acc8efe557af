"""The connector behind vLLM's interface, called by a played vLLM: what it answers to which hook."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.connectors.vllm.identity import BlockPacking
from kvd.connectors.vllm.orders import StepOrders
from kvd.connectors.vllm.requests import Counts
from kvd.connectors.vllm.versions import TESTED
from kvd.connectors.vllm.worker import CopyCounts
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
        data_parallel_size=1,
    )
    extra = {"kvd.endpoint": "ipc:///nowhere/kvd/client.sock", **options}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="e")
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        cache_config=SimpleNamespace(),
        lora_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )
    return config, SimpleNamespace(kv_cache_groups=[group], num_blocks=9)


def parallel(config, tensor, stages, layers=8):
    """As an engine of so many ranks has it."""
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.pipeline_parallel_size = stages
    config.model_config.get_total_num_hidden_layers = lambda: layers


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


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "stages", "place", "rank"),
    [(2, 1, (0, 1), 1), (1, 2, (1, 0), 1), (2, 2, (0, 1), 1), (2, 2, (1, 0), 2), (2, 2, (1, 1), 3)],
)
def test_each_rank_has_the_shard_of_its_stage_and_heads(
    load, monkeypatch, tensor, stages, place, rank
):
    module = load(rank=place)
    config, cache = engine()
    parallel(config, tensor, stages)
    told = {}
    monkeypatch.setattr(module, "WorkerHalf", lambda *args, **how: told.update(how))
    module.KvdConnector(config, module.KVConnectorRole["WORKER"], cache)
    assert (told["rank"], told["ranks"]) == (rank, tensor * stages)


def test_every_rank_of_every_stage_answers_an_order(load, monkeypatch):
    module = load()
    config, cache = engine()
    parallel(config, 2, 2)
    told = {}
    half = SimpleNamespace(
        fill_no_more=None,
        watch=lambda: None,
        arrivals=SimpleNamespace(is_on=False),
        changes=SimpleNamespace(own_reset=None),
    )
    monkeypatch.setattr(module, "SchedulerHalf", lambda *args, **how: told.update(how) or half)
    module.KvdConnector(config, module.KVConnectorRole["SCHEDULER"], cache)
    assert told["ranks"] == 4


@pytest.mark.parametrize(("engines", "kept"), [(1, 3), (2, 0)])
def test_engines_in_step_with_others_keep_no_adapter(load, engines, kept):
    """Facts of 0.32: ``execute_dummy_batch``, and so ``maybe_setup_dummy_loras``."""
    config, _ = engine()
    config.lora_config = SimpleNamespace(max_cpu_loras=3)
    config.parallel_config.data_parallel_size = engines
    assert load()._adapters_kept(config) == kept


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_stages_of_unlike_numbers_of_layers_are_refused_in_a_sentence(load, role):
    module = load()
    config, cache = engine()
    parallel(config, 1, 2, layers=7)
    with pytest.raises(module.Unfit, match=r"stages of this pipeline have 4, 3 layers.*divides 7"):
        module.KvdConnector(config, module.KVConnectorRole[role], cache)


def test_all_stages_say_how_they_pack(load):
    module = load()
    connector = started(module)
    named = []
    connector._identify = named.append
    told = {
        place: module.KvdHandshake(BlockPacking("tag", {"layers": str(place)}))
        for place in [(1, 0), (0, 1), (1, 1), (0, 0)]
    }
    connector.set_xfer_handshake_metadata_pp_aware(told)
    (packing,) = named
    assert packing.details == {"layers": "(0, 0) (0, 1) (1, 0) (1, 1)"}


# ---- the log -------------------------------------------------------------------------------------


@pytest.fixture
def loggers(monkeypatch):
    """vLLM's has a handler; what it writes. No logger has been told anything else."""
    written = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: written.append(record.getMessage())
    said = {"vllm": ([handler], logging.INFO, False)}
    for name in ("vllm", "kvd", "kvd.connectors", "kvd.connectors.vllm"):
        logger = logging.getLogger(name)
        handlers, level, propagates = said.get(name, ([], logging.NOTSET, True))
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logger, "level", level)
        monkeypatch.setattr(logger, "propagate", propagates)
        logger._cache.clear()
    yield written
    for name in ("kvd", "kvd.connectors", "kvd.connectors.vllm"):
        logging.getLogger(name)._cache.clear()


@pytest.mark.parametrize("has_root_handler", [False, True])
def test_lines_are_written_where_vllm_writes(load, loggers, monkeypatch, has_root_handler):
    """Some library's first warning gives the root a handler, which writes warnings alone."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] * has_root_handler)
    module = load()
    for _ in range(2):  # both halves may be in one process
        started(module).shutdown()
    module.logger.info("a line")
    module.logger.debug("none")
    assert loggers == ["a line"]


@pytest.mark.parametrize("name", ["kvd", "kvd.connectors.vllm"])
def test_where_the_user_has_said_it_lines_are_written_there(load, loggers, name):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).handlers = [handler]
    module = load()
    started(module).shutdown()
    module.logger.warning("a line")
    assert (told, loggers) == (["a line"], [])


# ---- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "read", "told"),
    [
        (0, 0, {"HOST": 64}),
        (24, 0, {"HOST": 40, "P2P": 24}),
        (64, 0, {"P2P": 64}),
        (0, 48, {"HOST": 16, "DISK": 48}),
    ],
)
def test_where_the_kv_of_a_prompt_came_from(load, sent, read, told):
    connector = started(load())
    connector._scheduler = SimpleNamespace(
        sent_tokens=lambda request, n: sent, tier_tokens=lambda request, n: read
    )
    request = SimpleNamespace(request_id="r1")

    found = connector.get_external_cache_hit_sources(request, 64)

    assert {source.name: n for source, n in found.items()} == told


def test_all_that_is_counted_is_told_and_stands_on_the_page(load):
    load()
    told = sys.modules["kvd.connectors.vllm.stats"].COUNTERS
    page = (Path(__file__).parents[3] / "docs" / "howto" / "vllm.md").read_text("utf-8")

    assert {*told} == {*vars(Counts()), *vars(CopyCounts())}
    assert [name for name in told if f"`vllm:kvd_{name}`" not in page] == []


# ---- beside another connector --------------------------------------------------------------------


def test_blocks_that_another_connector_did_not_fill_are_told_before_what_is_saved(load):
    connector = started(load())
    told = []
    connector._scheduler = SimpleNamespace(
        spoiled=lambda blocks: told.append(("spoiled", blocks)),
        reported=lambda report: told.append(("reported", report)),
    )
    output = SimpleNamespace(
        kv_connector_worker_meta=None,
        invalid_block_ids={7},
        finished_recving=None,
        failed_recving=None,
    )
    connector.update_connector_output(output)
    assert told == [("spoiled", {7}), ("reported", None)]


@pytest.mark.parametrize(
    ("status", "is_heard", "is_sound"),
    [("FINISHED_ABORTED", False, True), ("FINISHED_ERROR", False, False), (None, True, True)],
)
def test_how_a_request_ended_decides_what_becomes_of_its_kv(load, status, is_heard, is_sound):
    module = load()
    connector = started(module)
    told = []
    connector._scheduler = SimpleNamespace(
        finished=lambda request, **how: told.append(how) or (False, None)
    )
    request = SimpleNamespace(request_id="r1", status=status and module.RequestStatus[status])
    connector.request_finished(request, [])
    assert told == [{"is_heard": is_heard, "is_sound": is_sound}]


def test_who_has_imported_it_finds_it_by_its_name(load):
    """vLLM's connector of several does, for what each counts, also where no plugins are loaded."""
    module = load()
    known = module.KVConnectorFactory.known
    assert known == {"KvdConnector": ("kvd.connectors.vllm.connector", "KvdConnector")}
    module.register_connector()


# ---- steps that copy nothing ---------------------------------------------------------------------

MOST_CALLS = 28
"""Of Python functions, in all that vLLM asks a worker in a step in which nothing is copied."""


def test_a_step_that_copies_nothing_costs_a_worker_few_calls(load):
    module = load()
    connector = started(module)
    metadata = module.KvdMetadata(StepOrders(number=7), {})
    counted = []

    def count(frame, event, what):
        if event == "call":
            counted.append(frame.f_code.co_qualname)

    connector.bind_connector_metadata(metadata)
    sys.setprofile(count)
    try:
        connector.handle_preemptions(metadata)
        connector.start_load_kv(None)
        connector.has_connector_metadata()
        connector.wait_for_save()
        found = connector.get_transfer_results(set())
        connector.get_block_ids_with_load_errors()
        stats, told = connector.get_kv_connector_stats(), connector.build_connector_worker_meta()
    finally:
        sys.setprofile(None)

    assert not found.finished_recving | found.failed_recving | found.finished_sending
    assert stats is told is None
    ours = [name for name in counted if "TransferResults" not in name]
    assert len(ours) <= MOST_CALLS, ours
    connector.shutdown()


def test_vllm_is_not_asked_to_call_at_each_layer(load):
    """It does where a connector says that it has metadata, and nothing is copied by layer."""
    connector = started(load())
    connector.bind_connector_metadata(object())
    assert connector.has_connector_metadata() is False
    connector.shutdown()
