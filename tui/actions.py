"""What the console itself does for an action of the table of keys; others are the page's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvd.wire.admin import Audit
from tui import orders
from tui.screens.help import Help

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from tui.app import KvdTui
    from tui.widgets.linetable import LineTable

    Action: TypeAlias = Callable[[KvdTui, str], Awaitable[None]]

# ---- going somewhere -----------------------------------------------------------------------------


async def _page(app: KvdTui, name: str) -> None:
    await app.go(app.trail.turn(name))


async def _last(app: KvdTui, _: str) -> None:
    await app.go(app.trail.last())


async def _backward(app: KvdTui, _: str) -> None:
    await app.go(app.trail.backward())


async def _forward(app: KvdTui, _: str) -> None:
    await app.go(app.trail.forward())


async def _open(app: KvdTui, _: str) -> None:
    await app.open(app.page.chosen() or app.card.ref)


async def _back(app: KvdTui, _: str) -> None:
    """Close what is open, one step of the way that led there; then show more of the page."""
    if app.card.ref:
        await app.go(app.trail.up())
    elif not await app.page.act("back") and app.page.filter_text:
        orders.filter_by(app, "")


async def _related(app: KvdTui, _: str) -> None:
    app.order(partial(orders.related, app))


async def _events_of(app: KvdTui, _: str) -> None:
    app.order(partial(orders.events_of, app))


async def _help(app: KvdTui, _: str) -> None:
    app.push_screen(Help(app.page.NAME, app.has()))


async def _palette(app: KvdTui, _: str) -> None:
    app.action_command_palette()


async def _quit(app: KvdTui, _: str) -> None:
    app.exit()


# ---- the same in another way ---------------------------------------------------------------------


async def _freeze(app: KvdTui, _: str) -> None:
    moments = app.mirror.moments
    if moments.is_frozen:
        moments.live()
    else:
        moments.freeze()


async def _live(app: KvdTui, _: str) -> None:
    app.mirror.moments.live()


async def _step(app: KvdTui, count: str) -> None:
    app.mirror.moments.step(int(count))


async def _play(app: KvdTui, _: str) -> None:
    replay = app.replay
    if replay is not None and (replay.is_held or replay.at_end):
        replay.play()
    elif replay is not None:
        replay.hold()


async def _wind(app: KvdTui, seconds: str) -> None:
    replay = app.replay
    if replay is not None:
        app.mirror.moments.live()
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
    orders.filter_by(app, "" if app.page.filter_text == wanted else wanted)


async def _card(app: KvdTui, lines: str) -> None:
    app.card.scroll_by(int(lines))


async def _copy(app: KvdTui, _: str) -> None:
    ref = app.card.ref or app.page.chosen()
    app.copy_to_clipboard(ref)
    app.say(f"copied {ref}")


async def _export(app: KvdTui, _: str) -> None:
    orders.offer_export(app)


async def _theme(app: KvdTui, name: str) -> None:
    app.set_theme(name)


async def _maximise(app: KvdTui, _: str) -> None:
    is_alone = app.page.maximise()
    app.card.display = bool(app.card.ref) and not is_alone


def _of_table(act: Callable[[LineTable], None]) -> Action:
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
    orders.start(app, verb)


async def _audit(app: KvdTui, _: str) -> None:
    app.order(partial(orders.carry_out, app, Audit(0)))


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
