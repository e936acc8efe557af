"""``python -m benchmarks``: one command for each benchmark."""

from __future__ import annotations

import click

from kvd.cli.lazy import LazyGroup, Verb

BENCHMARKS = {
    "radix": Verb("benchmarks.radix:command", "The prefix tree on a trace.", "Benchmarks"),
    "shards": Verb(
        "benchmarks.shards:command", "Pages between differently sharded pools.", "Benchmarks"
    ),
    "integrity": Verb("benchmarks.integrity:command", "What verifying costs.", "Benchmarks"),
    "multiturn": Verb(
        "benchmarks.multiturn:command",
        "Conversations with the decode tree on and off.",
        "Benchmarks",
    ),
    "cp": Verb("benchmarks.context:command", "Who gathers and who sends, of ranks.", "Benchmarks"),
    "families": Verb(
        "benchmarks.families:command", "What a request of each pool family takes.", "Benchmarks"
    ),
    "gather": Verb(
        "benchmarks.gather:command", "Gathers beside the bare collective.", "Benchmarks"
    ),
    "recorder": Verb(
        "benchmarks.recorder:command", "What the flight recorder takes.", "Benchmarks"
    ),
    "console": Verb("benchmarks.console:command", "What consoles cost.", "Benchmarks"),
}


@click.group(cls=LazyGroup, verbs=BENCHMARKS)
def main() -> None:
    """What proves the claims of the documentation, beside references of the same run."""


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
