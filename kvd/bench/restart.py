"""``kvd bench restart``: what a restart costs a node whose pool outlives the daemon.

Two questions. *Is the cache the same afterwards?* The same requests go to a daemon that serves all
of them, to one that is stopped and started halfway, and to one that is killed there: the tokens
found cached in the second half are compared. *How long is it away?* A pool of a few GiB is filled,
the daemon is stopped or killed, and what passes from the start of the next one until it is ready,
and until the first lease with a cached prefix, is taken; beside it a cold start of the same pool.

Prompts are committed as an engine would; pages are summed by the daemon as always. What counts as
one page is 64 KiB here.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

import kvd.client
from kvd.bench.report import (
    BenchmarkResult,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    figure,
    measurement,
)
from kvd.harness.daemons import DaemonProcess, bytecode_kept
from kvd.journal.checked_words import are_pending
from kvd.journal.identity import HEAD_BYTES
from kvd.pools.kept_memory import JOURNAL
from kvd.trace import BLOCK_TOKENS, Blocks, TraceRequest, read_trace
from kvd.types import ID_BYTES, Tokens
from kvd.wire.admin import EventPage, ListEvents
from kvd.wire.events import Adopted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Measured, Told

PAGE_TOKENS = 16
SHAPE = {"pool.layers": "16", "pool.heads": "1", "pool.head_dim": "64", "pool.dtype": "bfloat16"}
PAGE_BYTES = 64 * 1024
"""Of ``SHAPE``: 16 layers of K and V for 16 tokens, 64 numbers of 2 bytes each."""
SUMMED_WITHIN_S = 60.0
CONVERSATIONS = 300
TURNS = 8


class KeptPool:
    """A daemon whose pool lies in memory that outlives it; not started yet."""

    def __init__(self, directory: Path, memory: Path, pages: int) -> None:
        self._memory = memory
        self._pages = pages
        settings = {
            **SHAPE,
            "pool.pages": str(pages + 1),
            "pool.backing": "shm",
            "pool.directory": str(memory),
            "pool.verify": "sampled",
        }
        self.daemon = DaemonProcess("solo", directory, settings)

    def start(self) -> None:
        """Return when it serves."""
        self.daemon.start()
        self.daemon.wait_ready()

    def end(self, how: str) -> None:
        """Stop or kill it, with the time to have summed what is cached.

        A stop takes that time itself, but on a busy machine no longer than it is waited for.
        """
        if how != "cold":
            summed = self._is_summed
            self.daemon.wait_for(summed, "has not summed its pages", SUMMED_WITHIN_S)
        if how == "kill":
            self.daemon.kill()
        else:
            self.daemon.stop()

    def forget(self) -> None:
        """What was kept is gone: the next start makes the pool anew."""
        for file in self._memory.rglob("*"):
            if file.is_file():
                file.unlink()

    def adopted_pages(self) -> int:
        """Pages that this daemon took over from the one before; 0 where it found nothing."""
        page = self.daemon.ask(ListEvents(1, 0), EventPage)
        return sum(event.pages for event in page.events if isinstance(event, Adopted))

    async def serve(self, prompts: list[Tokens], *, commits: bool = True) -> int:
        """Lease and release each prompt; the tokens that were cached already."""
        hit_tokens = 0
        async with kvd.client.connect(self.daemon.client, name="bench") as node:
            for prompt in prompts:
                lease = await node.lease(np.frombuffer(prompt, dtype="<i4"))
                hit_tokens += lease.prefix_len
                await lease.release(() if commits else None)
        return hit_tokens

    def _is_summed(self) -> bool:
        """Whether the journal proves all cached pages: a killed daemon loses the others."""
        words = np.fromfile(self._memory / JOURNAL, np.uint64, self._pages + 1, offset=HEAD_BYTES)
        return not are_pending(words).any()


@contextlib.contextmanager
def kept_pool(pages: int) -> Iterator[KeptPool]:
    """One of so many pages, for as long as the block lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
    ):
        pool = KeptPool(Path(name), Path(memory), pages)
        try:
            yield pool
        finally:
            pool.daemon.stop()


def measure_hits(how: str, prompts: list[Tokens], pages: int) -> Measured:
    """All requests, with this in the middle: nothing, a stop and a start, or a kill and one.

    Of the second half: what was asked for, and what was cached of it.
    """
    half = len(prompts) // 2
    with kept_pool(pages) as pool:
        pool.start()
        asyncio.run(pool.serve(prompts[:half]))
        if how != "none":
            pool.end(how)
            pool.start()
        adopted = pool.adopted_pages()
        hit_tokens = asyncio.run(pool.serve(prompts[half:]))
    asked_tokens = sum(len(prompt) for prompt in prompts[half:]) // ID_BYTES
    return {
        "how": how,
        "asked_tokens": asked_tokens,
        "hit_tokens": hit_tokens,
        "adopted_pages": adopted,
    }


def measure_starts(how: str, pages: int, times: int) -> Measured:
    """Starts of a pool that was found full (``how``: stop or kill) or made (cold): medians.

    The first lease of a cold start finds nothing cached.
    """
    rng = np.random.default_rng(1)
    n_tokens = pages // 64 * PAGE_TOKENS
    prompts = [Tokens(rng.integers(0, 50_000, n_tokens, dtype="<i4").tobytes()) for _ in range(60)]
    ready_s, first_hit_s, adopted = [], [], 0
    with kept_pool(pages) as pool:
        if how != "cold":
            pool.start()
            asyncio.run(pool.serve(prompts))
        for _ in range(times):
            pool.end(how)
            if how == "cold":
                pool.forget()
            begun_s = time.monotonic()
            pool.start()
            ready_s.append(time.monotonic() - begun_s)
            found = asyncio.run(pool.serve(prompts[7:8], commits=False))
            first_hit_s.append(time.monotonic() - begun_s)
            if how != "cold":
                adopted = pool.adopted_pages()
                if not found:
                    raise pool.daemon.failed("has lost what was cached")
    return {
        "how": how,
        "pool_gib": pages * PAGE_BYTES / 2**30,
        "ready_s": round(statistics.median(ready_s), 3),
        "first_hit_s": round(statistics.median(first_hit_s), 3),
        "adopted_pages": adopted,
    }


def conversations() -> list[TraceRequest]:
    """Conversations that take turns: each turn repeats the ones before and adds some blocks."""
    rng = np.random.default_rng(7)
    shared = 8
    grown = [list(range(shared)) for _ in range(CONVERSATIONS)]
    last = shared
    requests = []
    for number in rng.integers(0, CONVERSATIONS, CONVERSATIONS * TURNS):
        more = int(rng.integers(1, 4))
        grown[number] = [*grown[number], *range(last, last + more)]
        last += more
        blocks = grown[number]
        requests.append(
            TraceRequest(
                timestamp=0,
                input_length=len(blocks) * BLOCK_TOKENS,
                output_length=0,
                hash_ids=blocks,
            )
        )
    return requests


def run(
    told: Told, *, trace: Path | None, limit: int, gib: float, times: int
) -> tuple[BenchmarkResult, object]:
    """What a restart costs a node whose pool outlives the daemon."""
    requests = (conversations() if trace is None else read_trace(trace, limit))[:limit]
    blocks = Blocks(requests)
    prompts = [blocks.expand(request) for request in requests]
    hits, starts = [], []
    for how in ("none", "stop", "kill"):
        told(f"hits, {how}")
        hits.append(measure_hits(how, prompts, 2**30 // PAGE_BYTES))
    with bytecode_kept():
        for how in ("cold", "stop", "kill"):
            told(f"starts, {how}")
            starts.append(measure_starts(how, int(gib * 2**30) // PAGE_BYTES, times))
    without, stopped, killed = (_rate(row) for row in hits)
    title = f"s from start to ready, {gib:g} GiB, after a"
    goals = (
        at_least("hit rate after a stop over that without", 1.0, stopped / without),
        at_least("hit rate after a kill over that without", 0.999, killed / without),
        at_most(f"{title} stop", 0.7, figure(starts[1], "ready_s")),
        at_most(f"{title} kill", 0.7, figure(starts[2], "ready_s")),
    )
    shown = BenchmarkResult(
        tables=(
            ResultTable(
                f"Hits of the second half of {len(prompts)} requests, pool of 1 GiB",
                HIT_COLUMNS,
                tuple({**row, "rate": _rate(row)} for row in hits),
            ),
            ResultTable(
                f"Starts with a pool of {gib:g} GiB, medians of {times}",
                START_COLUMNS,
                tuple(
                    {**row, "per_s": figure(row, "adopted_pages") / figure(row, "ready_s")}
                    for row in starts
                ),
            ),
        ),
        notes=("every daemon was let sum the last pages before; those that are not are lost",),
        goals=goals,
    )
    return shown, {"requests": len(prompts), "hits": hits, "starts": starts, "goals": goals}


def _rate(hits: Measured) -> float:
    """Share of the tokens that was cached."""
    return figure(hits, "hit_tokens") / figure(hits, "asked_tokens")


HIT_COLUMNS = (
    ResultColumn("how", "in the middle"),
    ResultColumn("asked_tokens", "asked tokens"),
    ResultColumn("hit_tokens", "hit tokens"),
    ResultColumn("rate", "hit rate", ".4f"),
    ResultColumn("adopted_pages", "pages taken over"),
)
START_COLUMNS = (
    ResultColumn("how", "after a"),
    ResultColumn("ready_s", "ready s", ".2f"),
    ResultColumn("first_hit_s", "first lease s", ".2f"),
    ResultColumn("adopted_pages", "pages taken over"),
    ResultColumn("per_s", "pages/s", ".0f"),
)

command = measurement(
    "restart",
    run,
    (
        click.option(
            "--trace",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A file in Mooncake's format; left out: conversations made here.",
        ),
        click.option("--limit", default=2400, show_default=True, help="Requests to replay."),
        click.option("--gib", default=4.0, show_default=True, help="Pool whose starts are timed."),
        click.option("--times", default=5, show_default=True, help="Starts to take the median of."),
    ),
    steps=lambda **_: 6,
)
