"""``benchmarks first_token``: a prompt is computed by one vLLM, and decoded by another.

Two real ``vllm serve`` on the CPU and ``kvd proxy`` before them, with kvd's connector and two
daemons, and with vLLM's own ``NixlConnector``: one pair after the other, on the same machine, of
the same model. What counts is from the end of the step in which the prefill engine has computed the
last of the prompt, to the end of the step in which the decode engine has the first token of the
answer: all that a handoff adds. Both are noted in vLLM's schedulers, by the one clock of the host;
so is where the time between them goes. A first token of a prompt that the decode engine has itself
is the floor.

Needs ``KVD_VLLM_PYTHON``, an environment with vLLM and kvd, and for the reference ``nixl`` in it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import free_port, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvd.bench.report import Measured, Told

ROOT: Final = Path(__file__).parents[1]
ENGINE: Final = ROOT / "tests" / "engines" / "vllm_marks.py"
MAKES_MODEL: Final = ROOT / "examples" / "vllm-pair" / "model.py"
BLOCK: Final = 32
KEPT_PROMPTS: Final = 8
"""So many the pool of each daemon has room for."""
START_S: Final = 300.0
ASK_S: Final = 60.0
STOP_S: Final = 20.0
QUIET_S: Final = 0.3
"""Between two requests: what the one before has left to be done is done."""

NIXL_PAUSE_US: Final = 100
WARM_UP: Final = 3
"""Prompts of each pair that do not count."""

STAGES: Final = {
    "answered": "the answer of the prefill engine, the proxy, the decode engine's HTTP",
    "matched": "until the decode engine's connector says how much there is",
    "blocks": "until it has blocks",
    "loaded": "until they are filled",
    "step": "until its step begins",
    "first": "its step",
}

COLUMNS: Final = (
    ResultColumn("connector", "connector"),
    ResultColumn("router", "router"),
    ResultColumn("median_ms", "first token after the prompt, median ms", ".1f"),
    ResultColumn("least_ms", "least", ".1f"),
    ResultColumn("most_ms", "most", ".1f"),
    ResultColumn("client_ms", "... at the client, median ms", ".1f"),
    ResultColumn("whole_ms", "whole request, median ms", ".0f"),
    ResultColumn("busy_ms", "of processors, ms a request", ".0f"),
)
STAGE_COLUMNS: Final = (
    ResultColumn("connector", "connector"),
    ResultColumn("router", "router"),
    *(ResultColumn(f"{stage}_ms", stage, ".1f") for stage in STAGES),
)


class SchedulerMark(NamedTuple):
    """What a scheduler did with a request, and when."""

    what: str
    request: str
    at_s: float


class ServedVllm:
    """One ``vllm serve``, and all that it starts: a session of its own."""

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.port = free_port()
        self.marks_file = folder / f"{name}.marks"
        self.marks_file.touch()
        self._log = folder / f"{name}.log"
        self._name = name
        own = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
            "MARKS": str(self.marks_file),
        }
        command = [os.environ["KVD_VLLM_PYTHON"], str(ENGINE), *arguments]
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **own, **environment},
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
                raise ChildFailed("\n".join([f"{self._name} does not serve", *said]))
            with contextlib.suppress(OSError, http.client.HTTPException):
                link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                link.request("GET", "/health")
                if link.getresponse().status == 200:
                    return
            time.sleep(0.25)

    def marks(self, since_s: float) -> list[SchedulerMark]:
        """Those behind that time."""
        said = [json.loads(line) for line in self.marks_file.read_bytes().splitlines()]
        return [SchedulerMark(**mark) for mark in said if mark["at_s"] >= since_s]

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


def busy_of(leaders: Sequence[int]) -> float:
    """Seconds of processors of all processes of these sessions so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) in leaders:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class MeasuredPair:
    """A prefill engine, a decode engine, and a proxy before them."""

    def __init__(
        self,
        connector: str,
        router: str,
        prefill: ServedVllm,
        decode: ServedVllm,
        folder: Path,
        *,
        more: Sequence[int] = (),
    ) -> None:
        self.connector, self.router = connector, router
        self._prefill, self._decode = prefill, decode
        self.port = free_port()
        in_turn = ["--in-turn"] if router == "in turn" else []
        log = (folder / f"proxy-{connector}-{self.port}.log").open("wb")
        self._proxy = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvd", "proxy", "--listen", f"127.0.0.1:{self.port}"),
                *("--prefill", f"http://127.0.0.1:{prefill.port}"),
                *("--decode", f"http://127.0.0.1:{decode.port}", *in_turn),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._leaders = [prefill.pid, decode.pid, self._proxy.pid, *more]
        self.rows: list[dict[str, float]] = []
        self.tokens: list[int] = []

    def ask(self, ids: Sequence[int]) -> None:
        """One prompt; what came of it is one more row."""
        time.sleep(QUIET_S)
        before_s, began_s = busy_of(self._leaders), time.monotonic()
        at_s, token = self._first(ids)
        over_s = time.monotonic()
        time.sleep(QUIET_S)
        busy_s = busy_of(self._leaders) - before_s
        computed = [mark for mark in self._prefill.marks(began_s) if mark.what == "stepped"]
        decoded = self._decode.marks(began_s)
        first = [mark for mark in decoded if mark.what == "stepped"]
        if not computed or not first:
            raise ChildFailed(f"{self.connector}: no marks of a request ({computed}, {decoded})")
        end_s = computed[-1].at_s
        row = {
            "first": first[0].at_s - end_s,
            "client": at_s - end_s,
            "whole": over_s - began_s,
            "busy": busy_s,
        }
        self.rows.append(row | {f"{stage}_s": took for stage, took in stages(decoded, end_s)})
        self.tokens.append(token)

    def _first(self, ids: Sequence[int]) -> tuple[float, int]:
        """When the client has the first token, and which one that is."""
        asked = {
            "model": "m",
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_S)
        with contextlib.closing(link):
            headers = {"Content-Type": "application/json"}
            link.request("POST", "/v1/completions", json.dumps(asked).encode(), headers)
            response = link.getresponse()
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    found = [one.get("token_ids") for one in event.get("choices", ())]
                    if any(found):
                        at_s = time.monotonic()
                        response.read()
                        return at_s, found[0][0]
        raise ChildFailed(f"{self.connector}: no token ({response.status})")

    def median(self, key: str) -> float:
        """Of all rows, in milliseconds."""
        return 1000 * statistics.median(row[key] for row in self.rows)

    def stop(self) -> None:
        """End the proxy."""
        self._proxy.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._proxy.wait(STOP_S)
        self._proxy.kill()
        self._proxy.wait()

    def row(self) -> Measured:
        """The table's."""
        took = [1000 * row["first"] for row in self.rows]
        return {
            "connector": self.connector,
            "router": self.router,
            "median_ms": statistics.median(took),
            "least_ms": min(took),
            "most_ms": max(took),
            "client_ms": self.median("client"),
            "whole_ms": self.median("whole"),
            "busy_ms": 1000 * statistics.fmean(row["busy"] for row in self.rows),
        }

    def stage_row(self) -> Measured:
        """Where the time goes: the median of each stage."""
        told = {f"{stage}_ms": self.median(f"{stage}_s") for stage in STAGES}
        return {"connector": self.connector, "router": self.router, **told}


def stages(decoded: Sequence[SchedulerMark], end_s: float) -> Iterator[tuple[str, float]]:
    """How long each took, from the end of the prompt on; what was over before took nothing."""
    last = {mark.what: mark.at_s for mark in reversed(decoded)}  # the first of each kind
    ends = {
        "answered": last.get("came"),
        "matched": last.get("matched"),
        "blocks": last.get("blocks"),
        "loaded": last.get("loaded"),
        "step": last.get("step"),
        "first": last["stepped"],
    }
    at_s = end_s
    for stage, noted_s in ends.items():
        over_s = max(at_s, noted_s if noted_s is not None else at_s)
        yield stage, over_s - at_s
        at_s = over_s


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


class BothEngines:
    """How the engines of every pair are started."""

    def __init__(self, model: Path, folder: Path, *, chunk: int, prompt_tokens: int) -> None:
        self._folder = folder
        room_tokens = max(2048, prompt_tokens + BLOCK)
        self._arguments = [
            *("--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1"),
            *("--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"),
            *("--max-model-len", str(room_tokens), "--max-num-batched-tokens", str(chunk)),
            *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(128 << 20)),
            # As with one GPU. In a process of its own, as on a CPU, a worker looks for its next
            # step without a pause, and an engine that waits takes a core from the one that works.
            *("--distributed-executor-backend", "uni"),
        ]

    @contextlib.contextmanager
    def serving(
        self, transfers: Mapping[str, Any], environments: Mapping[str, Mapping[str, str]]
    ) -> Iterator[tuple[ServedVllm, ServedVllm]]:
        """A pair, for as long as the block lasts."""
        with contextlib.ExitStack() as ends:
            found = []
            for name, transfer in transfers.items():
                told = [*self._arguments, "--kv-transfer-config", json.dumps(transfer)]
                served = ServedVllm(name, self._folder, told, environments.get(name, {}))
                ends.callback(served.stop)
                found.append(served)
            for served in found:
                served.wait_ready()
            yield found[0], found[1]


def kvd_transfer(endpoint: str, *, parts: bool) -> dict[str, object]:
    """What vLLM is told of kvd."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvd.endpoint": endpoint, "kvd.load_parts": parts},
    }


def nixl_transfer(role: str) -> dict[str, object]:
    """What it is told of its own connector."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


class AskedOf(NamedTuple):
    """What each pair is asked."""

    rounds: int
    prompt_tokens: int


def measure(told: Told, pairs: Sequence[MeasuredPair], asks: AskedOf) -> None:
    """Ask each pair in turn; the first prompts of each are for nothing."""
    each = prompts(1, asks.prompt_tokens)
    for number in range(asks.rounds + WARM_UP):
        told(f"{pairs[0].connector}: {max(0, number + 1 - WARM_UP)} of {asks.rounds}")
        for pair in pairs:
            pair.ask(next(each))
            if number < WARM_UP:
                pair.rows.clear()


@contextlib.contextmanager
def stopping(*pairs: MeasuredPair) -> Iterator[Sequence[MeasuredPair]]:
    """End their proxies behind the block."""
    try:
        time.sleep(3.0)  # the proxy has looked at both engines by then
        yield pairs
    finally:
        for pair in pairs:
            pair.stop()


def measured_kvd(
    told: Told, both: BothEngines, folder: Path, model: Path, asks: AskedOf, *, parts: bool
) -> list[MeasuredPair]:
    """Two engines beside two daemons, by a router that asks both at once and one in turn."""
    pages = -(-asks.prompt_tokens // BLOCK) * KEPT_PROMPTS
    with two_daemons(folder, settings_of(model, pages)) as daemons:
        told("kvd: two engines start")
        transfers = {
            "prefill": kvd_transfer(daemons.prefill.client, parts=parts),
            "decode": kvd_transfer(daemons.decode.client, parts=parts),
        }
        leaders = [daemons.prefill.pid, daemons.decode.pid]
        with both.serving(transfers, {}) as engines:
            made = [
                MeasuredPair("kvd", router, *engines, folder, more=leaders)
                for router in ("at once", "in turn")
            ]
            with stopping(*made) as pairs:
                measure(told, pairs, asks)
    return made


def measured_nixl(told: Told, both: BothEngines, folder: Path, asks: AskedOf) -> list[MeasuredPair]:
    """Two engines with vLLM's own connector."""
    told("NixlConnector: two engines start")
    side = {
        role: {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "NIXL_PAUSE_US": str(NIXL_PAUSE_US),
        }
        for role in ("nixl-prefill", "nixl-decode")
    }
    transfers = {
        "nixl-prefill": nixl_transfer("kv_producer"),
        "nixl-decode": nixl_transfer("kv_consumer"),
    }
    with both.serving(transfers, side) as engines:
        made = [MeasuredPair("NixlConnector", "in turn", *engines, folder)]
        with stopping(*made) as pairs:
            measure(told, pairs, asks)
    return made


def run(
    told: Told,
    *,
    rounds: int,
    prompt_tokens: int,
    chunk: int,
    model: Path | None,
    nixl: bool,
    parts: bool,
) -> BenchmarkResult:
    """From the last of a prompt at one vLLM to the first token of its answer at another."""
    if not os.environ.get("KVD_VLLM_PYTHON"):
        raise ChildFailed("KVD_VLLM_PYTHON names no environment with vLLM: make setup-vllm")
    asks = AskedOf(rounds, prompt_tokens)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name)
        if model is None:
            told("the model")
            model = model_in(folder)
        both = BothEngines(model, folder, chunk=chunk, prompt_tokens=prompt_tokens)
        measured = measured_kvd(told, both, folder, model, asks, parts=parts)
        if nixl:
            measured += measured_nixl(told, both, folder, asks)
    best = {pair.connector: pair.median("first") for pair in reversed(measured)}
    goals = [at_most("kvd at once, first token after the prompt, ms", 5.0, best["kvd"])]
    if nixl:
        share = best["kvd"] / best["NixlConnector"]
        goals.append(at_most("kvd at once, of NixlConnector's time", 0.8, share))
    title = f"A prompt of {prompt_tokens} tokens, computed {chunk} at a time"
    rows = tuple(pair.row() for pair in measured)
    stage_rows = tuple(pair.stage_row() for pair in measured)
    return BenchmarkResult(
        tables=(
            ResultTable(title, COLUMNS, rows),
            ResultTable("Where the time goes, medians in ms", STAGE_COLUMNS, stage_rows),
        ),
        goals=tuple(goals),
        notes=tuple(f"{stage}: {what}" for stage, what in STAGES.items()),
    )


command = benchmark(
    "first_token",
    run,
    click.option("--rounds", default=15, show_default=True, help="Prompts of each pair."),
    click.option("--prompt-tokens", default=1900, show_default=True),
    click.option("--chunk", default=512, show_default=True, help="Tokens of a step of vLLM."),
    click.option(
        "--model",
        type=click.Path(exists=True, path_type=Path),
        help="A model's folder; left out: a small Llama with random weights is made.",
    ),
    click.option("--nixl/--no-nixl", default=True, show_default=True, help="The reference too."),
    click.option("--parts", is_flag=True, help="With kvd.load_parts."),
)
