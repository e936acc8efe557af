"""The load of ``benchmarks multiturn``, and what of it has to be sent: arithmetic over token lists.

What lives here: conversations, their prompts, the reuse bound. What must not: processes, clocks,
anything of kvd's own index, because the bound is what the index is judged by.

A prompt is all that was said before, the system prompt first, and new words of the user::

    turn 0 | system | user |
    turn 1 | system | user | output | user |
                           ^ last output token left out: its KV was never computed

The decode node has seen the KV of every page of a prompt that it was sent and of every page of the
output that it wrote itself. A page stands for all tokens up to its end, so it counts as seen only
where all of them are the same.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvd.types import ID_BYTES, Tokens

VOCABULARY = 128_256


class Shape(msgspec.Struct, frozen=True):
    """How much is said: so many conversations at once, so many turns each, in so many rounds."""

    conversations: int
    turns: int
    rounds: int
    system_tokens: int = 1000
    user_tokens: int = 400
    output_tokens: int = 24

    @property
    def longest_tokens(self) -> int:
        """A conversation at its end."""
        return self.system_tokens + self.turns * (self.user_tokens + self.output_tokens)


class Conversation:
    """One conversation: what the next prompt is."""

    def __init__(self, system: Tokens, shape: Shape, seed: tuple[int, ...]) -> None:
        self._said = system
        self._user_tokens = shape.user_tokens
        self._rng = np.random.default_rng(seed)

    def ask(self) -> Tokens:
        """The prompt of the next turn."""
        self._said = Tokens(self._said + random_tokens(self._rng, self._user_tokens))
        return self._said

    def answered(self, output: Tokens) -> None:
        """What the engine said to it."""
        self._said = Tokens(self._said + output)


class Seen:
    """What a node has the KV of, in whole pages. Invariant: with a page its predecessors."""

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = page_tokens * ID_BYTES
        self._prefixes: set[bytes] = set()

    def add(self, tokens: Tokens) -> None:
        """The node has the KV of these now."""
        self._prefixes.update(self._cut(tokens))

    def unseen_pages(self, tokens: Tokens) -> int:
        """Pages of a prompt, the last partial one included, that it has to be sent."""
        n_known = sum(prefix in self._prefixes for prefix in self._cut(tokens))
        return -(-len(tokens) // self._page_bytes) - n_known

    def _cut(self, tokens: Tokens) -> list[bytes]:
        """Every prefix of whole pages: the tokens themselves, no digest that could collide."""
        size = self._page_bytes
        return [tokens[:end] for end in range(size, len(tokens) + 1, size)]


def random_tokens(rng: np.random.Generator, n_tokens: int) -> Tokens:
    """Tokens that nobody said before."""
    return Tokens(rng.integers(0, VOCABULARY, n_tokens, dtype=np.int32).astype("<i4").tobytes())


def said_next(tokens: Tokens) -> int:
    """What an engine without a model says after ``tokens``."""
    last = int.from_bytes(tokens[-ID_BYTES:], "little")
    return (last * 48_271 + len(tokens)) % VOCABULARY
