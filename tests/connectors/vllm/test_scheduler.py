"""The scheduler's half against a scripted node, in an engine that steps as vLLM does."""

from __future__ import annotations

import logging
import random
import time
from types import SimpleNamespace

import pytest

from kvd.client import Code, KvdError
from kvd.connectors.vllm.claims import MOST_AHEAD, MOST_AHEAD_TOKENS
from kvd.connectors.vllm.log import TOLD_EVERY_S
from kvd.connectors.vllm.lookup import ANSWER_WITHIN_S, LATE, UNLIKE
from kvd.connectors.vllm.moves import Moves
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.params import transfer_of
from kvd.connectors.vllm.requests import DueRequests
from kvd.errors import Refusal
from tests.connectors.vllm.stand_ins import BLOCK, MiniEngine, Request, StandInNode, refusal

PROMPT = list(range(1, 31))
WHOLE = 28
SENDS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
MEETS = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "77"}, "other": 1}


@pytest.fixture
def node():
    return StandInNode()


@pytest.fixture
def engine(node):
    engine = MiniEngine(node, reserve_tokens=8)
    yield engine
    engine.settle()
    if not node.is_dead:
        assert not node.leases, "a lease was kept"
        assert not node.receives, "a receive was kept"
    assert not engine.half.has_work


def test_what_one_request_computes_another_loads(node, engine):
    first = engine.add(Request(1, PROMPT))
    assert engine.step()
    engine.generate(first, 9)
    assert engine.finish(first) is None
    # The prompt and what was generated, whole blocks of what has KV.
    assert [(one.blocks[0][0], one.upto_tokens) for one in engine.saves] == [
        (1000, 28), (1007, 32), (1008, 36),
    ]  # fmt: skip
    assert node.cached[-1] == tuple(first.all_token_ids[:36])

    second = engine.add(Request(2, [*first.all_token_ids, 5, 6]))
    assert not engine.step()
    (load,) = engine.loads
    assert (load.upto_tokens, load.blocks) == (36, (tuple(range(2000, 2009)),))
    assert engine.step()
    assert engine.told == {"r2": 1}
    engine.finish(second)


def test_what_vllm_has_itself_is_not_loaded(node, engine):
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT), local=12)
    engine.step()
    (load,) = engine.loads
    assert load.blocks == ((1003, 1004, 1005, 1006),)
    assert load.pages == tuple(one + 3 for one in range(load.pages[0] - 3, load.pages[0] + 1))
    engine.finish(request)
    another = engine.add(Request(2, PROMPT), local=28)
    assert engine.step()
    assert len(engine.loads) == 1
    engine.finish(another)


def test_a_chunk_is_there_for_others_while_the_prompt_goes_on(node, engine):
    engine.chunk = 8
    request = engine.add(Request(1, PROMPT))
    engine.step()
    engine.step()
    assert node.cached[-1] == tuple(PROMPT[:16])
    engine.finish(request)


# ---- beside a connector that did not fill blocks -------------------------------------------------


def test_what_was_computed_with_blocks_that_were_not_filled_is_cached_by_nobody(node, engine):
    """vLLM hears of them behind the step, and computes it anew: what that saved is nobody's KV."""
    engine.chunk = 8
    engine.delays = True
    request, other = engine.add(Request(1, PROMPT)), engine.add(Request(2, [7, *PROMPT]))
    engine.step()
    engine.half.spoiled({1002})
    for _ in range(4):
        engine.step()
    for ended in (request, other):
        engine.finish(ended)
    engine.settle()
    assert not any(one[:8] == tuple(PROMPT[:8]) for one in node.cached)
    assert tuple([7, *PROMPT][:WHOLE]) in node.cached, "of others all is"
    assert engine.half.counts.went_alone == 1


def test_of_blocks_that_another_connector_fills_within_a_step_nothing_is_saved(node, engine):
    """Whether it could is said behind the step; a save cannot be taken back. Who has them too, by
    vLLM's own cache, is not saved either; one that was filled beside the steps is."""
    within, shares, beside, later = (engine.add(Request(n, [n, *PROMPT])) for n in range(1, 5))
    for request in (within, shares, beside):
        local = 8 if request is shares else 0
        engine.half.matched(request, local)
        engine.blocks[request.request_id] = list(range(1000 * int(request.request_id[1:]), 9999))
        engine.half.given_blocks(request, 0)
        request.num_computed_tokens = 8
    for request in (within, shares):
        engine.waiting.remove(request)
        engine.running.append(request)
    engine.waiting.remove(beside)
    engine.waiting.remove(later)
    engine.step()
    for _ in range(10):
        engine.work(engine.half.step({}))
    engine.half.given_blocks(beside, 0)
    engine.running.append(beside)
    engine.waiting.append(later)
    engine.step()
    assert {order.request for order in engine.saves} == {"r3", "r4"}
    for request in (within, shares, beside, later):
        engine.finish(request)


def test_what_was_saved_before_them_stays(node, engine):
    engine.chunk = 8
    request = engine.add(Request(1, PROMPT))
    engine.step()
    engine.half.spoiled({1002})
    for _ in range(4):
        engine.step()
    engine.finish(request)
    assert node.cached == [tuple(PROMPT[:8])] * 2


def test_of_blocks_that_another_connector_was_filling_nothing_is_saved(node, engine):
    """vLLM counts their tokens as computed from the start; it is taken back before they are."""
    node.holds = True
    request = engine.add(Request(1, PROMPT))
    for _ in range(2):  # it is looked up, in vain: the daemon is slow
        engine.half.matched(request, 0)
        engine.clock_s += 1.0
    engine.blocks["r1"] = list(range(1000, 1100))
    engine.half.given_blocks(request, 0)
    request.num_computed_tokens = WHOLE
    engine.half.step({})
    engine.finish(request)
    node.holds = False
    node.come()
    engine.settle()
    assert not engine.saves
    assert not any(node.cached)


def test_of_a_request_that_ends_in_an_error_no_more_is_cached(node, engine):
    engine.chunk = 8
    engine.delays = True
    request = engine.add(Request(1, PROMPT))
    engine.step()
    engine.running.remove(request)
    engine.gone.add("r1")
    engine.half.finished(request, is_heard=False, is_sound=False)
    engine.settle()
    assert not any(node.cached)


def test_a_mistake_at_an_end_in_an_error_is_kept_in(engine, monkeypatch):
    def mistaken(_):
        raise ValueError("no such copy")

    request = engine.add(Request(1, PROMPT))
    engine.step()
    engine.running.remove(request)
    engine.gone.add("r1")
    monkeypatch.setattr(engine.half._copies, "spoil", mistaken)

    assert engine.half.finished(request, is_heard=False, is_sound=False)[1] is None

    assert engine.half.counts.failures == 1


def test_a_look_up_that_waits_is_asked_again(node, engine):
    engine.half._claims.most_ahead = 0
    node.share(PROMPT)
    node.holds = True
    request = engine.add(Request(1, PROMPT))
    assert engine.half.matched(request, 0) == (None, False)
    node.come()
    assert engine.half.matched(request, 0) == (28, True)
    assert engine.half.matched(request, 0) == (28, True)
    assert not node.leases, "a probe owns nothing"
    engine.finish(request)


def test_what_was_evicted_meanwhile_is_computed_and_not_asked_for_again(node, engine):
    engine.half._claims.most_ahead = 0
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT))
    engine.half.matched(request, 0)
    node.cached.clear()
    engine.step()
    assert engine.told == {"r1": 1}
    assert engine.step()
    assert engine.half.counts.failed_loads == 1
    engine.finish(request)


def test_a_request_claims_its_pages_with_its_look_up(node, engine):
    """Then nothing that was found can be evicted before it is loaded."""
    node.share(PROMPT)
    engine.add(Request(1, PROMPT))
    assert len(node.leases) == 1
    node.cached.clear()
    assert engine.half.matched(engine.requests["r1"], 0) == (WHOLE, True)
    engine.step()
    assert [one.upto_tokens for one in engine.loads] == [WHOLE]
    assert engine.step()
    assert node.last == 1, "it claims once"
    engine.finish(engine.requests["r1"])


def test_behind_a_few_that_wait_requests_are_looked_up_and_own_nothing(node, engine):
    node.share(PROMPT)
    requests = [engine.add(Request(number, PROMPT)) for number in range(1, 12)]
    assert len(node.leases) == MOST_AHEAD
    for request in requests:
        assert engine.half.matched(request, 0) == (WHOLE, True)
    assert len(node.leases) == MOST_AHEAD
    engine.step()
    assert len(node.leases) == len(requests)
    engine.add(Request(12, PROMPT))
    assert len(node.leases) == len(requests) + 1, "these have blocks: the next one is the first"
    for request in [*requests, engine.requests["r12"]]:
        engine.finish(request)


def test_long_prompts_that_wait_keep_no_pages(node, engine):
    long = list(range(MOST_AHEAD_TOKENS))
    requests = [engine.add(Request(1, long)), engine.add(Request(2, PROMPT))]
    assert len(node.leases) == 1
    requests.append(engine.add(Request(3, [1, *long])))
    assert len(node.leases) == 1
    for request in requests:
        engine.finish(request)


@pytest.mark.parametrize("comes", ["before", "after", "never"])
def test_a_request_that_is_aborted_before_it_has_blocks_gives_its_claim_back(node, engine, comes):
    node.share(PROMPT)
    node.holds = True
    request = engine.add(Request(1, PROMPT))
    if comes == "before":
        node.come()
        assert engine.half.matched(request, 0) == (WHOLE, True)
        assert node.leases
    engine.finish(request)
    if comes == "after":
        node.come()
    engine.settle()
    assert not node.leases
    assert not engine.half._requests.ahead


def test_a_claim_for_which_there_are_no_pages_is_a_look_up(node, engine):
    node.share(PROMPT)
    node.is_full = True
    request = engine.add(Request(1, PROMPT))
    assert engine.half.matched(request, 0) == (WHOLE, True)
    assert not node.leases
    assert not engine.half._requests.ahead
    node.is_full = False
    engine.step()
    engine.step()
    assert [one.upto_tokens for one in engine.loads] == [WHOLE]
    engine.generate(request, 9)
    assert engine.saves, "there are pages for it by now"
    engine.finish(request)


@pytest.mark.parametrize("stage", ["probing", "computing", "given up before"])
def test_a_claim_that_nobody_has_answered_is_late_and_no_full_pool(node, engine, stage):
    """Its own time is over: that is said by the client, and not by the daemon."""
    told = []
    engine.half._log.alone = told.append
    node.share(PROMPT)
    node.holds = True
    request = engine.add(Request(1, PROMPT))
    if stage == "computing":
        engine.half.given_blocks(request, 0)
        engine.waiting.remove(request)
        engine.blocks["r1"] = list(range(1000, 1200))
        engine.running.append(request)
    elif stage == "given up before":
        for _ in range(2):
            engine.step()
            engine.clock_s += ANSWER_WITHIN_S
    claim = engine.half._requests.here["r1"].claim
    claim.error, claim.is_done = KvdError(Refusal(Code.DEADLINE, "no answer", "client")), True
    engine.step()
    engine.step()
    assert request in engine.running
    assert told == [LATE], "and it is counted once"
    engine.finish(request)


def test_an_engine_that_saves_nothing_claims_no_pages_ahead(node):
    engine = MiniEngine(node, save="none")
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT))
    assert not node.leases
    engine.step()
    assert [one.upto_tokens for one in engine.loads] == [WHOLE]
    engine.finish(request)
    engine.settle()


def test_a_step_looks_at_no_request_that_completes_no_block(node, engine, monkeypatch):
    looks = []
    saves = Moves.saves
    monkeypatch.setattr(
        Moves, "saves", lambda self, one, upto: looks.append(upto) or saves(self, one, upto)
    )
    requests = [engine.add(Request(number, [number, *PROMPT])) for number in range(1, 4)]
    engine.step()
    engine.step()
    looks.clear()
    for token in range(8 * BLOCK):
        for request in requests:
            request.all_token_ids.append(9000 + token)
        engine.step()
    # Of each: once a block, and once more where pages were asked for.
    assert len(looks) <= len(requests) * (8 + 6)
    for request in requests:
        saved = [one.upto_tokens for one in engine.saves if one.request == request.request_id]
        assert saved == [28, *range(32, 61, 4)]
        engine.finish(request)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_looked_at_later_than_it_has_computed_what_it_has_to(seed):
    rng = random.Random(seed)
    due = DueRequests()
    left = {}
    requests = {number: SimpleNamespace(id=f"r{number}") for number in range(6)}
    for number, request in requests.items():
        left[number] = rng.randint(1, 40)
        due.after(request, left[number])
    looks = 0
    for _ in range(300):
        running = rng.sample(range(6), rng.randint(1, 6))
        scheduled = {f"r{number}": rng.choice([0, 1, 1, 1, 1, 4, 30]) for number in running}
        found = {request.id for request in due.take(scheduled)}
        looks += len(found)
        for number in running:
            name = f"r{number}"
            left[number] -= scheduled[name]
            assert left[number] > 0 or name in found
            if name in found:
                left[number] = rng.randint(1, 40)
                due.after(requests[number], left[number])
    assert looks


def test_a_full_pool_serves_what_is_in_it_and_saves_nothing(node, engine):
    node.share(PROMPT)
    node.is_full = True
    request = engine.add(Request(1, PROMPT))
    for _ in range(4):
        engine.step()
    assert [one.upto_tokens for one in engine.loads] == [28]
    assert not engine.saves
    engine.finish(request)
    miss = engine.add(Request(2, [7, *PROMPT]))
    assert engine.step()
    engine.finish(miss)


def test_a_preempted_request_comes_back_from_its_own_pages(node, engine):
    request = engine.add(Request(1, PROMPT))
    engine.step()
    node.cached.clear()
    engine.preempt(request)
    engine.step()
    (load,) = engine.loads
    assert load.upto_tokens == WHOLE
    assert engine.step()
    engine.finish(request)


def test_a_preempted_request_loads_no_more_than_its_own_pages_have(node, engine):
    """What was found was evicted before it had a lease, and what is saved is not reported yet."""
    engine.half._claims.most_ahead = 0
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT), local=28)
    engine.half.matched(request, 28)
    node.cached.clear()
    engine.delays = True
    engine.step()
    engine.preempt(request)
    engine.local["r1"] = 0
    assert engine.half.matched(request, 0) == (0, False)
    engine.finish(request)


def test_a_copy_that_fails_is_neither_loaded_nor_shared(node, engine):
    node.share(PROMPT)
    engine.breaks = {"r1", "r2"}
    request = engine.add(Request(1, PROMPT))
    for _ in range(3):
        engine.step()
    assert engine.told == {"r1": 1}
    before = list(node.cached)
    other = engine.add(Request(2, [3, *PROMPT]))
    engine.step()
    engine.finish(other)
    engine.finish(request)
    assert [tokens for tokens in node.cached if tokens] == before


def test_a_lease_outlives_copies_that_are_under_way(node, engine):
    engine.delays = True
    request = engine.add(Request(1, PROMPT))
    engine.step()
    engine.finish(request)
    assert node.leases
    assert engine.half.has_work
    engine.step()
    assert node.released[-1][1] == WHOLE


def test_a_dead_daemon_is_a_miss_and_is_looked_for(node, engine):
    node.is_dead = True
    request = engine.add(Request(1, PROMPT))
    assert engine.half.matched(request, 0) == (0, False)
    assert engine.step()
    engine.finish(request)
    node.is_dead = False
    found = engine.add(Request(2, PROMPT))
    engine.step()
    assert engine.saves
    engine.finish(found)


def test_it_dies_while_a_request_is_under_way(node, engine):
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT))
    node.is_dead = True
    for _ in range(3):
        engine.step()
    assert request in engine.running
    engine.finish(request)


# ---- handoffs ------------------------------------------------------------------------------------


def test_a_prompt_is_kept_for_who_decodes_it_its_last_page_too(node, engine):
    node.opens = False  # an older daemon: it is handed over when all of it is there
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.step()
    told = engine.finish(request)
    ((room, _, how),) = node.handed
    # A connector beside this one may answer the router's own keys: equal ones end the engine.
    assert abs(told["kvd"].pop("at") - time.time()) < 60
    assert told == {"kvd": {"v": 1, "peer": "n0", "room": str(room)}}
    assert (how["ttl_s"], how["takers"], how["namespace"]) == (120.0, 1, "model")
    assert engine.saves[-1].upto_tokens == len(PROMPT)


def test_its_room_is_open_from_its_first_step_on(node, engine):
    engine.chunk = 8
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.step()
    (send,) = node.opened
    assert send.how == {
        "namespace": "model",
        "deadline_s": 30.0,
        "ttl_s": 120.0,
        "takers": 1,
        "when_written": True,
    }
    while request.num_computed_tokens < len(PROMPT):
        engine.step()
    told = engine.finish(request)

    assert abs(told["kvd"].pop("at") - time.time()) < 60
    assert told == {"kvd": {"v": 1, "peer": "n0", "room": str(send.room), "open": True}}
    assert not node.handed
    assert send.why is None
    assert engine.saves[-1].upto_tokens == len(PROMPT)
    assert node.released == [(send.lease, len(PROMPT))]


def test_it_is_the_room_that_its_router_has_chosen(node, engine):
    request = engine.add(Request(1, PROMPT, SENDS | {"kvd": {"v": 1, "opens": "77"}}))
    engine.step()
    assert engine.finish(request)["kvd"]["room"] == "77"
    assert [send.room for send in node.opened] == [77]
    assert not engine.half.counts.odd_params


def test_a_room_that_was_refused_is_told_as_another_one_that_is_opened_soon(node, engine):
    node.opens = False
    request = engine.add(Request(1, PROMPT, SENDS | {"kvd": {"v": 1, "opens": "77"}}))
    engine.step()
    told = engine.finish(request)["kvd"]
    assert told["room"] != "77"
    assert "open" not in told
    assert [str(room) for room, _, _ in node.handed] == [told["room"]]


def test_a_room_whose_daemon_has_not_answered_is_told_and_not_opened_twice(node, engine):
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.half.matched(request, 0)
    node.holds = True
    engine.step()
    told = engine.finish(request)["kvd"]
    assert "open" not in told
    engine.settle()
    assert [str(send.room) for send in node.opened] == [told["room"]]
    assert not node.handed


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "being opened"])
def test_who_waits_in_the_room_of_an_aborted_prompt_hears_so(node, engine, is_open):
    engine.chunk = 8
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.half.matched(request, 0)
    node.holds = not is_open
    engine.step()
    assert engine.finish(request) is None
    engine.settle()
    assert not node.handed
    assert all(send.why for send in node.opened)
    assert len(node.opened) == is_open


def test_who_waits_in_the_room_of_a_prompt_that_could_not_be_saved_hears_so(node, engine):
    engine.chunk = 8
    engine.breaks.add("r1")
    request = engine.add(Request(1, PROMPT, SENDS))
    for _ in range(4):
        engine.step()
    assert engine.finish(request) is None
    engine.settle()
    assert len(node.opened) == 1
    assert all(send.why for send in node.opened)


def test_an_engine_that_only_caches_neither_keeps_prompts_for_others_nor_asks_for_theirs(node):
    engine = MiniEngine(node, handoffs=False)
    sent, met = engine.add(Request(1, PROMPT, SENDS)), engine.add(Request(2, [7, *PROMPT], MEETS))
    engine.step()
    assert (engine.finish(sent), engine.finish(met)) == (None, None)
    engine.settle()
    assert not node.handed
    assert node.asked == ["model", "model"]


@pytest.mark.parametrize(
    ("chunk", "n_blocks"), [(1, 0), (3, 0), (4, 1), (15, 3), (16, 4), (17, 4), (39, 9), (40, 10)]
)
@pytest.mark.parametrize("end", ["aborted", "preempted"])
def test_what_ends_with_a_save_under_way_keeps_the_blocks_of_that_alone(node, end, chunk, n_blocks):
    """scenario K1, scenario K2: ten blocks, of which the first chunk is ordered to be saved."""
    prompt = list(range(1, 10 * BLOCK + 1))
    engine = MiniEngine(node, chunk=chunk)
    engine.delays = True
    request = engine.add(Request(1, prompt))
    engine.step()
    if end == "aborted":
        engine.finish(request)
    else:
        engine.preempt(request)

    assert sorted(engine.counted.needed) == list(range(1000, 1000 + n_blocks))
    assert not engine.kept

    saved = [tuple(prompt[: n_blocks * BLOCK])] if n_blocks else []
    engine.delays = False
    for report in engine.late:
        engine.half.reported(report)
    engine.late.clear()
    assert not engine.counted.needed
    for _ in range(2):
        engine.step()
    if end == "preempted":
        assert [load.upto_tokens for load in engine.loads] == [
            min(len(tokens), len(prompt) - 1) for tokens in saved
        ]
        engine.finish(request)
    else:
        assert [tokens for tokens in node.cached if tokens] == saved
    engine.settle()
    assert not node.leases


def test_an_aborted_prefill_promises_nothing(node, engine):
    engine.chunk = 8
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.step()
    assert engine.finish(request) is None
    assert not node.handed


def test_blocks_are_held_until_the_last_rank_has_answered(node):
    """VLLM gives blocks of a request away as soon as it is over: `finished` says that it may."""
    engine = MiniEngine(node, ranks=2)
    engine.delays = True
    request = engine.add(Request(1, PROMPT))
    engine.step()
    (report,) = engine.late
    (order,) = engine.saves
    assert engine.finish(request) is None
    assert not engine.kept
    assert engine.counted.needed.keys() == set(order.used)
    report.done = {order.number: 1}
    engine.step()
    assert engine.counted.needed.keys() == set(order.used), "one rank has not answered"
    assert not node.cached
    assert engine.half.has_work
    engine.half.reported(StepReport(failed={order.number + 99: 1}))
    engine.half.reported(StepReport(done={order.number: 1}))
    assert not engine.counted.needed
    assert node.cached == [tuple(PROMPT[:WHOLE])]
    engine.half.reported(StepReport(done={order.number: 2}))
    engine.settle()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_is_saved_behind_a_slower_copy_is_shared_with_it(node, order):
    engine = MiniEngine(node, chunk=8)
    engine.work = lambda orders: engine.saves.extend(orders.saves)
    request = engine.add(Request(1, PROMPT))
    for _ in range(3):
        engine.step()
    numbers = [save.number for save in engine.saves]
    assert [save.first_page for save in engine.saves] == [0, 2, 4]
    done = set()
    for which in order:
        done.add(which)
        engine.half.reported(StepReport(done={numbers[which]: 1}))
        whole = next((n for n in range(3) if n not in done), 3)
        assert max(map(len, node.cached), default=0) == 8 * whole
    engine.finish(request)


def test_what_is_saved_behind_a_copy_that_failed_is_not_shared(node):
    engine = MiniEngine(node, chunk=8)
    engine.work = lambda orders: engine.saves.extend(orders.saves)
    request = engine.add(Request(1, PROMPT))
    for _ in range(3):
        engine.step()
    first, second, third = (save.number for save in engine.saves)
    engine.half.reported(StepReport(done={first: 1, third: 1}))
    assert engine.finish(request) is None
    engine.half.reported(StepReport(failed={second: 1}))
    assert node.cached == [tuple(PROMPT[:8])] * 2
    assert not node.leases
    assert not engine.counted.needed


def test_a_prompt_that_is_over_before_it_has_pages_is_saved_all_the_same(node, engine):
    """Its blocks are held until then, and not kept by vLLM."""
    engine.half._claims.most_ahead = 0
    node.holds = True
    request = engine.add(Request(1, PROMPT))
    engine.half.matched(request, 0)
    node.come()
    engine.step()
    assert request in engine.running
    assert engine.finish(request) is None
    assert not engine.kept
    assert len(engine.counted.needed) > 0
    assert engine.half.has_work
    node.holds = False
    node.come()
    engine.step()
    engine.step()
    assert [save.upto_tokens for save in engine.saves] == [WHOLE]
    assert node.found(PROMPT) == WHOLE


@pytest.mark.parametrize("is_preempted", [False, True])
def test_blocks_that_cannot_be_held_are_kept_by_vllm_and_waited_for(node, is_preempted):
    engine = MiniEngine(node, can_be_held=False)
    engine.delays = True
    request = engine.add(Request(1, PROMPT))
    engine.step()
    (order,) = engine.saves
    if is_preempted:
        engine.preempt(request)
        orders = engine.half.step({}, ["r1"])
        assert orders.awaited == (order.number,)
        assert engine.half.step({}, ["r1"]).awaited == ()
    engine.finish(request)
    assert engine.kept == (set() if is_preempted else {"r1"}), "those of before are another one's"
    assert engine.half.step({}).freed == ()
    engine.delays = False
    engine.settle()
    assert node.found(PROMPT) == WHOLE


def test_a_prompt_whose_request_was_aborted_behind_it_is_cached_and_not_kept(node, engine):
    """vLLM tells nobody of its room, so nobody would come for it."""
    request = engine.add(Request(1, PROMPT, SENDS))
    engine.step()
    engine.generate(request, 2)
    engine.running.remove(request)
    assert engine.half.finished(request, is_heard=False) == (False, None)
    engine.step()
    assert not node.handed
    assert node.found(PROMPT) == WHOLE


def test_who_decodes_gets_all_of_it_without_holding_blocks(node, engine):
    node.holds = True
    request = engine.add(Request(1, PROMPT, MEETS))
    assert node.asked == [(77, "p", "r1"), "model"]
    engine.step()
    assert not engine.blocks
    node.holds = False
    node.come()
    for _ in range(3):
        engine.step()
    (load,) = engine.loads
    assert (load.upto_tokens, len(load.used)) == (len(PROMPT) - 1, 8)
    assert request.num_computed_tokens == len(PROMPT)
    told = engine.finish(request)
    assert told == {"kvd": {"v": 1, "peer": "n0", "room": ""}}


def test_a_meeting_that_fails_is_a_look_up(node, engine):
    node.share(PROMPT)
    node.receive_fails = refusal(Code.DEADLINE)
    request = engine.add(Request(1, PROMPT, MEETS))
    for _ in range(4):
        engine.step()
    assert [one.upto_tokens for one in engine.loads] == [28]
    engine.finish(request)


def test_where_kv_came_from_is_known_when_it_is_loaded(node, engine):
    node.share(PROMPT[:16])
    for number, params, sent in ((1, None, 0), (2, MEETS, len(PROMPT) - 1)):
        request = engine.add(Request(number, PROMPT, params))
        for _ in range(3):
            engine.step()
        found = engine.loads[-1].upto_tokens
        assert engine.half.sent_tokens(request.request_id, found) == sent
        engine.finish(request)
    assert engine.half.sent_tokens("r9", 5) == 0


def test_of_a_prompt_that_was_sent_in_part_the_rest_is_of_this_node(node, engine):
    request = engine.add(Request(1, PROMPT, MEETS))
    tracked = engine.half._requests.here[request.request_id]
    tracked.sent_from, tracked.loads_to = 16, 28
    # vLLM has 0, 8 or 20 of it itself.
    assert [tracked.sent_tokens(28 - local) for local in (0, 8, 20)] == [12, 12, 8]
    engine.finish(request)


def test_why_nothing_came_of_another_node_is_told_with_each_reason_at_most_every_10_s(
    node, engine, caplog
):
    caplog.set_level(logging.WARNING)
    for number in range(1, 4):
        node.receive_fails = refusal(Code.DUPLICATE_ROOM if number < 3 else Code.PEER_UNKNOWN)
        request = engine.add(Request(number, [number, *PROMPT], MEETS))
        for _ in range(4):
            engine.step()
        engine.finish(request)
    assert engine.half.counts.unmet == 3
    assert engine.half.counts.went_alone == 0
    assert not caplog.records
    engine.clock_s += TOLD_EVERY_S
    engine.step()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("3 prompts of the last 10 s did not get what another node was to send")
    assert line.endswith(": 2: duplicate-room; 1: peer-unknown")
    engine.clock_s += TOLD_EVERY_S
    engine.step()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (
            Refusal(Code.LAYOUT_MISMATCH, "p has 2 ranks, d has 1"),
            "layout-mismatch: p has 2 ranks, d has 1",
        ),
        (
            Refusal(Code.PROMPT_MISMATCH, "p is in epoch 1, d in 0", numbers={"peer_epoch": 0}),
            "prompt-mismatch: p is in epoch 1, d in 0",
        ),
        # Digests are others for each prompt: what is told of all of them is where to look.
        (Refusal(Code.PROMPT_MISMATCH, "the digests differ (1 and 2)"), UNLIKE),
    ],
)
def test_nodes_that_exchange_nothing_are_told_with_what_they_differ_in(
    node, engine, caplog, refused, told
):
    caplog.set_level(logging.WARNING)
    node.receive_fails = KvdError(refused)
    request = engine.add(Request(1, PROMPT, MEETS))
    for _ in range(4):
        engine.step()
    engine.finish(request)
    engine.clock_s += TOLD_EVERY_S
    engine.step()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(f": 1: {told}")


@pytest.mark.parametrize(
    ("params", "sends", "meets", "is_odd"),
    [
        (None, False, False, False),
        ({}, False, False, False),
        (SENDS, True, False, False),
        (MEETS, False, True, False),
        ({"do_remote_prefill": True, "remote_block_ids": None, "kvd": None}, False, False, False),
        ({"kvd": {"v": 2, "peer": "p", "room": "7"}}, False, False, True),
        ({"kvd": {"v": 1, "peer": "p", "room": "x"}}, False, False, True),
        ({"kvd": {"v": 1, "peer": "", "room": "7"}}, False, False, True),
        ({"kvd": {"v": 1, "peer": "p", "room": "7", "later": 1}}, False, True, False),
        ({"kvd": {"v": 1, "peer": "p", "room": "7", "at": 1e9}}, False, True, False),
        ({"kvd": {"v": 1, "peer": "p", "room": "7", "at": -1}}, False, True, False),
        ({"kvd": {"v": 1, "peer": "p", "room": "7", "at": "now"}}, False, False, True),
        ({"kvd": "p"}, False, False, True),
        ({"do_remote_decode": "yes"}, False, False, False),
        ({"kvd": {"v": 1, "peer": "\ud800", "room": "7"}}, False, False, True),
        ({"kvd": {"v": 1, "peer": "p", "room": "7", "\ud800": 1}}, False, False, True),
        ({"kvd": {"v": 1, "peer": "p", "room": "9" * 5000}}, False, False, True),
        ({"kvd": {1: 2}}, False, False, True),
        ({1: 2, "\ud800": 3}, False, False, False),
        ({"max_load_tokens": 16}, False, False, False),
        ({"max_load_tokens": -1}, False, False, True),
        ({"max_load_tokens": True}, False, False, True),
        ({"max_load_tokens": "16", "do_remote_decode": True}, True, False, True),
        ("kvd", False, False, True),
        (["kvd"], False, False, True),
        (7, False, False, True),
        (True, False, False, True),
    ],
)
def test_params_of_routers(params, sends, meets, is_odd):
    found = transfer_of(params)
    assert (found.sends, found.meeting is not None, found.is_odd) == (sends, meets, is_odd)


@pytest.mark.parametrize("params", ["kvd", [1], {"kvd": {"v": 1, "peer": "\ud800", "room": "7"}}])
def test_params_of_one_user_do_not_cost_the_session_of_all(node, engine, params):
    node.share(PROMPT)
    request = engine.add(Request(1, PROMPT, params))
    engine.step()
    assert [one.upto_tokens for one in engine.loads] == [WHOLE]
    assert (engine.connects, engine.half.counts.odd_params) == (1, 1)
    engine.finish(request)


@pytest.mark.parametrize(("most", "loaded"), [(100, [WHOLE]), (9, [8]), (3, []), (0, [])])
@pytest.mark.parametrize("handoffs", [True, False])
def test_no_more_is_loaded_than_a_request_says_and_all_of_it_is_saved(node, most, loaded, handoffs):
    node.share(PROMPT[:WHOLE])
    engine = MiniEngine(node, handoffs=handoffs)
    request = engine.add(Request(1, PROMPT, {"max_load_tokens": most}))
    while request.num_computed_tokens < len(PROMPT):
        engine.step()
    engine.finish(request)
    assert [one.upto_tokens for one in engine.loads] == loaded
    assert not engine.saves, "it is all cached"


def test_nothing_is_fetched_for_a_request_that_loads_nothing(node, engine):
    request = engine.add(Request(1, PROMPT, MEETS | {"max_load_tokens": 0}))
    engine.step()
    engine.finish(request)
    assert not node.receives
    assert not engine.loads


def test_a_node_that_cannot_be_asked_is_none(node, engine):
    """As where its name is none: what is cached here is used."""
    node.share(PROMPT)
    node.begin_receive = lambda *_, **__: (_ for _ in ()).throw(refusal(Code.BAD_REQUEST))
    request = engine.add(Request(1, PROMPT, MEETS))
    engine.step()
    assert [one.upto_tokens for one in engine.loads] == [WHOLE]
    engine.finish(request)


@pytest.mark.parametrize("number", ["r" * 129, "r1\n"])
def test_a_request_whose_number_is_no_name_is_handed_over_all_the_same(node, engine, number):
    request = Request(1, PROMPT, MEETS)
    request.request_id = number
    engine.half.arrived(request, lora=None, extra={})
    ((room, peer, told),) = [one for one in node.asked if one != "model"]
    assert (room, peer) == (77, "p")
    assert told != number
    assert len(told) <= 128
    engine.half.finished(request)


# ---- at random -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_request_hears_once_and_nothing_is_kept(seed):
    rng = random.Random(seed)
    node = StandInNode()
    engine = MiniEngine(node, chunk=rng.choice([4, 8, 64]), reserve_tokens=rng.choice([0, 8]))
    waits = {}
    for number in range(1, 60):
        deed = rng.random()
        live = [*engine.waiting, *engine.running]
        if deed < 0.4:
            prompt = [rng.randint(1, 2)] * rng.randint(1, 5) * BLOCK + PROMPT[: rng.randint(1, 9)]
            params = rng.choice([None, None, SENDS, MEETS])
            engine.add(Request(number, prompt, params), local=0)
        elif deed < 0.6 and engine.running:
            engine.generate(rng.choice(engine.running), rng.randint(1, 5))
        elif deed < 0.7 and engine.running:
            engine.preempt(rng.choice(engine.running))
        elif deed < 0.8 and live:
            engine.finish(rng.choice(live))
        elif deed < 0.85 and engine.remote:
            # Aborted while vLLM waits for its blocks.
            engine.finish(engine.requests[rng.choice(list(engine.remote))])
        node.holds = rng.random() < 0.3
        node.is_full = rng.random() < 0.2
        engine.delays = rng.random() < 0.3
        engine.breaks = {f"r{number}"} if rng.random() < 0.1 else set()
        node.receive_fails = refusal(Code.ABORTED) if rng.random() < 0.5 else None
        if not node.holds:
            node.come()
        engine.step()
        waits.update(engine.remote)
    node.is_full = False
    engine.settle()
    for request in [*engine.waiting, *engine.running]:
        engine.finish(request)
    engine.settle()
    assert not engine.remote, "blocks wait for ever"
    assert not node.leases
    assert not node.receives
    assert not engine.half.has_work
