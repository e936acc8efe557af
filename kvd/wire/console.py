"""What a console sees: tables cut down to what is on its screen, and of those only what changed.

A console asks with ``Look`` for so many frames, one every so often, and asks again before they are
used up, or when it shows something else. It says which revision it has of each table; the daemon
answers with the rows that changed since, or with the whole window where it cannot tell. So little
is ever queued for a console, and a stopped one costs nothing a moment later.

Cells hold moments (``since``, ``until``), not ages: a row changes when what it says changes, not
because time goes by. Moments are on the daemon's clock, which is ``Vitals.at_s``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvd.wire.bounds import Counter, Name
from kvd.wire.snapshot import Totals

MAX_QUERIES = 8
MAX_FRAMES = 100
MAX_ROWS = 500
"""Rows of one window: more than any terminal has lines."""
MAX_CELLS = 65_536
"""Cells of one page map: 400 x 160."""
MAX_FILTERS = 16
MAX_OPENED = 1024
"""Opened nodes of the tree."""
MAX_EVENTS = 500
"""Events of one frame."""

Text = Annotated[str, Meta(max_length=256)]


class Filter(msgspec.Struct, frozen=True, array_like=True):
    """One condition on a row; all conditions of a query must hold.

    ``test``: ``has``, ``has-not`` (part of the text, ignoring case), ``is``, ``is-not``, ``over``,
    ``under`` (numbers; of a moment: how long ago, or how long from now). ``column`` empty: any text
    of the row.
    """

    column: Name
    test: Name
    value: Text | float


class Query(msgspec.Struct, frozen=True, array_like=True, tag="table"):
    """A window of one table. Answer: ``Table``.

    ``have`` is the revision that the console has, 0 for none. ``sort`` is a column, ``-column`` for
    the largest first, empty for the view's own order. ``opened``: of the tree, the nodes whose
    children are shown.
    """

    view: Name
    have: Counter = 0
    first: Counter = 0
    limit: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 50
    sort: Name = ""
    filters: Annotated[tuple[Filter, ...], Meta(max_length=MAX_FILTERS)] = ()
    opened: Annotated[tuple[Counter, ...], Meta(max_length=MAX_OPENED)] = ()


class MapQuery(msgspec.Struct, frozen=True, array_like=True, tag="map"):
    """The pages of one component as cells of ``pages_each`` pages. Answer: ``PageMap``.

    ``component`` empty: the first one. ``lens``: ``state``, ``owner``, ``age``, ``hits``, ``locks``
    or ``tier``. ``mark`` is what is lit up: ``lease:7``, ``node:3``, ``client:2``, or empty.
    """

    component: Name
    lens: Name
    have: Counter = 0
    first_page: Counter = 0
    pages_each: Annotated[int, Meta(ge=1, le=2**31)] = 1
    cells: Annotated[int, Meta(ge=0, le=MAX_CELLS)] = 4096
    mark: Name = ""


class EventQuery(msgspec.Struct, frozen=True, array_like=True):
    """Events after number ``after``: at most ``limit``, the newest. ``Frame.skipped``: the others.

    ``kinds``: only these tags; none for all. ``handoff-failed``: ends of handoffs that failed.
    ``about``: only those that name it: ``lease:7``, ``room:12``, ``peer:prefill-0``, ``node:3``,
    ``client:2``; empty for all.
    """

    after: Counter
    limit: Annotated[int, Meta(ge=0, le=MAX_EVENTS)] = 200
    kinds: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    about: Name = ""


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """Who holds something: in words without an age, since when, and what to open for more."""

    who: str
    since_s: float
    ref: str
    state: str = ""
    """Empty for a lease that runs; ``gone`` where its owner is, else its state."""


Cell = str | int | float | tuple[Holder, ...] | None
"""None where the question makes no sense for the row."""


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One column and how to read it.

    ``kind``: ``text``, ``state``, ``ref`` (``lease:7``, what to open), ``count``, ``bytes``,
    ``tokens``, ``pages``, ``share`` (0 to 1), ``ms``, ``seconds``, ``since``, ``until`` (moments),
    ``holders``, ``depth`` (indentation of the row).
    """

    name: str
    kind: str
    help: str = ""


class TableRow(msgspec.Struct, frozen=True, array_like=True):
    """One row; ``key`` is what to open: ``lease:7``, ``receive:3``, ``node:9``, ``peer:one``."""

    key: str
    cells: tuple[Cell, ...]


class Table(msgspec.Struct, frozen=True, array_like=True, tag="table"):
    """The answer to a ``Query``: what changed of its window since revision ``since``.

    ``since`` 0: this is all of it, ``columns`` too. ``order`` are the keys of the window, None
    where they are as before; ``rows`` are those that are new in it or changed. ``total`` rows pass
    the filters, of ``of``. ``at_s``: as of when; the daemon spends only so much on consoles, so on
    a big node a table may be older than the frame. ``trouble``: why there is no such table.
    """

    view: str
    revision: int
    since: int
    at_s: float
    total: int
    of: int
    columns: tuple[Column, ...] = ()
    order: tuple[str, ...] | None = None
    rows: tuple[TableRow, ...] = ()
    trouble: str = ""


class Level(msgspec.Struct, frozen=True, array_like=True):
    """What one cell value of a page map means, and on how many pages it is; ``0`` comes first."""

    letter: str
    name: str
    pages: int


class PageMap(msgspec.Struct, frozen=True, array_like=True, tag="map"):
    """The answer to a ``MapQuery``: one byte a cell, an index into ``levels``.

    The highest level among the pages of a cell is shown: levels go from harmless to worth a look.
    ``cells`` is None where nothing changed since ``have``. ``lit`` are the indexes of cells with a
    page of the ``mark``. ``took_s``: how long the last survey of all pages took, from its start to
    its end; ``at_s`` is its end.
    """

    component: str
    lens: str
    revision: int
    at_s: float
    took_s: float
    total_pages: int
    page_bytes: int
    first_page: int
    pages_each: int
    levels: tuple[Level, ...]
    cells: bytes | None
    lit: tuple[int, ...] = ()
    runs: tuple[int, int] = (0, 0)
    """Pages of the median and of the largest run of free pages."""
    trouble: str = ""


class Sources(msgspec.Struct, frozen=True, array_like=True):
    """Where the tokens of all leases came from, since the incarnation began; counters.

    ``cached``, ``received`` and ``restored`` were there or came; the rest was, or is to be,
    computed: ``new`` was never seen; ``evicted`` was cached once, as far as is remembered, or its
    window or state was; ``lost`` should have come from a peer; ``unaligned`` is the end of a prompt
    that fills no page.
    """

    cached: int = 0
    received: int = 0
    restored: int = 0
    new: int = 0
    evicted: int = 0
    lost: int = 0
    unaligned: int = 0


class Latency(msgspec.Struct, frozen=True, array_like=True):
    """Of the handoffs that ended in the last minute on this node, both sides."""

    ended: int = 0
    failed: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0


class Vitals(msgspec.Struct, frozen=True, array_like=True):
    """The head of every frame: which daemon, how it is, and its counters. Moments as everywhere.

    ``lag_s`` is how late the loop's timer was, at worst in the last second. ``findings`` are those
    of the view of that name, ``worst`` the gravest of them: empty, ``low``, ``medium``, ``high``.
    ``console_share`` is what consoles cost of one core in the last seconds, their sockets not
    counted: some 30 us more for each frame.
    """

    at_s: float
    node: str
    incarnation: str
    version: str
    state: str
    transport: str
    generation: int
    started_s: float
    lag_s: float
    clients: int
    leases: int
    rooms: int
    waiting: int
    peers: int
    peers_up: int
    findings: int
    worst: str
    last_event: int
    totals: Totals
    sources: Sources
    latency: Latency
    moving_bytes_in: int = 0
    """Of handoffs that have not ended, arrived here so far; ``totals`` has those that have."""
    moving_bytes_out: int = 0
    console_share: float = 0.0
    unit: str = ""
    """What keeps the process: ``systemd``, or empty."""
