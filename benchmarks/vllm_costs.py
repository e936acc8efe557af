"""``benchmarks vllm_costs``: what kvd takes of a vLLM that has it, beside one that has not.

Real ``vllm serve`` on the CPU, of one model and with one OpenMP thread each: one alone, one with a
daemon, and where that is asked for one with LMCache's server and its own connector, as they come.
All get each prompt, in turns, and what counts is the processor time of all processes of an engine,
until a moment after the answer: what is saved behind it is in it. In each round:

- a prompt that nobody has: computed by all, and saved by those that save;
- the prompt again: found by all in their own caches;
- the prompt again, behind the loss of the own cache: found behind vLLM;
- a short prompt with a long answer: kvd saves each block of it, LMCache does not unless it is told.

The tokens must be equal, and what was found is what vLLM says of it. A ratio is of two answers of
one round; the median of all rounds counts.

Needs ``KVD_VLLM_PYTHON``, an environment with vLLM and kvd; for LMCache that too in it, and
``KVD_LMCACHE_PYTHON``, one that its server runs in.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from benchmarks.harness import benchmark
from benchmarks.served_vllm import (
    BLOCK,
    ServedEngine,
    ServedVllm,
    answer_of,
    busy_of,
    engine_arguments,
    kvd_transfer,
    lose_cache,
    model_in,
    prompts,
    settings_of,
)
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import free_port, one_daemon

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from kvd.bench.report import Measured, Told

KEPT_PROMPTS: Final = 8
"""So many the pool has room for."""
QUIET_S: Final = 0.3
"""Behind an answer: what it has left to be done is done, and counts."""
IDLE_S: Final = 1.0
MOST_IDLE: Final = 0.05
"""Of a processor, behind an answer: who takes more looks for work without a pause, and what is
measured of it is that."""
WARM_UP: Final = 3
"""Rounds that do not count."""

SHORT_PROMPT: Final = 2 * BLOCK
PROOF_TOKENS: Final = 16
"""Of an answer behind what was found; it is compared, and not measured."""

COLD, OWN_HIT, HIT, DECODE = "computed", "own hit", "hit behind vLLM", "a token of an answer"
ALONE, WITH_KVD, WITH_LMCACHE = "alone", "with kvd", "with LMCache"

LMCACHE_CHUNK: Final = 256
"""Tokens that it keeps or does not, as it comes."""


class Compared(NamedTuple):
    """Two answers of a round, and what is wanted of the first one's share of the second."""

    name: str
    over: tuple[str, str]
    under: tuple[str, str]
    busy: float | None = None
    with_servers: float | None = None
    wall: float | None = None


COMPARED: Final = (
    Compared("a hit in kvd, of vLLM's own alone", (HIT, WITH_KVD), (OWN_HIT, ALONE), busy=1.15),
    Compared("computed and saved, of computed", (COLD, WITH_KVD), (COLD, ALONE), busy=1.01),
    Compared("a token saved, of one that is not", (DECODE, WITH_KVD), (DECODE, ALONE), busy=1.02),
    Compared("a hit in LMCache, of vLLM's own alone", (HIT, WITH_LMCACHE), (OWN_HIT, ALONE)),
    Compared("computed and saved by LMCache, of computed", (COLD, WITH_LMCACHE), (COLD, ALONE)),
    Compared(
        "a hit in kvd, of one in LMCache",
        (HIT, WITH_KVD),
        (HIT, WITH_LMCACHE),
        with_servers=1.0,
        wall=1.0,
    ),
)

COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("engine", "engine"),
    ResultColumn("wall_ms", "median ms", ".2f"),
    ResultColumn("busy_ms", "processor of the engine, median ms", ".2f"),
    ResultColumn("busy_least_ms", "least", ".2f"),
    ResultColumn("server_ms", "... of its daemon or server, median ms", ".2f"),
)
RATIO_COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("busy", "processor of the engine", ".3f"),
    ResultColumn("low", "a quarter of the rounds below", ".3f"),
    ResultColumn("high", "a quarter above", ".3f"),
    ResultColumn("with_servers", "with daemon's and server's", ".3f"),
    ResultColumn("wall", "time", ".3f"),
)


class Cost(NamedTuple):
    """What an answer took, in seconds: until its first token, or for each one; of processors."""

    wall_s: float
    busy_s: float
    server_s: float


class MeasuredVllm:
    """One engine, and what it has behind it.

    Args:
        served: the engine.
        behind: the session that keeps for it what it saves; none: nobody does.
        unit: so many tokens are kept there or are not.
    """

    def __init__(
        self, served: ServedVllm, behind: Collection[int] = (), *, unit: int = BLOCK
    ) -> None:
        self.name = served.name
        self._port = served.port
        self._leaders = {served.pid}
        self.behind = behind
        self._unit = unit
        self.costs: dict[str, list[Cost]] = {}
        self.answers: list[tuple[str, tuple[int, ...]]] = []
        self.cached: list[tuple[str, int]] = []

    def ask(self, what: str, ids: Sequence[int], *, tokens: int = 1) -> None:
        """One answer, and what it took; of several tokens, what each took."""
        busy_s, server_s = busy_of(self._leaders), busy_of(self.behind)
        began_s = time.monotonic()
        answer = answer_of(self._port, ids, tokens=tokens)
        wall_s = (answer.first_at_s if tokens == 1 else time.monotonic()) - began_s
        time.sleep(QUIET_S)
        taken = (wall_s, busy_of(self._leaders) - busy_s, busy_of(self.behind) - server_s)
        self.costs.setdefault(what, []).append(Cost(*(each / tokens for each in taken)))
        self._note(what, answer.tokens, answer.cached_tokens)

    def prove(self, ids: Sequence[int]) -> None:
        """An answer that is compared alone."""
        answer = answer_of(self._port, ids, tokens=PROOF_TOKENS)
        self.answers.append(("behind a hit", answer.tokens))
        time.sleep(QUIET_S)

    def _note(self, what: str, tokens: tuple[int, ...], n_cached: int) -> None:
        # A hit behind it stands for one in the own cache, which an engine alone has had.
        self.answers.append((OWN_HIT if what == HIT else what, tokens))
        self.cached.append((what, n_cached))

    def lose_cache(self) -> None:
        """Drop vLLM's own cache, and nothing behind it.

        Raises:
            ChildFailed: blocks are still in use.
        """
        lose_cache(self._port, self.name)

    def idle(self, ids: Sequence[int]) -> float:
        """Seconds of processors in a second in which nothing is asked, behind an answer."""
        answer_of(self._port, ids, tokens=1)
        time.sleep(QUIET_S)
        began_s, before_s = time.monotonic(), busy_of(self._leaders)
        time.sleep(IDLE_S)
        return (busy_of(self._leaders) - before_s) / (time.monotonic() - began_s)

    def forget(self) -> None:
        """What was measured so far does not count."""
        self.costs.clear()

    def row(self, what: str) -> Measured:
        """The table's."""
        costs = self.costs[what]
        return {
            "what": what,
            "engine": self.name,
            "wall_ms": 1000 * statistics.median(cost.wall_s for cost in costs),
            "busy_ms": 1000 * statistics.median(cost.busy_s for cost in costs),
            "busy_least_ms": 1000 * min(cost.busy_s for cost in costs),
            "server_ms": 1000 * statistics.median(cost.server_s for cost in costs)
            if self.behind
            else None,
        }

    def flaws(self, prompt_tokens: int) -> Iterator[str]:
        """What was cached where nothing is, and what was not where it is."""
        for what, n_cached in self.cached:
            unit = {OWN_HIT: BLOCK, HIT: self._unit}.get(what)
            least = (prompt_tokens - 1) // unit * unit if unit else 0
            if n_cached < least or (n_cached and not unit):
                yield f"{self.name}, {what}: {n_cached} tokens were cached, and not {least}"


class RoundShape(NamedTuple):
    """What all are asked."""

    rounds: int
    prompt_tokens: int
    answer_tokens: int


def measure(told: Told, engines: Sequence[MeasuredVllm], shape: RoundShape) -> None:
    """Ask all in turns; each round begins with another one."""
    long, short = prompts(1, shape.prompt_tokens), prompts(2, SHORT_PROMPT)
    for number in range(shape.rounds + WARM_UP):
        told(f"round {max(0, number + 1 - WARM_UP)} of {shape.rounds}")
        first = number % len(engines)
        turns = [*engines[first:], *engines[:first]]
        ids, answered = next(long), next(short)
        for what in (COLD, OWN_HIT):
            for engine in turns:
                engine.ask(what, ids)
        for engine in turns:
            if engine.behind:
                engine.lose_cache()
                engine.ask(HIT, ids)
                engine.lose_cache()
        for engine in turns:
            engine.prove(ids)
        for engine in turns:
            engine.ask(DECODE, answered, tokens=shape.answer_tokens)
        if number + 1 == WARM_UP:
            for engine in engines:
                engine.forget()


def flaws(engines: Sequence[MeasuredVllm], shape: RoundShape) -> Iterator[str]:
    """What must not be: other tokens, or another cost than its name says."""
    # Those that have something behind them answer once more, from there.
    alone, *others = (set(engine.answers) for engine in engines)
    for engine, answers in zip(engines[1:], others, strict=True):
        if answers != alone:
            yield f"{engine.name}: {len(answers ^ alone)} answers differ"
    for engine in engines:
        yield from engine.flaws(shape.prompt_tokens)


def ratio_row(name: str, over: Sequence[Cost], under: Sequence[Cost]) -> Measured:
    """Of answers of one round each."""
    pairs = list(zip(over, under, strict=True))
    busy = [one.busy_s / other.busy_s for one, other in pairs]
    low, _, high = statistics.quantiles(busy, n=4)
    with_servers = [
        (one.busy_s + one.server_s) / (other.busy_s + other.server_s) for one, other in pairs
    ]
    return {
        "what": name,
        "busy": statistics.median(busy),
        "low": low,
        "high": high,
        "with_servers": statistics.median(with_servers),
        "wall": statistics.median(one.wall_s / other.wall_s for one, other in pairs),
    }


GOAL_NAMES: Final = {
    "busy": "processor time",
    "with_servers": "processor time of all",
    "wall": "first token",
}


def found_of(
    engines: Mapping[str, MeasuredVllm], shape: RoundShape, idle: Mapping[str, float]
) -> BenchmarkResult:
    """All tables and goals."""
    rows = [
        engine.row(what)
        for what in (COLD, OWN_HIT, HIT, DECODE)
        for engine in engines.values()
        if what in engine.costs
    ]
    ratios, goals = [], []
    for compared in COMPARED:
        (over, one), (under, other) = compared.over, compared.under
        if one in engines and other in engines:
            costs = engines[one].costs[over], engines[other].costs[under]
            ratios.append(ratio_row(compared.name, *costs))
            goals += [
                at_most(f"{compared.name}, {said}", wanted, figure(ratios[-1], key))
                for key, said in GOAL_NAMES.items()
                if (wanted := getattr(compared, key)) is not None
            ]
    title = f"A prompt of {shape.prompt_tokens} tokens, an answer of {shape.answer_tokens}"
    told = ", ".join(f"{name} {1000 * busy:.1f} ms" for name, busy in idle.items())
    spinning = [
        f"{name} takes {busy:.2f} of a processor while nothing is asked"
        for name, busy in idle.items()
        if busy > MOST_IDLE
    ]
    return BenchmarkResult(
        tables=(
            ResultTable(title, COLUMNS, tuple(rows)),
            ResultTable("Ratios, medians of the rounds", RATIO_COLUMNS, tuple(ratios)),
        ),
        goals=tuple(goals),
        notes=(f"of processors in a second behind an answer, in which nothing is asked: {told}",),
        wrong=(*flaws(list(engines.values()), shape), *spinning),
    )


@contextlib.contextmanager
def lmcache_server(folder: Path) -> Iterator[tuple[ServedEngine, dict[str, object]]]:
    """LMCache's own server, and what vLLM is told of it; its defaults, but for what a CPU needs."""
    python = os.environ.get("KVD_LMCACHE_PYTHON", "").partition(":")[0]
    if not python:
        raise ChildFailed("KVD_LMCACHE_PYTHON names no environment that has LMCache")
    port, http_port = free_port(), free_port()
    command = [
        *(python, str(Path(python).parent / "lmcache"), "server"),
        *("--port", str(port), "--http-port", str(http_port), "--disable-observability"),
        *("--chunk-size", str(LMCACHE_CHUNK), "--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven", "--shm-name", f"bench{port}"),
    ]
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    server = ServedEngine("lmcache", folder, command, quiet, port=http_port, health="/healthcheck")
    try:
        server.wait_ready()
        yield (
            server,
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            },
        )
    finally:
        server.stop()


def run(
    told: Told,
    *,
    rounds: int,
    prompt_tokens: int,
    answer_tokens: int,
    chunk: int,
    model: Path | None,
    lmcache: bool,
) -> BenchmarkResult:
    """What a hit, a computed prompt and an answer take of a vLLM with kvd, and without."""
    if not os.environ.get("KVD_VLLM_PYTHON"):
        raise ChildFailed("KVD_VLLM_PYTHON names no environment with vLLM: make setup-vllm")
    shape = RoundShape(max(2, rounds), prompt_tokens, answer_tokens)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-")))
        if model is None:
            told("the model")
            model = model_in(folder)
        most_tokens = max(prompt_tokens, SHORT_PROMPT) + answer_tokens
        pages = -(-most_tokens // BLOCK) * KEPT_PROMPTS
        daemon = ends.enter_context(one_daemon(folder, settings_of(model, pages)))
        transfers = {ALONE: None, WITH_KVD: kvd_transfer(daemon.client)}
        behind: dict[str, Collection[int]] = {WITH_KVD: {daemon.pid}}
        if lmcache:
            told("LMCache's server starts")
            server, transfers[WITH_LMCACHE] = ends.enter_context(lmcache_server(folder))
            behind[WITH_LMCACHE] = {server.pid}
        told(f"{len(transfers)} engines start")
        arguments = engine_arguments(model, chunk=chunk, most_tokens=most_tokens)
        served = []
        for name, transfer in transfers.items():
            more = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
            one = ServedVllm(name, folder, [*arguments, *more], {"VLLM_SERVER_DEV_MODE": "1"})
            ends.callback(one.stop)
            served.append(one)
        for one in served:
            one.wait_ready()
        units = {WITH_LMCACHE: LMCACHE_CHUNK}
        engines = {
            one.name: MeasuredVllm(one, behind.get(one.name, ()), unit=units.get(one.name, BLOCK))
            for one in served
        }
        measure(told, list(engines.values()), shape)
        ids = next(prompts(3, SHORT_PROMPT))
        idle = {name: engine.idle(ids) for name, engine in engines.items()}
    return found_of(engines, shape, idle)


command = benchmark(
    "vllm_costs",
    run,
    click.option("--rounds", default=15, show_default=True, help="That count."),
    click.option("--prompt-tokens", default=1900, show_default=True),
    click.option("--answer-tokens", default=256, show_default=True),
    click.option("--chunk", default=512, show_default=True, help="Tokens of a step of vLLM."),
    click.option(
        "--model",
        type=click.Path(exists=True, path_type=Path),
        help="A model's folder; left out: a small Llama with random weights is made.",
    ),
    click.option("--lmcache/--no-lmcache", default=False, show_default=True, help="LMCache too."),
)
