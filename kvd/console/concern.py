"""One thing that an operator should look at.

What must not live here: what is one (``concerns_*``), and which come first (``concerns``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvd.console.scene import Scene

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


def first_seen(scene: Scene, kind: str, apart: str = "") -> float:
    """Since when looks have seen it; for what the node does not date itself."""
    return scene.since.of(f"concern:{kind}:{apart}", scene.now_s)


def kept_by(scene: Scene, budget: str) -> str:
    """Who keeps the most pages of a component, for the evidence."""
    found = scene.biggest.of(scene, budget)
    return "; ".join(f"{one.ref} of {one.who}" for one in found) or "nobody"


def amount(number: int, what: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
