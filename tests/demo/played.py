"""An engine of the demo whose KV memory is its own, and whose daemon is played."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.config import Config, load
from kvd.config.pool import pool_spec
from kvd.demo.cache import Lengths
from kvd.demo.layout import PoolPart
from kvd.demo.leased import LeasedSequence, PoolViews, last_logits
from kvd.demo.models import ARCHITECTURES
from kvd.demo.own_blocks import BlockLease, own_blocks
from kvd.wire.attach import CopyBegins
from tests.demo.reference import ROUNDING, own_cache
from tests.support.copies import WordsDaemon

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvd.client.lease_key import LeaseKey
    from kvd.client.worker import Worker
    from kvd.demo.layout import ModelShape
    from kvd.demo.own_blocks import OwnBlocks

PAGE, PAGES = 16, 64


class PlayedLease:
    """A lease of the session that has these pages; sliding takes window pages away."""

    def __init__(self, key: LeaseKey, rows: dict[str, list[int]], step: int, window: int) -> None:
        self.key = key
        self.rows = {name: np.array(row, np.int32) for name, row in rows.items()}
        self._spare = self.rows["swa"].copy() if "swa" in rows else None
        self._step, self._window = step, window
        self.slide(0)

    def pages_of(self, component: str) -> NDArray[np.int32]:
        return self.rows[component].copy()

    def slide(self, upto_tokens: int) -> None:
        if self._spare is not None:
            first = max(0, upto_tokens - self._window + 1) // PAGE
            end = -(-(upto_tokens + self._step) // PAGE)
            self.rows["swa"][:] = 0
            self.rows["swa"][first:end] = self._spare[first:end]


class Played:
    """A model's engine whose daemon is played: ``lease`` sees new pages as blocks."""

    def __init__(
        self,
        name: str,
        made: Callable[[ModelShape, Worker], OwnBlocks] = lambda *of: own_blocks(*of, "cpu"),
    ) -> None:
        self.row = ARCHITECTURES[name]
        settings = self.row.pool.settings(dict.fromkeys(PoolPart, PAGES))
        config = load(None, {}, [f"{key}={value}" for key, value in settings.items()])
        assert isinstance(config, Config), config
        self.daemon = WordsDaemon(pool_spec(config))
        self.own = made(self.row.shape, self.daemon.worker)
        self.views = PoolViews(self.row.shape, self.own)
        self.pool = PoolViews(self.row.shape, self.daemon.worker.pool("main"))

    def lease(self, count: int, *, step: int = 400) -> PlayedLease:
        order = (np.random.default_rng(3).permutation(PAGES - 1) + 1)[:count].tolist()
        rows = {part.value: order for part in self.views.parts}
        return PlayedLease(self.daemon.key(), rows, step, self.row.shape.window_tokens)

    def saved_in_chunks(
        self, model: PreTrainedModel, lease: PlayedLease, prompt: list[int]
    ) -> BlockLease:
        """The prompt is computed and saved in chunks of 40, which end within pages."""
        whole = own_cache(model)
        first = BlockLease(self.own, lease, kept_tokens=0)
        sequence = LeasedSequence(model, self.views, first, Lengths(0, 0), step_tokens=400)
        for at in range(0, len(prompt), 40):
            found = sequence.compute(prompt[at : at + 40])
            first.save(sequence.written_tokens)
            assert (found - last_logits(model, prompt[at : at + 40], whole)).abs().max() <= ROUNDING
        return first

    def begun(self) -> list[CopyBegins]:
        return [word for word in self.daemon.said if isinstance(word, CopyBegins)]
