"""Engines that are forked from one process of another interpreter: each starts in seconds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from tests.engines.engine import transfer_of
from tests.engines.environment import PYTHON

HERE = Path(__file__).parent
IDS = np.random.default_rng(7).integers(1, 4000, 300).tolist()


class Forks:
    """Engines that are forked from one process."""

    def __init__(self, directory):
        self._directory = directory
        # A connector of these tests is found there.
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        with (directory / "forks.log").open("w") as log:
            self._process = subprocess.Popen(
                [PYTHON, str(HERE / "vllm_forks.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        self.started = 0

    def run(self, model, daemon=None, asks=({},), options=None, beside=None, **engine):
        """What one engine answers, and its log."""
        self.started += 1
        log = self._directory / f"engine-{self.started}.log"
        engine["model"] = str(model)
        if daemon is not None:
            told = {"kvd.endpoint": daemon.client, **(options or {})}
            engine["kv_transfer_config"] = transfer_of(told, beside or ())
        asks = [{"ids": IDS, **ask} for ask in asks]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"engine": engine, "asks": asks, "log": str(log)}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline()), log.read_text()

    def answers(self, *where, **how):
        found, log = self.run(*where, **how)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        return found

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
