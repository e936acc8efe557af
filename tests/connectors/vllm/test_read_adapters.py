"""What vLLM reads for its adapters decides whose KV is saved, sent and gone on from."""

from __future__ import annotations

import os
import shutil

import pytest

from kvd.connectors.vllm.orders import AdapterWeights, BegunRequest, StepReport
from kvd.connectors.vllm.weights import Adapters, ReadAdapters, stamp_of
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.test_resets import PROMPT, STATES, warm
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


def read(adapters, path, number=1, during=lambda: None):
    return adapters.read(lora(path, number=number), during)


def test_what_was_not_seen_to_be_read_is_not_known(files):
    adapters, mine = ReadAdapters(), weights(files / "mine")
    assert not adapters.has(mine)
    assert adapters.may_have(mine)
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
        assert not adapters.may_have(one)
    read(adapters, files / "mine")
    assert not adapters.may_have(mine), "a step between may have computed with the other ones"
    begun = [BegunRequest(mine, (3, 4)), BegunRequest(weights(files / "mine", 2), (5,))]
    assert adapters.others(begun) == {3, 4, 5}
    assert adapters.take() == {1: ""}


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
    made.forgotten = []
    made.on_other_weights = made.forgotten.append
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


def test_an_adapter_stays_where_vllm_has_room_for_all_that_it_has_read(files, adapters):
    mine = weights(files / "mine")
    assert not adapters.stays(mine)
    adapters.read_by_workers({1: mine.stamp, 2: "b"})
    assert adapters.stays(mine)
    assert not adapters.stays(AdapterWeights(1, "other"))
    adapters.removes(2)
    assert adapters.stays(mine)
    adapters.removes(1)
    assert not adapters.stays(mine)
    assert adapters.stays(AdapterWeights(2, "b")) is False


def test_no_adapter_stays_where_vllm_may_have_to_drop_one(files, adapters):
    mine = weights(files / "mine")
    adapters.read_by_workers({1: mine.stamp, 2: "b", 3: "c"})
    assert not adapters.stays(mine)


# ---- a request of it -----------------------------------------------------------------------------


class ReadingEngine(WorldEngine):
    """Has an adapter, and reads other files for it when it is told to, within a step."""

    def __init__(self, world, files, **options):
        super().__init__(world, **options)
        self.adapter = Adapter()
        self.adapter.weights = weights(files / "mine")
        read(self.worker.adapters, files / "mine")

    def add(self, request, extra=(), lora=None):
        return super().add(request, extra, self.adapter)

    def heard(self, report):
        if report is not None and report.adapters.get(1) == "":
            self.half.forget_adapter(1)


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_its_files_are_read_anew_in_any_state_of_a_request(files, state):
    """vLLM says so to nobody: its workers see it, before what they compute is saved."""
    world = World()
    engine = ReadingEngine(world, files, reserve_tokens=8)
    warm(engine)
    state(engine)
    shares = len(world.cached)
    world.weights += 1
    read(engine.worker.adapters, files / "other")
    assert len(world.cached) == shares
    engine.is_slow = engine.has_no_blocks = world.holds = False
    engine.steps(8)
    request = engine.requests["r1"]
    if request in engine.running:
        request.all_token_ids += range(1000, 1000 + 3 * BLOCK)
        engine.steps(8)
        engine.finish(request)
    engine.settle()
    assert not world.wrong, "KV of other weights was shared"


def test_what_it_goes_on_from_is_told_in_its_first_step(files):
    engine = ReadingEngine(World(), files, reserve_tokens=8)
    warm(engine)
    seen = []
    load = engine.worker.load
    engine.worker.load = lambda orders: seen.append(orders.begun) or load(orders)
    engine.add(Request(7, PROMPT))
    engine.steps(6)
    (begun,) = [one for begun in seen for one in begun]
    assert begun.adapter == engine.adapter.weights
    blocks = engine.blocks["r7"]
    assert begun.blocks == tuple(blocks[: len(begun.blocks)])
    assert begun.blocks
    assert not engine.worker.take_unlike()
    engine.half.takes_back = False
    engine.finish(engine.requests["r7"])
    engine.steps(2)
    engine.add(Request(8, PROMPT))
    engine.steps(6)
    assert len([one for begun in seen for one in begun]) == 1
    assert engine.requests["r8"].num_computed_tokens
    engine.settle()
