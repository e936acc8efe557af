"""``benchmarks cp``: context-parallel ranks that each send a share, or one that sends it all.

Every rank has the KV of some tokens of a prompt, and the decode node wants all of it. Two ways are
measured beside each other, and both begin where the ranks have computed their KV:

    shares       all ranks gather everything, and each sends its share from its own daemon
    one          one rank gathers everything, and its daemon sends it
    no gather    one rank has everything in its pages before the clock starts: the reference

Real daemons with NIXL between them, one for each rank and one for the decode side, and real ranks
over gloo (``context_rank``). The three take turns within each repetition. What arrives is looked at
every time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

from benchmarks.context_rank import DEADLINE_S, HandedOver, RankOrder, Strategy
from benchmarks.harness import benchmark
from benchmarks.ranks import Ranks
from benchmarks.token_memory import TokenMemory, WrittenTokens
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most
from kvd.client import connect_sync
from kvd.core.layout.shards import page_share
from kvd.harness.daemons import star_of_daemons
from kvd.types import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Measured, Told
    from kvd.client import SyncNode

PAGE_TOKENS: Final = 16
TOKEN_BYTES: Final = 16384
SETTINGS: Final = {
    "pool.layers": "8",
    "pool.heads": "8",
    "pool.head_dim": "128",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_TOKENS),
}
RANKS: Final = (2, 4)


class PromptKind(msgspec.Struct, frozen=True):
    """A prompt for so many ranks; ``prefix_tokens`` of it are cached on the decode side."""

    ranks: int
    tokens: int
    prefix_tokens: int

    def due_bytes(self, strategy: Strategy) -> tuple[int, ...]:
        """What each daemon has to send."""
        pages = (self.tokens - self.prefix_tokens) // PAGE_TOKENS
        size = PAGE_TOKENS * TOKEN_BYTES
        if strategy is not Strategy.SHARES:
            return (pages * size, *[0] * (self.ranks - 1))
        shares = [page_share(0, pages, rank, self.ranks) for rank in range(self.ranks)]
        return tuple((end - first) * size for first, end in shares)


class DecodeSide:
    """The decode side, and the numbers that must not repeat: tokens and rooms."""

    def __init__(self, ranks: Ranks, names: list[str], node: SyncNode) -> None:
        self._ranks = ranks
        self._names = names
        self._node = node
        self._memory = TokenMemory(node.pool("main"))
        self._room = 0
        self._next_token = 0

    def hand_over(self, kind: PromptKind, strategy: Strategy) -> tuple[float, HandedOver]:
        """One prompt that nobody has seen before, but for its prefix: seconds, and what was sent.

        Raises:
            AssertionError: something else arrived than was computed.
            ChildFailed: the ranks ended.
        """
        first = self._next_token
        self._next_token += kind.tokens
        self._room += 1
        tokens = np.arange(first, first + kind.tokens, dtype=np.int32)
        if kind.prefix_tokens:
            self._compute(tokens[: kind.prefix_tokens])
        self._ranks.tell(
            RankOrder(strategy=strategy, room=self._room, first=first, tokens=kind.tokens)
        )
        sources = self._names if strategy is Strategy.SHARES else self._names[:1]
        receive = self._node.receive(self._room, tokens, sources, deadline_s=DEADLINE_S)
        receive.done()
        ended_s = time.monotonic()
        handed = self._ranks.hear(HandedOver)[0]
        assert receive.prefix_len == kind.prefix_tokens
        self._memory.check(receive.lease.wrapped, Tokens(tokens.tobytes()))
        receive.lease.release()
        return ended_s - handed.began_s, handed

    def _compute(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Have the decode node compute and cache these itself."""
        lease = self._node.lease(tokens)
        whole = Tokens(tokens.tobytes())
        self._memory.write(
            WrittenTokens(lease=lease.wrapped, tokens=whole, first=0, last=tokens.size)
        )
        lease.release(())


def measure(decode: DecodeSide, kind: PromptKind, repeats: int) -> list[Measured]:
    """A row for each strategy, all in turn, so often, after one round that warms up."""
    rounds = [
        {strategy: decode.hand_over(kind, strategy) for strategy in Strategy}
        for _ in range(repeats + 1)
    ][1:]
    rows: list[Measured] = []
    for strategy in Strategy:
        took = [by_strategy[strategy] for by_strategy in rounds]
        ratios = [
            by_strategy[strategy][0] / by_strategy[Strategy.NO_GATHER][0] for by_strategy in rounds
        ]
        gathered_ms = float(np.median([handed.gathered_s for _, handed in took])) * 1e3
        sent = took[0][1].sent_bytes
        rows.append(
            {
                "ranks": kind.ranks,
                "tokens": kind.tokens,
                "prefix_tokens": kind.prefix_tokens,
                "strategy": strategy.value,
                "took_ms": float(np.median([seconds for seconds, _ in took])) * 1e3,
                "gathered_ms": None if strategy is Strategy.NO_GATHER else gathered_ms,
                "ratio": float(np.median(ratios)),
                "sent_bytes": sent,
                "sent_mib": tuple(size / 2**20 for size in sent),
                "wrong_bytes": sum(
                    abs(n_bytes - due)
                    for n_bytes, due in zip(sent, kind.due_bytes(strategy), strict=True)
                ),
            }
        )
    return rows


@contextlib.contextmanager
def open_decode_side(settings: dict[str, str], ranks: int) -> Iterator[DecodeSide]:
    """Daemons and ranks, for as long as the block lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        star_of_daemons(Path(name), settings, ranks) as (prefill, decode),
        connect_sync(decode.client, name="decode") as node,
    ):
        processes = Ranks(
            "benchmarks.context_rank", len(prefill), *[daemon.client for daemon in prefill]
        )
        try:
            yield DecodeSide(processes, [daemon.name for daemon in prefill], node)
        finally:
            processes.stop()


def run(
    told: Told, *, tokens: tuple[int, ...], repeats: int, ranks: tuple[int, ...] = RANKS
) -> BenchmarkResult:
    """Context-parallel ranks: each sends a share, or one gathers and sends everything.

    2 and 4 ranks with a daemon each, on this host; every prompt once cold and once with its first
    half cached on the decode side.
    """
    if any(size % (2 * PAGE_TOKENS) for size in tokens):
        raise click.BadParameter("a multiple of 32, so that half of it is whole pages")
    rows: list[Measured] = []
    # A prompt, what is cached of it, and the null page; what is cached longer gives way.
    settings = {**SETTINGS, "pool.pages": str(2 * max(tokens) // PAGE_TOKENS + 1)}
    for count in ranks:
        told(f"{count} ranks: daemons and ranks start")
        with open_decode_side(settings, count) as decode:
            for size in tokens:
                for prefix in (0, size // 2):
                    told(f"{count} ranks, {size} tokens, {prefix} of them cached")
                    rows += measure(decode, PromptKind(count, size, prefix), repeats)
    cpus = len(os.sched_getaffinity(0))
    title = f"From KV computed to done() on {cpus} cores; medians of {repeats}"
    wrong = sum(int(str(row["wrong_bytes"])) for row in rows)
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=(at_most("bytes of any daemon above or below its share", 0, wrong),),
        notes=(
            f"{TOKEN_BYTES // 1024} KiB of KV per token, in 8 layers; cached: on the decode side",
            "shares: all ranks gather, each sends its share; one: one rank gathers and sends all",
            "no gather: one rank had everything in its pages before; it only sends",
            "gather: until the first rank has all layers in its pages; over gloo on loopback, with "
            "all ranks and daemons on the cores of this machine",
            "/ no gather: median of the ratios within each repetition",
        ),
    )


COLUMNS: Final = (
    ResultColumn("ranks", "ranks"),
    ResultColumn("tokens", "tokens"),
    ResultColumn("prefix_tokens", "cached"),
    ResultColumn("strategy", "way"),
    ResultColumn("took_ms", "ms", ".1f"),
    ResultColumn("gathered_ms", "gather ms", ".1f"),
    ResultColumn("ratio", "/ no gather", ".2f"),
    ResultColumn("sent_mib", "MiB by daemon", ".1f"),
)

command = benchmark(
    "cp",
    run,
    click.option(
        "--tokens",
        type=click.IntRange(2 * PAGE_TOKENS),
        multiple=True,
        default=(1024, 4096),
        show_default=True,
        help="Of a prompt, whole pages of 16; may be repeated.",
    ),
    click.option("--repeats", default=7, show_default=True, help="Handoffs of each kind."),
)
