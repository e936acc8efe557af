"""An engine without an engine: blocks on a device, a daemon with a pool in host memory.

Every part that measures copies has one: real daemon, client and mover; the memory is plain device
memory, so no torch is needed.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import kvd.client
from kvd.client import LayerMemory
from kvd.client.mover.device_lane import DeviceLane
from kvd.device.cuda import Runtime
from kvd.device.cuda_library import load
from tests.gpu.results import PartSkipped
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvd.client import PendingCopy, SyncLease, SyncNode

DEVICE: Final = 0
PAGE_TOKENS: Final = 16
REGISTERED_WITHIN_S: Final = 30.0
COPIED_WITHIN_S: Final = 30.0


class CopyingEngine:
    """Blocks in as many tensors as the pool has layers; a block is a page."""

    def __init__(
        self, node: SyncNode, runtime: Runtime, *, layers: int, piece_bytes: int, blocks: int
    ) -> None:
        self.node = node
        self.runtime = runtime
        self.piece_bytes = piece_bytes
        self.n_blocks = blocks
        self.addresses = [runtime.allocate(DEVICE, blocks * piece_bytes) for _ in range(layers)]
        self.blocks = node.blocks(
            {
                number: LayerMemory(
                    address, (blocks, piece_bytes), (piece_bytes, 1), 1, f"cuda:{DEVICE}"
                )
                for number, address in enumerate(self.addresses)
            },
            block_size=PAGE_TOKENS,
        )
        # Orders wait behind marks of a stream that is idle: what computes meanwhile, in whichever
        # stream, has nothing to do with these blocks, and is to be run beside.
        self._idle = runtime.stream(DEVICE)
        self._await_registered()

    @property
    def page_bytes(self) -> int:
        """Of all layers."""
        return len(self.addresses) * self.piece_bytes

    def _await_registered(self) -> None:
        """Until then copies go through a small stage."""
        lane = self.blocks._mover.lane
        assert isinstance(lane, DeviceLane)
        deadline_s = time.monotonic() + REGISTERED_WITHIN_S
        while not lane.is_registered():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the pool was not registered in time")
            time.sleep(0.005)

    def lease(self, pages: int, seed: int = 1) -> SyncLease:
        """So many pages, which nobody gets to share."""
        tokens = np.random.default_rng(seed).integers(0, 2**31, pages * PAGE_TOKENS, np.int32)
        return self.node.lease(tokens, cache=False)

    def save(
        self, lease: SyncLease, blocks: Sequence[int] | NDArray[np.int64], first_page: int = 0
    ) -> PendingCopy:
        """Into pages of the lease that were not written yet, one behind the other."""
        upto = (first_page + len(blocks)) * PAGE_TOKENS
        return self.blocks.begin_save(
            lease,
            {"kv": blocks},
            first_page=first_page,
            upto_tokens=upto,
            after=self.blocks.mark(self._idle),
        )

    def load(
        self, lease: SyncLease, blocks: Sequence[int] | NDArray[np.int64], first_page: int = 0
    ) -> PendingCopy:
        """From pages of the lease."""
        return self.blocks.begin_load(
            lease, {"kv": blocks}, first_page=first_page, after=self.blocks.mark(self._idle)
        )

    def scattered(self, count: int, seed: int = 1) -> NDArray[np.int64]:
        """So many blocks, in no order: no two pieces of a page follow each other."""
        return np.random.default_rng(seed).permutation(self.n_blocks)[:count]

    def paint(self, block: int, value: int) -> None:
        """Every byte of a block, and each layer another."""
        for layer, address in enumerate(self.addresses):
            content = np.full(self.piece_bytes, (value + layer) % 251, np.uint8)
            at = address + block * self.piece_bytes
            self.runtime.copy(at, content.ctypes.data, self.piece_bytes)
        self.runtime.synchronize()

    def is_painted(self, block: int, value: int) -> bool:
        """Whether a block is as ``paint`` makes it."""
        found = np.zeros(self.piece_bytes, np.uint8)
        for layer, address in enumerate(self.addresses):
            at = address + block * self.piece_bytes
            self.runtime.copy(found.ctypes.data, at, self.piece_bytes)
            if not (found == (value + layer) % 251).all():
                return False
        return True

    def close(self) -> None:
        """Give the memory back."""
        self.blocks.close()
        self.runtime.end_stream(self._idle)
        for address in self.addresses:
            self.runtime.free(address)


def device_runtime() -> Runtime:
    """The runtime, with a device.

    Raises:
        PartSkipped: there is none.
    """
    runtime = load()
    if not isinstance(runtime, Runtime):
        raise PartSkipped(runtime.why)
    runtime.use(DEVICE)
    return runtime


@contextlib.contextmanager
def copying_engine(
    *, layers: int, piece_bytes: int, pages: int, blocks: int = 0
) -> Iterator[CopyingEngine]:
    """Such an engine and its daemon, whose pool has so many pages that can be leased."""
    runtime = device_runtime()
    settings = {
        "pool.family": "raw",
        "pool.layers": str(layers),
        "pool.page_size": str(PAGE_TOKENS),
        "pool.page_bytes": str(piece_bytes),
        "pool.pages": str(pages + 1),
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvd-gpu-") as directory,
        one_daemon(Path(directory), settings) as daemon,
        kvd.client.connect_sync(daemon.client, name="engine") as node,
    ):
        engine = CopyingEngine(
            node, runtime, layers=layers, piece_bytes=piece_bytes, blocks=blocks or pages
        )
        try:
            yield engine
        finally:
            engine.close()
