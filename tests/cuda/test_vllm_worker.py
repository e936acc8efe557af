"""The vLLM connector's worker over blocks on a device, which no processor may touch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import CopyOrder, StepOrders
from kvd.connectors.vllm.worker import WorkerHalf
from kvd.device.cuda_library import VARIABLE
from tests.cuda.test_mover import BYTES, LAYERS, Engine
from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double

NOBODY = VllmOptions(endpoint="ipc:///nowhere/kvd/client.sock")


class Rank:
    """A worker whose blocks are those of ``engine``."""

    def __init__(self, daemon: WordsDaemon, cuda: Runtime) -> None:
        self.daemon = daemon
        self.engine = Engine(daemon, cuda)
        self.half = WorkerHalf(
            NOBODY,
            block_size=16,
            open_session=lambda _: daemon.worker,
            start=lambda work: work(),
        )
        self.half.register(self.engine.caches())
        self.numbers = 0

    def begin(self, **orders: Any) -> None:
        key = self.daemon.key()
        told = StepOrders(
            number=1, token=b"token", session=key.session, incarnation=key.incarnation, **orders
        )
        self.half.give_back(told)
        self.half.load(told)
        self.half.save(told)

    def answers(self, n: int, within_s: float = 5.0) -> tuple[set[int], set[int]]:
        """What is said of ``n`` orders: those that are done, and those that are not."""
        done: set[int] = set()
        failed: set[int] = set()
        end_s = time.monotonic() + within_s
        while len(done | failed) < n and time.monotonic() < end_s:
            self.half.take_results()
            report = self.half.take_report()
            if report is not None:
                done |= set(report.done)
                failed |= set(report.failed)
            time.sleep(0.001)
        return done, failed

    def order(self, blocks: tuple[int, ...], pages: tuple[int, ...]) -> CopyOrder:
        self.numbers += 1
        return CopyOrder(
            number=self.numbers,
            request="r1",
            key=self.daemon.key(),
            first_page=0,
            pages=pages,
            blocks=(blocks,),
            upto_tokens=16 * len(pages),
        )


@pytest.fixture
def rank(double: Double, cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setenv(VARIABLE, str(double.path))
    daemon = WordsDaemon(raw_pool(layers=LAYERS, page_bytes=BYTES))
    made = Rank(daemon, cuda)
    yield made
    made.half.close()
    daemon.close()
    for address in made.engine.addresses:
        cuda.free(address)


def test_blocks_of_a_device_come_to_pages_and_back(rank: Rank) -> None:
    engine = rank.engine
    rank.begin(saves=(rank.order((3, 4, 9), (7, 8, 2)),))
    assert rank.answers(1) == ({1}, set())
    assert (engine.pages()[:, [7, 8, 2]] == engine.filled[:, [3, 4, 9]]).all()
    rank.begin(loads=(rank.order((0, 1, 2), (7, 8, 2)),))
    assert rank.answers(1) == ({2}, set())
    assert (engine.there()[:, [0, 1, 2]] == engine.filled[:, [3, 4, 9]]).all()
    assert [word.device for word in rank.daemon.began.values()] == ["cuda:0", "cuda:0"]
    assert rank.half.counts.saved_bytes == rank.half.counts.loaded_bytes == 3 * LAYERS * BYTES


def test_a_step_waits_for_nothing_that_its_stream_has_to_do(
    rank: Rank, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark that it records is behind what is computed: a save reads what that has written."""
    engine, stream = rank.engine, double.held()
    rank.begin()
    joined = rank.half._join._joined
    assert joined is not None
    mark = joined.blocks.mark
    monkeypatch.setattr(joined.blocks, "mark", lambda: mark(stream))
    began_s = time.perf_counter()
    rank.begin(saves=(rank.order((3,), (5,)),), loads=(rank.order((9,), (6,)),))
    took_s = time.perf_counter() - began_s
    assert rank.answers(2, within_s=0.1) == (set(), set())
    assert took_s < 0.1
    new = numbered(np.random.default_rng(9), (BYTES,))
    engine.cuda.copy(engine.addresses[0] + 3 * BYTES, new.ctypes.data, BYTES)
    double.release(stream)
    assert rank.answers(2) == ({1, 2}, set())
    assert (engine.pages()[0, 5] == new).all()


def test_a_device_that_fails_costs_what_was_ordered_and_no_step(rank: Rank, double: Double) -> None:
    rank.begin()
    double.fail_next(1)
    rank.begin(saves=(rank.order((3,), (5,)),))
    assert rank.answers(1)[1] == {1}
