"""Prompts that engines have told: a later request names one, and sends what has come since.

A scheduler asks about the same prompt many times: whether it is cached, for a lease, for a send.
With a number in place of its tokens a question about 32,000 of them is some bytes long. What is
kept here is a copy for reading, of one session: it locks no page, and the oldest one goes where
the bounds are met. Its engine hears ``prompt-unknown`` then, and tells it anew.
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

    __slots__ = ("by_number", "n_bytes")

    def __init__(self) -> None:
        self.by_number: OrderedDict[int, Tokens] = OrderedDict()
        """The one that was used last at the end."""
        self.n_bytes = 0

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
            self.n_bytes += len(tokens) - len(kept)
        self.by_number[number] = tokens
        self.by_number.move_to_end(number)
        self._keep_bounds()
        return tokens

    def forget(self, number: int) -> None:
        """Its engine needs it no more; one that is not kept is no matter."""
        self.n_bytes -= len(self.by_number.pop(number, NO_TOKENS))

    def _keep_bounds(self) -> None:
        by_number = self.by_number
        while len(by_number) > 1 and (
            len(by_number) > MOST_PROMPTS or self.n_bytes > MOST_PROMPT_BYTES
        ):
            _, tokens = by_number.popitem(last=False)
            self.n_bytes -= len(tokens)
