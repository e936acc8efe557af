"""As much of vLLM as the connector's own module imports, for tests that have no vLLM.

What a version has not is left out of it, as in its text: before 0.29 names of layouts, before 0.30
results of transfers by request, before 0.32 sources of hits, before 0.33 a word of sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import re
import sys
from types import ModuleType, SimpleNamespace

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Base:
    """``KVConnectorBase_V1``: whatever a connector does not say has this one's answer."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.role = role

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def _get_connector_metadata(self):
        return self._metadata


class SleepingBase(Base):
    """The same from 0.33 on."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        return False

    def unregister_kv_caches(self):
        pass


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
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "HND"},
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": enum.Enum("KVCacheLayout", layouts)},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.cache_hit_source": {
            "CacheHitSource": enum.Enum("CacheHitSource", ["HOST", "P2P", "DISK"])
        },
        "vllm.v1.request": {
            "RequestStatus": enum.Enum("RequestStatus", ["FINISHED_ABORTED", "FINISHED_ERROR"])
        },
    }
    series = tuple(map(int, re.findall(r"(\d+)\.(\d+)", f"{version} 0.99")[0]))
    if series >= (0, 33):
        told[f"{V1}.base"]["KVConnectorBase_V1"] = SleepingBase
    if series < (0, 32):
        del told["vllm.v1.metrics.cache_hit_source"]
    if series < (0, 30):
        del told[f"{V1}.base"]["KVConnectorTransferResults"]
    if series < (0, 29):
        del told["vllm.v1.kv_cache_layout"]
    found = {}
    for name, contents in told.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(contents)
    return found


OURS = tuple(f"kvd.connectors.vllm.{name}" for name in ("connector", "stats", "versions"))


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
