"""Deltas of real nodes: whatever happens and whatever is asked, they add up to the whole table."""

from __future__ import annotations

import random
import sys

import msgspec
import pytest

from kvd.console.context import Context
from kvd.console.history import Recent
from kvd.console.page_map import map_in_steps
from kvd.console.page_map_modes import MODES
from kvd.console.server import VIEWS, ConsoleServer, Watch
from kvd.console.view import TableWindow
from kvd.observe.bus import Bus
from kvd.wire.admin import Frame, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from kvd.wire.console import Filter, MapQuery, PageMap, Query, Table
from tests.console.looked import in_one
from tests.console.stage import Shell
from tests.core.families import SPECS, worked

TESTS = ("has", "has-not", "is", "is-not", "over", "under", "of-a-later-version")
VALUES = ("held", "7", "ENGINE", "", "node:3", 0.0, 3.5, -1.0, float("inf"), float("nan"))
FAR = 2**63 - 1


class Seen:
    """What a console makes of the answers to one query: all that a client needs to do."""

    def __init__(self) -> None:
        self.revision = 0
        self.order: tuple[str, ...] = ()
        self.rows: dict[str, object] = {}
        self.total = self.of = 0
        self.cells: bytes | None = None

    def take(self, answer: msgspec.Raw) -> None:
        said = msgspec.msgpack.decode(answer, type=Table | PageMap)
        if isinstance(said, PageMap):
            if said.revision != self.revision:
                self.cells = said.cells
        else:
            assert said.since in {0, self.revision}
            rows = self.rows if said.since else {}
            self.order = self.order if said.order is None else said.order
            fresh = {row.key: row for row in said.rows}
            self.rows = {key: fresh.get(key) or rows[key] for key in self.order}
            self.total, self.of = said.total, said.of
        self.revision = said.revision


class Console:
    """Asks a server, at any pace; some of what it is sent is lost."""

    def __init__(self, family: str, rng: random.Random) -> None:
        self.engine = worked(family, rng.randrange(1000), 150)
        self.node = self.engine.node
        self.bus, recent = Bus(), Recent()
        self.bus.subscribe(recent.take, wants=recent.wants)
        self.context = Context(self.node, recent, Shell())
        self.server = ConsoleServer(self.context, self.bus.after, 0.5, lambda: 0.0)
        self.rng = rng
        self.seen: dict[Query | MapQuery, Seen] = {}
        self.now_s = 1000.0
        self.checked = 0
        self._published = 0

    def work(self) -> None:
        self.engine.work(self.rng.randrange(6))
        for step in self.engine.steps[self._published :]:
            self.bus.publish(step.events)
        self._published = len(self.engine.steps)
        self.now_s = max(self.now_s, self.engine.now_s) + self.rng.choice([0.1, 0.3])

    def look(self, *queries: Query | MapQuery) -> None:
        """Ask for all of them, and check what there is then if the answer arrives."""
        seen = [self.seen.setdefault(one, Seen()) for one in queries]
        having = [
            msgspec.structs.replace(query, have=one.revision)
            for query, one in zip(queries, seen, strict=True)
        ]
        asked = ADMIN_REQUESTS.decode(ADMIN_REQUESTS.encode(Look(1, tuple(having))))
        assert isinstance(asked, Look), asked
        frame = ADMIN_REPLIES.decode(self.server.frame(Watch(asked, self.now_s), self.now_s))
        assert isinstance(frame, Frame)
        if self.rng.random() < 0.1:
            return  # it is lost on its way
        for query, one, answer in zip(queries, seen, frame.answers, strict=True):
            one.take(answer)
            if isinstance(query, Query):
                self._check_table(query, one)
            elif self.context.surveyor.ask(self.now_s) is not None:
                self._check_map(query, one)

    def _check_table(self, query: Query, seen: Seen) -> None:
        window = in_one(VIEWS[query.view].look(self.context, query))
        assert isinstance(window, TableWindow)
        assert list(seen.rows.values()) == list(window.rows), query
        assert (seen.total, seen.of) == (window.total, window.of), query
        self.checked += bool(window.rows)

    def _check_map(self, query: MapQuery, seen: Seen) -> None:
        survey = self.context.surveyor.ask(self.now_s)
        assert survey is not None
        whole = in_one(map_in_steps(query, survey, self.node))
        assert seen.cells == (None if whole.trouble else whole.cells), query

    def any_query(self) -> Query | MapQuery:
        rng = self.rng
        if rng.random() < 0.3:
            return MapQuery(
                component=rng.choice(["", "kv", "swa", "state", "none"]),
                lens=rng.choice([*MODES, "none"]),
                first_page=rng.choice([0, 3, 40, FAR]),
                pages_each=rng.choice([1, 3, 17, 2**31]),
                cells=rng.choice([0, 1, 64, 65_536]),
                mark=rng.choice(["", "lease:1", "node:2", "client:1", "lease:", "x", "client:٣"]),
            )
        view = rng.choice(list(VIEWS))
        columns = [column.name for column in VIEWS[view].columns]
        sort = rng.choice(["", *columns])
        ids = [node.id for node in self.node.leases.tree.nodes()]
        roots = [root.id for root in self.node.leases.tree.roots.values()]
        return Query(
            view,
            first=rng.choice([0, 0, 0, 0, 1, 5, FAR]),
            limit=rng.choice([0, 1, 7, 50, 500, 500]),
            sort=f"-{sort}" if sort and rng.random() < 0.5 else sort,
            filters=tuple(
                Filter(rng.choice(["", *columns]), rng.choice(TESTS), rng.choice(VALUES))
                for _ in range(rng.choice([0, 0, 0, 1, 2]))
            ),
            opened=(*roots, *rng.sample(ids, min(len(ids), 5)), FAR),
        )


@pytest.mark.parametrize("family", SPECS)
def test_whatever_is_asked_and_happens_deltas_add_up_to_the_whole(family):
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    console = Console(family, rng)
    screens = [console.any_query() for _ in range(12)]
    for _ in range(150):
        console.work()
        if rng.random() < 0.3:
            screens[rng.randrange(len(screens))] = console.any_query()
        console.look(*rng.sample(screens, rng.randrange(1, 9)))
    assert console.checked > 5, "a walk that looks at next to nothing shows nothing"
