"""Real ``vllm serve`` on the CPU, for the measurements that need one: started, asked, stopped.

What lives here: an engine as a child process with one OpenMP thread, a small model with random
weights, the pool that fits it, a prompt and its answer. What must not: what is measured.

Needs ``KVD_VLLM_PYTHON``, an environment with vLLM and kvd.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.harness.child import ChildFailed
from kvd.harness.daemons import free_port

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
MAKES_MODEL: Final = ROOT / "examples" / "vllm-pair" / "model.py"
SERVE: Final = ("-m", "vllm.entrypoints.openai.api_server")
BLOCK: Final = 32
START_S: Final = 300.0
ASK_S: Final = 60.0
STOP_S: Final = 20.0


class ServedEngine:
    """A process that serves HTTP, and all that it starts: a session of its own.

    Args:
        name: of its log.
        folder: where that lies.
        command: what is run.
        environment: beside this process's own.
        port: where it serves.
        health: what is asked there until it does.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        port: int,
        health: str = "/health",
    ) -> None:
        self.port = port
        self.name = name
        self._health = health
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return when it serves.

        Raises:
            ChildFailed: it has ended, or took longer.
        """
        until_s = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > until_s:
                said = self._log.read_text(errors="replace").splitlines()[-20:]
                raise ChildFailed("\n".join([f"{self.name} does not serve", *said]))
            with contextlib.suppress(OSError, http.client.HTTPException):
                link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                link.request("GET", self._health)
                if link.getresponse().status == 200:
                    return
            time.sleep(0.25)

    @property
    def pid(self) -> int:
        """Of the session."""
        return self._process.pid

    def stop(self) -> None:
        """End all of it."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ServedVllm(ServedEngine):
    """One ``vllm serve``; ``program`` is what Python runs with these arguments of vLLM."""

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        program: Sequence[str] = SERVE,
    ) -> None:
        port = free_port()
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else vLLM takes back what ``engine_arguments`` says of the executor, on a CPU, without
            # a word. It decides nothing else of a server.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
        }
        command = [os.environ["KVD_VLLM_PYTHON"], *program, *arguments, "--port", str(port)]
        super().__init__(name, folder, command, {**own, **environment}, port=port)


class Answer(NamedTuple):
    """What came of a prompt.

    ``first_at_s``: when the first token was here; ``cached_tokens``: so many of the prompt were not
    computed.
    """

    tokens: tuple[int, ...]
    first_at_s: float
    cached_tokens: int


def answer_of(port: int, ids: Sequence[int], *, tokens: int) -> Answer:
    """Ask whoever listens there for so many tokens behind a prompt, as they come.

    Raises:
        ChildFailed: none came.
    """
    asked = {
        "model": "m",
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_S)
    found: list[int] = []
    first_at_s, n_cached = 0.0, 0
    with contextlib.closing(link):
        headers = {"Content-Type": "application/json"}
        link.request("POST", "/v1/completions", json.dumps(asked).encode(), headers)
        response = link.getresponse()
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                for choice in event.get("choices", ()):
                    found += choice.get("token_ids") or ()
                if found and not first_at_s:
                    first_at_s = time.monotonic()
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                n_cached = details.get("cached_tokens") or n_cached
    if not found:
        raise ChildFailed(f"no token ({response.status})")
    return Answer(tuple(found), first_at_s, n_cached)


def lose_cache(port: int, name: str) -> None:
    """Drop vLLM's own cache, and nothing behind it; needs ``VLLM_SERVER_DEV_MODE``.

    Raises:
        ChildFailed: blocks are still in use.
    """
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_S)
    with contextlib.closing(link):
        link.request("POST", "/reset_prefix_cache")
        if not json.loads(link.getresponse().read()).get("success"):
            raise ChildFailed(f"{name}: blocks are still in use")


def counted(port: int, name: str) -> float:
    """What a counter of vLLM's ``/metrics`` has come to; 0 where it has none of that name."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_S)
    with contextlib.closing(link):
        link.request("GET", "/metrics")
        told = link.getresponse().read().decode()
    lines = (line for line in told.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def busy_of(leaders: Collection[int]) -> float:
    """Seconds of processors of all processes of these sessions so far."""
    found_s = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) in leaders:
                found_s += time.clock_gettime(_clock_of(int(stat.parent.name)))
    return found_s


def _clock_of(pid: int) -> int:
    """As ``clock_getcpuclockid`` has it: what /proc says of a process has steps of 10 ms."""
    return (~pid << 3) | 2


def prompts(seed: int, n_tokens: int) -> Iterator[list[int]]:
    """Each another one from its first token on."""
    draw = np.random.default_rng(seed)
    while True:
        yield draw.integers(5, 1000, n_tokens).tolist()


def model_in(folder: Path) -> Path:
    """A small Llama with random weights."""
    made = folder / "model"
    subprocess.run([os.environ["KVD_VLLM_PYTHON"], str(MAKES_MODEL), str(made)], check=True)
    return made


def settings_of(model: Path, pages: int) -> dict[str, str]:
    """A pool whose pages are this model's blocks."""
    shape = json.loads((model / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    page_bytes = BLOCK * shape["num_key_value_heads"] * head_dim * 2 * 4
    return {
        "pool.family": "raw",
        "pool.layers": str(shape["num_hidden_layers"]),
        "pool.page_size": str(BLOCK),
        "pool.page_bytes": str(page_bytes),
        "pool.pages": str(pages),
    }


def engine_arguments(model: Path, *, chunk: int, most_tokens: int) -> list[str]:
    """How every engine is started: prompts of so many tokens, computed ``chunk`` at a time."""
    return [
        *("--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1"),
        *("--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"),
        *("--max-model-len", str(max(2048, most_tokens + BLOCK))),
        *("--max-num-batched-tokens", str(chunk), "--enable-prompt-tokens-details"),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(128 << 20)),
        # As with one GPU. In a process of its own, as on a CPU, a worker looks for its next step
        # without a pause, for a second behind the last one: an engine that has nothing to do takes
        # a core from those that work, and as much of it as they leave.
        *("--distributed-executor-backend", "uni"),
    ]


def kvd_transfer(endpoint: str, *, parts: bool = False) -> dict[str, object]:
    """What vLLM is told of kvd."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvd.endpoint": endpoint, "kvd.load_parts": parts},
    }
