"""``benchmarks first_token``: a prompt is computed by one vLLM, and decoded by another.

Two real ``vllm serve`` on the CPU and ``kvd proxy`` before them, with kvd's connector and two
daemons, and with vLLM's own ``NixlConnector``: one pair after the other, on the same machine, of
the same model. What counts is from the end of the step in which the prefill engine has computed the
last of the prompt, to the end of the step in which the decode engine has the first token of the
answer: all that a handoff adds. Both are noted in vLLM's schedulers, by the one clock of the host;
so is where the time between them goes. A first token of a prompt that the decode engine has itself
is the floor.

Then second turns, behind the loss of the decode engine's own cache: a prompt, its answer and a few
tokens more. How much of that comes from the other node again, and when the first token is there.

Needs ``KVD_VLLM_PYTHON``, an environment with vLLM and kvd, and for the reference ``nixl`` in it,
or on ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from benchmarks.harness import benchmark
from benchmarks.served_vllm import (
    BLOCK,
    ROOT,
    STOP_S,
    ServedVllm,
    answer_of,
    busy_of,
    counted,
    engine_arguments,
    kvd_transfer,
    lose_cache,
    model_in,
    prompts,
    settings_of,
)
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import free_port, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvd.bench.report import Measured, Told

ENGINE: Final = ROOT / "tests" / "engines" / "vllm_marks.py"
KEPT_PROMPTS: Final = 8
"""So many the pool of each daemon has room for."""
QUIET_S: Final = 0.3
"""Between two requests: what the one before has left to be done is done."""

NIXL_PAUSE_US: Final = 100
WARM_UP: Final = 3
"""Prompts of each pair that do not count."""

TURN_PROMPT, TURN_ANSWER, TURN_MORE = 1000, 32, 32
"""Tokens of a first turn, of its answer, and what the second one has behind these."""

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
TURN_COLUMNS: Final = (
    ResultColumn("connector", "connector"),
    ResultColumn("router", "router"),
    ResultColumn("sent_mb", "sent again, median MB", ".2f"),
    ResultColumn("median_ms", "first token after the prompt, median ms", ".1f"),
    ResultColumn("client_ms", "... at the client, median ms", ".1f"),
)
STAGE_COLUMNS: Final = (
    ResultColumn("connector", "connector"),
    ResultColumn("router", "router"),
    ResultColumn("of", "of"),
    *(ResultColumn(f"{stage}_ms", stage, ".1f") for stage in STAGES),
)


class SchedulerMark(NamedTuple):
    """What a scheduler did with a request, and when."""

    what: str
    request: str
    at_s: float


class MarkedVllm(ServedVllm):
    """One whose scheduler notes what it does."""

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._marks_file = folder / f"{name}.marks"
        self._marks_file.touch()
        marked = {**environment, "MARKS": str(self._marks_file)}
        super().__init__(name, folder, arguments, marked, program=[str(ENGINE)])

    def marks(self, since_s: float) -> list[SchedulerMark]:
        """Those behind that time."""
        said = [json.loads(line) for line in self._marks_file.read_bytes().splitlines()]
        return [SchedulerMark(**mark) for mark in said if mark["at_s"] >= since_s]


class MeasuredPair:
    """A prefill engine, a decode engine, and a proxy before them."""

    def __init__(
        self,
        connector: str,
        router: str,
        prefill: MarkedVllm,
        decode: MarkedVllm,
        folder: Path,
        *,
        block_bytes: int,
        more: Sequence[int] = (),
    ) -> None:
        self.connector, self.router = connector, router
        self._block_bytes = block_bytes
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
        self.turns: list[dict[str, float]] = []

    def ask(self, ids: Sequence[int]) -> None:
        """One prompt; what came of it is one more row."""
        self.rows.append(self._asked(ids))

    def ask_again(self, ids: Sequence[int], more: Sequence[int]) -> None:
        """Two turns; what came of the second one is one more of these.

        What the decode engine has itself is lost before it.
        """
        answer = answer_of(self.port, ids, tokens=TURN_ANSWER)
        time.sleep(QUIET_S)
        lose_cache(self._decode.port, self._decode.name)
        kvd, nixl = self._sent()
        row = self._asked([*ids, *answer.tokens, *more])
        kvd, nixl = (now - before for now, before in zip(self._sent(), (kvd, nixl), strict=True))
        # Of what kvd has received the last page may be a part of one, and is sent as a whole.
        self.turns.append(row | {"sent": -(-kvd // BLOCK) * self._block_bytes + nixl})

    def _sent(self) -> tuple[float, float]:
        """What has come from the other node: tokens by kvd, bytes by NIXL."""
        port = self._decode.port
        return (
            counted(port, "vllm:kvd_received_tokens_total"),
            counted(port, "vllm:nixl_bytes_transferred_sum"),
        )

    def _asked(self, ids: Sequence[int]) -> dict[str, float]:
        time.sleep(QUIET_S)
        before_s, began_s = busy_of(self._leaders), time.monotonic()
        answer = answer_of(self.port, ids, tokens=1)
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
            "client": answer.first_at_s - end_s,
            "whole": over_s - began_s,
            "busy": busy_s,
        }
        return row | {f"{stage}_s": took for stage, took in stages(decoded, end_s)}

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

    def turn_median(self, key: str) -> float:
        """Of all second turns, in seconds or bytes."""
        return statistics.median(turn[key] for turn in self.turns)

    def turn_row(self) -> Measured:
        """The table's of second turns."""
        return {
            "connector": self.connector,
            "router": self.router,
            "sent_mb": self.turn_median("sent") / 1e6,
            "median_ms": 1000 * self.turn_median("first"),
            "client_ms": 1000 * self.turn_median("client"),
        }

    def stage_rows(self) -> Iterator[Measured]:
        """Where the time goes: the median of each stage, of prompts and of second turns."""
        for of, rows in (("a prompt", self.rows), ("a second turn", self.turns)):
            told = {
                f"{stage}_ms": 1000 * statistics.median(row[f"{stage}_s"] for row in rows)
                for stage in STAGES
            }
            yield {"connector": self.connector, "router": self.router, "of": of, **told}


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


class BothEngines:
    """How the engines of every pair are started."""

    def __init__(self, model: Path, folder: Path, *, chunk: int, prompt_tokens: int) -> None:
        self._folder = folder
        self._arguments = engine_arguments(model, chunk=chunk, most_tokens=prompt_tokens)

    @contextlib.contextmanager
    def serving(
        self, transfers: Mapping[str, Any], environments: Mapping[str, Mapping[str, str]]
    ) -> Iterator[tuple[MarkedVllm, MarkedVllm]]:
        """A pair, for as long as the block lasts."""
        with contextlib.ExitStack() as ends:
            found = []
            for name, transfer in transfers.items():
                told = [*self._arguments, "--kv-transfer-config", json.dumps(transfer)]
                environment = {"VLLM_SERVER_DEV_MODE": "1", **environments.get(name, {})}
                served = MarkedVllm(name, self._folder, told, environment)
                ends.callback(served.stop)
                found.append(served)
            for served in found:
                served.wait_ready()
            yield found[0], found[1]


def nixl_transfer(role: str) -> dict[str, object]:
    """What it is told of its own connector."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


class AskedOf(NamedTuple):
    """What each pair is asked, and bytes of a block."""

    rounds: int
    prompt_tokens: int
    block_bytes: int


def measure(told: Told, pairs: Sequence[MeasuredPair], asks: AskedOf) -> None:
    """Ask each pair in turn; the first prompts of each are for nothing."""
    each = prompts(1, asks.prompt_tokens)
    for number in range(asks.rounds + WARM_UP):
        told(f"{pairs[0].connector}: {max(0, number + 1 - WARM_UP)} of {asks.rounds}")
        for pair in pairs:
            pair.ask(next(each))
            if number < WARM_UP:
                pair.rows.clear()
    firsts, mores = prompts(2, TURN_PROMPT), prompts(3, TURN_MORE)
    for number in range(asks.rounds):
        told(f"{pairs[0].connector}, second turns: {number + 1} of {asks.rounds}")
        for pair in pairs:
            pair.ask_again(next(firsts), next(mores))


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
                MeasuredPair(
                    *("kvd", router, *engines, folder), block_bytes=asks.block_bytes, more=leaders
                )
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
        where = ("NixlConnector", "in turn", *engines, folder)
        made = [MeasuredPair(*where, block_bytes=asks.block_bytes)]
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
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name)
        if model is None:
            told("the model")
            model = model_in(folder)
        pool = settings_of(model, 1)
        block_bytes = int(pool["pool.layers"]) * int(pool["pool.page_bytes"])
        asks = AskedOf(rounds, prompt_tokens, block_bytes)
        both = BothEngines(model, folder, chunk=chunk, prompt_tokens=prompt_tokens)
        measured = measured_kvd(told, both, folder, model, asks, parts=parts)
        if nixl:
            measured += measured_nixl(told, both, folder, asks)
    best = {pair.connector: pair.median("first") for pair in reversed(measured)}
    goals = [at_most("kvd at once, first token after the prompt, ms", 5.0, best["kvd"])]
    if nixl:
        share = best["kvd"] / best["NixlConnector"]
        goals.append(at_most("kvd at once, of NixlConnector's time", 0.8, share))
        by_router = {(pair.connector, pair.router): pair for pair in measured}
        ours, theirs = by_router["kvd", "in turn"], by_router["NixlConnector", "in turn"]
        for key, said, wanted in (("sent", "bytes", 0.1), ("first", "time", 0.5)):
            share = ours.turn_median(key) / theirs.turn_median(key)
            goals.append(
                at_most(f"a second turn, in turn, of NixlConnector's {said}", wanted, share)
            )
    title = f"A prompt of {prompt_tokens} tokens, computed {chunk} at a time"
    rows = tuple(pair.row() for pair in measured)
    stage_rows = tuple(row for pair in measured for row in pair.stage_rows())
    return BenchmarkResult(
        tables=(
            ResultTable(title, COLUMNS, rows),
            ResultTable("Where the time goes, medians in ms", STAGE_COLUMNS, stage_rows),
            ResultTable(
                f"A second turn of {TURN_PROMPT + TURN_ANSWER + TURN_MORE} tokens, the decode "
                "engine's own cache lost",
                TURN_COLUMNS,
                tuple(pair.turn_row() for pair in measured),
            ),
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
