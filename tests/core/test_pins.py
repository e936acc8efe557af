"""Pins: what is kept softly, for whom, and how each ends."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import faults
from kvd.core.inspect import snapshot as inspected
from kvd.core.inspect.why import because
from kvd.core.leases import pins
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.errors import Code
from kvd.wire import admin, client
from kvd.wire.cache_events import PinBegan, PinEnded
from kvd.wire.pins import PinPrefix, PrefixPinned, UnpinPrefix
from tests.core.engines import cached
from tests.core.families import SPECS
from tests.core.world import Side, World, settings, tokens

PAGES = 16
"""Of the pool, the null page not counted."""


@pytest.fixture
def world() -> World:
    return World(d_pages=PAGES + 1)


@pytest.fixture
def side(world: World) -> Side:
    return world.d


def prompt(first: int, n_pages: int = 4) -> bytes:
    return tokens((first, 16 * n_pages))


def put(side: Side, toks: bytes, **fields: object) -> None:
    lease = side.lease(toks, **fields)
    side.call(client.CommitLease, lease=lease.lease)
    side.call(client.ReleaseLease, lease=lease.lease)


def pin(side: Side, toks: bytes, ttl_s: float = 60.0, **fields: object) -> int:
    reply = side.call(PinPrefix, toks, ttl_s=ttl_s, **fields)
    assert isinstance(reply, PrefixPinned), reply
    return reply.pin


def refused(reply: object) -> Code:
    assert isinstance(reply, client.Failed), reply
    return reply.refusal.code


def is_cached(side: Side, toks: bytes, namespace: str = "") -> bool:
    return side.node.leases.tree.probe(toks, namespace) == len(toks) // 4


def ended(side: Side) -> list[str]:
    return [event.why for event in side.events if isinstance(event, PinEnded)]


@pytest.fixture(autouse=True)
def _no_faults(world: World):
    yield
    assert not list(faults(world.d.node))


def test_a_pinned_prefix_is_the_last_to_go(side):
    put(side, prompt(1000))
    pin(side, prompt(1000))
    for first in range(2000, 9000, 1000):
        put(side, prompt(first))

    assert is_cached(side, prompt(1000))
    assert not is_cached(side, prompt(2000))
    assert not ended(side)


def test_a_request_that_has_no_other_pages_takes_those_of_a_pin(side):
    put(side, prompt(1000))
    number = pin(side, prompt(1000), owner="system prompt")

    side.lease(prompt(5000, PAGES))

    assert not is_cached(side, prompt(1000))
    assert ended(side) == ["a request had no other pages"]
    assert not side.node.pins.by_id
    assert inspected.snapshot(side.node).pins_gave_way == 1
    (over,) = side.node.pins.ended
    assert (over.id, over.owner, over.tokens) == (number, "system prompt", 64)


def test_only_as_many_pins_go_as_a_request_needs_the_oldest_first(side):
    put(side, prompt(1000))
    put(side, prompt(2000))
    first, second = pin(side, prompt(1000)), pin(side, prompt(2000))

    side.lease(prompt(5000, PAGES - 4))

    assert set(side.node.pins.by_id) == {second}
    assert first != second
    assert is_cached(side, prompt(2000))


def test_a_pin_never_lets_a_lease_that_runs_lose_what_it_has(side):
    put(side, prompt(1000))
    running = side.lease(tokens((1000, 64), (7000, 64)))
    pin(side, prompt(1000))

    side.call(client.ExtendLease, lease=running.lease, n_tokens=16 * (PAGES - 8))

    assert is_cached(side, prompt(1000))  # locked by the lease
    side.call(client.ReleaseLease, lease=running.lease)


@pytest.mark.parametrize("how", ["unpin", "ttl", "engine", "operator"])
def test_a_pin_ends_and_what_it_kept_stays_cached_as_all_else(world, side, how):
    put(side, prompt(1000))
    number = pin(side, prompt(1000), ttl_s=5.0)

    if how == "unpin":
        assert isinstance(side.call(UnpinPrefix, pin=number), client.Done)
    elif how == "operator":
        report = side.ask(admin.Unpin(1, number))
        assert report.changed == {"unpinned": 1}
    elif how == "engine":
        side.hang_up()
        world.pass_time(0.1)
    else:
        world.pass_time(4.8)
        assert number in side.node.pins.by_id
        world.pass_time(0.4)

    assert not side.node.pins.by_id
    assert is_cached(side, prompt(1000))
    assert side.node.leases.tree.protected_pages == 0
    assert ended(side)


def test_an_engine_cannot_end_the_pin_of_another(side):
    other = side.attach("other")
    put(side, prompt(1000))
    number = pin(side, prompt(1000))

    assert refused(side.call(UnpinPrefix, pin=number, session=other)) is Code.BAD_REQUEST
    assert number in side.node.pins.by_id


def test_an_operators_pin_outlives_engines(world, side):
    put(side, prompt(1000))
    (edge,) = side.node.leases.tree.nodes()
    rehearsed = side.ask(admin.Rehearse(1, admin.Pin(1, "node", edge.id, 60.0, "alice")))
    assert rehearsed.changed == {"pinned_tokens": 64, "pinned_pages": 4}
    assert not side.node.pins.by_id

    page = int.from_bytes(edge.pages[4:8], "little")
    side.ask(admin.Pin(1, "page", page, 60.0, "alice"))
    side.hang_up()
    world.pass_time(1)

    (row,) = inspected.snapshot(side.node).pins
    assert (row.owner, row.session, row.tokens, row.pages) == ("alice", 0, 64, 4)
    assert row.ttl_s == pytest.approx(59)


def test_only_what_is_cached_is_pinned(side):
    put(side, prompt(1000))

    longer = side.call(PinPrefix, tokens((1000, 64), (8000, 64)), ttl_s=1.0)
    assert isinstance(longer, PrefixPinned)
    assert longer.tokens == 64
    assert refused(side.call(PinPrefix, prompt(2000), ttl_s=1.0)) is Code.BAD_REQUEST
    assert refused(side.call(PinPrefix, prompt(1000), namespace="x", ttl_s=1.0)) is Code.BAD_REQUEST


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e12, float("nan")])
def test_a_pin_has_an_end(side, ttl_s):
    put(side, prompt(1000))

    assert refused(side.call(PinPrefix, prompt(1000), ttl_s=ttl_s)) is Code.BAD_REQUEST


def test_pins_are_bounded(side, monkeypatch):
    monkeypatch.setattr(pins, "MOST_PINS", 8)
    put(side, prompt(1000))
    for _ in range(8):
        pin(side, prompt(1000))

    assert refused(side.call(PinPrefix, prompt(1000), ttl_s=1.0)) is Code.NO_ROOM


def test_a_pool_with_windows_has_no_pins():
    side = Side(World(), settings("p", 64, spec=SPECS["swa"]))
    side.attach()
    cached(side, prompt(1000))

    assert refused(side.call(PinPrefix, prompt(1000), ttl_s=1.0)) is Code.NOT_SUPPORTED


def test_new_weights_end_the_pins_of_their_namespace(side):
    put(side, prompt(1000), namespace="llama")
    put(side, prompt(1000), namespace="other")
    pin(side, prompt(1000), namespace="llama")
    kept = pin(side, prompt(1000), namespace="other")

    side.call(client.BeginEpoch, namespace="llama")

    assert set(side.node.pins.by_id) == {kept}
    assert not is_cached(side, prompt(1000), "llama")


def test_an_operators_epoch_does_so_too_and_says_what_goes(side):
    put(side, prompt(1000), namespace="llama")
    pin(side, prompt(1000), namespace="llama")

    said = side.ask(admin.Rehearse(1, admin.RaiseEpoch(1, "llama")))
    side.ask(admin.RaiseEpoch(1, "llama"))

    assert said.changed == {"freed_pages": 4, "locked_pages": 0}
    assert not side.node.pins.by_id
    assert not is_cached(side, prompt(1000), "llama")


def test_a_flush_keeps_what_is_pinned_and_says_by_whom(side):
    put(side, prompt(1000))
    pin(side, prompt(1000), owner="system prompt")

    report = side.ask(admin.Flush(1))

    assert is_cached(side, prompt(1000))
    assert report.changed == {"freed_pages": 0, "locked_pages": 4}
    assert "pin 1 of system prompt" in report.refused[0]


def test_a_page_says_that_it_is_pinned_by_whom_and_what_ends_that(side):
    put(side, prompt(1000))
    pin(side, prompt(1000), owner="system prompt", ttl_s=60.0)
    (edge,) = side.node.leases.tree.nodes()

    page = because(side.node, admin.Why(1, "page", int.from_bytes(edge.pages[:4], "little")))
    lease = because(side.node, admin.Why(1, "lease", side.node.pins.by_id[1].lease.id))

    assert "for pin 1 of system prompt" in page.sentence
    assert any("kvd unpin 1" in fact and "gives way" in fact for fact in lease.facts)


def test_what_is_pinned_is_not_demoted_nor_counted_as_missed(side):
    put(side, prompt(1000))
    pin(side, prompt(1000))

    assert side.node.leases.evictor.evictions.n_hurt == 0
    (began,) = [event for event in side.events if isinstance(event, PinBegan)]
    assert (began.owner, began.tokens) == ("engine", 64)


def test_a_thawed_node_has_its_pins(side):
    put(side, prompt(1000))
    pin(side, prompt(1000))

    again = thaw(freeze(side.node))

    assert state_hash(again) == state_hash(side.node)
    assert set(again.pins.by_id) == {1}
    assert again.pins.by_id[1].lease is again.leases.leases[side.node.pins.by_id[1].lease.id]


def test_what_leases_are_promised_is_not_pinned_away(side):
    put(side, prompt(1000))
    side.lease(prompt(2000), promise_tokens=16 * (PAGES - 4))

    assert refused(side.call(PinPrefix, prompt(1000), ttl_s=1.0)) is Code.NO_ROOM
