"""``kvd bench``: measurements, each beside a reference taken in the same run."""

from __future__ import annotations

import click

from kvd.cli.lazy import LazyGroup, Verb

BENCHES = {
    "stream": Verb("kvd.bench.stream:command", "Goodput of one handoff.", "Benchmarks"),
    "control": Verb("kvd.bench.control:command", "Round trips of the verbs.", "Benchmarks"),
    "restart": Verb("kvd.bench.restart:command", "What a restart costs.", "Benchmarks"),
    "footprint": Verb("kvd.bench.footprint:command", "What a daemon costs at rest.", "Benchmarks"),
}
"""What operators run on hosts of their own; what proves our claims is in ``benchmarks``."""


@click.group(cls=LazyGroup, verbs=BENCHES)
def bench_group() -> None:
    """Measure kvd, beside a reference measured in the same run."""
