"""Metric families of prometheus_client from what ``metrics`` and ``gauges`` hold.

prometheus_client is imported by whoever makes one: a daemon without HTTP never loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from kvd.observe.metrics import Counter, Histogram, Histograms, Labels

    Series = Iterable[tuple[Labels, float]]


def counter(
    name: str, doc: str, counter: Counter, labels: Labels, always: tuple[Labels, ...] = ()
) -> Metric:
    """A counter family; the series in ``always`` are shown even at 0."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily(name, doc, labels=labels)
    for values, total in (dict.fromkeys(always, 0) | counter.values).items():
        family.add_metric(values, total)
    return family


def total(name: str, doc: str, total: float) -> Metric:
    """A counter without labels."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    return CounterMetricFamily(name, doc, value=total)


def totals(name: str, doc: str, labels: Labels, values: Series) -> Metric:
    """A counter family whose totals are read off the state."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily(name, doc, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def gauge(name: str, doc: str, labels: Labels, values: Series) -> Metric:
    """A gauge family."""
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    family = GaugeMetricFamily(name, doc, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(name: str, doc: str, histogram: Histogram) -> Metric:
    """A histogram without labels."""
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

    return HistogramMetricFamily(
        name, doc, buckets=_cumulated(histogram), sum_value=histogram.total
    )


def histograms(name: str, doc: str, histograms: Histograms, labels: Labels) -> Metric:
    """A histogram family."""
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

    family = HistogramMetricFamily(name, doc, labels=labels)
    for values, histogram in histograms.values.items():
        family.add_metric(values, _cumulated(histogram), histogram.total)
    return family


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus buckets: how many values lie at or below each bound."""
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    return buckets
