"""The engines behind a proxy: where they are, what is known of each, which one a request goes to.

A request goes to the engine where its prompt would be there soonest. What waits at an engine and
what its node lacks of the prompt are both work of the same kind, so both count in tokens. To take
the longest match alone sends everyone to the node that has the system prompt; to look at the load
alone computes each conversation anew. ``kvd sim --trace`` compares the three on a recorded load.

What is known comes from two sides: every few seconds an engine is asked for ``/health``, and every
request that it serves or fails is told. An engine that is busy answers late, which is no death::

    UP        it answered last, whatever it was asked
    DOUBTED   it was late, or broke a request; it gets those that nobody else takes
    DOWN      it refuses connections, or says that it is unwell; it gets nothing until it answers
"""

from __future__ import annotations

import base64
import enum
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPTIONS: Final = ("daemon", "namespace")

_OPTION: Final = re.compile(f",(?=(?:{'|'.join(OPTIONS)})=)")
_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+(?:%[a-z0-9._-]+)?")
_BASE: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*/?")
"""Of a URL, what stands before the paths of the HTTP API."""

DOUBTED_S: Final = 5.0
"""For each request in a row that an engine failed, whatever it says of its health meanwhile."""

MOST_DOUBTED: Final = 12
"""Requests in a row that count for that."""

SILENT_S: Final = 10.0
"""Without any answer, and late with its health, an engine may be hung."""


class EngineRole(enum.StrEnum):
    """What requests an engine is sent."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineState(enum.IntEnum):
    """What is thought of an engine; a lower one is preferred."""

    UP = 0
    DOUBTED = 1
    DOWN = 2


@dataclass(frozen=True)
class EngineAddress:
    """One engine, as the command line names it.

    Attributes:
        role: what it does of a request.
        url: ``http://host:port``, without a slash at the end; a user and password in it become
            ``authorization`` and are in no text of the proxy.
        daemon: the client socket of its node's daemon; empty where the proxy cannot reach it.
        namespace: of that daemon, in which the engine keeps its prompts; None: it says so itself.
        authorization: what the proxy says to it in the header of that name; empty: what its client
            says.
    """

    role: EngineRole
    url: str
    daemon: str = ""
    namespace: str | None = None
    authorization: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        user, mark, host = parts.netloc.rpartition("@")
        if mark:
            name, _, password = user.partition(":")
            said = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
            object.__setattr__(self, "url", parts._replace(netloc=host).geturl())
            object.__setattr__(self, "authorization", self.authorization or f"Basic {said}")


@dataclass(eq=False)
class ProxiedEngine:
    """One engine as the proxy knows it now.

    Attributes:
        waiting_tokens: of prompts that it was sent and has not begun to answer; without those that
            its node had already.
        open_requests: sent to it and not ended.
        sent_requests: since the proxy began.
        is_refusing: the last connection failed, or it said that it is unwell.
        is_late: it has not answered ``/health`` in time since it last answered anything.
        failed_in_a_row: requests.
        doubted_until_s: by the clock of the loop, because of them.
        answered_s: by the same clock, when it last answered anything; minus infinity: never.
        failed_s: when it last did not.
        why: the last failure; empty after an answer.
        doubted_s: for each failed request in a row; after one that was told to come later, at most.
        opens_at: the node where it opens rooms that it is told of; empty: it has not said so.
    """

    address: EngineAddress
    waiting_tokens: int = 0
    open_requests: int = 0
    sent_requests: int = 0
    is_refusing: bool = False
    is_late: bool = False
    failed_in_a_row: int = 0
    doubted_until_s: float = -math.inf
    answered_s: float = -math.inf
    failed_s: float = -math.inf
    why: str = "not asked yet"
    doubted_s: float = DOUBTED_S
    opens_at: str = ""

    def state(self, now_s: float) -> EngineState:
        """Whether requests go to it, only if nobody else takes them, or not at all."""
        if self.is_refusing:
            return EngineState.DOWN
        never = self.answered_s == -math.inf
        if never or self.is_late or now_s < self.doubted_until_s:
            return EngineState.DOUBTED
        return EngineState.UP

    def served(self, now_s: float) -> None:
        """A request was answered, or goes on being answered."""
        self.failed_in_a_row, self.doubted_until_s = 0, -math.inf
        self.said_well(now_s)

    def said_well(self, now_s: float) -> None:
        """It answered, though no request for a client: it is there, and why it is doubted stays."""
        self.is_refusing = self.is_late = False
        self.answered_s = now_s
        if now_s >= self.doubted_until_s:
            self.why = ""

    def was_busy(self, now_s: float, for_s: float, why: str) -> None:
        """It takes no more now, and says for how long."""
        self.said_well(now_s)
        self.doubted_until_s = max(self.doubted_until_s, now_s + min(for_s, self.doubted_s))
        self.failed_s, self.why = now_s, why

    def may_prefill(self, now_s: float) -> bool:
        """Whether a prompt is worth the wait here; a decode engine could begin with it at once.

        An engine that is late and has answered nobody for a while gets one at a time.
        """
        state = self.state(now_s)
        if state is not EngineState.DOUBTED:
            return state is EngineState.UP
        is_heard = now_s - self.answered_s < SILENT_S
        return now_s >= self.doubted_until_s and (is_heard or not self.open_requests)

    def was_late(self, now_s: float, why: str) -> None:
        """It did not say in time how it is: busy, or hung."""
        self.is_late, self.failed_s, self.why = True, now_s, why

    def refused(self, now_s: float, why: str) -> None:
        """Nobody is there, or it says itself that it is unwell."""
        self.is_refusing, self.failed_s, self.why = True, now_s, why

    def failed(self, now_s: float, why: str) -> None:
        """A request broke there, or had no answer in time."""
        self.failed_in_a_row += 1
        doubted_s = self.doubted_s * min(self.failed_in_a_row, MOST_DOUBTED)
        self.doubted_until_s, self.failed_s, self.why = now_s + doubted_s, now_s, why


class EngineChoice(NamedTuple):
    """An engine, and what its node lacks of the prompt, in tokens."""

    engine: ProxiedEngine
    lacking_tokens: int


def soonest(
    engines: Iterable[ProxiedEngine],
    cached: Mapping[ProxiedEngine, int],
    n_tokens: int,
    now_s: float,
) -> EngineChoice | None:
    """The engine that would have the prompt first; None if all are down.

    One that is doubted is taken where no other is up. Among equals it is the one with the fewest
    open requests, then with the fewest that it was ever sent, then the first that was named.
    ``cached``: of the prompt's ``n_tokens``, how many each node has; none where it is not known.
    """
    states = {engine: engine.state(now_s) for engine in engines}
    choices = [
        EngineChoice(engine, max(0, n_tokens - cached.get(engine, 0)))
        for engine, state in states.items()
        if state is not EngineState.DOWN
    ]
    return min(
        choices,
        key=lambda choice: (
            states[choice.engine],
            choice.engine.waiting_tokens + choice.lacking_tokens,
            choice.engine.open_requests,
            choice.engine.sent_requests,
        ),
        default=None,
    )


def parse_engine(role: EngineRole, text: str) -> EngineAddress:
    """``URL[,daemon=ENDPOINT[,namespace=NAME]]``.

    Raises:
        KvdError: ``bad-request``; says what is wrong with which part.
    """
    url, *options = text.split(",")
    # What is wrong is said without the password that may be in it, also if that has a comma.
    head = _OPTION.split(text)[0]
    shown = head.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        is_address = (
            ("@" in url or "@" not in head)
            and parts.scheme in ("http", "https")
            and not any(char.isspace() for char in url)
            and parts.port != 0
            and not parts.query
            and not parts.fragment
            and url.isascii()
            and _HOST.fullmatch(parts.hostname or "") is not None
            and _BASE.fullmatch(parts.path) is not None
        )
    except ValueError:
        is_address = False
    if not is_address:
        coded = " (in a password, %-encode all but letters and digits)" if "@" in text else ""
        raise _wrong(role, shown, f"{shown!r} is no address such as http://127.0.0.1:8100{coded}")
    said: dict[str, str] = {}
    for option in options:
        key, is_given, value = option.partition("=")
        if not is_given or key not in OPTIONS or key in said:
            raise _wrong(role, shown, f"{option!r} is none of {', '.join(OPTIONS)}, each once")
        said[key] = value
    if not said.get("daemon", "ipc://").partition("://")[1]:
        raise _wrong(
            role, shown, "daemon= is its client socket, such as ipc:///run/kvd/client.sock"
        )
    if "namespace" in said and "daemon" not in said:
        raise _wrong(role, shown, "a namespace is of a daemon: give daemon=ENDPOINT too")
    return EngineAddress(role=role, url=url.rstrip("/"), **said)


def check_engines(addresses: Iterable[EngineAddress]) -> None:
    """Whether each is there once in its role: a second one would be no other engine to try.

    Raises:
        KvdError: ``bad-request``; says which one is there twice.
    """
    seen = set()
    for address in addresses:
        parts = urlsplit(address.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        where = (address.role, parts.scheme, parts.hostname, port, parts.path)
        if where in seen:
            raise _wrong(address.role, address.url, "this engine is named twice")
        seen.add(where)


def _wrong(role: EngineRole, shown: str, why: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, f"--{role} {shown}: {why}", side="proxy"))
