"""Events about what was there before this daemon was restarted; ``events.Event`` has them too."""

from __future__ import annotations

import msgspec


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The pool is what it was before the restart, as far as that was proven.

    ``pages`` are cached, in ``nodes`` of the tree; ``leases`` of ``sessions`` keep ``held_pages``
    of their own and ``unproven_pages`` that they may read. ``generation``: how often that was done.
    """

    seq: int
    at_s: float
    generation: int
    pages: int
    nodes: int
    sessions: int
    leases: int
    held_pages: int
    unproven_pages: int


class ClientReturned(msgspec.Struct, frozen=True, tag="client-returned"):
    """A session of before the restart is back.

    It still uses ``kept`` leases, which can only be released; ``ended`` others have ended.
    """

    seq: int
    at_s: float
    session: int
    name: str
    pid: int
    kept: int
    ended: int


RestartEvent = Adopted | ClientReturned
