"""What the console itself does for an action of the table of keys; others are the page's."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from kvd import filters
from kvd.errors import Code, Refusal
from kvd.filters import SyntaxFlaw
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
from tui.model import commands, export
from tui.widgets.card import EVENTS_OF, CardContent, about_of, links_of, question
from tui.widgets.dialogs import ConfirmDialog, HelpDialog, MenuDialog, OutcomeDialog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from tui.app import KvdTui
    from tui.widgets.table import WindowedTable

    Action: TypeAlias = Callable[[KvdTui, str], Awaitable[None]]
    from kvd.wire.admin import AdminReply


# ---- going somewhere -----------------------------------------------------------------------------


async def _page(app: KvdTui, name: str) -> None:
    await app.go(app.navigation.turn(name))


async def _last(app: KvdTui, _: str) -> None:
    await app.go(app.navigation.last())


async def _backward(app: KvdTui, _: str) -> None:
    await app.go(app.navigation.backward())


async def _forward(app: KvdTui, _: str) -> None:
    await app.go(app.navigation.forward())


async def _open(app: KvdTui, _: str) -> None:
    await app.open(app.page.chosen() or app.card.ref)


async def _back(app: KvdTui, _: str) -> None:
    """Close what is open, one step of the way that led there; then show more of the page."""
    if app.card.ref:
        await app.go(app.navigation.up())
    elif not await app.page.act("back") and app.page.filter_text:
        filter_by(app, "")


async def _related(app: KvdTui, _: str) -> None:
    app.order(partial(related, app))


async def _events_of(app: KvdTui, _: str) -> None:
    app.order(partial(events_of, app))


async def _help(app: KvdTui, _: str) -> None:
    app.push_screen(HelpDialog(app.page.NAME, app.has()))


async def _palette(app: KvdTui, _: str) -> None:
    app.action_command_palette()


async def _quit(app: KvdTui, _: str) -> None:
    app.exit()


# ---- the same in another way ---------------------------------------------------------------------


async def _freeze(app: KvdTui, _: str) -> None:
    history = app.mirror.history
    if history.is_frozen:
        history.live()
    else:
        history.freeze()


async def _live(app: KvdTui, _: str) -> None:
    app.mirror.history.live()


async def _step(app: KvdTui, count: str) -> None:
    app.mirror.history.step(int(count))


async def _play(app: KvdTui, _: str) -> None:
    replay = app.replay
    if replay is not None and (replay.is_held or replay.at_end):
        replay.play()
    elif replay is not None:
        replay.hold()


async def _wind(app: KvdTui, seconds: str) -> None:
    replay = app.replay
    if replay is not None:
        app.mirror.history.live()
        replay.seek(max(0.0, min(replay.length_s, replay.position_s + float(seconds))))


async def _speed(app: KvdTui, factor: str) -> None:
    if app.replay is not None:
        app.replay.pace(app.replay.speed * float(factor))


async def _command(app: KvdTui, _: str) -> None:
    app.ask(":", "")


async def _filter(app: KvdTui, _: str) -> None:
    app.ask("/", app.page.filter_text)


async def _faults(app: KvdTui, _: str) -> None:
    wanted = app.page.faults()
    filter_by(app, "" if app.page.filter_text == wanted else wanted)


async def _card(app: KvdTui, lines: str) -> None:
    app.card.scroll_by(int(lines))


async def _copy(app: KvdTui, _: str) -> None:
    ref = app.card.ref or app.page.chosen()
    app.copy_to_clipboard(ref)
    app.say(f"copied {ref}")


async def _export(app: KvdTui, _: str) -> None:
    offer_export(app)


async def _theme(app: KvdTui, name: str) -> None:
    app.set_theme(name)


async def _maximise(app: KvdTui, _: str) -> None:
    is_alone = app.page.maximise()
    app.card.display = bool(app.card.ref) and not is_alone


def _of_table(act: Callable[[WindowedTable], None]) -> Action:
    """An action on the table that keys are about."""

    async def run(app: KvdTui, _: str) -> None:
        table = app.page.table()
        if table is not None:
            act(table)

    return run


async def _wide(app: KvdTui, _: str) -> None:
    table = app.page.table()
    if table is not None:
        table.set_wide(is_wide=not table.is_wide)
        app.place_card()


# ---- what is done on the node --------------------------------------------------------------------


async def _order(app: KvdTui, verb: str) -> None:
    start(app, verb)


async def _audit(app: KvdTui, _: str) -> None:
    app.order(partial(carry_out, app, Audit(0)))


ACTIONS: dict[str, Action] = {
    "page": _page,
    "last": _last,
    "backward": _backward,
    "forward": _forward,
    "open": _open,
    "back": _back,
    "related": _related,
    "events-of": _events_of,
    "help": _help,
    "palette": _palette,
    "quit": _quit,
    "freeze": _freeze,
    "live": _live,
    "step": _step,
    "play": _play,
    "wind": _wind,
    "speed": _speed,
    "command": _command,
    "filter": _filter,
    "faults": _faults,
    "card": _card,
    "copy": _copy,
    "export": _export,
    "theme": _theme,
    "maximise": _maximise,
    "sort": _of_table(lambda table: table.sort_next()),
    "reverse": _of_table(lambda table: table.reverse()),
    "tag": _of_table(lambda table: table.tag()),
    "wide": _wide,
    "order": _order,
    "audit": _audit,
}
"""By the first word of ``Key.action``; the function gets what follows it."""


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


def judge(app: KvdTui, mode: str, text: str) -> SyntaxFlaw | None:
    """What is wrong with a text of the bar; None for nothing."""
    if mode == "/":
        found: object = filters.parse(text, app.page.filter_columns())
    else:
        found = commands.parse(text)
        if isinstance(found, commands.FilterBy):
            return judge(app, "/", found.text)
    return found if isinstance(found, SyntaxFlaw) else None


def context(app: KvdTui) -> commands.Context:
    """What there is to choose from now."""
    table = app.page.table()
    data = table.data if table is not None else None
    keys = data.order if data is not None else ()
    names = tuple(column.name for column in app.page.filter_columns())
    return commands.Context(names, tuple(app.available_themes), (*app.card.links, *keys))


async def obey(app: KvdTui, text: str) -> None:
    """Do what was typed after ``:``."""
    command = commands.parse(text)
    match command:
        case SyntaxFlaw(what=what):
            app.say(what, is_bad=True)
        case commands.Show(page="help"):
            app.push_screen(HelpDialog(app.page.NAME, app.has()))
        case commands.Show(page=page):
            await app.go(app.navigation.turn(page))
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
        if not await app.push_screen_wait(ConfirmDialog(name, would)):
            app.say(f"{name}: not done")
            return
    done = told(await app.link.ask(request))
    if isinstance(done, Because):
        done = Refusal(Code.INTERNAL, "the daemon answered something else")
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


# ---- going on --------------------------------------------------------------------------------


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
    answer = told(await app.link.ask(asked)) if asked is not None else None
    row, columns = app.page.row(ref)
    return CardContent(ref, answer if isinstance(answer, Because) else None, row, columns)


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
    elif table is not None and table.data is not None:
        rows = [key for key in table.data.order if key in table.tagged]
        text = export.export(table.data, form, app.snapshot.now_s, rows)
        count = len(rows) or len(table.data.order)
        what = f"{count} of {counted(table.data.total, 'row')} of {table.view}"
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
