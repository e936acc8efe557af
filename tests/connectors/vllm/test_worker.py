"""The workers' half by itself: whose orders it obeys, and which blocks are pages."""

from __future__ import annotations

import threading
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

from kvd.client import Code, KvdError, LeaseKey, connect_sync
from kvd.client.mover.engine_memory import block_layout
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.beside import BesideTask
from kvd.connectors.vllm.joined import REJOIN_S
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import CopyOrder, StepOrders, StepReport
from kvd.connectors.vllm.worker import (
    ANSWER_WITHIN_S,
    JOIN_WITHIN_S,
    SAVE_WITHIN_S,
    RankCopy,
    WorkerHalf,
)
from tests.connectors.vllm.world import (
    BLOCK,
    SLOT,
    Layer,
    Stream,
    World,
    WorldBlocks,
    WorldLease,
    refusal,
)
from tests.support.daemons import one_daemon

NOBODY = VllmOptions(endpoint="ipc:///nowhere/kvd/client.sock")


def key_of(session, incarnation, lease=1):
    return LeaseKey(session=session, incarnation=incarnation, lease=lease, version=1)


class Rank:
    """One worker, its blocks, a lease of 12 pages, and the world that it joins."""

    def __init__(self, open_session=None):
        self.clock_s = 0.0
        self.world = World()
        self.node = self.world.connect()
        self.lease = self.world_lease()
        self.stream = Stream()
        self.layers = {"a": Layer(self.stream), "b": Layer(self.stream)}
        self.late = []
        self.is_late = False
        self.n_orders = 0
        self.half = WorkerHalf(
            NOBODY,
            block_size=BLOCK,
            open_session=open_session or self.world.join,
            now_s=lambda: self.clock_s,
            start=self.start,
        )
        self.half.register(self.layers)

    def world_lease(self):
        return WorldLease(self.node, range(12 * BLOCK), self.world.take(12), 0, "model")

    def start(self, work):
        if self.is_late:
            self.late.append(work)
        else:
            work()

    def orders(self, *, loads=(), saves=(), number=1, **more):
        told = {
            "token": self.node.token,
            "incarnation": self.node.incarnation,
            "session": self.node.session,
            "is_idle": True,
        } | more
        return StepOrders(number=number, loads=loads, saves=saves, **told)

    def begin(self, **more):
        """A step, before anything of it is copied."""
        orders = self.orders(**more)
        self.half.load(orders)
        self.half.save(orders)

    def answers(self):
        """What is said now: the orders that are done, and those that are not."""
        self.results = self.half.take_results()
        report = self.half.take_report() or StepReport()
        return set(report.done), set(report.failed)

    def step(self, **more):
        """A step, and as much of what it orders as can be copied."""
        self.begin(**more)
        self.stream.run()
        self.world.finish_copies()
        return self.answers()

    def order(self, *, first_page=0, blocks=(7, 9), **more):
        self.n_orders += 1
        told = {
            "number": self.n_orders,
            "request": "r1",
            "key": key_of(self.node.session, self.node.incarnation, self.lease.id),
            "first_page": first_page,
            "pages": tuple(self.lease.row[first_page : first_page + len(blocks)]),
            "blocks": (blocks,),
            "upto_tokens": (first_page + len(blocks)) * BLOCK,
        }
        return CopyOrder(**(told | more))

    def page(self, n, layer=0):
        return self.world.memory[layer][self.lease.row[n]]

    def is_written(self):
        return any(layer.any() for layer in self.world.memory)


@pytest.fixture
def rank():
    rank = Rank()
    rank.layers["a"].array[7] = 1
    rank.layers["b"].array[9] = 2
    yield rank
    assert not rank.world.wrong


def test_blocks_come_to_pages_and_back(rank):
    assert rank.step(saves=(rank.order(),)) == ({1}, set())
    assert (rank.page(0) == 1).all()
    assert (rank.page(1, layer=1) == 2).all()
    assert rank.step(loads=(rank.order(blocks=(20, 21)),), number=2) == ({2}, set())
    assert (rank.layers["a"].array[20] == 1).all()
    assert rank.results == ({"r1"}, set())
    assert rank.half.counts.saved_bytes == rank.half.counts.loaded_bytes == 4 * BLOCK * SLOT


def test_a_copy_is_answered_once_and_not_before_it_is_over(rank):
    rank.begin(saves=(rank.order(),), loads=(rank.order(first_page=4, blocks=(20,), request="r2"),))
    for turn in range(4):
        rank.stream.run()
        rank.world.turn()
        done, failed = rank.answers()
        assert not failed
        # The word of the daemon, a page each turn, and of a save its word again.
        assert done == {1: {2}, 3: {1}}.get(turn, set())
        assert rank.results == (({"r2"}, set()) if turn == 1 else (set(), set()))
        rank.begin(number=2 + turn)
    assert rank.answers() == (set(), set())


@pytest.mark.parametrize("is_load", [False, True])
def test_nothing_moves_before_what_was_computed_in_front_of_it(rank, is_load):
    """A save waits for what writes its blocks, a load for what reads them."""
    seen = []
    order = rank.order(blocks=(20,))
    memory = rank.page(0) if not is_load else rank.layers["a"].array[20]
    rank.page(0)[:] = 5
    rank.layers["a"].array[20] = 6
    before = memory.copy()
    rank.stream.begin(lambda: seen.append((memory == before).all()))
    rank.begin(**{"loads" if is_load else "saves": (order,)})
    rank.world.finish_copies()
    assert rank.answers() == (set(), set())
    rank.stream.run()
    assert seen == [True]
    rank.world.finish_copies()
    assert rank.answers() == ({1}, set())
    assert (memory != before).all()


@pytest.mark.parametrize("where", ["join", "copy", "end", "thread"])
def test_a_mistake_ends_no_step_and_everybody_is_heard_of(rank, where, monkeypatch):
    def mistaken(*_, **__):
        raise KeyError("a bug")

    match where:
        case "join":
            rank.half._open = mistaken
        case "copy":
            monkeypatch.setattr(WorldBlocks, "_begin", mistaken)
        case "end":
            monkeypatch.setattr(RankCopy, "is_done", mistaken)
        case "thread":
            monkeypatch.setattr(rank.half._join, "follow", mistaken)

    def orders():
        return {
            "saves": (rank.order(), rank.order(request="r2", first_page=2)),
            "loads": tuple(
                rank.order(request=f"r{n}", first_page=4 + n, blocks=(20 + n,)) for n in (1, 2)
            ),
        }

    failed = rank.step(**orders(), failed=("r3",))[1]
    failed |= rank.step(number=2)[1]
    rank.clock_s += SAVE_WITHIN_S
    failed |= rank.step(number=3)[1]
    assert failed == {1, 2, 3, 4}
    monkeypatch.undo()
    # It is told, and goes on.
    rank.half._open = rank.world.join
    rank.clock_s += REJOIN_S
    assert rank.step(**orders(), number=4)[0] == {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("session", "life"),
    [(0, ""), (2, "life 1"), (1, "life 2"), (1, "life 0")],
    ids=["none", "other", "later", "earlier"],
)
def test_an_order_of_another_session_is_not_obeyed(rank, session, life):
    rank.step()
    key = key_of(session, life, rank.lease.id)
    done, failed = rank.step(
        saves=(rank.order(key=key),),
        loads=(rank.order(key=key, first_page=4, blocks=(20, 21)),),
        number=2,
    )
    assert (done, failed) == (set(), {1, 2})
    assert rank.results == ({"r1"}, {"r1"})
    assert not rank.is_written()


def test_an_order_for_a_lease_that_ended_is_refused(rank):
    rank.world.drop(rank.lease)
    assert rank.step(saves=(rank.order(),)) == (set(), {1})
    assert not rank.is_written()


def test_an_order_of_before_a_restart_with_the_same_memory_is_not_obeyed(rank):
    rank.step()
    former = rank.order()
    rank.world.kill()
    rank.world.start(same_memory=True)
    assert rank.step(saves=(former,), number=2) == (set(), set()), "its rank may be late"
    rank.node.pump()
    assert rank.step(number=3) == (set(), {1})
    assert not rank.is_written()


@pytest.mark.parametrize("same_memory", [False, True])
@pytest.mark.parametrize("turns", range(5))
def test_what_was_copied_while_the_daemon_was_restarted_is_not_believed(rank, same_memory, turns):
    rank.step()
    rank.begin(
        saves=(rank.order(),), loads=(rank.order(first_page=4, blocks=(20, 21), request="r2"),)
    )
    rank.stream.run()
    for _ in range(turns):
        rank.world.turn()
    rank.world.kill()
    rank.world.start(same_memory=same_memory)
    rank.world.finish_copies()
    done, failed = rank.answers()
    assert failed == {1, 2} if turns < 4 else done | failed == {1, 2}
    assert rank.results[0] == {"r2"}


def test_orders_wait_for_a_session_that_is_being_joined_and_steps_do_not(rank):
    rank.is_late = True
    took_s = []
    for number in (1, 2, 3):
        began_s = time.perf_counter()
        loads = (rank.order(request="r2", first_page=4),) if number == 1 else ()
        saves = (rank.order(first_page=6, blocks=(20,)),) if number == 1 else ()
        assert rank.step(loads=loads, saves=saves, number=number) == (set(), set())
        took_s.append(time.perf_counter() - began_s)
    assert sorted(took_s)[1] < 0.02
    rank.late.pop()()
    assert rank.step(number=4) == ({1, 2}, set())
    assert rank.results == ({"r2"}, set())


def test_a_step_without_work_lets_the_session_be_joined_that_a_load_waits_for(rank, monkeypatch):
    monkeypatch.setattr("kvd.connectors.vllm.worker.IDLE_WAIT_S", 1.0)
    rank.is_late = True
    rank.begin(loads=(rank.order(),))
    (joins,) = rank.late
    threading.Timer(0.01, joins).start()
    rank.answers()
    assert rank.world.copies, "it has begun"
    rank.world.finish_copies()
    assert rank.answers() == ({1}, set())


def test_a_session_that_cannot_be_joined_fails_loads_soon_and_loses_saves_later():
    def refuse(token):
        raise refusal(Code.UNREACHABLE)

    rank = Rank(refuse)
    saves = (rank.order(first_page=6),)
    assert rank.step(saves=saves, loads=(rank.order(request="r2"),)) == (set(), set())
    rank.clock_s += JOIN_WITHIN_S
    assert rank.step(number=2) == (set(), {2})
    assert rank.results == ({"r2"}, {"r2"})
    rank.clock_s += SAVE_WITHIN_S
    assert rank.step(number=3) == (set(), {1})


def test_a_pool_that_does_not_fit_is_told_of():
    def refuse(token):
        raise refusal(Code.LAYOUT_MISMATCH)

    rank = Rank(refuse)
    rank.begin(saves=(rank.order(),))
    report = rank.half.take_report()
    assert report.unfit
    assert report.failed == {1: 1}


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_daemon_that_does_not_answer_keeps_no_request_and_no_block(rank, turns):
    rank.step()
    rank.begin(
        saves=(rank.order(first_page=6),),
        loads=(rank.order(request="r2", blocks=(20, 21)),),
        number=2,
    )
    rank.stream.run()
    for _ in range(turns):
        rank.world.turn()
    rank.world.is_hung = True
    answered = set()
    for _ in range(8):
        rank.world.finish_copies()
        done, failed = rank.answers()
        answered |= done | failed
        rank.clock_s += ANSWER_WITHIN_S
        rank.begin(number=3)
        if rank.clock_s == 2 * ANSWER_WITHIN_S:
            assert 2 in answered
    assert answered == {1, 2}


def test_blocks_that_are_given_away_are_waited_for(rank):
    """Where they cannot be held: a copy that moves goes on to its end, and all else ends."""
    rank.step()
    rank.begin(saves=(rank.order(), rank.order(first_page=6, blocks=(20, 21))), number=2)
    orders = rank.orders(awaited=(1, 2, 99), number=3)
    rank.half.give_back(orders)
    left = [copy for copy in rank.world.copies if not copy.safe()]
    assert not left
    rank.world.finish_copies()
    done, failed = rank.answers()
    assert done | failed == {1, 2}


def moving(rank):
    """A save of it whose bytes move."""
    rank.begin(saves=(rank.order(),))
    rank.stream.run()
    for _ in range(2):
        rank.world.turn()
    (copy,) = rank.world.copies
    assert copy.is_moving
    return copy


def test_whoever_leaves_waits_for_what_moves(rank):
    copy = moving(rank)
    rank.half.close()
    assert copy.is_over
    assert not rank.node.workers


def test_memory_that_is_given_away_is_read_and_written_by_nobody_and_comes_back(rank):
    moving, asked = rank.order(), rank.order(first_page=2)
    rank.begin(saves=(moving,))
    rank.stream.run()
    for _ in range(2):
        rank.world.turn()
    rank.begin(saves=(asked,), number=2)  # behind a mark that has not come
    copies = list(rank.world.copies)
    assert [copy.is_moving for copy in copies] == [True, False]

    rank.half.take_back()

    assert not any(copy.is_moving for copy in copies)
    assert not rank.node.workers
    before = [layer.copy() for layer in rank.world.memory]
    late = rank.order(first_page=4)
    rank.clock_s += SAVE_WITHIN_S
    done, failed = rank.step(saves=(late,), number=3)
    assert done | failed == {moving.number, asked.number}, "blocks would be held for ever"
    rank.clock_s += SAVE_WITHIN_S
    assert rank.step(number=4) == (set(), {late.number})
    assert all((now == then).all() for now, then in zip(rank.world.memory, before, strict=True))

    rank.half.give_again()

    again = rank.order(first_page=4)
    assert rank.step(saves=(again,), number=5) == ({again.number}, set())
    assert rank.node.workers


def test_memory_is_not_given_away_while_a_copy_of_a_former_session_moves(rank):
    copy = moving(rank)
    rank.is_late = True
    rank.begin(token=b"", session=0, incarnation="", number=2)
    (leave,) = rank.late
    ended = threading.Event()

    def take_back():
        rank.half.take_back()
        ended.set()

    threading.Thread(target=take_back, daemon=True).start()
    assert not ended.wait(0.1)
    assert copy.is_moving
    leave()
    assert ended.wait(5.0)
    assert not copy.is_moving


def test_it_leaves_when_there_is_no_session_any_more(rank):
    rank.step(saves=(rank.order(),))
    assert rank.node.workers
    rank.step(token=b"", session=0, incarnation="", number=2)
    assert not rank.node.workers


def test_requests_that_wait_or_are_held_hear_of_it_once(rank):
    assert rank.step(failed=("r1",), freed=("r2",)) == (set(), set())
    assert rank.results == ({"r1"}, {"r1"})
    assert rank.half.take_freed() == {"r2"}
    assert rank.half.take_results() == (set(), set())
    assert rank.half.take_freed() == set()


def test_of_several_ranks_each_is_counted():
    mine = StepReport(done={1: 1, 2: 1}, number=4)
    other = StepReport(done={1: 1}, failed={2: 1, 3: 1}, number=4)
    both = mine.with_rank(other)
    assert (both.done, both.failed, both.number) == ({1: 2, 2: 1}, {2: 1, 3: 1}, 4)


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
    shared = layout.EngineLayers(
        {"a": Shaped((4, 8)), "b": Shaped((4, 8)), "c": Shaped((4, 8), None, 99)}
    )
    assert len(shared.layouts) == 2


@pytest.mark.parametrize(
    "layers",
    [
        {"a": Shaped((2, 10, 16, 4), (64, 128, 4, 1))},  # keys of all blocks, then values
        {"a": Shaped((10,))},
    ],
)
def test_blocks_that_are_no_stretch_are_refused(layers):
    with pytest.raises(KvdError) as refused:
        layout.EngineLayers(layers)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value


class OfDaemon:
    """A pool of a real daemon's description, as far as it is asked."""

    def __init__(self, daemon):
        with connect_sync(daemon.client, name="look") as node:
            pool = node.pool("main")
            self.name, self.page_size = pool.name, pool.page_size
            self.memory, self.shards = pool.memory, pool.shards


@pytest.mark.parametrize(
    ("sets", "ranks", "told"),
    [
        ({}, 1, ["layers = 2 (it is 4)", "family = 'raw' (it is 'mha')"]),
        (
            {"pool.family": "raw", "pool.page_bytes": "1024", "pool.tag": "other"},
            1,
            ["tag = 'vllm 0.32 LBHNC' (it is 'other')"],
        ),
        (
            {"pool.family": "raw", "pool.page_bytes": "1024", "pool.layers": "2"},
            2,
            ["tp_size = 2 (it is 1)"],
        ),
        (
            {"pool.family": "raw", "pool.page_bytes": "1024", "pool.layers": "2"}
            | {"pool.page_size": "32"},
            1,
            ["page_bytes = 4096 (it is 1024)"],
        ),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_one_that_does(tmp_path, sets, ranks, told):
    layers = layout.EngineLayers({n: Shaped((9, 1024), None, 4096 * 9 * n) for n in range(2)})
    asked = {"block_size": 32, "ranks": ranks, "tag": "vllm 0.32 LBHNC"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with one_daemon(tmp_path / "a", {"pool.pages": "100", **sets}) as daemon:
        pool = OfDaemon(daemon)
    with pytest.raises(KvdError) as refused:
        layout.fitting(pool, layers, **asked)

    assert refused.value.code == Code.LAYOUT_MISMATCH.value
    for part in told:
        assert part in str(refused.value)
    # What it prints is pasted, and fits; and takes no more memory than the other one.
    pasted = tomllib.loads(str(refused.value).partition("\n\n")[2])["pool"]
    keys = {f"pool.{key}": str(value) for key, value in pasted.items()}
    with one_daemon(tmp_path / "b", keys) as daemon:
        other = OfDaemon(daemon)
    layout.fitting(other, layers, **asked)
    held = pool.memory.components[0].total_bytes
    assert held - 2 * 4096 * ranks < other.memory.components[0].total_bytes * ranks <= held
    assert ("tag" in pasted) is ("pool.tag" in sets)


def test_a_pool_with_pages_of_another_size_is_refused_by_the_scheduler_with_one_that_fits(
    tmp_path,
):
    sets = {"pool.family": "raw", "pool.page_bytes": "1024", "pool.page_size": "16"}
    with one_daemon(tmp_path, sets) as daemon:
        pool = OfDaemon(daemon)
    layout.check_pages(pool, [4096, 4096], page_size=16, ranks=1)

    with pytest.raises(KvdError, match=r"page_size = 32 \(it is 16\)") as refused:
        layout.check_pages(pool, [4096, 4096], page_size=32, ranks=1)

    pasted = tomllib.loads(str(refused.value).partition("\n\n")[2])["pool"]
    assert (pasted["layers"], pasted["page_size"], pasted["page_bytes"]) == (2, 32, 4096)


def test_blocks_that_a_kernel_cuts_are_those_of_the_scheduler():
    """VLLM's tensor has 4 kernel blocks for each of 5; its scheduler's numbers are of those."""
    cut = layout.EngineLayers({"a": Shaped((20, 8))}, n_blocks=5)
    (found,) = cut.layouts
    assert (found.n_blocks, found.block_bytes, found.step_bytes) == (5, 128, 128)
    (given,) = cut.caches().values()
    assert block_layout("a", given).block_bytes == 128
    for shape, strides in (((20, 8), (16, 1)), ((21, 8), None)):
        with pytest.raises(KvdError, match="where vLLM counts 5"):
            layout.EngineLayers({"a": Shaped(shape, strides)}, n_blocks=5)


def test_layers_of_several_groups_may_lie_over_each_other():
    """A block is one group's at a time."""
    groups = [
        layout.LayerGroup(("a", "b"), 16),
        layout.LayerGroup(("c",), 16, is_windowed=True),
    ]
    tensors = {name: Shaped((4, 8), None, at) for name, at in (("a", 0), ("b", 128), ("c", 0))}
    found = layout.EngineLayers(tensors | {"shares b's": Shaped((4, 8), None, 128)}, groups)
    assert [list(group) for group in found.caches()] == [["a", "b"], ["c"]]
    assert found.page_bytes == 3 * 32
    with pytest.raises(KvdError, match="layer d is in no group"):
        layout.EngineLayers(tensors | {"d": Shaped((4, 8), None, 999)}, groups)


def test_a_page_is_several_blocks_of_a_group_whose_blocks_are_smaller():
    groups = groups_of(FULL, of_kind("SlidingWindowSpec", block_size=32))
    assert layout.page_size_of(groups) == 32
    assert [list(group.numbers_of(3)) for group in groups] == [[6, 7], [3]]
    found = layout.EngineLayers(
        {"layer.0": Shaped((8, 8)), "layer.1": Shaped((4, 16), None, 9999)}, groups
    )
    assert [list(group) for group in found.caches()] == [["layer.0"], ["layer.0"], ["layer.1"]]
    assert found.page_bytes == 2 * 32 + 64


def pool_of(*sizes, page_size=16, tp_size=1):
    places = [SimpleNamespace(layer=n, page_shape=(size,)) for n, size in enumerate(sizes)]
    part = SimpleNamespace(name="kv", tensors=places, pages=9, page_bytes=sum(sizes))
    memory = SimpleNamespace(family="raw", tag="", components=[part])
    return SimpleNamespace(name="main", page_size=page_size, shards=(), memory=memory)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((96,), ""),
        ((48, 48), ""),
        ((64, 64), r"needs layers = 1 \(it is 2\), page_bytes = 96 \(it is 64\)\. This"),
        ((64,), r"needs page_bytes = 96 \(it is 64\)\. This"),
    ],
)
def test_layers_of_unlike_sizes_are_one_stretch_of_a_page(sizes, told):
    layers = layout.EngineLayers({"a": Shaped((4, 16)), "b": Shaped((4, 8), None, 999)})
    if not told:
        layout.fitting(pool_of(*sizes), layers, block_size=16, ranks=1)
        return
    with pytest.raises(KvdError, match=told):
        layout.fitting(pool_of(*sizes), layers, block_size=16, ranks=1)


def test_of_layers_of_one_size_the_pool_has_as_many():
    layers = layout.EngineLayers({"a": Shaped((4, 8)), "b": Shaped((4, 8), None, 999)})
    with pytest.raises(KvdError, match=r"needs layers = 2 \(it is 1\), page_bytes = 32 "):
        layout.fitting(pool_of(96), layers, block_size=16, ranks=1)


def of_kind(name, **fields):
    return type(name, (), {"block_size": 16} | fields)()


def groups_of(*specs, **more):
    return layout.layer_groups(
        [
            SimpleNamespace(layer_names=[f"layer.{n}"], kv_cache_spec=spec)
            for n, spec in enumerate(specs)
        ],
        **more,
    )


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_layers_whose_blocks_stay_are_served(kind):
    for spec in (of_kind(kind), of_kind(kind, non_causal=False)):
        assert groups_of(spec) == (layout.LayerGroup(("layer.0",), 16),)
    several = of_kind("UniformTypeKVCacheSpecs", kv_cache_specs={"a": of_kind(kind)})
    assert groups_of(several) == (layout.LayerGroup(("layer.0",), 16),)


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
def test_layers_with_windows_are_served(kind):
    found = groups_of(of_kind("FullAttentionSpec"), of_kind(kind))
    assert [group.is_windowed for group in found] == [False, True]
    assert [group.is_windowed for group in groups_of(of_kind(kind))] == [True]


FULL = of_kind("FullAttentionSpec")


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([of_kind("SlidingWindowMLASpec")], "SlidingWindowMLASpec.*without kvd"),
        ([of_kind("RSWASpec")], "RSWASpec.*without kvd"),
        ([FULL, of_kind("MambaSpec")], "MambaSpec do not say which states.*without kvd"),
        ([of_kind("SpecOfALaterVersion")], "SpecOfALaterVersion"),
        (
            [of_kind("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": of_kind("Odd")})],
            "Odd",
        ),
        ([], "no layers with KV"),
        # Where it helps, the switch that has vLLM keep all blocks is named.
        ([FULL, of_kind("SlidingWindowMLASpec")], "with --disable-hybrid-kv-cache-manager"),
    ],
)
def test_layers_that_are_not_served_are_refused(specs, told):
    with pytest.raises(KvdError, match=told) as refused:
        groups_of(*specs)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value


STATES = {"mamba_cache_mode": "align", "num_speculative_blocks": 0}


@pytest.mark.parametrize("step_tokens", [16, 31])
def test_layers_with_states_are_served_where_every_page_gets_one(step_tokens):
    for others in ([], [FULL]):
        specs = [*others, of_kind("MambaSpec", **STATES)]
        *_, found = groups_of(*specs, step_tokens=step_tokens)
        assert found.has_states
        assert found.is_windowed


@pytest.mark.parametrize(
    ("spec", "engine", "told"),
    [
        ({"mamba_cache_mode": "none"}, {}, "mamba_cache_mode is 'none'.*--enable-prefix-caching"),
        ({"num_speculative_blocks": 2}, {}, "without --speculative-config"),
        ({"block_size": 8}, {}, "every 8 tokens, and a page has 16.*blocks of one size"),
        ({"block_size": 32}, {}, "every 16 tokens, and a page has 32.*blocks of one size"),
        ({}, {"match_tokens": 8}, "every 8 tokens.*without --prefix-match-unit"),
        ({}, {"step_tokens": 32}, "up to 32 tokens and blocks 16.*--max-num-batched-tokens 31"),
        ({}, {"step_tokens": 0}, "--max-num-batched-tokens 31"),
    ],
)
def test_states_that_a_page_would_lack_are_refused_with_what_helps(spec, engine, told):
    with pytest.raises(KvdError, match=told) as refused:
        groups_of(FULL, of_kind("MambaSpec", **STATES | spec), **{"step_tokens": 16} | engine)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value


def test_layers_that_attend_to_later_tokens_are_refused():
    """VLLM turns its own prefix cache off for these: a prefix has no KV of its own."""
    with pytest.raises(KvdError, match="attend to later tokens"):
        groups_of(of_kind("FullAttentionSpec", non_causal=True))


def test_a_block_whose_tokens_are_shared_among_ranks_is_refused():
    with pytest.raises(KvdError, match="2 ranks share the tokens of a block"):
        groups_of(FULL, context_ranks=2)


@pytest.mark.parametrize("device", ["xpu:1", "hpu", "meta"])
def test_an_engine_whose_blocks_nobody_copies_does_not_start(device):
    half = WorkerHalf(NOBODY, block_size=BLOCK, open_session=lambda token: pytest.fail("joined"))
    on_device = Shaped((4, 8), device=device)
    with pytest.raises(KvdError, match=f"the KV cache is on {device} .layer b.") as caught:
        half.register({"a": Shaped((4, 8)), "b": on_device})
    assert caught.value.code == Code.LAYOUT_MISMATCH.value
    assert "run this engine without kvd" in str(caught.value)
