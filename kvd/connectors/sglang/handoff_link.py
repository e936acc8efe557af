"""The session of one rank for handoffs: an event loop in a thread of its own.

SGLang's scheduler steps, and asks at each step how far its requests are. So everything that waits
is a task on this loop, one for each request, and the scheduler reads what that has written down. A
daemon that is gone ends the tasks that need it, each with a reason; the next request looks for it
anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvd.client import Code, KvdError, Node, connect
from kvd.connectors.daemon_link import OPEN_WITHIN_S
from kvd.connectors.refusals import BROKEN, is_users_to_mend, refused_here
from kvd.connectors.sglang.storage_link import PagesFit, expected_of, with_section

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from kvd.connectors.sglang.host_pages import HostPages
    from kvd.connectors.sglang.options import StorageOptions

T = TypeVar("T")

logger = logging.getLogger("kvd.connectors.sglang")

RETURN_WITHIN_S: Final = 1.0
"""A daemon that has ended is waited for so long by what is asked meanwhile."""

CLOSE_WITHIN_S: Final = 10.0
"""Tasks end so soon once they are given up; the process ends anyway."""


class HandoffLink:
    """The session of one rank with the daemon of its node, while there is one.

    Args:
        name: what tables call this rank.
        options: what the user has set.
        pages: SGLang's, which are copied.
        why_over: why nothing of the daemon is to be used any more; empty: it may be.
    """

    def __init__(
        self,
        name: str,
        options: StorageOptions,
        pages: HostPages,
        why_over: Callable[[], str] = lambda: "",
    ) -> None:
        self._name, self._options, self.pages, self._why_over = name, options, pages, why_over
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvd-handoff", daemon=True)
        self._opening = asyncio.Lock()
        self._node: Node | None = None
        self._fit: PagesFit[Node] | None = None
        self._why_shut = ""

    def start(self) -> None:
        """Open the first session, if there is a daemon.

        Raises:
            KvdError: ``layout-mismatch``: its pool is not for these pages; ``bad-request``: there
                is no such pool, or this is no endpoint.
        """
        self._thread.start()
        try:
            self.begin(self.here()).result()
        except KvdError as error:
            if is_users_to_mend(error):
                self.close()
                raise with_section(error, self.pages) from None
            logger.warning("kvd: no handoff is made until the daemon is there: %s", error)

    def begin(self, task: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the loop."""
        return asyncio.run_coroutine_threadsafe(task, self._loop)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call it on the loop."""
        self._loop.call_soon_threadsafe(call, *args)

    async def here(self) -> PagesFit[Node]:
        """The session of now, opened anew if the last one is over.

        Raises:
            KvdError: there is none, and why.
        """
        async with self._opening:
            if why := self._why_shut or self._why_over():
                raise refused_here(Code.WRONG_STATE, f"kvd hands nothing over here: {why}")
            if self._fit is None or self._fit.node.end is not None:
                await self._leave()
                self._fit = await self._open()
            return self._fit

    def shut(self, why: str) -> None:
        """Wait for what moves, and let go of SGLang's memory; ``open_again`` ends that."""
        self.begin(self._shut(why)).result()

    def open_again(self) -> None:
        """SGLang's memory is there again, where it was."""
        self._why_shut = ""

    def close(self) -> None:
        """Leave the daemon; repeatable."""
        if not self._thread.is_alive():
            return
        self.begin(self._end()).result(CLOSE_WITHIN_S)
        self.call_soon(self._loop.stop)
        self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> PagesFit[Node]:
        options = self._options
        self._node = await connect(
            options.endpoint or None,
            name=self._name,
            kind="sglang",
            return_within_s=RETURN_WITHIN_S,
            within_s=OPEN_WITHIN_S,
            expects=expected_of(self.pages),
        )
        try:
            return PagesFit.fitted(self._node, options, self.pages)
        except BaseException:
            await self._leave()
            raise

    async def _leave(self) -> None:
        node, self._node, self._fit = self._node, None, None
        if node is not None:
            try:
                await node.close()
            except (KvdError, *BROKEN) as error:
                logger.debug("kvd: the session was left: %s", error)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_WITHIN_S / 2)
        await self._leave()

    async def _shut(self, why: str) -> None:
        async with self._opening:
            self._why_shut = why
            if self._fit is not None:
                await asyncio.to_thread(self._fit.close_blocks)
            await self._leave()
