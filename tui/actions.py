"""What commands do, and what takes asking the daemon: related things, events, verbs.

What changes something on the node is rehearsed first: the daemon says what it would do, and it is
done only when the operator agrees to that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from textual.actions import parse as parse_action

from kvd import filters
from kvd.errors import Code, Refusal
from kvd.filters import SyntaxFlaw
from kvd.text import clean
from kvd.wire import admin
from tui.model import commands
from tui.widgets.card import ELSEWHERE, EVENTS_OF, CardContent, about_of, links_of, question
from tui.widgets.dialogs import MenuDialog, ReportDialog

if TYPE_CHECKING:
    from kvd.wire.admin import AdminReply
    from tui.app import KvdTui
    from tui.model.commands import NodeRequest

T = TypeVar("T")

NO_ROWS = "this page has no rows to leave out: Esc"
NOT_HERE = "nothing can be changed from here: the console was started with --readonly"


async def obey(app: KvdTui, text: str) -> None:
    """Do what was typed after ``:``."""
    command = commands.parse(text)
    match command:
        case SyntaxFlaw(what=what):
            app.say(what, is_bad=True)
        case str():
            await app.run_action(command)
        case _:
            app.order(partial(carry_out, app, command, text.strip(": ")))


def judge(app: KvdTui, mode: str, text: str) -> SyntaxFlaw | None:
    """What is wrong with a text of the bar; None for nothing."""
    if mode == "/" and app.page.table() is None and not app.page.CAN_FILTER:
        return SyntaxFlaw(NO_ROWS, 0)
    found = commands.parse(text) if mode == ":" else f"filter_by({text!r})"
    if isinstance(found, str):
        _, name, words = parse_action(found)
        wanted = (
            filters.parse(str(words[0]), app.page.filter_columns()) if name == "filter_by" else None
        )
        return wanted if isinstance(wanted, SyntaxFlaw) else None
    return found if isinstance(found, SyntaxFlaw) else None


def choices(app: KvdTui) -> commands.CommandChoices:
    """What there is to choose from now."""
    table = app.page.table()
    keys = table.data.order if table is not None and table.data is not None else ()
    return commands.CommandChoices(
        columns=tuple(column.name for column in app.page.filter_columns()),
        themes=tuple(app.available_themes),
        refs=(*app.card.links, *keys),
    )


def filter_by(app: KvdTui, text: str) -> None:
    """Show only rows that pass; nothing: all of them."""
    found = filters.parse(text, app.page.filter_columns())
    if isinstance(found, SyntaxFlaw):
        app.say(found.what, is_bad=True)
    else:
        app.page.filter_by(text, found)


def sort_by(app: KvdTui, column: str) -> None:
    """Sort the page's table by a column, ``-column`` for the largest first."""
    table = app.page.table()
    if table is None:
        return
    names = {column.name for column in table.columns}
    if column and names and column.removeprefix("-") not in names:
        app.say(f"there is no column {clean(column)}: {' '.join(sorted(names))}", is_bad=True)
        return
    table.set_sort(column)


# ---- what is done on the node --------------------------------------------------------------------


def answered(reply: AdminReply, *kinds: type[T]) -> T | Refusal:
    """An answer of one of the kinds that are expected; any other is a refusal to guess."""
    if isinstance(reply, admin.AdminFailed):
        return reply.refusal
    if isinstance(reply, kinds):
        return reply
    kind = type(reply).__name__
    return Refusal(Code.INTERNAL, f"the daemon answered with {kind}: versions differ")


async def carry_out(app: KvdTui, request: NodeRequest, name: str) -> None:
    """Have the daemon do it; what changes the node only after it was rehearsed and agreed to.

    ``name``: as it is typed.
    """
    if not isinstance(request, admin.Audit | admin.Record):
        if app.options.readonly:
            app.say(NOT_HERE, is_bad=True)
            return
        would = answered(await app.link.ask(admin.Rehearse(0, request)), admin.Report)
        if not await app.push_screen_wait(ReportDialog(name, would, is_question=True)):
            app.say(f"{name}: not done")
            return
    done: admin.Report | admin.Recorded | Refusal = answered(
        await app.link.ask(request), admin.Report, admin.Recorded
    )
    app.push_screen(ReportDialog(name, done))


def room_of(app: KvdTui) -> str:
    """The room of what is open, else of the row under the cursor; empty where there is none."""
    ref = app.card.ref or app.page.chosen()
    row, columns = app.page.row(ref)
    names = [column.name for column in columns]
    if row is not None and "room" in names:
        return str(row.cells[names.index("room")] or "").rpartition(":")[2]
    links = app.card.links if app.card.ref else ()
    found = (reference.partition(":") for reference in (ref, *links))
    return next((number for kind, _, number in found if kind == "room"), "")


def propose(app: KvdTui, action: str) -> None:
    """Put a command that was proposed into the bar, to be looked at first; words are shown.

    What is no command of the console is copied, to be typed on the node.
    """
    if action.startswith(commands.KILL):
        app.copy(action.partition(":")[0])
    elif commands.is_doable(action):
        app.action_ask(":", action)
    else:
        app.say(clean(action) or "nothing is proposed")


# ---- going on from what is open ------------------------------------------------------------------


async def related(app: KvdTui) -> None:
    """Have the operator choose among what has to do with what is open, or under the cursor."""
    known = await _known(app)
    chosen = await app.push_screen_wait(MenuDialog(f"related to {known.ref}", links_of(known)))
    if chosen:
        await app.open(chosen)


async def events_of(app: KvdTui) -> None:
    """Show the events of what is open, or under the cursor: of a handoff those of its room."""
    known = await _known(app)
    room = room_of(app)
    about = about_of((known.ref, *([f"room:{room}"] if room else []), *links_of(known)))
    if about and ELSEWHERE[EVENTS_OF] == app.page.NAME:
        app.page.seek(about)  # it leaves out the others; a card would lie over them
    elif about:
        await app.open(EVENTS_OF + about)
    else:
        app.say(f"no event names {known.ref}")


async def _known(app: KvdTui) -> CardContent:
    """What there is to know of what is open, or under the cursor."""
    ref = app.card.ref or app.page.chosen()
    asked = question(ref)
    answer = answered(await app.link.ask(asked), admin.Because) if asked is not None else None
    row, columns = app.page.row(ref)
    return CardContent(
        ref=ref,
        answer=answer if isinstance(answer, admin.Because) else None,
        row=row,
        columns=columns,
    )
