"""Messages of a daemon to an engine, for readers without the client library."""

from __future__ import annotations

from kvd.wire import client


def each(message: object) -> tuple[object, ...]:
    """What a message of the client socket says, one by one; any other message is itself."""
    return message.replies if isinstance(message, client.Several) else (message,)
