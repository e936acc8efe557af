"""What the daemon is told of marks that are late, so that whoever asks it hears what is waited for.

A mark that comes within ``LATE_S`` costs no word, and most do. Nothing depends on these words: one
that cannot be said is said later, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.errors import KvdError
from kvd.wire.attach import CopyEnds, CopyWaits

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client.mover.pending_copy import PendingCopy
    from kvd.client.rank_words import PendingWord, RankWords
    from kvd.wire.attach import ProcessWord

LATE_S: Final = 1.0
"""Longer than a step of an engine, shorter than it takes somebody to ask."""

MOST_TOLD: Final = 256
"""At a time; behind one mark that does not come wait all that come after it."""

LONGEST_S: Final = 10.0**9
"""As far as the wire is told of: some thirty years."""

MAX_WHY: Final = 512


class LateMarks:
    """The orders of one mover of which the daemon knows that their marks are late."""

    def __init__(self, words: RankWords, device: str) -> None:
        self._words = words
        self._device = device
        self._told: dict[PendingCopy, int] = {}
        """By order, the call that it was told with."""
        self._unsaid: list[tuple[int, PendingCopy, str]] = []
        """Those that were given up, of which the daemon could not be told yet."""
        self._last: PendingWord | None = None

    @property
    def has_more_to_say(self) -> bool:
        """Whether something is to be said again."""
        return bool(self._unsaid)

    def wait(self, copy: PendingCopy, now_s: float) -> None:
        """Its mark has not come yet."""
        waited_s = now_s - copy.ordered_s
        if waited_s < LATE_S or copy in self._told or len(self._told) >= MOST_TOLD:
            return
        if not self._words.hears_waits:
            return
        left_s = min(LONGEST_S, max(0.0, copy.mark_within_s - waited_s))
        call = self._say(
            lambda call: CopyWaits(
                call=call,
                lease=copy.key.lease,
                to_pages=copy.to_pages,
                n_pages=sum(len(part.pages) for part in copy.parts),
                waited_us=int(waited_s * 1e6),
                left_us=int(left_s * 1e6),
                device=self._device,
            )
        )
        if call:
            self._told[copy] = call

    def call_of(self, copy: PendingCopy) -> int:
        """As what it was told; 0: it was not."""
        return self._told.get(copy, 0)

    def begun(self, copy: PendingCopy) -> None:
        """Its mark has come, and the daemon knows."""
        self._told.pop(copy, None)

    def given_up(self, copy: PendingCopy, why: str) -> None:
        """It is not going to begin."""
        call = self._told.pop(copy, 0)
        if call:
            self._unsaid.append((call, copy, why))
            self.say_again()

    def say_again(self) -> None:
        """What could not be said."""
        while self._unsaid:
            told, copy, why = self._unsaid[0]
            waited_us = int(copy.waited_s * 1e6)
            ends = self._say(
                lambda call, told=told, why=why, waited_us=waited_us: CopyEnds(  # type: ignore[misc]
                    call=call, copy=told, is_done=False, waited_us=waited_us, why=why[:MAX_WHY]
                )
            )
            # Where it has hung up, it knows nothing of it any more.
            if not ends and self._words.end is None:
                return
            del self._unsaid[0]

    def _say(self, word: Callable[[int], ProcessWord]) -> int:
        """The call that it was said with; 0 where the daemon is away, or does not read."""
        if self._last is not None and not self._last.is_over:
            self._words.read()  # nobody else may: what it answers must not fill the socket
        try:
            self._last = self._words.begin(word)
        except KvdError:
            return 0
        return self._last.call
