"""Blocks on a device, saved into pages of a pool in host memory and loaded from them."""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.client import Code, KvdError, LayerMemory, PendingCopy
from kvd.client.mover import device_lane
from kvd.client.mover.mover import Mover, _chunks
from kvd.client.mover.pending_copy import CopyMark, CopyState
from kvd.device import cuda as cuda_module
from kvd.device.cuda_library import VARIABLE
from kvd.wire.attach import Leave
from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from numpy.typing import NDArray

    from kvd.client import EngineBlocks
    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double

LAYERS, BLOCKS, BYTES = 3, 24, 4096


class Engine:
    """Its KV cache on a device of the double, and what is in it."""

    def __init__(self, daemon: WordsDaemon, cuda: Runtime, device: int = 0) -> None:
        self.daemon, self.cuda, self.device = daemon, cuda, device
        self.size = BLOCKS * BYTES
        self.addresses = [cuda.allocate(device, self.size) for _ in range(LAYERS)]
        self.filled = numbered(np.random.default_rng(5), (LAYERS, BLOCKS, BYTES))
        for address, layer in zip(self.addresses, self.filled, strict=True):
            cuda.copy(address, layer.ctypes.data, self.size)
        cuda.synchronize()
        self.blocks = self.give()

    def caches(self) -> dict[str, LayerMemory]:
        return {
            f"layer.{number}": LayerMemory(
                address, (BLOCKS, BYTES), (BYTES, 1), 1, f"cuda:{self.device}"
            )
            for number, address in enumerate(self.addresses)
        }

    def give(self, **more: Any) -> EngineBlocks:
        return self.daemon.worker.blocks(self.caches(), block_size=16, **more)

    @property
    def lane(self) -> device_lane.DeviceLane:
        lane = self.blocks._mover.lane
        assert isinstance(lane, device_lane.DeviceLane)
        return lane

    def there(self) -> NDArray[np.uint8]:
        found = np.empty((LAYERS, BLOCKS, BYTES), np.uint8)
        for address, layer in zip(self.addresses, found, strict=True):
            self.cuda.copy(layer.ctypes.data, address, self.size)
        return found

    def pages(self) -> NDArray[np.uint8]:
        """Layer by layer."""
        pool = self.daemon.worker.pool("main")
        return np.stack(
            [next(iter(pool.arrays("kv", layer=layer).values())) for layer in range(LAYERS)]
        )

    def save(self, blocks: list[int], pages: list[int], **more: Any) -> PendingCopy:
        return self.blocks.begin_save(
            self.daemon.key(), {"kv": blocks}, pages={"kv": pages}, **more
        )

    def load(self, blocks: list[int], pages: list[int], **more: Any) -> PendingCopy:
        return self.blocks.begin_load(
            self.daemon.key(), {"kv": blocks}, pages={"kv": pages}, **more
        )


@pytest.fixture
def daemon(double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[WordsDaemon]:
    monkeypatch.setenv(VARIABLE, str(double.path))
    made = WordsDaemon(raw_pool(layers=LAYERS, page_bytes=BYTES))
    yield made
    made.close()


@pytest.fixture
def engine(daemon: WordsDaemon, cuda: Runtime) -> Iterator[Engine]:
    made = Engine(daemon, cuda)
    yield made
    made.blocks.close()
    daemon.worker.close()
    for address in made.addresses:
        cuda.free(address)


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)


def test_what_is_saved_is_loaded_again(engine: Engine) -> None:
    until(engine.lane.is_registered)
    save = engine.save([3, 4, 9], [7, 8, 2], upto_tokens=48)
    save.result(5)
    assert (engine.pages()[:, [7, 8, 2]] == engine.filled[:, [3, 4, 9]]).all()
    load = engine.load([0, 1, 2], [7, 8, 2])
    load.result(5)
    expected = engine.filled.copy()
    expected[:, [0, 1, 2]] = engine.filled[:, [3, 4, 9]]
    assert (engine.there() == expected).all()
    assert [word.device for word in engine.daemon.began.values()] == ["cuda:0", "cuda:0"]


def test_pieces_go_through_the_stage_until_the_pool_is_registered(
    daemon: WordsDaemon, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lane, "STAGE_BYTES", 3 * 4096)
    monkeypatch.setattr(device_lane.DeviceLane, "_register", lambda *_: None)
    engine = Engine(daemon, cuda)
    orders = [engine.save([2 * n, 2 * n + 1], [n + 1, n + 20]) for n in range(8)]
    for order in orders:
        order.result(5)
    pages = engine.pages()
    for n in range(8):
        assert (pages[:, [n + 1, n + 20]] == engine.filled[:, [2 * n, 2 * n + 1]]).all()
    engine.load([20, 21, 22, 23], [1, 20, 2, 21]).result(5)
    assert (engine.there()[:, 20:] == engine.filled[:, :4]).all()


def test_a_pool_is_registered_in_chunks_that_end_between_pages(
    daemon: WordsDaemon, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lane, "REGISTERED_AT_ONCE", 6 * LAYERS * BYTES)
    engine = Engine(daemon, cuda)
    until(engine.lane.is_registered)
    chunks = [stretch.size_bytes for stretch in engine.lane._memory.stretches]
    assert chunks.count(6 * LAYERS * BYTES) == 40 // 6
    engine.save([*range(24)], [*range(4, 28)]).result(5)
    assert (engine.pages()[:, 4:28] == engine.filled).all()


# ---- marks, the daemon's word, and what is said when ---------------------------------------------


def a_save_waits_for_its_mark(engine: Engine, double: Double) -> None:
    """The engine's stream writes block 3 late, and the mark stands behind that."""
    stream = double.held(engine.device)
    new = numbered(np.random.default_rng(9), (BYTES,))
    engine.cuda.register(new.ctypes.data, BYTES)
    engine.cuda.begin_copy(stream, engine.addresses[0] + 3 * BYTES, new.ctypes.data, BYTES)
    save = engine.save([3], [5], after=engine.blocks.mark(stream))
    time.sleep(0.05)
    try:
        assert not engine.daemon.said, "it was begun before its mark had come"
        assert save.state is CopyState.WAITING
    finally:
        double.release(stream)
        save.result(5)
        engine.cuda.unregister(new.ctypes.data)
    assert (engine.pages()[0, 5] == new).all()


def a_load_waits_for_its_mark(engine: Engine, double: Double) -> None:
    """The step before still reads block 3."""
    stream = double.held(engine.device)
    load = engine.load([3], [5], after=engine.blocks.mark(stream))
    time.sleep(0.05)
    try:
        assert (engine.there() == engine.filled).all(), "a block was written under its reader"
    finally:
        double.release(stream)
        load.result(5)
    assert not engine.there()[:, 3].any()


def no_byte_moves_before_the_daemon_has_answered(engine: Engine, double: Double) -> None:
    engine.daemon.hold()
    save, load = engine.save([3], [5]), engine.load([8], [9])
    engine.daemon.until(lambda: len(engine.daemon.said) == 2)
    time.sleep(0.05)
    try:
        assert not engine.pages().any(), "a page was written that nobody keeps"
        assert (engine.there() == engine.filled).all(), "a page was read that nobody keeps"
    finally:
        engine.daemon.answer()
        save.result(5)
        load.result(5)
    assert (engine.pages()[:, 5] == engine.filled[:, 3]).all()


def the_daemon_hears_the_end_when_no_byte_moves(engine: Engine, double: Double) -> None:
    stream = engine.lane._streams[True]._stream
    double.hold(stream)
    save = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.began)
    time.sleep(0.05)
    try:
        assert not engine.daemon.ended, "the end was said while bytes were to come"
        assert not save.safe()
    finally:
        double.release(stream)
        save.result(5)
    assert (engine.pages()[:, 5] == engine.filled[:, 3]).all()


def a_source_is_read_when_the_stream_comes_to_it(engine: Engine, double: Double) -> None:
    """What is in the stream before it may have written that: as the part before, of a stage."""
    stream = engine.lane._streams[True]._stream
    double.hold(stream)
    save = engine.save([3], [5])
    until(lambda: save.state is CopyState.MOVING and engine.blocks._mover._moving[0].under_way)
    new = numbered(np.random.default_rng(9), (BYTES,))
    engine.cuda.copy(engine.addresses[0] + 3 * BYTES, new.ctypes.data, BYTES)
    engine.cuda.wait(0)
    double.release(stream)
    save.result(5)
    assert (engine.pages()[0, 5] == new).all(), "it was read before its turn"


def _mark_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_lane.DeviceLane, "has_come", lambda *_: True)


def _take_no_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_lane.DeviceLane, "mark", lambda *_: CopyMark.COME)


def _copy_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    ask = Mover._ask

    def early(self: Mover, copy: PendingCopy) -> None:
        for part, units in _chunks(copy.parts, 2**20):
            pieces = part.table.pieces(part.blocks, part.pages, units)
            self.lane.begin(pieces, to_pages=copy.to_pages)
        ask(self, copy)

    patch.setattr(Mover, "_ask", early)


def _say_the_end_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_lane.DeviceCopy, "is_over", True)


def _read_in_any_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_module, "_IN_STREAM_ORDER", 3)


RULES = [
    (a_save_waits_for_its_mark, (_mark_nothing, _take_no_mark)),
    (a_load_waits_for_its_mark, (_mark_nothing, _take_no_mark)),
    (no_byte_moves_before_the_daemon_has_answered, (_copy_before_the_answer,)),
    (the_daemon_hears_the_end_when_no_byte_moves, (_say_the_end_early,)),
    (a_source_is_read_when_the_stream_comes_to_it, (_read_in_any_order,)),
]
BROKEN = [(rule, fault) for rule, faults in RULES for fault in faults]


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=lambda rule: rule.__name__)
def test_a_rule_is_kept(
    engine: Engine, double: Double, rule: Callable[[Engine, Double], None]
) -> None:
    until(engine.lane.is_registered)
    rule(engine, double)


@pytest.mark.parametrize(("rule", "fault"), BROKEN, ids=lambda part: part.__name__)
def test_a_rule_that_is_broken_is_found(
    daemon: WordsDaemon,
    cuda: Runtime,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    rule: Callable[[Engine, Double], None],
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    engine = Engine(daemon, cuda)
    until(engine.lane.is_registered)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        rule(engine, double)
    double.let_go()


def test_a_mark_that_never_comes_ends_its_order_and_is_named(
    daemon: WordsDaemon, cuda: Runtime, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(daemon, cuda)
    engine.blocks = engine.give(mark_within_s=0.05)
    order = engine.save([3], [5], after=engine.blocks.mark(double.held()))
    with pytest.raises(KvdError, match="the mark of the save into 1 pages of lease 1") as refused:
        order.result(5)
    assert refused.value.code == Code.DEADLINE.value
    assert order.safe()
    assert not daemon.said
    assert "the mark of the save into 1 pages" in caplog.text
    double.let_go()
    engine.save([3], [5]).result(5)


def test_a_mark_is_behind_what_the_default_stream_has(engine: Engine) -> None:
    new = numbered(np.random.default_rng(9), (BYTES,))
    engine.cuda.copy(engine.addresses[0] + 3 * BYTES, new.ctypes.data, BYTES)
    engine.save([3], [5]).result(5)
    assert (engine.pages()[0, 5] == new).all()
    with pytest.raises(KvdError, match="stream is 'a'"):
        engine.blocks.mark("a")


# ---- a graph that is captured --------------------------------------------------------------------


def test_copies_spoil_no_graph_that_is_captured_meanwhile(engine: Engine, double: Double) -> None:
    library, stream = double._library, engine.cuda.stream(0)
    library.cudaStreamBeginCapture.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.cudaStreamEndCapture.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    mark = engine.blocks.mark()
    assert not library.cudaStreamBeginCapture(stream, 0)
    with pytest.raises(KvdError, match="a graph is being captured") as refused:
        engine.blocks.mark(stream)
    order = engine.save([3], [5], after=mark)
    order.result(5)
    graph = ctypes.c_void_p(0)
    assert not library.cudaStreamEndCapture(stream, ctypes.byref(graph))
    engine.cuda.end_stream(stream)
    assert refused.value.code == Code.WRONG_STATE.value
    assert (engine.pages()[:, 5] == engine.filled[:, 3]).all()


# ---- a device that fails -------------------------------------------------------------------------


def test_a_call_that_is_refused_ends_its_order_alone(engine: Engine, double: Double) -> None:
    until(engine.lane.is_registered)
    begin = engine.cuda.begin_copies
    lane = engine.lane._runtime

    def refused(*args: Any) -> None:
        lane.begin_copies = begin  # type: ignore[method-assign]
        double.fail_next(1)
        begin(*args)

    lane.begin_copies = refused  # type: ignore[method-assign]
    order = engine.save([3], [5])
    with pytest.raises(KvdError, match=r"cudaErrorInvalidValue \(1\)|\(1\)") as error:
        order.result(5)
    assert error.value.code == Code.POST_FAILED.value
    assert order.safe()
    assert [word.is_done for word in engine.daemon.ended.values()] == [False]
    engine.save([3], [5]).result(5)


def test_a_device_that_is_lost_leaves_what_moved_in_doubt(
    daemon: WordsDaemon, cuda: Runtime, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(daemon, cuda)
    until(engine.lane.is_registered)
    stream = engine.lane._streams[True]._stream
    double.hold(stream)
    moving = engine.save([3], [5])
    waiting = engine.save([4], [6], after=engine.blocks.mark(double.held()))
    until(lambda: moving.state is CopyState.MOVING)
    daemon.hold()
    asking = engine.load([8], [9])
    until(lambda: asking.state is CopyState.ASKING)
    double.poison(700)
    try:
        for order in (moving, waiting):
            with pytest.raises(KvdError, match="700") as error:
                order.result(5)
            assert error.value.code == Code.POST_FAILED.value
        assert moving.state is CopyState.DOUBT
        assert not moving.safe()
        assert waiting.safe()
        daemon.answer()
        with pytest.raises(KvdError, match="700"):
            asking.result(5)
        assert asking.safe()
        daemon.until(lambda: daemon.ended)
        assert list(daemon.ended) == [call for call in daemon.began if call == max(daemon.began)]
        with pytest.raises(KvdError, match="end this process"):
            engine.save([4], [6])
        assert "have ended for this process" in caplog.text
        with pytest.raises(KvdError, match="may still move"):
            engine.blocks.close()
        assert not daemon.worker.movers.is_quiet
        daemon.worker.close()
        assert not any(isinstance(word, Leave) for word in daemon.said)
    finally:
        double.poison(0)
        double.release(stream)
        double.let_go()


def test_a_copy_that_fails_in_the_middle_counts_for_nothing(
    daemon: WordsDaemon, cuda: Runtime, double: Double
) -> None:
    engine = Engine(daemon, cuda)
    until(engine.lane.is_registered)
    double.break_next(BYTES + 100)
    order = engine.save([3, 4], [5, 6])
    try:
        with pytest.raises(KvdError) as error:
            order.result(5)
        assert error.value.code == Code.POST_FAILED.value
        assert not order.safe()
        assert not daemon.ended
    finally:
        double.poison(0)


# ---- what is no memory of the device -------------------------------------------------------------


def test_blocks_that_are_not_there_are_refused(
    daemon: WordsDaemon, cuda: Runtime, double: Double
) -> None:
    engine = Engine(daemon, cuda)
    engine.blocks.close()
    engine.device = 1
    with pytest.raises(KvdError, match=r"are to be on cuda:1; at .* they are on cuda:0") as error:
        engine.give()
    assert error.value.code == Code.LAYOUT_MISMATCH.value
    engine.device = 0
    cuda.free(engine.addresses[1])
    with pytest.raises(KvdError, match="no memory of a device, or freed"):
        engine.give()
    engine.addresses[1] = engine.addresses[0]
    with pytest.raises(KvdError, match="2 layers of the engine, and 3"):
        engine.give()


def test_an_array_of_a_device_says_where_it_is(
    daemon: WordsDaemon, cuda: Runtime, double: Double
) -> None:
    class Array:
        def __init__(self, address: int) -> None:
            self.__cuda_array_interface__ = {
                "shape": (BLOCKS, BYTES // 4),
                "typestr": "<f4",
                "data": (address, False),
                "version": 3,
            }

    engine = Engine(daemon, cuda, device=1)
    arrays = {number: Array(address) for number, address in enumerate(engine.addresses)}
    engine.blocks = daemon.worker.blocks(arrays, block_size=16)
    assert engine.blocks.device == "cuda:1"
    engine.save([3], [5]).result(5)
    assert (engine.pages()[:, 5] == engine.filled[:, 3]).all()


def test_one_mark_serves_several_orders(engine: Engine, double: Double) -> None:
    """Its event is recorded anew when the last of them has seen it come, and not before."""
    stream = double.held()
    mark = engine.blocks.mark(stream)
    orders = [engine.save([n], [n + 1], after=mark) for n in range(4)]
    del mark
    engine.save([20], [30]).result(5)
    time.sleep(0.02)
    assert not any(order.is_over for order in orders)
    double.release(stream)
    for order in orders:
        order.result(5)


def test_an_order_is_cancelled_while_its_mark_has_not_come(engine: Engine, double: Double) -> None:
    stream = double.held()
    mark = engine.blocks.mark(stream)
    orders = [engine.save([n], [n + 1], after=mark) for n in range(12)]
    assert orders[7].cancel()
    with pytest.raises(KvdError, match="cancelled"):
        orders[7].result(5)
    assert not any(order.is_over for order in orders if order is not orders[7])
    engine.load([7], [30]).result(5)
    double.release(stream)
    for order in orders[:7] + orders[8:]:
        order.result(5)
    assert len(engine.daemon.began) == 12


def test_waiting_takes_little_of_the_engines_interpreter(engine: Engine, double: Double) -> None:
    """For a mark that is a long step away; and an order behind another mark is not held up."""
    thread = engine.blocks._mover._thread
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    stream = double.held()
    late = engine.save([3], [5], after=engine.blocks.mark(stream))
    time.sleep(0.05)
    before_s = time.clock_gettime(clock)
    time.sleep(1.0)
    taken_s = time.clock_gettime(clock) - before_s
    began_s = time.monotonic()
    engine.save([4], [6]).result(5)
    assert time.monotonic() - began_s < 0.5
    assert not late.is_over
    double.release(stream)
    late.result(5)
    assert taken_s < 0.2, f"{taken_s:.3f} s of a processor in a second of waiting"


def test_groups_of_layers_lie_over_each_other(engine: Engine) -> None:
    """As vLLM has sliding windows beside full attention: a block is one group's at a time."""
    first, second, _ = engine.caches().values()
    with engine.daemon.worker.blocks(
        [{"a": first, "b": second}, {"c": first}], block_size=16
    ) as blocks:
        key, pages = engine.daemon.key(), {"kv": [7, 8]}
        blocks.begin_save(key, {"kv": [[3, 4], [9, 2]]}, pages=pages).result(5)
        blocks.begin_load(key, {"kv": [[10, 11], [-1, 12]]}, pages=pages).result(5)
    saved = engine.pages()[:, [7, 8]]
    assert (saved[:2] == engine.filled[:2, [3, 4]]).all()
    assert (saved[2] == engine.filled[0, [9, 2]]).all()
    expected = engine.filled.copy()
    expected[:2, [10, 11]] = engine.filled[:2, [3, 4]]
    expected[0, 12] = engine.filled[0, 2]
    assert (engine.there() == expected).all()


# ---- whichever call of CUDA fails ----------------------------------------------------------------

CALLS = ("is_capturing", "record", "has_come", "begin_copies", "event")
STICKY = {700, 719}


@pytest.mark.parametrize("number", [1, 2, 700, 719, 999])
@pytest.mark.parametrize("name", CALLS)
def test_whatever_fails_is_typed_and_no_end_is_untrue(
    daemon: WordsDaemon,
    cuda: Runtime,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
) -> None:
    engine = Engine(daemon, cuda)
    until(engine.lane.is_registered)
    runtime = engine.lane._runtime
    call = getattr(runtime, name)
    failed = []

    def fails_once(*args: Any, **more: Any) -> Any:
        if not failed:
            failed.append(name)
            double.poison(number) if number in STICKY else double.fail_next(number)
        return call(*args, **more)

    monkeypatch.setattr(runtime, name, fails_once)
    orders = []

    def saved(block: int, page: int) -> None:
        orders.append(engine.save([block], [page]))
        orders[-1].result(5)

    with pytest.raises(KvdError, match=rf"\({number}\)") as refused:
        saved(3, 5)
    double.poison(0)
    assert refused.value.code == Code.POST_FAILED.value
    assert not [word for word in daemon.ended.values() if word.is_done]
    if not all(order.safe() for order in orders):
        assert not daemon.worker.movers.is_quiet, "its pages are kept until this process is gone"
        return
    # A thread of the mover may find only now what was sticky.
    with contextlib.suppress(KvdError):
        saved(4, 6)
        assert (engine.pages()[:, 6] == engine.filled[:, 4]).all()
        return
    assert "end this process" in str(engine.blocks._mover._dead)
