"""``benchmarks connector``: what the vLLM connector takes of its scheduler, hook by hook.

The connector's real half that lives beside vLLM's scheduler is stepped as vLLM does it, against a
real daemon. Workers answer each order with the next step, and copy nothing. What is measured is the
processor time of the thread that steps, in each hook: of one request at a time, from its arrival
until nothing of it is under way, and of a step in which all running requests decode.

Between hooks the thread sleeps, as while a model computes, and does some other work in Python, as
vLLM's scheduler does before it asks a connector. So the daemon has most often answered, and caches
of the processor are as cold as they are then, but for the interpreter itself.

Where the time goes is of further requests, under a profiler, which makes Python look slower beside
the kernel than it is: shares of what was measured without it.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import pstats
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.memory import busy_s
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.under_way import SchedulerBlocks
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.bench.report import Measured, Told
    from kvd.connectors.vllm.orders import StepOrders
    from kvd.harness.daemons import DaemonProcess

BLOCK: Final = 16
PROMPT_TOKENS: Final = 1900
PAGES: Final = 32_768
SHAPE: Final = {
    "pool.family": "raw",
    "pool.layers": "1",
    "pool.page_bytes": "64",
    "pool.pages": str(PAGES),
    "pool.page_size": str(BLOCK),
}
ENGINE_BLOCKS: Final = 16_384

ARRIVES: Final = "on_new_request"
MATCHED: Final = "get_num_new_matched_tokens"
ALLOCATED: Final = "update_state_after_alloc"
STEP: Final = "build_connector_meta"
OUTPUT: Final = "update_connector_output"
FINISHED: Final = "request_finished"
HOOKS: Final = (ARRIVES, MATCHED, ALLOCATED, STEP, OUTPUT, FINISHED)
ALL: Final = "all hooks"

COLUMNS: Final = (
    ResultColumn("case", "case"),
    ResultColumn("hook", "hook"),
    ResultColumn("calls", "calls", ".1f"),
    ResultColumn("p50_us", "p50 us", ".1f"),
    ResultColumn("p90_us", "p90 us", ".1f"),
    ResultColumn("wall_us", "by the clock p50 us", ".1f"),
)
DECODE_COLUMNS: Final = (
    ResultColumn("case", "case"),
    ResultColumn("step_us", "a step us", ".1f"),
    ResultColumn("quiet_us", "p50 step us", ".1f"),
    ResultColumn("token_us", "a token us", ".2f"),
    ResultColumn("daemon_us", "of the daemon, a token us", ".2f"),
)
WHERE_COLUMNS: Final = (
    ResultColumn("case", "case"),
    ResultColumn("where", "where"),
    ResultColumn("share", "share", ".2f"),
    ResultColumn("us", "us", ".1f"),
)


class PlayedRequest:
    """What is read of a request of vLLM's."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        self.request_id = f"cmpl-{number:032x}-0"
        self.prompt_token_ids = prompt
        self.all_token_ids = list(prompt)
        self.kv_transfer_params = None
        self.cache_salt = None
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The prompt and what was generated."""
        return len(self.all_token_ids)


class PlayedBlock:
    """A block of vLLM's cache."""

    __slots__ = ("ref_cnt",)

    def __init__(self) -> None:
        self.ref_cnt = 0


class PlayedBlocks:
    """VLLM's manager of blocks, and its pool: they are counted as it counts them."""

    def __init__(self) -> None:
        self.blocks = [PlayedBlock() for _ in range(ENGINE_BLOCKS)]
        self.rows: dict[str, list[int]] = {}
        self._first = 0

    @property
    def block_pool(self) -> PlayedBlocks:
        """The same."""
        return self

    def touch(self, blocks: Iterable[PlayedBlock]) -> None:
        """One more needs these."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[PlayedBlock]) -> None:
        """One less does."""
        for block in ordered_blocks:
            block.ref_cnt -= 1

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached here."""
        return True

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """Of a request, by group."""
        return (self.rows[request_id],)

    def give(self, request: PlayedRequest, n_tokens: int) -> None:
        """Blocks for so many tokens; those of requests that are over long ago come again."""
        first, n_blocks = self._first, -(-n_tokens // BLOCK)
        self.rows[request.request_id] = [(first + n) % ENGINE_BLOCKS for n in range(n_blocks)]
        self._first = (first + n_blocks) % ENGINE_BLOCKS


class HookTimes:
    """What the hooks took, since the last ``take``: of a processor, by the clock, and how often."""

    def __init__(self) -> None:
        self.profile: cProfile.Profile | None = None
        self._begin()

    def _begin(self) -> None:
        self.cpu_ns: Counter[str] = Counter()
        self.wall_ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def take(self) -> dict[str, tuple[float, float, int]]:
        """By hook, microseconds of a processor and by the clock, and calls."""
        found = {
            hook: (self.cpu_ns[hook] / 1000, self.wall_ns[hook] / 1000, self.calls[hook])
            for hook in HOOKS
        }
        self._begin()
        return found

    def run(self, hook: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call it; what it returns."""
        self.calls[hook] += 1
        if self.profile is not None:
            self.profile.enable()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return call(*args, **more)
        finally:
            self.cpu_ns[hook] += time.thread_time_ns() - cpu_ns
            self.wall_ns[hook] += time.perf_counter_ns() - wall_ns
            if self.profile is not None:
                self.profile.disable()


class OtherWork:
    """What a scheduler has to do besides: it goes through requests, and makes lists of them."""

    def __init__(self) -> None:
        self._requests = [PlayedRequest(number, [number]) for number in range(64)]

    def do(self) -> None:
        """About a tenth of a millisecond of it."""
        found: dict[str, tuple[int, int]] = {}
        for request in self._requests:
            request.num_computed_tokens += 1
            left = max(0, request.num_tokens - request.num_computed_tokens)
            found[request.request_id] = (left, len(request.prompt_token_ids))
        sorted(found.values(), key=lambda item: item[1])


class PlayedEngine:
    """What vLLM's scheduler does with the connector, a step at a time."""

    def __init__(self, endpoint: str, save: str, pause_s: float) -> None:
        self.times = HookTimes()
        self.manager = PlayedBlocks()
        blocks = SchedulerBlocks()
        blocks.bind(self.manager)
        self.half = SchedulerHalf(
            VllmOptions(save=save),
            base_namespace="model:bfloat16:0123456789abcdef0123456789abcdef",
            block_size=BLOCK,
            connect=lambda: kvd.client.connect_sync(
                endpoint, name="vllm bench", on_unreachable="miss"
            ),
            blocks=blocks,
        )
        self.half.watch()
        self.running: dict[str, PlayedRequest] = {}
        self._pause_s = pause_s
        self._other = OtherWork()
        self._report: StepReport | None = None
        self._loads: dict[str, PlayedRequest] = {}
        # As vLLM does once its engine is built: what is there by then is no garbage.
        gc.collect()
        gc.freeze()

    def _elsewhere(self) -> None:
        time.sleep(self._pause_s)
        for _ in range(3):
            self._other.do()

    def arrive(self, request: PlayedRequest) -> None:
        """It is new."""
        self.times.run(ARRIVES, self.half.arrived, request, lora=None, extra={})
        self._elsewhere()

    def schedule(self, request: PlayedRequest, room_tokens: int) -> int:
        """Have it run, or its blocks filled; how many tokens are loaded."""
        while True:
            n_tokens, _ = self.times.run(MATCHED, self.half.matched, request, 0)
            if n_tokens is not None:
                break
            self.step()
        self.manager.give(request, request.num_tokens + room_tokens)
        self.times.run(ALLOCATED, self.half.given_blocks, request, n_tokens)
        if n_tokens:
            self._loads[request.request_id] = request
            request.num_computed_tokens = n_tokens
        else:
            self.running[request.request_id] = request
        return int(n_tokens)

    def step(self) -> None:
        """One step, in which all that run compute what they can."""
        scheduled = {
            request.request_id: request.num_tokens - request.num_computed_tokens
            for request in self.running.values()
        }
        orders = self.times.run(STEP, self.half.step, scheduled)
        for request in self.running.values():
            request.num_computed_tokens = request.num_tokens
        self._elsewhere()
        report, self._report = self._report, self._done(orders)
        loaded = set(orders.failed) | {order.request for order in orders.loads}
        self.times.run(OUTPUT, self.half.reported, report)
        for request_id in loaded:
            request = self._loads.pop(request_id)
            self.times.run(ALLOCATED, self.half.given_blocks, request, 0)
            self.running[request_id] = request

    @staticmethod
    def _done(orders: StepOrders) -> StepReport | None:
        """What the workers say a step later."""
        copies = (*orders.loads, *orders.saves)
        if not copies:
            return None
        return StepReport(done={order.number: 1 for order in copies}, number=orders.number)

    def sample(self) -> None:
        """Each that runs has a token more."""
        for request in self.running.values():
            request.all_token_ids.append(7)

    def finish(self, request: PlayedRequest) -> None:
        """It is over."""
        del self.running[request.request_id]
        self.times.run(FINISHED, self.half.finished, request)

    def settle(self) -> None:
        """Step until nothing is under way."""
        while self.half.has_work or self._report is not None:
            self.step()
        self._elsewhere()
        self.step()


class Prompts:
    """New ones, and the same as before with another end."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self._numbers = itertools.count(1)

    def new(self, start: Sequence[int] = ()) -> PlayedRequest:
        """One that begins so, and is otherwise of tokens that no other has."""
        more = self._rng.integers(0, 150_000, PROMPT_TOKENS - len(start)).tolist()
        return PlayedRequest(next(self._numbers), [*start, *more])


HIT_TOKENS: Final = PROMPT_TOKENS // BLOCK * BLOCK


def miss(engine: PlayedEngine, prompts: Prompts) -> PlayedRequest:
    """A prompt that nobody has had, and one token of an answer."""
    request = prompts.new()
    engine.arrive(request)
    assert engine.schedule(request, BLOCK) == 0
    engine.step()
    engine.sample()
    engine.finish(request)
    engine.settle()
    return request


def hit(engine: PlayedEngine, prompts: Prompts, former: PlayedRequest) -> bool:
    """A prompt that is cached but for its last tokens, and one token of an answer.

    Whether it was found: not where the daemon had no processor for 50 ms.
    """
    request = prompts.new(former.prompt_token_ids[:HIT_TOKENS])
    engine.arrive(request)
    is_found = engine.schedule(request, BLOCK) == HIT_TOKENS
    while request.request_id not in engine.running:
        engine.step()
    engine.step()
    engine.sample()
    engine.finish(request)
    engine.settle()
    return is_found


def requests_rows(
    engine: PlayedEngine, prompts: Prompts, daemon: DaemonProcess, rounds: int
) -> tuple[list[Measured], list[Measured]]:
    """Misses and hits in turns, hook by hook, and where their time goes."""
    taken: dict[str, list[dict[str, tuple[float, float, int]]]] = {"miss": [], "hit": []}
    of_daemon: dict[str, list[float]] = {"miss": [], "hit": []}
    # By the time of the thread: else whoever the kernel runs in between is counted as its own.
    profiles = {case: cProfile.Profile(time.thread_time_ns, 1e-9) for case in taken}
    for number in range(-2, 2 * rounds):
        former = None
        for case in ("miss", "hit"):
            # The second half of the rounds is under the profiler; what warms up is in no half.
            engine.times.profile = profiles[case] if number >= rounds else None
            before_s = busy_s(daemon.pid)
            alone, is_served = engine.half.counts.went_alone, True
            if former is None:
                former = miss(engine, prompts)
            else:
                is_served = hit(engine, prompts, former)
            found = engine.times.take()
            is_served = is_served and engine.half.counts.went_alone == alone
            if 0 <= number < rounds and is_served:
                taken[case].append(found)
                of_daemon[case].append((busy_s(daemon.pid) - before_s) * 1e6)
    engine.times.profile = None
    rows: list[Measured] = []
    where: list[Measured] = []
    for case, rounds_of_it in taken.items():
        rows += _rows_of(case, rounds_of_it)
        rows.append(_row(case, "the daemon", [(us, us, 1) for us in of_daemon[case]]))
        total_us = next(figure(r, "p50_us") for r in rows if (r["case"], r["hook"]) == (case, ALL))
        where += where_it_goes(case, profiles[case], total_us)
    return rows, where


def _rows_of(case: str, rounds: Sequence[dict[str, tuple[float, float, int]]]) -> list[Measured]:
    rows = [_row(case, hook, [found[hook] for found in rounds]) for hook in HOOKS]
    together = [
        (
            sum(cpu for cpu, _, _ in found.values()),
            sum(wall for _, wall, _ in found.values()),
            sum(calls for _, _, calls in found.values()),
        )
        for found in rounds
    ]
    return [*rows, _row(case, ALL, together)]


def _row(case: str, hook: str, taken: Sequence[tuple[float, float, int]]) -> Measured:
    cpu = [us for us, _, _ in taken]
    return {
        "case": case,
        "hook": hook,
        "calls": statistics.fmean(calls for _, _, calls in taken),
        "p50_us": statistics.median(cpu),
        "p90_us": float(np.percentile(cpu, 90)),
        "wall_us": statistics.median(us for _, us, _ in taken),
    }


def decode_row(
    engine: PlayedEngine, prompts: Prompts, daemon: DaemonProcess, save: str, n: int, steps: int
) -> Measured:
    """So many running requests, each with a token more a step; their starts are not measured."""
    for _ in range(n):
        request = prompts.new()
        engine.arrive(request)
        engine.schedule(request, steps + 2 * BLOCK)
        engine.step()
    for _ in range(BLOCK):
        engine.sample()
        engine.step()
    engine.times.take()
    before_s = busy_s(daemon.pid)
    taken_us: list[float] = []
    for _ in range(steps):
        engine.sample()
        engine.step()
        taken_us.append(sum(cpu for cpu, _, _ in engine.times.take().values()))
    daemon_us = (busy_s(daemon.pid) - before_s) * 1e6
    for request in list(engine.running.values()):
        engine.finish(request)
    engine.settle()
    engine.times.take()
    step_us = statistics.fmean(taken_us)
    return {
        "case": f"{n} running, save {save}",
        "step_us": step_us,
        "quiet_us": statistics.median(taken_us),
        "token_us": step_us / n,
        "daemon_us": daemon_us / steps / n,
    }


# ---- where it goes -------------------------------------------------------------------------------

Function = tuple[str, int, str]
"""As the profiler names one: file, line, name."""

KERNEL: Final = ("_socket.socket", "select.epoll", "select.poll", "posix.", "eventfd")
WIRE: Final = ("msgspec", "kvd/wire/", "kvd/zmtp/")
PROMPT: Final = ("kvd/client/tokens.py", "kvd/client/prompt.py", "pack>", "_struct")
PLACES: Final = {
    "asking the kernel": KERNEL,
    "waiting": ("time.sleep",),
    "messages to bytes and back": WIRE,
    "a prompt to bytes": PROMPT,
    "numpy": ("numpy",),
    "the client": ("kvd/client/",),
    "the connector": ("kvd/connectors/",),
}


def place_of(function: Function) -> str | None:
    """Which part of the work it is; None: what its callers are."""
    said = f"{function[0]} {function[2]}"
    return next((place for place, words in PLACES.items() if any(w in said for w in words)), None)


def where_it_goes(case: str, profile: cProfile.Profile, total_us: float) -> list[Measured]:
    """What each part of the work has of the hooks; without waiting, of which there is no time."""
    found: defaultdict[str, float] = defaultdict(float)
    profiled: dict[Function, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for function, (_, _, taken_s, _, callers) in profiled.items():
        place = place_of(function)
        if place is not None:
            found[place] += taken_s
            continue
        for caller, (_, _, share_s, _) in callers.items():
            found[place_of(caller) or "else"] += share_s
    found.pop("waiting", None)
    whole_s = sum(found.values()) or 1.0
    return [
        {
            "case": case,
            "where": place,
            "share": taken_s / whole_s,
            "us": taken_s / whole_s * total_us,
        }
        for place, taken_s in sorted(found.items(), key=lambda item: -item[1])
    ]


def run(
    told: Told, *, rounds: int, steps: int, pause_us: int, running: tuple[int, ...]
) -> BenchmarkResult:
    """What the vLLM connector takes of its scheduler, hook by hook."""
    pause_s = pause_us / 1e6
    prompts = Prompts()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        one_daemon(Path(name), SHAPE) as daemon,
    ):
        told("requests")
        engine = PlayedEngine(daemon.client, "all", pause_s)
        rows, where = requests_rows(engine, prompts, daemon, rounds)
        engine.half.close()
        decoded: list[Measured] = []
        for save in ("all", "prompt"):
            for n in running:
                told(f"decode, {n} running, save {save}")
                engine = PlayedEngine(daemon.client, save, pause_s)
                decoded.append(decode_row(engine, prompts, daemon, save, n, steps))
                engine.half.close()
    of_all = {row["case"]: figure(row, "p50_us") for row in rows if row["hook"] == ALL}
    return BenchmarkResult(
        tables=(
            ResultTable("A request of 1,900 tokens", COLUMNS, tuple(rows)),
            ResultTable("A step in which all decode", DECODE_COLUMNS, tuple(decoded)),
            ResultTable("Where a request's time goes", WHERE_COLUMNS, tuple(where)),
        ),
        goals=(
            at_most("scheduler time of a miss, us", 150, of_all["miss"]),
            at_most("scheduler time of a hit, us", 150, of_all["hit"]),
        ),
    )


command = benchmark(
    "connector",
    run,
    click.option("--rounds", default=100, show_default=True, help="Of a miss and a hit."),
    click.option("--steps", default=320, show_default=True, help="In which all decode."),
    click.option("--pause-us", default=500, show_default=True, help="Between hooks and steps."),
    click.option(
        "--running", multiple=True, default=(1, 32), show_default=True, help="Requests at a time."
    ),
)
