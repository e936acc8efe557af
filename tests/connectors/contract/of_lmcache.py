"""The tier of LMCache: objects of two pages, by what LMCache calls them. LMCache is not here.

A request is what LMCache makes of it: it holds those objects that there are, loads them, computes
the rest and stores it, and lets go of what it held.
"""

from __future__ import annotations

import hashlib
import logging
from typing import ClassVar

import numpy as np
import pytest

from kvd.client import KvdError, connect_sync
from kvd.connectors.daemon_link import ConnectorSession
from kvd.connectors.lmcache.names import ChunkName, Naming, check_version, page_keys
from kvd.connectors.lmcache.objects import ChunkCache, ChunkPages
from tests.connectors.contract.cases import Step
from tests.connectors.contract.engine import (
    LINK_HURRIES,
    LINK_WAITS,
    NOTHING,
    PAGE,
    Aborted,
    PlayedEngine,
)

OBJECT_BYTES = 300
PAGE_BYTES = 256


class LmcacheServer(PlayedEngine):
    """One that asks for one prompt after the other; nobody preempts it."""

    steps = tuple(step for step in Step if step is not Step.PREEMPTED)
    pool: ClassVar = {
        "pool.family": "raw",
        "pool.layers": "1",
        "pool.page_size": str(PAGE),
        "pool.page_bytes": str(PAGE_BYTES),
        "pool.pages": "48",
    }
    unlike: ClassVar = {
        "family": (
            {"pool.family": "mha", "pool.layers": "2", "pool.heads": "1", "pool.head_dim": "8"}
            | {"pool.pages": "48"},
            "need pages of plain bytes",
        ),
        "ranks": ({"pool.tp_size": "2"}, "in 2 shards"),
    }
    waits = LINK_WAITS
    hurries = LINK_HURRIES

    def __init__(self, endpoint, *, model=""):
        self._endpoint, self._model = endpoint, model
        self._naming = Naming("lmcache 0.5.6", weights=model)
        self._link = ConnectorSession(
            endpoint,
            name="lmcache",
            kind="lmcache 0.5.6",
            fit=lambda node: ChunkPages(node.pool("main")),
            logger=logging.getLogger("kvd.connectors.lmcache"),
            without="LMCache goes on without the node's cache",
        )
        self._link.open()
        self._cache = ChunkCache(self._link, self._naming.namespace)

    def _names(self, tokens):
        """Of whole chunks, as LMCache hashes them: each hash is of all tokens so far."""
        return [
            ChunkName(
                chunk=hashlib.sha256(repr(list(tokens[:end])).encode()).digest(),
                model="model",
                rank=0x01000100,
                group=0,
                salt="",
                layout="(300,) torch.uint8",
                n_bytes=OBJECT_BYTES,
            )
            for end in range(PAGE, len(tokens) + 1, PAGE)
        ]

    def _bytes(self, name):
        """What is computed: it depends on all tokens and on the model."""
        seed = hashlib.sha256(name.chunk + self._model.encode()).digest()
        return np.frombuffer((seed * 10)[:OBJECT_BYTES], np.uint8)

    def answer(self, tokens, happening=NOTHING):
        names, held = self._names(tokens), []
        with pytest.MonkeyPatch.context() as patch:
            for step, method in ((Step.LOADING, "read"), (Step.SAVING, "write")):
                if happening.at is step:
                    self._happen_within(patch, method, happening)
            try:
                return self._answer(names, held, happening)
            except Aborted:
                return None
            finally:
                self._cache.release(held)

    @staticmethod
    def _happen_within(patch, method, happening):
        """Between two objects."""
        plain, calls = getattr(ChunkPages, method), []

        def wrapped(self, pages, data):
            calls.append(pages)
            if len(calls) == 2:
                happening(happening.at)
            plain(self, pages, data)

        patch.setattr(ChunkPages, method, wrapped)

    def _answer(self, names, held, happening):
        happening(Step.LOOKING_UP)
        found = self._cache.hold(names)
        held += [name for name, is_held in zip(names, found, strict=True) if is_held]
        happening(Step.HELD)
        buffers = [np.full(OBJECT_BYTES, 7, np.uint8) for _ in held]
        loaded = self._cache.load(held, buffers)
        here = set()
        for name, data, is_loaded in zip(held, buffers, loaded, strict=True):
            if is_loaded:
                here.add(name)
                assert (data == self._bytes(name)).all(), "KV that is not its own"
        happening(Step.COMPUTING)
        rest = [name for name in names if name not in here]
        self._cache.store(rest, [self._bytes(name) for name in rest])
        self._cache.release(held)
        held.clear()
        happening(Step.RELEASED)
        return len(here) * PAGE

    def settle(self):
        self._cache.look()
        assert not self._cache.held

    @property
    def namespace(self):
        return self._naming.namespace(self._names(range(PAGE))[0])

    def cached(self, tokens):
        with connect_sync(self._endpoint, name="look") as node:
            found = [
                node.match(keys=page_keys(name, 2), namespace=self.namespace).tokens
                for name in self._names(tokens)
            ]
        return sum(n == 2 * PAGE for n in found) * PAGE

    def reset(self):
        with connect_sync(self._endpoint, name="weights") as told:
            told.new_epoch("lmcache:model")

    def close(self):
        self._cache.forget()
        self._link.close()

    @classmethod
    def with_other_version(cls, endpoint, patch):
        with pytest.raises(KvdError) as refused:
            check_version("0.9.0", any_version=False)
        return str(refused.value)
