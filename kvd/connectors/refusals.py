"""How a call of a connector ends that does not do what was asked: whose word it is, and of what."""

from __future__ import annotations

from typing import Final

from kvd.errors import Code, KvdError, Refusal

HERE: Final = "client"
"""The side of what no daemon has said: its word did not come, or it was not asked."""

BROKEN: Final = (OSError, ValueError, RuntimeError)
"""What sockets and an ``epoll`` raise that were closed under a call, and torch where memory is
short."""

FULL: Final = frozenset({Code.DEADLINE.value, Code.NO_ROOM.value, Code.TOO_LARGE.value})
"""With these the daemon says that it has no pages for what was asked."""


def refused_here(code: Code, why: str) -> KvdError:
    """This process refuses it, whatever a daemon would say."""
    return KvdError(Refusal(code, why, side=HERE))


def was_said_here(error: KvdError) -> bool:
    """Whether the daemon has said nothing of it: its word did not come, or it was not asked."""
    return error.refusal.side == HERE


def is_short(error: KvdError) -> bool:
    """Whether the daemon is well, and has no room for this."""
    return error.code in FULL and not was_said_here(error)


def is_users_to_mend(error: Exception) -> bool:
    """Whether an engine that begins is told wrong: a daemon that comes later changes nothing."""
    told_wrong = {Code.LAYOUT_MISMATCH.value, Code.BAD_REQUEST.value}
    return isinstance(error, KvdError) and error.code in told_wrong
