"""Between one model and the daemon of its node: what is asked of it, and when.

A script waits for the daemon when a ``generate`` begins, when its prompt is computed and when it is
over, and each time for a few answers of some tenths of a millisecond (``ConnectorSession``).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import transformers

from kvd.connectors.daemon_link import ConnectorSession, prefix_of
from kvd.connectors.transformers.copies import NotWhole, PageCopies
from kvd.connectors.transformers.layout import PoolFit

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from kvd.client import SyncLease
    from kvd.connectors.transformers.cache import KvdCache
    from kvd.connectors.transformers.layout import CacheShape

logger = logging.getLogger("kvd.connectors.transformers")


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
        self.shape = shape
        self._lock = threading.RLock()
        self._link = ConnectorSession(
            endpoint,
            name=name,
            kind=f"transformers {transformers.__version__}",
            fit=lambda node: PageCopies(config, PoolFit(shape, node.pool(pool))),
            logger=logger,
            without="computing without the node's cache",
        )

    def open(self) -> None:
        """Open the first session, if there is a daemon.

        Raises:
            KvdError: ``layout-mismatch``: its pool is not for this model.
        """
        with self._lock:
            self._link.open()

    def close(self) -> None:
        """Leave; repeatable."""
        with self._lock:
            self._link.close()

    @property
    def why_away(self) -> str:
        """Why nothing was had of the daemon the last time; empty: it was."""
        return self._link.why_away

    def load(self, ids: torch.Tensor, namespace: str) -> KvdCache | None:
        """A cache with what the node has of them, but the last one; None: nobody can be asked.

        Args:
            ids: (1, tokens).
            namespace: whose KV it must be.
        """
        with self._lock:
            cache = self._load(ids, namespace)
            return self._load(ids, namespace) if cache is None and self._link.was_lost else cache

    def _load(self, ids: torch.Tensor, namespace: str) -> KvdCache | None:
        with self._link.asked() as asked:
            if asked is None:
                return None
            node, copies = asked
            tokens = ids[0].cpu().numpy()
            lease = prefix_of(node, tokens, namespace)
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
            return self._save(cache, namespace) if self._link.was_lost else saved

    def _save(self, cache: KvdCache, namespace: str) -> int:
        with self._link.asked() as asked:
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
        return 0 if self._link.fit is None else self._link.fit.page_size

    def _slide(self, lease: SyncLease, n_tokens: int, step: int) -> None:
        """To the end: what stays mapped of a window is what the cache has."""
        if step:
            for upto in (*range(lease.prefix_len + step, n_tokens, step), n_tokens):
                lease.slide(upto)
