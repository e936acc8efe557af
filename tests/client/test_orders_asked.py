"""Orders that the engine's thread asks the daemon for: whoever reads the answer, they go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.client import Code, KvdError
from kvd.client.mover.mover import Mover
from kvd.client.mover.pending_copy import CopyState
from kvd.wire.attach import CopyBegins, CopyEnds
from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.client import EngineBlocks, PendingCopy
    from kvd.client.mover.pending_copy import LaterMark

BYTES = 4096


@pytest.fixture
def daemon() -> Iterator[WordsDaemon]:
    made = WordsDaemon(raw_pool())
    yield made
    made.close()


@pytest.fixture
def blocks(daemon: WordsDaemon) -> EngineBlocks:
    layers = {n: numbered(np.random.default_rng(n), (20, BYTES)) for n in range(3)}
    given: EngineBlocks = daemon.worker.blocks(layers, block_size=16)
    return given


def test_it_is_asked_for_before_the_order_returns(
    daemon: WordsDaemon, blocks: EngineBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    askers = []
    ask = Mover._ask

    def noted(mover: Mover, copy: object) -> None:
        askers.append(threading.get_ident())
        ask(mover, copy)  # type: ignore[arg-type]

    monkeypatch.setattr(Mover, "_ask", noted)
    blocks.begin_save(daemon.key(), {"kv": [3]}, pages={"kv": [5]}).result(5)
    assert askers == [threading.get_ident()]
    assert [type(word) for word in daemon.said] == [CopyBegins, CopyEnds]


def test_its_answer_may_be_read_by_whoever_waits_for_another_word(
    daemon: WordsDaemon, blocks: EngineBlocks
) -> None:
    """As a rank that says how far it has written: it reads for all, and the mover sleeps."""
    daemon.hold()
    order = blocks.begin_save(daemon.key(), {"kv": [3]}, pages={"kv": [5]})
    words = daemon.worker._words
    other = words.begin(lambda call: CopyBegins(call, 1, to_pages=False, parts=()))
    reader = threading.Thread(target=other.result, args=(5.0,))
    reader.start()
    daemon.until(lambda: len(daemon.said) == 2)
    daemon.answer()
    order.result(5)
    reader.join(5)
    assert not reader.is_alive()


def test_many_threads_order_at_once(daemon: WordsDaemon, blocks: EngineBlocks) -> None:
    def orders(first: int) -> None:
        for turn in range(50):
            number = first + turn % 4
            saved, pages = {"kv": [number]}, {"kv": [number + 1]}
            blocks.begin_save(daemon.key(), saved, pages=pages).result(20)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(orders, [0, 4, 8, 12]))
    assert len(daemon.ended) == 200
    assert daemon.worker.movers.is_quiet


def test_a_lease_that_no_message_can_name_ends_its_order(
    daemon: WordsDaemon, blocks: EngineBlocks
) -> None:
    order = blocks.begin_save(replace(daemon.key(), lease=2**70), {"kv": [3]}, pages={"kv": [5]})
    with pytest.raises(KvdError, match="cannot be asked for") as refused:
        order.result(5)
    assert refused.value.code == Code.BAD_REQUEST.value
    assert daemon.worker.movers.is_quiet
    blocks.begin_save(daemon.key(), {"kv": [3]}, pages={"kv": [5]}).result(5)


# ---- behind a mark that the engine sets itself -------------------------------------------------


def ahead(daemon: WordsDaemon, blocks: EngineBlocks, mark: LaterMark) -> PendingCopy:
    return blocks.begin_save(daemon.key(), {"kv": [3]}, pages={"kv": [5]}, after=mark)


def marked(blocks: EngineBlocks) -> LaterMark:
    mark = blocks.later_mark()
    assert mark is not None
    return mark


def is_written(daemon: WordsDaemon) -> bool:
    pool = daemon.worker.pool("main")
    return any(next(iter(pool.arrays("kv", layer=n).values())).any() for n in range(3))


def answers_are_read(daemon: WordsDaemon, blocks: EngineBlocks) -> None:
    """Whoever orders something else has them read."""
    blocks.begin_load(daemon.key(), {"kv": [8]}, pages={"kv": [9]}).result(5)


def test_behind_a_later_mark_it_is_asked_for_before_and_moves_behind(
    daemon: WordsDaemon, blocks: EngineBlocks
) -> None:
    mark = marked(blocks)
    order = ahead(daemon, blocks, mark)
    daemon.until(lambda: [type(word) for word in daemon.said] == [CopyBegins])
    answers_are_read(daemon, blocks)
    daemon.until(lambda: order.state is CopyState.WAITING)
    assert not order.safe()
    assert not is_written(daemon)
    time.sleep(0.02)

    mark.set()
    order.result(5)
    assert is_written(daemon)
    ended = daemon.said[-1]
    assert isinstance(ended, CopyEnds)
    assert ended.is_done
    assert ended.waited_us >= ended.mark_us >= 20_000


def test_a_later_mark_may_be_set_before_the_daemon_has_answered(
    daemon: WordsDaemon, blocks: EngineBlocks
) -> None:
    daemon.hold()
    mark = marked(blocks)
    order = ahead(daemon, blocks, mark)
    mark.set()
    time.sleep(0.02)
    assert order.state is CopyState.ASKING
    assert not is_written(daemon)
    daemon.answer()
    order.result(5)
    assert is_written(daemon)


@pytest.mark.parametrize("is_answered", [False, True])
def test_without_its_mark_it_ends_when_it_is_cancelled(
    daemon: WordsDaemon,
    blocks: EngineBlocks,
    is_answered: bool,
) -> None:
    mark = marked(blocks)
    order = ahead(daemon, blocks, mark)
    if is_answered:
        answers_are_read(daemon, blocks)
    assert order.cancel()
    with pytest.raises(KvdError) as refused:
        order.result(5)
    assert refused.value.code == Code.CANCELLED.value
    assert order.safe()
    mark.set()
    daemon.until(lambda: daemon.worker.movers.is_quiet)
    assert [word.is_done for word in daemon.ended.values()].count(False) == 1
    assert not is_written(daemon)
    blocks.begin_save(daemon.key(), {"kv": [3]}, pages={"kv": [5]}).result(5)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_later_mark_that_is_never_set_keeps_nothing_for_ever(
    daemon: WordsDaemon,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_answered: bool,
) -> None:
    monkeypatch.setattr("kvd.client.mover.mover.IDLE_LOOK_S", 0.1)
    layers = {n: numbered(np.random.default_rng(n), (20, BYTES)) for n in range(3)}
    blocks = daemon.worker.blocks(layers, block_size=16, mark_within_s=0.05)
    order = ahead(daemon, blocks, marked(blocks))
    if is_answered:
        answers_are_read(daemon, blocks)
    with pytest.raises(KvdError):
        order.result(5)
    assert "has not come within 0.05 s" in caplog.text
    assert order.safe()
    assert not is_written(daemon)
    daemon.until(lambda: daemon.worker.movers.is_quiet)


def test_who_leaves_does_not_wait_for_a_later_mark_and_it_may_be_set_behind_that(
    daemon: WordsDaemon, blocks: EngineBlocks
) -> None:
    mark = marked(blocks)
    order = ahead(daemon, blocks, mark)
    answers_are_read(daemon, blocks)
    daemon.worker.close()
    assert order.is_over
    mark.set()
