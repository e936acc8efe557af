"""The daemon is killed and replaced, in whatever state a request is: whose pages are written then?

Pages of a session are written by orders of that session alone, and no token is computed from KV
that is not its own: ``world`` looks at the bytes.
"""

from __future__ import annotations

import random

import pytest

from kvd.connectors.vllm.tracked import RequestStage
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.world import BLOCK, Adapter, World, WorldEngine

PROMPT = list(range(1, 31))
SENDS = {"do_remote_decode": True, "do_remote_prefill": False}
MEETS = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "77"}}


def warm(engine):
    """The workers are of the session, and a prompt is cached."""
    request = engine.add(Request(900, PROMPT))
    engine.steps(8)
    engine.finish(request)
    engine.steps(2)
    assert engine.world.cached


def probing(engine):
    engine.half._claims.most_ahead = 0
    engine.world.holds = True
    engine.add(Request(1, PROMPT))
    engine.step()
    assert engine.half._requests.here["r1"].call is not None


def claiming_ahead(engine):
    engine.world.holds = True
    engine.add(Request(1, PROMPT))
    engine.step()
    assert engine.half._requests.here["r1"].claim is not None


def claimed_ahead(engine):
    engine.has_no_blocks = True
    engine.add(Request(1, PROMPT))
    engine.step()
    assert engine.half._requests.here["r1"].lease is not None


def meeting(engine):
    engine.world.holds = True
    engine.add(Request(1, PROMPT, MEETS))
    engine.step()


def delivered(engine):
    engine.world.rooms.add(77)
    engine.has_no_blocks = True
    engine.add(Request(1, [7, *PROMPT], MEETS))
    engine.steps(3)
    assert engine.half._requests.here["r1"].lease is not None


def found(engine):
    engine.half._claims.most_ahead = 0
    engine.has_no_blocks = True
    engine.add(Request(1, PROMPT))
    engine.step()


def claiming(engine):
    engine.half._claims.most_ahead = 0
    engine.has_no_blocks = True
    engine.add(Request(1, PROMPT))
    engine.step()
    engine.has_no_blocks, engine.world.holds = False, True
    engine.step()


def loading(engine):
    engine.is_slow = True
    engine.add(Request(1, PROMPT))
    engine.steps(2)


def filled(engine):
    """Its load is over, and no step has computed of it."""
    engine.is_busy = True
    engine.add(Request(1, PROMPT))
    engine.steps(3)
    assert engine.loaded == [engine.requests["r1"]]


def computing(engine):
    engine.add(Request(1, [5, *PROMPT]))
    engine.steps(2)


def saving(engine):
    engine.is_slow = True
    engine.add(Request(1, [5, *PROMPT]))
    engine.steps(2)
    assert any(orders.saves for orders, _ in engine.queue)


def claiming_to_save(engine):
    engine.half._claims.most_ahead = 0
    engine.has_no_blocks = True
    engine.add(Request(1, [5, *PROMPT]))
    engine.step()
    engine.has_no_blocks, engine.world.holds = False, True
    engine.steps(2)
    assert engine.half._requests.here["r1"].claim is not None


def claiming_to_send(engine):
    engine.half._claims.most_ahead = 0
    engine.add(Request(1, [5, *PROMPT], SENDS))
    engine.world.holds = True
    engine.steps(2)
    assert engine.half._requests.here["r1"].claim is not None


def extending(engine):
    request = engine.add(Request(1, [5, *PROMPT]))
    engine.steps(5)
    for token in range(12):
        engine.world.holds = True
        request.all_token_ids.append(1000 + token)
        engine.step()
    assert engine.half._requests.here["r1"].extension is not None


def preempted(engine):
    request = engine.add(Request(1, [5, *PROMPT]))
    engine.steps(5)
    engine.has_no_blocks = True
    engine.preempt(request)
    engine.step()


def alone(engine):
    engine.add(Request(1, PROMPT), extra=None)
    engine.step()


def ending(engine):
    engine.is_slow = True
    request = engine.add(Request(1, [5, *PROMPT]))
    engine.steps(5)
    engine.finish(request)
    assert len(engine.half._ending)


def ending_while_it_loads(engine):
    loading(engine)
    engine.finish(engine.requests["r1"])
    assert len(engine.half._ending)


def handing_over(engine):
    engine.is_slow = True
    request = engine.add(Request(1, [5, *PROMPT], SENDS))
    engine.steps(5)
    assert engine.finish(request) is not None


def held(engine):
    engine.half._claims.most_ahead = 0
    request = engine.add(Request(1, [5, *PROMPT], SENDS))
    engine.world.holds = True
    engine.steps(12)
    assert engine.finish(request) is not None
    assert "r1" in engine.half._requests.held


STATES = {
    probing: RequestStage.PROBING,
    claiming_ahead: RequestStage.PROBING,
    claimed_ahead: RequestStage.FOUND,
    meeting: RequestStage.MEETING,
    delivered: RequestStage.FOUND,
    found: RequestStage.FOUND,
    claiming: RequestStage.CLAIMING,
    loading: RequestStage.LOADING,
    filled: RequestStage.COMPUTING,
    computing: RequestStage.COMPUTING,
    saving: RequestStage.COMPUTING,
    claiming_to_save: RequestStage.COMPUTING,
    claiming_to_send: RequestStage.FOUND,
    extending: RequestStage.COMPUTING,
    preempted: RequestStage.COMPUTING,
    alone: RequestStage.ALONE,
    ending: None,
    ending_while_it_loads: None,
    handing_over: None,
    held: None,
}


@pytest.mark.parametrize("same_memory", [False, True], ids=["other", "same"])
@pytest.mark.parametrize("are_workers_late", [False, True], ids=["noticed", "late"])
@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_the_daemon_is_replaced_while_a_request_is(state, same_memory, are_workers_late):
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    state(engine)
    tracked = engine.half._requests.here.get("r1")
    assert (tracked.stage if tracked is not None else None) == STATES[state]

    world.are_workers_late = are_workers_late
    world.kill()
    engine.step()
    world.start(same_memory=same_memory)
    world.take_all()
    world.holds = world.is_hung = False
    engine.steps(3)
    engine.clock_s += 1.5  # a session is looked for once a second
    engine.steps(3)
    world.check_foreign()
    engine.is_slow = engine.is_busy = engine.has_no_blocks = False
    engine.steps(3)
    world.check_foreign()
    world.are_workers_late = False
    request = engine.requests["r1"]
    if request in engine.running:
        for token in range(20):
            request.all_token_ids.append(2000 + token)
            engine.step()
    world.check_foreign()
    if tracked is not None and "r1" in engine.half._requests.here:
        assert tracked.stage is RequestStage.ALONE

    assert not world.handed or state not in {handing_over, held}
    world.give_back()
    again = engine.add(Request(2, [6, *PROMPT]))
    engine.steps(8)
    engine.finish(again)
    engine.steps(2)
    fresh = engine.add(Request(3, [6, *PROMPT]))
    before = engine.loaded_tokens
    engine.steps(3)
    assert engine.loaded_tokens - before == 28, "the session after it is used"
    engine.finish(fresh)
    engine.settle()


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_the_daemon_hangs_while_a_request_is(state):
    """Whoever waits is computed after 50 ms, or 250 where another node was to send it."""
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    state(engine)
    world.is_hung = True
    engine.is_slow = engine.is_busy = engine.has_no_blocks = False
    engine.steps(120)
    request = engine.requests["r1"]
    assert request in engine.running or "r1" in engine.over
    assert not engine.counted.needed
    late = engine.add(Request(2, [9, *PROMPT]))
    engine.steps(8)
    assert late.num_computed_tokens > 0
    engine.finish(late)
    engine.settle()


def come_and_go(rng, engine, number):
    """One of the deeds of requests, and what follows from it."""
    live = [*engine.waiting, *engine.running, *engine.loaded]
    deed = rng.random()
    if deed < 0.4 and len(live) < 6:
        prompt = [rng.randint(1, 2)] * rng.randint(1, 4) * 4 + PROMPT[: rng.randint(0, 9)]
        request = Request(number, prompt, rng.choice([None, None, SENDS, MEETS]))
        lora = Adapter(rng.choice([0, 1, 3, 40])) if rng.random() < 0.3 else None
        engine.add(request, lora=lora)
    elif deed < 0.6 and engine.running:
        request = rng.choice(engine.running)
        # It was given blocks for so many.
        for token in range(rng.randint(1, 5) if request.num_tokens < 40 else 0):
            request.all_token_ids.append(9000 + token)
            engine.step()
    elif deed < 0.7 and engine.running:
        # Also one whose last steps are under way still, as with asynchronous scheduling.
        engine.preempt(rng.choice(engine.running))
    elif deed < 0.74:
        engine.update_weights()
    elif deed < 0.9 and live:
        engine.finish(rng.choice(live))
    elif engine.remote:
        engine.finish(engine.requests[rng.choice(list(engine.remote))])


def end_and_return(rng, world):
    """The daemon ends now and then, and is back with the same memory, or with other."""
    if rng.random() < 0.08 and not world.is_down:
        world.kill()
    elif world.is_down and rng.random() < 0.5:
        world.start(same_memory=rng.random() < 0.4)
        if rng.random() < 0.7:
            world.take_all()
    if rng.random() < 0.15:
        world.give_back()


def walk(seed, window=0, *, has_states=False, world_of=World):
    """Returns how many tokens were loaded on the way."""
    rng = random.Random(seed)
    world = world_of(has_states=has_states)
    world.rng = rng
    engine = WorldEngine(
        world,
        chunk=rng.choice([4, 8, 64]),
        reserve_tokens=rng.choice([0, 8]),
        can_be_held=rng.random() < 0.7,
        window=window,
    )
    engine.half._claims.most_ahead = rng.choice([0, 1, 8])
    engine.half.look_every_s = rng.choice([0.0, 0.1, 0.2])
    engine.looks = random.Random(seed) if rng.random() < 0.5 else None
    for number in range(1, 90):
        come_and_go(rng, engine, number)
        if (window or has_states) and rng.random() < 0.2:
            engine.local[f"r{number}"] = BLOCK * rng.randrange(1, 5)
        end_and_return(rng, world)
        if rng.random() < 0.05:
            engine.clock_s += 1.5
        world.holds = rng.random() < 0.3
        world.is_hung = rng.random() < 0.1
        world.are_workers_late = rng.random() < 0.2
        world.refuses_rooms = rng.random() < 0.3
        world.rooms = {77} if rng.random() < 0.7 else set()
        engine.is_slow = rng.random() < 0.4
        engine.are_threads_slow = rng.random() < 0.4
        engine.are_copies_slow = rng.random() < 0.5
        engine.has_no_blocks = rng.random() < 0.2
        engine.is_busy = rng.random() < 0.2
        engine.computes_all = rng.random() < 0.2
        engine.step()
        world.go_on()
        world.check_foreign()
    if world.is_down:
        world.start(same_memory=False)
    engine.settle()
    return engine.loaded_tokens


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_page_is_written_by_orders_of_another_session(seed):
    walk(seed)


@pytest.mark.parametrize("window", [5, 8, 17])
@pytest.mark.parametrize("seed", range(10))
def test_nor_where_layers_have_windows(seed, window):
    walk(seed, window)


@pytest.mark.parametrize("seed", range(20))
def test_nor_where_layers_have_states(seed):
    walk(seed, has_states=True)


def tiered(made):
    """Worlds with a tier below their pool; ``made`` has them."""

    def world_of(**how):
        made.append(World(has_tier=True, **how))
        return made[-1]

    return world_of


@pytest.mark.parametrize("seed", range(20))
def test_nor_where_a_tier_has_what_was_evicted(seed):
    walk(seed, world_of=tiered([]))


def test_walks_of_seeds_that_nobody_chose():
    """And the negative control: what is looked for above does happen."""
    first = random.SystemRandom().randrange(1000, 1_000_000)
    try:
        assert sum(walk(seed) for seed in range(first, first + 10)) > 0
        assert sum(walk(seed, window=7) for seed in range(first, first + 10)) > 0
        assert sum(walk(seed, has_states=True) for seed in range(first, first + 10)) > 0
        worlds = []
        for seed in range(first, first + 100):
            walk(seed, world_of=tiered(worlds))
            # Most walks have no promotion, and ten in a row may have none.
            if len(worlds) >= 10 and any(world.n_promoted for world in worlds):
                break
        assert sum(world.n_promoted for world in worlds) > 0
    except AssertionError as error:
        error.add_note(f"seeds from {first} on")
        raise
