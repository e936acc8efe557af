"""What a caller gave for a field of a request, as what the field takes, or a refusal that names it.

Only what msgspec would not refuse by itself: what is converted on the way, so that numbers of numpy
pass, and what Python would read as something else.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsFloat, SupportsIndex


def whole(value: SupportsIndex, name: str) -> int:
    """A count or a number of something.

    Raises:
        KvdError: ``bad-request`` for what is no whole number, also 2.0: nothing is rounded here.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise _bad(name, value, "it is a whole number") from None


def wholes(**values: SupportsIndex) -> list[int]:
    """Several of them, in that order, each by the name of its field.

    Raises:
        KvdError: as ``whole``, for the first that is none.
    """
    try:
        return list(map(operator.index, values.values()))
    except TypeError:
        return [whole(value, name) for name, value in values.items()]


def seconds(value: SupportsFloat, name: str) -> float:
    """A length of time.

    Raises:
        KvdError: ``bad-request`` for what is no number.
    """
    if type(value) is float:
        return value
    # A text of digits would pass for one, and what is refused later is refused by its value.
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise _bad(name, value, "it is a number of seconds")


def opaque(value: bytes | bytearray | memoryview, name: str) -> bytes:
    """Bytes that nobody here reads.

    Raises:
        KvdError: ``bad-request``, also for a number, which Python would make so many zeros of.
    """
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _bad(name, value, "it is bytes, for a text those of text.encode()")


def names(value: str | Iterable[str], name: str) -> tuple[str, ...]:
    """One name, or several.

    Raises:
        KvdError: ``bad-request`` for what is neither.
    """
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        raise _bad(name, value, "it is a name, or a sequence of names") from None


def _bad(name: str, value: object, rule: str) -> KvdError:
    why = f"{name} is {value!r:.100}, a {type(value).__name__}: {rule}"
    return KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
