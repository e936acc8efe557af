"""``kvd bench stream``: options in, a table and a JSON file out; ``goodput`` does the measuring."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import click

from kvd.bench.goodput import (
    CaseResult,
    Plan,
    SiteResult,
    Skipped,
    StreamResult,
    goals_of,
    measure_site,
    steps_of,
)
from kvd.bench.report import bar, show_goals, show_notes, show_table, write_json
from kvd.bench.sites import HUGE, SMALL, namespaces, shared_host
from kvd.harness.daemons import DaemonFailed
from kvd.harness.netns import NoNamespaces

json_option = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)

STREAM_HEADERS = (
    "network",
    "memory",
    "pages",
    "ways",
    "kvd GB/s",
    "raw NIXL",
    "same pages",
    "plain",
    "plain cut",
    "kvd/raw",
    "kvd/same",
    "kvd/plain",
    "slower way",
    "runs",
    "lag p99 ms",
    "max",
    "beats",
)


@click.command("stream")
@click.option("--pages", default=128, show_default=True, help="Pages of 2 MiB per handoff.")
@click.option("--repeats", default=15, show_default=True, help="Handoffs per case.")
@click.option("--lag-s", default=3.0, show_default=True, help="Seconds of load for the loop lag.")
@click.option("--seed", default=1, show_default=True, help="Of the random order of pages.")
@json_option
def command(pages: int, repeats: int, lag_s: float, seed: int, file: Path | None) -> None:
    """Goodput of one handoff, beside raw NIXL and plain copies of the same bytes.

    Two daemons with pools of a Llama-8B shape (2 MiB pages of 16 tokens), on this host and, where
    root may make them, in two network namespaces; on huge and on 4 KiB pages.
    """
    plan = Plan(pages=pages, repeats=repeats, lag_s=lag_s, seed=seed)
    sites: list[SiteResult] = []
    skipped: list[Skipped] = []
    with bar("stream", steps_of(4)) as told:
        for memory in (HUGE, SMALL):
            with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
                sites.append(measure_site(shared_host(memory), plan, Path(directory), told))
        for memory in (HUGE, SMALL):
            try:
                with (
                    contextlib.ExitStack() as stack,
                    tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
                ):
                    site = stack.enter_context(namespaces(memory))
                    sites.append(measure_site(site, plan, Path(directory), told))
            except (NoNamespaces, DaemonFailed) as why:
                skipped.append(Skipped(f"TCP, two namespaces, {memory}", str(why)))
    result = StreamResult(plan, tuple(sites), tuple(skipped), goals_of(tuple(sites)))
    _show(result)
    if file is not None:
        write_json(file, result)


def _show(result: StreamResult) -> None:
    plan = result.plan
    show_table(
        f"A handoff of {plan.size_bytes / 2**20:.0f} MiB in {plan.pages} pages; "
        f"medians of {plan.repeats}, GB/s",
        STREAM_HEADERS,
        [_row(case) for site in result.sites for case in site.cases],
    )
    show_notes(
        [
            "kvd: bytes over the time from the call of finish() to its answer, when the other "
            "daemon has committed; nothing was posted before",
            "ratios: medians of the ratios within each repetition",
            "raw NIXL: two bare processes, runs of neighbours, fastest of several settings; "
            "same pages: the pages of the handoff. First post to last completion",
            "plain: one memcpy per run, or one TCP connection between the namespaces; plain cut: "
            "memcpy in 512 KiB pieces, for which the C library uses no streaming stores, as the "
            "kernel does for NIXL",
            "lag: of both daemons, from kvd_loop_lag_seconds at /metrics, while handoffs follow "
            "one another; upper bound of the bucket",
            *(
                f"{site.network}, {site.memory}: of {site.pool_bytes / 2**20:.0f} MiB per pool, in "
                f"huge pages {_mib(site.huge_bytes)} (raw {_mib(site.raw_huge_bytes)}); raw with "
                f"{site.tuning}; idle lag p99 {site.idle_lag_p99_s * 1e3:.3g} ms, max "
                f"{site.idle_lag_max_s * 1e3:.3g} ms"
                for site in result.sites
            ),
            *(f"{one.network}: skipped, {one.why}" for one in result.skipped),
        ]
    )
    show_goals(result.goals)


def _row(result: CaseResult) -> list[str]:
    case, rates = result.case, result.rates
    return [
        case.network,
        case.memory,
        case.order,
        str(case.ways),
        f"{rates.kvd:.2f}",
        f"{rates.raw:.2f}",
        f"{rates.raw_same:.2f}",
        f"{rates.plain:.2f}",
        "-" if rates.plain_cut is None else f"{rates.plain_cut:.2f}",
        f"{result.to_raw:.2f}",
        f"{result.to_raw_same:.2f}",
        f"{result.to_plain:.2f}",
        f"{rates.slower:.2f}",
        f"{result.source_runs}/{result.destination_runs}",
        f"{result.lag_p99_s * 1e3:.3g}",
        f"{result.lag_max_s * 1e3:.3g}",
        str(result.lag_beats),
    ]


def _mib(sizes: tuple[int, ...]) -> str:
    return " and ".join(f"{size / 2**20:.0f}" for size in sizes)
