"""The console: pages between a head and a foot, a clock that paints, and keys that act.

No data is made here. A link fills the mirror as frames come; ``fps`` times a second the clock
paints the visible page from the picture that is shown, which is the newest unless it is frozen.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual import events
from textual._xterm_parser import XTermParser
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.drivers.linux_driver import LinuxDriver
from textual.widgets import ContentSwitcher, Tab, Tabs
from typing_extensions import override

from kvd.errors import Code, Refusal
from kvd.text import age
from kvd.wire.admin import Because
from tui import actions
from tui.model.commands import FACES, PAGES, RULES, cli_command
from tui.model.mirror import Subscription
from tui.model.peers import ALL_PEERS, TrafficRates
from tui.model.snapshots import differences
from tui.screens import ALL, page_of
from tui.themes import HIGH_CONTRAST, THEMES, texts_of
from tui.widgets import head as heads
from tui.widgets.canvas import Canvas, Ground
from tui.widgets.card import ELSEWHERE, Card, CardContent, question
from tui.widgets.commandbar import CommandBar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from textual.actions import ActionParseResult
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.dom import DOMNode
    from textual.screen import Screen
    from textual.worker import Worker

    from tui.link import Link
    from tui.model.mirror import Mirror, Notice
    from tui.model.snapshots import DaemonSnapshot
    from tui.screens.page import Page
    from tui.widgets.canvas import Cursored


class Keyboard(LinuxDriver):
    """Textual's own, except that bytes that are no UTF-8 are lost, not the console.

    A terminal of another encoding sends them for an umlaut, and a paste may have anything. What
    was read with them is not lost: the first byte of a character is refused with the key after it.
    """

    @override
    def run_input_thread(self) -> None:
        while not self.exit_event.is_set():
            try:
                super().run_input_thread()
            except UnicodeDecodeError as exc:
                self._take(exc.object.decode("utf-8", "ignore"))

    def _take(self, text: str) -> None:
        """What can be read of what was refused."""
        for event in XTermParser(self._debug).feed(text):
            self.process_message(event)


TABS_COLUMNS = 62
"""With fewer only the page that is shown has its name; the others their numbers."""
NARROW_COLUMNS = 100
"""A terminal with fewer has no room for a card beside the page."""
COMPARED_S = (60.0, 600.0)
"""What the key compares with, one after the other; then with now, as it goes on."""
CHARTED_S = (1.0, 8.0)
"""Of a dot of the charts: two minutes at a glance, or the quarter of an hour that is kept."""
AHEAD_S = 3.0
"""So long keys about a row wait for the first rows of a page."""
ABOUT_A_ROW = frozenset({"enter", "r", "i", "y", "ctrl+k", "x", "h", "p", "up", "down", "k", "j"})
ON_SOMETHING = ("open", "related", "events_of", "copy")
"""About what is open, or under the cursor."""
CARD_S = 0.5
"""How often what is open is asked about."""
RESIZED_S = 0.1
"""So long after a resize all is painted: Textual paints what moved, a terminal forgets more."""
FROZEN = Refusal(Code.NOT_SUPPORTED, "frozen: the daemon is asked again when this is live")


class Options(msgspec.Struct, frozen=True):
    """How the console was started."""

    readonly: bool = False
    fps: float = 4.0
    theme: str = THEMES[0]
    page: str = PAGES[0]
    ref: str = ""
    """What is open at first; empty for nothing."""


MAX_CRUMBS = 12


class Location(msgspec.Struct, frozen=True):
    """A page, and what is open on it: ``lease:7``, or nothing. ``above``: the way that led here."""

    page: str
    ref: str = ""
    above: tuple[Location, ...] = ()

    def crumbs(self) -> tuple[str, ...]:
        """The way from the page to what is open."""
        return tuple([view.ref or view.page for view in (*self.above, self)])

    def open(self, page: str, ref: str) -> Location:
        """Open something from here, on the page that shows it; what was here is one crumb up."""
        if (self.page, self.ref) == (page, ref):
            return self
        return Location(page, ref, (*self.above, self)[-MAX_CRUMBS:])

    def up(self) -> Location:
        """Close what is open: one crumb up; the page itself where there is none."""
        return self.above[-1] if self.above else Location(self.page)


def _tab_of(page: str) -> str:
    """The tab of a page, also of another face of it."""
    return f"tab-{FACES.get(page, page)}"


def _tab_label(page: str, active: str, *, is_narrow: bool = False) -> str:
    """By a sign too: a terminal without colours, and a text of the screen, have no style."""
    label = f"{PAGES.index(page) + 1} {page}"
    if _tab_of(page) == active:
        return f">{label}<"
    return f" {label[:1] if is_narrow else label} "


class PageTabs(Tabs, can_focus=False):
    """The pages by their numbers."""


class KvdTui(App[None], inherit_bindings=False):
    """The console. ``connect`` makes the link that fills a mirror with what is wanted of it.

    ``clock``: seconds on our own clock, the one on which the link says when frames came.
    """

    TITLE = "kvd"
    CSS_PATH = "kvd.tcss"
    AUTO_FOCUS = None
    BINDING_GROUP_TITLE = "on every page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "freeze", "freeze", tooltip="or go on live; it goes on collecting"),
        Binding("escape", "close", "close, or back along the way you came", show=False),
        Binding("ctrl+up", "scroll_card(-3)", "the card up", show=False),
        Binding("ctrl+down", "scroll_card(3)", "the card down", show=False),
        Binding(
            "c",
            "compare",
            "compare",
            tooltip="with a minute ago; again: ten; again: with now, as it goes on; again: no more",
        ),
        Binding("t", "charts", "time", show=False, tooltip="charts of two minutes, or of fifteen"),
        Binding("ctrl+t", "next_theme", "the next theme", show=False),
        Binding("?", "help", "help", tooltip="these keys, and the commands"),
        Binding("q,ctrl+c", "quit", "quit"),
    ]

    def __init__(
        self,
        mirror: Mirror,
        connect: Callable[[Mirror, Callable[[], Subscription]], Link],
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        # The terminal's own colours, as then none is sent at all; else Textual sends greys.
        super().__init__(Keyboard, ansi_color=True if "NO_COLOR" in os.environ else None)
        self.mirror: Mirror = mirror
        self.options = options if options is not None else Options()
        self.clock = clock
        self._wall = wall
        self._wall_ahead_s = 0.0
        """Of the daemon's clock."""
        self.traffic = TrafficRates()
        """With every peer, whatever page is shown."""
        self._compared: DaemonSnapshot | None = None
        """What the overview says the difference to; None: nothing."""
        self._compares = 0
        self.chart_step_s = CHARTED_S[0]
        self._ahead: list[events.Key] = []
        """Keys that wait for the rows of the page, and those after them."""
        first = self.options.page
        self.place = Location(first)
        """Where the operator is."""
        self.animation_level = "none"
        self._head = Canvas(id="head")
        self._tabs = PageTabs(
            *(Tab(_tab_label(page, _tab_of(first)), id=_tab_of(page)) for page in PAGES),
            active=_tab_of(first),
        )
        self.card: Card = Card()
        """What is open."""
        self._happened = heads.Happened()
        self.bar = CommandBar(lambda mode, text: actions.judge(self, mode, text))
        self.page: Page = ALL[first]()
        """The visible page."""
        self._switcher = ContentSwitcher(self.page, id="pages", initial=self.page.id)
        self._pages = {first: self.page}
        self._seen: tuple[object, ...] = ()
        self._busy_s = time.thread_time()
        """When the last frame was begun, in time of the processor."""
        self._can: tuple[object, ...] = ()
        """What decides which keys mean something, as of the last look."""
        self._noticed: Notice | None = None
        self.register_theme(HIGH_CONTRAST)
        self._asked = Subscription()
        self._going = asyncio.Lock()
        self._went_s = 0.0
        """When the page was gone to."""
        self._sought = ""
        """What was gone to, while its row has not come."""
        self.link = connect(mirror, self.wanted)
        self.link.fps = self.options.fps

    @override
    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        return variables | texts_of(variables, self.theme)

    # ---- what is on the screen --------------------------------------------------------------

    @override
    def compose(self) -> ComposeResult:
        yield self._head
        yield self._tabs
        with Ground(id="body"):
            yield self._switcher
            yield self.card
        yield self._happened
        yield self.bar
        yield heads.Foot(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Start to ask, and to paint."""
        self.theme = self.options.theme
        self.bench.set_focus(self.page)
        _: Worker[None] = self.run_worker(self.link.run, name="link", exit_on_error=True)
        self.set_interval(1 / self.options.fps, self.tick)
        self.set_interval(CARD_S, self.ask_again)
        if self.options.ref:
            self.call_after_refresh(self.open, self.options.ref)
        self.call_after_refresh(self.tick)

    def on_resize(self) -> None:
        """All is of another size, once Textual knows it."""
        self.call_after_refresh(self._arrived)
        self.set_timer(RESIZED_S, self.screen.refresh)

    def _label_tabs(self) -> None:
        is_narrow = self.size.width < TABS_COLUMNS
        for tab in self._tabs.query(Tab):
            page = (tab.id or "").removeprefix("tab-")
            tab.label = _tab_label(page, self._tabs.active, is_narrow=is_narrow)

    def place_card(self) -> None:
        """Beside the page, or over it where there is no room or it is wanted wide."""
        table = self.page.table()
        is_wide = table is not None and table.is_wide
        self.bench.set_class(is_wide or self.size.width < NARROW_COLUMNS, "narrow")
        self._happened.display = self.size.height >= heads.TALL_LINES and self.page.events() is None
        self._seen = ()

    @property
    def bench(self) -> Screen[None]:
        """The screen under what may lie over it."""
        return self.screen_stack[0]

    @property
    def snapshot(self) -> DaemonSnapshot:
        """The picture that is shown."""
        return self.mirror.history.shown

    def wanted(self) -> Subscription:
        """What the visible page wants to know; the link asks before each frame.

        A link may ask once more while the pages are taken down: nothing else is wanted then.
        """
        if not self.is_running:
            return self._asked
        queries = dict.fromkeys((*self.page.queries(), ALL_PEERS))
        happened = heads.HAPPENED if self._happened.display else None
        return Subscription(tuple(queries), self.page.events() or happened)

    def time_of_day(self, at_s: float, *, is_fine: bool = False) -> str:
        """A moment of the daemon's clock as ours says it: ``14:32:07``, or ``14:32:07.250``."""
        newest = self.mirror.history.newest
        ahead_s = self._wall() - self.clock() + newest.heard_s - newest.now_s
        if abs(ahead_s - self._wall_ahead_s) > 1.0:  # less is the way of a frame
            self._wall_ahead_s = ahead_s
        at_s += self._wall_ahead_s
        clock = time.strftime("%H:%M:%S", time.localtime(at_s))
        return f"{clock}.{int(at_s % 1 * 1000):03}" if is_fine else clock

    def say(self, text: str, is_bad: bool = False) -> None:  # noqa: FBT001, FBT002
        """Tell the operator in passing."""
        self.notify(text, severity="error" if is_bad else "information", markup=False)

    # ---- the clock --------------------------------------------------------------------------

    def tick(self) -> None:
        """Paint what differs from what is there."""
        if not self.is_running:
            return
        self.traffic.take(self.mirror.history.newest.tables.get(ALL_PEERS))
        self._paint_frame()
        snapshot = self.snapshot
        state = (self.page, self.size, self.theme, self.bar.display)
        seen = (self.mirror.frames, snapshot.heard_s, *state)
        if seen != self._seen:
            self._seen = seen
            was_s, self._busy_s = self._busy_s, time.thread_time()
            self.link.painted(self._busy_s - was_s)  # its own: others at work are no reason to wait
            self.page.show(snapshot)
            self._happened.show(snapshot)
            if self._sought and self.page.seek(self._sought):
                self._sought = ""
            self.hurry()
        if self._ahead and not (self._is_coming or self.bar.is_entering):
            self.call_later(self._take_ahead)

    def compared(self, snapshot: DaemonSnapshot) -> Sequence[str]:
        """What is another in this picture than in what it is compared with, in words."""
        before = self._compared
        if before is None or before.vitals is None or snapshot.vitals is None:
            return ()
        ago = age(snapshot.now_s - before.now_s)
        when = self.time_of_day(before.now_s)
        return f"since {when}, {ago} ago:", *differences(before, snapshot)

    def hurry(self) -> None:
        """Ask soon, if something else is wanted than before."""
        wanted = self.wanted()
        if wanted != self._asked:
            self._asked = wanted
            self.link.hurry()

    def _paint_frame(self) -> None:
        """The lines around the page, and what has to be told."""
        width, now_s = self.size.width, self.clock()
        history = self.mirror.history
        interval_s = self.link.interval_s
        now = heads.HeadStatus(
            link_state=self.mirror.link_state(now_s, interval_s),
            now_s=now_s,
            fps=min(self.link.fps, 1 / interval_s),
            frozen_s=history.behind_s if history.is_frozen else None,
            clock=self.time_of_day(self.snapshot.now_s) if self.mirror.frames else "",
        )
        line = heads.head_line(self.snapshot.vitals, now, width)
        self._head.paint([line])
        tables = self.page.tables()
        can = (
            self.page,
            history.is_frozen,
            self.is_on_something,
            bool(self.card.ref),
            self.page.table() is None,
            len(tables) > 1,
            self.page.faults(),
        )
        if can != self._can:
            self._can = can
            self.bench.refresh_bindings()
        notices = self.mirror.notices
        if notices and notices[-1] is not self._noticed:
            self._noticed = notices[-1]
            self.say(self._noticed.text, is_bad=True)

    # ---- keys -------------------------------------------------------------------------------

    @property
    def is_on_something(self) -> bool:
        """Whether something is open, or under the cursor."""
        return bool(self.card.ref or self.page.chosen())

    @override
    async def on_event(self, event: events.Event) -> None:
        """No key is lost, and each is done before the next: Textual's own go round the widgets.

        What is typed before the rows are here waits for them, and what comes after it. Whoever is
        shown has the keys: Textual takes them from what it hid a moment ago.
        """
        if isinstance(event, events.Key) and not event.is_forwarded and self.screen is self.bench:
            is_early = self._is_coming and event.key in ABOUT_A_ROW
            if self._ahead or is_early or self.bar.is_entering:
                self._ahead.append(event)
                return
            if self.bench.focused is None:
                self.bench.set_focus(self.bar.typed if self.bar.display else self.page)
            self.bar.is_entering = self.bench.focused is self.bar.typed and event.key == "enter"
            if self.bench.focused is self.page and await self._check_bindings(event.key):
                return
        await super().on_event(event)

    @property
    def _is_coming(self) -> bool:
        """Whether the rows of the page have been asked for, and not come yet."""
        is_late = self.clock() - self._went_s > AHEAD_S or self.bar.display
        return not is_late and any(table.data is None for table in self.page.tables())

    async def _take_ahead(self) -> None:
        """Do what was typed ahead: that for which it waited is here."""
        typed, self._ahead = self._ahead, []
        for event in typed:
            await self.on_event(event)

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key means something here and now."""
        page, card = self.page, self.card
        known = {
            **dict.fromkeys(ON_SOMETHING, bool(parameters) or self.is_on_something),
            "change": not self.options.readonly,
            "scroll_card": bool(card.ref),
            "faults": bool(page.faults()),
        }
        return known.get(action, True)

    @override
    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Do what a key, a click or a command means; the card goes with the cursor."""
        page, chosen, sought = self.page, self.page.chosen(), self._sought
        self._sought = ""
        if not await super().run_action(action, default_namespace, namespaces):
            self._sought = sought
            return False
        if page is self.page and self.card.ref and page.chosen() not in {"", chosen}:
            self.card.open(page.chosen(), self.place.crumbs())
            self.ask_again()
        self.hurry()
        self.tick()
        return True

    @override
    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """For the palette: what keys do here and now, then the commands of the bar."""
        for namespace, binding, *_ in self.bench.active_bindings.values():
            words = f"{binding.description} {binding.tooltip}".strip()
            act = partial(self.run_action, binding.action, namespace)
            yield SystemCommand(words, f"key {self.get_key_display(binding)}", act)
        yield SystemCommand("theme", "choose other colours", self.action_change_theme)
        for rule in RULES:
            begin = partial(self.action_ask, ":", f"{rule.word} ")
            yield SystemCommand(f":{rule.usage}", rule.help, begin)

    def action_ask(self, mode: str, text: str = "") -> None:
        """Have the operator type a command or a filter, which begins with the present one."""
        if mode == "/":
            text = self.page.filter_text
        self.bar.ask(mode, text, lambda: actions.choices(self))

    async def action_go(self, page: str) -> None:
        """Show a page."""
        await self.go(Location(page))

    async def action_open(self, ref: str = "") -> None:
        """Open this, or what is under the cursor."""
        if not ref:
            self.page.unfold()
        await self.open(ref or self.page.chosen() or self.card.ref)

    async def action_close(self) -> None:
        """Close what is open, one step of the way that led there; then show more of the page."""
        if self.bench.query("HelpPanel"):
            self.action_hide_help_panel()
        elif self.card.ref:
            await self.go(self.place.up())
        elif not self.page.widen() and self.page.filter_text:
            actions.filter_by(self, "")

    def action_help(self) -> None:
        """Show the keys, or hide them."""
        if self.bench.query("HelpPanel"):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def action_freeze(self) -> None:
        """Stand still, or go on live."""
        history = self.mirror.history
        if history.is_frozen:
            history.live()
        else:
            history.freeze()

    def action_faults(self) -> None:
        """Only what is wrong, or all again."""
        wanted = self.page.faults()
        actions.filter_by(self, "" if self.page.filter_text == wanted else wanted)

    def action_scroll_card(self, lines: int) -> None:
        """The card so many lines on."""
        self.card.scroll_relative(y=lines)

    def action_copy(self) -> None:
        """Copy the command that says why it is there."""
        self.copy(cli_command(self.card.ref or self.page.chosen()))

    def copy(self, text: str) -> None:
        """To the clipboard, and say so."""
        self.copy_to_clipboard(text)
        self.say(f"copied: {text}")

    async def action_compare(self) -> None:
        """Say the difference to some minutes ago; then to now, as it goes on; then no more."""
        history = self.mirror.history
        marks = (*map(history.ago, COMPARED_S), history.newest, None)
        self._compared = marks[self._compares]
        self._compares = (self._compares + 1) % len(marks)
        await self.action_go(PAGES[0])
        self._seen = ()

    def action_charts(self) -> None:
        """Charts of minutes, or of all that is kept."""
        self.chart_step_s = CHARTED_S[self.chart_step_s == CHARTED_S[0]]
        self.say(f"charts: {self.chart_step_s:g} s a dot")
        self._seen = ()

    def action_next_theme(self) -> None:
        """Paint in other colours."""
        at = THEMES.index(self.theme) if self.theme in THEMES else -1
        self.action_set_theme(THEMES[(at + 1) % len(THEMES)])

    def action_filter_by(self, text: str) -> None:
        """Show only rows that pass; nothing: all of them."""
        actions.filter_by(self, text)

    def action_sort_by(self, column: str) -> None:
        """Sort the page's table by a column, ``-column`` for the largest first."""
        actions.sort_by(self, column)

    async def action_change(self, verb: str) -> None:
        """Change something as if it were typed; the operator goes on where more has to be said."""
        abort = f"abort room {actions.room_of(self)} ".replace("  ", " ")
        begun = {"evict": "evict ", "abort": abort}.get(verb, "")
        if begun:
            self.action_ask(":", begun)
        else:
            await actions.obey(self, verb)

    async def action_audit(self) -> None:
        """Check every invariant now."""
        await actions.obey(self, "audit")

    def action_related(self) -> None:
        """Have the operator choose among what has to do with it."""
        self.order(partial(actions.related, self))

    def action_events_of(self) -> None:
        """Show what happened to it."""
        self.order(partial(actions.events_of, self))

    def order(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Have something done that asks the daemon or the operator on its way."""
        _: Worker[None] = self.run_worker(work, name="order", group="order")

    def action_set_theme(self, name: str) -> None:
        """Paint in other colours."""
        if name not in self.available_themes:
            self.say(f"no theme {name}: {' '.join(sorted(self.available_themes))}", is_bad=True)
            return
        self.theme = name
        self._seen = ()

    def screen_text(self) -> str:
        """What the terminal shows, without its colours: Textual offers pictures only."""
        strips = self.bench._compositor.render_strips()  # noqa: SLF001
        return "".join(f"{strip.text.rstrip()}\n" for strip in strips)

    # ---- going somewhere --------------------------------------------------------------------

    async def open(self, ref: str) -> None:
        """Go to the page that shows this, put the cursor on it, and open its card.

        ``pages:node:9`` is the node on the map, with its pages lit up, ``events:`` what names it.
        """
        kind, _, rest = ref.partition(":")
        if page := ELSEWHERE.get(f"{kind}:"):
            await self.go(self.place.open(page, rest))
            return
        name = self.page.NAME
        if not self.page.seek(ref):
            name = page_of(ref) or name
        await self.go(self.place.open(name, ref))

    async def go(self, place: Location) -> None:
        """Show a page and what is open on it; the page is made when it is first shown.

        Keys and orders may go somewhere at once: one after the other, as making a page takes time.
        """
        async with self._going:
            if place.page not in self._pages:
                self._pages[place.page] = ALL[place.page]()
                await self._switcher.add_content(self._pages[place.page])
            self.place, self._went_s = place, self.clock()
            self.page = self._pages[place.page]
            self._switcher.current = self.page.id
            self._tabs.active = _tab_of(place.page)
            if not self.bar.display:  # what is typed ahead is typed there
                self.bench.set_focus(self.page)
            self._sought = ""
            kind = place.ref.partition(":")[0]
            if not place.ref:
                self.page.pin("")
            elif not self.page.seek(place.ref) and kind in self.page.REFS:
                self._sought = place.ref
                self.page.pin(place.ref)
            if place.ref and kind not in self.page.TOLD:
                self.card.open(place.ref, place.crumbs())
                self.ask_again()
            else:
                self.card.close()
            self.call_after_refresh(self._arrived)

    def _arrived(self) -> None:
        """The page knows its size now, and so where the card goes, what it wants and shows."""
        self.place_card()
        self._label_tabs()
        self.hurry()
        self.tick()

    # ---- the card ---------------------------------------------------------------------------

    def ask_again(self) -> None:
        """Ask about what is open, and show what its row says meanwhile."""
        if self.card.ref:
            # A coroutine is made when its turn comes: one that is cancelled before that is never
            # awaited, which Python complains of.
            ask = partial(self._ask, self.card.ref)
            _: Worker[None] = self.run_worker(ask, group="card", exclusive=True)

    async def _ask(self, ref: str) -> None:
        """One answer for the card; a frozen one keeps what it had."""
        card, asked = self.card, question(ref)
        answer: Because | Refusal | None = None
        if asked is not None and not self.mirror.history.is_frozen:
            answer = actions.answered(await self.link.ask(asked), Because)
        if not self.is_running or card.ref != ref or card.content is None:
            return
        if answer is None:
            answer = card.content.answer or (FROZEN if asked is not None else None)
        row, columns = self.page.row(ref)
        now_s = self.snapshot.now_s
        card.say(CardContent(ref=ref, answer=answer, row=row, columns=columns, now_s=now_s))

    # ---- messages of widgets ----------------------------------------------------------------

    async def on_tabs_tab_activated(self, message: Tabs.TabActivated) -> None:
        """A page was clicked; the tab also follows when it is gone to in another way."""
        if message.tab.id != self._tabs.active:
            return  # left meanwhile: to go there would bring back the one after it, and so on
        tab = self._tabs.active
        self._label_tabs()
        if tab != _tab_of(self.place.page):
            await self.go(Location(tab.removeprefix("tab-")))

    async def on_command_bar_entered(self, message: CommandBar.Entered) -> None:
        """A command or a filter was typed."""
        self.bar.is_entering = False
        if message.mode == "/":
            actions.filter_by(self, message.text)
        elif message.text:
            await actions.obey(self, message.text)
        self.hurry()
        self.tick()
        await self._take_ahead()

    async def on_cursored_opened(self, message: Cursored.Opened) -> None:
        """A row was clicked twice."""
        self.on_cursored_moved(message)
        if ref := self.page.chosen():
            await self.open(ref)

    def on_cursored_moved(self, message: Cursored.Moved) -> None:
        """Keys are about the table in which something was clicked; more rows may be wanted."""
        # One of a page that was left meanwhile means nothing here.
        clicked = [table for table in self.page.tables() if table is message.canvas]
        if clicked and clicked[0] is not self.page.table():
            self.page.activate(clicked[0])
        self.hurry()
