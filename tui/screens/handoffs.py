"""Handoffs under way, and the life of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvd.wire.admin import AdminFailed, AskOtherEnd, Because, OtherEnds, Why
from kvd.wire.console import Filter
from tui.model import handoffs
from tui.model.dress import Wardrobe
from tui.model.lives import Life
from tui.model.rates import RowRates
from tui.screens.page import Page
from tui.widgets.dressed import DressedTable
from tui.widgets.fitting import Rules
from tui.widgets.life import LifePanel
from tui.widgets.reach import console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.worker import Worker

    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.dress import Facts
    from tui.model.moments import Moment

HERE_S = 0.5
"""How often our daemon is asked for the story of the one under the cursor."""
THERE_S = 1.0
"""And the other daemon, through ours."""


class HandoffsPage(Page):
    """All handoffs of this node above, the life of the one under the cursor below."""

    NAME = "handoffs"
    FAULTS: ClassVar[Mapping[str, str]] = {"rooms": "moved>2s !state=ready"}
    REFS = ("room", "receive", "send")

    DEFAULT_CSS = """
    HandoffsPage > #table-rooms { height: 1fr; }
    HandoffsPage > LifePanel { height: 52%; min-height: 6; max-height: 24; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("done_bytes")
        self._life: Life | None = None

    @override
    def compose(self) -> ComposeResult:
        painters = {
            "state": handoffs.state,
            "peer": handoffs.peer,
            "progress": self._progress,
            "done": handoffs.done,
            "rate": handoffs.rate,
            "eta": handoffs.eta,
            "waiting_for": handoffs.waiting_for,
        }
        yield DressedTable(
            "rooms",
            Wardrobe(handoffs.COLUMNS, self._made, handoffs.FIRST),
            painters,
            title="handoffs",
            rules=Rules(handoffs.MATTERS, handoffs.HIDDEN),
            stands_for=handoffs.STANDS_FOR,
            rates=(self._rates,),
        )
        yield LifePanel(id="life")

    @override
    def on_mount(self) -> None:
        """Ask for stories, each at its pace."""
        self.set_interval(HERE_S, self.ask_here)
        self.set_interval(THERE_S, self.ask_there)

    # ---- the table --------------------------------------------------------------------------

    @property
    def rooms(self) -> DressedTable:
        """The handoffs."""
        return self.query_one("#table-rooms", DressedTable)

    def _made(self, row: Facts) -> tuple[Cell, ...]:
        return handoffs.made(row, self._rates)

    def _progress(self, row: Facts) -> tuple[str, Style]:
        return handoffs.progress(row, handoffs.bar_columns(self.size.width))

    @override
    def show(self, moment: Moment) -> None:
        super().show(moment)
        row = self.rooms.facts()
        if row is None:
            self._life = None
        elif self._life is None or self._life.ref != row.row.key:
            self._life = Life(row.row.key)
            self.ask_here()
            self.ask_there()
        life = self._life if self._life is not None else Life("")
        node = moment.vitals.node if moment.vitals is not None else "here"
        panel = self.query_one(LifePanel)
        if panel.display:
            panel.show(life, row, node, moment.now_s)

    @override
    def seek(self, ref: str) -> bool:
        """Of a room: the first part of it."""
        kind, _, number = ref.partition(":")
        sheet = self.rooms.sheet
        if kind != "room" or sheet is None or not number.isdecimal():
            return super().seek(ref)
        found = [key for key in sheet.order if sheet.cell(key, "room") == int(number)]
        return bool(found) and super().seek(found[0])

    # ---- the life of one --------------------------------------------------------------------

    def ask_here(self) -> None:
        """Ask our daemon for the story of the one that is shown."""
        if self._is_asking():
            _: Worker[None] = self.run_worker(self._ask_here, group="here", exclusive=True)

    def ask_there(self) -> None:
        """Have it ask the daemon at the other end."""
        if self._is_asking():
            _: Worker[None] = self.run_worker(self._ask_there, group="there", exclusive=True)

    def _is_asking(self) -> bool:
        """Whether the life of one is to be seen, as it is now."""
        is_seen = self.display and self.query_one(LifePanel).display
        return is_seen and self._life is not None and not console(self).mirror.moments.is_frozen

    async def _ask_here(self) -> None:
        life = self._life
        kind, _, number = life.ref.partition(":") if life is not None else ("", "", "")
        if not number.isdecimal():
            return
        reply = await console(self).link.ask(Why(0, kind, int(number)))
        if self._life is None or life is None or self._life.ref != life.ref:
            return
        match reply:
            case AdminFailed(refusal=refusal):
                self._life = self._life.with_here(self._now_s(), refusal)
            case Because():
                self._life = self._life.with_here(self._now_s(), reply)
            case _:
                pass

    async def _ask_there(self) -> None:
        life, row = self._life, self.rooms.facts()
        room = row.number("room") if row is not None else None
        if life is None or row is None or row.row.key != life.ref or room is None:
            return
        if row.text("state") in handoffs.ENDED:
            return
        reply = await console(self).link.ask(AskOtherEnd(0, int(room)))
        if self._life is None or self._life.ref != life.ref:
            return
        match reply:
            case AdminFailed(refusal=refusal):
                self._life = self._life.with_there(self._now_s(), refusal)
            case OtherEnds(ends=ends):
                self._life = self._life.with_there(self._now_s(), ends)
            case _:
                pass

    def _now_s(self) -> float:
        """The daemon's clock, as of its newest frame."""
        return console(self).mirror.moments.newest.now_s


async def show_handoffs(page: Page, column: str, ref: str) -> None:
    """Go from ``page`` to the handoffs that have this in that column."""
    if not ref:
        return
    app = console(page)
    await app.do(f"page {HandoffsPage.NAME}")
    table = app.page.table()
    if table is not None:
        table.set_filters(f'{column}="{ref}"', (Filter(column, "is", ref),))
