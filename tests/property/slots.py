"""What lies in every slot of the pages of a sequence, and whether it is what its engine may expect.

A page is a string of marks, one of four characters for each of its tokens. The mark of a token
follows from all tokens before it and from the namespace, so that the KV of one text is never right
for another. A state is one mark with the number of tokens that it stands for.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.core.layout.spec import Buffer, Component, PerRequest, Tail, Whole, has_bytes
from kvd.types import Pages, Tokens, pack_ids, page_ids
from tests.core.side import Side
from tests.core.world import World
from tests.core.writing import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

MARK = 4
NOTHING = "." * MARK


class SlotSide(Side):
    """A side whose pages can be sent in pieces, each with its own slots."""

    def regions_of(self, component: Component) -> list[tuple[str, list[str]]]:
        """Where its pages lie, and what tells the cells of a page there from each other."""
        return [(component.name, [""])]

    @override
    def piece_of(self, what: str, piece: int, split: int) -> str:
        size = len(what) // split
        return what[piece * size : (piece + 1) * size]


class SlotWorld(World):
    side = SlotSide


def extents(side: Side, *kinds: type) -> list[Component]:
    """The components of a side of which this much is kept."""
    return [one for one in side.config.spec.components if isinstance(one.extent, kinds)]


class Standing(Enum):
    """Where a lease is, as its engine knows it."""

    RUNNING = "has its rows"
    LEAVING = "its retraction is not answered"
    AWAY = "has no rows"
    COMING = "its resumption is not answered"


class Sequence:
    """A text with its lease: ``written`` tokens of it are in the rows, in all components."""

    def __init__(self, side: SlotSide, lease: int, asked: Asked, written: int) -> None:
        self.side = side
        self.lease = lease
        self.text = list(asked.text)
        self.step = asked.step
        self.rows: tuple[bytes, ...] = ()
        self.written = written
        self.room = len(self.text) + asked.reserve
        self.promised_to = self.room + asked.promise if asked.promise else 0
        """Pages for so many first tokens are never short; 0: nothing was promised."""
        self.prompt = self.committed = len(self.text)
        """Tokens the node was told of, at first and by now."""
        self.sends: dict[int, int] = {}
        """Up to which token each send has advanced; -1: it is finished."""
        self.has_own_state = False
        """Or goes on from the snapshot behind its prefix."""
        self.standing = Standing.RUNNING
        self.is_kept = False
        """Whether its retraction saves what it has."""
        self.is_fetching = False
        """A fetch is not answered."""
        self.is_over = False
        self._first = self._digest = asked.namespace.encode()
        self._marks: list[str] = []

    @property
    def is_running(self) -> bool:
        return self.standing is Standing.RUNNING and not self.is_over

    @property
    def unnamed(self) -> Tokens:
        """Tokens that are written and that the node was not told of."""
        return Tokens(pack_ids(self.text[self.committed : self.written]))

    @property
    def marks(self) -> list[str]:
        for token in self.text[len(self._marks) :]:
            one = hashlib.blake2s(self._digest + token.to_bytes(4, "little"), digest_size=8)
            self._digest = one.digest()
            self._marks.append(one.hexdigest()[:MARK])
        return self._marks

    def mark(self, token: int, cell: str) -> str:
        """Of a token in one cell; two characters of a shard's are the layer's and the head's."""
        return self.marks[token][: MARK - len(cell)] + cell

    def grow(self, new: Ordered[int]) -> None:
        """The engine has sampled tokens, and computes them next."""
        self.text += new

    def cut(self) -> None:
        """It leaves what it has not written to others."""
        del self.text[self.written :]
        self._digest, self._marks = self._first, []

    # ---- what it computes --------------------------------------------------------------------

    def compute(self, upto: int) -> None:
        """Look at what there is, and write what is missing."""
        self.check()
        for component, row in rows_of(self.side.config.spec, self.rows):
            if isinstance(component.extent, PerRequest):
                own = page_ids(row)[1]
                self.side.memory_of(component.name)[own] = self._state(upto)
                self.has_own_state = True
            elif has_bytes(component):
                self._write(component, row, upto)
        self.written = upto

    def _write(self, component: Component, row: Pages, upto: int) -> None:
        size = component.page_size
        cached, pages = self.side.cached_of(component.name), page_ids(row)
        for token in range(self.written, upto):
            page = pages[token // size]
            assert page, self._about(component, token, "is to be written to the null page")
            assert page not in cached, self._about(component, token, "would change the cache")
            for region, cells in self.side.regions_of(component):
                memory = self.side.memory_of(region)
                before = memory.get(page, "")
                if len(before) != size * MARK * len(cells):
                    before = NOTHING * size * len(cells)
                for number, cell in enumerate(cells):
                    at = (number * size + token % size) * MARK
                    before = before[:at] + self.mark(token, cell) + before[at + MARK :]
                memory[page] = before

    # ---- what it finds -----------------------------------------------------------------------

    def check(self) -> None:
        """Everything is there that the engine may look at to go on."""
        for component, row in rows_of(self.side.config.spec, self.rows):
            match component.extent:
                case Whole() if has_bytes(component):
                    self._read(component, row, 0)
                case Tail(window_tokens=window):
                    self._read(component, row, max(0, self.written - window))
                case PerRequest() if self.written:
                    page = page_ids(row)[1 if self.has_own_state else 0]
                    found = self.side.memory_of(component.name).get(page)
                    assert page, self._about(component, self.written, "has no state before it")
                    assert found == self._state(self.written), self._about(
                        component, self.written, f"has the state {found} before it"
                    )

    def _read(self, component: Component, row: Pages, start: int) -> None:
        pages, size = page_ids(row), component.page_size
        for token in range(start, self.written):
            page = pages[token // size]
            assert page, self._about(component, token, "is on the null page")
            for region, cells in self.side.regions_of(component):
                held = self.side.memory_of(region).get(page, "")
                for number, cell in enumerate(cells):
                    each = held[number * size * MARK : (number + 1) * size * MARK]
                    self._slot(component, token, each, cell)

    def check_fetched(self, wanted: list[int], pages: list[int], upto: int) -> None:
        """The device pages hold what the pages ``wanted`` had when they were asked for."""
        (buffer,) = extents(self.side, Buffer)
        memory, size = self.side.memory_of(buffer.name), buffer.page_size
        for logical, page in zip(wanted, pages, strict=True):
            for token in range(logical * size, min((logical + 1) * size, upto)):
                self._slot(buffer, token, memory.get(page, ""))

    def _slot(self, component: Component, token: int, held: str, cell: str = "") -> None:
        at = token % component.page_size * MARK
        found, wanted = held[at : at + MARK], self.mark(token, cell)
        assert found == wanted, self._about(
            component, token, f"has {found!r} and not {wanted!r} in cell {cell!r}"
        )

    def _state(self, upto: int) -> str:
        return f"{upto}:{self.marks[upto - 1]}"

    def _about(self, component: Component, token: int, what: str) -> str:
        return (
            f"lease {self.lease} of {self.side.name}, {component.name}: token {token} {what}; "
            f"{self.written} of {len(self.text)} are written, rows "
            f"{[page_ids(Pages(row)) for row in self.rows]}"
        )


class Asked:
    """What a request for a lease names."""

    def __init__(
        self, text: list[int], namespace: str, step: int, reserve: int, promise: int = 0
    ) -> None:
        self.text, self.namespace, self.step, self.reserve = text, namespace, step, reserve
        self.promise = promise

    @property
    def tokens(self) -> Tokens:
        return Tokens(pack_ids(self.text))
