"""LMCache's own server with its objects in a daemon's pool: real processes, no GPU.

``KVD_LMCACHE_PYTHON`` names the interpreter of an environment that has LMCache; several, with a
colon between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.daemons import free_port, one_daemon

ROOT = Path(__file__).parents[2]
PYTHONS = [path for path in os.environ.get("KVD_LMCACHE_PYTHON", "").split(":") if path]
UP_S = 240.0
TOKENS = 1024
POOL = {
    "pool.family": "raw",
    "pool.layers": "1",
    "pool.page_size": "256",
    "pool.page_bytes": str(1 << 20),
    "pool.pages": "64",
    "pool.backing": "shm",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHONS, reason="KVD_LMCACHE_PYTHON names no LMCache"),
]


class Server:
    """``lmcache server`` with kvd below its own memory, and an engine of its benchmark."""

    def __init__(self, python, daemon, directory, **params):
        port, http = free_port(), free_port()
        adapter = {
            "type": "plugin",
            "module_path": "kvd.connectors.lmcache",
            "class_name": "KvdL2Adapter",
            "adapter_params": {"endpoint": daemon.client, "any_version": True, **params},
        }
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._log = directory / f"lmcache-{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(python, Path(python).parent / "lmcache", "server"),
                    *("--port", str(port), "--http-port", str(http), "--disable-observability"),
                    *("--supported-transfer-mode", "engine_driven", "--shm-name", f"kvd{port}"),
                    *("--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
                    *("--l2-adapter", json.dumps(adapter)),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
        self._wait_up(f"http://127.0.0.1:{http}/healthcheck")
        self._engine = subprocess.Popen(
            [
                python,
                "tests/engines/lmcache_driver.py",
                f"tcp://localhost:{port}",
                f"http://localhost:{http}",
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer()["ready"]

    def _wait_up(self, url):
        end_s = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                return
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end_s, self.log()
            time.sleep(0.2)

    def log(self):
        return self._log.read_text(errors="replace")[-4000:]

    def _answer(self):
        """The next line that is one: LMCache writes others there too."""
        for line in self._engine.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self.log())

    def say(self, line):
        self._engine.stdin.write(f"{line}\n")
        self._engine.stdin.flush()
        return self._answer()

    def put(self, number):
        done = self.say(f"put {number}")
        assert done["stored"], self.log()
        return done["found"]

    def get(self, number):
        """How much is found when its own memory is empty."""
        self.say("clear")
        done = self.say(f"get {number}")
        assert done["is_right"] is not False, "KV that is not its own"
        return done["found"]

    def close(self):
        for process in (self._engine, self._process):
            process.kill()
            process.wait()
        self._engine.stdin.close()
        self._engine.stdout.close()


def is_stored(daemon, n_objects):
    (pool,) = daemon.snapshot().pools
    return pool.cached_pages >= n_objects and not pool.held_pages


def until(server, number, wanted):
    end_s = time.monotonic() + 60
    while (found := server.get(number)) != wanted:
        assert time.monotonic() < end_s, f"{found} tokens are found, not {wanted}"
        time.sleep(0.2)


@pytest.mark.parametrize("python", PYTHONS)
def test_its_objects_outlive_its_memory_its_daemon_and_itself(python):
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-l-")))
        settings = POOL | {"pool.directory": memory}
        daemon = stack.enter_context(one_daemon(directory, settings))
        server = Server(python, daemon, directory)
        stack.callback(server.close)

        assert server.put(1) == 0
        daemon.wait_for(lambda: is_stored(daemon, 4), "nothing is stored", 60)
        assert server.get(1) == TOKENS, "loaded from the pool"

        # Killed: a miss, and LMCache goes on with what it has itself.
        daemon.kill()
        assert server.put(2) == 0
        assert server.say("get 2") == {"found": TOKENS, "is_right": True}
        assert server.get(1) == 0
        daemon.start()
        daemon.wait_ready()
        until(server, 1, TOKENS)

        # Stopped: a miss in bounded time, and used again when it goes on.
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            assert server.get(1) == 0
            assert time.monotonic() - began_s < 30
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(server, 1, TOKENS)

        # Killed itself: nothing is held, and the next one finds what it has stored.
        server.close()
        daemon.wait_for(lambda: not daemon.snapshot().leases, "something is held", 60)
        again = Server(python, daemon, directory)
        stack.callback(again.close)
        assert again.put(1) == TOKENS
        assert again.get(1) == TOKENS


@pytest.mark.parametrize("python", PYTHONS[:1])
def test_weights_of_another_name_share_nothing(python):
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-l-")))
        settings = {key: value for key, value in POOL.items() if key != "pool.backing"}
        daemon = stack.enter_context(one_daemon(directory, settings))
        one = Server(python, daemon, directory, weights="v1")
        stack.callback(one.close)
        assert one.put(1) == 0
        daemon.wait_for(lambda: is_stored(daemon, 4), "nothing is stored", 60)
        other = Server(python, daemon, directory, weights="v2")
        stack.callback(other.close)
        assert other.put(1) == 0
        daemon.wait_for(lambda: is_stored(daemon, 8), "nothing is stored", 60)
        assert one.get(1) == TOKENS
        assert other.get(1) == TOKENS
