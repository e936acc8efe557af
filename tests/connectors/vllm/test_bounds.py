"""What a step may cost, what is left to compute, what is said, and that no error gets out."""

from __future__ import annotations

import logging
import math
import time

import pytest

from kvd.client import Code, KvdError
from kvd.connectors.vllm.log import TOLD_EVERY_S
from kvd.connectors.vllm.lookup import (
    ANSWER_WITHIN_S,
    MEET_WITHIN_S,
    NAMED_WITHIN_S,
    OPENED_S,
)
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.sessions import RETRY_S, UNFIT_RETRY_S
from tests.connectors.vllm.stand_ins import (
    BLOCK,
    CountedBlocks,
    MiniEngine,
    Request,
    StandInNode,
    refusal,
)
from tests.connectors.vllm.world import Adapter, World, WorldEngine

PROMPT = list(range(1, 31))
SENDS = {"do_remote_decode": True, "do_remote_prefill": False}
MEETS = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "77"}}


@pytest.fixture
def world():
    return World()


@pytest.fixture
def engine(world):
    engine = WorldEngine(world, reserve_tokens=8)
    yield engine
    if not world.is_down:
        engine.settle()


# ---- what is left to compute ---------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("params", [None, SENDS, MEETS], ids=["plain", "sends", "meets"])
def test_of_every_prompt_a_token_is_left_to_compute(engine, world, n_tokens, params):
    world.rooms.add(77)
    for number in (1, 2):
        request = engine.add(Request(number, PROMPT[:n_tokens], params))
        engine.steps(4)
        assert request.num_computed_tokens == n_tokens
        told = engine.finish(request)
        assert (told is not None) == ((params is not None and n_tokens > 1) or params is MEETS)
        engine.steps(2)


def test_a_prompt_without_tokens_is_left_alone(engine):
    request = engine.add(Request(1, []))
    assert engine.half.matched(request, 0) == (0, False)
    engine.finish(request)


def test_what_is_computed_though_it_was_found_or_comes_leaves_nothing(engine, world):
    """As vLLM does where it is asked for the logprobs of a prompt."""
    engine.computes_all = True
    world.rooms.add(77)
    for number, params in enumerate([None, MEETS, None, MEETS], 1):
        request = engine.add(Request(number, PROMPT, params))
        engine.steps(5)
        engine.finish(request)
        engine.steps(2)
        assert not world.leases


def test_a_room_that_is_refused_leaves_no_lease(engine, world):
    world.refuses_rooms = True
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.steps(5)
    assert engine.finish(request) is not None
    engine.steps(2)
    assert not world.leases
    assert not world.handed


def test_the_last_page_of_a_prompt_is_copied_after_its_end_where_its_lease_came_late(engine, world):
    engine.half._claims.most_ahead = 0
    request = engine.add(Request(1, PROMPT, SENDS | {"kvd": {"v": 1, "opens": "77"}}))
    world.holds = True
    engine.steps(3)
    assert request in engine.waiting, "its lease is to come before its blocks"
    engine.steps(9)
    told = engine.finish(request)
    assert (told["kvd"]["room"], told["kvd"].get("open")) == ("77", None)
    assert not engine.held, "vLLM keeps them"
    assert engine.counted.needed.keys() >= set(range(1, 9))
    world.holds = False
    engine.steps(4)
    assert not engine.counted.needed
    assert world.handed == [77]


# ---- what is waited for --------------------------------------------------------------------------


def test_a_step_waits_once_for_all_its_requests():
    node = StandInNode()
    node.holds = True
    engine = MiniEngine(node, probe_wait_s=0.02)
    requests = [Request(number, PROMPT) for number in range(1, 17)]
    for request in requests:
        engine.half.arrived(request, lora=None, extra={})
    began_s = time.perf_counter()
    for request in requests:
        assert engine.half.matched(request, 0) == (None, False)
    engine.half.step({})
    assert 0.02 <= time.perf_counter() - began_s < 0.3, "0.32 were it by request"
    node.come()
    for request in requests:
        engine.half.given_blocks(request, 0)
    began_s = time.perf_counter()
    engine.half.step({request.request_id: 30 for request in requests})
    assert time.perf_counter() - began_s < 0.1
    node.holds = False
    node.come()


def test_a_request_waits_for_the_files_of_its_adapter_and_the_engine_does_not(engine, world):
    adapter = Adapter(after=1000)
    request = engine.add(Request(1, PROMPT), lora=adapter)
    other = engine.add(Request(2, PROMPT))
    engine.steps(2)
    assert request in engine.waiting
    assert other.num_computed_tokens == 2 * engine.chunk
    adapter.after = 0
    engine.steps(8)
    assert request.num_computed_tokens == len(PROMPT)
    for one in (request, other):
        engine.finish(one)
    engine.steps(3)
    assert {key[1] for key in world.cached} == {"model", "model#lora=ad-1"}
    # Each is found by its own kind.
    engine.loaded_tokens = 0
    engine.add(Request(3, PROMPT), lora=adapter)
    engine.steps(3)
    assert engine.loaded_tokens == len(PROMPT) // BLOCK * BLOCK


@pytest.mark.parametrize("params", [None, SENDS, MEETS], ids=["plain", "sends", "meets"])
@pytest.mark.parametrize("end", ["late", "unknown", "aborted", "reset", "restarted", "all"])
def test_a_request_whose_adapter_is_not_known_is_computed_and_saved_nowhere(
    engine, world, end, params
):
    adapter = Adapter(after=1000)
    engine.step()
    request = engine.add(Request(1, PROMPT, params), lora=adapter)
    engine.step()
    assert request in engine.waiting
    match end:
        case "late":
            engine.clock_s += NAMED_WITHIN_S
        case "unknown":
            adapter.is_unknown = True
        case "aborted":
            engine.finish(request)
        case "reset":
            engine.update_weights()
        case "restarted":
            world.kill()
            world.start(same_memory=True)
            adapter.after = 0
        case "all":
            engine.computes_all = True
    engine.steps(6)
    assert request.num_computed_tokens == (0 if end == "aborted" else len(PROMPT))
    assert not world.cached
    assert not world.leases


def test_a_look_up_is_waited_for_50_ms(engine, world):
    engine.step()
    world.is_hung = True
    request = engine.add(Request(1, PROMPT))
    assert engine.half.matched(request, 0) == (None, False)
    engine.clock_s += ANSWER_WITHIN_S
    assert engine.half.matched(request, 0) == (0, False)
    # What it computes is saved all the same when the daemon goes on.
    engine.steps(3)
    world.is_hung = False
    engine.steps(4)
    assert world.cached


@pytest.mark.parametrize("params", [None, MEETS])
def test_a_step_that_takes_longer_than_the_bound_is_followed_by_one_more_look(
    engine, world, params
):
    """The engine computed for a second, and the daemon had no processor meanwhile."""
    first = engine.add(Request(1, PROMPT))
    engine.steps(8)
    engine.finish(first)
    engine.steps(2)
    world.rooms.add(77)
    world.holds = True
    request = engine.add(Request(2, PROMPT, params))
    engine.clock_s += 1.0
    assert engine.half.matched(request, 0) == (None, False)
    world.holds = False
    engine.steps(3)
    assert engine.loaded_tokens >= 28
    engine.finish(request)
    engine.steps(2)
    world.holds = True
    request = engine.add(Request(3, PROMPT, params))
    engine.clock_s += 1.0
    engine.step()
    assert request in engine.waiting
    engine.step()
    assert request in engine.running, "it is looked for twice, and not more often"


def test_a_full_pool_is_not_waited_for_by_who_decodes(engine, world):
    world.take_all()
    world.rooms.add(77)
    request = engine.add(Request(1, PROMPT, MEETS))
    engine.steps(6)
    assert request.num_computed_tokens == len(PROMPT)
    world.give_back()


def test_a_room_that_nobody_opens_is_not_waited_for():
    node = StandInNode()
    engine = MiniEngine(node)
    node.receives_hang = True
    request = engine.add(Request(1, PROMPT, MEETS))
    engine.step()
    engine.clock_s += MEET_WITHIN_S
    node.unaccepted = [one.id for one in node.receives]
    assert node.unaccepted
    for _ in range(3):
        engine.step()
    assert request in engine.running
    engine.finish(request)
    assert not node.receives
    assert not node.leases


@pytest.mark.parametrize(
    ("ago_s", "is_soon"),
    [
        (OPENED_S + 1.0, True),
        (1.0, False),
        (-60.0, False),
        (None, False),
        (3e9, True),  # no clock has that: it is told as a time before all of them
        (math.nan, True),
    ],
)
def test_a_room_that_was_told_of_long_ago_is_given_up_soon_where_nobody_has_opened_it(
    ago_s, is_soon
):
    node = StandInNode()
    engine = MiniEngine(node)
    node.receives_hang = True
    told = {} if ago_s is None else {"at": time.time() - ago_s}
    params = {"do_remote_prefill": True, "kvd": MEETS["kvd"] | told}
    request = engine.add(Request(1, PROMPT, params))
    engine.step()
    engine.clock_s += ANSWER_WITHIN_S
    node.unaccepted = [one.id for one in node.receives]
    for _ in range(3):
        engine.step()
    assert (request in engine.running) is is_soon
    engine.clock_s += MEET_WITHIN_S
    for _ in range(3):
        engine.step()
    assert request in engine.running
    engine.finish(request)
    assert not node.receives


def test_an_old_room_that_is_accepted_is_waited_for_as_any():
    node = StandInNode()
    engine = MiniEngine(node)
    node.receives_hang = True
    params = {"do_remote_prefill": True, "kvd": MEETS["kvd"] | {"at": time.time() - 60}}
    request = engine.add(Request(1, PROMPT, params))
    for _ in range(5):
        engine.step()
        engine.clock_s += MEET_WITHIN_S
    assert request in engine.waiting
    engine.finish(request)
    assert not node.receives


def test_who_waits_for_another_node_bears_a_daemon_without_a_processor_for_a_moment():
    node = StandInNode()
    engine = MiniEngine(node)
    node.receives_hang = True
    params = {"kvd": MEETS["kvd"] | {"soon": True}}
    request = engine.add(Request(1, PROMPT, params))
    engine.step()
    node.holds = True
    for _ in range(9):
        engine.clock_s += 0.1
        engine.step()
    link = engine.half._sessions.link
    assert link.is_silent
    assert request in engine.waiting
    for _ in range(4):
        engine.clock_s += 0.1
        engine.step()
    assert request in engine.running
    engine.finish(request)
    engine.settle()
    assert not node.receives


@pytest.mark.parametrize(("waited_s", "is_given_up"), [(29.0, False), (31.0, True)])
def test_a_room_that_is_to_be_opened_soon_is_waited_for_as_long_as_a_handoff(waited_s, is_given_up):
    node = StandInNode()
    engine = MiniEngine(node)
    node.receives_hang = True
    request = engine.add(Request(1, PROMPT, {"kvd": MEETS["kvd"] | {"soon": True}}))
    engine.step()
    node.unaccepted = [one.id for one in node.receives]
    engine.clock_s += waited_s
    for _ in range(3):
        engine.step()
    assert (request in engine.running) is is_given_up
    engine.finish(request)
    assert not node.receives


# ---- whose word it is ----------------------------------------------------------------------------


def test_a_report_of_before_says_nothing_of_the_session_after_it(engine, world):
    request = engine.add(Request(1, PROMPT))
    engine.steps(3)
    former = engine.half._number
    world.kill()
    engine.step()
    world.start(same_memory=False)
    engine.clock_s += 1.5
    engine.steps(3)
    session = engine.half._sessions.link
    report = StepReport(done={1: 1, 2: 1}, number=former, unfit="it does not fit")
    engine.half.reported(report)
    engine.step()
    assert engine.half._sessions.link is session
    assert not world.cached
    engine.finish(request)


# ---- no error gets out ---------------------------------------------------------------------------


ERRORS = [
    *(refusal(code) for code in Code),
    ValueError("I/O operation on closed epoll object"),
    OSError(9, "Bad file descriptor"),
    TypeError("a bug"),
]


def test_whatever_calls_raise_no_hook_does_and_the_next_session_is_used():
    for error in ERRORS:
        for verb in ("begin_match", "begin_lease", "pump", "prompt", "begin_receive"):
            node = StandInNode()
            engine = MiniEngine(node, reserve_tokens=8)
            node.share(PROMPT)

            def fails(*args, error=error, **more):
                raise error

            setattr(node, verb, fails)
            request = engine.add(Request(1, PROMPT, MEETS if verb == "begin_receive" else None))
            for _ in range(4):
                engine.step()
            assert request in engine.running, (verb, error)
            delattr(node, verb)
            engine.finish(request)
            engine.clock_s += UNFIT_RETRY_S
            for _ in range(3):
                engine.step()
            later = engine.add(Request(2, PROMPT))
            for _ in range(3):
                engine.step()
            assert engine.told.get("r2") == 1, (verb, error)
            engine.finish(later)


def test_an_old_calls_error_does_not_close_the_session_after_it(engine, world):
    world.holds = True
    engine.add(Request(1, PROMPT))
    engine.step()
    call = engine.half._requests.here["r1"].claim
    world.kill()
    world.holds = False
    engine.step()
    world.start(same_memory=False)
    engine.clock_s += 1.5
    engine.steps(2)
    sessions = len(world.nodes)
    with pytest.raises(KvdError):
        call.poll()
    for _ in range(4):
        engine.clock_s += 1.5
        engine.step()
    assert len(world.nodes) == sessions


# ---- what is said --------------------------------------------------------------------------------


def half_of(connect, clock):
    return SchedulerHalf(
        VllmOptions(),
        base_namespace="model",
        block_size=BLOCK,
        connect=connect,
        blocks=CountedBlocks({}),
        now_s=lambda: clock[0],
        start=lambda work: work(),
    )


def said(caplog):
    lines = [
        record.getMessage() for record in caplog.records if record.name == "kvd.connectors.vllm"
    ]
    caplog.clear()
    return lines


def test_a_daemon_that_is_not_there_is_said_once_and_counted(caplog):
    caplog.set_level(logging.INFO)
    clock = [0.0]

    def connect():
        raise refusal(Code.UNREACHABLE)

    half = half_of(connect, clock)
    for number in range(100):
        request = Request(number, PROMPT)
        half.arrived(request, lora=None, extra={})
        assert half.matched(request, 0) == (0, False)
        half.given_blocks(request, 0)
        half.step({request.request_id: 30})
        half.finished(request)
        clock[0] += RETRY_S
    lines = said(caplog)
    assert len([line for line in lines if "no session: unreachable" in line]) == 1
    counted = [line for line in lines if "went on without kvd" in line]
    assert 0 < len(counted) <= 100 * RETRY_S / TOLD_EVERY_S + 1
    assert half.counts.went_alone == 100


@pytest.mark.parametrize("code", [Code.LAYOUT_MISMATCH, Code.BAD_REQUEST])
def test_a_pool_that_does_not_fit_stops_an_engine_that_starts_and_is_looked_at_again_later(
    caplog, code
):
    """So does one that is not there, and an endpoint that is none: neither mends itself."""
    caplog.set_level(logging.INFO)
    clock, answers = [0.0], [refusal(code)]

    def connect():
        if answers[0] is not None:
            raise answers[0]
        return StandInNode()

    with pytest.raises(KvdError):
        half_of(connect, clock)
    answers[0] = refusal(Code.UNREACHABLE)
    half = half_of(connect, clock)
    answers[0] = refusal(code)
    clock[0] += RETRY_S
    for _ in range(3):
        half.step({})
    assert code.value in said(caplog)[-1]
    answers[0] = None
    clock[0] += UNFIT_RETRY_S - 1
    half.step({})
    assert not said(caplog)
    clock[0] += 2
    half.step({})
    half.step({})
    assert "is open" in said(caplog)[-1]


def test_the_ends_of_a_session_are_said(engine, world, caplog):
    engine.step()
    caplog.set_level(logging.INFO)
    world.kill()
    engine.step()
    engine.step()
    world.start(same_memory=True)
    engine.step()
    assert [line.split(";")[0] for line in said(caplog)] == [
        "the daemon n0 has ended",
        "session 1 with daemon n0: it is back, with the same memory",
    ]
    world.kill()
    world.start(same_memory=False)
    engine.step()
    engine.clock_s += 1.5
    engine.steps(2)
    lines = said(caplog)
    assert "the session with daemon n0 is over: pool-changed: other memory" in lines[0]
    assert "session 2 with daemon n0 is open" in lines[1]
