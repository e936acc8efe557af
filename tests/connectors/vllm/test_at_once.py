"""A prompt that is sent while it is computed: two engines, two daemons, and what ends it."""

from __future__ import annotations

import secrets
import time

import pytest

from kvd.connectors.vllm.arrivals import CUT_SHORT
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.test_daemons import BLOCK, MINE, POOL, PlainEngine, leases_of
from tests.support.daemons import two_daemons

CHUNK = 3 * BLOCK
PROMPT = list(range(1000, 1200))
"""Three chunks, and a part of a page."""


PART_BYTES = 64 * 1024
"""Of a page and a layer: three pages are worth a word while the rest is computed."""

COMES_S = 20.0
"""Within which comes what has to; nothing that is told here takes as long by itself."""


def idle(engine, for_s=0.3):
    """It has opened and joined its session by then."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        engine.step()
        time.sleep(0.01)


class AtOnce:
    """A router that has told both engines of a room."""

    def __init__(self, pair, **more):
        self.pair = pair
        self.prefill = PlainEngine(pair.prefill, **more)
        self.decode = PlainEngine(pair.decode, **more)
        for layer in self.decode.layers.values():
            layer.array[:] = 0
        idle(self.decode)
        idle(self.prefill)
        self.room = str(1 + secrets.randbelow(2**62))
        self.number = 0
        self.prompt = PROMPT

    def asks_to_decode(self, **told):
        self.number += 1
        params = {"kvd": {"v": 1, "peer": "p", "room": self.room, "soon": True} | told}
        request = Request(self.number, self.prompt, params)
        self.decode.half.arrived(request, lora=None, extra={})
        return request

    def asks_to_prefill(self):
        self.number += 1
        params = {"do_remote_decode": True, "kvd": {"v": 1, "opens": self.room}}
        request = Request(self.number, self.prompt, params)
        self.prefill.half.arrived(request, lora=None, extra={})
        self.prefill.matched(request)
        self.prefill.half.given_blocks(request, 0)
        return request

    def begins(self):
        """Both are asked, and the first chunk is computed."""
        request, computed = self.asks_to_decode(), self.asks_to_prefill()
        self.compute(computed, upto=CHUNK)
        return request, computed

    def compute(self, request, *, upto=None):
        """Step by step, the decode engine stepping beside it."""
        upto = len(self.prompt) if upto is None else upto
        while request.num_computed_tokens < upto:
            n_tokens = min(CHUNK, upto - request.num_computed_tokens)
            orders = self.prefill.half.step({request.request_id: n_tokens})
            self.prefill.worker.load(orders)
            self.prefill.worker.save(orders)
            request.num_computed_tokens += n_tokens
            self.look(0.1)

    def look(self, for_s):
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            self.prefill.step()
            self.decode.step()
            time.sleep(0.005)

    def moved(self, more_than=-1, within_s=COMES_S):
        """Bytes that are there by the word of the decode daemon, once they are so many."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            found = sum(room.moved_bytes for room in self.pair.decode.snapshot().rooms)
            if found > more_than:
                return found
            self.look(0.02)
        raise AssertionError(f"no more than {found} bytes have come")

    def waits(self, request):
        return self.decode.half.matched(request, 0)[0] is None

    def gets(self, request):
        """How much of it is found."""
        end_s = time.monotonic() + COMES_S
        while time.monotonic() < end_s:
            found, _ = self.decode.half.matched(request, 0)
            if found is not None:
                return found
            self.look(0.005)
        raise AssertionError("it waits for ever")

    def load(self, request, found):
        self.decode.half.given_blocks(request, found)
        self.decode.until(lambda: request.request_id in self.decode.loaded)

    def ends(self, request):
        """It is computed where it was to be decoded, and nothing is left of it anywhere."""
        assert self.gets(request) == 0
        self.decode.compute(request)
        self.decode.half.finished(request)
        self.is_over(self.decode, self.pair.decode)

    def is_over(self, engine, daemon):
        """Nothing is held or moved there any more."""
        engine.until(lambda: not (leases_of(daemon) or daemon.snapshot().rooms))

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def pair(tmp_path):
    with two_daemons(tmp_path, POOL) as daemons:
        made = AtOnce(daemons)
        yield made
        made.close()


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_pages_travel_while_the_rest_is_computed(pair, first):
    if first == "decode":
        request = pair.asks_to_decode()
        assert pair.waits(request)
        pair.look(0.1)
        computed = pair.asks_to_prefill()
    else:
        computed = pair.asks_to_prefill()
        pair.compute(computed, upto=CHUNK)
        request = pair.asks_to_decode()
        pair.look(0.1)
    moved = 0
    for upto in (CHUNK, 2 * CHUNK):
        pair.compute(computed, upto=upto)
        moved = pair.moved(more_than=moved)
        assert pair.waits(request)
    pair.compute(computed)
    _, told = pair.prefill.half.finished(computed)
    assert told["kvd"]["room"] == pair.room
    assert told["kvd"]["open"] is True
    found = pair.gets(request)
    assert found == len(PROMPT) - 1
    pair.load(request, found)
    n_blocks = -(-len(PROMPT) // BLOCK)
    for layer in pair.decode.layers.values():
        assert (layer.array[: n_blocks - 1] == MINE).all()
    pair.decode.half.finished(request)
    pair.is_over(pair.decode, pair.pair.decode)
    pair.is_over(pair.prefill, pair.pair.prefill)


def test_routers_that_ask_in_turn_are_told_of_a_room_that_is_open(pair):
    computed = pair.asks_to_prefill()
    pair.compute(computed)
    _, told = pair.prefill.half.finished(computed)
    request = pair.asks_to_decode(**told["kvd"], soon=False)
    assert pair.gets(request) == len(PROMPT) - 1
    pair.decode.half.finished(request)


def test_another_prompt_in_the_same_room_is_computed(pair):
    computed = pair.asks_to_prefill()
    pair.compute(computed, upto=CHUNK)
    pair.prompt = [7, *PROMPT[1:]]
    request = pair.asks_to_decode()
    pair.ends(request)
    pair.prefill.half.finished(computed, is_heard=False)


def test_an_aborted_prefill_is_waited_for_no_longer(pair):
    request, computed = pair.begins()
    assert pair.prefill.half.finished(computed, is_heard=False)[1] is None
    pair.ends(request)
    pair.is_over(pair.prefill, pair.pair.prefill)


def test_a_prefill_engine_that_ends_is_waited_for_no_longer(pair):
    request, _ = pair.begins()
    pair.prefill.half.close()
    pair.prefill.worker.close()
    assert pair.gets(request) == 0
    pair.decode.half.finished(request)


def test_a_prefill_daemon_that_ends_is_waited_for_no_longer(pair):
    request, _ = pair.begins()
    pair.pair.prefill.kill()
    pair.pair.prefill.start()
    pair.pair.prefill.wait_ready()
    assert pair.gets(request) == 0
    pair.decode.half.finished(request)


def test_who_decodes_and_never_comes_holds_nothing_for_long(tmp_path):
    with two_daemons(tmp_path, POOL) as daemons:
        pair = AtOnce(daemons)
        pair.prefill.close()
        pair.prefill = PlainEngine(daemons.prefill, keep_s=2.0)
        idle(pair.prefill)
        computed = pair.asks_to_prefill()
        pair.compute(computed)
        pair.prefill.half.finished(computed)
        pair.look(0.2)
        assert leases_of(daemons.prefill) != []
        pair.is_over(pair.prefill, daemons.prefill)
        pair.close()


def test_who_waits_for_a_prefill_that_never_comes_gives_up_in_time(tmp_path):
    with two_daemons(tmp_path, POOL) as daemons:
        pair = AtOnce(daemons)
        pair.decode.close()
        pair.decode = PlainEngine(daemons.decode, deadline_s=2.0)
        idle(pair.decode)
        request = pair.asks_to_decode()
        pair.look(0.5)
        assert pair.waits(request)
        assert pair.gets(request) == 0
        pair.decode.half.finished(request)
        pair.is_over(pair.decode, daemons.decode)
        pair.close()


def test_who_decodes_and_hangs_up_leaves_the_room_to_the_next(pair):
    request, computed = pair.begins()
    pair.decode.half.finished(request)
    pair.look(0.2)
    again = pair.asks_to_decode()
    pair.compute(computed)
    pair.prefill.half.finished(computed)
    assert pair.gets(again) == len(PROMPT) - 1
    pair.decode.half.finished(again)


# ---- in parts ------------------------------------------------------------------------------------


class InParts(AtOnce):
    """Pages are so large that the decode engine is told of each chunk."""

    def __init__(self, pair):
        super().__init__(pair, page_bytes=PART_BYTES)

    def begins(self):
        """The first chunk is in the blocks of the decode engine, and the rest is not computed."""
        request, computed = super().begins()
        assert self.gets(request) == len(PROMPT) - 1
        self.decode.half.given_blocks(request, len(PROMPT) - 1)
        self.until(lambda: self.is_filled(CHUNK))
        assert request.request_id not in self.decode.loaded
        return request, computed

    def is_filled(self, n_tokens):
        filled = slice(n_tokens // BLOCK)
        return all((layer.array[filled] == MINE).all() for layer in self.decode.layers.values())

    def until(self, is_so):
        end_s = time.monotonic() + COMES_S
        while not is_so():
            assert time.monotonic() < end_s, f"it never is: {self.decode.alone}"
            self.look(0.02)

    def is_computed(self, request):
        """Where it was to be decoded; and nothing is left of it."""
        self.until(lambda: self.decode.alone)
        self.look(0.1)
        assert self.decode.half.counts.failed_loads == 1
        assert request.request_id not in self.decode.loaded
        self.decode.half.finished(request)
        self.decode.until(lambda: not self.decode.counted.needed)


@pytest.fixture
def parts(tmp_path):
    with two_daemons(tmp_path, POOL | {"pool.page_bytes": str(PART_BYTES)}) as daemons:
        made = InParts(daemons)
        yield made
        made.close()


def test_blocks_are_filled_while_the_rest_is_computed(parts):
    request, computed = parts.begins()
    parts.compute(computed, upto=2 * CHUNK)
    parts.until(lambda: parts.is_filled(2 * CHUNK))
    assert request.request_id not in parts.decode.loaded
    parts.compute(computed)
    parts.prefill.half.finished(computed)
    parts.decode.until(lambda: request.request_id in parts.decode.loaded)
    assert parts.is_filled(len(PROMPT) // BLOCK * BLOCK)
    assert not parts.decode.alone
    assert parts.decode.half.counts.received_tokens == len(PROMPT)
    parts.decode.half.finished(request)
    parts.is_over(parts.decode, parts.pair.decode)
    parts.is_over(parts.prefill, parts.pair.prefill)
    assert not parts.decode.counted.needed


def test_an_aborted_prefill_ends_what_was_filled_in_part(parts):
    request, computed = parts.begins()
    parts.prefill.half.finished(computed, is_heard=False)
    parts.is_computed(request)
    assert parts.decode.alone == [CUT_SHORT]
    parts.is_over(parts.decode, parts.pair.decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_daemon_that_ends_ends_what_was_filled_in_part(parts, side):
    request, _ = parts.begins()
    daemon = getattr(parts.pair, side)
    daemon.kill()
    daemon.start()
    daemon.wait_ready()
    parts.is_computed(request)


def test_an_abort_of_who_decodes_ends_what_was_filled_in_part(parts):
    request, computed = parts.begins()
    parts.decode.half.finished(request)
    parts.decode.until(lambda: not parts.decode.counted.needed)
    parts.is_over(parts.decode, parts.pair.decode)
    parts.prefill.half.finished(computed, is_heard=False)
