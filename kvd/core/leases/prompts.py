"""Prompts that engines have told: a later request names one, and sends what has come since.

A scheduler asks about the same prompt many times: whether it is cached, for a lease, for a send.
With a number in place of its tokens a question about 32,000 of them is some bytes long. What is
kept here is a copy for reading, of one session: it locks no page, and the oldest one goes where
the bounds are met, those of the session or those of all together. Its engine hears
``prompt-unknown`` then, and tells it anew.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from mypy_extensions import mypyc_attr

from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Tokens, count

MOST_PROMPTS: Final = 1024
"""Of one session."""

MOST_PROMPT_BYTES: Final = 32 * 2**20
"""Of one session: 8 million tokens."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ToldPrompts:
    """The prompts of one session, by the numbers that its engine gave them.

    ``n_bytes`` is their sum. Invariant: at most ``MOST_PROMPTS``, and ``MOST_PROMPT_BYTES`` but for
    a single longer one.
    """

    __slots__ = ("_budget", "by_number", "n_bytes")

    def __init__(self, budget: PromptBudget | None = None) -> None:
        self.by_number: OrderedDict[int, Tokens] = OrderedDict()
        """The one that was used last at the end."""
        self.n_bytes = 0
        self._budget = PromptBudget(MOST_PROMPT_BYTES) if budget is None else budget
        self._budget.sessions.append(self)

    def told(self, number: int, known_tokens: int, more: Tokens, *, most: int) -> Tokens | Refusal:
        """The prompt: what is kept of it up to ``known_tokens``, then ``more``; kept from now on.

        ``most``: tokens of a prompt.
        """
        kept = self.by_number.get(number, NO_TOKENS)
        if not 0 <= known_tokens <= count(kept):
            return Refusal(
                Code.PROMPT_UNKNOWN,
                f"{count(kept)} tokens are kept here of prompt {number}, which goes on after "
                f"{known_tokens}: tell it from its start",
                numbers={"kept": count(kept), "known_tokens": known_tokens},
            )
        n_tokens = known_tokens + count(more)
        if n_tokens > most:
            return Refusal(
                Code.TOO_LARGE,
                f"prompt {number} has {n_tokens} tokens, the limit here is {most}: raise "
                "limits.max_prompt_tokens or shorten the prompt",
                numbers={"tokens": n_tokens, "limit": most},
            )
        tokens = kept
        if more or known_tokens < count(kept):
            tokens = Tokens(kept[: known_tokens * ID_BYTES] + more) if known_tokens else more
            self._grow(len(tokens) - len(kept))
        self.by_number[number] = tokens
        self.by_number.move_to_end(number)
        self._keep_bounds()
        self._budget.keep_bounds(self)
        return tokens

    def forget(self, number: int) -> None:
        """Its engine needs it no more; one that is not kept is no matter."""
        self._grow(-len(self.by_number.pop(number, NO_TOKENS)))

    def forget_oldest(self) -> None:
        """That which was used longest ago."""
        _, tokens = self.by_number.popitem(last=False)
        self._grow(-len(tokens))

    def end(self) -> None:
        """The session is over."""
        self._grow(-self.n_bytes)
        self.by_number.clear()
        self._budget.sessions.remove(self)

    def _grow(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._budget.n_bytes += n_bytes

    def _keep_bounds(self) -> None:
        by_number = self.by_number
        while len(by_number) > 1 and (
            len(by_number) > MOST_PROMPTS or self.n_bytes > MOST_PROMPT_BYTES
        ):
            self.forget_oldest()


@mypyc_attr(allow_interpreted_subclasses=True)
class PromptBudget:
    """What the prompts of all sessions take together.

    Invariant: ``n_bytes`` is their sum, and at most ``limit_bytes`` but for the prompt that was
    told last.
    """

    __slots__ = ("limit_bytes", "n_bytes", "sessions")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0
        self.sessions: list[ToldPrompts] = []

    def keep_bounds(self, told: ToldPrompts) -> None:
        """``told`` has a prompt more: whoever keeps most forgets, so that nobody pays for others.

        One look at every session for each prompt that is forgotten, and none below the limit.
        """
        while self.n_bytes > self.limit_bytes:
            # Not the prompt that is being asked about, which is the last of its session.
            may = [
                session for session in self.sessions if len(session.by_number) > (session is told)
            ]
            if not may:
                return
            max(may, key=_kept_bytes).forget_oldest()


def _kept_bytes(told: ToldPrompts) -> int:
    return told.n_bytes
