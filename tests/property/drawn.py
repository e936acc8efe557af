"""Two nodes with small pools of one family, of sizes that dice have drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.layout.shards import tp_shards
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Device,
    HeldShards,
    Host,
    Mha,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
    shard_of,
)
from kvd.core.settings import CacheMode
from kvd.wire.peer import Integrity
from tests.property.cells import CellWorld
from tests.property.slots import SlotWorld

if TYPE_CHECKING:
    import random

FAMILIES = ("mha", "noted", "swa", "recurrent", "hisparse", "index", "every", "sharded")
"""``noted`` is mha in a pool that outlives its process, ``every`` has all kinds of components,
which no configuration has. ``sharded`` is mha with other ranks, layers and copies on each side, of
which the prefill side has all that the decode side keeps."""

_PAGES = (1, 2, 4, 16)
_KV = Mha(1, 1, 1, "float32")
_MODES = [CacheMode.RADIX] * 5 + [CacheMode.OFF]


class Drawn:
    """What both pools of a family have in common, and a pool for each side."""

    def __init__(self, family: str, rng: random.Random) -> None:
        self._rng = rng
        self._family = family
        self._counts_only = family == "recurrent" and rng.random() < 0.5
        """All its bytes are states: pages of tokens are counted, and there is none in memory."""
        self.page = page = 1 if self._counts_only else rng.choice(_PAGES)
        windows = (1, 2, 3, page, page + 1, 2 * page, 3 * page - 1, 5 * page)
        self._window = rng.choice(windows)
        self._d_page = page
        if family == "hisparse":
            self._d_page = rng.choice([one for one in _PAGES if one <= page])
        self._index_page = rng.choice([one for one in _PAGES if one <= self._d_page])
        self._model = 1, 1
        """Layers and heads, where they are told apart."""
        if family == "sharded":
            self._model = rng.randint(1, 2), rng.randint(1, 4)

    def world(self) -> SlotWorld:
        """Both nodes; each has a pool of its own."""
        rng = self._rng
        p_spec = self._spec(self.page, is_receiver=False)
        kind = CellWorld if self._family == "sharded" else SlotWorld
        world = kind(
            spec=self._spec(self._d_page, is_receiver=True),
            integrity=rng.choice((Integrity.OFF, Integrity.FULL, Integrity.SAMPLED)),
            sum_ahead_bytes=1,
            overtakers=rng.choice((0, 0, 2)),
            cache_mode=rng.choice(_MODES),
            is_journaled=self._family == "noted",
        )
        world.p.config = msgspec.structs.replace(
            world.p.config, spec=p_spec, cache_mode=rng.choice(_MODES)
        )
        world.restart(world.p)
        world.p.attach()
        world.pass_time(1)
        return world

    def _spec(self, page: int, *, is_receiver: bool) -> PoolSpec:
        rng, family = self._rng, self._family
        n_kv = rng.choice((rng.randint(12, 40), rng.randint(30, 120))) * (self.page // page)
        n_saved = rng.randint(5, 30)
        in_host = family == "hisparse" and is_receiver
        tier = Nowhere() if self._counts_only else Host() if in_host else Device("cpu")
        kv = Component("kv", 0 if self._counts_only else 1, _KV, page, tier=tier)
        found = [(kv, n_kv + 1, n_saved)]
        if family in {"index", "hisparse", "every"}:
            factor = page // self._index_page
            index = Component("index", 1, Mha(1, 1, 0, "float32"), self._index_page)
            found.append((index, (n_kv + 1) * factor, n_saved * factor))
        if family in {"swa", "every"}:
            n_window = rng.choice((rng.randint(4, 10), rng.randint(20, 90)))
            swa = Component("swa", 1, _KV, page, Tail(self._window))
            found.append((swa, n_window + 1, rng.randint(3, 12)))
        if family in {"recurrent", "every"}:
            layout = State((StateTensor("conv", (2,), "float32"),))
            state = Component("state", 1, layout, 1, PerRequest())
            n_states = rng.choice((1, 2, rng.randint(1, 5)))
            found.append((state, n_states + 1, rng.randint(2, 5)))
        if in_host or family == "every":
            buffer = Component("buffer", 1, _KV, page, Buffer(page * rng.randint(1, 6)))
            found.append((buffer, rng.randint(4, 20) + 1, 0))
        components, pages, saved = zip(*found, strict=True)
        spec = PoolSpec("main", family, PageOrder.PAGE_FIRST, components, pages, saved)
        return self._cut(spec, is_receiver=is_receiver) if family == "sharded" else spec

    def _cut(self, spec: PoolSpec, *, is_receiver: bool) -> PoolSpec:
        """The pool in shards; now and then in one, as that of any node."""
        rng, (layers, heads) = self._rng, self._model
        kv = msgspec.structs.replace(
            spec.components[0], layers=layers, layout=Mha(heads, 1, 1, "float32")
        )
        if rng.random() < 0.2:
            return msgspec.structs.replace(spec, components=(kv,))
        size = rng.choice([one for one in (1, 2, 3, 4, 6) if not (heads % one and one % heads)])
        ranks, stage = (0, size), (0, layers)
        if is_receiver:
            first = rng.randrange(size)
            ranks = rng.choice((ranks, (first, rng.randint(first + 1, size))))
            first = rng.randrange(layers)
            stage = rng.choice((stage, (first, rng.randint(first + 1, layers))))
        shards = tp_shards(heads, size, ranks, stage) * rng.choice((1, 1, 2))
        held = HeldShards(layers, heads, shards)
        parts = (shard_of(kv, shards[0]),)
        return msgspec.structs.replace(spec, components=parts, held=held)
