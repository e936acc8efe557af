"""The session with the daemon: how long any of it may take, and what becomes of it.

A script waits for the daemon when a ``generate`` begins, when its prompt is computed and when it is
over, and each time for a few answers of some tenths of a millisecond. A daemon that does not answer
is left alone for a while, so that the next ones do not wait for it again; one that is gone is
looked for now and then. Nothing here raises where a daemon does not do what it is asked: it is
told, and what was asked for is not had.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

import transformers

from kvd.client import Code, KvdError, connect_sync
from kvd.connectors.transformers.copies import NotWhole, PageCopies
from kvd.connectors.transformers.layout import PoolFit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedConfig

    from kvd.client import SyncLease, SyncNode
    from kvd.connectors.transformers.cache import KvdCache
    from kvd.connectors.transformers.layout import CacheShape

logger = logging.getLogger("kvd.connectors.transformers")

OPEN_WITHIN_S: Final = 1.0
"""The first session is waited for so long."""

AGAIN_WITHIN_S: Final = 0.25
"""Every later one."""

RETRY_S: Final = 1.0
"""A daemon that is not there is looked for so often."""

SILENT_S: Final = 5.0
"""One that has not answered in time is not asked for so long."""

UNFIT_S: Final = 60.0
"""A pool that does not fit is looked at so often: it changes with its daemon's configuration."""

SHORT: Final = frozenset({Code.NO_ROOM.value, Code.TOO_LARGE.value})
"""Of these the daemon has no pages for what was asked."""

BROKEN: Final = (OSError, ValueError, RuntimeError)
"""What sockets raise that were closed under a call, and torch where memory is short."""


class CacheLink:
    """The session of one model with the daemon of this node, while there is one.

    Args:
        endpoint: of the daemon; None: that of this node.
        name: what tables call this process.
        pool: the name of its pool.
        config: of the model.
        shape: what the model's cache holds.
    """

    def __init__(
        self,
        endpoint: str | None,
        *,
        name: str,
        pool: str,
        config: PreTrainedConfig,
        shape: CacheShape,
    ) -> None:
        self._endpoint, self._name, self._pool = endpoint, name, pool
        self._config, self.shape = config, shape
        self._lock = threading.RLock()
        self._node: SyncNode | None = None
        self._copies: PageCopies | None = None
        self._not_before_s = 0.0
        self._was_lost = False
        """The last one asked in a session that was over: another one may be had at once."""
        self._said = ""
        self._short: set[str] = set()
        self.why_away = ""
        """Why nothing was had of the daemon the last time; empty: it was."""

    def open(self) -> None:
        """Open the first session, if there is a daemon.

        Raises:
            KvdError: ``layout-mismatch``: its pool is not for this model.
        """
        with self._lock:
            try:
                self._connect(OPEN_WITHIN_S)
            except KvdError as error:
                if error.code == Code.LAYOUT_MISMATCH.value:
                    raise
                self._failed(error)

    def close(self) -> None:
        """Leave; repeatable."""
        with self._lock:
            self._leave()

    def load(self, ids: torch.Tensor, namespace: str) -> KvdCache | None:
        """A cache with what the node has of them, but the last one; None: nobody can be asked.

        Args:
            ids: (1, tokens).
            namespace: whose KV it must be.
        """
        with self._lock:
            cache = self._load(ids, namespace)
            return self._load(ids, namespace) if cache is None and self._was_lost else cache

    def _load(self, ids: torch.Tensor, namespace: str) -> KvdCache | None:
        with self._asked() as asked:
            if asked is None:
                return None
            node, copies = asked
            tokens = ids[0].cpu().numpy()
            lease = node.lease(tokens, hold="prefix", namespace=namespace, deadline_s=0)
            cache = copies.empty()
            # The last token is computed in any case, for what comes behind it.
            most = (ids.shape[1] - 1) // copies.page_size * copies.page_size
            n_tokens = min(lease.prefix_len, most)
            try:
                if n_tokens:
                    cache = copies.load(lease, n_tokens)
                    cache.loaded(ids[:, :n_tokens])
            except NotWhole:
                cache = copies.empty()
            finally:
                lease.leave()
            return cache
        return None

    def save(self, cache: KvdCache, namespace: str) -> int:
        """Have whole pages of what was computed cached.

        Returns:
            How many tokens are cached by this that were not before.
        """
        with self._lock:
            saved = self._save(cache, namespace)
            return self._save(cache, namespace) if self._was_lost else saved

    def _save(self, cache: KvdCache, namespace: str) -> int:
        with self._asked() as asked:
            if asked is None:
                return 0
            node, copies = asked
            n_tokens = cache.n_tokens // copies.page_size * copies.page_size
            if n_tokens <= cache.saved_tokens:
                return 0
            step = copies.step_tokens()
            lease = node.lease(
                cache.tokens()[:n_tokens], namespace=namespace, deadline_s=0, step_tokens=step
            )
            is_whole = False
            try:
                if lease.prefix_len < n_tokens:
                    self._slide(lease, n_tokens, step)
                    copies.save(lease, cache, n_tokens)
                is_whole = True
            finally:
                lease.leave(() if is_whole else None)
            cache.saved_tokens = n_tokens
            return n_tokens - lease.prefix_len
        return 0

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 while no pool is known."""
        return 0 if self._copies is None else self._copies.page_size

    def _slide(self, lease: SyncLease, n_tokens: int, step: int) -> None:
        """To the end: what stays mapped of a window is what the cache has."""
        if step:
            for upto in (*range(lease.prefix_len + step, n_tokens, step), n_tokens):
                lease.slide(upto)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[tuple[SyncNode, PageCopies] | None]:
        """The session, if there is one; what goes wrong with it is told, and ends here."""
        self._was_lost = False
        here = None
        with self._told_of():
            here = self._here()
        with self._told_of():
            yield here
            if here is not None:
                self._heard()

    @contextlib.contextmanager
    def _told_of(self) -> Iterator[None]:
        try:
            yield
        except KvdError as error:
            self._failed(error)
        except NotWhole as error:
            self.why_away = str(error)
        except BROKEN as error:
            self._leave()
            self._told(f"the session with the daemon broke: {error}")

    def _here(self) -> tuple[SyncNode, PageCopies] | None:
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            return None
        if self._node is not None and self._node.end is not None:
            self._leave()
        if self._node is None:
            self._connect(AGAIN_WITHIN_S)
        if self._node is None or self._copies is None:
            return None
        self.why_away = ""
        return self._node, self._copies

    def _connect(self, within_s: float) -> None:
        node = connect_sync(
            self._endpoint,
            name=self._name,
            kind=f"transformers {transformers.__version__}",
            within_s=within_s,
            on_unreachable="miss",
        )
        try:
            fit = PoolFit(self.shape, node.pool(self._pool))
        except BaseException:
            node.close()
            raise
        self._node, self._copies = node, PageCopies(self._config, fit)

    def _leave(self) -> None:
        node, self._node, self._copies = self._node, None, None
        if node is not None:
            with contextlib.suppress(KvdError, *BROKEN):
                node.close()

    def _failed(self, error: KvdError) -> None:
        if error.code in SHORT:
            # It is there, and has no room: a pool for what is usual is the user's to give.
            self.why_away = str(error)
            if error.code not in self._short:
                self._short.add(error.code)
                logger.warning("kvd: not everything is cached: %s", error)
            return
        pauses = {Code.DEADLINE.value: SILENT_S, Code.LAYOUT_MISMATCH.value: UNFIT_S}
        if error.code not in pauses and self._node is not None:
            # No lease is to go on: a new session is as good as this one, and there sooner.
            self._leave()
            self._was_lost = True
            return
        self._not_before_s = time.monotonic() + pauses.get(error.code, RETRY_S)
        self._told(str(error))

    def _heard(self) -> None:
        if self._said:
            self._said = ""
            logger.warning("kvd: the node's cache is used again")

    def _told(self, why: str) -> None:
        """Once for each kind of it, until the daemon is there again."""
        self.why_away = why
        if self._said != why.partition(":")[0]:
            self._said = why.partition(":")[0]
            logger.warning("kvd: computing without the node's cache: %s", why)
