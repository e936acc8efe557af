"""What vLLM reads for its adapters decides whose KV is saved, sent and gone on from."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from kvd.connectors.vllm.orders import AdapterWeights, StepReport
from kvd.connectors.vllm.weights import Adapters, ReadAdapters, stamp_of
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.test_restarts import (
    PROMPT,
    STATES,
    come_and_go,
    computing,
    filled,
    found,
    saving,
    warm,
)
from tests.connectors.vllm.test_weights import LATER, known_as, lora
from tests.connectors.vllm.world import BLOCK, Adapter, World, WorldEngine


@pytest.fixture
def files(tmp_path):
    """An adapter, and another one to put in its place."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode() * 9)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return tmp_path


def written_over(mine, other):
    (mine / "adapter_model.safetensors").write_bytes(b"x" * 36)


def renamed(mine, other):
    os.replace(other / "adapter_model.safetensors", mine / "adapter_model.safetensors")


def linked(mine, other):
    os.rename(mine, f"{mine}.former")
    os.symlink(other, mine)


def moved(mine, other):
    """A directory above it: its files, and the way to them, are as they were."""
    shutil.copytree(mine, other / "mine")
    os.rename(mine, f"{mine}.former")
    os.rename(other / "mine", mine)


@pytest.mark.parametrize("replace", [written_over, renamed, linked, moved])
def test_other_files_at_a_path_have_another_stamp(files, replace):
    before = stamp_of(str(files / "mine"))
    assert stamp_of(str(files / "mine")) == before
    replace(files / "mine", files / "other")
    assert stamp_of(str(files / "mine")) != before


def weights(path, number=1):
    return AdapterWeights(number, stamp_of(str(path)))


def read(adapters, path, number=1, name="ad", during=lambda: None):
    return adapters.read(lora(path, name, number), during)


def test_what_was_not_seen_to_be_read_is_not_known(files):
    adapters, mine = ReadAdapters(), weights(files / "mine")
    assert not adapters.has(mine)
    assert read(adapters, files / "mine", during=lambda: "read") == "read"
    assert adapters.has(mine)
    assert adapters.take() == {1: mine.stamp}
    assert not adapters.take()


def test_a_number_for_which_unlike_files_were_read_is_known_by_none(files):
    adapters, mine = ReadAdapters(), weights(files / "mine")
    read(adapters, files / "mine")
    read(adapters, files / "mine")
    assert adapters.has(mine)
    read(adapters, files / "other")
    for one in (mine, weights(files / "other")):
        assert not adapters.has(one)
    read(adapters, files / "mine")
    assert not adapters.has(mine), "a step between may have computed with the other ones"
    assert adapters.take() == {1: ""}


def test_numbers_that_vllms_own_cache_does_not_tell_apart_are_known_while_all_have_the_same(files):
    """Both may be in one step, which reads other files for one, and saves for the other."""
    adapters, mine = ReadAdapters(), files / "mine"
    known = [weights(mine, number) for number in (1, 2, 3)]
    read(adapters, mine, 1)
    read(adapters, mine, 2)
    read(adapters, mine, 3, "apart")
    assert all(map(adapters.has, known))
    assert adapters.take() == {1: known[0].stamp, 2: known[0].stamp, 3: known[0].stamp}
    renamed(mine, files / "other")
    read(adapters, mine, 4)
    assert [*map(adapters.has, known)] == [False, False, True]
    assert not adapters.has(weights(mine, 4))
    assert adapters.take() == {1: "", 2: "", 4: ""}


def test_one_that_is_loaded_in_place_leaves_its_kv_to_those_of_its_former_path(files):
    adapters, mine = ReadAdapters(), weights(files / "mine", 2)
    read(adapters, files / "mine", 1)
    read(adapters, files / "mine", 2)
    read(adapters, files / "other", 1)
    assert not adapters.has(mine)
    assert adapters.take() == {1: "", 2: ""}


@pytest.mark.parametrize("by_name", [True, False])
def test_where_vllms_own_cache_goes_by_names_alone_a_path_tells_nobody_apart(files, by_name):
    """As in 0.28."""
    adapters, mine = ReadAdapters(), weights(files / "mine")
    adapters.by_name = by_name
    read(adapters, files / "mine", 1)
    read(adapters, files / "other", 2)
    assert adapters.has(mine) is not by_name


def test_files_that_change_while_they_are_read_are_nobodys(files):
    adapters = ReadAdapters()
    read(adapters, files / "mine", during=lambda: written_over(files / "mine", None))
    assert not adapters.has(weights(files / "mine"))


def test_an_adapter_that_vllm_fails_to_read_is_what_it_was(files):
    adapters, mine = ReadAdapters(), weights(files / "mine")
    read(adapters, files / "mine")
    with pytest.raises(ZeroDivisionError):
        read(adapters, files / "mine", during=lambda: 1 / 0)
    assert adapters.has(mine)


def test_ranks_that_have_read_unlike_files_have_read_none():
    one, other = StepReport(adapters={1: "a", 2: "b"}), StepReport(adapters={1: "a", 2: "c"})
    assert one.with_rank(other).adapters == {1: "a", 2: ""}
    assert one.with_rank(StepReport()).adapters == {1: "a", 2: "b"}


# ---- the scheduler's half of it ------------------------------------------------------------------


@pytest.fixture
def adapters():
    made = Adapters(since_ns=LATER, rules="r", room=2)
    made.forgotten, made.doubted, made.here = [], [], set()
    made.on_other_weights = made.forgotten.append
    made.on_doubt = lambda numbers: made.doubted.append(sorted(numbers))
    made.numbers_here = lambda: made.here
    yield made
    made.close()


def test_vllm_has_read_what_the_name_stands_for(files, adapters):
    mine = weights(files / "mine")
    name = known_as(adapters, lora(files / "mine"))
    adapters.read_by_workers({1: mine.stamp})
    assert known_as(adapters, lora(files / "mine")) == name
    assert not adapters.forgotten
    assert not adapters.flaws


def test_vllm_has_read_other_files_behind_the_name(files, adapters):
    assert known_as(adapters, lora(files / "mine"))
    adapters.read_by_workers({1: "other"})
    assert adapters.forgotten == [1]
    assert "vLLM has read other files" in adapters.flaws.pop("ad")
    adapters.read_by_workers({1: "another"})
    assert adapters.forgotten == [1]
    assert known_as(adapters, lora(files / "mine")) is None
    assert not adapters.flaws, "it is said once"


def test_vllm_has_read_other_files_before_the_name_was_asked_for(files, adapters):
    adapters.read_by_workers({1: "other"})
    assert known_as(adapters, lora(files / "mine")) is None
    assert "vLLM has read other files" in adapters.flaws["ad"]
    assert not adapters.forgotten, "no request has that name"


def has_read(adapters, files, *numbers, name="ad"):
    """Each is asked for, and read; what it is."""
    for number in numbers:
        adapters.ask(lora(files / "mine", name if number == 1 else f"ad-{number}", number))
    adapters.read_by_workers({n: stamp_of(str(files / "mine")) for n in numbers})
    adapters.doubted.clear()
    return weights(files / "mine", numbers[0])


def test_an_adapter_stays_where_vllm_has_room_for_all_that_are_used(files, adapters):
    mine = weights(files / "mine")
    adapters.ask(lora(files / "mine"))
    assert not adapters.stays(mine), "it is not read"
    adapters.read_by_workers({1: mine.stamp})
    assert adapters.stays(mine)
    assert not adapters.stays(AdapterWeights(1, "other"))
    adapters.doubted.clear()
    adapters.ask(lora(files / "mine", "second", 2))
    assert adapters.stays(mine)
    assert not adapters.doubted
    adapters.ask(lora(files / "mine", "third", 3))
    assert not adapters.stays(mine), "its first step drops another one"
    assert adapters.doubted == [[1, 2, 3]], "it is told before that"


def test_one_more_that_its_user_loads_ends_it_at_once(files, adapters):
    mine = has_read(adapters, files, 1, 2)
    adapters.loads(lora(files / "other", "third", 3))
    assert adapters.doubted[0] == [1, 2, 3]
    assert not adapters.stays(mine)


def test_an_adapter_that_its_user_has_dropped_does_not_stay_and_leaves_its_room(files, adapters):
    mine, second = has_read(adapters, files, 1, 2), weights(files / "mine", 2)
    adapters.removes(1)
    assert adapters.doubted == [[1]]
    assert not adapters.stays(mine)
    adapters.loads(lora(files / "mine", "third", 3))
    assert adapters.stays(second), "there is room for it"
    adapters.ask(lora(files / "mine"))
    assert not adapters.stays(second), "the first one is read again"


def test_one_that_is_dropped_while_it_has_requests_is_read_again_and_has_its_room(files, adapters):
    has_read(adapters, files, 1, 2)
    adapters.here = {1}
    adapters.removes(1)
    adapters.loads(lora(files / "mine", "third", 3))
    assert not adapters.stays(weights(files / "mine", 2))


def test_what_is_loaded_for_one_is_found_by_those_of_its_name_and_path(files, adapters):
    """One of them may read other files in its first step, and go on from that."""
    mine = has_read(adapters, files, 1)
    adapters.here = {1, 4}
    adapters.ask(lora(files / "mine", number=4))
    assert adapters.doubted == [[1]]
    assert not adapters.stays(mine)
    adapters.here = {1}
    assert adapters.stays(mine), "it has left"
    adapters.ask(lora(files / "mine", number=4))
    assert adapters.doubted == [[1], [1]]
    adapters.here = {1, 4}
    adapters.read_by_workers({4: mine.stamp})
    assert adapters.stays(mine)
    adapters.removes(4)
    assert adapters.doubted[2:] == [[1, 4]]
    assert not adapters.stays(mine)


def test_where_all_may_go_none_stays(files, adapters):
    """As by ``reload_weights``, which drops them."""
    mine = has_read(adapters, files, 1)
    adapters.all_go()
    assert adapters.doubted == [[1]]
    assert not adapters.stays(mine)


# ---- a request of it -----------------------------------------------------------------------------


class ReadingEngine(WorldEngine):
    """Has an adapter, and reads other files for it when it is told to, within a step."""

    def __init__(self, world, files, **options):
        super().__init__(world, **options)
        self.adapter = Adapter()
        self.adapter.weights = weights(files / "mine")
        read(self.worker.adapters, files / "mine")
        self.half.adapter_stays = lambda adapter: True

    def add(self, request, extra=(), lora=None):
        return super().add(request, extra, self.adapter)

    def heard(self, report):
        if report is not None and report.adapters.get(1) == "":
            self.half.forget_adapter(1)


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_its_files_are_read_anew_in_any_state_of_a_request(files, state):
    """That it may be is heard of before; its workers see it, before what they compute is saved."""
    world = World()
    engine = ReadingEngine(world, files, reserve_tokens=8)
    warm(engine)
    state(engine)
    shares = len(world.cached)
    engine.half.doubt_adapters({1})
    world.weights += 1
    read(engine.worker.adapters, files / "other")
    assert len(world.cached) == shares
    engine.is_slow = engine.is_busy = engine.has_no_blocks = world.holds = False
    engine.steps(8)
    request = engine.requests["r1"]
    if request in engine.running:
        request.all_token_ids += range(1000, 1000 + 3 * BLOCK)
        engine.steps(8)
        engine.finish(request)
    engine.settle()
    assert not world.wrong, "KV of other weights was shared"


@pytest.mark.parametrize("state", [computing, saving, found], ids=lambda one: one.__name__)
def test_whoever_has_run_or_has_nothing_yet_goes_on_as_it_is(files, state):
    engine = ReadingEngine(World(), files, reserve_tokens=8)
    warm(engine)
    state(engine)
    stage = engine.half._requests.here["r1"].stage
    engine.half.doubt_adapters({1})
    assert engine.half._requests.here["r1"].stage is stage
    engine.settle()


def test_another_adapter_is_no_reason(files):
    engine = ReadingEngine(World(), files, reserve_tokens=8)
    warm(engine)
    filled(engine)
    before = engine.loaded_tokens
    engine.half.doubt_adapters({2, 3})
    engine.is_busy = False
    engine.step()
    assert engine.loaded_tokens == before + 28
    assert engine.half.adapters_here() == {1}
    engine.settle()


def test_nothing_is_loaded_for_an_adapter_that_does_not_stay(files):
    engine = ReadingEngine(World(), files, reserve_tokens=8)
    warm(engine)
    engine.half.adapter_stays = lambda adapter: False
    engine.add(Request(1, PROMPT))
    engine.steps(8)
    assert engine.requests["r1"] in engine.running
    assert not engine.loaded_tokens
    engine.settle()


def walk(files, seed):
    """Its files are read anew once, and often it may be; how much was loaded, and dropped."""
    rng = random.Random(seed)
    world = World()
    engine = ReadingEngine(world, files, chunk=rng.choice([4, 8, 64]), reserve_tokens=8)
    dropped, turn = 0, rng.randrange(20, 80)
    for number in range(1, 90):
        come_and_go(rng, engine, number)
        if rng.random() < 0.2 and len(engine.blocks) < 10:
            engine.add(Request(1000 + number, PROMPT))
        world.holds = rng.random() < 0.1
        engine.is_slow = rng.random() < 0.3
        engine.is_busy = rng.random() < 0.3 or turn - 10 < number < turn
        engine.has_no_blocks = rng.random() < 0.1
        if rng.random() < 0.2 or number == turn:
            engine.half.doubt_adapters({1})
            dropped += len(engine.counted.taken)
        if number == turn:
            world.weights += 1
            engine.half.adapter_stays = lambda adapter: False
            read(engine.worker.adapters, files / "other")
            engine.adapter.is_unknown = True
            # In this very step they have their turn.
            engine.is_slow = engine.is_busy = False
        engine.step()
        world.check_foreign()
    engine.settle()
    return engine.loaded_tokens, dropped


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_is_gone_on_from_that_other_files_computed(files, seed):
    walk(files, seed)


def test_the_walks_do_load_and_do_drop(files):
    """The negative control."""
    found = [walk(files, seed) for seed in range(100, 105)]
    assert sum(n for n, _ in found) > 0
    assert sum(n for _, n in found) > 0


def test_what_vllm_reads_at_its_users_word_is_said_in_a_step_of_its_own():
    """Else the first request of it comes before that."""
    engine = WorldEngine(World())
    engine.step()
    assert not engine.half.has_work
    engine.half.wants_word = True
    assert engine.half.has_work
    engine.step()
    assert not engine.half.has_work
    engine.settle()
