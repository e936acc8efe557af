"""What the tree calls a namespace: its name, and behind it the epoch that it is in.

    llama            epoch 0, the name alone
    llama<US>7       epoch 7; US is the control character "unit separator"

No name from outside may have a control character, so no name is another one in some epoch: what was
cached before an epoch begins can never be found in it, whatever it was called. What is shown to
anybody is ``told``. The *base* of a namespace is what stands before its first ``#``: ``llama``
and ``llama#salt=1`` are members of the base ``llama``, which has one epoch (``leases.epochs``).

What must not live here: which epoch a base is in.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

SEPARATOR: Final = "\x1f"
"""Between a name and its epoch."""

MEMBER: Final = "#"
"""Behind it stands what tells the members of a base apart."""

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


def key_of(namespace: str, epoch: int) -> str:
    """What the tree calls a namespace in this epoch."""
    return f"{namespace}{SEPARATOR}{epoch}" if epoch else namespace


def name_in(key: str) -> str:
    """The namespace that is meant."""
    return key.partition(SEPARATOR)[0]


def epoch_in(key: str) -> int:
    """The epoch that is meant; 0 for a key that no daemon has made."""
    if SEPARATOR not in key:
        return 0
    number = key.partition(SEPARATOR)[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def base_of(namespace: str) -> str:
    """The base of a namespace, given by its name or its key."""
    return name_in(namespace).partition(MEMBER)[0]


def names_of(key: str) -> tuple[str, str]:
    """The names by which a flush can mean it, in whatever epoch: its own, and its base's."""
    return name_in(key), base_of(key)


def keys_meant(namespace: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Those of ``keys`` that a flush of ``namespace`` is about, in whatever epoch.

    The name of a base means all its members, the name of a member that one alone.
    """
    return tuple(key for key in keys if namespace in names_of(key))


NO_NAMESPACE: Final = "(no namespace)"
"""How the namespace with an empty name is shown where something must be."""


def told(key: str) -> str:
    """For people: ``llama``, ``llama, epoch 7`` or ``(no namespace), epoch 7``; may be empty."""
    epoch = epoch_in(key)
    return f"{name_in(key) or NO_NAMESPACE}, epoch {epoch}" if epoch else name_in(key)


def quoted(key: str) -> str:
    """For a sentence: ``'llama'``, or ``'llama', epoch 7``."""
    epoch = epoch_in(key)
    return f"{name_in(key)!r}, epoch {epoch}" if epoch else repr(name_in(key))


def epochs_differ(key: str, *, side: str, peer: str, peer_epoch: int) -> str:
    """For people: which epochs of one base these two nodes are in, and what to type where.

    ``key`` is that of ``side``. The last half sentence is the command.
    """
    epoch, base = epoch_in(key), base_of(key)
    behind = peer if peer_epoch < epoch else side
    return (
        f"{side} is in epoch {epoch} of {base!r}, {peer} in {peer_epoch}: KV of other weights is "
        f"not handed over; once both have the same weights, run on {behind}: "
        f"kvd epoch {shlex.quote(base)} {max(epoch, peer_epoch)}"
    )


def bad_name(namespace: str, side: str) -> Refusal | None:
    """Why nobody may call a namespace so."""
    found = _CONTROL.search(namespace)
    if found is None:
        return None
    return Refusal(
        Code.BAD_REQUEST,
        f"namespace {namespace!r} has the control character {found[0]!r}: give it letters, digits "
        "and signs alone, or the hex of its hash",
        side=side,
    )
