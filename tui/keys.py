"""The keys of the console, as data: bindings, footer, help, palette and README come from here.

A key may mean several things: the first row that means something on the page, in the state that
the console is in, is what it does. ``python -m tui.keys`` prints the table as Markdown.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

PAGES = ("overview", "pools", "radix", "handoffs", "peers", "events", "inspect", "clients")
"""In the order of their number keys."""

NEEDS = {
    "write": "not with --readonly",
    "table": "pages with a table",
    "tables": "pages with several tables",
    "filter": "pages that can be filtered",
    "chosen": "on a row",
    "card": "when something is open",
    "frozen": "when frozen",
    "faults": "pages that know what a fault is",
    "move": "pages with something to move in",
}
"""What a key may need of the console, and how the README says it."""


class Hotkey(msgspec.Struct, frozen=True):
    """What one key does.

    ``keys`` are Textual's names, the first one is shown. ``action`` is for the console, or for the
    page if the console does not know it. ``pages``: where it means something; none for everywhere.
    ``footer``: a word for the last line of the screen; empty if it is not shown there.
    """

    keys: tuple[str, ...]
    action: str
    help: str
    group: str = ""
    pages: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    footer: str = ""

    @property
    def label(self) -> str:
        """How an operator reads it."""
        return " ".join(LABELS.get(key, key) for key in self.keys)

    def means(self, page: str, has: Collection[str]) -> bool:
        """Whether it means something on this page, in a console that has these of ``NEEDS``."""
        return (not self.pages or page in self.pages) and all(need in has for need in self.needs)


LABELS = {
    "up": "↑", "down": "↓", "left": "←", "right": "→", "enter": "Enter", "escape": "Esc",
    "space": "Space", "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End",
    "tab": "Tab", "ctrl+up": "Ctrl+↑",
    "ctrl+down": "Ctrl+↓", "ctrl+p": "Ctrl+P", "ctrl+c": "Ctrl+C",
}  # fmt: skip


def _group(
    name: str, *keys: Hotkey, pages: tuple[str, ...] = (), needs: tuple[str, ...] = ()
) -> tuple[Hotkey, ...]:
    """Keys under one heading of the help; each needs its own and what all of the group need."""
    return tuple(
        msgspec.structs.replace(
            key, group=name, pages=key.pages or pages, needs=(*needs, *key.needs)
        )
        for key in keys
    )


TABLE: tuple[Hotkey, ...] = (
    *_group("pages",
        *(
            Hotkey((str(at),), f"page {page}", f"the page {page}")
            for at, page in enumerate(PAGES, start=1)
        )),
    # what a page of its own does; before the others, as these come first on their page
    *_group("pools",
        Hotkey(("l",), "lens", "the next lens of the page map", footer="lens"),
        Hotkey(("+", "="), "zoom-in", "fewer pages a cell", footer="zoom"),
        Hotkey(("-",), "zoom-out", "more pages a cell"),
        Hotkey(("L",), "light", "light up all pages of its holder, then of the next one",
            needs=("card",), footer="light"),
        Hotkey(("n",), "next-lit", "the next page that is lit up"),
        Hotkey(("c",), "component", "the next component"),
        pages=("pools",)),
    *_group("radix",
        Hotkey(("enter",), "open-node", "open it: what is below it, and who holds it",
            needs=("chosen",)),
        Hotkey(("l",), "only-locked", "only what is locked", footer="locked"),
        Hotkey(("v",), "eviction", "in the order of eviction", footer="eviction"),
        Hotkey(("x",), "expand", "open or close the node", footer="expand"),
        Hotkey(("p",), "pages", "its pages on the page map", needs=("chosen",)),
        pages=("radix",)),
    *_group("events",
        Hotkey(("f",), "follow", "follow the newest, or stay", footer="follow"),
        Hotkey(("c",), "correlate",
            "only events about the same; again: about the next that it names", footer="same"),
        pages=("events",)),
    *_group("inspect",
        Hotkey(("x",), "propose", "put the proposed command in the bar",
            pages=("inspect", "overview"), needs=("chosen",), footer="do"),
        Hotkey(("a",), "audit", "check every invariant now", footer="audit"),
        pages=("inspect",)),
    *_group("peers",
        Hotkey(("h",), "handoffs", "its handoffs", footer="handoffs"),
        pages=("peers", "clients"), needs=("chosen",)),
    # freezing, and the time that has passed
    *_group("time",
        Hotkey(("left",), "step -1", "one picture back", footer="back"),
        Hotkey(("right", "."), "step 1", "one picture on", footer="on"),
        Hotkey(("end",), "live", "go on live", footer="live"),
        needs=("frozen",)),
    *_group("time",
        Hotkey(("space",), "freeze", "freeze, or go on live; it goes on collecting",
            footer="freeze")),
    # moving and opening
    *_group("move",
        Hotkey(("up", "k"), "up", "one row up"),
        Hotkey(("down", "j"), "down", "one row down"),
        Hotkey(("left",), "left", "to the left: columns, pages, closes a node"),
        Hotkey(("right",), "right", "to the right: columns, pages, opens a node"),
        Hotkey(("pageup",), "pageup", "one screen up"),
        Hotkey(("pagedown",), "pagedown", "one screen down"),
        Hotkey(("home",), "home", "to the first row"),
        Hotkey(("end",), "end", "to the last row"),
        needs=("move",)),
    *_group("move", Hotkey(("tab",), "panel", "to the next table of the page", needs=("tables",))),
    *_group("open",
        Hotkey(("enter",), "open", "open it: who holds it, why, since when", needs=("chosen",),
            footer="open"),
        Hotkey(("escape",), "back", "close, or back along the way you came"),
        Hotkey(("g",), "related", "go to what has to do with it", needs=("chosen",),
            footer="related"),
        Hotkey(("i",), "events-of", "what happened to it: its events, of a handoff from both ends",
            needs=("chosen",), footer="events"),
        Hotkey(("ctrl+up",), "card -3", "the card up", needs=("card",)),
        Hotkey(("ctrl+down",), "card 3", "the card down", needs=("card",)),
        Hotkey(("y",), "copy", "copy what it is called", needs=("chosen",))),
    # what the page shows
    *_group("view",
        Hotkey(("/",), "filter", "filter: state:held owner:eng* age>5s !lingering words",
            needs=("filter",), footer="filter"),
        Hotkey((":",), "command", "a command", footer="command"),
        Hotkey(("s",), "sort", "sort by the next column", needs=("table",), footer="sort"),
        Hotkey(("w",), "wide", "all columns, no card beside them", needs=("table",)),
        Hotkey(("z",), "faults", "only what is wrong", needs=("faults",), footer="faults"),
        Hotkey(("T",), "theme", "the next theme")),
    *_group("change",
        Hotkey(("A",), "order abort", "abort the handoff's room", pages=("handoffs",),
            needs=("chosen",), footer="abort"),
        Hotkey(("E",), "order evict", "evict pages", footer="evict"),
        Hotkey(("F",), "order flush", "drop every unlocked cached page", footer="flush"),
        Hotkey(("X",), "order fence", "restart the transfer process", pages=("handoffs", "peers"),
            footer="fence"),
        pages=("radix", "pools"), needs=("write",)),
    *_group("console",
        Hotkey(("?",), "help", "these keys", footer="help"),
        Hotkey(("ctrl+p",), "palette", "find a key, a page or a theme by its words"),
        Hotkey(("q", "ctrl+c"), "quit", "quit", footer="quit")),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Every key that means something anywhere."""
    return tuple(dict.fromkeys(name for key in TABLE for name in key.keys))


def meaning(name: str, page: str, has: Collection[str]) -> Hotkey | None:
    """What a key does here and now; None for nothing."""
    return next((key for key in TABLE if name in key.keys and key.means(page, has)), None)


@functools.lru_cache(maxsize=64)
def here(page: str, has: frozenset[str]) -> tuple[Hotkey, ...]:
    """The keys that mean something here and now, those of the page first.

    Asked with every frame, and seldom something new.
    """
    found = [
        key for key in TABLE if any(meaning(name, page, has) is key for name in key.keys)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda key: not key.pages))


def markdown() -> str:
    """The table for the README."""
    lines = ["| key | what it does | where |", "|---|---|---|"]
    for key in TABLE:
        where = [*key.pages, *(NEEDS[need] for need in key.needs)]
        label = " ".join(f"`{LABELS.get(name, name)}`" for name in key.keys)
        lines.append(f"| {label} | {key.help} | {', '.join(where)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
