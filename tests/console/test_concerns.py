"""What an operator is told to look at: each kind where it is so, and none where all is well."""

from __future__ import annotations

import msgspec
import pytest

from kvd.console.concerns import Worry, concerns, worry
from kvd.core import inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.layout.quota import Quota
from kvd.errors import Code, Refusal
from kvd.types import amount
from kvd.wire import admin, client
from kvd.wire.peer import Closed
from kvd.wire.snapshot import RecorderState
from tests.console.sentences import sentence_of
from tests.console.stage import Stage
from tests.core import tiered
from tests.core.engines import PROMPT, Sender, cached
from tests.core.side import spec
from tests.core.world import World, tokens


def kinds(stage: Stage) -> list[tuple[str, str, str]]:
    return [(one.severity, one.kind, one.subject) for one in concerns(stage.now())]


def only(stage: Stage):
    [found] = concerns(stage.now())
    return found


def after(stage: Stage, seconds: float, tick_s: float = 0.1) -> list[tuple[str, str, str]]:
    """What there is when a console has looked all the time."""
    for _ in range(round(seconds / tick_s)):
        stage.side.world.pass_time(tick_s, tick_s)
        found = kinds(stage)
    return found


# ---- a good one ----------------------------------------------------------------------------------


def test_a_busy_world_in_which_everything_moves_has_none():
    """Handoffs that compute, send and end; leases that come, commit and go; a cache that fills."""
    world = World(p_pages=128, d_pages=128)
    stages = Stage(world.p), Stage(world.d)
    for turn in range(40):
        room, prompt = 100 + turn, tokens((1000 * turn, 100))
        sender = Sender(world, prompt, room)
        world.d.call(client.ReceiveRequest, prompt, room=room, source=("p",))
        world.hold_posts = True
        for upto in (32, 64):
            sender.advance(upto)
            world.pass_time(0.2)
            world.land_posts()
        world.hold_posts = False
        world.land_posts()
        sender.finish()
        received = world.d.take()[-1]
        assert isinstance(received, client.Received)
        world.pass_time(0.2)
        assert [kinds(stage) for stage in stages] == [[], []]
        world.d.call(client.CommitAndRelease, lease=received.lease)
        world.p.call(client.CommitAndRelease, lease=sender.lease.lease)
    assert [worry(stage.now()) for stage in stages] == [Worry(), Worry()]


# ---- who holds what ------------------------------------------------------------------------------


def test_a_page_that_nobody_has_is_found_by_the_audit_and_told():
    world = World()
    stage = Stage(world.d)
    world.d.node.leases.pool.take_pages(1)
    world.now_s += EVERY_S
    while not world.d.node.audit.sweeps:
        world.d.node.step(inputs.AuditTurn(world.now_s, 100))
    found = only(stage)

    assert (found.severity, found.kind, found.subject) == ("high", "violation", "pool:kv")
    assert found.evidence.startswith("I1: page ")
    assert found.rule == sentence_of("a page that nobody has is found by the audit and told")
    assert (found.since_s, found.action) == (world.now_s, "audit")
    assert worry(stage.now()) == Worry(1, "high")


def test_two_violations_of_one_lease_are_two_rows():
    world = World()
    stage = Stage(world.d)
    lease = world.d.lease(tokens((1, 40))).lease
    held = world.d.node.leases.leases[lease]
    held.session, held.reads = 77, 1
    world.now_s += EVERY_S
    while not world.d.node.audit.sweeps:
        world.d.node.step(inputs.AuditTurn(world.now_s, 100))
    found = concerns(stage.now())

    assert {one.subject for one in found} == {"lease:1"}
    assert len({one.key for one in found}) == len(found) > 1
    assert found[0].action == "open lease:1"


def test_a_lease_that_its_living_engine_does_not_touch_is_old():
    world = World()
    stage = Stage(world.d)
    cached(world.d, tokens((1, 32)))
    world.d.lease(tokens((1, 40)))
    assert after(stage, 60, 0.4) == []
    assert after(stage, 0.4, 0.4) == [("low", "old-lease", "lease:2")]
    found = only(stage)

    assert found.evidence == sentence_of("a lease that its living engine does not touch is old")
    assert (found.since_s, found.action) == (100.0, "open lease:2")
    world.d.call(client.CommitLease, tokens((5000, 1)), lease=2)
    world.d.call(client.ExtendLease, lease=2, n_tokens=64)
    assert kinds(stage) == []


def test_the_old_leases_of_one_engine_are_one_concern():
    world = World()
    stage = Stage(world.d)
    for first in (1, 1001, 2001):
        world.d.lease(tokens((first, 40)))

    assert after(stage, 60.4, 0.4) == [("low", "old-lease", "client:1")]
    assert "3 leases with 9 pages" in only(stage).evidence


def test_an_arena_is_not_old_however_long_it_is_held():
    world = World()
    stage = Stage(world.d)
    world.d.call(client.OpenArena, n_pages=3)

    assert after(stage, 700.0, 0.4) == []


def kept_room(**how: float):
    """A prompt that is computed, and kept for whoever wants it."""
    world = World(max_deadline_s=90.0)
    lease = world.p.lease(PROMPT)
    sending = world.p.call(client.SendRequest, PROMPT, room=9, lease=lease.lease, **how)
    world.p.call(client.Advance, send=sending.send, upto_tokens=100)
    world.p.call(client.Finish, send=sending.send, aux=b"")
    return world, Stage(world.p)


def test_a_room_that_is_kept_on_purpose_alarms_nobody_and_says_who_had_it_and_until_when():
    world, stage = kept_room(ttl_s=70.0, takers=3)
    assert [after(stage, 1.0) for _ in range(69)] == [[]] * 69  # stuck, late and old meanwhile
    row = stage.row("rooms", "send:1")
    assert (row["state"], row["moved"]) == ("kept 0 of 3", None)
    assert row["until"] - world.now_s == pytest.approx(1.0)


def test_a_room_that_is_kept_does_not_stand_before_what_is_stuck():
    world, stage = kept_room(ttl_s=60.0)
    Sender(world, tokens((5000, 100)), 10)
    assert [row["room"] for row in stage.rows("rooms").values()] == [10, 9]
    assert stage.row("rooms", "send:1")["state"] == "kept 0 of any"


def test_a_lease_that_is_sent_or_not_cached_is_not_old():
    world = World()
    stage = Stage(world.p)
    world.p.lease(tokens((1, 40)), cache=False)
    world.now_s += 61
    stage.now()

    assert [one for one in kinds(stage) if one[1] == "old-lease"] == []


def test_a_request_that_waits_for_pages_names_the_budget_and_who_has_them():
    world = World(d_pages=10)
    stage = Stage(world.d)
    world.d.lease(tokens((1, 100)))
    world.d.call(client.ReceiveRequest, tokens((5000, 64)), room=7, source=("p",))
    world.d.call(client.OpenLease, tokens((6000, 16)))
    assert after(stage, 1) == []
    assert after(stage, 0.2) == [("medium", "pool-short", "pool:kv")]
    found = only(stage)

    assert found.evidence == sentence_of(
        "a request that waits for pages names the budget and who has them"
    )
    assert found.action == "open lease:1"


def test_a_request_that_gives_up_soon_is_grave():
    world = World(d_pages=10)
    stage = Stage(world.d)
    world.d.lease(tokens((1, 100)))
    world.d.call(client.OpenLease, tokens((5000, 64)), deadline_s=2.0)

    assert after(stage, 1.7) == [("high", "pool-short", "pool:kv")]


def test_requests_that_wait_for_the_same_are_one_concern():
    world = World(d_pages=10)
    stage = Stage(world.d)
    world.d.lease(tokens((1, 100)))
    world.cut = {"p"}
    world.pass_time(3)
    for room in (7, 8):
        world.d.call(client.ReceiveRequest, tokens((5000, 16)), room=room, source=("p",))
    found = [one for one in after(stage, 1.1) if one[1] == "waiting"]

    assert found == [("medium", "waiting", "receive:1")]
    [said] = [one.evidence for one in concerns(stage.now()) if one.kind == "waiting"]
    assert said.startswith("receive of engine for room 7 p has been silent for ")
    assert said.endswith(", and 1 more")


def quarantine():
    """A receive was cancelled under a post: its pages wait for the writer."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)
    return world, Stage(world.d)


def test_a_quarantine_is_told_first_as_a_wait_and_then_as_a_fence():
    world, stage = quarantine()
    assert after(stage, 2) == []
    assert after(stage, 0.1) == [("low", "quarantine", "lease:1")]
    found = only(stage)
    assert found.evidence == sentence_of("a quarantine is told first as a wait and then as a fence")
    assert (found.since_s, found.action) == (100.0, "open lease:1")
    world.hold_shells = True
    assert after(stage, 3) == [("medium", "quarantine", "lease:1")]
    assert only(stage).action == "fence"
    world.hold_shells = False
    world.land_posts()

    assert kinds(stage) == []


def test_a_dead_engine_leaves_a_quarantine_behind_it_that_is_told():
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    stage = Stage(world.d)
    world.d.hang_up(1)

    assert after(stage, 2.1) == [("low", "quarantine", "lease:1")]
    assert "the last process of engine (pid 1001) is gone" in only(stage).evidence


def test_a_session_kept_open_by_another_process_is_told_with_what_it_holds():
    world = World()
    stage = Stage(world.d)
    unseen = inputs.Heir(pid=0, of_pid=1001)
    world.d.feed(inputs.ProcessesNow(world.now_s, 1, (1001,), (unseen,)))
    assert kinds(stage) == []
    world.d.lease(tokens((1, 40)))
    found = only(stage)
    assert (found.severity, found.kind, found.subject) == ("medium", "client-gone", "client:1")
    assert found.evidence == sentence_of(
        "a session kept open by another process is told with what it holds 1"
    )
    heir = inputs.Heir(pid=1002, of_pid=1001)
    world.d.feed(inputs.ProcessesNow(world.now_s, 1, (1002,), (heir,)))
    world.pass_time(1)
    found = only(stage)

    assert (found.severity, found.since_s) == ("medium", 100.0)
    assert found.action == sentence_of(
        "a session kept open by another process is told with what it holds 2"
    )


def test_a_lease_that_is_released_and_still_read_lingers():
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    stage = Stage(world.p)
    found = [one for one in after(stage, 2.2) if one[1] == "lingering"]

    assert found == [("low", "lingering", "lease:1")]


def test_a_full_pool_names_the_owner_who_has_most_of_it_dead_or_alive():
    """Not the one with the largest lease."""
    world = World(d_pages=14)
    stage = Stage(world.d)
    world.d.lease(tokens((1, 80)))
    other = world.d.attach("many")
    for first in (5000, 6000, 7000, 8000):
        world.d.lease(tokens((first, 32)), session=other)
    found = only(stage)

    assert (found.severity, found.kind, found.subject) == ("medium", "pool-short", "pool:kv")
    assert found.evidence == sentence_of("a full pool names the owner who has most of it")
    assert found.action == f"open client:{other}"
    stage.shell.dead = {1002}
    world.pass_time(2.1)
    found = [one for one in concerns(stage.now()) if one.kind == "pool-short"]
    assert "many 1002: 8 pages by 4 leases (gone)" in found[0].evidence


def test_a_pool_is_called_short_wherever_it_is_among_the_findings():
    """Also one that has pages left, of which nobody waits for more."""
    world = World(d_pages=41)
    stage = Stage(world.d)
    words = {}
    for number, pages in enumerate((36, 1, 1, 1, 1)):
        world.d.lease(tokens((5000 + 1000 * number, 16 * pages)))
        is_found = "pool-short" in {found.kind for found in concerns(stage.now())}
        row = stage.row("pools", "pool:kv")
        words[row["headroom"]] = (row["state"], is_found)

    found, missed = ("short", True), ("ok", False)
    assert words == {4: missed, 3: missed, 2: found, 1: found, 0: ("full", True)}


def test_requests_that_wait_one_after_the_other_are_told_though_none_waits_for_long():
    world = World(d_pages=20)
    stage = Stage(world.d)
    world.d.lease(tokens((1, 250)))
    for turn in range(6):
        world.d.call(client.OpenLease, tokens((5000 + turn, 64)), deadline_s=0.5)
        found = after(stage, 0.4)
    assert ("high", "pool-short", "pool:kv") in found


# ---- what should move ----------------------------------------------------------------------------


def streaming(**how: object):
    """A handoff of which 64 of 100 tokens are computed; posts stay under way."""
    world = World(**how)
    world.hold_posts = True
    stages = Stage(world.p), Stage(world.d)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    return world, sender, *stages


def test_bytes_that_stop_are_grave_where_they_are_sent_and_suspected_where_they_should_come():
    world, sender, p, d = streaming()
    sender.advance(64)
    assert after(p, 2) == []
    assert after(p, 0.1) == [("high", "stuck-handoff", "send:1")]
    found = only(p)
    assert found.evidence == (
        f"room 7 to d: 1 post under way, 0 B of {amount(7 * world.p.node.leases.page_bytes)}, "
        "and nothing since: bytes have stopped"
    )
    assert (found.since_s, found.action) == (100.0, "open peer:d")
    assert kinds(d) == [("low", "stuck-handoff", "receive:1")]
    assert after(d, 3) == [("medium", "stuck-handoff", "receive:1")]


def test_a_console_that_comes_late_sees_at_once_that_bytes_have_stopped():
    world, sender, p, _ = streaming()
    sender.advance(64)
    world.pass_time(2.1)

    assert kinds(p) == [("high", "stuck-handoff", "send:1")]


def test_bytes_that_move_again_are_no_concern():
    world, sender, p, _ = streaming()
    sender.advance(64)
    after(p, 2.1)
    [post] = world.p.flights
    world.p.feed(inputs.PostMoved(world.now_s, post, 100))

    assert after(p, 1) == []


def test_an_engine_that_does_not_compute_is_named():
    world, sender, p, _ = streaming()
    world.hold_posts = False
    sender.advance(32)
    world.land_posts()
    assert after(p, 2.2) == [("low", "stuck-handoff", "send:1")]
    found = only(p)
    assert found.evidence == sentence_of("an engine that does not compute is named")
    assert found.action == "open client:1"
    assert after(p, 3)[0][0] == "medium"
    sender.advance(64)

    assert after(p, 0.3) == []


def test_pages_that_are_offered_to_nobody_are_told_on_both_sides():
    world = World()
    p, d = Stage(world.p), Stage(world.d)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.pass_time(2.1)

    assert only(p).evidence == sentence_of(
        "pages that are offered to nobody are told on both sides 1"
    )
    assert only(d).evidence == sentence_of(
        "pages that are offered to nobody are told on both sides 2"
    )


def test_a_send_that_nobody_receives_is_told():
    world = World()
    Sender(world)
    world.pass_time(2.1)

    assert only(Stage(world.p)).evidence == sentence_of("a send that nobody receives is told")


def test_a_receiver_that_does_not_end_it_is_told():
    world, sender, p, _ = streaming()
    world.hold_posts = False
    world.lost = {Closed}
    sender.finish()

    assert after(p, 2.2) == [("medium", "stuck-handoff", "send:1")]
    assert only(p).evidence == sentence_of("a receiver that does not end it is told")


def test_a_handoff_in_the_last_fifth_of_its_time_is_late():
    world = World()
    stage = Stage(world.d)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=2.0)
    for upto in (32, 64):
        assert after(stage, 0.7) == []
        sender.advance(upto)
    assert after(stage, 0.3) == [("medium", "late-handoff", "receive:1")]

    assert only(stage).since_s == pytest.approx(101.6)


def test_a_peer_that_falls_silent_is_told_before_and_after_it_is_given_up():
    world, sender, p, _ = streaming()
    sender.advance(64)
    world.pass_time(0.5)
    world.cut = {"d"}
    heard_s = world.p.node.peers.by_name["d"].heard_s
    assert after(p, 1.4) == [("medium", "peer-silent", "peer:d")]
    assert only(p).since_s == heard_s
    assert ("high", "stuck-handoff", "send:1") in after(p, 0.5)
    assert ("high", "peer-lost", "peer:d") in after(p, 1.5)
    assert concerns(p.now())[0].evidence.endswith("; 1 handoff with it under way")
    world.cut = set()
    world.land_posts()

    assert after(p, 2) == []


def test_a_peer_that_never_answered_is_told_with_why():
    world = World()
    world.cut = {"p"}
    world.restart(world.d)
    stage = Stage(world.d)
    assert after(stage, 2.0) == [("medium", "peer-silent", "peer:p")]
    world.d.feed(inputs.HandshakeFailed(world.now_s, "out:p", "tcp://p", "keys", "wrong key", 1))
    found = only(stage)

    assert (found.kind, found.since_s) == ("peer-refused", world.now_s)
    assert found.evidence == sentence_of("a peer that never answered is told with why")


def test_a_peer_with_other_pages_is_told_with_the_difference():
    world = World()
    world.p.config = msgspec.structs.replace(world.p.config, spec=spec(64, dtype="bfloat16"))
    world.restart(world.p)
    world.pass_time(1)
    found = only(Stage(world.d))

    assert (found.severity, found.kind, found.subject) == ("medium", "peer-refused", "peer:p")
    assert "ours float32, theirs bfloat16" in found.evidence


def test_a_sending_agent_that_cannot_be_made_is_told():
    world = World()
    world.d.fails_loading = 1
    world.restart(world.p)
    world.pass_time(1)
    found = only(Stage(world.d))

    assert (found.severity, found.kind, found.evidence) == (
        *("high", "peer-refused", "no sending agent: no route"),
    )


def test_a_way_that_is_emulated_is_told_with_what_to_do():
    world = World()
    stage = Stage(world.p)
    peer = world.p.node.peers.by_name["d"]
    world.p.feed(
        inputs.PathFound(
            at_s=world.now_s,
            incarnation=peer.incarnation,
            generation=peer.generation,
            source=inputs.PathSide.DEVICE,
            destination=inputs.PathSide.HOST,
            path=inputs.WritePath.EMULATED,
            bytes_s=9e8,
        )
    )
    found = only(stage)

    assert (found.severity, found.kind, found.subject) == ("medium", "slow-path", "peer:d")
    assert found.evidence.startswith("device to host: emulated, 0.9 GB/s: UCX has no way of its")
    assert found.action.startswith("keep the pool in host memory")


# ---- the daemon itself ---------------------------------------------------------------------------


def test_a_transfer_process_that_is_gone_is_told():
    world = World()
    stage = Stage(world.d)
    world.d.stop_transfer("killed")
    assert kinds(stage) == [("high", "transfer-down", "")]
    world.d.start_transfer()
    world.run()

    assert kinds(stage) == []


def test_a_node_that_drains_is_told_until_it_serves_again():
    world = World()
    stage = Stage(world.d)
    world.d.ask(admin.Drain(1, "root", "new switch"))
    found = only(stage)
    assert (found.severity, found.kind, found.since_s, found.action, found.evidence) == (
        "low",
        "draining",
        world.now_s,
        "undrain",
        "d has been drained for 0.0 s by root (new switch): 0 receives and 0 sends under way",
    )

    world.d.ask(admin.Undrain(1))

    assert kinds(stage) == []


def test_messages_refused_again_and_again_are_told_and_a_few_are_not():
    world = World()
    stage = Stage(world.d)
    bad = Refusal(Code.BAD_REQUEST, "no message")
    for _ in range(9):
        world.d.feed(inputs.Unreadable(world.now_s, "client", "ab12", bad))
    assert kinds(stage) == []
    world.d.feed(inputs.Unreadable(world.now_s, "client", "ab12", bad))
    assert only(stage).evidence == sentence_of(
        "messages refused again and again are told and a few are not"
    )
    world.pass_time(10.2)

    assert kinds(stage) == []


def test_a_recorder_that_has_ended_is_told():
    world = World()
    stage = Stage(world.d)
    world.d.feed(inputs.RecorderSaid(world.now_s, RecorderState("ended", why="the disk is full")))
    world.pass_time(1)
    found = only(stage)

    assert (found.severity, found.kind, found.since_s) == ("low", "recorder-ended", 100.0)
    assert found.evidence == sentence_of("a recorder that has ended is told")


def test_a_floor_that_was_broken_is_told_for_a_minute():
    world = World(d_pages=17, quotas=(Quota("a", 6),))
    stage = Stage(world.d)
    for first in (1, 1000, 2000):
        tiered.cached(world.d, tokens((first, 32)), "a")
    lease = world.d.lease(tokens((90_000, 12 * 16)))
    world.d.call(client.ReleaseLease, lease=lease.lease)
    found = next(one for one in concerns(stage.now()) if one.kind == "floor-broken")

    assert (found.severity, found.subject) == ("low", "pool:kv")
    assert found.evidence == (
        "a has 4 pages in the pool, its floor is 6; 2 of it went since the daemon began"
    )
    world.pass_time(61)
    assert "floor-broken" not in [kind for _, kind, _ in kinds(stage)]


def test_engines_that_evict_what_is_asked_for_again_are_told_until_it_is_over():
    world = World(d_pages=17)
    stage = Stage(world.d)
    for _ in range(4):
        for first in (1000, 2000):
            tiered.cached(world.d, tokens((first, 16 * 16)))
            world.pass_time(1)
    found = next(one for one in concerns(stage.now()) if one.kind == "cache-thrashing")

    assert (found.severity, found.subject) == ("medium", "pool:kv")
    assert found.evidence.startswith("engine asks for what left for its own pages, ")
    assert "the pool is smaller than what engine work with" in found.evidence
    world.pass_time(70, tick_s=10)
    assert "cache-thrashing" not in [kind for _, kind, _ in kinds(stage)]


def test_a_disk_that_pushes_out_what_is_asked_for_again_is_told_with_both_sides():
    world = tiered.TieredWorld(d_pages=17, tier=tiered.disk(objects=24, moving=8))
    stage = Stage(world.d)
    for first in range(1000, 4000, 1000):
        tiered.cached(world.d, tokens((1, 64)), "chat")
        tiered.cached(world.d, tokens((500, 64)), "chat")
        for number in range(first, first + 14):
            tiered.cached(world.d, tokens((100 * number, 64)), "batch")
            world.pass_time(0.1)
    tiered.cached(world.d, tokens((1, 64)), "chat")
    found = next(one for one in concerns(stage.now()) if one.apart == "tier:disk")

    assert (found.kind, found.severity, found.subject) == ("cache-thrashing", "medium", "pool:kv")
    assert found.evidence.startswith(
        "tier disk: writes of batch push out what chat asks for again: 5 requests missed"
    )


@pytest.mark.parametrize(("lag_s", "severity"), [(0.1, "low"), (0.5, "medium")])
def test_a_loop_that_is_late_is_told(lag_s, severity):
    stage = Stage(World().d)
    stage.context.lag_s = 0.09
    assert kinds(stage) == []
    stage.context.lag_s = lag_s

    assert kinds(stage) == [(severity, "loop-lag", "")]


# ---- all of them ---------------------------------------------------------------------------------


def test_the_gravest_come_first_and_of_those_what_hurts_most():
    world, sender, p, _ = streaming()
    sender.advance(64)
    p.context.lag_s = 0.2
    after(p, 2.1)
    world.p.stop_transfer("killed")
    found = kinds(p)

    assert [one[0] for one in found] == sorted(
        (one[0] for one in found), key=["high", "medium", "low"].index
    )
    assert worry(p.now()) == Worry(len(found), "high")


def test_what_is_seen_again_later_is_not_as_old_as_before():
    stage = Stage(World().d)
    stage.context.lag_s = 0.2
    assert only(stage).since_s == 100.0
    stage.context.lag_s = 0.0
    kinds(stage)
    stage.side.world.pass_time(1)
    stage.context.lag_s = 0.2

    assert only(stage).since_s == 101.0


def test_concerns_are_a_view_with_rows_that_stay_as_they_are():
    _, stage = quarantine()
    stage.side.world.pass_time(2.5)
    before = stage.window("concerns")
    stage.side.world.pass_time(1)

    assert [row.key for row in before.rows] == ["concern:quarantine:lease:1"]
    assert stage.window("concerns") == before
