"""The ranks of a measurement: children that are one group of torch, over gloo on this host.

Each is ``python -m MODULE RANK RANKS STORE ...``, and joins the others with ``join_ranks``.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch
import torch.distributed as dist

from kvd.harness.child import Child

if TYPE_CHECKING:
    import msgspec

A = TypeVar("A")

TIMEOUT: Final = timedelta(seconds=180)
# What one rank takes of the other's cores must not decide: one thread each.
VARIABLES: Final = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class Ranks:
    """All of them, from their parent's side."""

    def __init__(self, module: str, ranks: int, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        store = str(Path(self._directory.name) / "store")
        self._children = [
            Child(module, str(rank), str(ranks), store, *arguments, environment=VARIABLES)
            for rank in range(ranks)
        ]

    def tell(self, order: msgspec.Struct) -> None:
        """Hand over an order to each; ``hear`` their answers."""
        for child in self._children:
            child.tell(order)

    def hear(self, kind: type[A]) -> list[A]:
        """The answer of each.

        Raises:
            ChildFailed: a rank ended instead.
        """
        return [child.hear(kind) for child in self._children]

    def stop(self) -> None:
        """End them, and wait for their end."""
        for child in self._children:
            child.stop()
        self._directory.cleanup()


def join_ranks(rank: int, ranks: int, store: str) -> dist.ProcessGroup:
    """Be one of them: the group of all."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD
