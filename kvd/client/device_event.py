"""Events of a device, behind which an engine's kernels have written KV."""

from __future__ import annotations

from typing import Protocol


class WhenWritten(Protocol):
    """An event of a device: ``torch.cuda.Event(interprocess=True)`` is one."""

    def ipc_handle(self) -> bytes:
        """By which another process finds it."""
        ...


def handle_of(after: WhenWritten | bytes | None) -> bytes:
    """By which another process finds the event; empty where there is none."""
    if after is None or isinstance(after, bytes):
        return after or b""
    return after.ipc_handle()
