"""New weights: no token is computed from KV of former ones, whatever the daemon does meanwhile.

``world`` hashes the weights into its KV, and looks at the bytes that are loaded and shared.
"""

from __future__ import annotations

import random

import pytest

from kvd.client import Code
from kvd.connectors.vllm.log import ConnectorLog
from kvd.connectors.vllm.resets import (
    NO_WEIGHTS,
    OLD_BLOCKS,
    OTHER_WEIGHTS,
    ReplacedWeights,
)
from kvd.connectors.vllm.tracked import RequestStage
from tests.connectors.vllm.stand_ins import MiniEngine, Request, StandInNode, refusal
from tests.connectors.vllm.test_restarts import (
    PROMPT,
    STATES,
    come_and_go,
    end_and_return,
    held,
    loading,
    warm,
)
from tests.connectors.vllm.world import BLOCK, Adapter, World, WorldEngine


def well(engine):
    """The daemon answers at once."""


def late(engine):
    engine.world.holds = True


def hung(engine):
    engine.world.is_hung = True


def refused(engine):
    engine.world.refuses_epochs = True


def down(engine):
    engine.world.kill()


def down_and_seen(engine):
    engine.world.kill()
    engine.step()


def of_another_life(engine):
    """It was restarted with the same memory, and nobody has looked since."""
    engine.world.kill()
    engine.world.start(same_memory=True)


DAEMONS = [well, late, hung, refused, down, down_and_seen, of_another_life]


def goes_without(engine, number):
    """A request for what is cached, behind a reset that the daemon has not done."""
    before = engine.loaded_tokens
    request = engine.add(Request(number, PROMPT))
    engine.steps(8)
    assert engine.loaded_tokens == before, "it was loaded from KV of former weights"
    assert request in engine.running
    engine.finish(request)


def is_used_again(engine):
    """What a request computes with the new weights is found by another one."""
    first = engine.add(Request(51, PROMPT))
    before = engine.loaded_tokens
    engine.steps(8)
    assert engine.loaded_tokens == before, "it was loaded from KV of former weights"
    engine.finish(first)
    engine.steps(2)
    engine.add(Request(52, PROMPT))
    engine.steps(3)
    assert engine.loaded_tokens == before + 28
    engine.finish(engine.requests["r52"])


@pytest.mark.parametrize("daemon", DAEMONS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_the_cache_is_reset_while_a_request_is(state, daemon):
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    state(engine)
    daemon(engine)
    assert engine.update_weights(), "vLLM would end its pause in an error"
    assert all(one.stage is RequestStage.ALONE for one in engine.half._requests.here.values())
    before = engine.loaded_tokens
    engine.is_slow = engine.is_busy = engine.has_no_blocks = False
    engine.steps(4)
    if daemon not in {well, of_another_life} and state is not held:
        goes_without(engine, 50)
    request = engine.requests["r1"]
    if request in engine.running:
        engine.preempt(request)
        engine.steps(4)
    assert engine.loaded_tokens == before, "it was loaded from KV of former weights"

    world.holds = world.is_hung = world.refuses_epochs = False
    if world.is_down:
        world.start(same_memory=True)
    engine.clock_s += 1.5  # a session is looked for once a second, and a reset said again
    engine.steps(3)
    is_used_again(engine)
    engine.settle()
    assert not world.handed, "KV of former weights was handed over"


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_an_adapter_is_loaded_anew_while_a_request_of_it_is(state):
    """vLLM loads one in place between two steps, and says so to nobody but who has its number."""
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    add = engine.add
    engine.add = lambda request, extra=(): add(request, extra, Adapter())
    warm(engine)
    state(engine)
    world.weights += 1
    engine.half.forget_adapter(Adapter.number)
    assert all(one.stage is RequestStage.ALONE for one in engine.half._requests.here.values())
    before = engine.loaded_tokens
    engine.is_slow = engine.is_busy = engine.has_no_blocks = world.holds = False
    engine.steps(8)
    request = engine.requests["r1"]
    if request in engine.running:
        engine.preempt(request)
        engine.steps(8)
        assert request in engine.running
        request.all_token_ids += range(1000, 1000 + 3 * BLOCK)
        engine.steps(8)
        engine.finish(request)
    assert engine.loaded_tokens == before, "it was loaded from KV of former weights"
    engine.settle()
    assert not world.wrong, "KV of other weights was shared"


@pytest.mark.parametrize("same_memory", [True, False], ids=["same", "other"])
def test_an_engine_that_is_reset_before_it_has_a_session_says_it_first(same_memory):
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    engine.settle()
    world.kill()
    world.weights += 1
    engine = WorldEngine(world, reserve_tokens=8)
    assert engine.half.flush()
    assert engine.half.flush()
    world.start(same_memory=same_memory)
    engine.clock_s += 1.5
    engine.step()
    engine.step()
    assert world.epoch == 1, "two resets are one"
    is_used_again(engine)
    engine.settle()


def test_a_reset_is_said_again_until_it_is_done_and_counts_for_salts_too():
    node = StandInNode()
    engine = MiniEngine(node)
    node.share(PROMPT)
    node.epoch_fails = refusal(Code.ABORTED, "no space left on device")
    assert engine.half.flush()
    for number in range(1, 4):
        engine.finish(engine.add(Request(number, PROMPT, salt="s" if number == 2 else None)))
        engine.clock_s += 1.5
        engine.step()
    assert node.epochs == ["model"] * 4
    assert not node.asked, "something was looked up"
    node.epoch_fails = None
    for _ in range(2):
        engine.clock_s += 1.5
        engine.step()
    engine.add(Request(9, PROMPT))
    assert node.asked == ["model"]
    engine.step()
    engine.finish(engine.requests["r9"])
    engine.settle()
    assert not node.leases


def test_a_reset_behind_one_that_is_under_way_is_said_too_and_many_are_one():
    node = StandInNode()
    engine = MiniEngine(node)
    node.holds = True
    for _ in range(5):
        assert engine.half.flush()
    assert node.epochs == ["model"]
    node.come()
    engine.step()
    assert node.epochs == ["model"] * 2
    engine.add(Request(1, PROMPT))
    assert not node.asked
    node.come()
    engine.step()
    engine.add(Request(2, PROMPT))
    assert node.asked == ["model"]
    node.holds = False
    node.come()
    engine.step()
    for one in ("r1", "r2"):
        engine.finish(engine.requests[one])
    engine.settle()
    assert node.epochs == ["model"] * 2


def test_an_engine_that_is_reset_before_it_knows_its_namespace_says_it_once_it_does():
    node = StandInNode()
    engine = MiniEngine(node)
    engine.half.name("")
    assert engine.half.flush()
    assert not node.epochs
    node.holds = True
    engine.half.name("model")
    node.share(PROMPT)
    engine.finish(engine.add(Request(1, PROMPT)))
    assert (node.epochs, node.asked) == (["model"], [])
    node.holds = False
    node.come()
    engine.add(Request(2, PROMPT))
    assert node.asked == ["model"]
    engine.step()
    engine.finish(engine.requests["r2"])
    engine.settle()


def test_files_that_changed_with_a_reset_do_not_hide_that_the_former_name_is_due():
    node = StandInNode()
    engine = MiniEngine(node)
    node.is_dead = True
    assert engine.half.flush()
    engine.half.name("changed")
    node.is_dead = False
    engine.clock_s += 1.5
    engine.step()
    engine.step()
    engine.add(Request(1, PROMPT))
    assert (node.epochs, node.asked) == (["model"], ["changed"])
    engine.step()
    engine.finish(engine.requests["r1"])
    engine.settle()


def walk(seed):
    """Returns how many tokens were loaded, and how many epochs there were."""
    rng = random.Random(seed)
    world = World()
    engine = WorldEngine(world, chunk=rng.choice([4, 8, 64]), reserve_tokens=rng.choice([0, 8]))
    for number in range(1, 90):
        come_and_go(rng, engine, number)
        end_and_return(rng, world)
        if rng.random() < 0.1:
            engine.clock_s += 1.5
        world.holds = rng.random() < 0.1
        world.is_hung = rng.random() < 0.05
        world.refuses_epochs = rng.random() < 0.2
        world.rooms = {77} if rng.random() < 0.7 else set()
        engine.is_slow = rng.random() < 0.3
        engine.has_no_blocks = rng.random() < 0.1
        engine.is_busy = rng.random() < 0.2
        if rng.random() < 0.08:
            if rng.random() < 0.5:
                for request in list(engine.running):
                    engine.preempt(request)
            assert engine.update_weights()
        elif rng.random() < 0.06:
            # Without a reset: that comes later, or not.
            rng.choice([engine.half.weights_change, engine.half.weights_go])("a call")
            world.weights += 1
        engine.step()
        world.check_foreign()
    if world.is_down:
        world.start(same_memory=True)
    engine.settle()
    assert not world.wrong, "KV of other weights was shared"
    return engine.loaded_tokens, world.epoch


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_nothing_is_loaded_that_other_weights_computed(seed):
    walk(seed)


def test_the_walks_do_load_and_do_begin_epochs():
    """The negative control."""
    found = [walk(seed) for seed in range(100, 110)]
    assert sum(n for n, _ in found) > 0
    assert sum(n for _, n in found) > 0


# ---- weights that are changed without one --------------------------------------------------------


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_weights_that_are_changed_without_a_reset(state):
    """By a call of all workers: nothing that is here, or comes later, is of the name any more."""
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    state(engine)
    assert engine.half.weights_change("reload_weights")
    world.weights += 1
    before, cached = engine.loaded_tokens, len(world.cached)
    engine.is_slow = engine.is_busy = engine.has_no_blocks = world.holds = False
    engine.steps(8)
    engine.finish(engine.requests["r1"])
    goes_without(engine, 50)
    assert engine.loaded_tokens == before, "it was loaded from KV of former weights"
    assert len(world.cached) == cached, "KV of these is found under the name of those"
    assert engine.half.flush()
    engine.steps(3)
    is_used_again(engine)
    engine.settle()
    assert not world.wrong
    assert not world.handed


def test_what_is_loaded_behind_a_reset_is_of_the_weights_of_before_a_change_as_what_is_computed():
    """Of another engine, that goes on with them: vLLM finds it in its own cache from then on."""
    engine = WorldEngine(World(), reserve_tokens=8)
    warm(engine)
    engine.half.changes.has_computed = False
    loading(engine)
    assert any(orders.loads for orders, _ in engine.queue)
    assert engine.half.weights_change("reload_weights")


def test_what_another_connector_loads_beside_the_steps_is_of_before_a_change_too():
    """As NIXL does: no step computes meanwhile, and vLLM's own cache has it once it is there."""
    engine = WorldEngine(World(), reserve_tokens=8)
    warm(engine)
    assert engine.half.flush()
    engine.steps(3)
    assert not engine.half.changes.has_computed
    request = engine.add(Request(60, PROMPT))
    engine.half.given_blocks(request, 0)
    engine.half.step({})
    assert engine.half.weights_change("reload_weights")


def test_weights_that_are_changed_before_anything_is_computed_need_no_reset():
    changes = ReplacedWeights(ConnectorLog(lambda: 0.0))
    assert not changes.changed("reload_weights")
    assert not changes.why_alone
    changes.has_computed = True
    assert changes.changed("reload_weights")
    assert changes.why_alone == OTHER_WEIGHTS
    changes.own_reset(is_done=True)
    assert changes.why_alone == OTHER_WEIGHTS, "kvd was not reset"
    changes.reset()
    assert not changes.why_alone
    assert not changes.changed("reload_weights")


@pytest.mark.parametrize("is_reset", [True, False], ids=["reset", "not reset"])
def test_what_is_computed_while_weights_are_away_is_nobodys(is_reset):
    """As where an engine has slept at level 2, and serves before others are loaded."""
    world = World()
    engine = WorldEngine(world, reserve_tokens=8)
    warm(engine)
    if is_reset:
        assert engine.half.flush()
        engine.steps(3)
    engine.half.weights_go("sleep at level 2")
    world.weights += 1
    cached = len(world.cached)
    goes_without(engine, 50)
    assert engine.half.flush()
    engine.steps(3)
    goes_without(engine, 53)
    assert len(world.cached) == cached, "KV of no weights is found under a name"
    assert engine.half.flush()
    engine.steps(3)
    assert not engine.half.weights_change("reload_weights"), "nothing was computed since the reset"
    world.weights += 1
    is_used_again(engine)
    engine.settle()
    assert not world.wrong


def test_weights_that_come_back_behind_what_was_computed_without_them_need_a_reset():
    changes = ReplacedWeights(ConnectorLog(lambda: 0.0))
    changes.given_away("sleep at level 2")
    assert changes.why_alone == NO_WEIGHTS
    assert not changes.changed("reload_weights")
    assert not changes.why_alone
    changes.given_away("sleep at level 2")
    changes.has_computed = True
    assert changes.changed("reload_weights")
    assert changes.why_alone == OTHER_WEIGHTS
    changes.reset()
    assert not changes.why_alone


def test_a_reset_that_vllm_could_not_do_itself_is_none_until_it_can():
    changes = ReplacedWeights(ConnectorLog(lambda: 0.0))
    changes.has_computed = True
    changes.own_reset(is_done=False)
    assert not changes.why_alone, "nobody has asked kvd for one"
    changes.reset()
    assert changes.why_alone == OLD_BLOCKS
    assert changes.changed("reload_weights")
    changes.own_reset(is_done=True)
    assert changes.why_alone == OTHER_WEIGHTS
    changes.reset()
    assert not changes.why_alone
