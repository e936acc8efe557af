"""``vllm:kvd_*``: what the connector has done, through vLLM's own metrics and log lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvd.connectors.vllm.requests import Counts
    from kvd.connectors.vllm.worker import CopyCounts

COUNTERS = {
    "hit_tokens": "Prompt tokens whose KV came from kvd.",
    "received_tokens": "Of these, sent by another node.",
    "tier_tokens": "Of them too, read from a tier below the pool.",
    "unmet": "Prompts of which another node was to send KV, and did not.",
    "failed_loads": "Requests that were computed after kvd had promised their KV.",
    "went_alone": "Requests that were computed without kvd, or went on without it.",
    "failures": "Calls to the daemon that failed.",
    "odd_params": "Requests with kv_transfer_params of kvd's that made no sense.",
    "loaded_bytes": "Copied from kvd's pages to blocks.",
    "saved_bytes": "Copied from blocks to kvd's pages.",
    "load_seconds": "Spent on that.",
    "save_seconds": "Spent on that.",
}


NAMESPACE = "namespace"
"""Beside the counters, once: what the engine's KV is of."""


class KvdStats(KVConnectorStats):
    """Sums since the last time, one of ``COUNTERS`` each; and ``NAMESPACE``, once it is known."""

    def with_namespace(self, namespace: str) -> KvdStats:
        """The same, and that."""
        return KvdStats(data={**self.data, NAMESPACE: namespace})

    @classmethod
    def of_requests(cls, counts: Counts) -> KvdStats | None:
        """What the scheduler's half counts."""
        return cls._taken(vars(counts))

    @classmethod
    def of_copies(cls, counts: CopyCounts) -> KvdStats | None:
        """What the workers' half counts."""
        return cls._taken(vars(counts))

    @classmethod
    def _taken(cls, counts: dict[str, float]) -> KvdStats | None:
        if not any(counts.values()):
            return None
        found = {name: value for name, value in counts.items() if value}
        for name in found:
            counts[name] = type(counts[name])()
        return cls(data=found)

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, float | str] = {}

    @property
    def sums(self) -> dict[str, float]:
        """Without the namespace."""
        return {name: n for name, n in self.data.items() if not isinstance(n, str)}

    def aggregate(self, other: KVConnectorStats) -> KvdStats:
        """The sums of both."""
        assert isinstance(other, KvdStats)
        mine, others = self.sums, other.sums
        sums = {name: mine.get(name, 0) + others.get(name, 0) for name in {*mine, *others}}
        return KvdStats(data=self.data | other.data | sums)

    def reduce(self) -> dict[str, int | float]:
        """For a log line."""
        return {name: round(n, 4) for name, n in sorted(self.sums.items())}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data


class KvdPromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus, a counter each, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, told in COUNTERS.items():
            counter = metric_types[Counter](
                name=f"vllm:kvd_{name}", documentation=told, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

        self._told: dict[int, str] = {}
        self._namespace = metric_types[Gauge](
            name="vllm:kvd_namespace_info",
            documentation="1 for the namespace of what this engine caches.",
            labelnames=[*labelnames, NAMESPACE],
        )

    def observe(self, transfer_stats_data: dict[str, float | str], engine_idx: int = 0) -> None:
        """Add what has come."""
        told = transfer_stats_data.get(NAMESPACE)
        if isinstance(told, str):
            of_engine = self.per_engine_labelvalues[engine_idx]
            if (before := self._told.get(engine_idx, told)) != told:
                # Its weights were changed: who reads this must find one.
                self._namespace.labels(*of_engine, before).set(0)
            self._told[engine_idx] = told
            self._namespace.labels(*of_engine, told).set(1)
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
