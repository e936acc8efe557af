"""One thing that an operator should look at, and what the looks that find such have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvd.console.context import Context
    from kvd.core.cache.lease_record import LeaseRecord

HIGH, MEDIUM, LOW = "high", "medium", "low"
GRAVEST = (HIGH, MEDIUM, LOW)


class Concern(msgspec.Struct, frozen=True):
    """What is not as it should be; a moment says since when, never an age.

    ``subject`` is what to open: ``lease:7``, ``send:4``, ``peer:one``, ``pool:kv``, or empty for
    the node itself. ``evidence`` are numbers and names, ``rule`` what should be so, ``action`` one
    command of the console (``open lease:7``, ``fence``), or words. ``apart`` tells concerns of the
    same kind about the same subject from each other.
    """

    severity: str
    kind: str
    subject: str
    evidence: str
    since_s: float
    rule: str
    action: str
    apart: str = ""

    @property
    def key(self) -> str:
        """The same from look to look."""
        return f"concern:{self.kind}:{self.apart or self.subject}"


def first_seen(context: Context, kind: str, apart: str = "") -> float:
    """Since when looks have seen it; for what the node does not date itself."""
    return context.since.of(f"concern:{kind}:{apart}", context.now_s)


def held_by(context: Context, budget: str) -> str:
    """Who holds the most pages of a component, living or not, for the evidence."""
    found = context.biggest.of(context.node, context.now_s, budget)
    return "; ".join([holder.who + (f" ({holder.state})" * bool(holder.state)) for holder in found])


def open_biggest(context: Context, budget: str) -> str:
    """What to open of a component that is short: who holds the most of it."""
    found = context.biggest.of(context.node, context.now_s, budget)
    return f"open {found[0].ref}" if found else f"open pool:{budget}"


def pages_of(leases: Collection[LeaseRecord]) -> str:
    """``2 leases with 7 pages``."""
    pages = sum([lease.held_pages for lease in leases])
    return f"{counted(len(leases), 'lease')} with {counted(pages, 'page')}"
