"""The session with the daemon: how long any of it may take, and what becomes of it.

SGLang asks from several threads, one for each thing that it does with a store. They share one
session and take turns in it, each for some answers of some tenths of a millisecond; while bytes
move, nobody has the turn. A daemon that does not answer in time is left alone for a while, so that
what comes next does not wait for it again; one that is gone is looked for now and then. Nothing
here raises where a daemon does not do what it is asked: it is told, and what was asked for is not
had.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from kvd.client import Code, KvdError
from kvd.client.mapping import bytes_per_page
from kvd.connectors.daemon_link import AGAIN_WITHIN_S, ConnectorSession, Unserved, read_from_tier
from kvd.connectors.refusals import BROKEN, refused_here
from kvd.connectors.sglang.host_pages import LEAST_PAGE_TOKENS, UnfitHostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.client import EngineBlocks, Node, Pool, SyncLease, SyncNode
    from kvd.connectors.sglang.host_pages import HostPages
    from kvd.connectors.sglang.options import StorageOptions

logger = logging.getLogger("kvd.connectors.sglang")

N = TypeVar("N", bound="Node | SyncNode")

TIER_WITHIN_S: Final = 0.1
"""Pages in a tier below the pool are waited for so long."""


class PagesFit(Generic[N]):
    """A session with a daemon whose pool fits, and memory of SGLang's pages beside it.

    Raises:
        UnfitHostPool: no page of SGLang's is ever one of that pool.
    """

    def __init__(self, node: N, pool: Pool, *, threads: int) -> None:
        if pool.shards:
            raise UnfitHostPool(
                f"pool {pool.name} is in {len(pool.shards)} shards, and a page of SGLang's is in "
                "one: each rank takes pages of its own, with tp_size = 1"
            )
        self.node = node
        self.page_size = pool.page_size
        part = pool.memory.components[0]
        self.component = part.name
        """Of the pool: all of a page is in it."""
        self.page_bytes = sum(map(bytes_per_page, part.tensors))
        self._pool, self._threads = pool.name, threads
        self._blocks: dict[str, EngineBlocks] = {}

    @classmethod
    def fitted(cls, node: N, options: StorageOptions, pages: HostPages) -> Self:
        """The user's pool, with these pages beside it.

        Raises:
            KvdError: ``layout-mismatch``: no page of SGLang's is ever one of that pool.
        """
        try:
            fit = cls(node, node.pool(options.pool), threads=options.copy_threads)
            fit.blocks(pages)
        except UnfitHostPool as error:
            raise refused_here(Code.LAYOUT_MISMATCH, str(error)) from None
        return fit

    def blocks(self, pages: HostPages) -> EngineBlocks:
        """Those of a host pool, given to the mover when they are first asked for.

        Raises:
            UnfitHostPool: they are larger than the pool's pages.
        """
        found = self._blocks.get(pages.name)
        if found is None:
            groups = pages.groups(self.page_bytes)
            found = self._blocks[pages.name] = self.node.blocks(
                groups,
                block_size=self.page_size,
                pool=self._pool,
                threads=self._threads,
            )
        return found

    def close_blocks(self) -> None:
        """Wait for what moves, and give nothing of SGLang's memory to the mover any more."""
        for blocks in self._blocks.values():
            blocks.close()
        self._blocks.clear()


class StorageSession(PagesFit["SyncNode"]):
    """The same, with what a store asks."""

    def matched(self, keys: Sequence[bytes], namespace: str) -> int:
        """How many pages are there from the first one on; those in a tier are brought."""
        asked = self.node.begin_match(keys=keys, namespace=namespace)
        found = asked.result(AGAIN_WITHIN_S)
        there = None
        if found.tier_tokens:
            there = read_from_tier(
                self.node, keys=keys, namespace=namespace, within_s=TIER_WITHIN_S
            )
        return (found.tokens if there is None else there) // self.page_size

    def each_matched(self, prompts: Sequence[Sequence[bytes]], namespace: str) -> list[bool]:
        """Of several prompts, of which anything is there."""
        asked = [self.node.begin_match(keys=keys, namespace=namespace) for keys in prompts]
        return [call.result(AGAIN_WITHIN_S).tokens > 0 for call in asked]

    def held(self, keys: Sequence[bytes], namespace: str) -> SyncLease:
        """A lease of what is there of them, which takes no pages."""
        return self.node.lease(keys=keys, hold="prefix", namespace=namespace, deadline_s=0)

    def filled(self, keys: Sequence[bytes], namespace: str) -> SyncLease:
        """A lease with pages for what is not there."""
        return self.node.lease(keys=keys, namespace=namespace, deadline_s=0, tiers="now")


class StorageLink:
    """The session of one rank of an engine with the daemon of this node, while there is one.

    Args:
        name: what tables call this rank.
        options: what the user has set.
        why_over: why nothing of the daemon is to be used any more; empty: it may be.
    """

    def __init__(
        self, name: str, options: StorageOptions, why_over: Callable[[], str] = lambda: ""
    ) -> None:
        self._name, self._options, self._why_over = name, options, why_over
        self._lock = threading.RLock()
        self._session: ConnectorSession[StorageSession] | None = None
        self._is_closed = False
        self._unfit: set[str] = set()

    @property
    def why_away(self) -> str:
        """Why nothing was had of the daemon the last time; empty: it was."""
        return "" if self._session is None else self._session.why_away

    @property
    def life(self) -> object:
        """Of which life of which session pages are held now; None: of none."""
        return None if self._session is None else self._session.life

    def open(self, pages: HostPages) -> None:
        """Open the first session for these pages, if there is a daemon.

        Raises:
            KvdError: as ``ConnectorSession.open``.
        """
        with self._lock:
            self._session = ConnectorSession(
                self._options.endpoint or None,
                name=self._name,
                kind="sglang",
                fit=lambda node: StorageSession.fitted(node, self._options, pages),
                expects=expected_of(pages),
                logger=logger,
                without="pages are neither found nor stored",
            )
            try:
                self._session.open()
            except KvdError as error:
                raise with_section(error, pages) from None

    def close(self) -> None:
        """Leave; repeatable."""
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()

    @contextlib.contextmanager
    def asked(self) -> Iterator[StorageSession | None]:
        """The turn in the session, if there is one; what goes wrong is told, and ends here."""
        with self._lock:
            self._end_if_over()
            if self._session is None or self._is_closed:
                yield None
                return
            with self._session.asked() as here:
                try:
                    yield None if here is None else here[1]
                except UnfitHostPool as error:
                    # One that lies beside others, which fit: those are served.
                    self._told_unfit(str(error))
                    raise Unserved(str(error)) from None

    def _end_if_over(self) -> None:
        why = "" if self._is_closed else self._why_over()
        if why:
            self.close()
            logger.warning("kvd: pages are neither found nor stored: %s", why)

    def lost(self, error: KvdError) -> None:
        """A copy was not made, and why; for whoever has not the turn."""
        with self._lock:
            if self._session is not None:
                self._session.failed(error)

    def left(self, leases: Sequence[SyncLease], *, is_saved: bool = False) -> None:
        """Give leases back, whatever has become of their session."""
        with self._lock:
            for lease in leases:
                with contextlib.suppress(KvdError, *BROKEN):
                    lease.leave(() if is_saved else None)

    def _told_unfit(self, why: str) -> None:
        """Once for each host pool."""
        kind = why.partition(":")[0]
        if kind not in self._unfit:
            self._unfit.add(kind)
            logger.warning("kvd: not everything is stored: %s", why)


def expected_of(pages: HostPages) -> dict[str, str | int]:
    """What a pool must be for these pages, as ``connect`` takes it."""
    if pages.page_size >= LEAST_PAGE_TOKENS:
        return {"family": "raw", "page_size": pages.page_size}
    return {"family": "raw"}


def with_section(error: KvdError, pages: HostPages) -> KvdError:
    """The same, with the pool that would fit where it is that which does not."""
    if error.code != Code.LAYOUT_MISMATCH.value:
        return error
    told = f"{error}; a pool for these pages:\n{pages.section()}"
    return refused_here(Code.LAYOUT_MISMATCH, told)
