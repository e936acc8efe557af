"""As much of vLLM as the connector's own module imports, for tests that have no vLLM.

``NEWEST`` are the names of the newest base class that is known, vLLM's 0.33, as its text has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace

NEWEST = {
    "scheduler": [
        *("bind_gpu_block_pool", "bind_kv_cache_manager", "build_connector_meta"),
        *("get_external_cache_hit_sources", "get_finished_count", "get_loaded_kv_cache_group_ids"),
        *("get_num_new_matched_tokens", "has_pending_block_frees", "has_pending_push_work"),
        *("on_new_request", "register_finished_partial_tail", "request_finished", "reset_cache"),
        *("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "take_events"),
        *("update_connector_output", "update_state_after_alloc"),
    ],
    "worker": [
        *("bind_connector_metadata", "build_connector_worker_meta", "clear_connector_metadata"),
        *("finish_forward", "get_block_ids_with_load_errors", "get_finished"),
        *("get_handshake_metadata", "get_kv_connector_kv_cache_events", "get_transfer_results"),
        *("handle_preemptions", "has_connector_metadata", "register_kv_caches"),
        *("reset_capture_state", "restore_kv_caches", "save_kv_layer", "set_host_xfer_buffer_ops"),
        *("start_load_kv", "unregister_kv_caches", "wait_for_layer_load", "wait_for_save"),
    ],
    "both": [
        *("build_kv_connector_stats", "build_prom_metrics", "get_kv_connector_stats"),
        *("get_mem_pool_context", "get_required_kvcache_layout", "requires_kv_delivery"),
        *("requires_piecewise_for_cudagraph", "role", "shutdown", "supports_sleep_mode"),
        "supports_divergent_local_hybrid_hits",
    ],
}

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Base:
    """``KVConnectorBase_V1``: whatever a connector does not say has this one's answer."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.role = role

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def _get_connector_metadata(self):
        return self._metadata

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        return False


class SupportsHMA:
    pass


class Factory:
    """``KVConnectorFactory``: each name once."""

    def __init__(self):
        self.known = {}

    def register_connector(self, name, module, of_class):
        if name in self.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.known[name] = module, of_class


class Metadata:
    pass


class HandshakeMetadata:
    pass


class WorkerMetadata:
    pass


@dataclasses.dataclass
class TransferResults:
    finished_sending: set
    finished_recving: set
    failed_recving: set


@dataclasses.dataclass
class Stats:
    data: dict = dataclasses.field(default_factory=dict)


class PromMetrics:
    def __init__(self, config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues


def stage_of(n_layers, stage, stages):
    """Which layers a stage of a pipeline has: what is left over goes to those before the last."""
    sizes = [n_layers // stages] * stages
    for more in range(2, n_layers % stages + 2):
        sizes[-more] += 1
    return sum(sizes[:stage]), sum(sizes[: stage + 1])


def modules(version="0.32.0", device="cpu", layouts=("LBHNC", "BLHNC"), rank=(0, 0)):
    """By name, as the connector finds them; ``rank``: of the worker, its stage and in that."""
    role = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
    told = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {
            "get_kv_transfer_group": lambda: None,
            "has_kv_transfer_group": lambda: False,
        },
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory()},
        V1: {},
        f"{V1}.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorHandshakeMetadata": HandshakeMetadata,
            "KVConnectorMetadata": Metadata,
            "KVConnectorRole": role,
            "KVConnectorTransferResults": TransferResults,
            "KVConnectorWorkerMetadata": WorkerMetadata,
            "SupportsHMA": SupportsHMA,
        },
        f"{V1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: rank[1],
            "get_pp_group": lambda: SimpleNamespace(rank_in_group=rank[0]),
        },
        "vllm.distributed.utils": {"get_pp_indices": stage_of},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: device == "cpu")},
        "vllm.v1": {
            "kv_cache_layout": SimpleNamespace(KVCacheLayout=enum.Enum("KVCacheLayout", layouts))
        },
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.cache_hit_source": {
            "CacheHitSource": enum.Enum("CacheHitSource", ["HOST", "P2P", "DISK"])
        },
        "vllm.v1.request": {
            "RequestStatus": enum.Enum("RequestStatus", ["FINISHED_ABORTED", "FINISHED_ERROR"])
        },
    }
    found = {}
    for name, contents in told.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(contents)
    return found


OURS = ("kvd.connectors.vllm.connector", "kvd.connectors.vllm.stats")


@contextlib.contextmanager
def connector_module(monkeypatch, **how):
    """The connector's own, beside that vLLM; both are gone behind it."""
    for name, module in modules(**how).items():
        monkeypatch.setitem(sys.modules, name, module)
    try:
        for name in OURS:
            sys.modules.pop(name, None)
        yield importlib.import_module(OURS[0])
    finally:
        for name in OURS:
            sys.modules.pop(name, None)
