"""vLLM's connector: both halves of it, and blocks that have the bytes of their tokens."""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import ClassVar

import numpy as np

from kvd.client import connect_sync
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.worker import WorkerHalf
from tests.connectors.contract.cases import Step
from tests.connectors.contract.engine import NOTHING, PAGE, Aborted, PlayedEngine
from tests.connectors.contract.stage import FOREIGN
from tests.connectors.vllm.played_vllm import connector_module
from tests.connectors.vllm.stand_ins import COMES_S, WAITS, CountedBlocks, Request
from tests.connectors.vllm.test_connector import started
from tests.connectors.vllm.world import Layer

LAYERS = 2
PAGE_BYTES = 256
BLOCKS = 64
CHUNK = 5 * PAGE
TAG = "vllm 0.32 LBHNC"
GENERATED = 20


def kv_of(tokens, layer, model):
    """Of a block whose last token is the last of these: it depends on all of them."""
    digest = hashlib.blake2b(repr((layer, model, list(tokens))).encode(), digest_size=32).digest()
    return np.frombuffer(digest * (PAGE_BYTES // 32), np.uint8)


class VllmEngine(PlayedEngine):
    """One request at a time; blocks that nobody needs any more are another one's at once."""

    pool: ClassVar = {
        "pool.family": "raw",
        "pool.layers": str(LAYERS),
        "pool.page_size": str(PAGE),
        "pool.page_bytes": str(PAGE_BYTES),
        "pool.pages": "48",
        "pool.tag": TAG,
    }
    unlike: ClassVar = {
        "page size": ({"pool.page_size": "32"}, "page_size = 16 (it is 32)"),
        "dtype": ({"pool.page_bytes": str(2 * PAGE_BYTES)}, "page_bytes = 256 (it is 512)"),
        "tag": ({"pool.tag": "vllm 0.32 other"}, "(it is 'vllm 0.32 other')"),
        "layers": ({"pool.layers": "3"}, "layers = 2 (it is 3)"),
    }
    waits = dict.fromkeys(WAITS, COMES_S)
    hurries: ClassVar = {
        "kvd.connectors.vllm.sessions.RETRY_S": 0.01,
        "kvd.connectors.vllm.sessions.UNFIT_RETRY_S": 0.05,
    }

    def __init__(self, endpoint, *, model="", **options):
        self._endpoint, self._model = endpoint, model
        self._numbers = itertools.count(1)
        self.rows, self._away = {}, set()
        self.counted = CountedBlocks(self.rows)
        self.layers = {f"layer {n}": self._layer() for n in range(LAYERS)}
        told = VllmOptions(
            endpoint=endpoint, reserve_tokens=GENERATED, computes_per_s=1.0, **options
        )
        self.half = SchedulerHalf(
            told,
            base_namespace=self.namespace,
            block_size=PAGE,
            connect=self._connect,
            blocks=self.counted,
        )
        self.worker = WorkerHalf(told, block_size=PAGE)
        try:
            self.worker.register(self.layers, tag=TAG)
        except BaseException:
            self.close()
            raise
        self.loaded, self.failed = set(), set()
        self.half.watch()

    def _layer(self):
        layer = Layer()
        layer.array = np.full((BLOCKS, PAGE_BYTES), FOREIGN, np.uint8)
        layer.shape = layer.array.shape
        return layer

    def _connect(self):
        node = connect_sync(self._endpoint, name="vllm", on_unreachable="miss")
        try:
            sizes = [PAGE_BYTES] * LAYERS
            layout.check_pages(node.pool("main"), sizes, page_size=PAGE, ranks=1)
        except BaseException:
            node.close()
            raise
        return node

    # ---- a request -------------------------------------------------------------------------------

    def answer(self, tokens, happening=NOTHING):
        request = Request(next(self._numbers), tokens)
        try:
            found = self._answer(request, happening)
        except Aborted:
            found = None
            if request.request_id in self.half._requests.here:
                self.half.finished(request)
        self._give_away(request)
        return found

    def _answer(self, request, happening):
        self.half.arrived(request, lora=None, extra={})
        happening(Step.LOOKING_UP)
        found = self._begin(request, happening)
        while request.num_computed_tokens < request.num_tokens:
            self._compute(request, min(CHUNK, request.num_tokens - request.num_computed_tokens))
            happening(Step.COMPUTING)
            if happening.at is Step.PREEMPTED and not happening.has_come:
                self._preempt(request)
                happening(Step.PREEMPTED)
                self._begin(request, happening)
        for token in range(GENERATED):
            request.all_token_ids.append(token)
            self._compute(request, 1)
        happening(Step.SAVING)
        self.half.finished(request)
        happening(Step.RELEASED)
        return found

    def _begin(self, request, happening):
        """Give it blocks, and what is found of it; as often as a load fails."""
        while True:
            found = self._matched(request)
            happening(Step.HELD)
            self._give(request, found)
            self.half.given_blocks(request, found)
            request.num_computed_tokens = 0
            if not found:
                return 0
            self._step()
            happening(Step.LOADING)
            name = request.request_id
            self._until(lambda name=name: name in self.loaded)
            self.loaded.discard(name)
            if name not in self.failed:
                self._check(request.all_token_ids[:found], self.rows[name])
                request.num_computed_tokens = found
                self.half.given_blocks(request, 0)
                return found
            self.failed.discard(name)
            self._give_away(request)

    def _matched(self, request):
        end_s = time.monotonic() + COMES_S
        while (found := self.half.matched(request, 0)[0]) is None:
            assert time.monotonic() < end_s, "it is asked again for ever"
            self._step()
            time.sleep(0.001)
        return found // PAGE * PAGE

    def _compute(self, request, n_tokens):
        self._step(request, n_tokens=n_tokens)
        request.num_computed_tokens += n_tokens

    def _preempt(self, request):
        self._give_away(request)
        request.num_computed_tokens = 0
        self._step(preempted={request.request_id})

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self, *computed, n_tokens=0, preempted=()):
        orders = self.half.step({one.request_id: n_tokens for one in computed}, preempted)
        self.worker.give_back(orders)
        for request in computed:
            if n_tokens:
                self._write(request, n_tokens)
        self.worker.load(orders)
        self.worker.save(orders)
        loaded, failed = self.worker.take_results()
        self.half.reported(self.worker.take_report())
        self.loaded |= loaded
        self.failed |= failed
        assert not self.worker.take_freed(), "these blocks can be held"

    def _until(self, is_so, *computed):
        end_s = time.monotonic() + COMES_S
        while not is_so():
            assert time.monotonic() < end_s, "it never is"
            self._step(*computed)
            time.sleep(0.001)

    # ---- blocks ----------------------------------------------------------------------------------

    def _give(self, request, found):
        self._check_away()
        used = {block for row in self.rows.values() for block in row} | self.counted.needed.keys()
        free = [block for block in range(1, BLOCKS) if block not in used]
        count = (request.num_prompt_tokens + GENERATED) // PAGE + 1
        assert len(free) >= count, "blocks are lost"
        self._away -= set(free[:count])
        self.rows[request.request_id] = free[:count]
        for layer in self.layers.values():
            layer.array[free[:count]] = 0

    def _give_away(self, request):
        """To another one, who writes there at once; but what copies need."""
        row = self.rows.pop(request.request_id, [])
        away = [block for block in row if block not in self.counted.needed]
        for layer in self.layers.values():
            layer.array[away] = FOREIGN
        self._away |= set(away)

    def _check_away(self):
        for layer in self.layers.values():
            wrong = [one for one in self._away if (layer.array[one] != FOREIGN).any()]
            assert not wrong, f"blocks {wrong} were written after they were given away"

    def _check(self, tokens, row):
        for number, layer in enumerate(self.layers.values()):
            for end in range(PAGE, len(tokens) + 1, PAGE):
                kv = kv_of(tokens[:end], number, self._model)
                assert (layer.array[row[end // PAGE - 1]] == kv).all(), "KV that is not its own"

    def _write(self, request, n_tokens):
        """What is computed reads the KV of all tokens before it, and writes its own."""
        row = self.rows[request.request_id]
        first = request.num_computed_tokens
        upto = first + n_tokens
        tokens = request.all_token_ids[:upto]
        self._check(tokens[: first // PAGE * PAGE], row)
        for block in range(first // PAGE, -(-upto // PAGE)):
            for number, layer in enumerate(self.layers.values()):
                end = min(upto, (block + 1) * PAGE)
                layer.array[row[block]] = kv_of(tokens[:end], number, self._model)

    # ---- the end ---------------------------------------------------------------------------------

    def settle(self):
        self._until(lambda: not self.half.has_work and not self.counted.needed)
        self._check_away()
        assert not self.rows, "blocks are lost"
        for half in (self.half, self.worker):
            assert not half._log._bugs_until_s, "a mistake of the connector's, kept in"

    @property
    def namespace(self):
        return f"model {self._model}"

    def reset(self):
        assert self.half.flush()
        self._until(lambda: not self.half._resets.due)

    def close(self):
        self.half.close()
        self.worker.close()

    @classmethod
    def with_other_version(cls, endpoint, patch):
        with connector_module(patch, version="0.24.1") as module:
            try:
                started(module, **{"kvd.endpoint": endpoint}).shutdown()
            except module.Unfit as unfit:
                return str(unfit)
        return "it starts without a word"
