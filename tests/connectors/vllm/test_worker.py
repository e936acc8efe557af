"""The workers' half by itself: whose orders it obeys, and which blocks are pages."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvd.client import Code, KvdError, LeaseKey
from kvd.client.mover.engine_memory import block_layout
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.beside import BesideTask
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import CopyOrder, StepOrders, StepReport
from kvd.connectors.vllm.worker import JOIN_WITHIN_S, REJOIN_S, SAVE_WITHIN_S, WorkerHalf
from tests.connectors.vllm.world import BLOCK, SLOT, Layer, World, refusal

NOBODY = VllmOptions(endpoint="ipc:///nowhere/kvd/client.sock")


def key_of(session, incarnation):
    return LeaseKey(session=session, incarnation=incarnation, lease=1, version=1)


class Rank:
    """One worker, its blocks, and the world that it joins."""

    def __init__(self, open_session=None):
        self.clock_s = 0.0
        self.world = World()
        self.node = self.world.connect()
        self.layers = {"a": Layer(), "b": Layer()}
        self.late = []
        self.is_late = False
        self.half = WorkerHalf(
            NOBODY,
            block_size=BLOCK,
            open_session=open_session or self.world.join,
            now_s=lambda: self.clock_s,
            start=self.start,
        )
        self.half.register(self.layers)

    def start(self, work):
        if self.is_late:
            self.late.append(work)
        else:
            work()

    @property
    def key(self):
        return key_of(self.node.session, self.node.incarnation)

    def step(self, *, loads=(), saves=(), number=1, **more):
        told = {
            "token": self.node.token,
            "incarnation": self.node.incarnation,
            "session": self.node.session,
        } | more
        orders = StepOrders(number=number, loads=loads, saves=saves, **told)
        self.half.load(orders)
        self.half.save(orders)
        return self.half.take_report()

    def order(self, **more):
        told = {
            "request": "r1",
            "key": self.key,
            "pages": (3, 4),
            "blocks": (7, 9),
            "upto_tokens": 2 * BLOCK,
        }
        return CopyOrder(**(told | more))

    def is_written(self):
        return any(layer.any() for layer in self.world.memory)


@pytest.fixture
def rank():
    rank = Rank()
    rank.layers["a"].array[7] = 1
    rank.layers["b"].array[9] = 2
    return rank


def test_blocks_come_to_pages_and_back(rank):
    report = rank.step(saves=(rank.order(),))
    assert (report.saved, report.lost, report.again) == ({"r1": 8}, set(), set())
    assert (rank.world.memory[0][3] == 1).all()
    assert (rank.world.memory[1][4] == 2).all()
    rank.step(loads=(rank.order(blocks=(20, 21)),), number=2)
    assert (rank.layers["a"].array[20] == 1).all()
    assert rank.half.take_results() == ({"r1"}, set())
    assert rank.half.counts.saved_bytes == rank.half.counts.loaded_bytes == 4 * BLOCK * SLOT


@pytest.mark.parametrize("where", ["join", "copy", "thread"])
def test_a_mistake_ends_no_step_and_everybody_is_heard_of(rank, where, monkeypatch):
    def mistaken(*_):
        raise KeyError("a bug")

    match where:
        case "join":
            rank.half._open = mistaken
        case "copy":
            monkeypatch.setattr(layout, "copy_rows", mistaken)
        case "thread":
            monkeypatch.setattr(rank.half._join, "follow", mistaken)
    copies = (rank.order(), rank.order(request="r2", pages=(5, 6)))
    report = rank.step(saves=copies, loads=copies, failed=("r3",))
    assert report.number == 1
    assert (report.saved, report.lost | report.again) == ({}, {"r1", "r2"})
    assert rank.half.take_results() == ({"r1", "r2", "r3"}, {"r1", "r2", "r3"})
    monkeypatch.undo()
    # It is told, and goes on.
    rank.half._open = rank.world.join
    rank.clock_s += REJOIN_S
    assert rank.step(saves=copies, number=2).saved == {"r1": 8, "r2": 8}
    assert rank.half.take_results() == (set(), set())


@pytest.mark.parametrize(
    ("session", "life"),
    [(0, ""), (2, "life 1"), (1, "life 2"), (1, "life 0")],
    ids=["none", "other", "later", "earlier"],
)
def test_an_order_of_another_session_is_not_obeyed(rank, session, life):
    rank.step(saves=(rank.order(pages=(1, 2)),))
    for layer in rank.world.memory:
        layer[:] = 0
    copy = rank.order(key=key_of(session, life))
    report = rank.step(saves=(copy,), loads=(copy,), number=2)
    assert not report.saved
    assert report.again == {"r1"}
    assert rank.half.take_results() == ({"r1"}, {"r1"})
    assert not rank.is_written()


def test_an_order_of_before_a_restart_with_the_same_memory_is_not_obeyed(rank):
    rank.step(saves=(rank.order(pages=(1, 2)),))
    former = rank.order()
    rank.world.kill()
    rank.world.start(same_memory=True)
    report = rank.step(saves=(former,), number=2)
    assert not report.saved
    assert (rank.world.memory[0][3] == 0).all()


@pytest.mark.parametrize("same_memory", [False, True])
def test_what_was_copied_while_the_daemon_was_restarted_is_not_believed(
    rank, same_memory, monkeypatch
):
    rank.step(saves=(rank.order(pages=(1, 2)),))
    copy = layout.copy_rows

    def copied(*rows):
        rank.world.kill()
        rank.world.start(same_memory=same_memory)
        return copy(*rows)

    monkeypatch.setattr(layout, "copy_rows", copied)
    order = rank.order()
    report = rank.step(saves=(order,), number=2)
    assert not report.saved
    rank.step(loads=(rank.order(key=key_of(1, f"life {rank.world.life}")),), number=3)
    assert rank.half.take_results() == ({"r1"}, {"r1"})


def test_a_session_that_is_being_joined_is_waited_for_by_its_first_step_alone(rank):
    rank.is_late = True
    took_s = []
    for number in (1, 2, 3):
        began_s = time.perf_counter()
        loads = (rank.order(request="r2"),) if number == 1 else ()
        report = rank.step(saves=(rank.order(),), loads=loads, number=number)
        took_s.append(time.perf_counter() - began_s)
        assert report.again == {"r1"}
        assert rank.half.take_results() == (set(), set())
    assert took_s[0] < 0.5
    assert min(took_s[1:]) < 0.02
    rank.late.pop()()
    report = rank.step(saves=(rank.order(),), number=4)
    assert report.saved == {"r1": 8}
    assert rank.half.take_results() == ({"r2"}, set())


def test_a_session_that_cannot_be_joined_fails_loads_soon_and_loses_saves_later():
    def refuse(token):
        raise refusal(Code.UNREACHABLE)

    rank = Rank(refuse)
    assert rank.step(saves=(rank.order(),), loads=(rank.order(request="r2"),)).again == {"r1"}
    rank.clock_s += JOIN_WITHIN_S
    rank.step(number=2)
    assert rank.half.take_results() == ({"r2"}, {"r2"})
    rank.clock_s += SAVE_WITHIN_S
    assert rank.step(saves=(rank.order(),), number=3).lost == {"r1"}


def test_a_pool_that_does_not_fit_is_told_of():
    def refuse(token):
        raise refusal(Code.LAYOUT_MISMATCH)

    rank = Rank(refuse)
    report = rank.step(saves=(rank.order(),))
    assert report.unfit
    assert report.lost == {"r1"}


def test_it_leaves_when_there_is_no_session_any_more(rank):
    rank.step(saves=(rank.order(),))
    assert rank.node.workers
    rank.step(token=b"", session=0, incarnation="", number=2)
    assert not rank.node.workers


def test_requests_that_wait_or_are_held_hear_of_it_once(rank):
    assert rank.step(failed=("r1",), freed=("r2",)) is None
    assert rank.half.take_results() == ({"r1"}, {"r1"})
    assert rank.half.take_freed() == {"r2"}
    assert rank.half.take_results() == (set(), set())
    assert rank.half.take_freed() == set()


def test_of_several_ranks_the_least_counts():
    mine = StepReport({"a": 8, "b": 8, "c": 8}, set(), number=4)
    other = StepReport({"a": 4}, {"b"}, again={"c"}, number=4)
    both = mine.with_rank(other)
    assert (both.saved, both.lost, both.again, both.number) == ({"a": 4}, {"b"}, {"c"}, 4)


def test_an_outcome_that_nobody_wants_any_more_is_disposed_of():
    disposed, works = [], []
    task = BesideTask(lambda: 5, disposed.append, works.append)
    task.abandon()
    works.pop()()
    assert disposed == [5]
    task = BesideTask(lambda: 6, disposed.append, lambda work: work())
    task.abandon()
    assert disposed == [5, 6]

    def no_thread(work):
        raise RuntimeError("can't start new thread")

    never = BesideTask(lambda: 5, start=no_thread)
    assert never.ended()
    with pytest.raises(RuntimeError):
        never.take()
    failing = BesideTask(lambda: 1 // 0, start=lambda work: work())
    with pytest.raises(ZeroDivisionError):
        failing.take()


class Shaped:
    """A tensor of that shape, dense or with these strides."""

    def __init__(self, shape, strides=None, address=4096, device="cpu"):
        self.shape = shape
        self.device = device
        self._strides = strides or [int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
        self._address = address

    def stride(self):
        return self._strides

    def element_size(self):
        return 4

    def data_ptr(self):
        return self._address


def test_the_blocks_of_a_layer_are_found():
    found = block_layout("a", Shaped((10, 2, 16, 4, 32)))
    assert (found.n_blocks, found.block_bytes, found.step_bytes) == (10, 16384, 16384)
    # Other layers between its blocks.
    wide = block_layout("a", Shaped((10, 16, 4), (256, 4, 1)))
    assert (wide.block_bytes, wide.step_bytes) == (256, 1024)
    shared = layout.block_layouts(
        {"a": Shaped((4, 8)), "b": Shaped((4, 8)), "c": Shaped((4, 8), None, 99)}
    )
    assert len(shared) == 2


@pytest.mark.parametrize(
    "layers",
    [
        {"a": Shaped((2, 10, 16, 4), (64, 128, 4, 1))},  # keys of all blocks, then values
        {"a": Shaped((10,))},
        {"a": Shaped((4, 8)), "b": Shaped((4, 16), None, 99)},
    ],
)
def test_blocks_that_are_no_pages_are_refused(layers):
    with pytest.raises(KvdError) as refused:
        layout.block_layouts(layers)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value


def of_kind(name, **fields):
    return type(name, (), fields)()


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_one_group_of_layers_whose_blocks_stay_is_served(kind):
    layout.check_groups([of_kind(kind)])
    layout.check_groups([of_kind(kind, non_causal=False)])


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        # vLLM takes blocks of a request away while it runs, and puts its null block there: what is
        # saved in their place would be found by shorter prompts, as their KV.
        (["SlidingWindowSpec"], "SlidingWindowSpec"),
        (["ChunkedLocalAttentionSpec"], "ChunkedLocalAttentionSpec"),
        (["RSWASpec"], "RSWASpec"),
        (["MambaSpec"], "MambaSpec"),
        (["SpecOfALaterVersion"], "SpecOfALaterVersion"),
        (["FullAttentionSpec", "SlidingWindowSpec"], "2 KV cache groups"),
        ([], "0 KV cache groups"),
    ],
)
def test_layers_whose_blocks_do_not_stay_are_refused(kinds, told):
    with pytest.raises(KvdError, match=told) as refused:
        layout.check_groups([of_kind(kind) for kind in kinds])
    assert refused.value.code == Code.LAYOUT_MISMATCH.value


def test_layers_that_attend_to_later_tokens_are_refused():
    """VLLM turns its own prefix cache off for these: a prefix has no KV of its own."""
    with pytest.raises(KvdError, match="attend to later tokens"):
        layout.check_groups([of_kind("FullAttentionSpec", non_causal=True)])


def test_a_block_whose_tokens_are_shared_among_ranks_is_refused():
    with pytest.raises(KvdError, match="2 ranks share the tokens of a block"):
        layout.check_groups([of_kind("FullAttentionSpec")], context_ranks=2)


@pytest.mark.parametrize("device", ["cuda:0", "xpu:1", "hpu", "meta"])
def test_an_engine_whose_blocks_are_on_a_device_does_not_start(device):
    """Its addresses are none of this process: a copy would end the engine."""
    half = WorkerHalf(NOBODY, block_size=BLOCK, open_session=lambda token: pytest.fail("joined"))
    on_device = Shaped((4, 8), device=device)
    with pytest.raises(KvdError, match=f"the KV cache is on {device} .layer b.") as caught:
        half.register({"a": Shaped((4, 8)), "b": on_device})
    assert caught.value.code == Code.LAYOUT_MISMATCH.value
    assert "run this engine without kvd" in str(caught.value)


def test_rows_are_copied_in_runs():
    assert layout.runs((1, 2, 3, 9), (5, 6, 8, 9)) == [(1, 5, 2), (3, 8, 1), (9, 9, 1)]
    there = [np.zeros((10, 4), np.uint64)]
    here = [np.arange(40, dtype=np.uint64).reshape(10, 4)]
    assert layout.copy_rows(there, here, (1, 2, 5), (3, 4, 9)) == 3 * 32
    assert (there[0][[1, 2, 5]] == here[0][[3, 4, 9]]).all()
    assert there[0].any(axis=1).sum() == 3
