"""What a hostile peer may make us keep or read is bounded, and said."""

from __future__ import annotations

import time

import pytest

from kvd.core import effects, inputs
from kvd.core.layout.spec import MAX_DIFFERENCE_CHARS, fingerprint, layout_difference
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import (
    Abort,
    Closed,
    Grant,
    Hello,
    Message,
    Offer,
    Ping,
    ReceiveOutcome,
    Reject,
    Settled,
)
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.side import incarnation
from tests.core.world import World, spec


def abort(world: World, handoff: int) -> list[effects.Effect]:
    """What the prefill side does about an Abort of a handoff that it has not met."""
    message = Abort(world.d.incarnation, world.p.incarnation, handoff, 7, "why")
    return world.p.feed(inputs.FromPeer(world.now_s, "in:d", message))


def test_handoffs_beyond_the_limit_are_rejected_without_a_record(monkeypatch):
    monkeypatch.setattr("kvd.core.handoff.settled.MAX_OPEN", 3)
    world = World()
    world.lost = {Closed, Settled}
    for handoff in (1, 2, 3):
        abort(world, handoff)
    settled_sends = world.p.node.prefiller.settled_sends
    assert settled_sends.n_records == 3

    (sent,) = abort(world, 4)

    assert isinstance(sent, effects.SendToPeer)
    assert isinstance(sent.message, Reject)
    assert sent.message.refusal.code is Code.NO_ROOM
    assert sent.message.refusal.message == sentence_of(
        "handoffs beyond the limit are rejected without a record"
    )
    assert settled_sends.n_records == 3
    world.lost = set()
    world.pass_time(3)
    (sent,) = abort(world, 10)
    assert isinstance(sent, effects.SendToPeer)
    assert isinstance(sent.message, Settled)


def test_tombstones_are_bounded_too(monkeypatch):
    monkeypatch.setattr("kvd.core.handoff.settled.MAX_RECORDS", 3)
    world = World()
    for handoff in (1, 2, 3):
        abort(world, handoff)
        world.inject(
            world.p,
            Closed(world.d.incarnation, world.p.incarnation, handoff, ReceiveOutcome.ABORTED),
        )
    (sent,) = abort(world, 4)
    assert isinstance(sent, effects.SendToPeer)
    assert isinstance(sent.message, Reject)


def waiting_offer(world: World, handoff: int, room: int, n_pages: int) -> Message:
    """What the prefill side says to an Offer for which no engine has come."""
    pages = b"".join(page.to_bytes(4, "little") for page in range(1, n_pages + 1))
    grant = Grant("kv", 0, 16 * n_pages, pages)
    offer = Offer(
        world.d.incarnation, world.p.incarnation, handoff, room, 1, 16 * n_pages, 0, b"x" * 16,
        (grant,), 30.0,
    )  # fmt: skip
    sent = world.p.feed(inputs.FromPeer(world.now_s, "in:d", offer))
    return sent[0].message if sent else None  # type: ignore[union-attr,return-value]


def test_the_page_ids_that_are_kept_of_a_peer_are_bounded(monkeypatch):
    """An Offer waits with its pages until its deadline: their number says nothing of their size."""
    monkeypatch.setattr("kvd.core.handoff.settled.MIN_KEPT_BYTES", 1000)
    world = World(max_prompt_tokens=60 * 16)
    settled_sends = world.p.node.prefiller.settled_sends
    assert settled_sends.max_kept_bytes == 4 * 4 * 60 * 16
    settled_sends.max_kept_bytes = 500
    for handoff in (1, 2):
        assert waiting_offer(world, handoff, handoff, 60) is None
    records = settled_sends.records[world.d.incarnation]
    assert records.kept_bytes == 480

    refused = waiting_offer(world, 3, 3, 6)

    assert isinstance(refused, Reject)
    assert refused.refusal.code is Code.NO_ROOM
    assert refused.refusal.message == sentence_of(
        "the page ids that are kept of a peer are bounded"
    )
    assert records.kept_bytes == 480
    world.lost = {Settled}
    world.inject(world.p, Abort(world.d.incarnation, world.p.incarnation, 1, 1, "why"), world.d)
    closed = Closed(world.d.incarnation, world.p.incarnation, 1, ReceiveOutcome.ABORTED)
    world.inject(world.p, closed, world.d)
    assert records.kept_bytes == 240
    assert waiting_offer(world, 3, 3, 6) is None


def test_what_is_kept_of_a_peer_is_at_most_four_of_the_longest_prompts():
    """By default 16 MiB for each component that travels; or 1 MiB, where prompts are short."""
    assert World().p.node.prefiller.settled_sends.max_kept_bytes == 16 * 2**20
    assert World(max_prompt_tokens=1).p.node.prefiller.settled_sends.max_kept_bytes == 2**20


def test_an_aux_that_is_too_long_fails_the_handoff_and_frees_the_pages():
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.hold_wire = True
    long = Settled(
        world.p.incarnation,
        world.d.incarnation,
        1,
        ReceiveOutcome.DELIVERED,
        aux=b"x" * 65_537,
    )

    world.inject(world.d, long)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.TOO_LARGE
    assert failed.refusal.message == sentence_of(
        "an aux that is too long fails the handoff and frees the pages"
    )
    assert totals(world.d) == PageTotals(free=63)
    (closed,) = [one.message for one in world.held(Closed)]
    assert isinstance(closed, Closed)
    assert closed.outcome is ReceiveOutcome.FAILED


def test_a_layout_that_is_too_long_is_refused_unread():
    world = World()
    world.hold_wire = True
    hello = Hello(incarnation("x", 1), "", "x", "[" * 65_537, 1, b"", 1, 1)
    world.p.node.step(inputs.FromPeer(world.now_s, "in:d", hello))
    assert list(world.p.node.peers.by_name) == ["d"]
    assert world.p.node.refused == 1


@pytest.mark.parametrize(
    "layout",
    [
        "[" * 500 + ",".join("0" * 30_000) + "]" * 500,
        '{"' + "k" * 30_000 + '":[' + ",".join("0" * 15_000) + "]}",
        '["' + "v" * 60_000 + '"]',
        "{" + ",".join(f'"{key}":0' for key in range(7000)) + "}",
    ],
)
def test_a_hostile_layout_costs_little_and_is_told_in_few_words(layout):
    began_s = time.process_time()
    difference = layout_difference(spec(64), layout)
    assert time.process_time() - began_s < 0.5
    assert difference is not None
    assert len(difference) <= MAX_DIFFERENCE_CHARS
    assert layout_difference(spec(64), fingerprint(spec(64))) is None


def test_settled_that_quotes_the_longest_abort_can_be_read():
    """Otherwise who aborted never hears that the writer is over."""
    world = World()
    message = Abort(world.d.incarnation, world.p.incarnation, 1, 7, "x" * 4096)

    (sent,) = world.p.feed(inputs.FromPeer(world.now_s, "in:d", message))

    assert isinstance(sent, effects.SendToPeer)
    assert isinstance(sent.message, Settled)
    assert PEER_MESSAGES.decode(PEER_MESSAGES.encode(sent.message)) == sent.message


def test_outcomes_are_bounded_for_a_writer_that_never_says_that_it_has_heard(monkeypatch):
    """What was closed first is forgotten first: it is unknown then, which is an answer too."""
    monkeypatch.setattr("kvd.core.handoff.outcomes.MAX_KEPT", 3)
    world = World()
    world.lost = {Ping}
    for room in range(1, 6):
        Sender(world, room=room).finish()
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    kept = world.d.node.decoder.outcomes.kept[world.p.incarnation]
    assert list(kept) == [3, 4, 5]
    world.hold_wire = True

    world.inject(
        world.d, Settled(world.p.incarnation, world.d.incarnation, 1, ReceiveOutcome.DELIVERED)
    )

    (closed,) = [one.message for one in world.held(Closed)]
    assert isinstance(closed, Closed)
    assert closed.reason is not None
    assert closed.reason.code is Code.UNKNOWN_OUTCOME


def test_a_ping_folds_the_outcomes_below_its_floor_and_no_other():
    world = World()
    world.lost = {Ping}
    for room in range(1, 6):
        Sender(world, room=room).finish()
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    kept = world.d.node.decoder.outcomes.kept

    world.inject(world.d, Ping(world.p.incarnation, world.d.incarnation, 1, 0, 1, 4))
    assert list(kept[world.p.incarnation]) == [4, 5]

    world.inject(world.d, Ping(world.p.incarnation, world.d.incarnation, 2, 0, 1, 6))
    assert kept == {}
