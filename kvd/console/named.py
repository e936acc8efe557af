"""Who something belongs to, as a name, as what to open, and as a holder without an age."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.inspect.words import lease_word
from kvd.wire.console import Holder

if TYPE_CHECKING:
    from kvd.console.scene import Scene
    from kvd.core.cache.lease import Lease
    from kvd.core.leases.owners import Kept


def owner(scene: Scene, session: int) -> str:
    """The name of a session; of one that is gone its number, of none nothing."""
    found = scene.node.sessions.by_id.get(session)
    if found is not None:
        return found.name
    return f"session {session} (gone)" if session else ""


def client_ref(session: int) -> str | None:
    """What to open for a session."""
    return f"client:{session}" if session else None


def lease_ref(lease: Lease | None) -> str | None:
    """What to open for a lease."""
    return f"lease:{lease.id}" if lease is not None else None


def peer_ref(name: str) -> str | None:
    """What to open for a peer."""
    return f"peer:{name}" if name else None


def lease_holder(scene: Scene, lease: Lease, pages: str = "") -> Holder:
    """A lease as a holder of something; ``pages`` says how much it has of it."""
    session = scene.node.sessions.by_id.get(lease.session)
    who = (
        owner(scene, lease.session) or "kvd"
        if session is None
        else f"{session.name} {session.pids[0]}"
    )
    room = f" room {lease.room}" if lease.room else ""
    what = f"{who}: {lease.reason}{room}{pages}"
    return Holder(what, lease.since_s, f"lease:{lease.id}", state_of(scene, lease))


def state_of(scene: Scene, lease: Lease) -> str:
    """Empty for one that runs; ``gone`` where its owner is, else its state: see ``Holder``."""
    word = lease_word(lease)
    if word != "held":
        return word
    return "" if lease.session in scene.node.sessions.by_id else "gone"


def kept_holder(scene: Scene, kept: Kept) -> Holder:
    """A lease as one of those that keep the most pages from others."""
    locked = f", locks {kept.locked} cached" if kept.locked else ""
    return lease_holder(scene, kept.lease, f", {kept.pages} pages{locked}")
