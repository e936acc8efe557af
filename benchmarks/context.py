"""``benchmarks cp``: context-parallel ranks that each send a share, or one that sends it all.

Every rank has the KV of some tokens of a prompt, and the decode node wants all of it. Two ways are
measured beside each other, and both begin where the ranks have computed their KV:

    shares       all ranks gather everything, and each sends its share from its own daemon
    one          one rank gathers everything, and its daemon sends it
    no gather    one rank has everything in its pages before the clock starts: the reference

Real daemons with NIXL between them, one for each rank and one for the decode side, and real ranks
over gloo. The three take turns within each repetition. What arrives is looked at every time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

from benchmarks.context_rank import DEADLINE_S, Order, Sent, Strategy
from benchmarks.context_rank import Told as Handed
from benchmarks.token_memory import TokenMemory, Written
from kvd.bench.report import Goal, at_most, bar, show_goals, show_notes, show_table, write_json
from kvd.client import connect_sync
from kvd.core.shards import page_share
from kvd.demo.processes import ENGINE_VARIABLES
from kvd.errors import KvdError
from kvd.harness.daemons import Daemon, DaemonFailed, star_of_daemons
from kvd.types import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Told
    from kvd.client import SyncNode

PAGE_TOKENS = 16
TOKEN_BYTES = 16384
SETTINGS = {
    "pool.layers": "8",
    "pool.heads": "8",
    "pool.head_dim": "128",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_TOKENS),
}
MIB = 2**20
RANKS = (2, 4)


class RanksFailed(Exception):
    """The ranks ended; the message quotes what they said last."""


class Case(msgspec.Struct, frozen=True):
    """One kind of prompt. ``prefix_tokens`` of its ``tokens`` are cached on the decode side."""

    ranks: int
    tokens: int
    prefix_tokens: int


class Outcome(msgspec.Struct, frozen=True):
    """One strategy in one case, medians over the repetitions.

    ``ratio``: median of the ratios to the reference within each repetition. ``sent_bytes``: of each
    daemon, the same every time.
    """

    strategy: Strategy
    took_ms: float
    gathered_ms: float
    ratio: float
    sent_bytes: tuple[int, ...]


class CaseResult(msgspec.Struct, frozen=True):
    """All strategies in one case."""

    case: Case
    outcomes: tuple[Outcome, ...]


class ContextResult(msgspec.Struct, frozen=True):
    """What ``benchmarks cp`` reports."""

    repeats: int
    cpus: int
    cases: tuple[CaseResult, ...]
    goals: tuple[Goal, ...]


class Took(msgspec.Struct, frozen=True):
    """One handoff, in seconds."""

    seconds: float
    gathered_s: float
    sent: tuple[Sent, ...]


class Ranks:
    """The rank processes: orders in, answers out."""

    def __init__(self, daemons: list[Daemon], log: Path) -> None:
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.context_rank", *(one.client for one in daemons)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **ENGINE_VARIABLES},
            )

    def tell(self, order: Order) -> None:
        """Hand over one order; ``hear`` gives its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then nothing is to be heard
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def hear(self) -> Handed:
        """The answer.

        Raises:
            RanksFailed: there is none.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RanksFailed(f"the ranks have ended\n{self._log.read_text()[-2000:]}")
        return msgspec.json.decode(line, type=Handed)

    def stop(self) -> None:
        """End their input, and wait for their end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Bench:
    """The decode side, and the numbers that must not repeat: tokens and rooms."""

    def __init__(self, ranks: Ranks, names: list[str], node: SyncNode) -> None:
        self._ranks = ranks
        self._names = names
        self._node = node
        self._memory = TokenMemory(node.pool("main"))
        self._room = 0
        self._next_token = 0

    def hand_over(self, case: Case, strategy: Strategy) -> Took:
        """One prompt that nobody has seen before, but for its prefix.

        Raises:
            AssertionError: something else arrived than was computed.
            RanksFailed: the ranks ended.
        """
        first = self._next_token
        self._next_token += case.tokens
        self._room += 1
        tokens = np.arange(first, first + case.tokens, dtype=np.int32)
        self._cache(tokens[: case.prefix_tokens])
        self._ranks.tell(Order(strategy, self._room, first, case.tokens))
        sources = self._names if strategy is Strategy.SHARES else self._names[:1]
        receive = self._node.receive(self._room, tokens, sources, deadline_s=DEADLINE_S)
        receive.done()
        ended_s = time.monotonic()
        told = self._ranks.hear()
        assert receive.prefix_len == case.prefix_tokens
        self._memory.check(receive.lease.wrapped, Tokens(tokens.tobytes()))
        receive.lease.release()
        return Took(ended_s - told.began_s, told.gathered_s, told.sent)

    def _cache(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Have the decode node compute these itself."""
        if not tokens.size:
            return
        lease = self._node.lease(tokens)
        whole = Tokens(tokens.tobytes())
        self._memory.write(Written(lease.wrapped, whole, 0, tokens.size))
        lease.release(())


def measure(bench: Bench, case: Case, repeats: int) -> CaseResult:
    """All strategies in turn, so often, after one round that warms up."""
    rounds = [
        {strategy: bench.hand_over(case, strategy) for strategy in Strategy}
        for _ in range(repeats + 1)
    ][1:]
    return CaseResult(case, tuple(_outcome(strategy, rounds) for strategy in Strategy))


def _outcome(strategy: Strategy, rounds: list[dict[Strategy, Took]]) -> Outcome:
    took = [one[strategy] for one in rounds]
    ratios = [one[strategy].seconds / one[Strategy.NO_GATHER].seconds for one in rounds]
    return Outcome(
        strategy,
        took_ms=float(np.median([one.seconds for one in took])) * 1e3,
        gathered_ms=float(np.median([one.gathered_s for one in took])) * 1e3,
        ratio=float(np.median(ratios)),
        sent_bytes=tuple(sent.bytes for sent in took[0].sent),
    )


def due_bytes(case: Case, strategy: Strategy) -> tuple[int, ...]:
    """What each daemon had to send."""
    pages = (case.tokens - case.prefix_tokens) // PAGE_TOKENS
    size = PAGE_TOKENS * TOKEN_BYTES
    if strategy is not Strategy.SHARES:
        return (pages * size, *[0] * (case.ranks - 1))
    shares = [page_share(0, pages, rank, case.ranks) for rank in range(case.ranks)]
    return tuple((end - first) * size for first, end in shares)


def goals_of(results: list[CaseResult]) -> tuple[Goal, ...]:
    """What was to be reached."""
    wrong = sum(
        abs(sent - due)
        for result in results
        for one in result.outcomes
        for sent, due in zip(one.sent_bytes, due_bytes(result.case, one.strategy), strict=True)
    )
    return (at_most("bytes of any daemon above or below its share", 0, wrong),)


def run(sizes: tuple[int, ...], ranks: tuple[int, ...], repeats: int, told: Told) -> ContextResult:
    """Start everything, measure, stop everything.

    Raises:
        RanksFailed, DaemonFailed: something did not do what it should.
    """
    results: list[CaseResult] = []
    # A prompt, what is cached of it, and the null page; what is cached longer gives way.
    settings = {**SETTINGS, "pool.pages": str(2 * max(sizes) // PAGE_TOKENS + 1)}
    for count in ranks:
        told(f"{count} ranks: daemons and ranks start")
        with _stage(settings, count) as bench:
            for tokens in sizes:
                for prefix in (0, tokens // 2):
                    told(f"{count} ranks, {tokens} tokens, {prefix} of them cached")
                    results.append(measure(bench, Case(count, tokens, prefix), repeats))
    cpus = len(os.sched_getaffinity(0))
    return ContextResult(repeats, cpus, tuple(results), goals_of(results))


@contextlib.contextmanager
def _stage(settings: dict[str, str], ranks: int) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        star_of_daemons(Path(name), settings, ranks) as (prefill, decode),
        connect_sync(decode.client, name="decode") as node,
    ):
        processes = Ranks(prefill, Path(name) / "ranks.log")
        try:
            yield Bench(processes, [one.name for one in prefill], node)
        finally:
            processes.stop()


@click.command("cp")
@click.option(
    "--tokens",
    "sizes",
    type=click.IntRange(2 * PAGE_TOKENS),
    multiple=True,
    default=(1024, 4096),
    show_default=True,
    help="Of a prompt, whole pages of 16; may be repeated.",
)
@click.option("--repeats", default=7, show_default=True, help="Handoffs of each kind.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
def command(sizes: tuple[int, ...], repeats: int, file: Path | None) -> None:
    """Context-parallel ranks: each sends a share, or one gathers and sends everything.

    2 and 4 ranks with a daemon each, on this host; every prompt once cold and once with its first
    half cached on the decode side.
    """
    if any(tokens % (2 * PAGE_TOKENS) for tokens in sizes):
        raise click.BadParameter("a multiple of 32, so that half of it is whole pages")
    try:
        with bar("cp", len(RANKS) * (1 + 2 * len(sizes))) as told:
            result = run(sizes, RANKS, repeats, told)
    except (RanksFailed, DaemonFailed, KvdError, AssertionError) as failed:
        raise click.ClickException(str(failed)) from failed
    _show(result)
    if file is not None:
        write_json(file, result)


def _show(result: ContextResult) -> None:
    show_table(
        f"From KV computed to done() on {result.cpus} cores; medians of {result.repeats}",
        (
            "ranks",
            "tokens",
            "cached",
            "way",
            "ms",
            "gather ms",
            "/ no gather",
            "MiB by daemon",
        ),
        [_row(one.case, outcome) for one in result.cases for outcome in one.outcomes],
    )
    show_notes(
        [
            f"{TOKEN_BYTES // 1024} KiB of KV per token, in 8 layers; cached: on the decode side",
            "shares: all ranks gather, each sends its share; one: one rank gathers and sends all",
            "no gather: one rank had everything in its pages before; it only sends",
            "gather: until the first rank has all layers in its pages; over gloo on loopback, with "
            "all ranks and daemons on the cores of this machine",
            "/ no gather: median of the ratios within each repetition",
        ]
    )
    show_goals(result.goals)


def _row(case: Case, outcome: Outcome) -> list[str]:
    return [
        str(case.ranks),
        str(case.tokens),
        str(case.prefix_tokens),
        outcome.strategy.value,
        f"{outcome.took_ms:.1f}",
        "-" if outcome.strategy is Strategy.NO_GATHER else f"{outcome.gathered_ms:.1f}",
        f"{outcome.ratio:.2f}",
        "+".join(f"{size / MIB:.1f}" for size in outcome.sent_bytes),
    ]
