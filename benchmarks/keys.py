"""``benchmarks keys``: what a hit costs by tokens, by page keys, and by a prompt with a number.

One daemon has the same prompts by tokens and by keys. Each is looked up, and leased and released,
in small turns: the three ways fall on the same noise. What is compared is the median call, and the
processor time of the daemon. Bytes are those of the messages, counted as they leave the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.bench.rounds import CallKind, ComparedCalls
from kvd.client.connection import Connection
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.client.connection import Outgoing
    from kvd.harness.daemons import DaemonProcess

PAGE: Final = 16
SHAPE: Final = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "16384"}
PROMPT_TOKENS: Final = (2000, 32_000)
PROMPTS: Final = 2
KEY_BYTES: Final = 32
DAEMON: Final = "daemon"
WAYS: Final = ("tokens", "keys", "prompt")

COLUMNS: Final = (
    ResultColumn("call", "call"),
    ResultColumn("prompt_tokens", "prompt tokens"),
    ResultColumn("way", "asked by"),
    ResultColumn("p50_us", "p50 us", ".0f"),
    ResultColumn("daemon_us", "of the daemon us", ".0f"),
    ResultColumn("page_us", "a page us", ".3f"),
    ResultColumn("to_tokens", "over tokens", ".2f"),
    ResultColumn("bytes", "bytes sent"),
)


class SentBytes:
    """Counts what all connections of this process send, while it is entered."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __enter__(self) -> SentBytes:
        take = self._take = Connection.take_outgoing

        def counted(connection: Connection) -> list[Outgoing]:
            out = take(connection)
            self.n_bytes += sum(len(frame) for message in out for frame in message.frames)
            return out

        Connection.take_outgoing = counted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Connection.take_outgoing = self._take  # type: ignore[method-assign]


class AskedPrompt:
    """One prompt in three ways."""

    def __init__(self, node: kvd.client.Node, rng: np.random.Generator, n_tokens: int) -> None:
        self.tokens = rng.integers(0, 50_000, n_tokens, dtype=np.int32)
        self.keys = [
            hashlib.blake2b(
                self.tokens[: PAGE * (page + 1)].tobytes(), digest_size=KEY_BYTES
            ).digest()
            for page in range(n_tokens // PAGE)
        ]
        self.prompt = node.prompt(self.tokens)

    async def cache(self, node: kvd.client.Node) -> None:
        """Have it in the tree, by tokens and by keys."""
        await (await node.lease(self.tokens)).release(())
        await (await node.lease(keys=self.keys)).release(keys=())

    async def match(self, node: kvd.client.Node, way: str) -> int:
        """Look it up; how many tokens are there."""
        if way == "keys":
            return (await node.match(keys=self.keys)).tokens
        return (await node.match(self.prompt if way == "prompt" else self.tokens)).tokens

    async def lease(self, node: kvd.client.Node, way: str) -> int:
        """Lock all of it and let go."""
        if way == "keys":
            lease = await node.lease(keys=self.keys)
        else:
            lease = await node.lease(self.prompt if way == "prompt" else self.tokens)
        await lease.release()
        return lease.prefix_len


Ask = Callable[[AskedPrompt, kvd.client.Node, str], Awaitable[int]]


def calls_by(
    way: str, ask: Ask, prompts: list[AskedPrompt], node: kvd.client.Node, daemon: DaemonProcess
) -> CallKind:
    """One prompt after the other, asked about that way; each is a hit."""

    async def call(number: int) -> None:
        prompt = prompts[number % PROMPTS]
        assert await ask(prompt, node, way) == len(prompt.tokens)

    return CallKind(call, {DAEMON: daemon.pid})


async def measure(daemon: DaemonProcess, rounds: int, calls: int, told: Told) -> list[Measured]:
    """All ways of asking, in turns."""
    rng = np.random.default_rng(1)
    rows: list[Measured] = []
    async with kvd.client.connect(daemon.client, name="bench") as node:
        for n_tokens in PROMPT_TOKENS:
            prompts = [AskedPrompt(node, rng, n_tokens) for _ in range(PROMPTS)]
            for prompt in prompts:
                await prompt.cache(node)
            for verb in ("match", "lease and release"):
                told(f"{verb}, {n_tokens} tokens")
                ask = AskedPrompt.match if verb == "match" else AskedPrompt.lease
                kinds = {way: calls_by(way, ask, prompts, node, daemon) for way in WAYS}
                compared = ComparedCalls(verb, 1, calls, kinds)
                await compared.warm_up()
                for number in range(rounds):
                    await compared.play_round(number)
                for way in WAYS:
                    with SentBytes() as sent:
                        await ask(prompts[0], node, way)
                    rows.append(row_of(compared, n_tokens, way, sent.n_bytes))
    return rows


def row_of(compared: ComparedCalls, n_tokens: int, way: str, n_bytes: int) -> Measured:
    """One way of asking, beside asking by tokens in the same rounds."""
    kind = compared.kinds[way]
    p50_us = kind.quantile_us(50)
    return {
        "call": compared.what,
        "prompt_tokens": n_tokens,
        "way": way,
        "p50_us": p50_us,
        "daemon_us": kind.cpu_us(DAEMON),
        "page_us": p50_us / (n_tokens // PAGE),
        "to_tokens": compared.ratio(way, "tokens", lambda turn: turn.p50_us).median,
        "bytes": n_bytes,
    }


def run(told: Told, *, rounds: int, calls: int) -> BenchmarkResult:
    """What a hit costs by tokens, by keys, and by a prompt with a number."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        one_daemon(Path(name), SHAPE) as daemon,
    ):
        rows = asyncio.run(measure(daemon, rounds, calls, told))
    by_keys = max(figure(row, "to_tokens") for row in rows if row["way"] == "keys")
    (known,) = [
        row
        for row in rows
        if (row["call"], row["way"], row["prompt_tokens"]) == ("match", "prompt", PROMPT_TOKENS[-1])
    ]
    return BenchmarkResult(
        tables=(
            ResultTable(title="A hit, by what it is asked", columns=COLUMNS, rows=tuple(rows)),
        ),
        goals=(
            at_most("a page by keys over by tokens, worst", 2.0, by_keys),
            at_most("bytes of a look-up of a known 32k prompt", 1024, figure(known, "bytes")),
        ),
    )


command = benchmark(
    "keys",
    run,
    click.option("--rounds", default=40, show_default=True, help="To take medians of."),
    click.option("--calls", default=25, show_default=True, help="In a turn."),
)
