"""What can go wrong, as values.

Inside the daemon an expected refusal is a ``Refusal`` value. It crosses the wire as it is, and the
client raises it as ``KvdError``. A message says what happened, the numbers, which side, and what
to do about it; the code is stable and is what programs test for.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final

import msgspec

_CODE: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

Number = int | float | str

MAX_NUMBERS = 64
"""Figures of a refusal: more are not even read."""

Numbers = Annotated[dict[str, Number], msgspec.Meta(max_length=MAX_NUMBERS)]


MAX_CODE: Final = 64
"""Characters of a code, those that are not known here included."""


class Code(enum.Enum):
    """Stable kebab-case codes: part of the public promise.

    The set is open: a later version may refuse with a code that is not here. It is read as it is
    said, ``Code("some-later-code")``: equal to another one that says the same, and no member. It is
    not retryable, as far as is known here.
    """

    BAD_REQUEST = "bad-request"
    BAD_TOKENS = "bad-tokens"
    BAD_KEYS = "bad-keys"
    BAD_ROOM = "bad-room"
    NO_ROOM = "no-room"
    TOO_LARGE = "too-large"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CLIENT_GONE = "client-gone"
    UNKNOWN_SESSION = "unknown-session"
    UNKNOWN_LEASE = "unknown-lease"
    BEFORE_RESTART = "before-restart"
    UNKNOWN_HANDOFF = "unknown-handoff"
    WRONG_STATE = "wrong-state"
    PEER_UNKNOWN = "peer-unknown"
    PEER_LOST = "peer-lost"
    PEER_STALE = "peer-stale"
    DUPLICATE_ROOM = "duplicate-room"
    LAYOUT_MISMATCH = "layout-mismatch"
    PROMPT_MISMATCH = "prompt-mismatch"
    PROMPT_UNKNOWN = "prompt-unknown"
    BAD_PREFIX = "bad-prefix"
    BAD_PAGES = "bad-pages"
    ABORTED = "aborted"
    POST_FAILED = "post-failed"
    STALLED = "stalled"
    CORRUPT = "corrupt"
    UNKNOWN_OUTCOME = "unknown-outcome"
    NOT_SUPPORTED = "not-supported"
    DRAINING = "draining"
    PEER_DRAINING = "peer-draining"
    SHUTTING_DOWN = "shutting-down"
    UNREACHABLE = "unreachable"
    POOL_CHANGED = "pool-changed"
    CONDEMNED = "condemned"
    VERSIONS_DIFFER = "versions-differ"
    INTERNAL = "internal"

    # ``typing.override`` comes with Python 3.12, and who installs the client alone has no other.

    @classmethod
    def _missing_(cls, value: object) -> Code | None:  # type: ignore[explicit-override]
        """A code of a later version; what is none by its form is refused, as any other mistake."""
        if not isinstance(value, str) or len(value) > MAX_CODE or not _CODE.fullmatch(value):
            return None
        later = object.__new__(cls)
        later._name_ = value.upper().replace("-", "_")
        later._value_ = value
        return later

    def __eq__(self, other: object) -> bool:  # type: ignore[explicit-override]
        return self is other or (isinstance(other, Code) and self._value_ == other._value_)

    def __hash__(self) -> int:  # type: ignore[explicit-override]
        return hash(self._value_)

    def __reduce_ex__(  # type: ignore[explicit-override]
        self, protocol: object
    ) -> tuple[type[Code], tuple[str]]:
        """By its value, so that one that is not known here can be copied and pickled too."""
        return Code, (self.value,)


RETRYABLE = frozenset(
    {
        Code.NO_ROOM,
        Code.PROMPT_UNKNOWN,
        Code.DEADLINE,
        Code.PEER_LOST,
        Code.PEER_STALE,
        Code.ABORTED,
        Code.POST_FAILED,
        Code.STALLED,
        Code.CORRUPT,
        Code.UNKNOWN_OUTCOME,
        Code.DRAINING,
        Code.PEER_DRAINING,
        Code.SHUTTING_DOWN,
        Code.UNREACHABLE,
    }
)


class Refusal(msgspec.Struct, frozen=True):
    """An expected failure: a value inside the daemon, an error body on the wire.

    ``side`` is the name of the node (or ``client``) that decided; ``numbers`` are the figures the
    message quotes, so that a program need not parse the sentence.
    """

    code: Code
    message: str
    side: str = ""
    numbers: Numbers = {}

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later without a change by the caller."""
        return self.code in RETRYABLE


class KvdError(Exception):
    """A refusal, raised at the client: ``.code`` and ``.retryable`` are stable."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code.value}: {refusal.message}")
        self.refusal = refusal

    @property
    def code(self) -> str:
        """The stable kebab-case code; of a later daemon it may be one that ``Code`` has not."""
        return self.refusal.code.value

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later without a change by the caller."""
        return self.refusal.is_retryable

    @property
    def numbers(self) -> dict[str, Number]:
        """The figures the message quotes."""
        return self.refusal.numbers


class HandoffError(KvdError):
    """A handoff ended in anything but a delivered prompt."""

    @property
    def source(self) -> str:
        """Of several sources, the name of the one that failed; empty where it is none of them."""
        return str(self.numbers.get("source", ""))
