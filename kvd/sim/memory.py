"""What the pages of one host hold: for each region the content of each page.

Everything is counted in units of ``PAGE_TOKENS`` tokens; a large page is several of them, one after
the other, as its pieces are numbered in a post. A component in lockstep with the first is written
with it, piece by piece. Its content follows from the first one's, so only whether it was moved at
all has to be told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.spec import Whole, saved_region
from kvd.sim.contents import PAGE_TOKENS, UNWRITTEN
from kvd.sim.pool import kinds_of

if TYPE_CHECKING:
    from kvd.core.spec import PoolSpec
    from kvd.sim.contents import Contents


class SimMemory:
    """One process's pools. ``regions``: by name, what their pages hold."""

    def __init__(self, spec: PoolSpec, contents: Contents) -> None:
        self.kinds = kinds_of(spec)
        self.regions: dict[str, list[int]] = {}
        for one, pages, saved in zip(spec.components, spec.pages, spec.saved_pages, strict=True):
            units = self.kinds.units if isinstance(one.extent, Whole) else 1
            self.regions[one.name] = [UNWRITTEN] * (pages * units)
            self.regions[saved_region(one)] = [UNWRITTEN] * (max(1, saved) * units)
        self.first = self.regions[spec.components[0].name]
        self._contents = contents

    def units(self, pages: list[int]) -> list[int]:
        """Those of pages of the first component, or of one in lockstep with it."""
        units = self.kinds.units
        if units == 1:
            return pages
        return [page * units + piece for page in pages for piece in range(units)]

    def write(self, pages: list[int], contents: list[int], start_tokens: int) -> None:
        """An engine writes units of its row from ``start_tokens`` on, up to the last content."""
        first = self.first
        for k in range(start_tokens // PAGE_TOKENS, len(contents)):
            first[pages[k]] = contents[k]
            for name, factor, _ in self.kinds.companions:
                beside = self.regions[name]
                for piece in range(factor):
                    page = pages[k] * factor + piece
                    beside[page] = self._contents.piece(contents[k], piece)

    def wrong(self, pages: list[int], contents: list[int], n_tokens: int) -> list[str]:
        """Which of these units do not hold that many tokens of these contents."""
        held = self._wrong("", self.first, pages, contents)
        for name, factor, unit_tokens in self.kinds.companions:
            due = [
                self._contents.piece(content, piece)
                for content in contents
                for piece in range(factor)
            ][: -(-n_tokens // unit_tokens)]
            row = [page * factor + piece for page in pages for piece in range(factor)]
            held += self._wrong(f" of {name}", self.regions[name], row, due)
        return held

    def wrong_beside(self, region: str, pages: list[int], contents: list[int]) -> list[str]:
        """The same of a component with pages of its own."""
        return self._wrong(f" of {region}", self.regions[region], pages, contents)

    def _wrong(self, of: str, held: list[int], pages: list[int], contents: list[int]) -> list[str]:
        if [held[page] for page in pages[: len(contents)]] == contents:
            return []
        wrong = [
            f"page {page}{of} holds {held[page]}, {wanted} is due"
            for page, wanted in zip(pages, contents, strict=False)
            if held[page] != wanted
        ]
        return wrong or [f"pages{of} are missing"]
