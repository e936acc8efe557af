"""Pages of plain tables: what tests of the console itself run on, whatever the real ones do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from tui import screens
from tui.screens.page import Page
from tui.screens.radix import TreeTable
from tui.widgets.table import WindowedTable

if TYPE_CHECKING:
    from textual.binding import Binding


def page(name: str, *views: str, refs: tuple[str, ...] = (), **faults: str) -> type[Page]:
    """A page of tables, one under the other."""

    class Plain(Page):
        NAME: ClassVar[str] = name
        REFS: ClassVar[tuple[str, ...]] = refs
        FAULTS: ClassVar[dict[str, str]] = faults
        BINDINGS: ClassVar[list[Binding]] = screens.ALL[name].BINDINGS

        def compose(self):
            for view in views:
                yield (
                    TreeTable()
                    if view == "tree"
                    else WindowedTable(view, sort="since" if view == "leases" else "")
                )

    return Plain


PAGES = (
    page("overview", "concerns", "pools", refs=("concern", "waiting")),
    page("pools", "pools", refs=("page", "pool")),
    page("radix", "tree", refs=("node",)),
    page("handoffs", "rooms", refs=("room", "receive", "send")),
    page("peers", "peers", refs=("peer",), peers="!state:up"),
    page("events"),
    page("engines", "clients", "leases", refs=("client", "lease"), clients="alive:gone"),
)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Every page of the console is a plain one."""
    for one in PAGES:
        monkeypatch.setitem(screens.ALL, one.NAME, one)
