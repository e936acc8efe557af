"""Blocks that are filled while their prompt is still received: each way it may go on, and end."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvd.client import Code
from kvd.connectors.vllm.tracked import RequestStage
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.test_restarts import walk, warm
from tests.connectors.vllm.world import (
    BLOCK,
    World,
    WorldCall,
    WorldEngine,
    WorldReceive,
    refusal,
)

PROMPT = list(range(1, 31))
MEETS = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "77", "soon": True}}


class EndCall(WorldCall):
    """Of a receive: it has an outcome once the other node has no more to say."""

    def __init__(self, receive, make):
        self.receive = receive
        super().__init__(receive.node, make)

    def come(self):
        if self.is_done or self.receive.is_over:
            super().come()
        else:
            self.node.pending.append(self)


class ComingReceive(WorldReceive):
    """Its pages are filled one after the other, as the other node computes."""

    def __init__(self, node, room, tokens, namespace, *, as_it_comes):
        super().__init__(node, room, tokens, namespace)
        self.as_it_comes, self.is_over, self.come_tokens = as_it_comes, node.world.is_last, 0
        node.world.coming.append(self)
        self.id = len(node.world.coming)

    @property
    def arriving(self):
        if not self.as_it_comes or not self.come_tokens or self.is_over:
            return None
        lease = self.lease
        return SimpleNamespace(n_tokens=self.come_tokens, pages=lease.pages, key=lease.key)

    def come(self, n_pages=1):
        """So many more whole pages; the last of all comes with the end."""
        upto = min(self.come_tokens + n_pages * BLOCK, (self.n_tokens - 1) // BLOCK * BLOCK)
        if self.lease.id in self.node.world.leases and not self.is_over:
            self.come_tokens = max(self.come_tokens, upto)
            self.node.world.fill(self.lease.row, self.tokens[:upto], self.lease.weights)

    def end(self):
        self.is_over = True

    def begin_done(self):
        def done():
            world = self.node.world
            if self.room not in world.rooms:
                world.drop(self.lease)
                raise refusal(Code.ABORTED)
            world.fill(self.lease.row, self.tokens, self.lease.weights)
            self.is_delivered = True
            return self.lease

        return EndCall(self, done)

    def begin_cancel(self):
        self.is_over = True
        return super().begin_cancel()


class ComingWorld(World):
    """Other nodes send what they compute as they go."""

    def __init__(self, **more):
        self.coming, self.is_last = [], False
        super().__init__(**more)

    def receive_of(self, node, room, tokens, namespace, *, as_it_comes, **how):
        return ComingReceive(node, room, tokens, namespace, as_it_comes=as_it_comes)

    def connect(self):
        node = super().connect()
        # Each room is open over there.
        node.begin_snapshot = lambda: WorldCall(node, lambda: SimpleNamespace(rooms=[]))
        return node

    def go_on(self, *, is_last=False):
        self.is_last = is_last
        for receive in self.coming:
            if is_last:
                receive.end()
            elif receive.node.world.life == receive.lease.life and not self.is_down:
                receive.come(self.rng.randrange(3))
                if self.rng.random() < 0.2:
                    receive.end()


class Pair:
    """An engine that decodes, and a prompt that comes to it."""

    def __init__(self, prompt=PROMPT, **more):
        self.world = ComingWorld()
        self.engine = WorldEngine(self.world, **more)
        warm(self.engine)
        self.world.rooms.add(77)
        self.request = self.engine.add(Request(1, [7, *prompt], MEETS))
        self.engine.steps(2)
        (self.receive,) = self.world.coming
        self.before = self.engine.loaded_tokens

    @property
    def tracked(self):
        return self.engine.half._requests.here.get("r1")

    @property
    def stage(self):
        return self.tracked.stage

    def come(self, n_pages=2):
        self.receive.come(n_pages)
        self.engine.steps(3)

    def ends(self):
        """It is computed, or was loaded and goes on; then nothing is left."""
        self.engine.are_copies_slow = self.engine.is_slow = False
        self.engine.steps(12)
        assert self.request.num_computed_tokens == self.request.num_tokens
        self.engine.finish(self.request)
        self.engine.settle()
        return self.engine.loaded_tokens - self.before


def test_blocks_are_filled_as_pages_come_and_the_request_goes_on_when_all_have():
    pair = Pair()
    assert pair.stage is RequestStage.MEETING
    pair.come()
    assert pair.stage is RequestStage.CLAIMING
    assert pair.tracked.started_tokens == 8
    pair.come(3)
    assert pair.tracked.started_tokens == 20
    assert pair.request in pair.engine.requests.values()
    assert "r1" in pair.engine.remote, "no token is computed from a part"
    pair.receive.end()
    pair.engine.steps(3)
    assert pair.ends() == 30


def test_a_request_holds_no_block_before_something_has_come():
    pair = Pair()
    pair.engine.steps(20)
    assert "r1" not in pair.engine.blocks
    pair.receive.end()
    assert pair.ends() == 30


def test_what_comes_before_there_are_blocks_is_loaded_as_one():
    pair = Pair()
    pair.engine.has_no_blocks = True
    pair.come()
    pair.come()
    assert pair.stage is RequestStage.FOUND
    pair.receive.end()
    pair.engine.steps(2)
    assert pair.tracked.lease is not None
    pair.engine.has_no_blocks = False
    assert pair.ends() == 30


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_what_does_not_come_to_its_end_is_computed(has_blocks, is_slow):
    pair = Pair()
    pair.engine.are_copies_slow = is_slow
    pair.engine.has_no_blocks = not has_blocks
    pair.come()
    pair.world.rooms.clear()
    pair.receive.end()
    pair.engine.steps(2)
    pair.engine.has_no_blocks = False
    assert pair.ends() == 0
    assert pair.engine.half.counts.unmet == 1
    assert pair.engine.half.counts.failed_loads == has_blocks


@pytest.mark.parametrize("is_over", [False, True])
def test_an_abort_leaves_nothing(is_over):
    pair = Pair()
    pair.engine.are_copies_slow = True
    pair.come()
    if is_over:
        pair.receive.end()
        pair.engine.step()
    pair.engine.finish(pair.request)
    pair.engine.settle()
    assert pair.receive.is_over


def test_vllm_may_compute_all_of_it():
    pair = Pair()
    pair.engine.has_no_blocks = True
    pair.come()
    pair.engine.has_no_blocks, pair.engine.computes_all = False, True
    pair.engine.steps(2)
    assert pair.receive.is_over
    assert pair.ends() == 0


@pytest.mark.parametrize("same_memory", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_the_daemon_is_replaced_while_parts_are_under_way(same_memory, is_slow):
    pair = Pair()
    pair.engine.are_copies_slow = is_slow
    pair.come(5)
    pair.world.kill()
    pair.engine.step()
    pair.world.start(same_memory=same_memory)
    pair.world.take_all()
    pair.engine.steps(3)
    pair.engine.clock_s += 1.5
    pair.engine.steps(3)
    pair.world.check_foreign()
    pair.world.give_back()
    assert pair.ends() == 0


def test_a_daemon_that_hangs_is_waited_for_a_second():
    pair = Pair()
    pair.come()
    pair.world.is_hung = True
    pair.engine.steps(200)
    assert pair.request.num_computed_tokens > 0
    pair.world.is_hung = False
    assert pair.ends() == 0


def test_new_weights_while_parts_are_under_way():
    pair = Pair()
    pair.engine.are_copies_slow = True
    pair.come()
    pair.engine.update_weights()
    assert pair.ends() == 0


def test_of_a_part_that_cannot_be_copied_nothing_counts():
    pair = Pair()
    pair.engine.are_copies_slow = True
    pair.receive.come(6)
    pair.engine.step()
    (copy,) = [one for one in pair.world.copies if one.is_load]
    copy.cancel()
    pair.receive.end()
    assert pair.ends() == 0
    assert pair.engine.half.counts.failed_loads == 1


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_token_is_computed_from_a_part(seed):
    walk(seed, world_of=ComingWorld)


def test_walks_that_nobody_chose_and_they_do_load_in_parts(monkeypatch):
    parts = []
    begin = ComingReceive.come
    monkeypatch.setattr(
        ComingReceive, "come", lambda self, n=1: (parts.append(self.come_tokens), begin(self, n))
    )
    first = random.SystemRandom().randrange(1000, 1_000_000)
    try:
        assert sum(walk(seed, world_of=ComingWorld) for seed in range(first, first + 10)) > 0
        assert any(parts)
    except AssertionError as error:
        error.add_note(f"seeds {first} to {first + 9}")
        raise
