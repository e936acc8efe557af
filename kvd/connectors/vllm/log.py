"""What the connector says in the engine's log, by the logger ``kvd.connectors.vllm``.

One line for a change, never one for a request: requests that were computed after all are counted,
and told of together. The how-to lists the lines.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("kvd.connectors.vllm")

TOLD_EVERY_S: Final = 10.0
"""Between two lines about requests that were computed after all, or about one kind of bug."""


class ReasonTally:
    """How often something happened, by why; told of together.

    Args:
        words: of the line: how many, of the last so many seconds, and the reasons.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._counts: Counter[str] = Counter()
        self._from_s = 0.0

    def add(self, why: str, now_s: float) -> None:
        """Once more."""
        if not self._counts:
            self._from_s = now_s
        self._counts[why] += 1

    def tell(self, now_s: float, *, is_last: bool) -> None:
        """Tell of it, if it is time to."""
        if not self._counts or (now_s - self._from_s < TOLD_EVERY_S and not is_last):
            return
        counts, self._counts = self._counts, Counter()
        reasons = "; ".join(f"{n}: {why}" for why, n in counts.most_common())
        logger.warning(self._words, counts.total(), now_s - self._from_s, reasons)


class ConnectorLog:
    """What was said, so that it is not said again.

    Args:
        now_s: a clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._said: dict[str, str] = {}
        self._alone = ReasonTally(
            "%d requests of the last %.0f s went on without kvd, and were computed: %s"
        )
        self._unmet = ReasonTally(
            "%d prompts of the last %.0f s did not get what another node was to send, and what is "
            "not cached here was computed: %s"
        )
        self._bugs_until_s: dict[str, float] = {}

    def changed(self, subject: str, level: int, message: str) -> None:
        """Something is otherwise than when it was last spoken of; said again it is no change."""
        if self._said.get(subject) != message:
            self._said[subject] = message
            logger.log(level, "%s", message)

    def alone(self, why: str) -> None:
        """A request goes on without kvd."""
        self._alone.add(why, self._now_s())

    def unmet(self, why: str) -> None:
        """What another node was to send does not come."""
        self._unmet.add(why, self._now_s())

    def tell(self, *, is_last: bool = False) -> None:
        """Tell of those requests, if it is time to."""
        now_s = self._now_s()
        self._alone.tell(now_s, is_last=is_last)
        self._unmet.tell(now_s, is_last=is_last)

    def bug(self, where: str, error: BaseException) -> None:
        """A mistake of the connector's own, with its traceback; the engine goes on without kvd."""
        now_s = self._now_s()
        if now_s < self._bugs_until_s.get(where, now_s):
            return
        self._bugs_until_s[where] = now_s + TOLD_EVERY_S
        logger.error(
            "a bug in kvd's connector (%s): requests under way are computed without kvd",
            where,
            exc_info=error,
        )
