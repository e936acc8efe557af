"""A source that brings a frame when a test says so: rows of numbers, a hostile name too."""

from __future__ import annotations

import asyncio

import msgspec

from kvd.wire.admin import Because, Frame
from kvd.wire.console import Column, Holder, MapQuery, PageMap, Table, TableRow, Vitals
from tests.tui import frames
from tests.tui.golden import text_of
from tui.app import KvdTui, Options
from tui.model.mirror import Mirror
from tui.widgets.head import Foot

HOSTILE = "evil\x1b[2J[bold]\u202etxt"
COLUMNS = (
    Column("name", "text"),
    Column("state", "state"),
    Column("pages", "pages"),
    Column("holders", "holders"),
    Column("since", "since"),
)
KINDS = {"clients": "client", "leases": "lease", "rooms": "receive", "peers": "peer"}


def vitals(at_s: float = 100.0, **fields) -> Vitals:
    """A daemon that serves, and has two findings."""
    has = {"clients": 3, "leases": 5, "rooms": 1, "peers": 6, "peers_up": 6, "findings": 2}
    return frames.vitals(at_s, **{"node": "decode-node", "worst": "medium", **has, **fields})


def row(view: str, number: int) -> TableRow:
    """Row ``number`` of a view."""
    name = HOSTILE if number == 1 else f"{view}-{number}"
    holders = (Holder("engine", 95.0, "lease:7"),) if number % 2 else ()
    kind = KINDS.get(view, view)
    return TableRow(f"{kind}:{number}", (name, "alive", number * 10, holders, 90.0 - number))


class Feed:
    """Answers whatever is asked from ``rows`` rows a view; ``bring`` makes the next frame."""

    fps = 10.0
    interval_s = 0.1

    def __init__(self, rows: int = 40) -> None:
        self.rows = rows
        self.numbers: dict[str, list[int]] = {}
        self.requests: list[object] = []
        self.replies: dict[type, object] = {}
        self.looks: list[object] = []
        self.hurried = 0
        self.at_s = 100.0

    def connect(self, mirror: Mirror, wanted) -> Feed:
        """Whom the frames are for, and who says what they shall have."""
        self.mirror, self._wanted = mirror, wanted
        return self

    async def run(self) -> None:
        """Bring nothing by itself."""
        await asyncio.Event().wait()

    def hurry(self) -> None:
        """Something else is wanted."""
        self.hurried += 1

    def painted(self, took_s: float) -> None:
        """Frames come when a test says so."""

    def bring(self, **fields) -> None:
        """One frame, as the daemon would answer what the app wants now."""
        self.at_s += 0.1
        look = self.mirror.look(self.mirror.frames + 1, self._wanted())
        self.looks.append(look)
        answers = [self._answer(query) for query in look.queries]
        head = vitals(self.at_s, **fields)
        frame = Frame(look.call, head, tuple(answers), (), 0, 0)
        self.mirror.take(frame, self.at_s)

    def _answer(self, query) -> msgspec.Raw:
        if isinstance(query, MapQuery):
            nothing = PageMap(query.component, query.lens, 0, 0.0, 0.0, 0, 0, 0, 1, (), None)
            return msgspec.Raw(msgspec.msgpack.encode(nothing))
        numbers = self.numbers.get(query.view, list(range(self.rows)))
        window = numbers[query.first : query.first + query.limit]
        rows = tuple(row(query.view, number) for number in window)
        order = tuple(one.key for one in rows)
        total = len(numbers)
        table = Table(
            query.view, self.mirror.frames + 1, 0, self.at_s, total, total, COLUMNS, order, rows
        )
        return msgspec.Raw(msgspec.msgpack.encode(table))

    async def ask(self, request, limit_s: float = 5.0):
        """The answer prepared for this kind of request."""
        self.requests.append(request)
        await asyncio.sleep(0)
        known = Because(0, "lease 7 holds it", ("10 pages",), ("lease:7", "peer:prefill-0"))
        return self.replies.get(type(request), known)


def console(rows: int = 40, **options) -> tuple[KvdTui, Feed]:
    """An app, and what feeds it."""
    feed = Feed(rows)
    return KvdTui(Mirror(), feed.connect, Options(**options), lambda: feed.at_s), feed


async def settle(app, pilot) -> None:
    """Paint what is there now, and wait until it is painted."""
    await pilot.pause()
    app.tick()
    await pilot.pause()


async def resize(app, pilot, width: int, height: int) -> None:
    """Make the terminal so large, and wait until that is painted; a timer brings it about."""
    await pilot.resize_terminal(width, height)
    while app.screen.query_one(Foot).size.width != width:
        await pilot.pause(0.01)
    await settle(app, pilot)


def lines_of(app) -> list[str]:
    """What the terminal shows, line by line."""
    return text_of(app).splitlines()


def line_with(app, part) -> str:
    """The one line of the screen that has this."""
    [found] = [line for line in lines_of(app) if part in line]
    return found
