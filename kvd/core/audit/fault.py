"""A rule that did not hold at the moment when it was looked at.

What must not live here: how long it has been so, and who was told (``findings``).
"""

from __future__ import annotations

import msgspec

from kvd.types import NO_PAGES, Pages

Key = tuple[str, str, int, int, str, int]
"""What makes two faults the same one: the check, and what it is about."""


class Fault(msgspec.Struct, frozen=True):
    """One broken rule, and what it is about; 0 and empty where it is about no such thing.

    ``rule`` is one of I1 to I9, ``check`` says which part of it in a word, ``what`` in a sentence.
    ``side`` and ``part`` name one part of a handoff, ``node`` a node of the tree; ``component`` is
    empty for the first one, which is meant where none is said.
    """

    rule: str
    check: str
    what: str
    lease: int = 0
    node: int = 0
    side: str = ""
    part: int = 0
    pages: Pages = NO_PAGES
    component: str = ""
    session: int = 0
    """Whose lease it was, where that is gone."""

    @property
    def key(self) -> Key:
        """Equal for the same fault seen twice."""
        return self.check, self.component, self.lease, self.node, self.side, self.part

    @property
    def sentence(self) -> str:
        """The rule, and what is wrong."""
        return f"{self.rule}: {self.what}"
