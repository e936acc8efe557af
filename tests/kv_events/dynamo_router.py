"""Dynamo's own router core as a consumer, where it is installed.

``KVD_DYNAMO_PYTHON`` names an interpreter with ``ai-dynamo-runtime`` of PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

PYTHON = os.environ.get("KVD_DYNAMO_PYTHON", "")
_SERVICE = Path(__file__).with_name("dynamo_service.py")


class DynamoService:
    """One ``SelectionService`` that listens to one node."""

    def __init__(self, listen: str, replay: str, model: str, page: int) -> None:
        self._model = model
        self._process = subprocess.Popen(
            [PYTHON, "-P", str(_SERVICE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        answer = self._ask(
            register={
                "worker_id": 1,
                "model_name": model,
                "endpoint": "http://127.0.0.1:9",
                "block_size": page,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "total_kv_blocks": 1000,
                "kv_events_endpoint": listen,
                "replay_endpoint": replay,
            }
        )
        assert answer.get("lifecycle") == "schedulable", answer

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def found(self, tokens: list[int]) -> int:
        """Blocks of a prompt that are there from its start, in whatever medium."""
        answer = self._ask(overlap={"model_name": self._model, "token_ids": tokens})
        (worker,) = answer["workers"] or [{}]
        media = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        return max([worker.get(medium, 0) for medium in media])

    def media(self, tokens: list[int]) -> set[str]:
        """Where a prompt is found: what Dynamo counts for a medium goes on from the one above."""
        answer = self._ask(overlap={"model_name": self._model, "token_ids": tokens})
        (worker,) = answer["workers"]
        found = {"cpu": worker["host_pinned_extension_blocks"]}
        found["storage"] = worker["disk_extension_blocks"]
        return {medium for medium, blocks in found.items() if blocks}

    def until(self, tokens: list[int], n_blocks: int, within_s: float = 20.0) -> int:
        """What is found, as soon as that is it, or in the end."""
        end_s = time.monotonic() + within_s
        while (found := self.found(tokens)) != n_blocks and time.monotonic() < end_s:
            time.sleep(0.1)
        return found

    def _ask(self, **verb: object) -> dict:
        self._process.stdin.write(json.dumps(verb) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
