"""Events about sessions that are served no more; ``events.Event`` has them too."""

from __future__ import annotations

import msgspec


class ClientHungUpOn(msgspec.Struct, frozen=True, tag="client-hung-up-on"):
    """The daemon hung up on a session whose processes live, and serves it no more.

    ``leases`` with ``held_pages`` stay held until all of ``pids`` are dead, because those may go on
    writing; ``handoffs`` were given up.
    """

    seq: int
    at_s: float
    session: int
    name: str
    pids: tuple[int, ...]
    code: str
    why: str
    leases: int
    held_pages: int
    handoffs: int
