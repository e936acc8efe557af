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
    "replay": "with --replay",
    "faults": "pages that know what a fault is",
    "move": "pages with something to move in",
}
"""What a key may need of the console, and how the README says it."""


class Key(msgspec.Struct, frozen=True):
    """What one key does.

    ``keys`` are Textual's names, the first one is shown. ``action`` is for the console, or for the
    page if the console does not know it. ``pages``: where it means something; none for everywhere.
    ``footer``: a word for the last line of the screen; empty if it is not shown there.
    """

    keys: tuple[str, ...]
    action: str
    help: str
    group: str
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

_HELD = ("radix", "pools")

TABLE: tuple[Key, ...] = (
    *(
        Key((str(at),), f"page {page}", f"the page {page}", "pages")
        for at, page in enumerate(PAGES, start=1)
    ),
    Key(("-",), "last", "the page before this one, and back", "pages"),
    Key(("[",), "backward", "back in what you opened", "pages"),
    Key(("]",), "forward", "forward in what you opened", "pages"),
    # what a page of its own does; before the others, as these come first on their page
    Key(("l",), "lens", "the next lens of the page map", "pools", ("pools",), footer="lens"),
    Key(("+", "="), "zoom-in", "fewer pages a cell", "pools", ("pools",), footer="zoom"),
    Key(("_",), "zoom-out", "more pages a cell", "pools", ("pools",)),
    Key(("L",), "light", "light up all pages of its holder, then of the next one", "pools",
        ("pools",), ("card",), footer="light"),
    Key(("n",), "next-lit", "the next page that is lit up", "pools", ("pools",)),
    Key(("c",), "component", "the next component", "pools", ("pools",)),
    Key(("enter",), "open-node", "open it: what is below it, and who holds it", "radix",
        ("radix",), ("chosen",)),
    Key(("l",), "only-locked", "only what is locked", "radix", ("radix",), footer="locked"),
    Key(("o",), "only-orphans", "only locks nobody answers for", "radix", ("radix",)),
    Key(("v",), "eviction", "in the order of eviction", "radix", ("radix",), footer="eviction"),
    Key(("x",), "expand", "open or close the node", "radix", ("radix",), footer="expand"),
    Key(("p",), "pages", "its pages on the page map", "radix", ("radix",), ("chosen",)),
    Key(("f",), "follow", "follow the newest, or stay", "events", ("events",), footer="follow"),
    Key(("c",), "correlate", "only events about the same; again: about the next that it names",
        "events", ("events",), footer="same"),
    Key(("x",), "propose", "put the proposed command in the bar", "inspect",
        ("inspect", "overview"), ("chosen",), footer="do"),
    Key(("a",), "audit", "check every invariant now", "inspect", ("inspect",), footer="audit"),
    Key(("h",), "handoffs", "its handoffs", "peers", ("peers", "clients"), ("chosen",),
        footer="handoffs"),
    # freezing, and the time that has passed
    Key(("left",), "step -1", "one picture back", "time", needs=("frozen",), footer="back"),
    Key(("right", "."), "step 1", "one picture on", "time", needs=("frozen",), footer="on"),
    Key(("end",), "live", "go on live", "time", needs=("frozen",), footer="live"),
    Key(("P",), "play", "hold the recording, or play on", "time", needs=("replay",),
        footer="play"),
    Key(("<",), "wind -10", "10 s back in the recording", "time", needs=("replay",)),
    Key((">",), "wind 10", "10 s on in the recording", "time", needs=("replay",)),
    Key(("{",), "speed 0.5", "play half as fast", "time", needs=("replay",)),
    Key(("}",), "speed 2", "play twice as fast", "time", needs=("replay",)),
    Key(("space",), "freeze", "freeze, or go on live; it goes on collecting", "time",
        footer="freeze"),
    # moving and opening
    Key(("up", "k"), "up", "one row up", "move", needs=("move",)),
    Key(("down", "j"), "down", "one row down", "move", needs=("move",)),
    Key(("left",), "left", "to the left: columns, pages, closes a node", "move", needs=("move",)),
    Key(("right",), "right", "to the right: columns, pages, opens a node", "move",
        needs=("move",)),
    Key(("pageup",), "pageup", "one screen up", "move", needs=("move",)),
    Key(("pagedown",), "pagedown", "one screen down", "move", needs=("move",)),
    Key(("home",), "home", "to the first row", "move", needs=("move",)),
    Key(("end",), "end", "to the last row", "move", needs=("move",)),
    Key(("tab",), "panel", "to the next table of the page", "move", needs=("tables",)),
    Key(("enter",), "open", "open it: who holds it, why, since when", "open", needs=("chosen",),
        footer="open"),
    Key(("escape",), "back", "close, or back along the way you came", "open"),
    Key(("g",), "related", "go to what has to do with it", "open", needs=("chosen",),
        footer="related"),
    Key(("i",), "events-of", "what happened to it: its events, of a handoff from both ends", "open",
        needs=("chosen",), footer="events"),
    Key(("ctrl+up",), "card -3", "the card up", "open", needs=("card",)),
    Key(("ctrl+down",), "card 3", "the card down", "open", needs=("card",)),
    Key(("y",), "copy", "copy what it is called", "open", needs=("chosen",)),
    # what the page shows
    Key(("/",), "filter", "filter: state:held owner:eng* age>5s !lingering words", "view",
        needs=("filter",), footer="filter"),
    Key((":",), "command", "a command", "view", footer="command"),
    Key(("s",), "sort", "sort by the next column", "view", needs=("table",), footer="sort"),
    Key(("S",), "reverse", "sort the other way round", "view", needs=("table",)),
    Key(("w",), "wide", "all columns, no card beside them", "view", needs=("table",)),
    Key(("z",), "faults", "only what is wrong", "view", needs=("faults",), footer="faults"),
    Key(("t",), "tag", "tag the row, so that export takes only tagged ones", "view",
        needs=("chosen", "table")),
    Key(("m",), "maximise", "only this panel, and back", "view"),
    Key(("e",), "export", "write this view to a file: csv, json, text, svg", "view"),
    Key(("T",), "theme", "the next theme", "view"),
    # what changes something
    Key(("A",), "order abort", "abort the handoff's room", "change", ("handoffs",),
        ("write", "chosen"), "abort"),
    Key(("E",), "order evict", "evict pages", "change", _HELD, ("write",), "evict"),
    Key(("F",), "order flush", "drop every unlocked cached page", "change", _HELD,
        ("write",), "flush"),
    Key(("X",), "order fence", "restart the transfer process", "change", ("handoffs", "peers"),
        ("write",), "fence"),
    # the console
    Key(("?",), "help", "these keys", "console", footer="help"),
    Key(("ctrl+p",), "palette", "find a key, a page or a theme by its words", "console"),
    Key(("q", "ctrl+c"), "quit", "quit", "console", footer="quit"),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Every key that means something anywhere."""
    return tuple(dict.fromkeys(name for key in TABLE for name in key.keys))


def meaning(name: str, page: str, has: Collection[str]) -> Key | None:
    """What a key does here and now; None for nothing."""
    return next((key for key in TABLE if name in key.keys and key.means(page, has)), None)


@functools.lru_cache(maxsize=64)
def here(page: str, has: frozenset[str]) -> tuple[Key, ...]:
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
