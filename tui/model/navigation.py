"""Where the operator is, and the crumbs that lead back up."""

from __future__ import annotations

import msgspec

MAX_CRUMBS = 12


class Location(msgspec.Struct, frozen=True):
    """A page, and what is open on it: ``lease:7``, or nothing. ``above``: the way that led here."""

    page: str
    ref: str = ""
    above: tuple[Location, ...] = ()

    @property
    def label(self) -> str:
        """One crumb."""
        return self.ref or self.page

    def crumbs(self) -> tuple[str, ...]:
        """The way from the page to what is open."""
        return (*(one.label for one in self.above), self.label)

    def open(self, page: str, ref: str) -> Location:
        """Open something from here, on the page that shows it; what was here is one crumb up."""
        if (self.page, self.ref) == (page, ref):
            return self
        return Location(page, ref, (*self.above, self)[-MAX_CRUMBS:])

    def up(self) -> Location:
        """Close what is open: one crumb up; the page itself where there is none."""
        return self.above[-1] if self.above else Location(self.page)
