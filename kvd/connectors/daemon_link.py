"""The session of a connector that asks and waits: how long any of it may take, what becomes of it.

It is for who can wait for some tenths of a millisecond, a ``generate`` or a thread of its own, and
not for who steps. A daemon that does not answer is left alone for a while, so that what comes next
does not wait for it again; one that is gone is looked for now and then. Nothing here raises where a
daemon does not do what it is asked: it is told, and what was asked for is not had.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvd.client import Code, KvdError, connect_sync
from kvd.connectors.refusals import BROKEN, is_short, is_users_to_mend

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvd.client import SyncLease, SyncNode
    from kvd.client.tokens import TokenIds

F = TypeVar("F")

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


TIER_WAIT_S: Final = 0.5
"""What lies in a tier below the pool is waited for so long; where its node says that it takes
longer, not at all."""


def prefix_of(node: SyncNode, tokens: TokenIds, namespace: str) -> SyncLease:
    """What is cached of a prompt, locked; what a tier has of it comes into the pool before that.

    Raises:
        KvdError: nobody can say.
    """
    lease = node.lease(tokens, hold="prefix", namespace=namespace, deadline_s=0)
    if not is_worth_waiting(lease):
        return lease
    lease.leave()
    read_from_tier(node, tokens, namespace=namespace, within_s=TIER_WAIT_S)
    return node.lease(tokens, hold="prefix", namespace=namespace, deadline_s=0)


def read_from_tier(
    node: SyncNode,
    tokens: TokenIds | None = None,
    *,
    keys: Sequence[bytes] | None = None,
    namespace: str,
    within_s: float,
) -> int | None:
    """Have what a tier has of a prompt come into the pool; how many tokens of it are there then.

    None: the pool has no room for it.

    Raises:
        KvdError: nobody can say.
    """
    # A lease that takes no pages waits for nothing; one that does, for half of its time.
    deadline_s = 2 * within_s
    try:
        lease = node.lease(tokens, keys=keys, namespace=namespace, deadline_s=deadline_s)
    except KvdError as error:
        if not is_short(error):
            raise
        return None
    n_tokens = lease.prefix_len
    lease.leave()
    return n_tokens


def is_worth_waiting(lease: SyncLease) -> bool:
    """Whether a tier has more of what the lease is of, and has it soon."""
    tiers = lease.tiers
    return tiers.tokens > 0 and tiers.ms <= TIER_WAIT_S * 1e3


class Unserved(Exception):
    """The session is well, and this is not had of it: why."""


class ConnectorSession(Generic[F]):
    """A session with the daemon of this node, while there is one. For one thread at a time.

    Args:
        endpoint: of the daemon; None: that of this node.
        name: what tables call this process.
        kind: what engine it is, and of which version.
        fit: what the pool of a session is for this engine; it raises ``layout-mismatch``.
        expects: as in ``kvd.client.connect``.
        logger: where it is told.
        without: what the engine does while there is none, as in "computing without kvd".
    """

    def __init__(
        self,
        endpoint: str | None,
        *,
        name: str,
        kind: str,
        fit: Callable[[SyncNode], F],
        logger: logging.Logger,
        without: str,
        expects: Mapping[str, str | int] | None = None,
    ) -> None:
        self._endpoint, self._name, self._kind, self._make_fit = endpoint, name, kind, fit
        self._logger, self._without, self._expects = logger, without, expects
        self._node: SyncNode | None = None
        self.fit: F | None = None
        """Of the session that there is."""
        self._not_before_s = 0.0
        self.was_lost = False
        """The last one asked in a session that was over: another one may be had at once."""
        self._said = ""
        self._short: set[str] = set()
        self.why_away = ""
        """Why nothing was had of the daemon the last time; empty: it was."""

    def open(self) -> None:
        """Open the first session, if there is a daemon.

        Raises:
            KvdError: ``layout-mismatch``: its pool is not for this engine; ``bad-request``: there
                is no such pool, or this is no endpoint or name.
        """
        try:
            self._connect(OPEN_WITHIN_S)
        except KvdError as error:
            if is_users_to_mend(error):
                raise
            self.failed(error)

    def close(self) -> None:
        """Leave; repeatable."""
        node, self._node, self.fit = self._node, None, None
        if node is not None:
            with contextlib.suppress(KvdError, *BROKEN):
                node.close()

    @contextlib.contextmanager
    def asked(self) -> Iterator[tuple[SyncNode, F] | None]:
        """The session, if there is one; what goes wrong with it is told, and ends here."""
        self.was_lost = False
        here = None
        with self._told_of():
            here = self._here()
        with self._told_of():
            yield here
            if here is not None:
                self._heard()

    @property
    def life(self) -> object:
        """Of which life of which session what is asked now would be; None: of none."""
        return None if self._node is None or self._node.end is not None else self._node.life

    @contextlib.contextmanager
    def _told_of(self) -> Iterator[None]:
        try:
            yield
        except KvdError as error:
            self.failed(error)
        except Unserved as error:
            self.why_away = str(error)
        except BROKEN as error:
            self.close()
            self._told(f"the session with the daemon broke: {error}")

    def _here(self) -> tuple[SyncNode, F] | None:
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            return None
        if self._node is not None and self._node.end is not None:
            self.close()
        if self._node is None:
            self._connect(AGAIN_WITHIN_S)
        if self._node is None or self.fit is None:
            return None
        self.why_away = ""
        return self._node, self.fit

    def _connect(self, within_s: float) -> None:
        node = connect_sync(
            self._endpoint,
            name=self._name,
            kind=self._kind,
            within_s=within_s,
            on_unreachable="miss",
            expects=self._expects,
        )
        try:
            fit = self._make_fit(node)
        except BaseException:
            node.close()
            raise
        self._node, self.fit = node, fit

    def failed(self, error: KvdError) -> None:
        """What was asked is not had, and why: whether the daemon is asked again, and when."""
        if is_short(error):
            # It is there, and has no room: a pool for what is usual is the user's to give.
            self.why_away = str(error)
            if error.code not in self._short:
                self._short.add(error.code)
                self._logger.warning("kvd: not everything is cached: %s", error)
            return
        pauses = {Code.DEADLINE.value: SILENT_S, Code.LAYOUT_MISMATCH.value: UNFIT_S}
        if error.code not in pauses and self._node is not None:
            # No lease is to go on: a new session is as good as this one, and there sooner.
            self.close()
            self.was_lost = True
            return
        self._not_before_s = time.monotonic() + pauses.get(error.code, RETRY_S)
        self._told(str(error))

    def _heard(self) -> None:
        if self._said:
            self._said = ""
            self._logger.warning("kvd: the node's cache is used again")

    def _told(self, why: str) -> None:
        """Once for each kind of it, until the daemon is there again."""
        self.why_away = why
        if self._said != why.partition(":")[0]:
            self._said = why.partition(":")[0]
            self._logger.warning("kvd: %s: %s", self._without, why)
