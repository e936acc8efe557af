"""Resets of the cache that the daemon has not done yet: the engine has new weights since.

A reset is a new epoch of the engine's namespace. It may come while nobody can be asked, and its
call may end in an error. So it is remembered until one was answered as done: before that the
namespace is *stale*, and nothing is looked up or saved in it. It is said first in each session, and
again when it fails. Several resets are one, but one behind a call that is under way needs another
call: the daemon may have begun its epoch before the engine had those weights.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.client import KvdError
from kvd.connectors.vllm.sessions import PAUSE_S, RETRY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import PendingCall
    from kvd.connectors.vllm.log import ConnectorLog
    from kvd.connectors.vllm.sessions import DaemonLife, NodeLink

RESET_WITHIN_S: Final = 0.05
"""A reset waits so long for the daemon: no request that comes behind it has to go without."""

OTHER_WEIGHTS: Final = "the engine's weights were changed, and its caches not reset since"
NO_WEIGHTS: Final = "the engine's weights were given away, and none were loaded since"
OLD_BLOCKS: Final = "vLLM's own cache was not reset with kvd's, and has KV of before"

NEEDS_RESET: Final = (
    "the weights of this engine may be changed by {}: what it computes is cached by nobody until "
    "its caches are reset: reset_prefix_cache with reset_connector=true"
)
GIVEN_AWAY: Final = (
    "the weights of this engine are given away by {}: what it computes is cached by nobody until "
    "others are loaded by a call, as reload_weights"
)
OWN_NOT_RESET: Final = (
    "kvd's cache was reset, and vLLM's own was not, since requests have blocks of it: what is "
    "computed is cached by nobody until that is too: reset_prefix_cache, with "
    "reset_running_requests=true, or behind these requests"
)

UNNAMED: Final = ""
"""An engine that does not know its namespace yet."""


class ReplacedWeights:
    """Whether what one engine computes now is of the weights that its namespace stands for.

    Its weights may be changed while it runs, by a call that is heard of. From then on nothing is
    cached until both caches are reset: in vLLM's own there is KV of before, which new prompts go on
    from. Where nothing was computed since they were, as where an engine is paused first, they are.

    Args:
        log: where changes are told.
    """

    def __init__(self, log: ConnectorLog) -> None:
        self._log = log
        self.has_computed = False
        """Whether a step has computed or loaded anything since the caches were reset."""
        self.why_alone = ""
        """Why requests that come are computed without kvd; empty: they are not."""
        self._is_own_reset = True
        """Whether vLLM could reset its own cache when it last tried."""

    def changed(self, by: str) -> bool:
        """The weights are about to be other ones, by what is called so; whether that needs a reset.

        One that was to be heard of before still is.
        """
        if self.has_computed:
            self.why_alone = OTHER_WEIGHTS
            self._log.changed("weights", logging.WARNING, NEEDS_RESET.format(by))
        elif self.why_alone == NO_WEIGHTS:
            self.why_alone = ""
        return self.has_computed

    def given_away(self, by: str) -> None:
        """There are about to be none, by what is called so, until they are changed."""
        self.why_alone = NO_WEIGHTS
        self._log.changed("weights", logging.WARNING, GIVEN_AWAY.format(by))

    def own_reset(self, is_done: bool) -> None:  # noqa: FBT001 - vLLM's word of it
        """VLLM has reset its own cache, or could not."""
        self._is_own_reset = is_done
        if is_done and self.why_alone == OLD_BLOCKS:
            self.why_alone = ""

    def reset(self) -> None:
        """Kvd's is, behind vLLM's own."""
        self.has_computed = not self._is_own_reset
        if self.why_alone == NO_WEIGHTS:
            return
        self.why_alone = ""
        if not self._is_own_reset:
            self.why_alone = OLD_BLOCKS
            self._log.changed("weights", logging.WARNING, OWN_NOT_RESET)


class Resets:
    """Those of one engine.

    Args:
        log: where changes are told.
        now_s: a clock.
    """

    def __init__(self, log: ConnectorLog, now_s: Callable[[], float]) -> None:
        self._log = log
        self._now_s = now_s
        self.due: set[str] = set()
        """Names behind which what is cached may be of former weights."""
        self._call: PendingCall[Any] | None = None
        self._namespace = ""
        """That the call is of."""
        self._asked: tuple[NodeLink, DaemonLife] | None = None
        """The session, and its life, that the call is of."""
        self._is_due_again = False
        """Whether there was a reset of that namespace behind the call."""
        self._next_try_s = now_s()

    def add(self, namespace: str) -> None:
        """There are new weights behind this name."""
        self.due.add(namespace)
        self._is_due_again = self._is_due_again or namespace == self._namespace
        self._next_try_s = self._now_s()

    def name(self, namespace: str) -> None:
        """An engine that was reset before it had a namespace has this one."""
        if UNNAMED in self.due:
            self.due.remove(UNNAMED)
            self.add(namespace)

    def wait(self, look: Callable[[], NodeLink | None]) -> None:
        """Have the daemon do it; give it a moment. ``look`` sees what has come of the session."""
        end_s = time.perf_counter() + RESET_WITHIN_S
        while (
            (link := look()) is not None
            and not link.is_silent
            and self._call is not None
            and time.perf_counter() < end_s
        ):
            time.sleep(PAUSE_S)

    def look(self, link: NodeLink, life: DaemonLife) -> None:
        """Say what is due in this session, in this life, and hear of what was said; never waits."""
        if self._call is not None and self._asked != (link, life):
            self._over()
        if self._call is not None:
            try:
                if link.poll(self._call) is None:
                    return
            except KvdError as error:
                self._failed(error)
            else:
                self._done()
        due = sorted(self.due - {UNNAMED})
        if self._call is None and due and self._now_s() >= self._next_try_s:
            self._namespace, self._asked, self._is_due_again = due[0], (link, life), False
            try:
                self._call = link.ask(link.node.begin_new_epoch, due[0])
            except KvdError as error:
                self._failed(error)

    def _over(self) -> None:
        self._call = self._asked = None
        self._namespace, self._is_due_again = "", False

    def _done(self) -> None:
        if not self._is_due_again:
            self.due.discard(self._namespace)
            self._log.changed(
                "reset", logging.INFO, f"{self._namespace}: nothing of before the reset is found"
            )
        self._over()

    def _failed(self, error: KvdError) -> None:
        self._next_try_s = self._now_s() + RETRY_S
        self._log.changed(
            "reset",
            logging.WARNING,
            f"{self._namespace} was reset, and the daemon has not done it: {error}; requests are "
            f"computed without kvd, and it is said again every {RETRY_S:g} s",
        )
        self._over()
