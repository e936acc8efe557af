"""The engines behind a proxy: where they are, whether they answer, which one a request goes to.

That is the one where its prompt would be there soonest. What waits at an engine and what its node
lacks of the prompt are both work of the same kind, so both count in tokens. To take the longest
match alone sends everyone to the node that has the system prompt; to look at the load alone
computes each conversation anew. ``kvd sim --trace`` compares the three on a recorded load.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPTIONS: Final = ("daemon", "namespace")


class EngineRole(enum.StrEnum):
    """What requests an engine is sent."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class EngineAddress:
    """One engine, as the command line names it.

    Attributes:
        role: what it does of a request.
        url: ``http://host:port``, without a slash at the end.
        daemon: the client socket of its node's daemon; empty where the proxy cannot reach it.
        namespace: of that daemon, in which the engine keeps its prompts.
    """

    role: EngineRole
    url: str
    daemon: str = ""
    namespace: str = ""


@dataclass(eq=False)
class ProxiedEngine:
    """One engine as the proxy knows it now.

    Attributes:
        is_up: it answered when it was last asked.
        waiting_tokens: of prompts that it was sent and has not begun to answer; without those that
            its node had already.
        open_requests: sent to it and not ended.
        why_down: the last failure, for ``/health``.
    """

    address: EngineAddress
    is_up: bool = False
    waiting_tokens: int = 0
    open_requests: int = 0
    why_down: str = "not asked yet"

    def went_down(self, why: str) -> None:
        """It did not answer: nothing is sent there until it does."""
        self.is_up, self.why_down = False, why

    def came_up(self) -> None:
        """It answered."""
        self.is_up, self.why_down = True, ""


class EngineChoice(NamedTuple):
    """An engine, and what its node lacks of the prompt, in tokens."""

    engine: ProxiedEngine
    lacking_tokens: int


def soonest(
    engines: Iterable[ProxiedEngine], cached: Mapping[ProxiedEngine, int], n_tokens: int
) -> EngineChoice | None:
    """The engine that answers, and would have the prompt first; None if none answers.

    Among equals it is the one with the fewest open requests, then the first that was named.
    ``cached``: of the prompt's ``n_tokens``, how many each node has; none where it is not known.
    """
    choices = [
        EngineChoice(one, max(0, n_tokens - cached.get(one, 0))) for one in engines if one.is_up
    ]
    return min(
        choices,
        key=lambda one: (
            one.engine.waiting_tokens + one.lacking_tokens,
            one.engine.open_requests,
        ),
        default=None,
    )


def parse_engine(role: EngineRole, text: str) -> EngineAddress:
    """``URL[,daemon=ENDPOINT][,namespace=NAME]``.

    Raises:
        KvdError: ``bad-request``; says what is wrong with which part.
    """
    url, *options = text.split(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
        raise _wrong(role, text, f"{url!r} is no address such as http://127.0.0.1:8100")
    said: dict[str, str] = {}
    for option in options:
        key, is_given, value = option.partition("=")
        if not is_given or key not in OPTIONS or key in said:
            raise _wrong(role, text, f"{option!r} is none of {', '.join(OPTIONS)}, each once")
        said[key] = value
    if "namespace" in said and "daemon" not in said:
        raise _wrong(role, text, "a namespace is of a daemon: give daemon=ENDPOINT too")
    return EngineAddress(role=role, url=url.rstrip("/"), **said)


def _wrong(role: EngineRole, text: str, why: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, f"--{role} {text}: {why}", side="proxy"))
