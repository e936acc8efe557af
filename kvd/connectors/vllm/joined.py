"""The session that a worker is of: it is joined and left beside the steps of its engine."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from kvd.client import KvdError
from kvd.connectors.refusals import BROKEN, is_users_to_mend
from kvd.connectors.vllm.beside import BesideTask, in_thread
from kvd.connectors.vllm.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import EngineBlocks, LeaseKey, Worker
    from kvd.connectors.vllm.beside import Start
    from kvd.connectors.vllm.log import ConnectorLog

REJOIN_S: Final = 1.0
"""Between two attempts to join one session."""

LEAVE_S: Final = 10.0
"""Between two lines about copies that are waited for before their blocks are freed."""


class JoinedPool:
    """A session that this process is of, and the engine's blocks as they are moved there."""

    def __init__(
        self, session: Worker, blocks: EngineBlocks, component: str, *, has_rows: bool = False
    ) -> None:
        self.session = session
        self.blocks = blocks
        self.component = component
        self.has_rows = has_rows

    def leave(self) -> None:
        """Copy nothing any more; what has begun is waited for."""
        with contextlib.suppress(KvdError, OSError):
            self.blocks.close()
        with contextlib.suppress(KvdError, OSError):
            self.session.close()


class PoolJoin:
    """Which session this process is of, and the way to the one that it is to be of.

    Args:
        open_pool: joins the session of a token and maps its pool; may take long.
        log: where changes are told.
        now_s: a clock.
        start: has work done beside the step.
    """

    def __init__(
        self,
        open_pool: Callable[[bytes], JoinedPool],
        log: ConnectorLog,
        *,
        now_s: Callable[[], float] = time.monotonic,
        start: Start = in_thread,
    ) -> None:
        self.unfit = ""
        """Why the pool of the session that was to be joined does not fit."""
        self._open_pool = open_pool
        self._log = log
        self._now_s = now_s
        self._start = start
        self._token = b""
        self._joined: JoinedPool | None = None
        self._joining: BesideTask[JoinedPool] | None = None
        self._leaving: list[BesideTask[None]] = []
        """Former sessions, of which a copy may still move."""
        self._next_try_s = now_s()

    def follow(self, token: bytes) -> None:
        """Be of the session of that token from now on; of none, where it is empty."""
        if token != self._token:
            self._token, self.unfit = token, ""
            self._next_try_s = self._now_s()
            joined, self._joined = self._joined, None
            joining, self._joining = self._joining, None
            if joining is not None:
                joining.abandon()
            if joined is not None:
                self._leaving = [task for task in self._leaving if not task.ended()]
                self._leaving.append(BesideTask(joined.leave, start=self._start))
        if self._joining is not None:
            self._take()
        if (
            token
            and self._joined is None
            and self._joining is None
            and not self.unfit
            and self._now_s() >= self._next_try_s
        ):
            self._joining = BesideTask(
                lambda: self._open_pool(token), JoinedPool.leave, self._start
            )
            self._take()

    def comes(self, within_s: float) -> bool:
        """Whether the session that is being joined is so by then."""
        if self._joining is None or not self._joining.ended(within_s):
            return False
        self._take()
        return self._joined is not None

    def of(self, key: LeaseKey) -> JoinedPool | None:
        """Who moves what an order with that key is about; None while, or if, it is not joined."""
        joined = self._joined
        return joined if joined is not None and joined.session.owns(key) else None

    def leave(self) -> None:
        """Be of none, once what has begun is copied: nothing reads or writes blocks behind this."""
        if self._joining is not None:
            self._joining.abandon()
        joined, self._joined, self._joining, self._token = self._joined, None, None, b""
        if joined is not None:
            joined.leave()
        for task in self._leaving:
            while not task.ended(LEAVE_S):
                logger.warning("copies of a former session are waited for")
        self._leaving = []

    def _take(self) -> None:
        joining = self._joining
        if joining is None or not joining.ended():
            return
        self._joining = None
        self._next_try_s = self._now_s() + REJOIN_S
        try:
            self._joined = joining.take()
        except (KvdError, *BROKEN) as error:
            is_unfit = is_users_to_mend(error)
            self.unfit = str(error) if is_unfit else ""
            self._log.changed(
                "join",
                logging.ERROR if is_unfit else logging.WARNING,
                f"nothing is copied: {error}",
            )
        else:
            self._log.changed("join", logging.INFO, "this rank has joined the session")
