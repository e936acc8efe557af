"""``kvd-tui``: a small console on the admin socket.

What it does: shows the state twice a second on five pages (overview with pools, leases, rooms,
peers, events); asks ``why`` about the chosen lease or room; says when the daemon is not reachable
and comes back by itself. What it does not do yet: change anything, the tree, charts, filters,
sorting, recording. ``--readonly`` is therefore always in effect.

    1..5 pages   up/down choose   Enter why   Escape closes the answer   q quits
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import click
from textual.app import App
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import ContentSwitcher, DataTable, Footer, Log, Static
from typing_extensions import override

from kvd.text import endpoint_flaw
from tui.old_link import Link
from tui.old_model import PAGES, Console
from tui.old_screens import SheetTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from tui.old_link import NewsLink, OnNews
    from tui.old_model import News

TABLES = ("leases", "rooms", "peers")


class Arrived(Message):
    """News from the link's thread."""

    def __init__(self, news: News) -> None:
        super().__init__()
        self.news = news


class KvdTui(App[None]):
    """The console; ``connect`` makes the link that hands its news to the function given."""

    TITLE = "kvd"
    AUTO_FOCUS = None
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; background: $primary; color: $text; padding: 0 1; }
    #head.down { background: $error; }
    #pages { height: 1fr; }
    #answer { height: auto; max-height: 50%; border-top: solid $accent; padding: 0 1; }
    #overview { padding: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(n), f"page('{page}')", page.title()) for n, page in enumerate(PAGES, start=1)),
        ("escape", "close_answer", "Close"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, console: Console, connect: Callable[[OnNews], NewsLink]) -> None:
        super().__init__()
        self.console_model = console
        self._link = connect(self._hear)

    def _hear(self, news: News) -> None:
        """Take news on any thread."""
        self.post_message(Arrived(news))

    @override
    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        with Vertical(), ContentSwitcher(id="pages", initial="overview"):
            yield Static(id="overview", markup=False)
            for page in TABLES:
                yield SheetTable(page)
            yield Log(id="events", max_lines=500)
        yield Static(id="answer", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Paint what is known before the first answer, and start asking."""
        self.repaint()
        self._link.start()

    def on_unmount(self) -> None:
        """Ask no more."""
        self._link.stop()

    def on_arrived(self, message: Arrived) -> None:
        """Fold the news in and repaint."""
        lines = self.console_model.take(message.news)
        if lines:
            self.query_one(Log).write_lines(lines)
        self.repaint()

    def repaint(self) -> None:
        """Show the model: the head, the visible page, the answer."""
        model = self.console_model
        head = self.query_one("#head", Static)
        head.update(model.head())
        head.set_class(bool(model.trouble), "down")
        page = self.page
        if page == "overview":
            self.query_one("#overview", Static).update(model.overview())
        elif page in TABLES:
            self.query_one(f"#{page}", SheetTable).show(model.sheet(page))
        answer = self.query_one("#answer", Static)
        answer.display = model.answer is not None
        answer.update(model.answer_text())

    @property
    def page(self) -> str:
        """The visible page."""
        return self.query_one(ContentSwitcher).current or PAGES[0]

    def action_page(self, page: str) -> None:
        """Show ``page`` and give it the keys."""
        self.query_one(ContentSwitcher).current = page
        self.console_model.answer = None
        if page == "overview":
            self.set_focus(None)
        else:
            self.query_one(f"#{page}").focus()
        self.repaint()

    def action_close_answer(self) -> None:
        """Put the answer away."""
        self.console_model.answer = None
        self.repaint()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Ask why about the chosen row."""
        table = event.data_table
        row = table.chosen() if isinstance(table, SheetTable) else None
        if row is not None and row.question is not None:
            self._link.ask(row.question)


@click.command()
@click.option("--connect", metavar="ENDPOINT", help="Admin socket of the daemon: ipc:///PATH.")
@click.option("--readonly", is_flag=True, help="Change nothing; this version never does.")
@click.version_option(package_name="kvd")
def main(connect: str | None, readonly: bool) -> None:  # noqa: FBT001 - click passes flags so
    """Watch a daemon: pools, leases, rooms, peers, events, and who holds what and why."""
    del readonly
    flaw = endpoint_flaw(connect) if connect is not None else None
    if flaw is not None:
        raise click.BadParameter(flaw, param_hint="--connect")
    endpoint = connect or _configured()
    KvdTui(Console(endpoint), lambda on_news: Link(endpoint, on_news)).run()


def _configured() -> str:
    """Where the daemon's own configuration puts the admin socket."""
    from kvd.config import load  # noqa: PLC0415 - not needed with --connect

    loaded = load(None, os.environ, ())
    if isinstance(loaded, list):
        click.echo("\n".join(error.sentence for error in loaded), err=True)
        raise SystemExit(78)
    return loaded.sockets.admin
