"""``kvd bench``: measurements, each beside a reference taken in the same run."""

from __future__ import annotations

import click

from kvd.cli.lazy import LazyGroup, Verb

BENCHES = {
    "radix": Verb("kvd.bench.radix:command", "The prefix tree on a trace.", "Benchmarks"),
    "stream": Verb("kvd.bench.stream:command", "Goodput of one handoff.", "Benchmarks"),
    "shards": Verb(
        "kvd.bench.shards:command", "Pages between differently sharded pools.", "Benchmarks"
    ),
    "integrity": Verb("kvd.bench.integrity:command", "What verifying costs.", "Benchmarks"),
    "control": Verb("kvd.bench.control:command", "Round trips of the verbs.", "Benchmarks"),
    "multiturn": Verb(
        "kvd.bench.multiturn:command",
        "Conversations with the decode tree on and off.",
        "Benchmarks",
    ),
    "cp": Verb("kvd.bench.context:command", "Who gathers and who sends, of ranks.", "Benchmarks"),
    "families": Verb(
        "kvd.bench.families:command", "What a request of each pool family takes.", "Benchmarks"
    ),
    "gather": Verb("kvd.bench.gather:command", "Gathers beside the bare collective.", "Benchmarks"),
    "recorder": Verb("kvd.bench.recorder:command", "What the flight recorder takes.", "Benchmarks"),
    "console": Verb("kvd.bench.console:command", "What consoles cost.", "Benchmarks"),
    "restart": Verb("kvd.bench.restart:command", "What a restart costs.", "Benchmarks"),
    "footprint": Verb("kvd.bench.footprint:command", "What a daemon costs at rest.", "Benchmarks"),
}


@click.group(cls=LazyGroup, verbs=BENCHES)
def bench_group() -> None:
    """Measure kvd, beside a reference measured in the same run."""
