"""The daemon's end of an attach socket that answers what a process says of its copies.

It answers at once, or when the test says so, as the test says; and it watches the pool, so that a
byte that moves before it was allowed to, or after it was said to be over, is found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from kvd.client.attachment import Attachment
from kvd.client.lease_key import LeaseKey
from kvd.client.worker import Worker
from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec, Raw
from kvd.pools.build import pool_memory
from kvd.wire.attach import (
    Attached,
    CopyBegins,
    CopyEnds,
    CopyWaits,
    KeepsBlocks,
    Leave,
    RankAnswer,
    Rejected,
)
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS
from tests.support.daemons import one_daemon
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvd.errors import Refusal
    from kvd.wire.attach import ProcessWord
    from tests.support.daemons import Daemon

PAGE, LAYERS, BYTES = 16, 3, 4096
"""Of the pools of pages that are bytes: tokens of a page, and bytes of it in each layer."""

INCARNATION = "00000000000000010000000000000001"


@contextlib.contextmanager
def kept_daemon(directory: Path, *, pages: int) -> Iterator[Daemon]:
    """A daemon with such a pool, in memory that outlives it."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as memory:
        settings = {
            "pool.family": "raw",
            "pool.layers": str(LAYERS),
            "pool.page_bytes": str(BYTES),
            "pool.pages": str(pages),
            "pool.huge_pages": "off",
            "pool.backing": "shm",
            "pool.directory": memory,
        }
        with one_daemon(directory, settings) as daemon:
            yield daemon


def raw_pool(
    *, layers: int = LAYERS, page_bytes: int = BYTES, page_size: int = PAGE, pages: int = 40
) -> PoolSpec:
    """As vLLM has it: a page is bytes."""
    component = Component("kv", layers, Raw(page_bytes), page_size)
    return PoolSpec("main", "raw", PageOrder.PAGE_FIRST, (component,), (pages,))


def mha_pool(*, page_size: int = 16, pages: int = 40, layers: int = 2) -> PoolSpec:
    """As transformers have it: K and V of each layer."""
    component = Component("kv", layers, Mha(2, 8, 8, "float32"), page_size)
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (component,), (pages,))


class WordsDaemon:
    """One process has joined it: ``worker``. ``rules`` refuse a copy, or None lets it begin."""

    def __init__(
        self, spec: PoolSpec, *, rank: int = 0, is_held: bool = False, hears_waits: bool = True
    ) -> None:
        self.regions = build_pool(spec)
        attached = Attached(
            session=7,
            token=b"t" * 16,
            node="node-a",
            incarnation=INCARNATION,
            pools=(pool_memory(spec),),
            hears_waits=hears_waits,
        )
        fds = [os.dup(region.arena.fd) for region in self.regions if region.arena is not None]
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.said: list[ProcessWord | Leave] = []
        self.knows_of_blocks = False
        self.began: dict[int, CopyBegins] = {}
        self.ended: dict[int, CopyEnds] = {}
        self.waits: dict[int, CopyWaits] = {}
        """Those that are not over."""
        self.refuse: Callable[[CopyBegins | CopyEnds], Refusal | None] = lambda _: None
        self._may_answer = threading.Event()
        self._held: list[CopyBegins | CopyEnds] = []
        if not is_held:
            self._may_answer.set()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.worker = Worker(Attachment(theirs, attached, fds), "/nowhere/attach.sock", rank=rank)
        self.incarnation = INCARNATION

    def key(self, lease: int = 1, version: int = 0) -> LeaseKey:
        return LeaseKey(session=7, incarnation=INCARNATION, lease=lease, version=version)

    def hold(self) -> None:
        """Answer nothing more, until ``answer``."""
        self._may_answer.clear()

    def answer(self) -> None:
        """Answer all that was said, and from now on."""
        self._may_answer.set()
        with self._news:
            held, self._held = self._held, []
        for word in held:
            self._reply(word)

    def until(self, condition: Callable[[], object], within_s: float = 5.0) -> None:
        with self._news:
            assert self._news.wait_for(condition, within_s), (self.said, "it did not come")

    def hang_up(self, why: Refusal | None = None) -> None:
        with contextlib.suppress(OSError):
            if why is not None:
                self._sock.send(ATTACH_REPLIES.encode(Rejected(why)))
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._may_answer.set()
        self.worker.close()
        self._sock.close()
        self._thread.join(5)
        for region in self.regions:
            if region.arena is not None:
                region.arena.close()

    def _serve(self) -> None:
        while True:
            try:
                packet = self._sock.recv(65536)
            except OSError:
                return
            if not packet:
                return
            word = ATTACH_REQUESTS.decode(packet)
            if isinstance(word, KeepsBlocks):
                self.knows_of_blocks = True
                self._sock.send(ATTACH_REPLIES.encode(RankAnswer(word.call)))
                continue
            with self._news:
                self.said.append(word)  # type: ignore[arg-type]
                if isinstance(word, CopyWaits):
                    self.waits[word.call] = word
                elif isinstance(word, CopyBegins):
                    self.waits.pop(word.waited, None)
                is_held = not self._may_answer.is_set()
                if is_held and isinstance(word, CopyBegins | CopyEnds):
                    self._held.append(word)
                self._news.notify_all()
            if isinstance(word, CopyWaits) or self._is_given_up(word):
                self._sock.send(ATTACH_REPLIES.encode(RankAnswer(word.call)))
            elif not is_held and isinstance(word, CopyBegins | CopyEnds):
                self._reply(word)

    def _is_given_up(self, word: object) -> TypeGuard[CopyEnds]:
        """Whether that is the end of an order that never began."""
        with self._news:
            found = isinstance(word, CopyEnds) and self.waits.pop(word.copy, None)
            self._news.notify_all()
        return bool(found)

    def _reply(self, word: CopyBegins | CopyEnds) -> None:
        refusal = self.refuse(word)
        with self._news:
            if isinstance(word, CopyBegins):
                if refusal is None:
                    self.began[word.call] = word
            else:
                assert word.copy in self.began, "a copy ends that has not begun"
                assert word.copy not in self.ended, "a copy ends twice"
                self.ended[word.copy] = word
            self._news.notify_all()
        with contextlib.suppress(OSError):
            self._sock.send(ATTACH_REPLIES.encode(RankAnswer(word.call, refusal)))


def numbered(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes that are nowhere else."""
    return rng.integers(0, 256, shape, np.uint8)
