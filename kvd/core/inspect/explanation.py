"""What an answer to "why" is made of: a sentence, facts, and references to what to ask next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.wire.admin import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inspect.schema import S, StateTable, T
    from kvd.core.inspect.view import NodeView

MAX_LINKS = 20
"""Of one kind: enough to go on from, few enough to choose from."""


class Explanation(msgspec.Struct, frozen=True):
    """See ``Because``: who, why and since when in one sentence, then the rest."""

    sentence: str
    facts: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


def plain_facts(node: NodeView, table: StateTable[T, S], row: T) -> list[str]:
    """What the schema has of it and no sentence here speaks of: each as it is named.

    An empty word says nothing: an engine that has not told what it is has no kind.
    """
    values = [(field.column, field.get(node, row)) for field in table.plain]
    return [f"{column}: {value}" for column, value in values if value != ""]


def lease_refs(leases: Iterable[LeaseRecord]) -> list[str]:
    """The first few, to be asked about next."""
    return [f"lease:{lease.id}" for lease, _ in zip(leases, range(MAX_LINKS), strict=False)]


def node_refs(edges: Iterable[RadixNode]) -> list[str]:
    """The first few, to be asked about next."""
    return [f"node:{edge.id}" for edge, _ in zip(edges, range(MAX_LINKS), strict=False)]


def holder_refs(lease: LeaseRecord) -> list[str]:
    """A lease, and whose it is."""
    return [f"lease:{lease.id}", *([f"client:{lease.session}"] if lease.session else [])]


def links_of(*refs: str) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(refs))
