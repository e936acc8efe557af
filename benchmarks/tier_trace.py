"""``benchmarks tier_trace``: a recorded load through two daemons with small pools and disks.

Every request is served as a pair serves it, one after the other: the decode node is asked for room
and waits for what its disk has; the prefill node leases the prompt, waits for its own disk,
computes what is lacking at a fixed rate, and hands it over. What the decode node had of a prompt is
compared with a tree of blocks that has no disk and is as large as pool and disk together, evicts
the least recently used, and is otherwise perfect. Every page that is found or received is compared
with what belongs there: each block of the trace has bytes of its own.

An engine waits only where it was told that this takes less than to compute the same tokens at
``engine_rate``. Was it told right? Each wait is compared with that.

Without a recorded load one is made: conversations whose turns come in any order, each with what was
said before, some behind a system prompt that others have too.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import OrderedDict
from contextlib import AsyncExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
import msgspec
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, at_most, figure
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import two_daemons
from kvd.storage.sizes import object_bytes
from kvd.trace import BLOCK_TOKENS, TraceRequest, expand, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvd.bench.report import Goal, Measured, Told
    from kvd.client import Matched
    from kvd.harness.daemons import DaemonProcess, Pair

WIDTH: Final = 64
OBJECT_BYTES: Final = object_bytes(2 * WIDTH * BLOCK_TOKENS)
SHAPE: Final = {
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": str(WIDTH),
    "pool.dtype": "uint8",
    "pool.page_size": str(BLOCK_TOKENS),
}

COLUMNS: Final = (
    ResultColumn("side", "node"),
    ResultColumn("reuse", "found", ".2%"),
    ResultColumn("promoted", "from disk", ".2%"),
    ResultColumn("tree", "tree", ".2%"),
    ResultColumn("pool", "pool alone", ".2%"),
    ResultColumn("waits", "waits"),
    ResultColumn("told_ms", "told ms", ".1f"),
    ResultColumn("waited_ms", "waited", ".1f"),
    ResultColumn("waited_p99_ms", "p99", ".1f"),
    ResultColumn("slower", "slower"),
    ResultColumn("declined", "declined"),
    ResultColumn("unwritten", "lost"),
    ResultColumn("bad", "bad"),
)


NOTES: Final = (
    "one request after the other; every page found or received was compared with its block",
    "found: of the tokens of all prompts; tree, pool alone: what a perfect tree finds that is as "
    "large as pool and disk, or as the pool; lost: pages evicted before they were written",
    "waits: requests that got pages from the disk; told and waited: means; told: before they asked",
    "slower: of the waits, those that took longer than to compute the same tokens; declined: "
    "requests that were told it would, and did not wait",
)

SYSTEM_PROMPTS: Final = 8
TURNS: Final = 8
MOST_BLOCKS_A_TURN: Final = 8


def made_trace(n_requests: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations of ``TURNS`` turns each, all at once, the next turn of any of them."""
    rng = random.Random(seed)
    n_blocks = 0

    def new(count: int) -> list[int]:
        nonlocal n_blocks
        n_blocks += count
        return list(range(n_blocks - count, n_blocks))

    systems = [new(rng.randint(1, MOST_BLOCKS_A_TURN)) for _ in range(SYSTEM_PROMPTS)]
    said: list[list[int]] = [[] for _ in range(-(-n_requests // TURNS))]
    turns = [at for at in range(len(said)) for _ in range(TURNS)]
    rng.shuffle(turns)
    requests = []
    for at_ms, conversation in enumerate(turns[:n_requests]):
        before = said[conversation] or rng.choice(systems)
        said[conversation] = blocks = [*before, *new(rng.randint(1, MOST_BLOCKS_A_TURN))]
        requests.append(
            TraceRequest(
                timestamp=at_ms,
                input_length=len(blocks) * BLOCK_TOKENS,
                output_length=1,
                hash_ids=blocks,
            )
        )
    return requests


class BlockTree:
    """The blocks of the last prompts, at most so many; a block is found behind all before it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._paths: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, hash_ids: Sequence[int]) -> int:
        """How many of the first of these were there; all of them are now."""
        paths = list(block_paths(hash_ids))
        n_found = next((at for at, path in enumerate(paths) if path not in self._paths), len(paths))
        # The last of a prompt first, so that what follows leaves before what it needs.
        for path in reversed(paths):
            self._paths[path] = None
            self._paths.move_to_end(path)
        while len(self._paths) > self._most:
            self._paths.popitem(last=False)
        return n_found


def block_paths(hash_ids: Sequence[int]) -> Iterator[bytes]:
    """A name for each block, with all before it."""
    path = b""
    for block in hash_ids:
        path = blake2b(path + block.to_bytes(8, "little"), digest_size=16).digest()
        yield path


class ServedRequest(msgspec.Struct, frozen=True):
    """What one node did for one request; times in ms."""

    n_tokens: int
    found: int
    promoted: int
    told_ms: float
    """Before it asked: how long what its disk has would take."""
    took_ms: float
    """From asking until it had pages."""
    declined: bool
    """Whether that was longer than to compute it, so that it did not wait."""


class TraceNode:
    """One daemon and its engine."""

    def __init__(
        self, side: str, daemon: DaemonProcess, node: kvd.client.Node, engine_rate: float
    ) -> None:
        self.side = side
        self.engine_rate = engine_rate
        self.daemon = daemon
        self.node = node
        self.served: list[ServedRequest] = []
        self._layer = [part.numpy() for part in node.pool("main").layer(0)]

    async def lease(self, tokens: npt.NDArray[np.int32]) -> kvd.client.Lease:
        """A prompt's pages, once its disk has given what it has."""
        told = await self.node.match(tokens)
        began_s = time.perf_counter()
        lease = await self.node.lease(tokens, tiers=self._choice(told))
        took_s = time.perf_counter() - began_s
        self._note(tokens, lease.prefix_len, lease.tiers.promoted_tokens, told, took_s)
        return lease

    async def receive(self, room: int, tokens: npt.NDArray[np.int32]) -> kvd.client.Receive:
        """Room for a prompt, once its disk has given what it has."""
        told = await self.node.match(tokens)
        began_s = time.perf_counter()
        receive = await self.node.receive(room, tokens, "p", tiers=self._choice(told))
        took_s = time.perf_counter() - began_s
        self._note(tokens, receive.prefix_len, receive.promoted_len, told, took_s)
        return receive

    def _choice(self, told: Matched) -> Literal["wait", "now"]:
        """As an engine chooses."""
        return "wait" if told.tier_ms <= self.compute_ms(told.tier_tokens) else "now"

    def compute_ms(self, n_tokens: int) -> float:
        """What these take without a tier."""
        return 1000 * n_tokens / self.engine_rate

    def _note(
        self, tokens: npt.NDArray[np.int32], found: int, promoted: int, told: Matched, took_s: float
    ) -> None:
        self.served.append(
            ServedRequest(
                n_tokens=len(tokens),
                found=found,
                promoted=promoted,
                told_ms=told.tier_ms,
                took_ms=1000 * took_s,
                declined=self._choice(told) == "now",
            )
        )

    def compute(self, request: TraceRequest, lease: kvd.client.Lease) -> int:
        """Write what is lacking; how many tokens these are.

        Raises:
            ChildFailed: a page that was found holds another block.
        """
        n_found = lease.prefix_len // BLOCK_TOKENS
        self.check(request, lease, n_found)
        pages = lease.pages[n_found:].tolist()
        for page, block in zip(pages, request.hash_ids[n_found:], strict=False):
            for part in self._layer:
                part[page] = _content(block)
        return request.input_length - lease.prefix_len

    def check(self, request: TraceRequest, lease: kvd.client.Lease, n_pages: int) -> None:
        """Compare the first pages with the blocks that belong there.

        Raises:
            ChildFailed: one holds another.
        """
        pages = lease.pages[:n_pages].tolist()
        for at, (page, block) in enumerate(zip(pages, request.hash_ids, strict=False)):
            for part in self._layer:
                if (part[page].reshape(-1, WIDTH) != _content(block)).any():
                    raise ChildFailed(
                        f"{self.side}: page {page}, number {at} of its prompt, is not block {block}"
                    )

    def row(self, tree: float, pool: float) -> Measured:
        """What it did; beside what a perfect tree of either size would have found."""
        n_tokens = sum(one.n_tokens for one in self.served)
        waited = [one for one in self.served if one.promoted]
        took = np.array([one.took_ms for one in waited] or [0.0])
        (tier,) = self.daemon.snapshot().tiers
        return {
            "side": self.side,
            "reuse": sum(one.found for one in self.served) / n_tokens,
            "promoted": sum(one.promoted for one in self.served) / n_tokens,
            "tree": tree,
            "pool": pool,
            "waits": len(waited),
            "told_ms": float(np.mean([one.told_ms for one in waited] or [0.0])),
            "waited_ms": float(took.mean()),
            "waited_p99_ms": float(np.percentile(took, 99)),
            "slower": sum(one.took_ms > self.compute_ms(one.promoted) for one in waited),
            "declined": sum(one.declined for one in self.served),
            "unwritten": tier.evicted_unwritten,
            "bad": tier.bad,
        }


def _content(block: int) -> npt.NDArray[np.uint8]:
    """What each token of a block has; no other block has it."""
    digest = blake2b(block.to_bytes(8, "little"), digest_size=WIDTH).digest()
    return np.frombuffer(digest, np.uint8)


async def replay(
    pair: Pair, requests: list[TraceRequest], rate: float, engine_rate: float, told: Told
) -> list[TraceNode]:
    """All requests, one after the other."""
    async with AsyncExitStack() as up:
        nodes = []
        for side, daemon in (("prefill", pair.prefill), ("decode", pair.decode)):
            client = await up.enter_async_context(kvd.client.connect(daemon.client, name=side))
            nodes.append(TraceNode(side, daemon, client, engine_rate))
        prefill, decode = nodes
        for room, request in enumerate(requests, start=1):
            if not room % 50:
                told(f"request {room} of {len(requests)}")
            tokens = np.frombuffer(expand(request), np.int32)
            receive = await decode.receive(room, tokens)
            lease = await prefill.lease(tokens)
            await asyncio.sleep(prefill.compute(request, lease) / rate)
            await prefill.node.hand_over(room, lease=lease)
            await receive.done()
            decode.check(request, receive.lease, len(request.hash_ids))
            await receive.lease.release()
            await lease.release()
        return nodes


def reuse_of(requests: list[TraceRequest], most: int) -> float:
    """Share of the tokens that a perfect tree of so many blocks finds."""
    tree = BlockTree(most)
    found = 0
    for request in requests:
        whole = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        found += tree.serve(whole) * BLOCK_TOKENS
    return found / sum(request.input_length for request in requests)


def run(
    told: Told,
    *,
    trace: Path | None,
    limit: int,
    pool_tokens: int,
    disk_tokens: int,
    rate: float,
    engine_rate: float,
    directory: str | None,
) -> BenchmarkResult:
    """A recorded load through two daemons with disks."""
    pool, disk = pool_tokens // BLOCK_TOKENS, disk_tokens // BLOCK_TOKENS
    requests = [
        request
        for request in (made_trace(limit) if trace is None else read_trace(trace, limit))
        if len(request.hash_ids) < pool  # what never fits is nobody's
    ]
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name:
        p, d = (_settings(f"{name}/disk-of-{side}", pool, disk) for side in ("p", "d"))
        with two_daemons(Path(name), d, prefill=p) as pair:
            nodes = asyncio.run(replay(pair, requests, rate, engine_rate, told))
            tree, alone = (reuse_of(requests, blocks) for blocks in (pool + disk, pool))
            rows = [node.row(tree, alone) for node in nodes]
    title = (
        f"{len(requests)} requests; a pool of {pool_tokens} tokens and a disk of {disk_tokens} at "
        "each node"
    )
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=tuple(goal for row in rows for goal in _goals(row, tree)),
        notes=(
            *NOTES,
            f"what is lacking is computed at {rate:g} tokens a second, by a sleep; a wait is "
            f"compared with {engine_rate:g}",
            "a load that was made" if trace is None else f"the load of {trace.name}",
        ),
    )


def _settings(directory: str, pool: int, disk: int) -> dict[str, str]:
    """Of a daemon with so many pages in its pool, and on its disk."""
    return {
        **SHAPE,
        "pool.pages": str(pool + 1),
        "tiers.disk.directory": directory,
        "tiers.disk.max_moving": "16MiB",
        "tiers.disk.size": f"{disk * OBJECT_BYTES // 1024}KiB",
    }


def _goals(row: Measured, tree: float) -> tuple[Goal, ...]:
    side, found = row["side"], figure(row, "reuse") / tree
    return (
        at_least(f"{side}: tokens found, over a tree of pool and disk together", 0.99, found),
        at_most(f"{side}: waits longer than to compute the same", 0, figure(row, "slower")),
        at_most(f"{side}: bad objects", 0, figure(row, "bad")),
    )


TRACE_OPTION = click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="In Mooncake's format; one is made if not.",
)

command = benchmark(
    "tier_trace",
    run,
    TRACE_OPTION,
    click.option("--limit", default=1500, show_default=True, help="Requests."),
    click.option("--pool-tokens", default=200_000, show_default=True, help="Of each node."),
    click.option("--disk-tokens", default=1_800_000, show_default=True, help="Of each node."),
    click.option("--rate", default=200_000.0, show_default=True, help="Tokens computed a second."),
    click.option(
        "--engine-rate",
        default=20_000.0,
        show_default=True,
        help="Tokens a second that waits are compared with.",
    ),
    click.option("--directory", help="Where the disks are; the usual temporary one if not."),
)
