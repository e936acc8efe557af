"""A node, and requests, as the scheduler's half sees them: what they answer, and when, is scripted.

The node keeps count of what it gave out: at the end of a test nobody may hold anything.
"""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import numpy as np

from kvd.client import Code, KvdError, LeaseKey, LeaseTiers, Matched
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.errors import Refusal

BLOCK = 4

COMES_S = 60.0
"""By then it has come, whatever else the machine does."""

WAITS = (
    "kvd.client.port.AT_ONCE_S",
    "kvd.connectors.vllm.claims.ANSWER_WITHIN_S",
    "kvd.connectors.vllm.held.HELD_S",
    "kvd.connectors.vllm.lookup.ANSWER_WITHIN_S",
    "kvd.connectors.vllm.lookup.PULL_WITHIN_S",
    "kvd.connectors.vllm.scheduler.ANSWER_WITHIN_S",
    "kvd.connectors.vllm.resets.RESET_WITHIN_S",
    "kvd.connectors.vllm.sessions.OPEN_WITHIN_S",
    "kvd.connectors.vllm.sessions.SILENT_S",
    "kvd.connectors.vllm.windows.KEPT_S",
    "kvd.connectors.vllm.worker.ANSWER_WITHIN_S",
    "kvd.connectors.vllm.worker.CHECK_WITHIN_S",
    "kvd.connectors.vllm.worker.JOIN_WITHIN_S",
    "kvd.connectors.vllm.worker.SAVE_WITHIN_S",
)
"""After which something is done without the daemon."""


def refusal(code: Code, message: str = "no") -> KvdError:
    return KvdError(Refusal(code, message))


class Call:
    """A pending call: it has its outcome once ``come`` was called, which is at once by default."""

    def __init__(self, node, make, undo=None, *, hangs=False):
        self.node = node
        self.make = make
        self.undo = undo
        self.value = self.error = None
        self.is_done = False
        self.is_cancelled = False
        if hangs:
            return
        if not node.holds:
            self.come()
        else:
            node.pending.append(self)

    def come(self):
        if self.is_done or self.is_cancelled:
            return
        self.is_done = True
        try:
            self.value = self.make()
        except KvdError as error:
            self.error = error
        self.node.ended.append(self)

    def wait(self, within_s):
        if not self.is_done:
            time.sleep(within_s)
        return self.poll()

    def poll(self):
        if self.error is not None:
            raise self.error
        return self.value

    def result(self, timeout_s=None):
        if not self.is_done:
            raise refusal(Code.DEADLINE)
        return self.poll()

    def cancel(self):
        if self.is_done and self.value is not None and self.undo is not None:
            self.undo(self.value)
        self.is_cancelled = True
        return True


class Lease:
    tiers = LeaseTiers()

    def __init__(self, node, tokens, prefix_len, n_pages):
        node.last += 1
        self.node, self.id, self.tokens = node, node.last, list(tokens)
        self.prefix_len = prefix_len
        self.pages = np.arange(100 * self.id, 100 * self.id + n_pages)
        self.key = LeaseKey(
            session=node.session, incarnation=node.incarnation, lease=self.id, version=1
        )
        self.committed = []
        node.leases[self.id] = self

    def begin_commit(self, new_tokens=(), upto_tokens=None, *, swap=True):
        def commit():
            self.node.alive()
            self.committed.append(upto_tokens)
            self.node.share(self.tokens[:upto_tokens])
            return self

        return Call(self.node, commit)

    def begin_extend(self, n_tokens):
        def extend():
            self.node.alive()
            if self.node.is_full:
                raise refusal(Code.NO_ROOM)
            more = -(-n_tokens // BLOCK)
            first = self.pages[-1] + 1
            self.pages = np.concatenate([self.pages, np.arange(first, first + more)])
            return self

        return Call(self.node, extend)

    def begin_release(self, new_tokens=None, upto_tokens=None):
        def release():
            self.node.alive()
            if new_tokens is not None:
                tokens = self.tokens + list(new_tokens)
                assert upto_tokens <= len(tokens)
                self.node.share(tokens[:upto_tokens])
            del self.node.leases[self.id]
            self.node.released.append((self.id, upto_tokens))
            return self

        return Call(self.node, release)

    def share(self, new_tokens=(), upto_tokens=None):
        self.begin_commit(new_tokens, upto_tokens, swap=False)

    def leave(self, new_tokens=None, upto_tokens=None):
        self.begin_release(new_tokens, upto_tokens)


class Send:
    """A room that is open while its prompt is computed."""

    def __init__(self, node, room, lease, how):
        self.node, self.room, self.lease, self.how = node, room, lease.id, how
        self.outcome = self.why = None
        node.opened.append(self)

    def begin_abort(self, reason):
        def abort():
            self.outcome = self.why = reason
            return self

        return Call(self.node, abort)


class Receive:
    def __init__(self, node, tokens):
        self.node, self.tokens, self.lease, self.arriving = node, tokens, None, None
        self.prefix_len, self.n_tokens = 0, len(tokens)
        self.id = len(node.asked)
        node.receives.append(self)

    def begin_done(self):
        def done():
            self.node.alive()
            if self.node.receive_fails is not None:
                self.node.receives.remove(self)
                raise self.node.receive_fails
            self.node.receives.remove(self)
            n_pages = -(-len(self.tokens) // BLOCK) + 2
            self.lease = Lease(self.node, self.tokens, 0, n_pages)
            return self.lease

        return Call(self.node, done, hangs=self.node.receives_hang)

    def begin_cancel(self):
        def cancel():
            if self in self.node.receives:
                self.node.receives.remove(self)
            return self

        return Call(self.node, cancel)


class StandInNode:
    """A daemon that has a set of prefixes."""

    def __init__(self, name="n0"):
        self.name, self.token = name, b"token"
        self.incarnation, self.session = "life", 1
        self.end, self.is_away = None, False
        self.holds = self.is_dead = self.is_full = False
        self.ended = []
        self.pending, self.receives, self.released, self.handed = [], [], [], []
        self.opens, self.opened = True, []
        self.cached, self.tier = [], []
        self.tier_ms = 1.0
        self.leases = {}
        self.last = 0
        self.receive_fails = self.epoch_fails = None
        self.receives_hang = False
        self.unaccepted, self.epochs, self.waited_s = [], [], []
        self.asked = []

    @property
    def life(self):
        return self.session, self.incarnation

    def alive(self):
        if self.is_dead:
            raise refusal(Code.UNREACHABLE)

    def share(self, tokens):
        self.cached.append(tuple(tokens[: len(tokens) // BLOCK * BLOCK]))

    def found(self, tokens, among=None):
        best = 0
        for one in self.cached if among is None else among:
            n = 0
            while n < min(len(one), len(tokens)) and one[n] == tokens[n]:
                n += 1
            best = max(best, n // BLOCK * BLOCK)
        return best

    def in_tier(self, tokens):
        return max(0, self.found(tokens, self.tier) - self.found(tokens))

    def gather(self):
        """Each call is said at once here."""

    def send_gathered(self):
        pass

    def come(self):
        """Everything that is pending has its answer now."""
        pending, self.pending = self.pending, []
        for call in pending:
            call.come()

    def pump(self):
        ended, self.ended = self.ended, []
        return ended

    def close(self):
        self.leases.clear()

    def prompt(self, tokens, *, extra_keys=None):
        self.alive()
        return SimpleNamespace(tokens=list(tokens), extra=extra_keys)

    def begin_match(self, prompt, *, namespace=""):
        self.alive()
        self.asked.append(namespace)

        def match():
            self.alive()
            tokens = getattr(prompt, "tokens", prompt)
            found = self.found(tokens)
            n_more = self.in_tier(tokens)
            return Matched(found, load=0, free=0, tier_tokens=n_more, tier_ms=self.tier_ms)

        return Call(self, match)

    def begin_lease(self, prompt, *, hold="all", namespace="", deadline_s=30.0, **more):
        self.alive()
        tokens = getattr(prompt, "tokens", prompt)
        waits = deadline_s > 0
        assert not waits or self.in_tier(tokens), "a scheduler never waits for room"
        self.asked.append(namespace)
        if waits:
            self.waited_s.append(deadline_s / 2)

        def lease():
            self.alive()
            n_more = self.in_tier(tokens)
            if waits:
                self.share(tokens[: self.found(tokens, self.tier)])
            prefix = self.found(tokens)
            n_tokens = prefix if hold == "prefix" else len(tokens)
            if hold == "all" and self.is_full:
                raise refusal(Code.DEADLINE)
            made = Lease(self, tokens, prefix, -(-n_tokens // BLOCK))
            made.tiers = LeaseTiers(n_more if waits else 0, 0 if waits else n_more, self.tier_ms)
            return made

        return Call(self, lease, lambda one: one.begin_release())

    def begin_receive(self, room, prompt, source, **how):
        self.alive()
        self.asked.append((room, source, how["request_id"]))
        return Call(self, lambda: Receive(self, prompt.tokens), lambda one: one.begin_cancel())

    def begin_send(self, room, *, lease, **how):
        self.alive()

        def send():
            self.alive()
            if not self.opens:
                raise refusal(Code.NOT_SUPPORTED)
            return Send(self, room, lease, how)

        return Call(self, send, lambda one: one.begin_abort("undone"))

    def begin_hand_over(self, room, *, lease, **how):
        self.alive()
        self.handed.append((room, lease.id, how))
        assert how["release"]
        return lease.begin_release()

    def begin_snapshot(self):
        rooms = [SimpleNamespace(part=one, state="offered") for one in self.unaccepted]
        return Call(self, lambda: SimpleNamespace(rooms=rooms))

    def begin_new_epoch(self, namespace):
        self.alive()

        def begin():
            self.alive()
            if self.epoch_fails is not None:
                raise self.epoch_fails
            self.cached.clear()
            return True

        self.epochs.append(namespace)
        return Call(self, begin)


class Request:
    """One of vLLM's: ``generate`` is what it samples."""

    def __init__(self, number, prompt, params=None, salt=None):
        self.request_id = f"r{number}"
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        self.kv_transfer_params = params
        self.cache_salt = salt
        self.num_computed_tokens = 0
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class CountedBlocks:
    """Who needs which blocks; an engine that gives away one that is needed is found here.

    ``can_be_held`` false: as of a version of vLLM that has no way to say it. ``groups``: of layers,
    each with a row of blocks; none: there is one row.
    """

    null_block = 0

    def __init__(self, rows, *, can_be_held=True, groups=()):
        self.rows, self.can_be_held, self.groups = rows, can_be_held, groups
        self.needed = Counter()
        self.unused, self.taken = set(), set()
        """Requests that blocks are loaded for, and that no step has computed of; who loses them."""

    def of(self, request_id):
        return self.rows[request_id] if self.groups else (self.rows[request_id],)

    def hold(self, blocks):
        assert self.can_be_held
        self.needed.update(blocks)

    def free(self, blocks):
        assert self.can_be_held
        self.needed.subtract(blocks)
        assert min(self.needed.values()) >= 0, "freed more often than held"
        self.needed = +self.needed

    def take_back(self, request_id):
        if request_id in self.unused:
            self.taken.add(request_id)
        return request_id in self.unused

    def used(self, request_id):
        """It has gone on with them, or has none any more."""
        self.unused.discard(request_id)
        self.taken.discard(request_id)


class MiniEngine:
    """What vLLM's scheduler and its worker do with a connector, a step at a time.

    Every block that it gives a request waits for a word of the connector's if tokens are loaded:
    who is told twice, or never, is found at the end.
    """

    def __init__(self, node, chunk=64, *, ranks=1, can_be_held=True, **options):
        self.node = node
        self.chunk = chunk
        self.clock_s = 0.0
        self.connects = 0
        self.requests = {}
        self.blocks = {}
        self.counted = CountedBlocks(self.blocks, can_be_held=can_be_held)
        self.half = SchedulerHalf(
            VllmOptions(**options),
            base_namespace="model",
            block_size=BLOCK,
            connect=self.connect,
            blocks=self.counted,
            ranks=ranks,
            now_s=lambda: self.clock_s,
            start=lambda work: work(),
        )
        self.half.look_every_s = 0.0
        self.ranks = ranks
        self.waiting, self.running, self.remote, self.gone = [], [], {}, set()
        self.local = {}
        self.loads, self.saves = [], []
        self.told = {}
        self.kept = set()
        self.delays = False
        self.breaks = set()
        self.late = []

    def connect(self):
        self.connects += 1
        self.node.alive()
        return self.node

    def add(self, request, local=0):
        self.requests[request.request_id] = request
        self.local[request.request_id] = local
        self.half.arrived(request, lora=None, extra={})
        self.waiting.append(request)
        return request

    def step(self):
        """One step; whether anything was computed."""
        scheduled = {}
        for request in list(self.waiting):
            n_tokens, is_async = self.half.matched(request, self.local[request.request_id])
            if n_tokens is None:
                continue
            assert is_async == bool(n_tokens)
            local = self.local[request.request_id]
            n_blocks = -(-request.num_tokens // BLOCK) + 200
            first = 1000 * int(request.request_id[1:])
            self.blocks[request.request_id] = list(range(first, first + n_blocks))
            self.half.given_blocks(request, n_tokens)
            self.waiting.remove(request)
            if n_tokens:
                self.remote[request.request_id] = local + n_tokens
            else:
                request.num_computed_tokens = local
                self.running.append(request)
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            scheduled[request.request_id] = min(left, self.chunk)
        orders = self.half.step(scheduled)
        self.work(orders)
        for one, n in scheduled.items():
            self.requests[one].num_computed_tokens += n
        return bool(scheduled)

    def work(self, orders):
        """The worker's half, and what vLLM makes of its word."""
        loaded, failed = set(orders.failed), set(orders.failed)
        for one in orders.freed:
            self.kept.remove(one)
        self.loads += orders.loads
        self.saves += orders.saves
        for copy in orders.loads:
            assert [len(copy.pages)] == [len(row) for row in copy.blocks]
            loaded.add(copy.request)
            if copy.request in self.breaks:
                failed.add(copy.request)
        for copy in orders.saves:
            assert [len(copy.pages)] == [len(row) for row in copy.blocks]
        report = StepReport(number=orders.number)
        for copy in [*orders.loads, *orders.saves]:
            is_broken = copy.request in self.breaks
            (report.failed if is_broken else report.done)[copy.number] = self.ranks
        for one in loaded:
            self.told[one] = self.told.get(one, 0) + 1
            upto = self.remote.pop(one, None)
            assert upto is not None, f"{one} does not wait for a load"
            if one in self.gone:
                continue
            request = self.requests[one]
            if one in failed:
                self.waiting.append(request)
                continue
            # A full hit computes its last token again.
            request.num_computed_tokens = min(upto, request.num_tokens - 1)
            self.half.given_blocks(request, 0)
            self.running.append(request)
        self.late.append(report)
        while self.late and not (self.delays and len(self.late) == 1):
            self.half.reported(self.late.pop(0))

    def generate(self, request, n_tokens):
        """It samples so many, one a step."""
        for k in range(n_tokens):
            request.all_token_ids.append(9000 + k)
            self.step()

    def preempt(self, request):
        self.running.remove(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def finish(self, request):
        """It is done, or aborted, wherever it is."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.gone.add(request.request_id)
        is_kept, told = self.half.finished(request)
        if is_kept:
            self.kept.add(request.request_id)
        return told

    def settle(self):
        """Nothing is under way any more."""
        self.node.holds = False
        self.node.come()
        self.delays = False
        for _ in range(6):
            self.step()
            self.clock_s += 2.0
            self.node.come()
        assert not self.counted.needed, "blocks are held for ever"
        assert not self.kept, "blocks are kept for ever"
