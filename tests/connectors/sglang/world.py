"""A host pool as SGLang has it, in numpy, and daemons whose pools are for it."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from kvd.connectors.sglang.chains import PageChain
from kvd.connectors.sglang.host_pages import HostPages
from kvd.connectors.sglang.options import StorageOptions
from kvd.connectors.sglang.page_store import PageStore
from kvd.connectors.sglang.storage_link import StorageLink
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

PAGE_SIZE, LAYERS, ROW_BYTES = 16, 3, 64
PAGES = 64


class PlayedHostPool:
    """Memory of K and V, and what of SGLang's ``HostKVCache`` is read: not SGLang's class."""

    shared_allocation_domain = None
    storage_format_tag = None
    dcp_size = 1
    dtype = "torch.bfloat16"
    page_size = PAGE_SIZE

    def __init__(self, layout="page_first", pages=PAGES, layers=LAYERS) -> None:
        self.layout, self.page_num, self.layers = layout, pages, layers
        tokens = pages * PAGE_SIZE
        inner = (tokens, layers) if layout == "page_first" else (layers, tokens)
        self.memory = np.zeros((2, *inner, ROW_BYTES), np.uint8)

    def page(self, number: int) -> np.ndarray:
        """What lies in it, of all layers."""
        at = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        return self.memory[:, at] if self.layout == "page_first" else self.memory[:, :, at]

    def get_page_buffer_meta(self, indices):
        """As SGLang's says it."""
        addresses, sizes = [], []
        for first in indices.tolist()[::PAGE_SIZE]:
            if self.layout == "page_first":
                parts = [(self.memory[kv, first], PAGE_SIZE * self.layers) for kv in range(2)]
            else:
                parts = [
                    (self.memory[kv, layer, first], PAGE_SIZE)
                    for layer in range(self.layers)
                    for kv in range(2)
                ]
            addresses += [where.ctypes.data for where, _ in parts]
            sizes += [rows * ROW_BYTES for _, rows in parts]
        return addresses, sizes


def fill(pool: PlayedHostPool, blocks, names) -> None:
    """Each page has what only its name has."""
    for block, name in zip(blocks, names, strict=True):
        page = pool.page(block)
        seed = int(name[:8], 16)
        page[...] = np.random.default_rng(seed).integers(0, 256, page.shape, np.uint8)


def is_full_of(pool: PlayedHostPool, blocks, names) -> bool:
    """Whether it has what ``fill`` puts there."""
    other = PlayedHostPool(pool.layout, pool.page_num, pool.layers)
    fill(other, blocks, names)
    return all((pool.page(block) == other.page(block)).all() for block in blocks)


def names_of(count: int, seed: str = "a", before: str = "") -> list[str]:
    """A chain of hashes, each over the one before it."""
    found = []
    for number in range(count):
        before = hashlib.sha256(f"{before} {seed} {number}".encode()).hexdigest()
        found.append(before)
    return found


def settings_for(page_bytes: int, pages: int = 100, **more: str) -> dict[str, str]:
    """The pool that ``HostPages.section`` says."""
    return {
        "pool.family": "raw",
        "pool.layers": "1",
        "pool.page_size": str(PAGE_SIZE),
        "pool.page_bytes": str(page_bytes),
        "pool.pages": str(pages),
        **{f"pool.{key}": value for key, value in more.items()},
    }


@contextlib.contextmanager
def daemon_for(page_bytes: int, pages: int = 100, **more: str) -> Iterator[Daemon]:
    """A daemon with such a pool."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-sgl-") as directory,
        one_daemon(Path(directory), settings_for(page_bytes, pages, **more)) as daemon,
    ):
        yield daemon


class Stored(SimpleNamespace):
    """A host pool, its store and its link; ``blocks`` are pages of it that are free."""

    link: StorageLink
    store: PageStore
    pool: PlayedHostPool

    def save(self, names, before=None, blocks=None) -> bool:
        """As SGLang has pages saved, from the first blocks on."""
        blocks = list(range(len(names))) if blocks is None else blocks
        fill(self.pool, blocks, names)
        return self.store.save(PageChain(names, before), blocks)

    def found(self, names, before=None) -> int:
        """As SGLang asks."""
        return self.store.found(PageChain(names, before))

    def load(self, names, before=None, blocks=None) -> int:
        """As SGLang has pages loaded, into the last blocks; what came is what was saved."""
        if blocks is None:
            blocks = list(range(PAGES - len(names), PAGES))
        for block in blocks:
            self.pool.page(block)[...] = 0
        n_right = self.store.load(PageChain(names, before), blocks)
        assert is_full_of(self.pool, blocks[:n_right], names[:n_right])
        return n_right


@contextlib.contextmanager
def stored(daemon: Daemon, layout="page_first", namespace="m:bf16:1", **more) -> Iterator[Stored]:
    """One rank of an engine."""
    options = StorageOptions(socket=daemon.client)
    link = StorageLink("rank-0", options)
    pool = PlayedHostPool(layout, **more)
    pages = HostPages("kv", pool)
    link.open(pages)
    try:
        yield Stored(link=link, pool=pool, store=PageStore(link, pages, namespace))
    finally:
        link.close()


def held(daemon: Daemon) -> int:
    """Pages that somebody has, or that are locked."""
    pools = daemon.snapshot().pools
    return sum(pool.held_pages + pool.locked_pages + pool.quarantined_pages for pool in pools)


def nothing_is_held(daemon: Daemon) -> None:
    """A lease is left without waiting for it."""
    daemon.wait_for(lambda: held(daemon) == 0, "something is held", 60)
