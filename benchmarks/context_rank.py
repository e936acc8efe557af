"""The context-parallel ranks of ``benchmarks cp``: processes with KV of some tokens and no model.

``python -m benchmarks.context_rank RANK RANKS STORE DAEMON...`` is one of as many ranks as daemons,
with a session with its own. All are given the same orders as lines of JSON on the standard input,
and each answers with one line; all end with the input.

Of a prompt every rank has the KV of the tokens that zigzag gives it: their id in every byte, in
plain tensors, as if they had just been computed. What is timed begins when all have it.
"""

from __future__ import annotations

import enum
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import join_ranks
from benchmarks.token_memory import COLOURS
from kvd.client import connect_sync
from kvd.device.collectives import Gather, Pending
from kvd.device.sequence import Sharding, Split, shard
from kvd.device.symmetric import open_arena
from kvd.harness.child import obey

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.client import SyncLease, SyncNode, SyncSend

DEADLINE_S = 60.0


class Strategy(enum.Enum):
    """Who gathers, and who sends."""

    SHARES = "shares"
    """All ranks gather; each sends its share of the pages from its own daemon."""
    ONE = "one"
    """The first rank gathers, and sends everything."""
    NO_GATHER = "no gather"
    """The first rank has everything in its pages already, and sends it: the reference."""


class RankOrder(msgspec.Struct, frozen=True):
    """Hand over the prompt of tokens ``first .. first + tokens`` under ``room``."""

    strategy: Strategy
    room: int
    first: int
    tokens: int


class HandedOver(msgspec.Struct, frozen=True):
    """How it went.

    ``began_s``: when the first rank knew that all have their KV, on the clock of this host.
    ``gathered_s``: how long it took from there until it had all of it in its pages. ``sent_bytes``:
    by the daemon of each rank.
    """

    began_s: float
    gathered_s: float
    sent_bytes: tuple[int, ...]


class OpenHandoff(NamedTuple):
    """What a rank that sends holds of a prompt."""

    lease: SyncLease
    send: SyncSend
    pages: torch.Tensor


class ContextRank:
    """One rank: its daemon, its pool, its part in the gathers."""

    def __init__(self, group: dist.ProcessGroup, node: SyncNode) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._node = node
        self._gather = Gather(group, open_arena(group, torch.device("cpu")))
        pool = node.pool("main")
        self._page_size = pool.page_size
        layers = {place.layer for place in pool.memory.components[0].tensors}
        self._views = [view for layer in sorted(layers) for view in pool.layer(layer)]

    def perform(self, order: RankOrder) -> HandedOver:
        """One prompt, from its KV to the decode side's word. To be called on all ranks."""
        sharding = shard(Split.ZIGZAG, (order.tokens,), self._ranks)
        own = self._kv(order, sharding.rows(self._rank))
        does_send = order.strategy is Strategy.SHARES or self._rank == 0
        handoff = self._open(order) if does_send else None
        if handoff is not None and order.strategy is Strategy.NO_GATHER:
            whole = self._kv(order, np.arange(order.tokens))
            for view in self._views:
                self._write(view, handoff, whole)
        dist.barrier()  # all ranks are here
        began_s = time.monotonic()
        if order.strategy is not Strategy.NO_GATHER:
            self._bring_together(order.strategy, own, sharding, handoff)
        gathered_s = time.monotonic() - began_s
        sent_bytes = 0 if handoff is None else _finish(handoff)
        every = torch.zeros(self._ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(every, torch.tensor([sent_bytes]))
        return HandedOver(began_s, gathered_s, tuple(every.tolist()))

    def _open(self, order: RankOrder) -> OpenHandoff:
        """Both sides have met: only bytes are missing."""
        tokens = np.arange(order.first, order.first + order.tokens, dtype=np.int32)
        lease = self._node.lease(tokens, deadline_s=DEADLINE_S, cache=False)
        send = self._node.send(order.room, tokens, lease=lease, deadline_s=DEADLINE_S)
        send.accepted()
        return OpenHandoff(lease, send, torch.tensor(lease.pages, dtype=torch.int64))

    def _bring_together(
        self, strategy: Strategy, own: torch.Tensor, sharding: Sharding, handoff: OpenHandoff | None
    ) -> None:
        """Gather K and V of every layer, and write them; the next moves while one is written."""

        def start() -> Pending:
            if strategy is Strategy.SHARES:
                return self._gather.start(own, sharding)
            return self._gather.start(own, sharding, to=0)

        moving = start()
        for number, view in enumerate(self._views, start=1):
            following = start() if number < len(self._views) else None
            rows = moving.wait()
            if handoff is not None:
                self._write(view, handoff, rows)
            if following is not None:
                moving = following

    def _write(self, view: torch.Tensor, handoff: OpenHandoff, rows: torch.Tensor) -> None:
        view[handoff.pages] = rows.view(-1, self._page_size, *rows.shape[1:])

    def _kv(self, order: RankOrder, tokens: NDArray[np.int64]) -> torch.Tensor:
        """K or V of a layer: (tokens, heads, head_dim), the ids of the tokens in every byte."""
        values = torch.from_numpy(((order.first + tokens) % COLOURS).astype(np.uint8))
        heads, head_dim = self._views[0].shape[2:]
        return values[:, None, None].expand(-1, heads, head_dim).contiguous()


def _finish(handoff: OpenHandoff) -> int:
    """End it; the bytes that were sent."""
    outcome = handoff.send.finish(b"aux")
    assert outcome.committed, outcome.reason
    handoff.lease.release()
    return outcome.sent_bytes


def main(number: int, ranks: int, store: str, daemons: list[str]) -> None:
    """Be the rank of one of these daemons until the input ends."""
    group = join_ranks(number, ranks, store)
    with connect_sync(daemons[number], name=f"cp-{number}") as node:
        obey(RankOrder, ContextRank(group, node).perform)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
