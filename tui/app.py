"""The console: pages between a head and a foot, a clock that paints, and keys that act.

No data is made here. A link fills the mirror as frames come; ``fps`` times a second the clock
paints the visible page from the picture that is shown, which is the newest unless it is frozen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec
from textual.app import App
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import ContentSwitcher
from typing_extensions import override

from kvd.errors import Refusal
from kvd.wire.admin import AdminFailed, Because
from tui import keys
from tui.model.mirror import Wanted
from tui.pace import Pace
from tui.screens import ALL, page_of
from tui.themes import HIGH_CONTRAST, THEMES
from tui.widgets import head as heads
from tui.widgets.card import Card, Told, question

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.timer import Timer

    from kvd.wire.admin import AdminReply, AdminRequest
    from tui.model.mirror import Mirror
    from tui.model.moments import Moment
    from tui.screens.page import Page
    from tui.widgets.linetable import LineTable

NARROW_COLUMNS = 100
"""A terminal with fewer has no room for a card beside the page."""
CARD_S = 0.5
"""How often what is open is asked about."""


class Source(Protocol):
    """Where frames come from: a daemon, or a file."""

    is_replay: bool

    async def run(self) -> None:
        """Fill the mirror until cancelled."""

    async def ask(self, request: AdminRequest) -> AdminReply | Refusal:
        """Ask the daemon something beside; a refusal says why there is no answer."""


class Options(msgspec.Struct, frozen=True):
    """How the console was started."""

    readonly: bool = False
    fps: float = 10.0
    theme: str = THEMES[0]
    page: str = keys.PAGES[0]


class Bench(Screen[None], inherit_bindings=False):
    """The screen under everything; it has all keys of the table."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(name, f"app.press({name!r})", show=False) for name in keys.names()
    ]


class KvdTui(App[None]):
    """The console; ``source`` fills ``mirror`` with what ``wanted`` says."""

    TITLE = "kvd"
    CSS_PATH = "kvd.tcss"
    AUTO_FOCUS = None
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, mirror: Mirror, source: Source, options: Options | None = None) -> None:
        super().__init__()
        self.mirror = mirror
        self.source = source
        self.options = options if options is not None else Options()
        self.pace = Pace(self.options.fps)
        self._frames_clock: Timer | None = None
        self._visible = self.options.page
        self._before = self.options.page
        self._seen: tuple[object, ...] = ()
        self.register_theme(HIGH_CONTRAST)

    # ---- what is on the screen --------------------------------------------------------------

    @override
    def get_default_screen(self) -> Screen[None]:
        return Bench(id="_default")

    @override
    def compose(self) -> ComposeResult:
        yield heads.Head(id="head")
        yield heads.Tabs(id="tabs")
        with Horizontal(id="body"):
            yield ContentSwitcher(ALL[self._visible](), id="pages", initial=f"page-{self._visible}")
            yield Card()
        yield heads.Foot(id="foot")

    def on_mount(self) -> None:
        """Start to ask, and to paint."""
        self.theme = self.options.theme
        self.run_worker(self.source.run(), name="source", exit_on_error=True)
        self._frames_clock = self.set_interval(1 / self.pace.fps, self.tick)
        self.set_interval(CARD_S, self.ask_again)
        self.call_after_refresh(self.tick)

    def on_resize(self) -> None:
        """Where the card goes depends on the width."""
        self.screen.set_class(self.size.width < NARROW_COLUMNS, "narrow")
        self._seen = ()
        self.call_after_refresh(self.tick)

    @property
    def page(self) -> Page:
        """The visible page."""
        found = self.query_one("#pages", ContentSwitcher).visible_content
        assert found is not None
        return found  # type: ignore[return-value]

    @property
    def card(self) -> Card:
        """What is open."""
        return self.query_one(Card)

    @property
    def moment(self) -> Moment:
        """The picture that is shown."""
        return self.mirror.moments.shown

    def wanted(self) -> Wanted:
        """What the visible page wants to know; the link asks before each frame."""
        return Wanted(self.page.queries(), self.page.events())

    # ---- the clock --------------------------------------------------------------------------

    def tick(self) -> None:
        """Paint what differs from what is there."""
        start_s = time.perf_counter()
        self._paint_frame()
        moment = self.moment
        seen = (self.mirror.frames, moment.heard_s, self._visible, self.size, self.theme)
        if seen != self._seen:
            self._seen = seen
            self.page.show(moment)
            self.call_after_refresh(self._painted, start_s)

    def _painted(self, start_s: float) -> None:
        if self.pace.painted(time.perf_counter() - start_s):
            self.set_pace()

    def set_pace(self) -> None:
        """Paint as often as the pace says."""
        if self._frames_clock is not None:
            self._frames_clock.stop()
        self._frames_clock = self.set_interval(1 / self.pace.fps, self.tick)

    def _paint_frame(self) -> None:
        """The lines around the page."""
        width, now_s = self.size.width, time.monotonic()
        moments = self.mirror.moments
        now = heads.Situation(
            self.mirror.standing(now_s, 1 / self.pace.fps),
            now_s,
            self.pace.fps,
            moments.behind_s if moments.is_frozen else None,
            self.source.is_replay,
            self.pace.slowed_from,
        )
        line = heads.head_line(self.moment.vitals, now, width)
        self.query_one(heads.Head).paint([line])
        self.query_one(heads.Tabs).paint([heads.tab_line(self._visible, (), width)])
        foot = heads.foot_line(list(keys.here(self._visible, self.has())), width)
        self.query_one(heads.Foot).paint([foot])

    # ---- keys -------------------------------------------------------------------------------

    def has(self) -> frozenset[str]:
        """Which of ``keys.NEEDS`` there are now."""
        page = self.page
        has_table = page.table() is not None
        found = {
            "write": not self.options.readonly and not self.source.is_replay,
            "table": has_table,
            "tables": len(page.tables()) > 1,
            "filter": has_table or page.CAN_FILTER,
            "move": has_table or page.CAN_MOVE,
            "chosen": bool(page.chosen()),
            "card": bool(self.card.ref),
            "frozen": self.mirror.moments.is_frozen,
            "faults": bool(page.FAULTS),
        }
        return frozenset(name for name, is_so in found.items() if is_so)

    async def action_press(self, name: str) -> None:
        """Do what a key means here and now."""
        key = keys.meaning(name, self._visible, self.has())
        if key is not None:
            await self.do(key.action)

    async def do(self, action: str) -> None:
        """Do an action of the table of keys: the console's own, else the page's."""
        verb, _, rest = action.partition(" ")
        moments = self.mirror.moments
        match verb:
            case "page":
                await self.show_page(rest)
            case "last":
                await self.show_page(self._before)
            case "open":
                await self.open(self.page.chosen())
            case "back":
                self.card.close()
            case "freeze":
                (moments.live if moments.is_frozen else moments.freeze)()
            case "live":
                moments.live()
            case "step":
                moments.step(int(rest))
            case "quit":
                self.exit()
            case _:
                await self.page.act(action)
        self._follow()
        self.tick()

    # ---- going somewhere --------------------------------------------------------------------

    async def show_page(self, name: str) -> None:
        """Show this page; it is made when it is first shown."""
        if name == self._visible:
            return
        switcher = self.query_one("#pages", ContentSwitcher)
        if not switcher.query(f"#page-{name}"):
            await switcher.add_content(ALL[name]())
        switcher.current = f"page-{name}"
        self._before, self._visible = self._visible, name
        self.call_after_refresh(self.tick)

    async def open(self, ref: str) -> None:
        """Go to the page that shows this, put the cursor on it, and open its card."""
        name = page_of(ref)
        if name and not self.page.seek(ref):
            await self.show_page(name)
            self.page.seek(ref)
        self.card.open(ref)
        self.ask_again()

    def _follow(self) -> None:
        """The card goes with the cursor."""
        chosen = self.page.chosen()
        if self.card.ref and chosen and chosen != self.card.ref:
            self.card.open(chosen)
            self.ask_again()

    # ---- the card ---------------------------------------------------------------------------

    def ask_again(self) -> None:
        """Ask about what is open, and show what its row says meanwhile."""
        ref = self.card.ref
        if ref:
            self.run_worker(self._ask(ref), name="card", group="card", exclusive=True)

    async def _ask(self, ref: str) -> None:
        """One answer for the card."""
        asked = question(ref)
        answer = await self.source.ask(asked) if asked is not None else None
        if self.card.ref != ref:
            return
        kept = self.card.told.answer if self.card.told is not None else None
        match answer:
            case AdminFailed(refusal=refusal):
                kept = refusal
            case Because() | Refusal():
                kept = answer
            case _:
                pass
        table = self.page.table()
        row = table.row() if table is not None and table.chosen() == ref else None
        columns = table.columns if table is not None and row is not None else ()
        self.card.say(Told(ref, kept, row, columns, self.moment.now_s))

    # ---- the mouse --------------------------------------------------------------------------

    async def on_tabs_chosen(self, message: heads.Tabs.Chosen) -> None:
        """A page was clicked."""
        await self.show_page(message.page)

    async def on_line_table_opened(self, message: LineTable.Opened) -> None:
        """A row was clicked twice."""
        self.page.activate(message.table)
        await self.open(message.table.chosen())

    def on_line_table_moved(self, message: LineTable.Moved) -> None:
        """The cursor moved."""
        if message.table is not self.page.table():
            self.page.activate(message.table)
        self._follow()
