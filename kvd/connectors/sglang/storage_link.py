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
import time
from typing import TYPE_CHECKING, Final

from kvd.client import Code, KvdError, connect_sync
from kvd.client.mapping import bytes_per_page
from kvd.connectors.sglang.host_pages import LEAST_PAGE_TOKENS, UnfitHostPool
from kvd.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.client import EngineBlocks, Pool, SyncLease, SyncNode
    from kvd.connectors.sglang.host_pages import HostPages
    from kvd.connectors.sglang.options import StorageOptions

logger = logging.getLogger("kvd.connectors.sglang")

OPEN_WITHIN_S: Final = 1.0
"""The first session is waited for so long."""

AGAIN_WITHIN_S: Final = 0.25
"""Every later one, and each answer that no deadline of its own has."""

TIER_WITHIN_S: Final = 0.2
"""Pages in a tier below the pool are waited for half as long."""

RETRY_S: Final = 1.0
"""A daemon that is not there is looked for so often."""

SILENT_S: Final = 5.0
"""One that has not answered in time is not asked for so long."""

UNFIT_S: Final = 60.0
"""A pool that does not fit is looked at so often: it changes with its daemon's configuration."""

SHORT: Final = frozenset({Code.NO_ROOM.value, Code.TOO_LARGE.value})
"""Of these the daemon has no pages for what was asked."""

BROKEN: Final = (OSError, ValueError, RuntimeError)
"""What sockets raise that were closed under a call."""


class StorageSession:
    """A session with a daemon whose pool fits, and SGLang's host pools beside it."""

    def __init__(self, node: SyncNode, pool: Pool, *, threads: int) -> None:
        self.node = node
        self.page_size = pool.page_size
        part = pool.memory.components[0]
        self.component = part.name
        """Of the pool: all of a page is in it."""
        self.page_bytes = sum(map(bytes_per_page, part.tensors))
        self._pool, self._threads = pool.name, threads
        self._blocks: dict[str, EngineBlocks] = {}

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

    def matched(self, keys: Sequence[bytes], namespace: str) -> int:
        """How many pages are there from the first one on; those in a tier are brought."""
        asked = self.node.begin_match(keys=keys, namespace=namespace)
        found = asked.result(AGAIN_WITHIN_S)
        n_tokens = found.tokens
        if found.tier_tokens:
            lease = self.held(keys, namespace, deadline_s=TIER_WITHIN_S)
            n_tokens = lease.prefix_len
            lease.leave()
        return n_tokens // self.page_size

    def each_matched(self, prompts: Sequence[Sequence[bytes]], namespace: str) -> list[bool]:
        """Of several prompts, of which anything is there."""
        asked = [self.node.begin_match(keys=keys, namespace=namespace) for keys in prompts]
        return [call.result(AGAIN_WITHIN_S).tokens > 0 for call in asked]

    def held(self, keys: Sequence[bytes], namespace: str, *, deadline_s: float = 0) -> SyncLease:
        """A lease of what is there of them, which takes no pages."""
        return self.node.lease(keys=keys, hold="prefix", namespace=namespace, deadline_s=deadline_s)

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
        self._session: StorageSession | None = None
        self._first: HostPages | None = None
        self._not_before_s = 0.0
        self._said = ""
        self._partly: set[str] = set()
        self._is_closed = False
        self.why_away = ""
        """Why nothing was had of the daemon the last time; empty: it was."""

    def open(self, pages: HostPages) -> None:
        """Open the first session for these pages, if there is a daemon.

        Raises:
            KvdError: ``layout-mismatch``: its pool is not for them.
        """
        with self._lock:
            self._first = pages
            try:
                self._connect(OPEN_WITHIN_S)
            except KvdError as error:
                if error.code == Code.LAYOUT_MISMATCH.value:
                    raise
                self._failed(error)

    def close(self) -> None:
        """Leave; repeatable."""
        with self._lock:
            self._is_closed = True
            self._leave()

    @contextlib.contextmanager
    def asked(self) -> Iterator[StorageSession | None]:
        """The turn in the session, if there is one; what goes wrong is told, and ends here."""
        with self._lock:
            here = None
            with self._told_of():
                here = self._here()
            with self._told_of():
                yield here
                if here is not None:
                    self._heard()

    def lost(self, error: KvdError) -> None:
        """A copy was not made, and why; for whoever has not the turn."""
        with self._lock:
            self._failed(error)

    def left(self, leases: Sequence[SyncLease], *, is_saved: bool = False) -> None:
        """Give leases back, whatever has become of their session."""
        with self._lock:
            for lease in leases:
                with contextlib.suppress(KvdError, *BROKEN):
                    lease.leave(() if is_saved else None)

    @contextlib.contextmanager
    def _told_of(self) -> Iterator[None]:
        try:
            yield
        except KvdError as error:
            self._failed(error)
        except UnfitHostPool as error:
            # One that lies beside others, which fit: those are served.
            self._told_once(str(error))
        except BROKEN as error:
            self._leave()
            self._told(f"the session with the daemon broke: {error}")

    def _here(self) -> StorageSession | None:
        why = self._why_over()
        if why and not self._is_closed:
            self.close()
            self._told(why)
        if self._is_closed or time.monotonic() < self._not_before_s:
            return None
        if self._session is not None and self._session.node.end is not None:
            self._leave()
        if self._session is None and self._first is not None:
            self._connect(AGAIN_WITHIN_S)
        if self._session is not None:
            self.why_away = ""
        return self._session

    def _connect(self, within_s: float) -> None:
        assert self._first is not None
        expects: dict[str, str | int] = {"family": "raw"}
        if self._first.page_size >= LEAST_PAGE_TOKENS:
            expects["page_size"] = self._first.page_size
        try:
            node = connect_sync(
                self._options.endpoint or None,
                name=self._name,
                kind="sglang",
                within_s=within_s,
                on_unreachable="miss",
                expects=expects,
            )
        except KvdError as error:
            if error.code == Code.LAYOUT_MISMATCH.value:
                raise self._unfit(str(error)) from None
            raise
        try:
            session = StorageSession(
                node, node.pool(self._options.pool), threads=self._options.copy_threads
            )
            session.blocks(self._first)
        except UnfitHostPool as error:
            node.close()
            raise self._unfit(str(error)) from None
        except BaseException:
            node.close()
            raise
        self._session = session

    def _unfit(self, why: str) -> KvdError:
        assert self._first is not None
        told = f"{why}; a pool for these pages:\n{self._first.section()}"
        return KvdError(Refusal(Code.LAYOUT_MISMATCH, told, side="client"))

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(KvdError, *BROKEN):
                session.node.close()

    def _failed(self, error: KvdError) -> None:
        if error.code in SHORT:
            # It is there, and has no room: a pool for what is usual is the user's to give.
            self._told_once(str(error))
            return
        pauses = {Code.DEADLINE.value: SILENT_S, Code.LAYOUT_MISMATCH.value: UNFIT_S}
        if error.code not in pauses and self._session is not None:
            self._leave()
        self._not_before_s = time.monotonic() + pauses.get(error.code, RETRY_S)
        self._told(str(error))

    def _told_once(self, why: str) -> None:
        """Of a part of what was asked; once for each kind of it."""
        self.why_away = why
        kind = why.partition(":")[0]
        if kind not in self._partly:
            self._partly.add(kind)
            logger.warning("kvd: not everything is stored: %s", why)

    def _heard(self) -> None:
        if self._said:
            self._said = ""
            logger.warning("kvd: the node's pool is used again")

    def _told(self, why: str) -> None:
        """Once for each kind of it, until the daemon is there again."""
        self.why_away = why
        if self._said != why.partition(":")[0]:
            self._said = why.partition(":")[0]
            logger.warning("kvd: pages are neither found nor stored: %s", why)
