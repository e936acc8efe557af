"""``benchmarks decode_radix``: many requests at once that share a long start, over a narrow link.

Two daemons in network namespaces of their own, NIXL over TCP through a cable of a given bandwidth
between them, and the engines of ``multiturn``. So many requests are always under way, each with the
same 50,000 tokens at its start and 4,500 of its own. A request is prefilled on one side, where the
start is cached, handed over, and says its output on the other, where the start is cached too, or
nothing is (``receive(..., cache=False)``). Both take turns, round after round, with equal prompts.

A step of the decode engine takes a fixed time and none of this host's cores, whatever is in the
batch: what it takes longer is what it had to wait for. A GPU's step grows with the batch, and the
side that answers sooner has the larger one: the price of any quick link, which is not in here.

The first request of a round goes alone and brings the start; latencies are of all others. Its bytes
count. What has to be sent is arithmetic over the token lists (``SeenPages``). It is compared with
what the daemons counted, with what the engines were told, and with what went through the cable.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import numpy as np
import uvloop

from benchmarks.harness import benchmark
from benchmarks.multiturn import Router, SeenPages, ServedTurn, open_engine, random_tokens
from benchmarks.multiturn_engine import DECODE, PREFILL, EngineShape
from kvd.bench.report import (
    BenchmarkResult,
    Goal,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    figure,
)
from kvd.bench.stream import NAMESPACES, PEERS_PORT, SMALL, site_of
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import two_daemons
from kvd.harness.netns import Namespace, NoNamespaces, slow_bytes, slow_down
from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 64
TOKEN_BYTES: Final = 64
PAGE_BYTES: Final = PAGE_TOKENS * TOKEN_BYTES
SETTINGS: Final = {
    "pool.layers": "2",
    "pool.heads": "1",
    "pool.head_dim": "16",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_TOKENS),
}
CHUNK_TOKENS: Final = 2048
SPARE_PAGES: Final = 4096
NOISE: Final = 1.05
"""Two rounds of the same kind differ by so much on a machine that does nothing else."""
FRAMES: Final = 1.08
"""Beside the pages the cable carries headers, 66 bytes for 1,448, and what UCX says."""

_COUNTED: Final = re.compile(r'^kvd_handoff_bytes_total\{dir="sent"\} (\S+)$', re.MULTILINE)


class LinkShape(msgspec.Struct, frozen=True):
    """How much is asked, and over what: ``requests`` a round, ``at_once`` of them at a time."""

    shared_tokens: int
    own_tokens: int
    output_tokens: int
    at_once: int
    requests: int
    rounds: int
    step_s: float
    link_bytes_per_s: float

    @property
    def prompt_tokens(self) -> int:
        """Of each request."""
        return self.shared_tokens + self.own_tokens

    @property
    def outputs(self) -> tuple[int, int]:
        """The shortest output, and what none reaches; no two requests have to end together."""
        return self.output_tokens // 2 + 1, self.output_tokens * 3 // 2

    @property
    def pages(self) -> int:
        """Enough for all that are under way, where they share nothing."""
        each = (self.prompt_tokens + self.outputs[1]) // PAGE_TOKENS + 2
        return (self.at_once + 1) * each + SPARE_PAGES


class CountedBytes(NamedTuple):
    """What was sent so far: as the daemon counts it, and through the cable."""

    counted: int
    cable: int


class RoundOfRequests(NamedTuple):
    """One round: ``first`` went alone; ``turns`` took ``seconds`` together."""

    is_cached: bool
    first: ServedTurn
    turns: list[ServedTurn]
    seconds: float
    sent: CountedBytes

    @property
    def told_bytes(self) -> int:
        """What the engines were told was sent."""
        return self.first.sent_bytes + sum(turn.sent_bytes for turn in self.turns)

    @property
    def bound_bytes(self) -> int:
        """What had to be sent: the pages that the decode node had not seen."""
        seen = SeenPages(PAGE_TOKENS)
        pages = 0
        for turn in (self.first, *self.turns):
            prompt = Tokens(turn.prompt)
            pages += seen.unseen_pages(prompt)
            if self.is_cached:
                seen.add(Tokens((turn.prompt + turn.output)[:-ID_BYTES]))
        return pages * PAGE_BYTES


class NarrowLink:
    """Two daemons and their engines at the ends of the cable."""

    def __init__(self, shape: LinkShape, pair: Pair, sender: Namespace, router: Router) -> None:
        self._shape = shape
        self._pair = pair
        self._sender = sender
        self._router = router

    def sent(self) -> CountedBytes:
        """What the prefill daemon has counted since its start, and what went over the cable."""
        prefill = self._pair.prefill
        link = self._sender.connect("127.0.0.1", prefill.http_port)
        (counted,) = _COUNTED.findall(prefill.metrics(link))
        return CountedBytes(int(float(counted)), slow_bytes(self._sender))

    async def play(self, number: int, *, is_cached: bool) -> RoundOfRequests:
        """One round, in a namespace of its own: no prompt of it was there before."""
        shape, rng = self._shape, np.random.default_rng(number)
        shared = random_tokens(rng, shape.shared_tokens)
        namespace = f"{'on' if is_cached else 'off'}-{number}"
        left = iter(range(shape.requests))
        turns: list[ServedTurn] = []

        async def ask() -> ServedTurn:
            return await self._router.serve(
                Tokens(shared + random_tokens(rng, shape.own_tokens)),
                output_tokens=int(rng.integers(*shape.outputs)),
                is_cached=is_cached,
                namespace=namespace,
            )

        async def ask_again() -> None:
            for _ in left:
                turns.append(await ask())  # noqa: PERF401 - many of these share one list

        before = self.sent()
        first = await ask()
        began_s = time.monotonic()
        await asyncio.gather(*(ask_again() for _ in range(shape.at_once)))
        seconds = time.monotonic() - began_s
        after = self.sent()
        sent = CountedBytes(*(now - then for now, then in zip(after, before, strict=True)))
        return RoundOfRequests(
            is_cached=is_cached, first=first, turns=turns, seconds=seconds, sent=sent
        )


async def measure(
    shape: LinkShape, pair: Pair, sender: Namespace, told: Told
) -> list[RoundOfRequests]:
    """All rounds, on and off in turns."""
    told("engines start")
    of_prefill = EngineShape(PREFILL, chunk_tokens=CHUNK_TOKENS)
    of_decode = EngineShape(DECODE, step_s=shape.step_s, is_elsewhere=True)
    played = []
    async with (
        open_engine(of_prefill, pair.prefill.client) as prefill,
        open_engine(of_decode, pair.decode.client) as decode,
    ):
        link = NarrowLink(shape, pair, sender, Router(prefill, decode))
        for number in range(shape.rounds):
            for is_cached in (True, False)[:: 1 if number % 2 else -1]:
                told(f"round {number + 1} of {shape.rounds}, cache {'on' if is_cached else 'off'}")
                played.append(await link.play(number, is_cached=is_cached))
    return played


def row_of(played: list[RoundOfRequests]) -> Measured:
    """What was measured with the decode side's cache on or off, over all rounds."""
    turns = [turn for run in played for turn in run.turns]
    firsts = np.percentile([turn.first_token_s for turn in turns], [50, 99]) * 1e3
    gaps = np.percentile([gap for turn in turns for gap in turn.gaps_s], [50, 99]) * 1e3
    sent = {
        "told_bytes": sum(run.told_bytes for run in played),
        "counted_bytes": sum(run.sent.counted for run in played),
        "cable_bytes": sum(run.sent.cable for run in played),
        "bound_bytes": sum(run.bound_bytes for run in played),
    }
    return {
        "cache": "on" if played[0].is_cached else "off",
        "requests": len(turns),
        **sent,
        **{name.replace("bytes", "mib"): n / 2**20 for name, n in sent.items()},
        "first_token_p50_ms": float(firsts[0]),
        "first_token_p99_ms": float(firsts[1]),
        "gap_p50_ms": float(gaps[0]),
        "gap_p99_ms": float(gaps[1]),
        "requests_per_s": statistics.median(len(run.turns) / run.seconds for run in played),
    }


def measure_link(shape: LinkShape, told: Told) -> BenchmarkResult:
    """Start everything, measure, stop everything.

    Raises:
        ChildFailed: there can be no such link here, or something did not do what it should.
    """
    try:
        with site_of(NAMESPACES, SMALL) as site:
            assert site.namespaces is not None
            for space in site.namespaces:
                slow_down(space, shape.link_bytes_per_s, PEERS_PORT)
            settings = {**SETTINGS, **site.settings, "pool.pages": str(shape.pages)}
            with (
                tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
                two_daemons(Path(directory), settings, places=site.places) as pair,
            ):
                played = uvloop.run(measure(shape, pair, site.namespaces[0], told))
    except NoNamespaces as why:
        raise ChildFailed(f"there can be no narrow link here: {why}") from why
    on, off = (
        row_of([run for run in played if run.is_cached is cached]) for cached in (True, False)
    )
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"{shape.at_once} requests at once, {shape.shared_tokens} shared tokens and "
                f"{shape.own_tokens} of their own, {TOKEN_BYTES} bytes of KV per token, a link of "
                f"{shape.link_bytes_per_s / 1e6:g} MB/s",
                columns=COLUMNS,
                rows=(on, off),
            ),
        ),
        goals=goals_of(on, off),
        notes=(
            "bound: pages of the prompts that the decode node had not seen, from the token lists; "
            "sent: as the daemon counts it; cable: all data that left the sender's namespace",
            "first token: from the router to the decode engine with the KV there and checked",
            f"between tokens: a step takes {shape.step_s * 1e3:g} ms, whatever is in the batch, "
            f"and none of this host's cores; outputs have {shape.outputs[0]} to "
            f"{shape.outputs[1] - 1} tokens",
            f"{shape.rounds} rounds each, in turns; the first request of a round goes alone, and "
            "of it only the bytes count",
        ),
    )


def goals_of(on: Measured, off: Measured) -> tuple[Goal, ...]:
    """What was to be reached."""
    exact = [
        at_most(
            f"cache {row['cache']}: bytes {what} above or below the bound",
            0,
            abs(figure(row, f"{what}_bytes") - figure(row, "bound_bytes")),
        )
        for row in (on, off)
        for what in ("told", "counted")
    ]
    cable = [
        at_most(
            f"cache {row['cache']}: bytes through the cable / bound",
            FRAMES,
            figure(row, "cable_bytes") / figure(row, "bound_bytes"),
        )
        for row in (on, off)
    ]

    def ratio(of: Measured, to: Measured, key: str) -> float:
        return figure(of, key) / figure(to, key)

    return (
        at_least("first token p50, off / on", 8.1, ratio(off, on, "first_token_p50_ms")),
        at_least("requests per second, on / off", 1.32, ratio(on, off, "requests_per_s")),
        at_most("between tokens p50, on / off", NOISE, ratio(on, off, "gap_p50_ms")),
        at_most("between tokens p99, on / off", NOISE, ratio(on, off, "gap_p99_ms")),
        *exact,
        *cable,
    )


def run(
    told: Told, *, tokens: tuple[int, int, int], step_ms: float, link: float, **counts: int
) -> BenchmarkResult:
    """A long shared start over a narrow link, with the decode side's radix cache on and off."""
    shared, own, output = tokens
    shape = LinkShape(
        shared_tokens=shared,
        own_tokens=own,
        output_tokens=output,
        step_s=step_ms / 1e3,
        link_bytes_per_s=link * 1e6,
        **counts,
    )
    return measure_link(shape, told)


COLUMNS: Final = (
    ResultColumn("cache", "decode cache"),
    ResultColumn("requests", "requests"),
    ResultColumn("bound_mib", "bound MiB", ".1f"),
    ResultColumn("counted_mib", "sent MiB", ".1f"),
    ResultColumn("cable_mib", "cable MiB", ".1f"),
    ResultColumn("first_token_p50_ms", "first token p50 ms", ".0f"),
    ResultColumn("first_token_p99_ms", "p99", ".0f"),
    ResultColumn("gap_p50_ms", "between tokens p50 ms", ".2f"),
    ResultColumn("gap_p99_ms", "p99", ".2f"),
    ResultColumn("requests_per_s", "requests/s", ".2f"),
)

command = benchmark(
    "decode_radix",
    run,
    click.option(
        "--tokens",
        nargs=3,
        type=int,
        default=(50_000, 4_500, 100),
        show_default=True,
        help="Of a request: those all share, its own, those it says (half to one and a half).",
    ),
    click.option("--at-once", default=128, show_default=True, help="Requests under way."),
    click.option("--requests", default=384, show_default=True, help="In a round."),
    click.option("--rounds", default=2, show_default=True, help="With the cache on, and off."),
    click.option("--step-ms", default=60.0, show_default=True, help="What a decode step takes."),
    click.option("--link", default=20.0, show_default=True, help="Megabytes a second."),
)
