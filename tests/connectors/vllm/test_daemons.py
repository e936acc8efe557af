"""Both halves with real daemons: restarted, stopped, full, and asked for what is not there.

How long anything takes is the machine's, which may be busy with other work: what is to come is
stepped for until it is there, and no wait of the connector ends before it (``Patience``), but where
a test is about such an end. That one says what was waited for, and not how long.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import tempfile
import time
from collections import defaultdict

import numpy as np
import pytest

from kvd.client import connect_sync
from kvd.client.blocking import BlockingChannel
from kvd.connectors.vllm.lookup import LATE, NO_PAGES_HERE, SILENT, STOOD_UP, UNLIKE
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.sessions import NO_LIFE
from kvd.connectors.vllm.tracked import RequestStage
from kvd.connectors.vllm.worker import WorkerHalf
from kvd.core.cache.namespaces import epochs_differ, key_of
from tests.connectors.vllm.stand_ins import COMES_S, WAITS, CountedBlocks, Request
from tests.connectors.vllm.world import Layer
from tests.support.daemons import is_linked, one_daemon, two_daemons

BLOCK = 16
LAYERS = 2
PAGE_BYTES = 1024
MINE = 0xAA
POOL = {
    "pool.family": "raw",
    "pool.layers": str(LAYERS),
    "pool.page_size": str(BLOCK),
    "pool.page_bytes": str(PAGE_BYTES),
    "pool.pages": "64",
}
MEETS = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "77"}}
PULLS = {"kvd": {"v": 1, "peer": "p", "room": ""}}
PROMPT = list(range(1000, 1128))


class Patience:
    """What the daemon does is waited for as long as it takes; ``lose`` it where it does nothing."""

    def __init__(self):
        self._patch = pytest.MonkeyPatch()
        self.regain()

    def regain(self):
        for wait in WAITS:
            self._patch.setattr(wait, COMES_S)

    def lose(self):
        self._patch.undo()


@pytest.fixture(autouse=True)
def patience():
    patience = Patience()
    yield patience
    patience.lose()


def plain_layer(value, page_bytes=PAGE_BYTES):
    layer = Layer()
    layer.array = np.full((128, page_bytes), value, np.uint8)
    layer.shape = layer.array.shape
    return layer


class PlainEngine:
    """Steps as vLLM does, one request at a time; every block is the same bytes."""

    def __init__(self, daemon, ranks=1, page_bytes=PAGE_BYTES, **options):
        self.layers = {f"layer {n}": plain_layer(MINE, page_bytes) for n in range(LAYERS)}
        self.counted = CountedBlocks(defaultdict(lambda: list(range(100))))
        told = VllmOptions(endpoint=daemon.client, **options)
        self.half = SchedulerHalf(
            told,
            base_namespace="model",
            block_size=BLOCK,
            connect=lambda: connect_sync(daemon.client, name="vllm", on_unreachable="miss"),
            blocks=self.counted,
            ranks=ranks,
        )
        self.worker = WorkerHalf(told, block_size=BLOCK, ranks=ranks)
        self.worker.register(self.layers)
        self.loaded = set()
        self.alone, self.unmet = [], []
        """Why requests went on without kvd, or without what another node was to send."""
        self.half._log.alone, self.half._log.unmet = self.alone.append, self.unmet.append

    def step(self, *computed, n_tokens=0):
        orders = self.half.step({one.request_id: n_tokens for one in computed})
        self.worker.load(orders)
        self.worker.save(orders)
        loaded, failed = self.worker.take_results()
        self.half.reported(self.worker.take_report())
        self.loaded |= loaded - failed
        assert not self.worker.take_freed(), "these blocks can be held"

    def until(self, is_so, *computed):
        """Step until it is so."""
        end_s = time.monotonic() + COMES_S
        while not is_so():
            assert time.monotonic() < end_s, f"it never is: {self.alone}, {self.unmet}"
            self.step(*computed)
            time.sleep(0.002)

    def matched(self, request):
        """What is found."""
        end_s = time.monotonic() + COMES_S
        while (found := self.half.matched(request, 0)[0]) is None:
            assert time.monotonic() < end_s, "it is asked again for ever"
            self.step()
            time.sleep(0.002)
        return found

    def compute(self, request):
        """All of it, without a look at what was found; until it is saved, if it is going to be."""
        self.half.given_blocks(request, 0)
        self.step(request, n_tokens=request.num_tokens - request.num_computed_tokens)
        request.num_computed_tokens = request.num_tokens
        self.until(lambda: self.is_saved(request), request)

    def is_saved(self, request):
        tracked = self.half._requests.here[request.request_id]
        if tracked.stage is RequestStage.ALONE:
            return True
        if tracked.claim is not None or tracked.extension is not None or tracked.saving:
            return False
        saves = tracked.lease is not None and not tracked.is_full and not tracked.is_broken
        return not saves or tracked.saved_tokens >= request.num_computed_tokens // BLOCK * BLOCK

    def run(self, request):
        """As if vLLM had computed all of it."""
        self.half.arrived(request, lora=None, extra={})
        found = self.matched(request)
        self.compute(request)
        is_kept, told = self.half.finished(request)
        assert not is_kept
        self.until(lambda: not self.half.has_work)
        return found, told

    def until_back(self, former):
        """Until there is a session in another life of the daemon."""
        self.until(lambda: self.half._life not in {NO_LIFE, former})

    def until_gone(self, daemon):
        """Until nothing is held in that daemon."""
        self.until(lambda: leases_of(daemon) == [])

    def close(self):
        self.half.close()
        self.worker.close()


@pytest.fixture
def engine_of():
    engines = []

    def make(daemon, **options):
        engines.append(PlainEngine(daemon, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def leases_of(daemon):
    return [lease.row_pages for lease in daemon.snapshot().leases]


def taken_of(daemon):
    (pool,) = daemon.snapshot().pools
    return pool.held_pages + pool.locked_pages, pool.promised_pages


def pages_of(node):
    return [
        next(iter(node.pool("main").arrays("kv", layer=n).values())).view(np.uint8)
        for n in range(LAYERS)
    ]


@pytest.mark.parametrize("backing", ["anon", "shm"])
def test_the_first_request_of_an_idle_engine_is_served_by_a_daemon_that_is_back(
    tmp_path, engine_of, backing
):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, contextlib.ExitStack() as stack:
        files = {"pool.backing": "shm", "pool.directory": memory} if backing == "shm" else {}
        daemon = stack.enter_context(one_daemon(tmp_path, POOL | files))
        engine = engine_of(daemon)
        engine.half.watch()
        number = itertools.count(1)
        engine.run(Request(next(number), PROMPT))
        for _ in range(2):
            former = engine.half._life
            daemon.stop()
            daemon.start()
            daemon.wait_ready()
            end_s = time.monotonic() + COMES_S
            while engine.half._life in {NO_LIFE, former}:
                assert time.monotonic() < end_s, "nobody looks while there is no step"
                time.sleep(0.01)
            first = Request(next(number), PROMPT)
            engine.half.arrived(first, lora=None, extra={})
            found = engine.matched(first)
            assert found == (127 if backing == "shm" else 0)
            engine.half.given_blocks(first, found)
            if found:
                engine.until(lambda: first.request_id in engine.loaded)  # noqa: B023
            engine.compute(first)
            engine.half.finished(first)
            assert engine.run(Request(next(number), PROMPT))[0] == 127
        assert not engine.alone
        engine.until_gone(daemon)


@pytest.fixture
def waits(monkeypatch):
    """How long the client has asked the kernel to wait, since somebody emptied it."""
    waits = []
    turn = BlockingChannel._turn

    def noted(self, within_s):
        if within_s > 0:
            waits.append(within_s)
        return turn(self, within_s)

    monkeypatch.setattr(BlockingChannel, "_turn", noted)
    return waits


def test_a_step_waits_a_millisecond_for_a_daemon_that_is_stopped(
    tmp_path, engine_of, patience, waits
):
    with one_daemon(tmp_path, POOL) as daemon:
        engine = engine_of(daemon)
        engine.run(Request(1, PROMPT))
        running = Request(2, [5, *PROMPT])
        engine.half.arrived(running, lora=None, extra={})
        engine.matched(running)
        engine.half.given_blocks(running, 0)
        took = []

        def take(hook, *args, **more):
            waits.clear()
            began_s = time.perf_counter()
            found = hook(*args, **more)
            took.append((max(waits, default=0.0), time.perf_counter() - began_s))
            return found

        patience.lose()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for number in range(3, 19):
                request = Request(number, [number, *PROMPT])
                take(engine.half.arrived, request, lora=None, extra={})
                while (found := take(engine.half.matched, request, 0)[0]) is None:
                    take(engine.step)
                assert found == 0
                engine.half.given_blocks(request, 0)
                request.num_computed_tokens = 129
            take(engine.step, running, n_tokens=129)
            running.num_computed_tokens = 129
            for _ in range(20):
                take(engine.step, running)
            assert set(engine.alone) <= {LATE, SILENT}
            began_s = time.perf_counter()
            late = PlainEngine(daemon)
            assert time.perf_counter() - began_s < 10.0, "an engine that starts waits for it"
            take(late.step)
            late.close()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert max(asked_s for asked_s, _ in took) <= 0.001
        # Others run on this machine too; half of the hooks are not in their way.
        assert sorted(s for _, s in took)[len(took) // 2] < 0.02
        patience.regain()
        engine.until(lambda: not engine.half._sessions.link.is_silent)
        assert engine.run(Request(99, PROMPT))[0] == 127, "it is used again when it goes on"


def test_a_daemon_that_was_stopped_is_one_that_does_not_answer(tmp_path, engine_of, patience):
    """Calls of a stopped one end early, so none of them is ever found to be late."""
    with one_daemon(tmp_path, POOL) as daemon:
        engine = engine_of(daemon)
        engine.run(Request(1, PROMPT))
        patience.lose()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            request = Request(2, [2, *PROMPT])
            engine.half.arrived(request, lora=None, extra={})
            time.sleep(0.1)
            assert engine.matched(request) == 0
            assert engine.alone == [LATE]
            engine.until(lambda: engine.half._sessions.link.is_silent)
            engine.half.arrived(Request(3, PROMPT), lora=None, extra={})
            assert engine.alone == [LATE, SILENT]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_why_a_claim_that_nobody_has_answered_is_given_up(tmp_path, engine_of, patience):
    """The daemon has said nothing, so nobody has said that its pool is full."""
    with one_daemon(tmp_path, POOL) as daemon:
        engine = engine_of(daemon)
        engine.run(Request(1, PROMPT))
        patience.lose()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            looked_up, computing = Request(2, [2, *PROMPT]), Request(3, [3, *PROMPT])
            for request in (looked_up, computing):
                engine.half.arrived(request, lora=None, extra={})
            # All of its prompt is computed, as for its logprobs: nobody asks what was found.
            engine.half.given_blocks(computing, 0)
            engine.step(computing, n_tokens=computing.num_tokens)
            computing.num_computed_tokens = computing.num_tokens
            assert engine.matched(looked_up) == 0
            engine.half.given_blocks(looked_up, 0)
            engine.step(looked_up, computing, n_tokens=looked_up.num_tokens)
            looked_up.num_computed_tokens = looked_up.num_tokens
            here = engine.half._requests.here
            engine.until(lambda: not engine.half._requests.claiming, looked_up, computing)
            assert here["r2"].stage is here["r3"].stage is RequestStage.ALONE
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert engine.alone == [LATE, LATE], "each once"
        for request in (looked_up, computing):
            engine.half.finished(request)
        engine.until_gone(daemon)


def test_a_reset_counts_though_the_daemon_is_stopped_or_away(tmp_path, engine_of, patience):
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        one_daemon(tmp_path, POOL | {"pool.backing": "shm", "pool.directory": memory}) as daemon,
    ):
        engine = engine_of(daemon)
        resets = engine.half._resets
        engine.run(Request(1, PROMPT))
        assert engine.half.flush()
        assert engine.run(Request(2, PROMPT))[0] == 0
        assert engine.run(Request(3, PROMPT))[0] == 127, "what came behind the reset was saved"

        patience.lose()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            began_s = time.perf_counter()
            assert engine.half.flush()
            took_s = time.perf_counter() - began_s
            assert took_s < 10.0, "a reset waits for a daemon that is stopped"
            assert resets.due
            assert engine.run(Request(4, PROMPT))[0] == 0
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        patience.regain()
        assert engine.run(Request(5, PROMPT))[0] == 0
        engine.until(lambda: not resets.due and not engine.half._sessions.link.is_silent)
        engine.run(Request(6, PROMPT))
        assert engine.run(Request(7, PROMPT))[0] == 127

        former = engine.half._life
        daemon.kill()
        engine.until(lambda: engine.half._life == NO_LIFE)
        patience.lose()
        assert engine.half.flush()
        assert engine.half.flush()
        assert engine.run(Request(8, PROMPT))[0] == 0
        patience.regain()
        daemon.start()
        daemon.wait_ready()
        engine.until_back(former)
        engine.until(lambda: not resets.due)
        assert engine.run(Request(9, PROMPT))[0] == 0, "of before the restart, and the reset"
        assert engine.run(Request(10, PROMPT))[0] == 127
        engine.until_gone(daemon)
        with connect_sync(daemon.client, name="look") as look:
            # Three were done; one that was under way as the daemon was stopped may have been twice.
            assert look.flush("model").epoch in {3, 4}


def test_who_decodes_computes_where_nothing_comes_and_leaves_nothing(tmp_path, engine_of):
    with two_daemons(tmp_path, POOL) as pair:
        decode = engine_of(pair.decode, reserve_tokens=32)
        # A room that nobody opens.
        request = Request(1, PROMPT, MEETS)
        decode.half.arrived(request, lora=None, extra={})
        assert decode.matched(request) == 0
        assert decode.unmet == [STOOD_UP]
        decode.compute(request)
        decode.half.finished(request)

        # Pulled, of a node that has nothing of it, and of one that has a part.
        assert decode.run(Request(2, [2, *PROMPT], PULLS))[0] == 0
        with connect_sync(pair.prefill.client, name="part") as node:
            lease = node.lease([3, *PROMPT[:63]], namespace="model")
            lease.commit()
            assert decode.run(Request(3, [3, *PROMPT], PULLS))[0] == 64
            lease.release()
        decode.until_gone(pair.decode)
        # And what was computed behind that part is there for others.
        assert decode.run(Request(4, [3, *PROMPT]))[0] == 128

        # vLLM computes all of a prompt whose logprobs it is asked for, whatever comes.
        with connect_sync(pair.prefill.client, name="prefill") as node:
            lease = node.lease([4, *PROMPT], namespace="model")
            sending = node.send(77, lease=lease, namespace="model", ttl_s=20.0)
            request = Request(5, [4, *PROMPT], MEETS)
            decode.half.arrived(request, lora=None, extra={})
            for _ in range(5):
                decode.half.matched(request, 0)
                decode.step()
                time.sleep(0.02)
            decode.compute(request)
            decode.half.finished(request)
            sending.abort("over")
            decode.until_gone(pair.decode)
            # Delivered, and nobody has taken it yet.
            lease = node.lease([7, *PROMPT], namespace="model")
            node.hand_over(78, lease=lease, namespace="model", ttl_s=20.0, release=True)
            request = Request(7, [7, *PROMPT], MEETS | {"kvd": MEETS["kvd"] | {"room": "78"}})
            decode.half.arrived(request, lora=None, extra={})
            tracked = decode.half._requests.here["r7"]

            def is_admitted():
                decode.half.matched(request, 0)
                return tracked.receive is not None or tracked.stage is not RequestStage.MEETING

            decode.until(is_admitted)
            decode.until(lambda: tracked.call is None or tracked.call.is_done)
            assert tracked.lease is not None or tracked.receive.lease is not None
            decode.compute(request)
            decode.half.finished(request)
        decode.until_gone(pair.decode)

        # A full pool: there is no room for what would come.
        with connect_sync(pair.decode.client, name="full") as node:
            node.lease([9] * BLOCK * 60, deadline_s=0.0)
            request = Request(6, [6, *PROMPT], MEETS)
            decode.half.arrived(request, lora=None, extra={})
            decode.unmet.clear()
            assert decode.matched(request) == 0
            assert decode.unmet == [NO_PAGES_HERE]
            decode.half.finished(request)


class Reference:
    """What an engine was told of a prompt's KV, in one of the ways in which it leads nowhere."""

    def __init__(self, pair, node):
        self.pair, self.node = pair, node

    def told(self, room, ago_s=60.0):
        told = {"v": 1, "peer": "p", "room": str(room), "at": time.time() - ago_s}
        return {"do_remote_prefill": True, "kvd": told}

    def kept(self, room, prompt, ttl_s=20.0):
        lease = self.node.lease(prompt, namespace="model")
        self.node.hand_over(
            room, lease=lease, namespace="model", ttl_s=ttl_s, takers=1, release=True
        )

    def unknown(self, prompt):
        return self.told(501)

    def opened_by_nobody(self, prompt):
        """It was open a moment ago, says the prefill engine, and its daemon has none such."""
        told = self.told(507, ago_s=0.0)
        told["kvd"]["open"] = True
        return told

    def restarted_since(self, prompt):
        lease = self.node.lease(prompt, namespace="model")
        self.node.send(508, lease=lease, namespace="model", ttl_s=20.0, when_written=True)
        self.expired_long_ago(prompt)
        told = self.told(508, ago_s=0.0)
        told["kvd"]["open"] = True
        return told

    def out_of_range(self, prompt):
        return self.told(2**63)

    def consumed(self, prompt):
        self.kept(503, prompt)
        with connect_sync(self.pair.decode.client, name="first") as first:
            receive = first.receive(503, prompt, "p", namespace="model")
            receive.done()
            receive.lease.release()
            first.flush("model")
        return self.told(503)

    def stale(self, prompt):
        """The room is another prompt's by now."""
        self.kept(504, [1, *prompt])
        return self.told(504)

    def of_other_weights(self, prompt):
        """That node is in another epoch than this one."""
        self.node.new_epoch("model")
        self.kept(509, prompt)
        return self.told(509)

    def expired(self, prompt):
        self.kept(505, prompt, ttl_s=0.2)
        time.sleep(0.6)
        return self.told(505)

    def expired_long_ago(self, prompt):
        """And nobody there remembers it."""
        self.pair.prefill.kill()
        self.pair.prefill.start()
        self.pair.prefill.wait_ready()
        while not is_linked(self.pair.decode):
            time.sleep(0.02)
        return self.told(506)


REFERENCES = (
    *("unknown", "opened_by_nobody", "restarted_since", "out_of_range", "consumed", "stale"),
    *("of_other_weights", "expired", "expired_long_ago"),
)


WHY_NOT = {
    "unknown": {STOOD_UP},
    "opened_by_nobody": {"unknown-handoff"},
    "restarted_since": {"unknown-handoff", "peer-lost"},
    "out_of_range": set(),  # no room at all: it is looked up as any prompt
    "consumed": {"duplicate-room"},
    "stale": {UNLIKE},
    "of_other_weights": {
        f"prompt-mismatch: {epochs_differ(key_of('model', 1), side='p', peer='d', peer_epoch=0)}"
    },
    "expired": {"deadline"},
    "expired_long_ago": {STOOD_UP, "peer-lost"},
}
"""One of these; that a node was restarted may be noticed by then, or not."""


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_that_leads_nowhere_costs_no_more_than_computing(
    tmp_path, engine_of, monkeypatch, kind
):
    with two_daemons(tmp_path, POOL) as pair:
        decode = engine_of(pair.decode)
        decode.step()
        prompt = [7, *PROMPT]
        with connect_sync(pair.prefill.client, name="prefill") as node:
            params = getattr(Reference(pair, node), kind)(prompt)
            request = Request(1, prompt, params)
            # The one is waited for, and the other is not.
            monkeypatch.setattr("kvd.connectors.vllm.lookup.ANSWER_WITHIN_S", 1.0)
            monkeypatch.setattr("kvd.connectors.vllm.lookup.MEET_WITHIN_S", 10 * COMES_S)
            decode.half.arrived(request, lora=None, extra={})
            assert decode.matched(request) == 0, "it is computed"
            monkeypatch.undo()
            assert set(decode.unmet) <= WHY_NOT[kind]
            assert bool(decode.unmet) == bool(WHY_NOT[kind])
            decode.compute(request)
            decode.half.finished(request)
            decode.until_gone(pair.decode)
            # What it has computed is cached, and is its own.
            assert decode.run(Request(2, prompt))[0] == len(prompt) - 1
        assert all((layer.array == MINE).all() for layer in decode.layers.values())


@pytest.mark.parametrize("end", ["decoded", "aborted", "prefix"])
def test_what_is_decoded_where_it_was_prefilled_is_kept_no_longer(tmp_path, engine_of, end):
    """Both engines have one daemon: the prompt is found in its cache, and nobody comes for it."""
    sends = {"do_remote_decode": True, "do_remote_prefill": False}
    with one_daemon(tmp_path, POOL) as daemon:
        prefill = engine_of(daemon)
        decode = engine_of(daemon, save="none" if end == "prefix" else "all")
        for number in (1, 3):
            found, told = prefill.run(Request(number, [number, *PROMPT], sends))
            assert found == 0
            prefill.until(lambda: len(leases_of(daemon)) == 1)  # kept for who decodes it
            request = Request(number + 1, [number, *PROMPT], told)
            decode.half.arrived(request, lora=None, extra={})
            if end == "aborted":
                decode.step()
            else:
                assert decode.matched(request) == 128
                decode.compute(request)
            decode.half.finished(request)
            decode.until_gone(daemon)


def test_a_prompt_is_handed_over_by_the_first_request_of_an_engine(tmp_path, engine_of):
    sends = {"do_remote_decode": True, "do_remote_prefill": False}
    with two_daemons(tmp_path, POOL) as pair:
        prefill, decode = engine_of(pair.prefill), engine_of(pair.decode)
        request = Request(1, PROMPT, sends)
        prefill.half.arrived(request, lora=None, extra={})
        prefill.matched(request)
        prefill.half.given_blocks(request, 0)
        # The only one, since one token is asked for.
        prefill.step(request, n_tokens=request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        _, told = prefill.half.finished(request)
        assert prefill.counted.needed, "the workers have not joined yet"
        prefill.until(lambda: not prefill.counted.needed)
        assert told is not None

        received = Request(2, PROMPT, told)
        decode.half.arrived(received, lora=None, extra={})
        assert decode.matched(received) == 127
        decode.half.finished(received)
        decode.until_gone(pair.decode)


def test_what_is_cached_stays_while_answers_are_short_and_long_ones_are_cached_too(
    tmp_path, engine_of
):
    with one_daemon(tmp_path, settings=POOL) as daemon:
        engine = engine_of(daemon, reserve_tokens=256)
        others = [[n, *PROMPT[:-1]] for n in range(4)]  # 32 of 63 pages
        for n, prompt in enumerate(others):
            engine.run(Request(n, prompt))
        running = [Request(10 + n, [90 + n, *PROMPT[:-1]]) for n in range(2)]
        for request in running:
            engine.half.arrived(request, lora=None, extra={})
            assert engine.matched(request) == 0
            engine.compute(request)
        # Prompts of 8 pages and answers of 16, of which the first 4 are taken.
        engine.until(lambda: taken_of(daemon) == (24, 24), *running)
        with connect_sync(daemon.client, name="look") as look:
            found = [look.match(prompt, namespace="model").tokens for prompt in others]
            assert found == [128] * 4

        long = running[0]
        for token in range(100):
            long.all_token_ids.append(token)
            long.num_computed_tokens = long.num_tokens
            engine.step(long)
            time.sleep(0.002)
        engine.compute(long)
        for request in running:
            engine.half.finished(request)
        engine.until(lambda: not engine.half.has_work)
        assert engine.run(Request(20, [*long.all_token_ids, 1]))[0] == 224
        engine.until_gone(daemon)


class TwoRanks(PlainEngine):
    """A second worker beside the first; ``is_late``: it has not begun with what it is ordered."""

    def __init__(self, daemon):
        super().__init__(daemon, ranks=2)
        self.other = WorkerHalf(
            VllmOptions(endpoint=daemon.client), block_size=BLOCK, rank=1, ranks=2
        )
        self.others = {name: plain_layer(MINE + 1) for name in self.layers}
        self.other.register(self.others)
        self.late, self.is_late = [], False
        self.heard, self.done = [set(), set()], [0, 0]

    def step(self, *computed, n_tokens=0):
        orders = self.half.step({one.request_id: n_tokens for one in computed})
        self.late.append(orders)
        due = [(self.worker, orders)]
        if not self.is_late:
            due += [(self.other, orders) for orders in self.late]
            self.late = []
        for worker, orders in due:
            worker.load(orders)
            worker.save(orders)
        workers = (self.worker, self.other)
        for heard, worker in zip(self.heard, workers, strict=True):
            heard.update(worker.take_results()[0])
        reports = [worker.take_report() or StepReport() for worker in workers]
        self.done = [n + len(report.done) for n, report in zip(self.done, reports, strict=True)]
        report = functools.reduce(StepReport.with_rank, reports)
        self.half.reported(report)

    def close(self):
        super().close()
        self.other.close()


def test_two_ranks_save_and_load_each_its_part_and_the_slower_one_counts(tmp_path):
    with (
        one_daemon(tmp_path, POOL | {"pool.tp_size": "2"}) as daemon,
        connect_sync(daemon.client, name="look") as look,
        contextlib.closing(TwoRanks(daemon)) as engine,
    ):
        engine.is_late = True
        request = Request(1, PROMPT)
        engine.half.arrived(request, lora=None, extra={})
        engine.matched(request)
        engine.half.given_blocks(request, 0)
        engine.step(request, n_tokens=request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        engine.until(lambda: engine.done[0] == 1, request)
        for _ in range(10):
            engine.step(request)
        assert look.match(PROMPT, namespace="model").tokens == 0, "one rank has not saved"
        assert engine.counted.needed
        engine.is_late = False
        engine.until(lambda: engine.is_saved(request), request)
        assert not engine.counted.needed
        engine.half.finished(request)
        engine.until(lambda: look.match(PROMPT, namespace="model").tokens == len(PROMPT))

        again = Request(2, [*PROMPT, 5])
        engine.half.arrived(again, lora=None, extra={})
        assert engine.matched(again) == len(PROMPT)
        for layer in (*engine.layers.values(), *engine.others.values()):
            layer.array[:100] = 0
        engine.half.given_blocks(again, len(PROMPT))
        engine.until(lambda: engine.heard == [{"r2"}, {"r2"}])
        for value, layers in ((MINE, engine.layers), (MINE + 1, engine.others)):
            assert all((layer.array[:8] == value).all() for layer in layers.values())
        engine.half.finished(again)
        engine.until_gone(daemon)


def test_what_is_generated_behind_a_received_page_that_was_not_full_is_cached(tmp_path, engine_of):
    prompt = PROMPT[:40]
    with two_daemons(tmp_path, POOL) as pair:
        prefill, decode = engine_of(pair.prefill), engine_of(pair.decode)
        decode.run(Request(9, [9] * 40))
        told = prefill.run(Request(1, prompt, {"do_remote_decode": True}))[1]
        request = Request(2, prompt, told)
        decode.half.arrived(request, lora=None, extra={})
        assert decode.matched(request) == 39
        decode.half.given_blocks(request, 39)
        decode.until(lambda: request.request_id in decode.loaded)
        decode.half.given_blocks(request, 0)
        for token in range(20):
            request.num_computed_tokens = request.num_tokens
            decode.step(request)
            request.all_token_ids.append(token)
            time.sleep(0.005)
        decode.until(lambda: decode.is_saved(request), request)
        decode.half.finished(request)
        decode.until_gone(pair.decode)
        with connect_sync(pair.decode.client, name="look") as look:
            assert look.match(request.all_token_ids, namespace="model").tokens == 48
