"""Where the operator has been: crumbs to go up, the place before, and back and forth in time."""

from __future__ import annotations

import msgspec

MAX_PLACES = 200
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


class Navigation:
    """Begins on one page, and is never nowhere."""

    def __init__(self, page: str) -> None:
        self._places = [Location(page)]
        self._at = 0
        self._before = self._places[0]

    @property
    def here(self) -> Location:
        """Where the operator is."""
        return self._places[self._at]

    def crumbs(self) -> tuple[str, ...]:
        """The way from the page to what is open."""
        return (*(one.label for one in self.here.above), self.here.label)

    def to_page(self, page: str) -> Location:
        """Go to a page: a new way begins there."""
        return self._go(Location(page))

    def open(self, page: str, ref: str) -> Location:
        """Open something from here, on the page that shows it; what was here is one crumb up."""
        here = self.here
        if (here.page, here.ref) == (page, ref):
            return here
        return self._go(Location(page, ref, (*here.above, here)[-MAX_CRUMBS:]))

    def up(self) -> Location:
        """Close what is open: one crumb up; the page itself where there is none."""
        here = self.here
        if here.above:
            return self._go(here.above[-1])
        return self._go(Location(here.page)) if here.ref else here

    def last(self) -> Location:
        """The place before this one; twice is here again."""
        return self._go(self._before)

    def backward(self) -> Location:
        """One place back in time; stays at the first."""
        return self._move(-1)

    def forward(self) -> Location:
        """One place on again; stays at the last."""
        return self._move(1)

    def _go(self, place: Location) -> Location:
        if place == self.here:
            return place
        self._before = self.here
        self._places = [*self._places[: self._at + 1], place][-MAX_PLACES:]
        self._at = len(self._places) - 1
        return place

    def _move(self, step: int) -> Location:
        at = max(0, min(len(self._places) - 1, self._at + step))
        if at != self._at:
            self._before, self._at = self.here, at
        return self.here
