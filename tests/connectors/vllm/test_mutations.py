"""What the walks of ``test_restarts`` look for is found: each rule, once it is broken, is noticed.

The connector is broken in one place at a time. A rule that also the daemon, or the mover, sees to
is broken there too: what would happen is looked at, not who prevents it first.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvd.connectors.vllm.joined import PoolJoin
from kvd.connectors.vllm.moves import Moves
from kvd.connectors.vllm.under_way import OrdersUnderWay
from kvd.connectors.vllm.worker import RankCopy, WorkerHalf
from tests.connectors.vllm.stand_ins import CountedBlocks, Request
from tests.connectors.vllm.test_restarts import PROMPT, walk
from tests.connectors.vllm.world import World, WorldBlocks, WorldCopy, WorldEngine, WorldWorker

SEEDS = range(100, 400)
WINDOW = 7


def no_hold(patch):
    patch.setattr(CountedBlocks, "hold", lambda *_: None)
    patch.setattr(CountedBlocks, "free", lambda *_: None)


def no_mark(patch):
    patch.setattr(WorldBlocks, "mark", lambda self: 0)


def told_before_it_is_safe(patch):
    patch.setattr(RankCopy, "is_over", lambda self: self.pending is not None)
    patch.setattr(RankCopy, "is_done", lambda self: True)


def told_though_it_failed(patch):
    patch.setattr(RankCopy, "is_done", lambda self: True)


def written_when_it_is_ordered(patch):
    saves = Moves.saves

    def ordered(self, tracked, computed_tokens):
        orders = saves(self, tracked, computed_tokens)
        for order in orders:
            tracked.saved_tokens = order.upto_tokens
            tracked.copies.pop(order.number)
        return orders

    patch.setattr(Moves, "saves", ordered)
    patch.setattr(OrdersUnderWay, "answered", lambda *_: [])


def of_any_session(patch):
    patch.setattr(PoolJoin, "of", lambda self, key: self._joined)
    patch.setattr(WorldWorker, "owns", lambda self, key: True)

    def ask(self):
        if self.has_come:
            self.lease = SimpleNamespace(copies=1, is_ended=False)

    patch.setattr(WorldCopy, "_ask", ask)


def is_noticed(*of, **layers):
    """Whether a walk of some seed, over engines with such layers, ends in a complaint."""
    for seed in SEEDS:
        try:
            walk(seed, *of, **layers)
        except (AssertionError, KeyError, ValueError):
            return True
    return False


@pytest.mark.parametrize(
    "broken",
    [
        no_hold,
        no_mark,
        told_before_it_is_safe,
        told_though_it_failed,
        written_when_it_is_ordered,
    ],
    ids=lambda one: one.__name__,
)
def test_a_rule_that_is_broken_is_noticed(broken, monkeypatch):
    broken(monkeypatch)
    assert is_noticed(), "nobody would notice"


def saved_though_a_window_moved_on(patch):
    patch.setattr(OrdersUnderWay, "has_all", lambda *_: True)


def taken_back_before_it_is_ordered(patch):
    patch.setattr(OrdersUnderWay, "hold", lambda *_: None)
    patch.setattr(OrdersUnderWay, "free", lambda *_: None)


@pytest.mark.parametrize(
    "broken",
    [saved_though_a_window_moved_on, taken_back_before_it_is_ordered, no_mark],
    ids=lambda one: one.__name__,
)
def test_a_rule_of_layers_with_windows_is_noticed(broken, monkeypatch):
    broken(monkeypatch)
    assert is_noticed(WINDOW), "nobody would notice"


def gone_on_within_a_page(patch):
    patch.setattr(OrdersUnderWay, "has_states", False)


@pytest.mark.parametrize(
    "broken",
    [gone_on_within_a_page, saved_though_a_window_moved_on, taken_back_before_it_is_ordered],
    ids=lambda one: one.__name__,
)
def test_a_rule_of_layers_with_states_is_noticed(broken, monkeypatch):
    broken(monkeypatch)
    assert is_noticed(has_states=True), "nobody would notice"


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_order_of_another_session_is_noticed(is_broken, monkeypatch):
    """The daemon came back with the same memory, where its pages are another engine's now."""
    if is_broken:
        of_any_session(monkeypatch)
    world = World()
    engine = WorldEngine(world, chunk=64)
    engine.add(Request(1, PROMPT))
    engine.is_slow = True
    engine.steps(2)
    assert any(orders.saves for orders, _ in engine.queue)
    world.kill()
    world.start(same_memory=True)
    engine.steps(2)
    # The scheduler's half gives none back that an order is of; whoever else does, as a fault would:
    for lease in list(world.leases.values()):
        world.drop(lease)
    world.take_all()
    engine.is_slow = False
    engine.steps(3)
    if is_broken:
        with pytest.raises(AssertionError, match="of another engine were written"):
            world.check_foreign()
    else:
        world.check_foreign()


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("can_be_held", [False, True])
def test_blocks_of_a_preempted_request_are_given_away_in_the_same_step(
    can_be_held, is_broken, monkeypatch
):
    """And a copy of them is under way: they are held, or waited for."""
    if is_broken and can_be_held:
        no_hold(monkeypatch)
    elif is_broken:
        monkeypatch.setattr(WorkerHalf, "give_back", lambda self, orders: None)
    world = World()
    engine = WorldEngine(world, chunk=64, can_be_held=can_be_held)
    engine.step()
    engine.are_copies_slow = True
    first = engine.add(Request(1, PROMPT))
    engine.step()
    saved = set(engine.blocks["r1"][:7])
    assert [copy.is_over for copy in world.copies] == [False]
    engine.preempt(first)
    engine.waiting.remove(first)
    second = engine.add(Request(2, [7, *PROMPT]))
    engine.step()
    assert bool(saved & set(engine.blocks["r2"])) == (is_broken or not can_be_held)
    engine.waiting.append(first)
    engine.steps(14)
    for request in (first, second):
        engine.finish(request)
    if is_broken:
        with pytest.raises(AssertionError):
            engine.settle()
    else:
        engine.settle()
