"""Random orders, refusals, cancels and deaths: what is said is true, and nothing else moves."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.client import Code, KvdError, LayerMemory
from kvd.client.mover.pieces import PieceTable
from kvd.device.cuda_library import VARIABLE, load
from kvd.errors import Refusal
from kvd.wire.attach import CopyBegins
from tests.support.copies import WordsDaemon, numbered, raw_pool
from tests.support.seeds import repeatable, seed_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvd.client import PendingCopy
    from kvd.client.mover.pieces import PieceColumns
    from kvd.device.cuda import Runtime
    from kvd.wire.attach import CopyEnds
    from tests.cuda.double import Double

LAYERS, BLOCKS, BYTES, PAGES = 2, 30, 512, 40
ORDERS = 60


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)


class Model:
    """What blocks and pages hold by what was said; ``None`` where nothing may be assumed."""

    def __init__(self, rng: random.Random, blocks: NDArray[np.uint8]) -> None:
        self.rng = rng
        self.blocks: list[bytes | None] = [blocks[:, n].tobytes() for n in range(BLOCKS)]
        self.pages: list[bytes | None] = [bytes(LAYERS * BYTES)] * PAGES
        self.busy_blocks: set[int] = set()
        self.busy_pages: set[int] = set()

    def chosen(self) -> tuple[list[int], list[int]]:
        """Blocks and pages that no order has."""
        blocks = [n for n in range(BLOCKS) if n not in self.busy_blocks]
        pages = [n for n in range(1, PAGES) if n not in self.busy_pages]
        n = self.rng.randint(1, min(4, len(blocks), len(pages)))
        return self.rng.sample(blocks, n), self.rng.sample(pages, n)


class Walk:
    """One seed."""

    def __init__(self, seed: int, daemon: WordsDaemon, runtime: Runtime | None) -> None:
        self.rng = random.Random(seed)
        # Of its own: another thread refuses, and what this one does next is not to hang on when.
        self.refusals = random.Random(seed)
        self.daemon, self.runtime = daemon, runtime
        self.memory = numbered(np.random.default_rng(seed), (LAYERS, BLOCKS, BYTES))
        self.model = Model(self.rng, self.memory)
        self.addresses = [layer.ctypes.data for layer in self.memory]
        if runtime is not None:
            size = BLOCKS * BYTES
            self.addresses = [runtime.allocate(0, size) for _ in range(LAYERS)]
            for address, layer in zip(self.addresses, self.memory, strict=True):
                runtime.copy(address, layer.ctypes.data, size)
            runtime.wait(0)
        caches = {
            n: LayerMemory(
                address, (BLOCKS, BYTES), (BYTES, 1), 1, "cpu" if runtime is None else "cuda:0"
            )
            for n, address in enumerate(self.addresses)
        }
        self.blocks = daemon.worker.blocks(caches, block_size=16, threads=self.rng.choice([1, 2]))
        self.open: list[tuple[PendingCopy, list[int], list[int], bool]] = []
        self.refused = 0
        daemon.refuse = self.refuse

    def refuse(self, word: CopyBegins | CopyEnds) -> Refusal | None:
        if isinstance(word, CopyBegins) and self.refusals.random() < 0.15:
            self.refused += 1
            return Refusal(Code.WRONG_STATE, "not now", side="daemon")
        return None

    def run(self) -> None:
        dies = self.rng.random() < 0.3
        for number in range(ORDERS):
            self.step()
            if dies and number == ORDERS // 2:
                self.daemon.hang_up()
                break
        self.daemon.answer()
        for order, *_ in self.open:
            with contextlib.suppress(KvdError):
                order.result(10)
        self.settle()
        assert not self.open
        until(lambda: self.daemon.worker.movers.is_quiet)
        if not dies:
            assert set(self.daemon.ended) == set(self.daemon.began)
        self.compare()
        self.blocks.close()

    def step(self) -> None:
        match self.rng.choice(["order", "order", "order", "cancel", "hold", "answer", "look"]):
            case "order" if len(self.open) < 6:
                self.order()
            case "cancel" if self.open:
                self.rng.choice(self.open)[0].cancel()
            case "hold":
                self.daemon.hold()
            case "answer":
                self.daemon.answer()
            case "look":
                time.sleep(self.rng.choice([0.0, 0.0005, 0.003]))
        self.settle()

    def order(self) -> None:
        blocks, pages = self.model.chosen()
        is_save = self.rng.random() < 0.5
        begin: Callable[..., PendingCopy] = (
            self.blocks.begin_save if is_save else self.blocks.begin_load
        )
        order = begin(self.daemon.key(), {"kv": blocks}, pages={"kv": pages})
        self.open.append((order, blocks, pages, is_save))
        self.model.busy_blocks.update(blocks)
        self.model.busy_pages.update(pages)

    def settle(self) -> None:
        """Take note of what is over, and look that what it says is true."""
        for entry in [entry for entry in self.open if entry[0].is_over]:
            self.open.remove(entry)
            order, blocks, pages, is_save = entry
            assert order.safe()
            to, of = (pages, blocks) if is_save else (blocks, pages)
            there = self.model.pages if is_save else self.model.blocks
            source = self.model.blocks if is_save else self.model.pages
            for one, other in zip(to, of, strict=True):
                if order.refusal is None:
                    there[one] = source[other]
                elif order.waited_s:  # the daemon let it begin
                    there[one] = None
            self.model.busy_blocks -= set(blocks)
            self.model.busy_pages -= set(pages)
        self.compare()

    def compare(self) -> None:
        """What no order has is as the model says."""
        there, pages = self.there(), self.pages()
        for n, expected in enumerate(self.model.blocks):
            if n not in self.model.busy_blocks and expected is not None:
                assert there[:, n].tobytes() == expected, f"block {n}"
        for n, expected in enumerate(self.model.pages):
            if n not in self.model.busy_pages and expected is not None:
                assert pages[:, n].tobytes() == expected, f"page {n}"

    def there(self) -> NDArray[np.uint8]:
        if self.runtime is None:
            return self.memory
        found = np.empty_like(self.memory)
        for address, layer in zip(self.addresses, found, strict=True):
            self.runtime.copy(layer.ctypes.data, address, layer.nbytes)
        return found

    def pages(self) -> NDArray[np.uint8]:
        pool = self.daemon.worker.pool("main")
        return np.stack([next(iter(pool.arrays("kv", layer=n).values())) for n in range(LAYERS)])


def walk(seed: int, runtime: Runtime | None) -> None:
    daemon = WordsDaemon(raw_pool(layers=LAYERS, page_bytes=BYTES, pages=PAGES))
    try:
        with repeatable(seed, __file__):
            Walk(seed, daemon, runtime).run()
    finally:
        daemon.close()


@pytest.fixture(params=["host", "device"])
def runtime(request: pytest.FixtureRequest, double: Double, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "host":
        return None
    monkeypatch.setenv(VARIABLE, str(double.path))
    monkeypatch.setenv("DOUBLE_LATE_US", "2000")
    return load(double.environment)


@pytest.mark.parametrize("seed", range(*seed_range("0:12")))
def test_what_is_said_of_random_orders_is_true(seed: int, runtime: Runtime | None) -> None:
    walk(seed, runtime)


def _copy_another_block(patch: pytest.MonkeyPatch) -> None:
    """The last block of an order is another; the order still has those that it named."""
    pieces = PieceTable.pieces

    def wrong(self: PieceTable, blocks: Any, pages: Any, units: Any) -> PieceColumns:
        others = blocks.copy()
        others[-1] = (others[-1] + 1) % BLOCKS
        return pieces(self, others, pages, units)

    patch.setattr(PieceTable, "pieces", wrong)


def test_a_mover_that_copies_another_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _copy_another_block(monkeypatch)
    with pytest.raises(AssertionError, match=r"(block|page) \d+"):
        walk(1, None)
