"""The ranks of one engine: processes that compute together, over gloo on loopback.

An engine forks its other ranks once the model is built, so all have the same weights and nothing is
loaded twice. It must have one thread then, because a fork copies no other. The forked ranks end
with it, and it ends with the first of them: whoever waits for a rank that is gone hears so.

Every rank gets every request: rank 0 has it from the demo and spreads it, and gathers what they
answer. Messages among them are bytes; tensors go as they are.
"""

from __future__ import annotations

import datetime
import os
import socket

import torch
import torch.distributed as dist

from kvd.demo.processes import end_with_parent

LOOPBACK = "127.0.0.1"
IDLE = datetime.timedelta(hours=1)
"""How long a rank waits for the next request. That another has ended is noticed at once."""


class Group:
    """All ranks as one of them sees them. A single one talks to nobody."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = rank
        self.ranks = ranks

    @property
    def all(self) -> dist.ProcessGroup:
        """As torch knows them. There must be several."""
        world = dist.group.WORLD
        assert world is not None, "a single rank is of no group"
        return world

    def spread(self, message: bytes, *, source: int = 0) -> bytes:
        """What ``source`` has, on every rank; what the others pass is ignored."""
        if self.ranks == 1:
            return message
        size = torch.tensor([len(message)])
        dist.broadcast(size, source)
        body = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source and message:
            body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(body, source)
        return body.numpy().tobytes()

    def gathered(self, message: bytes) -> list[bytes]:
        """What each rank has, on every rank."""
        return [self.spread(message, source=rank) for rank in range(self.ranks)]

    def numbers(self, number: int) -> list[int]:
        """The number of each rank, on every rank."""
        if self.ranks == 1:
            return [number]
        found = torch.zeros(self.ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(found, torch.tensor([number]))
        return found.tolist()

    def spread_tensor(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        """The tensor of ``source``, on every rank; all pass one of its shape and type."""
        if self.ranks > 1:
            dist.broadcast(tensor, source)
        return tensor

    def beside(self, piece: torch.Tensor) -> torch.Tensor:
        """The pieces of all ranks, which are of one shape, along the last dimension."""
        if self.ranks == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.ranks)]
        dist.all_gather(pieces, piece)
        return torch.cat(pieces, dim=-1)


def fork(ranks: int) -> Group:
    """Become so many processes, which meet and all go on from here.

    Raises:
        RuntimeError: they could not meet.
    """
    if ranks == 1:
        return Group()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would copy one of them alone"
    with socket.create_server((LOOPBACK, 0)) as listener:
        rank = next((one for one in range(1, ranks) if os.fork() == 0), 0)
        if rank:
            end_with_parent()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            listener.getsockname()[1],
            is_master=rank == 0,
            master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=IDLE)
    return Group(rank, ranks)
