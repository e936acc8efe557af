"""What an operator orders: commands of the bar, verbs for the daemon, files, the clipboard.

What changes something on the node is rehearsed first: the daemon says what it would do, and it is
done only when the operator agrees to that.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from kvd.errors import Code, Refusal
from kvd.text import clean, counted
from kvd.wire.admin import (
    AbortRoom,
    AdminFailed,
    Audit,
    Because,
    Evict,
    Fence,
    Flush,
    Record,
    Recorded,
    Rehearse,
    Report,
)
from tui.model import commands, export, filters
from tui.model.filters import Flaw
from tui.screens.help import Help
from tui.widgets.card import EVENTS_OF, Told, about_of, links_of, question
from tui.widgets.confirm import Confirm, Outcome
from tui.widgets.menu import Menu

if TYPE_CHECKING:
    from kvd.wire.admin import AdminReply
    from tui.app import KvdTui

Shown = commands.FilterBy | commands.SortBy | commands.SetFps | commands.SetTheme | commands.Export
Verb = Flush | Evict | AbortRoom | Fence

NOT_HERE = "nothing can be changed from here: the console was started with --readonly"
NOT_IN_REPLAY = "nothing can be changed from here: what is shown comes from a file"


def name_of(verb: Verb | Audit | Record) -> str:
    """A verb as an operator types it."""
    match verb:
        case Flush(mode=mode):
            return "flush" if mode == "unlocked" else f"flush {mode}"
        case Evict(pages=pages):
            return f"evict {pages}"
        case AbortRoom(room=room, reason=reason):
            return f"abort room {room} {reason}".rstrip()
        case Fence():
            return "fence"
        case Audit():
            return "audit"
        case Record():
            return "record save"
        case _:
            assert_never(verb)


def told(reply: AdminReply | Refusal) -> Report | Recorded | Because | Refusal:
    """An answer as something to show; one of another kind is a refusal to guess."""
    match reply:
        case AdminFailed(refusal=refusal):
            return refusal
        case Report() | Recorded() | Because() | Refusal():
            return reply
        case _:
            kind = type(reply).__name__
            return Refusal(Code.INTERNAL, f"the daemon answered with {kind}: versions differ")


def judge(app: KvdTui, mode: str, text: str) -> Flaw | None:
    """What is wrong with a text of the bar; None for nothing."""
    if mode == "/":
        found: object = filters.parse(text, app.page.filter_columns())
    else:
        found = commands.parse(text)
        if isinstance(found, commands.FilterBy):
            return judge(app, "/", found.text)
    return found if isinstance(found, Flaw) else None


def context(app: KvdTui) -> commands.Context:
    """What there is to choose from now."""
    table = app.page.table()
    sheet = table.sheet if table is not None else None
    keys = sheet.order if sheet is not None else ()
    names = tuple(column.name for column in app.page.filter_columns())
    return commands.Context(names, tuple(app.available_themes), (*app.card.links, *keys))


async def obey(app: KvdTui, text: str) -> None:
    """Do what was typed after ``:``."""
    command = commands.parse(text)
    match command:
        case Flaw(what=what):
            app.say(what, is_bad=True)
        case commands.Show(page="help"):
            app.push_screen(Help(app.page.NAME, app.has()))
        case commands.Show(page=page):
            await app.go(app.trail.turn(page))
        case commands.Open(ref=ref):
            await app.open(ref)
        case commands.Ask(request=request):
            app.order(partial(carry_out, app, request))
        case commands.Quit():
            app.exit()
        case _:
            _show(app, command)


def _show(app: KvdTui, command: Shown) -> None:
    """Show the same in another way."""
    match command:
        case commands.FilterBy(text=wanted):
            filter_by(app, wanted)
        case commands.SortBy(column=column):
            sort_by(app, column)
        case commands.SetFps(fps=fps):
            app.set_fps(fps)
        case commands.SetTheme(name=name):
            app.set_theme(name)
        case commands.Export(form=form, path=path):
            app.say(*write(app, form, path))
        case _:
            assert_never(command)


def filter_by(app: KvdTui, text: str) -> None:
    """Show only rows that pass; nothing: all of them."""
    table = app.page.table()
    if table is None:
        app.page.filter_by(text)
        return
    found = filters.parse(text, table.columns)
    if isinstance(found, Flaw):
        app.say(found.what, is_bad=True)
        return
    table.set_filters(text, found)


def sort_by(app: KvdTui, column: str) -> None:
    """Sort the page's table by a column, ``-column`` for the largest first."""
    table = app.page.table()
    if table is None:
        return
    names = {one.name for one in table.columns}
    if column and names and column.removeprefix("-") not in names:
        app.say(f"there is no column {clean(column)}: {' '.join(sorted(names))}", is_bad=True)
        return
    table.set_sort(column)


# ---- verbs -----------------------------------------------------------------------------------


async def carry_out(app: KvdTui, request: Verb | Audit | Record) -> None:
    """Have the daemon do it; what changes the node only after it was rehearsed and agreed to."""
    name = name_of(request)
    if not isinstance(request, Audit | Record):
        if "write" not in app.has():
            app.say(NOT_HERE if app.replay is None else NOT_IN_REPLAY, is_bad=True)
            return
        would = told(await app.link.ask(Rehearse(0, request)))
        if isinstance(would, Because | Recorded):
            would = Refusal(Code.INTERNAL, "the daemon does not answer what this would do")
        if not await app.push_screen_wait(Confirm(name, would)):
            app.say(f"{name}: not done")
            return
    done = told(await app.link.ask(request))
    if isinstance(done, Because):
        done = Refusal(Code.INTERNAL, "the daemon answered something else")
    app.push_screen(Outcome(name, done))


def start(app: KvdTui, verb: str) -> None:
    """A key that changes something: asks at once, or has the operator say how much or which."""
    match verb:
        case "flush":
            app.order(partial(carry_out, app, Flush(0)))
        case "fence":
            app.order(partial(carry_out, app, Fence(0)))
        case "evict":
            app.ask(":", "evict ")
        case _:
            app.ask(":", f"abort room {room_of(app)} ".replace("  ", " "))


def room_of(app: KvdTui) -> str:
    """The room of what is open, else of the row under the cursor; empty where there is none."""
    ref = app.card.ref or app.page.chosen()
    row, columns = app.page.row(ref)
    names = [column.name for column in columns]
    if row is not None and "room" in names:
        return str(row.cells[names.index("room")])
    links = app.card.links if app.card.ref else ()
    found = (one.partition(":") for one in (ref, *links))
    return next((number for kind, _, number in found if kind == "room"), "")


def propose(app: KvdTui, action: str) -> None:
    """Put a command that was proposed into the bar, to be looked at first; words are shown."""
    if action and not isinstance(commands.parse(action), Flaw):
        app.ask(":", action)
    else:
        app.say(clean(action) or "nothing is proposed")


# ---- going on --------------------------------------------------------------------------------


async def related(app: KvdTui) -> None:
    """Have the operator choose among what has to do with what is open, or under the cursor."""
    known = await _known(app)
    chosen = await app.push_screen_wait(Menu(f"{known.ref} has to do with", links_of(known)))
    if chosen:
        await app.open(chosen)


async def events_of(app: KvdTui) -> None:
    """Show the events of what is open, or under the cursor: of a handoff those of its room."""
    known = await _known(app)
    room = room_of(app)
    about = about_of((known.ref, *([f"room:{room}"] if room else []), *links_of(known)))
    if about:
        await app.open(EVENTS_OF + about)
    else:
        app.say(f"no event names {known.ref}")


async def _known(app: KvdTui) -> Told:
    """What there is to know of what is open, or under the cursor."""
    ref = app.card.ref or app.page.chosen()
    asked = question(ref)
    answer = told(await app.link.ask(asked)) if asked is not None else None
    row, columns = app.page.row(ref)
    return Told(ref, answer if isinstance(answer, Because) else None, row, columns)


# ---- files -----------------------------------------------------------------------------------


def offer_export(app: KvdTui) -> None:
    """Have the operator say where to: the bar, with a name that is free."""
    table = app.page.table()
    if table is None:
        app.ask(":", f"export svg {_free(f'kvd-{app.page.NAME}.svg')}")
    else:
        app.ask(":", f"export csv {_free(f'kvd-{table.view}.csv')}")


def _free(name: str) -> str:
    """A name in this directory that no file has."""
    path = Path(name)
    for count in range(1, 1000):
        if not path.exists():
            break
        path = Path(f"{Path(name).stem}-{count}{Path(name).suffix}")
    return str(path)


def write(app: KvdTui, form: str, to: str) -> tuple[str, bool]:
    """Write the view to a new file; what was written or why not, and whether that is bad."""
    path = Path(to).expanduser()
    table = app.page.table()
    if form == "svg":
        text, what = app.export_screenshot(title="kvd"), "the screen"
    elif table is not None and table.sheet is not None:
        rows = [key for key in table.sheet.order if key in table.tagged]
        text = export.export(table.sheet, form, app.moment.now_s, rows)
        count = len(rows) or len(table.sheet.order)
        what = f"{count} of {counted(table.sheet.total, 'row')} of {table.view}"
    elif form == "text":
        text, what = app.screen_text(), "the screen"
    else:
        return f"the page {app.page.NAME} has no table to write", True
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:
        return f"not written: {exc.strerror or exc}: {to}", True
    return f"{what} written to {os.fspath(path)}: {len(text.encode())} bytes", False
