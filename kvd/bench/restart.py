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
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

import kvd.client
from kvd.bench.report import (
    Goal,
    at_least,
    at_most,
    bar,
    show_goals,
    show_notes,
    show_table,
    write_json,
)
from kvd.harness.daemons import DaemonProcess
from kvd.journal.checked_words import are_pending
from kvd.journal.identity import HEAD_BYTES
from kvd.pools.kept_memory import JOURNAL
from kvd.trace import BLOCK_TOKENS, Blocks, TraceRequest, read_trace
from kvd.types import ID_BYTES
from kvd.wire.admin import EventPage, ListEvents
from kvd.wire.events import Adopted

if TYPE_CHECKING:
    from kvd.bench.report import Told
    from kvd.types import Tokens

PAGE_TOKENS = 16
SHAPE = {"pool.layers": "16", "pool.heads": "1", "pool.head_dim": "64", "pool.dtype": "bfloat16"}
PAGE_BYTES = 64 * 1024
"""Of ``SHAPE``: 16 layers of K and V for 16 tokens, 64 numbers of 2 bytes each."""
SUMMED_WITHIN_S = 60.0
CONVERSATIONS = 300
TURNS = 8


class RestartHits(msgspec.Struct, frozen=True):
    """The second half of the requests: what was asked for, and what was cached of it."""

    how: str
    asked_tokens: int
    hit_tokens: int
    adopted_pages: int

    @property
    def rate(self) -> float:
        """Share of the tokens that was cached."""
        return self.hit_tokens / self.asked_tokens


class RestartTimes(msgspec.Struct, frozen=True):
    """One start, medians: of a pool that was found full (``how``: stop or kill), or made (cold)."""

    how: str
    pool_gib: float
    ready_s: float
    first_hit_s: float
    """Until the first lease was granted; of a cold start without a hit."""
    adopted_pages: int

    @property
    def pages_per_s(self) -> float:
        """Pages taken over per second of the whole start."""
        return self.adopted_pages / self.ready_s


class RestartResult(msgspec.Struct, frozen=True):
    """What ``kvd bench restart`` reports."""

    requests: int
    hits: tuple[RestartHits, ...]
    starts: tuple[RestartTimes, ...]
    goals: tuple[Goal, ...]


def settings(pages: int, memory: Path) -> dict[str, str]:
    """A daemon whose pool lies in ``memory``."""
    return {
        **SHAPE,
        "pool.pages": str(pages + 1),
        "pool.backing": "shm",
        "pool.directory": str(memory),
        "pool.verify": "sampled",
    }


def adopted_pages(daemon: DaemonProcess) -> int:
    """Pages that this daemon took over from the one before; 0 where it found nothing."""
    page = daemon.ask(ListEvents(1, 0), EventPage)
    return sum(event.pages for event in page.events if isinstance(event, Adopted))


async def serve(daemon: DaemonProcess, prompts: list[Tokens]) -> int:
    """Lease, commit and release each prompt; the tokens that were cached already."""
    hit_tokens = 0
    async with kvd.client.connect(daemon.client, name="bench") as node:
        for prompt in prompts:
            lease = await node.lease(np.frombuffer(prompt, dtype="<i4"))
            hit_tokens += lease.prefix_len
            await lease.release(())
    return hit_tokens


async def first_hit(daemon: DaemonProcess, prompt: Tokens) -> int:
    """The cached prefix of one prompt, as the first lease of an engine finds it."""
    async with kvd.client.connect(daemon.client, name="bench") as node:
        lease = await node.lease(np.frombuffer(prompt, dtype="<i4"))
        await lease.release()
        return lease.prefix_len


def end(daemon: DaemonProcess, how: str, memory: Path, pages: int) -> None:
    """Stop or kill it. A killed one is given the time to have summed what is cached."""
    if how == "kill":
        daemon.wait_for(
            lambda: not unsummed_pages(memory, pages), "has not summed its pages", SUMMED_WITHIN_S
        )
        daemon.kill()
    else:
        daemon.stop()


def unsummed_pages(memory: Path, pages: int) -> int:
    """Cached pages that the journal does not prove yet: a killed daemon loses them."""
    words = np.fromfile(memory / JOURNAL, np.uint64, pages + 1, offset=HEAD_BYTES)
    return int(np.count_nonzero(are_pending(words)))


def measure_hits(how: str, prompts: list[Tokens], pages: int) -> RestartHits:
    """All requests, with this in the middle: nothing, a stop and a start, or a kill and one."""
    half = len(prompts) // 2
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
    ):
        daemon = DaemonProcess("solo", Path(name), settings(pages, Path(memory)))
        try:
            daemon.start()
            daemon.wait_ready()
            asyncio.run(serve(daemon, prompts[:half]))
            if how != "none":
                end(daemon, how, Path(memory), pages)
                daemon.start()
                daemon.wait_ready()
            adopted = adopted_pages(daemon)
            hit_tokens = asyncio.run(serve(daemon, prompts[half:]))
        finally:
            daemon.stop()
    asked = sum(len(prompt) for prompt in prompts[half:]) // ID_BYTES
    return RestartHits(how=how, asked_tokens=asked, hit_tokens=hit_tokens, adopted_pages=adopted)


def measure_starts(how: str, pages: int, times: int) -> RestartTimes:
    """Fill the pool once; then end and start so often."""
    rng = np.random.default_rng(1)
    prompts = [
        rng.integers(0, 50_000, pages // 64 * PAGE_TOKENS, dtype=np.int32) for _ in range(60)
    ]
    raw = [prompt.astype("<i4").tobytes() for prompt in prompts]
    ready, hit, adopted = [], [], 0
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
    ):
        daemon = DaemonProcess("solo", Path(name), settings(pages, Path(memory)))
        try:
            if how != "cold":
                daemon.start()
                daemon.wait_ready()
                asyncio.run(serve(daemon, raw))  # type: ignore[arg-type]
            for _ in range(times):
                if how == "cold":
                    for file in Path(memory).rglob("*"):
                        if file.is_file():
                            file.unlink()
                else:
                    end(daemon, how, Path(memory), pages)
                begun_s = time.monotonic()
                daemon.start()
                daemon.wait_ready()
                ready.append(time.monotonic() - begun_s)
                found = asyncio.run(first_hit(daemon, raw[7]))  # type: ignore[arg-type]
                hit.append(time.monotonic() - begun_s)
                if how == "cold":
                    daemon.stop()
                else:
                    adopted = adopted_pages(daemon)
                    if not found:
                        raise daemon.failed("has lost what was cached")
        finally:
            daemon.stop()
    return RestartTimes(
        how=how,
        pool_gib=pages * PAGE_BYTES / 2**30,
        ready_s=round(statistics.median(ready), 3),
        first_hit_s=round(statistics.median(hit), 3),
        adopted_pages=adopted,
    )


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


def run(trace: Path | None, limit: int, pool_gib: float, times: int, told: Told) -> RestartResult:
    """Everything, one daemon at a time."""
    requests = conversations() if trace is None else read_trace(trace, limit)
    requests = requests[:limit]
    blocks = Blocks(requests)
    prompts = [blocks.expand(request) for request in requests]
    hits = []
    for how in ("none", "stop", "kill"):
        told(f"hits, {how}")
        hits.append(measure_hits(how, prompts, 2**30 // PAGE_BYTES))
    starts = []
    for how in ("cold", "stop", "kill"):
        told(f"starts, {how}")
        starts.append(measure_starts(how, int(pool_gib * 2**30) // PAGE_BYTES, times))
    without, stopped, killed = hits
    goals = (
        at_least("hit rate after a stop over that without", 1.0, stopped.rate / without.rate),
        at_least("hit rate after a kill over that without", 0.999, killed.rate / without.rate),
        at_most(f"s from start to ready, {pool_gib:g} GiB, after a stop", 1.0, starts[1].ready_s),
        at_most(f"s from start to ready, {pool_gib:g} GiB, after a kill", 1.0, starts[2].ready_s),
    )
    return RestartResult(requests=len(prompts), hits=tuple(hits), starts=tuple(starts), goals=goals)


@click.command("restart")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file in Mooncake's format; left out: conversations made here.",
)
@click.option("--limit", default=2400, show_default=True, help="Requests to replay.")
@click.option("--gib", default=4.0, show_default=True, help="Pool whose starts are timed.")
@click.option("--times", default=5, show_default=True, help="Starts to take the median of.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)
def command(trace: Path | None, limit: int, gib: float, times: int, file: Path | None) -> None:
    """What a restart costs a node whose pool outlives the daemon."""
    with bar("restart", 6) as told:
        result = run(trace, limit, gib, times, told)
    show_table(
        f"Hits of the second half of {result.requests} requests, pool of 1 GiB",
        ("in the middle", "asked tokens", "hit tokens", "hit rate", "pages taken over"),
        [
            [
                one.how,
                str(one.asked_tokens),
                str(one.hit_tokens),
                f"{one.rate:.4f}",
                str(one.adopted_pages),
            ]
            for one in result.hits
        ],
    )
    show_table(
        f"Starts with a pool of {gib:g} GiB, medians of {times}",
        ("after a", "ready s", "first lease s", "pages taken over", "pages/s"),
        [
            [
                one.how,
                f"{one.ready_s:.2f}",
                f"{one.first_hit_s:.2f}",
                str(one.adopted_pages),
                f"{one.pages_per_s:.0f}",
            ]
            for one in result.starts
        ],
    )
    show_notes(["a killed daemon was let sum the last pages before; those that are not are lost"])
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)
