"""What an adapter of handoffs is: two engines over two nodes, and prompts that go between them.

An adapter checks by itself that what came is the prompt's own KV, and that nobody writes where
nobody should; the suite does the rest.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tests.connectors.contract.engine import NOTHING, Happening, class_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.daemons import Pair

SIDES = ("prefill", "decode")

HANDOFF_ADAPTERS = {"sglang": "of_sglang_pair.SglangPair", "vllm": "of_vllm_pair.VllmPair"}


def handoff_adapter(name: str) -> type[PlayedHandoffs]:
    """By its name.

    Raises:
        ImportError: what it plays is not here.
    """
    found: type[PlayedHandoffs] = class_at(HANDOFF_ADAPTERS[name])
    return found


class HandoffEnd(NamedTuple):
    """Of each side, why it did not go well; empty: it did."""

    prefill: str
    decode: str


class PlayedHandoffs(abc.ABC):
    """A prefill engine at the one node, a decode engine at the other.

    Args:
        daemons: of the nodes.
        is_impatient: whether its timeouts are short.
        unlike: what the decode engine has of its own: ``model`` or ``pool``; empty: nothing.
    """

    pool: ClassVar[Mapping[str, str]]
    """Settings of daemons whose pools fit."""
    waits_for_room: ClassVar[bool]
    """Whether a handoff waits for pages of a pool that is full; else it has failed."""

    @abc.abstractmethod
    def __init__(self, daemons: Pair, *, is_impatient: bool = False, unlike: str = "") -> None: ...

    def hand_over(self, tokens: Sequence[int], happening: Happening = NOTHING) -> HandoffEnd:
        """From the first word to the end on both sides."""
        self.begin(tokens, happening)
        return self.end()

    @abc.abstractmethod
    def begin(self, tokens: Sequence[int], happening: Happening = NOTHING) -> None:
        """A prompt is given to both engines; it is over, or goes on by itself."""

    @abc.abstractmethod
    def end(self) -> HandoffEnd:
        """How the last one has ended.

        Raises:
            AssertionError: it never ends, or what came is not its own KV.
        """

    @abc.abstractmethod
    def abort(self, side: str) -> None:
        """The client of the request of now hangs up on that engine."""

    @abc.abstractmethod
    def kill(self, side: str) -> None:
        """That engine ends, as by ``kill -9``."""

    @abc.abstractmethod
    def start(self, side: str) -> None:
        """Another engine in its place."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Nothing of former requests is held by an engine.

        Raises:
            AssertionError: something is, or was written by nobody of it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Both leave."""
