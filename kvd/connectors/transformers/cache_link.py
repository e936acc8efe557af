"""Between one model and the daemon of its node: what is asked of it, and when.

A script waits for the daemon when a ``generate`` begins, when its prompt is computed and when it is
over, and each time for a few answers of some tenths of a millisecond (``ConnectorSession``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import transformers

from kvd.connectors.daemon_link import ConnectorSession, prefix_of
from kvd.connectors.transformers.copies import NotWhole, PageCopies
from kvd.connectors.transformers.layout import PoolFit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedConfig

    from kvd.client import SyncLease
    from kvd.client.tokens import TokenIds
    from kvd.connectors.transformers.cache import KvdCache
    from kvd.connectors.transformers.layout import CacheShape

logger = logging.getLogger("kvd.connectors.transformers")

R = TypeVar("R")


class AnswerCounts(msgspec.Struct):
    """What became of the prompts of one model. ``alone``: of those without kvd how many, by why."""

    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    saved_tokens: int = 0
    alone: Counter[str] = msgspec.field(default_factory=Counter)


class SavedPrefix(NamedTuple):
    """So many tokens are cached; ``new``: of them those that were not before."""

    upto: int
    new: int


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
        self._is_left = False
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
            KvdError: as ``ConnectorSession.open``.
        """
        with self._lock:
            self._link.open()

    def begin(self) -> None:
        """Ask it from now on, also once it was left."""
        with self._lock:
            self._is_left = False

    def close(self) -> None:
        """Leave, and ask no more, whoever is in the middle of a ``generate``; repeatable."""
        with self._lock:
            self._is_left = True
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

        def filled(copies: PageCopies, lease: SyncLease) -> KvdCache:
            # The last token is computed in any case, for what comes behind it.
            most = (ids.shape[1] - 1) // copies.page_size * copies.page_size
            n_tokens = min(lease.prefix_len, most)
            if not n_tokens:
                return copies.empty()
            try:
                cache = copies.load(lease, n_tokens)
            except NotWhole:
                return copies.empty()
            cache.loaded(ids[:, :n_tokens])
            return cache

        return self.read(ids[0].cpu().numpy(), namespace, filled)

    def save(self, cache: KvdCache, namespace: str) -> int:
        """Have whole pages of what was computed cached.

        Returns:
            How many tokens are cached by this that were not before.
        """
        page_size = self.page_size
        if page_size and cache.n_tokens // page_size * page_size <= cache.saved_tokens:
            return 0

        def fill(copies: PageCopies, lease: SyncLease, n_tokens: int) -> None:
            copies.save(lease, cache, n_tokens)

        saved = self.write(cache.tokens(), namespace, fill)
        if saved is None:
            return 0
        cache.saved_tokens = saved.upto
        return saved.new

    def read(
        self,
        tokens: TokenIds,
        namespace: str,
        use: Callable[[PageCopies, SyncLease], R],
    ) -> R | None:
        """What ``use`` makes of a lease on what the node has of them; None: nobody can be asked."""

        def ask() -> R | None:
            with self._link.asked() as asked:
                if asked is None:
                    return None
                node, copies = asked
                lease = prefix_of(node, tokens, namespace)
                try:
                    return use(copies, lease)
                finally:
                    lease.leave()
            return None

        return self._tried(ask)

    def write(
        self,
        tokens: TokenIds,
        namespace: str,
        fill: Callable[[PageCopies, SyncLease, int], None],
    ) -> SavedPrefix | None:
        """Have whole pages of them cached; None: they are not.

        Args:
            tokens: from the start of a prompt.
            namespace: whose KV it is.
            fill: writes what a lease's prefix does not have of so many tokens.
        """

        def ask() -> SavedPrefix | None:
            with self._link.asked() as asked:
                if asked is None:
                    return None
                node, copies = asked
                n_tokens = len(tokens) // copies.page_size * copies.page_size
                step = copies.step_tokens()
                lease = node.lease(
                    tokens[:n_tokens], namespace=namespace, deadline_s=0, step_tokens=step
                )
                is_whole = False
                try:
                    if lease.prefix_len < n_tokens:
                        self._slide(lease, n_tokens, step)
                        fill(copies, lease, n_tokens)
                    is_whole = True
                finally:
                    lease.leave(() if is_whole else None)
                return SavedPrefix(n_tokens, n_tokens - lease.prefix_len)
            return None

        return self._tried(ask) if len(tokens) >= max(1, self.page_size) else None

    def _tried(self, ask: Callable[[], R | None]) -> R | None:
        """Where the session was over, a new one is asked at once."""
        with self._lock:
            if self._is_left:
                return None
            found = ask()
            return ask() if found is None and self._link.was_lost else found

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 while no pool is known."""
        return 0 if self._link.fit is None else self._link.fit.page_size

    def _slide(self, lease: SyncLease, n_tokens: int, step: int) -> None:
        """To the end: what stays mapped of a window is what the cache has."""
        if step:
            for upto in (*range(lease.prefix_len + step, n_tokens, step), n_tokens):
                lease.slide(upto)
