"""What an order to copy carries of its lease, and what is checked where the copy is made.

Page numbers say nothing of whose pages they are. An engine whose scheduler and workers are several
processes sends a ``LeaseKey`` beside them, and the worker refuses an order of another session, of
another one's life, or of before a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client.state import LeaseView
    from kvd.wire.attach import Attached


class LeaseKey(msgspec.Struct, frozen=True):
    """Of which session, and in which life of the daemon, the page numbers of a lease are.

    ``version`` grows whenever pages that the lease had become others: by a commit that swaps, by
    ``slide``, ``retract`` and ``resume``. Equal keys: the numbers that were read are still true.
    It can be pickled, and packed with msgspec.
    """

    session: int
    incarnation: str
    lease: int
    version: int


def is_ours(check: Callable[[LeaseKey], None], key: LeaseKey) -> bool:
    """Whether ``check`` has nothing against that key."""
    try:
        check(key)
    except KvdError:
        return False
    return True


def why_foreign(key: LeaseKey, attached: Attached) -> Refusal | None:
    """Why a key is not of the session that a process is attached to; None: it is."""
    if not isinstance(key, LeaseKey):
        why = f"key is {key!r:.100}, a {type(key).__name__}: it is the key of a lease"
        return Refusal(Code.BAD_REQUEST, why, side="client")
    if key.incarnation != attached.incarnation:
        why = (
            f"this order is for lease {key.lease} of session {key.session} in another life of the "
            f"daemon than the one that this process is attached to now (session "
            f"{attached.session} of {attached.node}): nothing is copied; have its scheduler order "
            "anew what it still has a lease for"
        )
        return Refusal(Code.BEFORE_RESTART, why, side="client", numbers={"lease": key.lease})
    if key.session != attached.session:
        why = (
            f"this order is for lease {key.lease} of session {key.session}, and this process is of "
            f"session {attached.session} of {attached.node}: its pages are another engine's, "
            "nothing is copied; join the session that orders come from"
        )
        return Refusal(Code.UNKNOWN_SESSION, why, side="client", numbers={"lease": key.lease})
    return None


def why_stale(key: LeaseKey, lease: LeaseView | None) -> Refusal | None:
    """Why the numbers of ``key`` are not the pages that ``lease`` has now; None: they are.

    ``lease``: what this process has of that number; None: nothing any more.
    """
    if lease is None:
        why = f"lease {key.lease} is over: its pages may be someone else's by now"
        return Refusal(Code.UNKNOWN_LEASE, why, side="client", numbers={"lease": key.lease})
    if lease.condemned is not None:
        return lease.condemned
    if lease.version != key.version or not lease.is_row_known:
        why = (
            f"lease {key.lease} has other pages by now: the numbers are of version {key.version} "
            f"of them, and now is {lease.version}; read them again"
        )
        return Refusal(Code.WRONG_STATE, why, side="client", numbers={"lease": key.lease})
    return None
