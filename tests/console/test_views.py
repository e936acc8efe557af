"""What each view says of a node in a known situation."""

from __future__ import annotations

import pytest

from kvd.console.history import recalled
from kvd.console.server import VIEWS
from kvd.console.view import NoWindow
from kvd.core import inputs
from kvd.core.audit.audit import EVERY_S
from kvd.wire import admin, client
from kvd.wire.console import Filter, Holder, Query
from tests.console.looked import in_one
from tests.console.sentences import sentence_of
from tests.console.stage import Stage
from tests.core.engines import PROMPT, Sender, cached
from tests.core.families import SPECS
from tests.core.tiered import PAGE, TieredWorld, disk, fill
from tests.core.world import World, tokens


def cells(row, *names):
    return tuple(row[name] for name in names)


# ---- leases --------------------------------------------------------------------------------------


def test_a_lease_says_who_holds_and_locks_what():
    world = World()
    cached(world.d, tokens((1, 64)))
    lease = world.d.lease(tokens((1, 64), (9000, 40)), priority=3)
    row = Stage(world.d).row("leases", f"lease:{lease.lease}")

    assert cells(row, "state", "owner", "client", "pid", "reason") == (
        *("held", "engine", "client:1", 1001, "lease"),
    )
    assert cells(row, "held", "row", "quarantined", "locked", "prefix_tokens") == (3, 7, 0, 64, 64)
    assert cells(row, "prompt_tokens", "holders", "priority", "since") == (104, "engine", 3, 100.0)
    assert row["locked_node"] == "node:2"
    assert cells(row, "room", "waiting_for", "why", "away_since") == (None, "", "", None)


def test_a_lease_is_touched_when_it_is_opened_extended_or_committed():
    world = World()
    stage = Stage(world.d)
    lease = world.d.lease(tokens((1, 40))).lease
    world.pass_time(1)
    assert stage.row("leases", "lease:1")["touched"] == 100.0
    world.d.call(client.ExtendLease, lease=lease, n_tokens=64)
    assert stage.row("leases", "lease:1")["touched"] == 101.0
    world.pass_time(1)
    world.d.call(client.CommitLease, lease=lease)
    assert stage.row("leases", "lease:1")["touched"] == 102.0


def test_a_quarantined_lease_says_since_when_why_and_what_gives_it_back():
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    world.pass_time(1)
    world.d.call(client.CancelReceive, receive=1)
    row = Stage(world.d).row("leases", "lease:1")

    assert cells(row, "state", "held", "quarantined", "room") == ("quarantined", 0, 7, 7)
    assert row["away_since"] == 101.0
    assert row["why"] == sentence_of(
        "a quarantined lease says since when why and what gives it back 1"
    )
    assert row["waiting_for"] == sentence_of(
        "a quarantined lease says since when why and what gives it back 2"
    )


def test_pages_of_other_components_are_named():
    world = World(spec=SPECS["swa"])
    world.d.lease(tokens((1, 64)))

    assert Stage(world.d).row("leases", "lease:1")["beside"] == "swa 4"


# ---- rooms ---------------------------------------------------------------------------------------


def both_ends():
    """A handoff with posts under way, and what each side says of it."""
    world = World()
    world.hold_posts = True
    stages = Stage(world.p), Stage(world.d)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    return world, sender, *stages


def test_a_handoff_under_way_is_told_from_both_ends():
    world, _, p, d = both_ends()
    [(key, send)] = p.rows("rooms").items()
    assert key == "send:1"
    assert cells(send, "room", "side", "state", "peer", "owner", "client", "lease") == (
        *(7, "prefill", "streaming", "peer:d", "engine", "client:1", "lease:1"),
    )
    assert cells(send, "done_pages", "total_pages", "posts", "done_bytes") == (4, 7, 1, 0)
    assert cells(send, "path", "since", "until", "waiting_for") == (
        *("simulated", 100.0, 130.0, "the engine to compute"),
    )
    [(key, receive)] = d.rows("rooms").items()
    assert key == "receive:1"
    assert cells(receive, "side", "state", "peer", "lease") == (
        *("decode", "receiving", "peer:p", "lease:1"),
    )
    assert cells(receive, "done_pages", "posts", "total_pages") == (None, None, 7)
    assert receive["total_bytes"] == 7 * world.d.node.leases.page_bytes
    assert receive["waiting_for"] == sentence_of("a handoff under way is told from both ends")


def test_bytes_of_a_post_under_way_count():
    world, _, p, _ = both_ends()
    world.p.feed(moved(world, 300))

    assert p.row("rooms", "send:1")["done_bytes"] == 300


def moved(world, n_bytes):
    [post] = world.p.flights
    return inputs.PostMoved(world.now_s, post, n_bytes)


def test_a_handoff_that_was_delivered_is_there_for_a_minute_behind_what_failed():
    world, sender, p, d = both_ends()
    world.hold_posts = False
    world.land_posts()
    sender.finish()
    row = p.row("rooms", "send:1")
    assert cells(row, "state", "until", "ended", "waiting_for") == ("delivered", None, 100.0, "")
    assert row["done_bytes"] == row["total_bytes"] == 7 * world.p.node.leases.page_bytes
    assert d.row("rooms", "receive:1")["state"] == "delivered"
    world.d.call(client.ReceiveRequest, tokens((9000, 64)), room=8, source=("p",))
    world.d.call(client.CancelReceive, receive=2)
    assert [row["state"] for row in d.rows("rooms").values()] == ["failed", "delivered"]
    world.pass_time(60.0, 1.0)
    assert list(p.rows("rooms")) == ["send:2", "send:1"]
    world.pass_time(0.1)

    assert list(p.rows("rooms")) == ["send:2"]
    assert list(d.rows("rooms")) == ["receive:2"]


def test_the_last_two_hundred_failures_are_kept_however_long_ago_with_their_stories():
    world = World()
    stage = Stage(world.d)
    for room in range(1, 206):
        world.d.call(client.ReceiveRequest, tokens((9000, 64)), room=room, source=("p",))
        world.d.call(client.CancelReceive, receive=room)
    world.pass_time(600.0, 10.0)
    rows = stage.rows("rooms")
    assert [row["room"] for row in rows.values()] == list(range(205, 5, -1))

    asked = admin.Why(3, "room", 200)
    recent, now_s = stage.context.recent, world.now_s
    because = recalled(asked, world.d.ask(asked), world.d.node, recent, tuple, now_s)
    assert isinstance(because, admin.Because)
    assert because.sentence.startswith("receive:200 of room 200 from p failed 600.0 s ago, after ")
    assert because.marks[0].what == "asked for"
    assert "-> closed" in because.marks[-1].what


def test_one_row_can_be_asked_for_by_what_it_is_opened_with():
    _, _, p, _ = both_ends()
    assert list(p.rows("rooms", filters=(Filter("key", "is", "send:1"),))) == ["send:1"]
    assert p.rows("rooms", filters=(Filter("key", "is", "send:2"),)) == {}


def test_a_handoff_that_failed_says_why():
    world, sender, p, d = both_ends()
    world.hold_posts = False
    world.land_posts()
    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")

    assert cells(p.row("rooms", "send:1"), "state", "waiting_for") == (
        *("failed", "aborted: the prefill engine gave up: out of memory"),
    )
    assert d.row("rooms", "receive:1")["waiting_for"] == sentence_of(
        "a handoff that failed says why"
    )


def test_a_room_says_when_it_last_moved():
    world, _, p, _ = both_ends()
    p.rows("rooms")
    world.pass_time(1.5)
    assert p.row("rooms", "send:1")["moved"] == 100.0
    world.p.feed(moved(world, 300))
    world.pass_time(0.2)
    assert p.row("rooms", "send:1")["moved"] == 101.7
    world.pass_time(1)

    assert p.row("rooms", "send:1")["moved"] == 101.7


# ---- peers ---------------------------------------------------------------------------------------


def test_a_peer_says_how_it_is_and_what_went_with_it():
    world, sender, p, d = both_ends()
    world.pass_time(1)
    mine = p.row("peers", "peer:d")
    assert cells(mine, "state", "agent", "layout", "generation", "sends", "receives") == (
        *("up", "loaded", "same", 1, 1, 0),
    )
    assert mine["address"] == "dialed us"
    assert mine["heard"] == world.p.node.peers.by_name["d"].heard_s
    world.hold_posts = False
    world.land_posts()
    sender.finish()
    n_bytes = 7 * world.p.node.leases.page_bytes
    mine, theirs = p.row("peers", "peer:d"), d.row("peers", "peer:p")

    assert cells(mine, "sends", "out_bytes", "delivered", "failed") == (0, n_bytes, 1, 0)
    assert cells(theirs, "address", "in_bytes", "delivered") == ("tcp://p", n_bytes, 1)


def test_a_peer_that_never_answered_is_there_too():
    world = World()
    world.cut = {"p"}
    world.restart(world.d)
    row = Stage(world.d).row("peers", "peer:p")

    assert cells(row, "state", "address", "agent", "layout", "heard") == (
        *("silent", "tcp://p", "none", "unknown", None),
    )


# ---- clients -------------------------------------------------------------------------------------


def test_a_client_says_what_it_has_and_whether_it_lives():
    world, _, p, _ = both_ends()
    world.p.attach("idle")
    row = p.row("clients", "client:1")
    assert cells(row, "name", "state", "pids", "leases", "held", "sends", "receives", "calls") == (
        *("engine", "alive", "1001", 1, 7, 1, 0, 10),
    )
    p.shell.dead = {1001}

    assert p.row("clients", "client:1")["state"] == "gone"
    assert cells(p.row("clients", "client:2"), "state", "leases", "oldest") == ("alive", 0, None)


def test_a_client_that_is_gone_is_there_as_long_as_it_has_pages():
    world, _, _, d = both_ends()
    world.d.hang_up(1)
    row = d.row("clients", "client:1")
    assert cells(row, "name", "state", "pids", "leases", "held") == (
        *("session 1 (gone)", "gone", "", 1, 7),
    )
    world.hold_posts = False
    world.land_posts()

    assert d.rows("clients") == {}


# ---- waiting and pools ---------------------------------------------------------------------------


def full():
    """A pool of 9 pages: a lease has 7, a receive waits for 4, another lease behind it for 1."""
    world = World(d_pages=10)
    world.d.lease(tokens((1, 100)))
    world.pass_time(1)
    world.d.call(client.ReceiveRequest, tokens((5000, 64)), room=7, source=("p",))
    world.d.call(client.OpenLease, tokens((6000, 16)))
    return world, Stage(world.d)


def test_a_request_in_the_queue_says_what_is_missing_and_who_has_it():
    _, stage = full()
    rows = stage.rows("waiting")
    assert list(rows) == ["waiting:1", "waiting:2"]
    first, second = rows.values()

    assert cells(first, "place", "kind", "what", "client", "room", "budget") == (
        *(1, "receive", "receive:1", "client:1", 7, "kv"),
    )
    assert cells(first, "needed_pages", "missing_pages", "since", "until") == (4, 2, 101.0, 131.0)
    assert first["held_by"] == (Holder("engine 1001: 7 pages by 1 lease", 100.0, "lease:1"),)
    assert cells(second, "kind", "what", "ahead", "why", "held_by") == (
        *("lease", None, 1, "its turn: 1 before it", ()),
    )


def test_a_tier_says_what_came_from_it_and_how_long_who_waits_for_it():
    world = TieredWorld(d_pages=33, tier=disk(objects=200, moving=8))
    d = world.d
    stage = Stage(d)
    cached(d, tokens((1, 8 * PAGE)))
    fill(world, d)
    d.hold_storage, at_s = True, world.now_s
    assert d.call(client.OpenLease, tokens((1, 8 * PAGE)), deadline_s=20.0) is None
    world.pass_time(0.1)
    row = stage.row("tiers", "tier:disk")
    assert cells(row, "state", "waits", "waiting", "waiting_since") == ("serving", 1, 1, at_s)
    [waits] = stage.rows("waiting").values()
    assert cells(waits, "lacks", "why") == ("a tier", "8 pages to be read from tier disk")
    d.hold_storage = False
    world.run()
    row = stage.row("tiers", "tier:disk")
    assert cells(row, "read_tokens", "hits", "waiting", "waiting_since") == (8 * PAGE, 1, 0, None)


def test_an_eviction_says_whose_it_was_for_whom_it_went_and_whom_that_hurt():
    world = World(d_pages=17)
    d = world.d
    assert d.attach("other") == 2
    cached(d, tokens((1000, 8 * PAGE)))
    world.pass_time(1.0)
    again = d.lease(tokens((5000, 16 * PAGE)), session=2)
    d.call(client.ReleaseLease, lease=again.lease, session=2)
    world.pass_time(1.0)
    d.lease(tokens((1000, 8 * PAGE)))
    world.pass_time(1.0)
    [row] = Stage(d).rows("evicted").values()
    assert cells(row, "pages", "wrote", "needed_by", "missed_by") == (
        8,
        "engine",
        "other",
        "engine",
    )
    assert cells(row, "gone", "missed") == (101.0, 102.0)


def test_a_pull_is_a_handoff_of_both_its_ends():
    world = World()
    cached(world.p, PROMPT)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    p, d = Stage(world.p), Stage(world.d)
    assert cells(d.row("rooms", "receive:1"), "state", "peer") == ("receiving", "peer:p")
    assert cells(p.row("rooms", "send:1"), "state", "peer") == ("flushing", "peer:d")
    d.window("concerns")
    world.pass_time(2.1)
    [late] = [row for row in d.rows("concerns").values() if row["kind"] == "stuck-handoff"]
    assert "0 B of " in late["evidence"]
    assert "its source does not go on" in late["evidence"]


def test_a_pool_says_how_its_pages_are_and_who_has_most():
    _, stage = full()
    row = stage.row("pools", "pool:kv")

    assert cells(row, "state", "total", "free", "held", "cached", "quarantined", "headroom") == (
        *("short", 10, 2, 7, 0, 0, 2),
    )
    assert row["waiting"] == 1
    assert [one.ref for one in row["held_by"]] == ["lease:1"]


def test_a_page_that_nobody_has_is_not_hidden_by_adding_up():
    world = World()
    stage = Stage(world.d)
    assert stage.row("pools", "pool:kv")["state"] == "ok"
    world.d.node.leases.pool.take_pages(1)

    assert stage.row("pools", "pool:kv")["state"] == sentence_of(
        "a page that nobody has is not hidden by adding up"
    )


def test_every_component_with_pages_of_its_own_has_a_row():
    world = World(spec=SPECS["hisparse"])
    rows = Stage(world.d).rows("pools")

    assert list(rows) == ["pool:kv", "pool:buffer"]
    assert rows["pool:kv"]["companions"] == sentence_of(
        "every component with pages of its own has a row 1"
    )
    assert rows["pool:buffer"]["buffer"] == sentence_of(
        "every component with pages of its own has a row 2"
    )


# ---- the audit -----------------------------------------------------------------------------------


def test_the_audit_says_when_it_last_looked_and_what_that_took():
    world = World()
    stage = Stage(world.d)
    before = stage.row("audit", "audit:standing")
    assert cells(before, "state", "sweeps", "ended", "took_s", "objects") == (
        *("waiting", 0, None, None, None),
    )
    world.now_s += EVERY_S
    while not world.d.node.audit.sweeps:
        world.d.node.step(inputs.AuditTurn(world.now_s, 100))
        world.now_s += 0.5
    ended_s = world.now_s - 0.5
    world.now_s += 7.0
    after = stage.row("audit", "audit:standing")
    assert cells(after, "state", "findings", "sweeps", "ended") == ("ok", 0, 1, ended_s)
    assert after["pages"] == stage.row("pools", "pool:kv")["total"]


def test_the_audit_is_broken_while_a_rule_is():
    world = World()
    world.d.node.leases.pool.take_pages(1)
    world.d.node.step(inputs.FromOperator(world.now_s, b"op", admin.Audit(1)))
    row = Stage(world.d).row("audit", "audit:standing")
    assert cells(row, "state", "findings") == ("broken", 1)


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_every_column_can_be_sorted_and_filtered_by(name):
    _, stage = full()
    context = stage.now()
    for column in VIEWS[name].columns:
        for sort in (column.name, f"-{column.name}"):
            query = Query(name, sort=sort, filters=(Filter(column.name, "is-not", "?"),))
            found = in_one(VIEWS[name].look(context, query))
            assert not isinstance(found, NoWindow)
            assert len(found.rows) == found.total == found.of


def test_rows_without_a_value_come_last_in_either_direction():
    world = World()
    world.d.attach("idle")
    world.d.lease(tokens((1, 16)))
    stage = Stage(world.d)

    for sort in ("oldest", "-oldest"):
        assert [row.key for row in stage.window("clients", sort=sort).rows] == [
            *("client:1", "client:2"),
        ]


def test_an_idle_node_says_the_same_later():
    world, _, p, _ = both_ends()
    world.hold_posts = False
    world.land_posts()
    before = {name: p.window(name) for name in VIEWS if name != "peers"}
    world.pass_time(1)

    assert {name: p.window(name) for name in before} == before


def test_what_is_gone_before_its_row_is_made_is_left_out():
    world = World()
    d = Stage(world.d)
    leases = [world.d.lease(tokens((first, 32))) for first in (0, 1000, 2000)]
    steps = VIEWS["leases"].look(d.now(), Query("leases", sort="-id"))
    next(steps)
    world.d.call(client.ReleaseLease, lease=leases[1].lease)

    assert [row.key for row in in_one(steps).rows] == [
        f"lease:{leases[2].lease}",
        f"lease:{leases[0].lease}",
    ]


def test_a_node_that_is_evicted_before_its_row_is_made_is_left_out():
    world = World()
    cached(world.d, tokens((1, 64)))
    root = world.d.node.leases.tree.roots[""]
    [child] = root.children.values()
    context = Stage(world.d).now()
    steps = VIEWS["tree"].look(context, Query("tree", opened=(root.id,), sort="name"))
    for _ in range(4):
        next(steps)  # the last of these has ranked them
    world.d.node.leases.evictor.flush()
    found = in_one(steps)

    assert found.of == 2
    assert f"node:{child.id}" not in [row.key for row in found.rows]
