"""``kvd sim --trace``: the bar, the table and the notes of a replayed load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvd.cli.exits import Failed
from kvd.cli.render import show
from kvd.sim.cluster import Replay, Routed, replay
from kvd.sim.decode_node import HEADS, LAYERS, NodeShape
from kvd.sim.routing import ROUTINGS
from kvd.trace import BadTrace, read_trace

if TYPE_CHECKING:
    from pathlib import Path

GB = 1e9

HEADINGS = (
    "routing",
    "requests",
    "refused",
    "reuse",
    "GB saved",
    "requests max/mean",
    "variation",
    "sent tokens max/mean",
    "variation",
    "wait p50 s",
    "p99",
    "mean",
)


def replay_trace(trace: Path, shape: NodeShape, limit: int | None) -> Replay:
    """Replay the file and print what came of it.

    Raises:
        Failed: it is no trace.
    """
    try:
        requests = read_trace(trace, limit)
    except BadTrace as error:
        raise Failed(str(error)) from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests) * len(ROUTINGS))
        result = replay(
            trace.name,
            requests,
            shape,
            lambda routing: progress.update(task, advance=1, description=routing),
        )
    _show(result)
    return result


def _show(result: Replay) -> None:
    shape = result.shape
    table = Table(
        title=(
            f"{result.trace}: {result.requests} requests, {result.prompt_tokens} prompt tokens, "
            f"{shape.speed:g} times as fast as recorded; {shape.nodes} nodes of "
            f"{shape.pool_tokens} tokens in pages of {shape.page_tokens}"
        ),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "routing" else "right")
    for routed in result.routings:
        table.add_row(*_row(routed))
    show(table)
    for note in (
        "each node: the real tree, lease table and admission of a node; plain leases instead of "
        "handoffs",
        f"what a node lacks of a prompt comes in at {shape.prefill_tokens_per_s:g} tokens a "
        "second, one request after the other; wait: from arrival to that turn",
        f"each request then decodes at {shape.decode_tokens_per_s:g} tokens a second; its output "
        "is held, and not cached, because the trace does not say what it was",
        f"bytes saved: KV of {LAYERS} layers and {HEADS} heads in bfloat16",
    ):
        click.echo(f"- {note}")


def _row(routed: Routed) -> tuple[str, ...]:
    balances = (routed.balance_requests, routed.balance_sent_tokens)
    return (
        routed.routing,
        f"{routed.requests}",
        f"{routed.refused}",
        f"{routed.reuse:.2%}",
        f"{routed.saved_bytes / GB:.1f}",
        *(f"{x:.2f}" for one in balances for x in (one.max_over_mean, one.variation)),
        f"{routed.wait_p50_s:.3f}",
        f"{routed.wait_p99_s:.3f}",
        f"{routed.wait_mean_s:.3f}",
    )
