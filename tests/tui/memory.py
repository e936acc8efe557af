"""A feed of a big node by hand: a million pages in two components, a tree, a hostile name."""

from __future__ import annotations

import msgspec

from kvd.wire.console import Column, Holder, Level, MapQuery, PageMap, Table, TableRow
from tests.tui.feed import Feed
from tui.app import KvdTui, Options
from tui.model.mirror import Mirror

HOSTILE = "[red]\x1b[31mevil\u202e"
SHOWN = r"[red]\x1b[31mevil\u202e"
TOTALS = {"kv": 1_000_000, "swa": 1000}
LEVELS = (
    Level(".", "free", 500_000),
    Level("c", "cached", 499_990),
    Level("Q", "quarantined", 10),
)
OWNERS = (
    Level(".", "free", 500_000),
    Level("c", "cache", 300_000),
    Level("A", HOSTILE, 199_990),
    Level("?", "nobody", 10),
)
LIT = range(123_400, 123_500)
"""Pages of whatever is to be lit."""

POOL_COLUMNS = (
    *(Column(name, "text") for name in ("component", "tier")),
    Column("state", "state"),
    *(
        Column(name, "pages")
        for name in ("total", "free", "held", "cached", "quarantined", "locked", "headroom")
    ),
    Column("evicted", "pages"),
    Column("saved_capacity", "pages"),
    Column("window", "text"),
    Column("held_by", "holders"),
    *(Column(name, "text") for name in ("interior", "tag")),
)
TREE_COLUMNS = (
    Column("depth", "depth"),
    Column("name", "text"),
    Column("tokens", "tokens"),
    Column("pages", "pages"),
    Column("below_pages", "pages"),
    Column("children", "count"),
    Column("lock_ref", "count"),
    Column("holders", "holders"),
)
LIST_COLUMNS = (
    Column("namespace", "text"),
    Column("start", "tokens"),
    Column("name", "text"),
    Column("pages", "pages"),
    Column("why", "text"),
    Column("rank", "count"),
)
CHILDREN = {1: (2, 3), 2: (4, 5), 3: (), 4: (), 5: (6,), 6: ()}
NAMES = {1: HOSTILE, 2: "10 11 12 …", 3: "20 21", 4: "30", 5: "40 41", 6: "50"}


class Memory(Feed):
    """Answers views of pools and nodes, and page maps; ``evicted`` is the counter of them."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted = 0
        self.trouble = ""
        self.first_name = "kv"
        self.maps: list[MapQuery] = []

    def _answer(self, query) -> msgspec.Raw:
        if isinstance(query, MapQuery):
            self.maps.append(query)
            return msgspec.Raw(msgspec.msgpack.encode(self._map(query)))
        columns, rows = self._rows(query)
        shown = rows[query.first : query.first + query.limit]
        table = Table(
            query.view,
            self.mirror.frames + 1,
            0,
            self.at_s,
            len(rows),
            len(rows),
            columns,
            tuple(one.key for one in shown),
            tuple(shown),
        )
        return msgspec.Raw(msgspec.msgpack.encode(table))

    def _rows(self, query):
        if query.view == "pools":
            holders = (Holder(HOSTILE, 88.0, "lease:7"),)
            return POOL_COLUMNS, [
                self._pool(self.first_name, "device", 1_000_000, holders, 64),
                self._pool("swa", "host", 1000, (), 0),
            ]
        if query.view == "tree":
            return TREE_COLUMNS, list(self._below(1, 0, set(query.opened)))
        rows = [
            TableRow(f"node:{n}", (HOSTILE, 320, NAMES[n], n, "locked by 1", rank))
            for rank, n in enumerate((4, 6), start=1)
        ]
        return LIST_COLUMNS, rows

    def _pool(self, name, tier, total, holders, saved):
        cells = (name, tier, "ok", total, total // 2, 10, total // 4, 3, total // 8, 5)
        inside = ("nhd", "") if name == self.first_name else ("hnd", "engine 1")
        return TableRow(f"pool:{name}", (*cells, self.evicted, saved, "", holders, *inside))

    def _below(self, number, depth, opened):
        holders = (Holder(HOSTILE, 95.0, "lease:7"), Holder("gone", 60.0, "lease:8", "gone"))
        below = CHILDREN[number]
        locks = holders if number in {1, 2} else ()
        cells = (depth, NAMES[number], 320, 20, 20 + 20 * len(below), len(below), len(locks), locks)
        yield TableRow(f"node:{number}", cells)
        if number in opened:
            for child in below:
                yield from self._below(child, depth + 1, opened)

    def _map(self, query: MapQuery) -> PageMap:
        total = TOTALS.get(query.component or "kv", 64)
        each, first = query.pages_each, query.first_page
        count = min(query.cells, -(-(total - first) // each))
        lit = ()
        if query.mark:
            lit = tuple(sorted({(page - first) // each for page in LIT if page >= first}))
        return PageMap(
            component=query.component or self.first_name,
            lens=query.lens,
            revision=1,
            at_s=self.at_s - 0.4,
            took_s=0.012,
            total_pages=0 if self.trouble else total,
            page_bytes=65536,
            first_page=first,
            pages_each=each,
            levels=OWNERS if query.lens == "owner" else LEVELS,
            cells=None if self.trouble else bytes(cell % 3 for cell in range(count)),
            lit=tuple(cell for cell in lit if cell < count),
            runs=(212, 18032),
            trouble=self.trouble,
        )


def memory(page: str, **options) -> tuple[KvdTui, Memory]:
    """An app at this page, and what feeds it."""
    feed = Memory()
    return KvdTui(Mirror(), feed.connect, Options(page=page, **options), lambda: feed.at_s), feed
