"""What an adapter is: an engine that computes prompts with a connector, and stops anywhere.

An adapter checks by itself that each token is computed from KV that is its own, in ``answer``. The
suite does the rest: what happens meanwhile, and what may be held afterwards.
"""

from __future__ import annotations

import abc
import importlib
import random
from typing import TYPE_CHECKING, Any, ClassVar

from kvd.client import connect_sync
from tests.connectors.contract.cases import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pytest

ADAPTERS = {
    "vllm": "of_vllm.VllmEngine",
    "transformers": "of_transformers.ScriptEngine",
    "lmcache": "of_lmcache.LmcacheServer",
    "sglang": "of_sglang.SglangEngine",
}

PAGE = 16
"""Tokens, in the pool of every adapter."""


def adapter(name: str) -> type[PlayedEngine]:
    """By its name.

    Raises:
        ImportError: what it plays is not here.
    """
    found: type[PlayedEngine] = class_at(ADAPTERS[name])
    return found


def class_at(place: str) -> Any:
    """A class by its module here and its name; only now its engine has to be here."""
    module, _, kind = place.partition(".")
    return getattr(importlib.import_module(f"tests.connectors.contract.{module}"), kind)


LINK_WAITS = {
    "kvd.client.port.AT_ONCE_S": 20.0,
    "kvd.connectors.daemon_link.OPEN_WITHIN_S": 20.0,
    "kvd.connectors.daemon_link.AGAIN_WITHIN_S": 20.0,
}
LINK_HURRIES = {
    "kvd.connectors.daemon_link.RETRY_S": 0.0,
    "kvd.connectors.daemon_link.SILENT_S": 0.0,
    "kvd.connectors.daemon_link.UNFIT_S": 0.0,
}
"""Of those that have a ``ConnectorSession``."""


class Aborted(BaseException):
    """The request is given up where it is."""


class Happening:
    """What is done once, at one step of a request. ``aborts``: the request ends there."""

    def __init__(
        self,
        at: Step | None = None,
        act: Callable[[], object] = lambda: None,
        *,
        aborts: bool = False,
    ) -> None:
        self.at, self._act, self._aborts = at, act, aborts
        self.has_come = at is None

    def __call__(self, step: Step) -> None:
        if step is self.at and not self.has_come:
            self.has_come = True
            self._act()
            if self._aborts:
                raise Aborted


NOTHING = Happening()


class PlayedEngine(abc.ABC):
    """One engine with a session of its own, in this process.

    Args:
        endpoint: of the daemon.
        model: engines of unlike ones share nothing.
    """

    steps: ClassVar[tuple[Step, ...]] = tuple(Step)
    """Which it has; why it lacks others is said in the page."""
    pool: ClassVar[Mapping[str, str]]
    """Settings of a daemon whose pool fits."""
    unlike: ClassVar[Mapping[str, tuple[Mapping[str, str], str]]]
    """Of pools that do not: settings that make it such a one, and words that are said of it. Where
    they name a family they are all of its settings."""
    waits: ClassVar[Mapping[str, float]]
    """How long it waits for a daemon, each as long as a test bears: what is to come does come."""
    _endpoint: str
    hurries: ClassVar[Mapping[str, float]] = {}
    """Pauses before it looks again for a daemon."""

    @abc.abstractmethod
    def __init__(self, endpoint: str, *, model: str = "") -> None: ...

    @abc.abstractmethod
    def answer(self, tokens: Sequence[int], happening: Happening = NOTHING) -> int | None:
        """Compute a prompt, and a few tokens more; returns how many tokens were loaded.

        None: it was aborted.

        Raises:
            AssertionError: a token was computed from KV that is not its own.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until nothing of former requests is under way.

        Raises:
            AssertionError: something of the engine is lost, or was written by nobody of it.
        """

    @property
    @abc.abstractmethod
    def namespace(self) -> str:
        """Where its prompts are found."""

    def cached(self, tokens: Sequence[int]) -> int:
        """How many of them the daemon has, as another one sees it."""
        with connect_sync(self._endpoint, name="look") as node:
            return node.match(tokens, namespace=self.namespace).tokens

    @abc.abstractmethod
    def reset(self) -> None:
        """Say that nothing of before is to be found again."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave."""

    @classmethod
    @abc.abstractmethod
    def with_other_version(cls, endpoint: str, patch: pytest.MonkeyPatch) -> str:
        """Begin as a version that was not run; returns what is said, and holds that it saves none.

        Raises:
            AssertionError: it was used all the same.
        """


def prompt_of(n_tokens: int, seed: int, behind: Sequence[int] = ()) -> list[int]:
    """Random tokens, behind those that are given."""
    rng = random.Random(seed)
    return [*behind, *(rng.randrange(1, 2000) for _ in range(n_tokens - len(behind)))]


PREFIX = prompt_of(4 * PAGE + 1, 1)
"""What an engine has answered before: four pages of it are found."""

PROMPT = prompt_of(7 * PAGE + 3, 2, PREFIX[:-1])
"""So each request both loads and saves."""
