"""A side of a world as consoles see it: its context, fed with everything that happens there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.context import Context
from kvd.console.history import Recent
from kvd.console.server import VIEWS
from kvd.console.view import TableWindow
from kvd.observe.bus import Bus
from kvd.wire.console import Filter, Query
from tests.console.looked import in_one

if TYPE_CHECKING:
    from kvd.wire.console import Cell
    from tests.core.side import Side


class Shell:
    """What the shell would know: every process lives, unless it is among the ``dead``."""

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def calls(self, session: int) -> int:
        return session * 10

    def is_alive(self, pid: int) -> bool:
        return pid not in self.dead


class Stage:
    """Looks at one side of a world."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.bus = Bus()
        self.shell = Shell()
        recent = Recent()
        self.bus.subscribe(recent.take, wants=recent.wants)
        self.context = Context(side.node, recent, self.shell)
        self._published = 0

    def now(self) -> Context:
        self.bus.publish(self.side.events[self._published :])
        self._published = len(self.side.events)
        self.context.now_s = self.side.world.now_s
        return self.context

    def window(self, view: str, *, sort: str = "", filters: tuple[Filter, ...] = ()) -> TableWindow:
        """All rows of a view."""
        found = in_one(
            VIEWS[view].look(self.now(), Query(view, sort=sort, filters=filters, limit=500))
        )
        assert isinstance(found, TableWindow), found
        return found

    def rows(self, view: str, **how: object) -> dict[str, dict[str, Cell]]:
        """The same by key, each cell by its column."""
        names = [column.name for column in VIEWS[view].columns]
        return {
            row.key: dict(zip(names, row.cells, strict=True))
            for row in self.window(view, **how).rows  # type: ignore[arg-type]
        }

    def row(self, view: str, key: str) -> dict[str, Cell]:
        return self.rows(view)[key]
