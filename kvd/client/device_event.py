"""Events of a device, behind which an engine's kernels have written KV."""

from __future__ import annotations

from typing import Protocol

from kvd.errors import Code, KvdError, Refusal


class WhenWritten(Protocol):
    """An event of a device: ``torch.cuda.Event(interprocess=True)`` is one."""

    def ipc_handle(self) -> bytes:
        """By which another process finds it."""
        ...


def handle_of(after: WhenWritten | bytes | None) -> bytes:
    """By which another process finds the event; empty where there is none.

    Raises:
        KvdError: ``bad-request`` for what is no event.
    """
    if after is None or isinstance(after, bytes):
        return after or b""
    try:
        return after.ipc_handle()
    except AttributeError:
        why = (
            f"after is {after!r:.100}, a {type(after).__name__}: it is an event that has "
            "ipc_handle(), or the bytes of such a handle"
        )
        raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client")) from None
