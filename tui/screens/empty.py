"""Pages that have one table, as the daemon sends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tui.screens.page import Page
from tui.widgets.linetable import LineTable

if TYPE_CHECKING:
    from textual.app import ComposeResult


class OverviewPage(Page):
    """How the node is."""

    NAME = "overview"
    REFS = ("concern",)

    @override
    def compose(self) -> ComposeResult:
        yield LineTable("concerns")
        yield LineTable("pools")


class EventsPage(Page):
    """What happened."""

    NAME = "events"


class InspectPage(Page):
    """What an operator should look at."""

    NAME = "inspect"
    REFS = ("waiting",)

    @override
    def compose(self) -> ComposeResult:
        yield LineTable("concerns")
        yield LineTable("waiting")
