"""Metrics of Prometheus: what a proxy counts, and what it reads of those of an engine.

Requests are counted by how they ended, and engines by what they did.
"""

from __future__ import annotations

import enum
import functools
import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from kvd.proxy.engines import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.proxy.engines import ProxiedEngine

METRICS_TYPE: Final = CONTENT_TYPE_LATEST

NAMESPACE_METRIC: Final = "vllm:kvd_namespace_info"
_NAMESPACES: Final = re.compile(rb"^" + NAMESPACE_METRIC.encode() + rb"\{.{0,2000}$", re.MULTILINE)
_MOST_NAMED: Final = 256
"""Lines of a page, one for each engine behind an address; more are an engine's lie."""


class RequestEnd(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    """An engine answered, whatever it said; all of that went through."""
    REFUSED = "refused"
    """By the proxy: a path, a header or a body that does not go on, or has no room."""
    OVERLOADED = "overloaded"
    """Each engine that could be asked said 429 or 503; one of these answers went through."""
    UNAVAILABLE = "unavailable"
    """No engine could be reached."""
    BROKEN = "broken"
    """Engines hung up, or said what makes no sense: 502."""
    TIMED_OUT = "timed-out"
    """No engine answered in time: 504."""
    CUT = "cut"
    """The engine, or a limit of the proxy, ended an answer in its middle."""
    CLIENT_GONE = "client-gone"
    """The client hung up, or did not read on."""
    CLIENT_SLOW = "client-slow"
    """The client did not send its request in time."""
    INTERNAL = "internal"
    """A fault of the proxy."""


class LookupEnd(enum.StrEnum):
    """What came of asking an engine's daemon for a prompt."""

    ANSWERED = "answered"
    NO_ANSWER = "no-answer"
    """It refused, was not there, or did not say it in time."""
    NO_NAMESPACE = "no-namespace"
    """It was not asked: the engine has not said where it keeps its prompts."""


class ProxyMetrics:
    """What a proxy counts, in a registry of its own."""

    def __init__(self, engines: Sequence[ProxiedEngine], now_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests for tokens.")
        self.other_requests = self._counter("other_requests", "Requests for anything else.")
        self.ended = self._counter("ended", "Requests of both kinds by how they ended.", "how")
        self.prefill_failed = self._counter(
            "prefill_failed", "Prefills that failed; the prompt was computed where it was decoded."
        )
        self.decode_failed = self._counter(
            "decode_failed", "Tries at an engine that ended before an answer began."
        )
        self.cut = self._counter("cut", "Answers that broke off in the middle.")
        self.stale = self._counter(
            "stale_connections", "Kept connections that an engine had closed; asked on a new one."
        )
        self.faults = self._counter(
            "engine_faults", "What an engine did wrong.", "role", "engine", "fault"
        )
        self.lookups = self._counter(
            "lookups",
            "Prompts by what came of asking an engine's daemon for them.",
            *("role", "engine", "how"),
        )
        self.lookup_tokens = self._counter(
            "lookup_tokens", "Of the prompts answered.", "role", "engine", "found"
        )
        for how in RequestEnd:
            self.ended.labels(how.value)
        gauges: dict[str, tuple[str, Callable[[ProxiedEngine], float]]] = {
            "engine_up": (
                "It answered last.",
                lambda engine: float(engine.state(now_s()) is EngineState.UP),
            ),
            "engine_usable": (
                "It is sent requests.",
                lambda engine: float(engine.state(now_s()) is not EngineState.DOWN),
            ),
            "open_requests": ("Sent to it, not ended.", lambda engine: engine.open_requests),
            "waiting_tokens": (
                "Of prompts that it was sent and has not begun to answer.",
                lambda engine: engine.waiting_tokens,
            ),
        }
        for name, (about, read) in gauges.items():
            gauge = Gauge(f"kvd_proxy_{name}", about, ("role", "engine"), registry=self.registry)
            for engine in engines:
                labels = (engine.address.role.value, engine.address.url)
                gauge.labels(*labels).set_function(functools.partial(read, engine))

    def page(self) -> bytes:
        """All of it, for ``/metrics``."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvd_proxy_{name}", about, labels, registry=self.registry)


def namespaces_in(page: bytes) -> set[str]:
    """The namespaces that an engine's page of metrics names as its present ones."""
    found = (line[0] for line in islice(_NAMESPACES.finditer(page), _MOST_NAMED))
    lines = b"\n".join(found).decode(errors="replace")
    try:
        return {
            sample.labels["namespace"]
            for family in text_string_to_metric_families(lines + "\n")
            for sample in family.samples
            if sample.value == 1
        }
    except (ValueError, KeyError):
        return set()
