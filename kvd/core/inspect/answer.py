"""What ``why`` has to say of one thing, and how it refers to others.

What must not live here: what is said (``why`` and the modules beside it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.types import ID_BYTES
from kvd.wire.admin import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix_node import RadixNode as TreeEdge

MAX_LINKS = 20
"""Of one kind: enough to go on from, few enough to choose from."""


class Explanation(msgspec.Struct, frozen=True):
    """See ``Because``: who, why and since when in one sentence, then the rest."""

    sentence: str
    facts: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


def lease_refs(leases: Iterable[Lease]) -> list[str]:
    """The first few, to be asked about next."""
    return [f"lease:{lease.id}" for lease, _ in zip(leases, range(MAX_LINKS), strict=False)]


def node_refs(edges: Iterable[TreeEdge]) -> list[str]:
    """The first few, to be asked about next."""
    return [f"node:{edge.id}" for edge, _ in zip(edges, range(MAX_LINKS), strict=False)]


def holder_refs(lease: Lease) -> list[str]:
    """A lease, and whose it is."""
    return [f"lease:{lease.id}", *([f"client:{lease.session}"] if lease.session else [])]


def links_of(*refs: str) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(refs))


def has_page(pages: bytes, wanted: bytes, first: int = 0) -> bool:
    """Whether this page, as its id is packed, is among ``pages`` from index ``first`` on.

    A search for its bytes, which is right where it begins at an id: 0.1 us for a short row, where
    a look at every id would take 2 us.
    """
    at = pages.find(wanted, first * ID_BYTES)
    while at >= 0 and at % ID_BYTES:
        at = pages.find(wanted, at + 1)
    return at >= 0
