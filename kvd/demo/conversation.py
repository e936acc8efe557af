"""What is said in the demo, as data: conversations under one system prompt.

- ``first`` grows turn by turn: each prompt is the previous prompt, its answer, and a new message.
- ``second`` shares only the system prompt with it. Its first message ends on a page boundary.
- ``retry`` asks the first question of ``second`` again: a full hit, nothing to send.
- ``controls`` are no turns of the demo but its negative controls, one for each part of the pool: a
  page of that part will be damaged.

Tokens are plain integers; there is no tokenizer. Nothing here knows about daemons or models.
"""

from __future__ import annotations

import random

import msgspec

from kvd.demo.messages import ANSWER_TOKENS

FIRST, SECOND, RETRY, CONTROL = "first", "second", "retry", "control"
SYSTEM_TOKENS = 300
MESSAGE_TOKENS = 40


class ScriptTurn(msgspec.Struct, frozen=True):
    """One message of a user in ``conversation``; ``number`` counts from 1 in it."""

    conversation: str
    number: int
    message: tuple[int, ...]


class Script(msgspec.Struct, frozen=True):
    """Everything that users will say. The answers are the model's."""

    system: tuple[int, ...]
    turns: tuple[ScriptTurn, ...]
    controls: tuple[ScriptTurn, ...]

    def cached_tokens_at_most(self) -> int:
        """Tokens that one node's prefix cache holds at the end, were nothing shared."""
        everything = (*self.turns, *self.controls)
        names = {turn.conversation for turn in everything}
        said = sum(len(turn.message) + ANSWER_TOKENS for turn in everything)
        return len(names) * len(self.system) + said


def write_script(
    *, turns: int, vocabulary: int, page_size: int, seed: int, controls: int = 1
) -> Script:
    """The same script for the same arguments; ``first`` has ``turns`` turns."""
    chance = random.Random(seed)

    def say(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocabulary) for _ in range(count))

    system = say(SYSTEM_TOKENS)
    aligned = -(-(SYSTEM_TOKENS + MESSAGE_TOKENS) // page_size) * page_size
    question = say(aligned - SYSTEM_TOKENS)
    return Script(
        system=system,
        turns=(
            *(ScriptTurn(FIRST, number, say(MESSAGE_TOKENS)) for number in range(1, turns + 1)),
            ScriptTurn(SECOND, 1, question),
            ScriptTurn(SECOND, 2, say(MESSAGE_TOKENS)),
            ScriptTurn(RETRY, 1, question),
        ),
        controls=tuple(
            ScriptTurn(f"{CONTROL} {number}", 1, say(MESSAGE_TOKENS))
            for number in range(1, controls + 1)
        ),
    )


class ExpectedCache:
    """What a node's prefix cache must hold, worked out here alone, to check the daemon by.

    Right while nothing is evicted: the demo's pools are sized so.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._sequences: list[tuple[int, ...]] = []

    def prefix_tokens(self, prompt: tuple[int, ...]) -> int:
        """Tokens of the longest cached prefix of ``prompt``, in whole pages."""
        longest = max((_shared_tokens(prompt, known) for known in self._sequences), default=0)
        return longest - longest % self._page_size

    def add(self, sequence: tuple[int, ...]) -> None:
        """KV of ``sequence`` was committed; only its whole pages stay."""
        self._sequences.append(sequence[: len(sequence) - len(sequence) % self._page_size])


def _shared_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))
