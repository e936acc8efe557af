"""A prefill and a decode engine of SGLang's, each in a process, and the daemons of their nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.connectors.sglang.world import held, settings_for
from tests.support.daemons import free_port, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Pair

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("KVD_SGLANG_PYTHON", "")

WITHIN_S = 120.0

IMPATIENT = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "6",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "6",
}
"""Of an engine: what waits for a daemon that is stopped is given up soon."""

MHA_BYTES = 3 * 2 * 2 * 32 * 2 * 16
"""Of a page, as ``pd_engine`` has it; one of latents has as many."""


class SGLang:
    """The process that has SGLang imported, and forks engines."""

    _stores = itertools.count()

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/engines"
        self._process = subprocess.Popen(
            [PYTHON, "-W", "ignore", "-m", "tests.connectors.sglang.pd_process", self._path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self._process.stdout:
            if line == "listening\n":
                return
        raise AssertionError("SGLang's process has ended")

    def engine(self, role, port, told, **settings) -> PlayedEngine:
        """A new engine; ``settings`` are those of ``KVD_SGLANG``."""
        told_by = {"KVD_SGLANG": json.dumps({"kvd.weights": "played", **settings})}
        told_by |= told.get("env", {})
        if told.get("tp", 1) > 1:
            told = told | {"store": f"{self._path}-{role}-{next(self._stores)}"}
        return PlayedEngine(
            [
                self._rank([role, port, told | {"rank": rank}, told_by])
                for rank in range(told.get("tp", 1))
            ]
        )

    def _rank(self, first) -> PlayedRank:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        return PlayedRank(connection, first)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(WITHIN_S)


class PlayedRank:
    """One rank of an engine, at the other end of a connection."""

    def __init__(self, connection, first) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw")
        self._told = queue.Queue()
        self._kept = []
        self._write(first)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _write(self, line) -> None:
        self._lines.write(f"{json.dumps(line)}\n")
        self._lines.flush()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("r") as lines:
            for line in lines:
                self._told.put(json.loads(line))
        self._told.put({"ended": True})

    def tell(self, *command) -> None:
        self._write(command)

    def hear(self, key, **values):
        """What it has told with that key, and with these values."""
        told = self._heard(lambda told: key in told and values.items() <= told.items())
        self._kept.remove(told)
        return told

    def comes_to_stop(self, rid) -> bool:
        """Whether it stops where it was to, before that request is over."""
        told = self._heard(lambda told: "at" in told or ("over" in told and told["rid"] == rid))
        if "at" in told:
            self._kept.remove(told)
        else:
            self.tell("stop at", "")
        return "at" in told

    def _heard(self, is_it):
        """The first that is so; it is kept."""
        until_s = time.monotonic() + WITHIN_S
        while True:
            for told in self._kept:
                if is_it(told):
                    return told
            try:
                told = self._told.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"it never came; {self._kept}") from None
            assert "failed" not in told, told["failed"]
            self._kept.append(told)

    def kill(self) -> None:
        """As if its process were killed: every thread ends where it is. It has no port any more."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._reader.join(WITHIN_S)
            assert not self._reader.is_alive(), "it has not ended"
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()


class PlayedEngine:
    """All ranks of an engine: what is told to it they hear, and what they tell has to be one."""

    def __init__(self, ranks) -> None:
        self.ranks = ranks

    def tell(self, *command) -> None:
        # What is of requests goes on from the first to the others.
        for rank in self.ranks[:1] if command[0] in {"add", "abort"} else self.ranks:
            rank.tell(*command)

    def hear(self, key, **values):
        """What each has told with that key."""
        first, *others = [rank.hear(key, **values) for rank in self.ranks]
        for told in others:
            assert key == "ready" or told[key] == first[key], (first, told)
        return first

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


class PlayedPair:
    """Both engines and both daemons."""

    _rooms = itertools.count(1000)

    def __init__(self, sglang, daemons, prefill, decode) -> None:
        self.sglang, self.daemons = sglang, daemons
        self.port = free_port()
        self.prefill = self.engine("prefill", prefill)
        self.decode = self.engine("decode", decode)
        self.namespaces: list[str] = []

    def wait_ready(self) -> None:
        self.namespaces = [rank.hear("ready")["ready"] for rank in (self.prefill, self.decode)]

    def engine(self, role, told) -> PlayedEngine:
        settings = {"kvd.endpoint": self.daemon(role).client, **told.get("settings", {})}
        return self.sglang.engine(role, self.port, told, **settings)

    def daemon(self, role):
        return getattr(self.daemons, role)

    def add(self, tokens, *, to=("decode", "prefill"), room=None, **more) -> str:
        """A request of the router's; its name."""
        room = next(self._rooms) if room is None else room
        rid = f"r{room}"
        for role in to:
            told = {"rid": rid, "tokens": tokens, "room": room, "port": self.port, **more}
            getattr(self, role).tell("add", told)
        return rid

    def came(self, tokens, **more) -> dict:
        """A request that goes well."""
        rid = self.add(tokens, **more)
        assert self.prefill.hear("over", rid=rid)["over"] == "sent"
        told = self.decode.hear("over", rid=rid)
        assert told["over"] == "came", told
        return told

    def why(self, role, rid) -> str:
        """Why a request has failed in this engine: one of its ranks says it."""
        told = [rank.hear("over", rid=rid) for rank in getattr(self, role).ranks]
        assert all(each["over"] == "aborted" for each in told), told
        return "; ".join(each["why"] for each in told)

    def works_again(self) -> None:
        """Handoffs go well, in the end."""
        until_s = time.monotonic() + WITHIN_S
        while True:
            rid = self.add(prompt(5, 10_000 + next(self._rooms)))
            ends = [rank.hear("over", rid=rid) for rank in (self.prefill, self.decode)]
            if [told["over"] for told in ends] == ["sent", "came"]:
                return
            assert time.monotonic() < until_s, ends
            time.sleep(0.3)

    def nothing_is_held(self) -> None:
        """By no engine, and in no daemon; and nobody writes into pages that are free."""
        for rank in (self.prefill, self.decode):
            rank.tell("spoiled")
            assert rank.hear("spoiled")["spoiled"], "a page that was free was written"
            rank.tell("whole")
            assert rank.hear("whole")["whole"], "an engine holds something"
        for daemon in (self.daemons.prefill, self.daemons.decode):
            daemon.wait_for(lambda daemon=daemon: held(daemon) == 0, "something is held", 60)

    def close(self) -> None:
        for rank in (self.prefill, self.decode):
            rank.kill()


def prompt(pages, seed, rest=5):
    """Tokens of so many pages, and of one that is begun."""
    drawn = random.Random(seed)
    return [drawn.randrange(1000) for _ in range(pages * 16 + rest)]


@contextlib.contextmanager
def nodes_for(page_bytes) -> Iterator[Pair]:
    """Two daemons, whose pools are for such pages."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-pd-") as directory,
        two_daemons(Path(directory), settings_for(page_bytes, 200)) as daemons,
    ):
        yield daemons


@contextlib.contextmanager
def pair_of(sglang, daemons, *, prefill=None, decode=None) -> Iterator[PlayedPair]:
    """Two new engines over two daemons; each of them is told what it is."""
    pair = PlayedPair(sglang, daemons, prefill or {}, decode or {})
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.close()
