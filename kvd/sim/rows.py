"""What an engine has of its lease: a row per component, and how it reads and writes each.

Windows: it computes a token only where a window page is mapped, and looks back at mapped ones only.
States: it copies the snapshot that it goes on from, then writes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.sim.contents import PAGE_TOKENS
from kvd.sim.violation import Violated, require
from kvd.types import Pages, page_ids

if TYPE_CHECKING:
    from kvd.sim.contents import Prompt
    from kvd.sim.host import SimHost
    from kvd.wire import client

EVERYWHERE = 2**31


class EngineRows:
    """The rows of one lease, as its engine knows them."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self.pages: list[int] = []
        """Of the first component, in units."""
        self.beside: tuple[list[int], ...] = ()

    def take(self, reply: client.Leased | client.Received | client.Resumed) -> None:
        """The daemon has given a lease its pages."""
        self.pages = self._host.memory.units(page_ids(Pages(reply.pages)))
        self._take_beside(reply.beside)

    def change(self, reply: client.PageTable) -> None:
        """The daemon has changed the row from some page on, and perhaps those beside it."""
        memory = self._host.memory
        self.pages[reply.first * memory.kinds.units :] = memory.units(page_ids(Pages(reply.pages)))
        self._take_beside(reply.beside)

    def drop(self) -> None:
        """All pages are others' now."""
        self.pages, self.beside = [], ()

    def _take_beside(self, beside: tuple[bytes, ...]) -> None:
        self.beside = tuple(page_ids(Pages(row)) for row in beside)

    # ---- reading -----------------------------------------------------------------------------

    def check(self, prompt: Prompt, n_tokens: int, what: str) -> None:
        """What is needed to go on behind the first ``n_tokens`` is there.

        Raises:
            Violated: A page holds something else, or is not there.
        """
        host, contents = self._host, prompt.upto(n_tokens)
        host.check(self.pages, contents, n_tokens, what)
        kinds = host.memory.kinds
        for number, name, window in kinds.windows:
            row = self.beside[number]
            first = max(0, n_tokens - window) // PAGE_TOKENS
            if not all(row[first : len(contents)]):
                raise Violated(f"{host.name}: {what}: null page in the window of {name}: {row}")
            mapped = [(page, due) for page, due in zip(row, contents, strict=False) if page]
            pages, dues = [one for one, _ in mapped], [due for _, due in mapped]
            host.check_beside(name, pages, dues, what)
        for number, name in kinds.states:
            if n_tokens:
                host.check_beside(name, self.beside[number][1:], contents[-1:], what)

    def go_on(self, prompt: Prompt, n_tokens: int, what: str) -> None:
        """A lease has begun behind ``n_tokens`` that are there: copy their state if it is shared.

        Raises:
            Violated: They are not there.
        """
        host = self._host
        for number, name in host.memory.kinds.states:
            source, own = self.beside[number]
            if source:
                host.check_beside(name, [source], prompt.upto(n_tokens)[-1:], what)
                held = host.memory.regions[name]
                held[own] = held[source]
        self.check(prompt, n_tokens, what)

    # ---- writing -----------------------------------------------------------------------------

    @property
    def reach_tokens(self) -> int:
        """How far the engine may compute without sliding on."""
        reach = EVERYWHERE
        for number, _, _ in self._host.memory.kinds.windows:
            row = self.beside[number]
            top = next((k for k in range(len(row), 0, -1) if row[k - 1]), 0)
            if top < len(row):
                reach = min(reach, top * PAGE_TOKENS)
        return reach

    @property
    def has_windows(self) -> bool:
        """Whether there is anything to slide."""
        return bool(self._host.memory.kinds.windows)

    def write(self, prompt: Prompt, start_tokens: int, upto_tokens: int) -> None:
        """Compute ``[start, upto)`` of the prompt and write all components of it."""
        host, contents = self._host, prompt.upto(upto_tokens)
        require(upto_tokens <= self.reach_tokens, f"{host.name}: computes beyond its window pages")
        host.memory.write(self.pages, contents, start_tokens)
        if upto_tokens <= start_tokens:
            return
        regions = host.memory.regions
        for number, name, _ in host.memory.kinds.windows:
            row = self.beside[number]
            for k in range(start_tokens // PAGE_TOKENS, len(contents)):
                require(row[k], f"{host.name}: page {k} of {name} is to be written: {row}")
                regions[name][row[k]] = contents[k]
        for number, name in host.memory.kinds.states:
            regions[name][self.beside[number][1]] = contents[-1]
