"""Orders that the engine's thread asks the daemon for: whoever reads the answer, they go on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.client import Code, KvdError
from kvd.client.mover.mover import Mover
from kvd.wire.attach import CopyBegins, CopyEnds
from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.client import EngineBlocks

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
