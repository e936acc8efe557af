"""What keys and commands do: both name an action, and the console has a function for each.

What changes something on the node is rehearsed first: the daemon says what it would do, and it is
done only when the operator agrees to that. Actions that are not here are those of the page.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar, assert_never

from kvd import filters
from kvd.errors import Code, Refusal
from kvd.filters import SyntaxFlaw
from kvd.text import clean
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
from tui.model import commands
from tui.model.navigation import Location
from tui.widgets.card import EVENTS_OF, CardContent, about_of, links_of, question
from tui.widgets.dialogs import ConfirmDialog, HelpDialog, MenuDialog, OutcomeDialog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from kvd.wire.admin import AdminReply
    from tui.app import KvdTui
    from tui.model.commands import NodeRequest
    from tui.widgets.table import WindowedTable

    Action: TypeAlias = Callable[[KvdTui, str], Awaitable[None] | None]

T = TypeVar("T")

NOT_HERE = "nothing can be changed from here: the console was started with --readonly"


async def run(app: KvdTui, action: str) -> bool:
    """Do an action with what follows its first word; whether it is one of the console's own."""
    verb, _, rest = action.partition(" ")
    act = ACTIONS.get(verb) or OF_COMMANDS.get(verb)
    if act is None:
        return False
    waits = act(app, rest)
    if waits is not None:
        await waits
    return True


async def obey(app: KvdTui, text: str) -> None:
    """Do what was typed after ``:``."""
    command = commands.parse(text)
    match command:
        case SyntaxFlaw(what=what):
            app.say(what, is_bad=True)
        case str():
            await run(app, command)
        case _:
            app.order(partial(carry_out, app, command))


def judge(app: KvdTui, mode: str, text: str) -> SyntaxFlaw | None:
    """What is wrong with a text of the bar; None for nothing."""
    found = commands.parse(text) if mode == ":" else f"filter-by {text}"
    if isinstance(found, str) and found.startswith("filter-by "):
        wanted = filters.parse(found.removeprefix("filter-by "), app.page.filter_columns())
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


# ---- going somewhere, and the same in another way ------------------------------------------------


async def _back(app: KvdTui, _: str) -> None:
    """Close what is open, one step of the way that led there; then show more of the page."""
    if app.card.ref:
        await app.go(app.place.up())
    elif not await app.page.act("back") and app.page.filter_text:
        filter_by(app, "")


def _help(app: KvdTui, _: str) -> None:
    app.push_screen(HelpDialog(app.page.NAME, app.has()))


def _freeze(app: KvdTui, _: str) -> None:
    history = app.mirror.history
    if history.is_frozen:
        history.live()
    else:
        history.freeze()


def _faults(app: KvdTui, _: str) -> None:
    wanted = app.page.faults()
    filter_by(app, "" if app.page.filter_text == wanted else wanted)


def _copy(app: KvdTui, _: str) -> None:
    ref = app.card.ref or app.page.chosen()
    app.copy_to_clipboard(ref)
    app.say(f"copied {ref}")


def _wide(app: KvdTui, table: WindowedTable) -> None:
    table.set_wide(is_wide=not table.is_wide)
    app.place_card()


def _of_table(act: Callable[[KvdTui, WindowedTable], None]) -> Action:
    """An action on the table that keys are about."""

    def on_its_table(app: KvdTui, _: str) -> None:
        table = app.page.table()
        if table is not None:
            act(app, table)

    return on_its_table


def filter_by(app: KvdTui, text: str) -> None:
    """Show only rows that pass; nothing: all of them."""
    table = app.page.table()
    if table is None:
        app.page.filter_by(text)
        return
    found = filters.parse(text, table.columns)
    if isinstance(found, SyntaxFlaw):
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


# ---- what is done on the node --------------------------------------------------------------------


def name_of(request: NodeRequest) -> str:
    """A verb as an operator types it."""
    match request:
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
            assert_never(request)


def answered(reply: AdminReply, *kinds: type[T]) -> T | Refusal:
    """An answer of one of the kinds that are expected; any other is a refusal to guess."""
    if isinstance(reply, AdminFailed):
        return reply.refusal
    if isinstance(reply, kinds):
        return reply
    kind = type(reply).__name__
    return Refusal(Code.INTERNAL, f"the daemon answered with {kind}: versions differ")


async def carry_out(app: KvdTui, request: NodeRequest) -> None:
    """Have the daemon do it; what changes the node only after it was rehearsed and agreed to."""
    name = name_of(request)
    if not isinstance(request, Audit | Record):
        if "write" not in app.has():
            app.say(NOT_HERE, is_bad=True)
            return
        would = answered(await app.link.ask(Rehearse(0, request)), Report)
        if not await app.push_screen_wait(ConfirmDialog(name, would)):
            app.say(f"{name}: not done")
            return
    done: Report | Recorded | Refusal = answered(await app.link.ask(request), Report, Recorded)
    app.push_screen(OutcomeDialog(name, done))


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
    if action and not isinstance(commands.parse(action), SyntaxFlaw):
        app.ask(":", action)
    else:
        app.say(clean(action) or "nothing is proposed")


# ---- going on from what is open ------------------------------------------------------------------


async def related(app: KvdTui) -> None:
    """Have the operator choose among what has to do with what is open, or under the cursor."""
    known = await _known(app)
    chosen = await app.push_screen_wait(MenuDialog(f"{known.ref} has to do with", links_of(known)))
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


async def _known(app: KvdTui) -> CardContent:
    """What there is to know of what is open, or under the cursor."""
    ref = app.card.ref or app.page.chosen()
    asked = question(ref)
    answer = answered(await app.link.ask(asked), Because) if asked is not None else None
    row, columns = app.page.row(ref)
    return CardContent(
        ref=ref,
        answer=answer if isinstance(answer, Because) else None,
        row=row,
        columns=columns,
    )


# ---- by their names ------------------------------------------------------------------------------

ACTIONS: dict[str, Action] = {
    "page": lambda app, name: app.go(Location(name)),
    "open": lambda app, ref: app.open(ref or app.page.chosen() or app.card.ref),
    "back": _back,
    "related": lambda app, _: app.order(partial(related, app)),
    "events-of": lambda app, _: app.order(partial(events_of, app)),
    "help": _help,
    "palette": lambda app, _: app.action_command_palette(),
    "quit": lambda app, _: app.exit(),
    "freeze": _freeze,
    "live": lambda app, _: app.mirror.history.live(),
    "step": lambda app, count: app.mirror.history.step(int(count)),
    "command": lambda app, _: app.ask(":", ""),
    "filter": lambda app, _: app.ask("/", app.page.filter_text),
    "faults": _faults,
    "card": lambda app, lines: app.card.scroll_by(int(lines)),
    "copy": _copy,
    "theme": lambda app, name: app.set_theme(name),
    "sort": _of_table(lambda _, table: table.sort_next()),
    "wide": _of_table(_wide),
    "order": start,
    "audit": lambda app, _: app.order(partial(carry_out, app, Audit(0))),
}
"""By the first word of what a key does; the function gets what follows it."""

OF_COMMANDS: dict[str, Action] = {
    "filter-by": filter_by,
    "sort-by": sort_by,
    "fps": lambda app, fps: app.set_fps(float(fps)),
}
"""What only a command does, as it says more than a key can."""
