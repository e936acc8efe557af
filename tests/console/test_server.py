"""The server: deltas by revision, a window of a table, filters, and a budget that is kept."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvd.console.context import Context
from kvd.console.history import Recent, recalled
from kvd.console.server import MAX_ANSWERS, MAX_CREDIT_S, MAX_FEEDS, ConsoleServer, Watch
from kvd.errors import Code, Refusal
from kvd.observe.bus import RING_EVENTS, Bus
from kvd.wire import client
from kvd.wire.admin import AdminFailed, Because, Frame, Look, Why
from kvd.wire.codec import ADMIN_REPLIES
from kvd.wire.console import EventQuery, Filter, MapQuery, PageMap, Query, Table
from kvd.wire.events import ClientAttached, Moved, PeerUp
from tests.core.engines import PROMPT, Sender
from tests.core.world import World, tokens


class NoEngines:
    """A shell that knows nothing of the sessions."""

    def calls(self, session: int) -> int:
        return session * 10

    def is_alive(self, pid: int) -> bool:
        return pid > 0


class Service:
    """A server over a decode node, at moments that the test chooses; a step costs 0.1 ms."""

    def __init__(self, world: World, budget: float = 0.5, step_s: float = 0.0001) -> None:
        self.node = world.d.node
        self.bus = Bus()
        recent = Recent()
        self.bus.subscribe(recent.take, wants=recent.wants)
        ticks = itertools.count(0.0, step_s)
        self.timer = lambda: next(ticks)
        context = Context(self.node, recent, NoEngines())
        self.server = ConsoleServer(context, self.bus.after, budget, self.timer)
        self.now_s = 100.0

    def look(self, *queries: Query | MapQuery, events: EventQuery | None = None) -> Frame:
        frame = ADMIN_REPLIES.decode(
            self.server.frame(Watch(Look(1, queries, events), self.now_s), self.now_s)
        )
        assert isinstance(frame, Frame)
        return frame

    def table(self, query: Query) -> Table:
        self.now_s += 1.0
        [answer] = self.look(query).answers
        return msgspec.msgpack.decode(answer, type=Table)


@pytest.fixture
def service() -> Service:
    return Service(World())


def test_the_first_answer_is_the_whole_window_with_its_columns(service):
    table = service.table(Query("clients"))

    assert (table.since, table.total, table.of) == (0, 1, 1)
    assert table.order == ("client:1",)
    assert [column.name for column in table.columns][:2] == ["name", "state"]
    assert [row.key for row in table.rows] == ["client:1"]


def test_what_did_not_change_is_not_sent_again(service):
    first = service.table(Query("clients"))
    again = service.table(Query("clients", have=first.revision))

    assert (again.since, again.revision) == (first.revision, first.revision)
    assert (again.order, again.rows, again.columns) == (None, (), ())
    assert again.at_s > first.at_s


def test_a_row_that_changed_is_sent_without_the_others(service):
    service.node.sessions.by_id[2] = type(service.node.sessions.by_id[1])(2, "other", 0.0)
    first = service.table(Query("clients"))
    service.node.sessions.by_id[2].pids.append(77)
    again = service.table(Query("clients", have=first.revision))

    assert again.revision > first.revision
    assert [row.key for row in again.rows] == ["client:2"]
    assert again.order is None


def test_a_revision_of_another_life_is_answered_with_everything(service):
    first = service.table(Query("clients"))

    assert service.table(Query("clients", have=first.revision + 100)).since == 0


def test_filters_and_sorting_are_done_here(service):
    for number, name in ((2, "bee"), (3, "ant")):
        service.node.sessions.by_id[number] = type(service.node.sessions.by_id[1])(
            number, name, 0.0
        )
    query = Query("clients", sort="-name", limit=1, filters=(Filter("calls", "over", 15),))
    table = service.table(query)

    assert (table.total, table.of) == (2, 3)
    assert [row.cells[0] for row in table.rows] == ["bee"]
    assert service.table(Query("clients", filters=(Filter("calls", "over", 25),))).total == 1
    assert service.table(Query("clients", filters=(Filter("", "has", "BEE"),))).total == 1


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (Query("nothing"), "no table 'nothing'"),
        (Query("clients", sort="-beauty"), "no column 'beauty'"),
        (Query("clients", filters=(Filter("beauty", "is", 1),)), "no column 'beauty'"),
    ],
)
def test_what_there_is_not_is_said(service, query, why):
    table = service.table(query)

    assert why in table.trouble
    assert table.revision == 0


def test_without_credit_the_last_look_is_answered_and_says_how_old_it_is():
    service = Service(World(), budget=0.01)
    first = service.table(Query("clients"))
    service.node.sessions.by_id[1].pids.append(99)
    service.server._credit_s = -1.0
    poor = service.table(Query("clients", have=first.revision))
    service.now_s += 200.0
    rich = service.table(Query("clients", have=first.revision))

    assert (poor.at_s, poor.rows) == (first.at_s, ())
    assert rich.at_s == service.now_s
    assert [row.key for row in rich.rows] == ["client:1"]


def many_sessions(service: Service) -> None:
    kind = type(service.node.sessions.by_id[1])
    for number in range(2, 20_000):
        service.node.sessions.by_id[number] = kind(number, f"engine-{number}", 0.0)


def test_a_large_table_is_looked_at_in_turns_that_the_credit_pays_for(service):
    many_sessions(service)
    query = Query("clients", sort="name")
    longest_s, n_frames = 0.0, 0
    frame = None
    while frame is None or not frame.revision:
        service.now_s += 0.05
        begun_s = service.timer()
        [answer] = service.look(query).answers
        longest_s = max(longest_s, service.timer() - begun_s)
        frame = msgspec.msgpack.decode(answer, type=Table)
        n_frames += 1

    assert frame.total == 19_999
    assert 2 < n_frames < 20
    assert longest_s < MAX_CREDIT_S + 0.002


def test_a_small_table_does_not_wait_for_a_large_one(service):
    many_sessions(service)
    tables = [
        msgspec.msgpack.decode(answer, type=Table)
        for answer in service.look(Query("clients", sort="name"), Query("pools")).answers
    ]

    assert "not looked at yet" in tables[0].trouble
    assert [one.key for one in tables[1].rows] == ["pool:kv"]


def test_a_look_that_nobody_waits_for_is_given_up(service):
    many_sessions(service)
    service.look(Query("clients", sort="name"))
    service.now_s += 0.05
    service.server.turn(service.now_s)
    assert service.server._looks
    service.now_s += 2.0
    service.server.turn(service.now_s)
    assert not service.server._looks


def test_of_too_many_feeds_the_one_asked_for_longest_ago_is_dropped(service):
    nan = Filter("leases", "over", float("nan"))
    first = service.table(Query("pools"))
    for number in range(2 * MAX_FEEDS):
        service.now_s += 0.01
        service.look(Query("clients", first=number), Query("clients", filters=(nan,)))
        if number % 10 == 0:
            assert service.table(Query("pools", have=first.revision)).since == first.revision

    assert len(service.server._feeds) <= MAX_FEEDS


def test_answers_to_revisions_that_were_never_sent_are_not_kept(service):
    feed_of = service.server._feeds
    query = Query("clients")
    service.table(query)
    for have in range(1000):
        service.look(Query("clients", have=have))

    assert len(feed_of[query]._answers) <= MAX_ANSWERS


def test_a_map_is_answered_beside_a_table_in_the_order_asked(service):
    frame = service.look(MapQuery("", "state"), Query("clients"))
    types = [type(msgspec.msgpack.decode(answer, type=Table | PageMap)) for answer in frame.answers]
    assert types == [PageMap, Table]


def test_events_are_those_after_a_number_and_the_newest_of_too_many():
    world = World()
    service = Service(world)
    service.bus.publish(world.d.events)
    last = world.d.events[-1].seq
    frame = service.look(events=EventQuery(0, limit=1))

    assert [one.seq for one in frame.events] == [last]
    assert frame.skipped == len(world.d.events) - 1
    assert frame.upto == last
    assert service.look(events=EventQuery(last)).events == ()


def test_what_failed_and_what_changed_the_node_is_told_when_it_has_left_the_ring():
    world = World()
    world.d.call(client.ReceiveRequest, tokens((1, 100)), room=7, source=("p",), deadline_s=1.0)
    world.pass_time(2)
    for _ in range(RING_EVENTS // 2):
        opened = world.d.call(client.OpenLease, tokens((5000, 32)))
        world.d.call(client.ReleaseLease, lease=opened.lease)
    service = Service(world)
    service.bus.publish(world.d.events)
    lost, ring = service.bus.after(0)

    told = service.look(events=EventQuery(0, about="room:7"))
    assert [event.after for event in told.events if isinstance(event, Moved)][-1] == "closed"
    assert told.events[-1].code == "deadline"
    assert (told.since_s, told.events[-1].seq < ring[0].seq) == (ring[0].at_s, True)
    began = service.look(events=EventQuery(0, kinds=("client-attached", "peer-up")))
    assert [type(event) for event in began.events] == [ClientAttached, PeerUp]
    assert told.lost == lost - len(service.server._scene.recent.between(0, ring[0].seq))
    assert service.look(events=EventQuery(ring[-2].seq)).since_s == 0.0


def test_of_a_room_that_is_over_it_is_told_how_it_ended_or_that_it_is_no_longer_kept():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(len(PROMPT) // 4)
    sender.finish()
    service = Service(world)
    service.bus.publish(world.d.events)
    recent, ring = service.server._scene.recent, service.bus.after(0)[1]

    def told(room: int, events: tuple[object, ...]) -> str:
        asked = Why(1, "room", room)
        none = AdminFailed(1, Refusal(Code.BAD_REQUEST, f"no open handoff in room {room}"))
        said = recalled(asked, none, service.node, recent, lambda: events, world.now_s + 60.0)
        return said.sentence if isinstance(said, Because) else said.refusal.message

    assert told(7, ring).startswith("receive:1 of room 7 from p was delivered 60.0 s ago, after ")
    assert told(8, ring) == "no open handoff in room 8"
    assert told(8, ring[1:]) == (
        "no open handoff in room 8; events of more than 60 s ago are no longer kept"
    )


def test_a_watch_is_answered_with_what_changed_since_its_last_frame(service):
    watch = Watch(Look(1, (Query("clients"),), EventQuery(0), frames=3), service.now_s)

    def table() -> Table:
        service.now_s += 1.0
        frame = ADMIN_REPLIES.decode(service.server.frame(watch, service.now_s))
        return msgspec.msgpack.decode(frame.answers[0], type=Table)

    first, second = table(), table()
    service.node.sessions.by_id[1].pids.append(77)
    third = table()

    assert (first.since, second.since, third.since) == (0, first.revision, first.revision)
    assert [len(one.rows) for one in (first, second, third)] == [1, 0, 1]
