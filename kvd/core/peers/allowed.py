"""``peers.allow``: who may say Hello, and which namespaces each may pull.

    prefill-0               every namespace
    decode-1:llama          llama and its members (llama#...)
    decode-1:llama#salt=1   that member alone; the entries of one name add up

What is restricted is a pull: there nobody but the daemon decides what is sent. A room is opened by
an engine, and whoever takes it proves by a digest that it has the whole prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.core.cache.namespaces import base_of
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

OF: Final = ":"
"""Between a node and a namespace that it may pull."""

EVERY: Final[frozenset[str]] = frozenset()
"""The namespaces of an entry that names none."""


def allowed_by_name(entries: Iterable[str]) -> dict[str, frozenset[str]]:
    """By node name, the namespaces that it may pull; ``EVERY`` where no entry of it names one."""
    found: dict[str, frozenset[str]] = {}
    for entry in entries:
        name, names_one, namespace = entry.partition(OF)
        before = found.get(name, EVERY)
        found[name] = before | {namespace} if names_one else before
    return found


def unlisted(allowed: dict[str, frozenset[str]], peer: str, side: str) -> Refusal | None:
    """Why a peer may exchange nothing; None where it is listed, or nobody is."""
    if not allowed or peer in allowed:
        return None
    why = f"{peer!r} is not in peers.allow of {side}"
    return Refusal(Code.PEER_UNKNOWN, why, side=side)


def unreadable(
    allowed: dict[str, frozenset[str]], peer: str, namespace: str, side: str
) -> Refusal | None:
    """Why a peer may not pull from this namespace; None where it may."""
    # The list may have been another one when it said Hello.
    refusal = unlisted(allowed, peer, side)
    if refusal is not None:
        return refusal
    readable = allowed.get(peer, EVERY)
    if not readable or namespace in readable or base_of(namespace) in readable:
        return None
    return Refusal(
        Code.NOT_SUPPORTED,
        f"{peer} may not pull namespace {namespace!r} from {side}: add "
        f"{f'{peer}{OF}{base_of(namespace)}'!r} to peers.allow there, or have an engine send it",
        side=side,
    )
