"""SGLang's storage under SGLang's own classes, in a process of SGLang's Python for each engine.

An engine is at the other end of a connection (``sglang_process``). SGLang is imported once, by a
process that all engines are forked from; those of a process that this suite starts too.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pkgutil
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import pytest

from kvd.client import KvdError, connect_sync
from kvd.connectors.sglang import page_store, storage_link
from kvd.connectors.sglang.chains import key_of
from kvd.errors import Code, Refusal
from tests.connectors.contract.cases import Step
from tests.connectors.contract.engine import (
    LINK_HURRIES,
    LINK_WAITS,
    NOTHING,
    PAGE,
    Aborted,
    PlayedEngine,
)

PYTHON = os.environ.get("KVD_SGLANG_PYTHON", "")
if not PYTHON:
    raise ImportError("set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23")

ROOT = Path(__file__).parents[3]
ENGINES = "KVD_TEST_SGLANG_ENGINES"
"""Where the process listens that engines are forked from."""

STARTS_S = 240.0
ANSWERS_S = 240.0
PAGE_BYTES = 3 * 2 * 2 * 32 * 2 * 16
"""Layers, K and V, heads, their size, bfloat16, tokens: as SGLang's pools are made there."""

assert page_store, storage_link


def _listening() -> str:
    """Its socket; it is started by the first who asks, and found by his children."""
    if ENGINES not in os.environ:
        directory = tempfile.mkdtemp(prefix="kvd-sgl-")
        path = f"{directory}/engines.sock"
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.connectors.contract.sglang_process", path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
        )
        os.environ[ENGINES] = path
        atexit.register(_stop, process, directory)
    return os.environ[ENGINES]


def _stop(process, directory) -> None:
    process.stdin.close()
    process.wait(timeout=60)
    shutil.rmtree(directory, ignore_errors=True)


def _connected() -> socket.socket:
    path, end_s = _listening(), time.monotonic() + STARTS_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            assert time.monotonic() < end_s, "SGLang is never imported"
            time.sleep(0.1)
            continue
        sock.settimeout(ANSWERS_S)
        return sock


class SglangEngine(PlayedEngine):
    """One whose tree prefetches and backs up pages of host memory, by SGLang's own threads."""

    pool: ClassVar = {
        "pool.family": "raw",
        "pool.layers": "1",
        "pool.page_size": str(PAGE),
        "pool.page_bytes": str(PAGE_BYTES),
        "pool.pages": "48",
    }
    unlike: ClassVar = {
        "page size": ({"pool.page_size": "32"}, "page_size"),
        "dtype": ({"pool.page_bytes": str(PAGE_BYTES // 2)}, f"has {PAGE_BYTES} bytes"),
        "family": (
            {"pool.family": "mha", "pool.layers": "2", "pool.heads": "1", "pool.head_dim": "8"}
            | {"pool.pages": "48"},
            "family",
        ),
        "ranks": ({"pool.tp_size": "2"}, "in 2 shards"),
    }
    waits: ClassVar = LINK_WAITS | {
        "kvd.connectors.sglang.storage_link.AGAIN_WITHIN_S": 20.0,
        "kvd.connectors.sglang.page_store.COPY_WITHIN_S": 20.0,
    }
    hurries = LINK_HURRIES

    def __init__(self, endpoint, *, model="", version=""):
        self._endpoint = endpoint
        self._sock = _connected()
        self._lines = self._sock.makefile("rw")
        try:
            self._namespace = self._asked(
                "start", endpoint=endpoint, weights=model or "played", version=version
            )["namespace"]
        except BaseException:
            self._hang_up()
            raise

    def _asked(self, deed, **how):
        self._say(do=deed, **how)
        return self._heard()

    def _say(self, **told):
        places = [*self.waits, *self.hurries]
        told["set"] = {place: pkgutil.resolve_name(place) for place in places}
        self._lines.write(json.dumps(told) + "\n")
        self._lines.flush()

    def _heard(self):
        heard = json.loads(self._lines.readline())
        for line in heard["said"]:
            logging.getLogger("kvd.connectors.sglang").warning("%s", line)
        if "refused" in heard:
            code, why = heard["refused"]
            raise KvdError(Refusal(Code(code), why, side="client"))
        assert "failed" not in heard, heard["failed"]
        return heard

    def answer(self, tokens, happening=NOTHING):
        at = None if happening.at is None else happening.at.value
        heard = self._asked("answer", tokens=list(tokens), at=at)
        if "at" in heard:
            aborts = False
            try:
                happening(Step(heard["at"]))
            except Aborted:
                aborts = True
            self._say(aborts=aborts)
            heard = self._heard()
        return heard["found"]

    def settle(self):
        self._asked("settle")

    @property
    def namespace(self):
        return self._namespace

    def cached(self, tokens):
        names = self._asked("names", tokens=list(tokens))["names"]
        with connect_sync(self._endpoint, name="look") as node:
            keys = [key_of(name) for name in names]
            return node.match(keys=keys, namespace=self.namespace).tokens

    def reset(self):
        """As the storage's ``clear``, said by another engine of these pages."""
        with connect_sync(self._endpoint, name="clears") as told:
            told.new_epoch(self.namespace)

    def close(self):
        if self._sock is not None:
            self._asked("close")
            self._hang_up()

    def _hang_up(self):
        self._lines.close()
        self._sock.close()
        self._sock = None

    @classmethod
    def with_other_version(cls, endpoint, patch):
        with pytest.raises(AssertionError) as refused:
            cls(endpoint, version="0.9.0")
        return str(refused.value)
