"""Engines that are forked from one process of another interpreter: each starts in seconds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from tests.engines.environment import PYTHON

HERE = Path(__file__).parent
IDS = np.random.default_rng(7).integers(1, 4000, 300).tolist()


class Forks:
    """Engines that are forked from one process."""

    def __init__(self, directory, python=PYTHON):
        self._directory = directory
        # A connector of these tests is found there.
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        with (directory / "forks.log").open("w") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / "vllm_forks.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        self.started = 0

    def run(self, model, daemon=None, asks=({},), options=None, beside=None, breaks="", **engine):
        """What one engine answers, and its log."""
        self.started += 1
        log = self._directory / f"engine-{self.started}.log"
        engine["model"] = str(model)
        if daemon is not None:
            kvd = {
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd.connectors.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "kvd.endpoint": daemon.client,
                    "kvd.any_version": True,  # which was there was looked at before
                    **(options or {}),
                },
            }
            if beside:
                several = [{**kvd} if one == "kvd" else one for one in beside]
                kvd |= {
                    "kv_connector": "MultiConnector",
                    "kv_connector_module_path": None,
                    "kv_connector_extra_config": {"connectors": several},
                }
            engine["kv_transfer_config"] = kvd | {"kv_load_failure_policy": "recompute"}
        asks = [{"ids": IDS, **ask} for ask in asks]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"engine": engine, "asks": asks, "log": str(log), "breaks": breaks}
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
