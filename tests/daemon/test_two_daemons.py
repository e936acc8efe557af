"""Two real daemons and NIXL between them: what arrives is, byte for byte, what was written."""

from __future__ import annotations

import asyncio
import http.client
import json

import numpy as np
import pytest
import pytest_asyncio

import kvd.client
from kvd.client import HandoffError
from kvd.wire import admin
from tests.daemon.conftest import Engines, settle, until
from tests.daemon.kv import PAGE, PAGE_BYTES, SHAPE, digest, tokens_of, write
from tests.support.daemons import two_daemons


class Delivery:
    """A handoff that was delivered; the leases of both sides are still held."""

    def __init__(self, source, lease, destination, receive, outcome):
        self.source, self.lease = source, lease
        self.destination, self.receive = destination, receive
        self.outcome = outcome

    @property
    def is_exact(self):
        """Whether both sides hold the same bytes for the whole prompt."""
        here = digest(self.source, self.lease.pages)
        return here == digest(self.destination, self.receive.lease.pages)

    async def end(self):
        await self.receive.lease.release()
        await self.lease.release(())


async def hand_over(source, destination, room, tokens, *, name="p", aux=b"aux", cache=True):
    """One handoff, engine to engine: written as a whole, finished at once."""
    lease = await source.lease(tokens, cache=cache)
    write(source, lease, tokens)
    receive = await destination.receive(room, tokens, name, cache=cache)
    send = await source.send(room, tokens, lease=lease)
    outcome = await send.finish(aux)
    await receive.done()
    assert outcome.committed
    assert receive.aux == aux
    return Delivery(source, lease, destination, receive, outcome)


def tree_tokens(daemon):
    """Tokens of every node of the radix tree, in display order."""
    tree = daemon.ask(admin.ShowTree(1), admin.Tree)
    return [(node.start_tokens, node.end_tokens) for node in tree.nodes]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def layered_pair(tmp_path_factory):
    """Two daemons that lay their pools out layer first."""
    settings = {**SHAPE, "pool.order": "layer_first"}
    with two_daemons(tmp_path_factory.mktemp("lf"), settings) as both:
        yield both


async def test_cold_prompt_arrives_byte_for_byte(engines: Engines):
    """scenario A1: 100 tokens are 7 pages, the last one partial."""
    tokens = tokens_of(100, seed=1)

    found = await hand_over(engines.p, engines.d, engines.room(), tokens)

    assert found.is_exact
    assert (found.receive.prefix_len, len(found.receive.lease.pages)) == (0, 7)
    assert (found.outcome.decode_prefix_len, found.outcome.sent_pages) == (0, 7)
    assert found.outcome.sent_bytes == 7 * PAGE_BYTES
    await found.end()
    assert tree_tokens(engines.pair.decode) == [(0, 96)]


async def test_cached_prefix_is_not_sent(engines: Engines):
    """scenario A2: 64 of 100 tokens are cached on the decode side, 3 pages travel."""
    tokens = tokens_of(100, seed=2)
    await (await hand_over(engines.p, engines.d, engines.room(), tokens[:64])).end()

    found = await hand_over(engines.p, engines.d, engines.room(), tokens)

    assert found.is_exact
    assert found.receive.prefix_len == 64
    assert (found.outcome.decode_prefix_len, found.outcome.sent_pages) == (64, 3)
    await found.end()


@pytest.mark.parametrize(
    ("prompt", "sent_pages"),
    [pytest.param(96, 0, id="all-cached"), pytest.param(97, 1, id="one-token-more")],
)
async def test_full_hit_delivers_the_aux_and_sends_only_what_lacks(
    engines: Engines, prompt, sent_pages
):
    """A full hit moves no page and is a handoff all the same.

    Covers scenario A4, scenario A5, scenario B3.
    """
    tokens = tokens_of(97, seed=3)
    await (await hand_over(engines.p, engines.d, engines.room(), tokens[:96])).end()

    found = await hand_over(engines.p, engines.d, engines.room(), tokens[:prompt], aux=b"token 7")

    assert found.is_exact
    assert (found.outcome.decode_prefix_len, found.outcome.sent_pages) == (96, sent_pages)
    assert found.outcome.sent_bytes == sent_pages * PAGE_BYTES
    await found.end()


async def test_a_prompt_handed_over_in_one_message_arrives_byte_for_byte(engines: Engines):
    """Its lease ends with it; the cold prompt streams, and then the same one is a full hit."""
    tokens = tokens_of(96, seed=31)
    for sent_pages in (6, 0):
        lease, room = await engines.p.lease(tokens), engines.room()
        write(engines.p, lease, tokens)
        written = digest(engines.p, lease.pages)
        handing = asyncio.ensure_future(
            engines.p.hand_over(room, lease=lease, aux=b"token 7", release=True)
        )
        receive = await engines.d.receive(room, tokens, "p")
        await receive.done()
        outcome = await handing

        assert (outcome.committed, outcome.sent_pages) == (True, sent_pages)
        assert receive.aux == b"token 7"
        assert digest(engines.d, receive.lease.pages) == written
        assert lease.is_released
        await receive.lease.release(())
        assert tree_tokens(engines.pair.prefill) == [(0, 96)]


async def test_prompt_shorter_than_a_page_is_sent_and_not_cached(engines: Engines):
    """scenario A10."""
    found = await hand_over(engines.p, engines.d, engines.room(), tokens_of(10, seed=4))

    assert found.is_exact
    assert found.outcome.sent_pages == 1
    await found.end()
    assert tree_tokens(engines.pair.decode) == []


async def test_equal_tokens_of_another_namespace_are_not_shared(engines: Engines):
    """scenario A9."""
    tokens = tokens_of(64, seed=5)
    await (await hand_over(engines.p, engines.d, engines.room(), tokens)).end()
    room = engines.room()

    lease = await engines.p.lease(tokens, namespace="lora-7")
    receive = await engines.d.receive(room, tokens, "p", namespace="lora-7")
    send = await engines.p.send(room, tokens, lease=lease, namespace="lora-7")
    outcome = await send.finish()
    await receive.done()

    assert (lease.prefix_len, receive.prefix_len, outcome.sent_pages) == (0, 0, 4)


async def test_chunks_are_sent_as_they_are_written(engines: Engines):
    """scenario B1: chunks of 40 of 100 tokens; one is announced before the offer has come."""
    p, d, pair = engines.p, engines.d, engines.pair
    tokens, room = tokens_of(100, seed=6), engines.room()
    lease = await p.lease(tokens)
    send = await p.send(room, tokens, lease=lease)
    write(p, lease, tokens, upto=40)
    await send.advance(40)
    receive = await d.receive(room, tokens, "p")
    await send.accepted()

    def posted():
        return [one.posted_pages for one in pair.prefill.snapshot().rooms if one.room == room]

    first = posted()
    write(p, lease, tokens, upto=80)
    await send.advance(80)
    second = posted()
    write(p, lease, tokens)
    outcome = await send.finish(b"end")
    await receive.done()

    assert (first, second, outcome.sent_pages) == ([2], [5], 7)
    assert send.decode_prefix_len == 0
    assert digest(p, lease.pages) == digest(d, receive.lease.pages)


async def test_rooms_in_both_directions_do_not_mix(engines: Engines):
    """scenario G21: eight handoffs at once, four each way, each with its own bytes."""
    p, d = engines.p, engines.d
    ways = [(p, d, "p"), (d, p, "d")] * 4

    found = await asyncio.gather(
        *(
            hand_over(source, destination, engines.room(), tokens_of(300, 10 + n), name=name)
            for n, (source, destination, name) in enumerate(ways)
        )
    )

    assert [one.is_exact for one in found] == [True] * 8
    assert [one.outcome.sent_pages for one in found] == [19] * 8


async def test_layer_first_pools_hand_over_the_same_bytes(layered_pair):
    async with (
        kvd.client.connect(layered_pair.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(layered_pair.decode.client, name="decode-engine") as d,
    ):
        tokens = tokens_of(500, seed=30)
        first = await hand_over(p, d, 1, tokens[:100])
        second = await hand_over(p, d, 2, tokens)
        assert (first.is_exact, second.is_exact) == (True, True)
        assert (second.outcome.decode_prefix_len, second.outcome.sent_pages) == (96, 26)
    settle(layered_pair)


async def test_scattered_pages_arrive_in_order(engines: Engines):
    """Neither side's pages are neighbours: every second page of both pools is taken."""
    p, d = engines.p, engines.d
    for node in (p, d):
        singles = [await node.lease(tokens_of(PAGE, 100 + n), cache=False) for n in range(80)]
        for lease in singles[::2]:
            await lease.release()

    found = await hand_over(p, d, engines.room(), tokens_of(600, seed=31))

    assert np.count_nonzero(np.diff(found.lease.pages) == 1) == 0
    assert found.is_exact


async def test_uncached_handoff_leaves_no_trace_in_the_trees(engines: Engines):
    """scenario A37."""
    found = await hand_over(engines.p, engines.d, engines.room(), tokens_of(100, 32), cache=False)
    assert found.is_exact
    await found.end()

    assert tree_tokens(engines.pair.decode) == tree_tokens(engines.pair.prefill) == []


async def test_two_equal_prompts_at_once_are_cached_once(engines: Engines):
    """scenario A22: both are sent, the second commit swaps its duplicates for the tree's pages."""
    p, d = engines.p, engines.d
    tokens, rooms = tokens_of(100, seed=33), (engines.room(), engines.room())
    lease = await p.lease(tokens)
    write(p, lease, tokens)
    receives = [await d.receive(room, tokens, "p") for room in rooms]
    sends = [await p.send(room, tokens, lease=lease) for room in rooms]

    outcomes = await asyncio.gather(*(send.finish() for send in sends))
    for receive in receives:
        await receive.done()

    one, two = (receive.lease.pages.tolist() for receive in receives)
    assert [outcome.sent_pages for outcome in outcomes] == [7, 7]
    assert one[:6] == two[:6]
    assert one[6] != two[6]
    assert digest(p, lease.pages) == digest(d, one) == digest(d, two)


async def test_match_tells_what_is_cached_and_changes_nothing(engines: Engines):
    tokens = tokens_of(100, seed=34)
    await (await hand_over(engines.p, engines.d, engines.room(), tokens)).end()

    found = await engines.d.match(tokens)

    assert (found.tokens, found.load, found.free) == (96, 0, 256)
    assert (await engines.d.match(tokens_of(100, seed=35))).tokens == 0


async def test_room_aborted_by_an_operator_is_told_to_both_engines(engines: Engines):
    """scenario B11: the pages are free again, the cached prefix stays."""
    p, d, pair = engines.p, engines.d, engines.pair
    tokens, room = tokens_of(100, seed=36), engines.room()
    await (await hand_over(p, d, engines.room(), tokens[:64])).end()
    lease = await p.lease(tokens)
    receive = await d.receive(room, tokens, "p")
    send = await p.send(room, tokens, lease=lease)
    await send.accepted()

    said = pair.decode.ask(admin.AbortRoom(1, room, "a drill"), admin.Report)
    with pytest.raises(HandoffError) as at_decode:
        await receive.done()
    outcome = await send.finish()

    assert (said.changed["receives"], said.changed["sends"]) == (1, 0)
    assert (at_decode.value.code, outcome.committed) == ("aborted", False)
    assert outcome.reason is not None
    assert "a drill" in str(at_decode.value)
    assert (await d.match(tokens)).tokens == 64


async def test_unknown_source_is_refused_with_the_known_ones(engines: Engines):
    with pytest.raises(kvd.client.KvdError) as refused:
        await engines.d.receive(engines.room(), tokens_of(32, 37), "p-7")

    assert refused.value.code == "peer-unknown"
    assert "(known: p)" in str(refused.value)


async def test_handoffs_go_on_after_a_fence(engines: Engines):
    """Design, Fence: a restarted transfer process is a new generation, and everything works."""
    p, d, pair = engines.p, engines.d, engines.pair
    before = pair.decode.snapshot().generation
    process = pair.decode.transfer_pid()

    pair.decode.ask(admin.Fence(1), admin.Report)
    until(lambda: pair.decode.snapshot().generation == before + 1)
    found = await hand_over(p, d, engines.room(), tokens_of(100, seed=38))

    assert found.is_exact
    assert pair.decode.transfer_pid() != process


async def test_operators_see_who_holds_what_and_why(engines: Engines):
    p, d, pair = engines.p, engines.d, engines.pair
    tokens, room = tokens_of(100, seed=39), engines.room()
    found = await hand_over(p, d, room, tokens)
    page, lease = int(found.receive.lease.pages[-1]), found.receive.lease.id

    status = pair.decode.snapshot()
    sentences = {
        kind: pair.decode.ask(admin.Why(1, kind, number), admin.Because).sentence
        for kind, number in (("page", page), ("lease", lease), ("room", room))
    }
    tree = pair.decode.ask(admin.ShowTree(1), admin.Tree)

    [held] = status.leases
    assert (held.owner, held.room, held.prompt_tokens, held.held_pages) == (
        "decode-engine",
        room,
        100,
        1,
    )
    assert f"held by lease {lease} of decode-engine" in sentences["page"]
    assert all("decode-engine" in sentences[kind] for kind in ("page", "lease"))
    assert "ready" in sentences["room"]
    assert [(one.lock_ref, one.pages) for one in tree.nodes] == [(1, 6)]
    because = pair.decode.ask(admin.Why(1, "node", tree.nodes[0].id), admin.Because)
    [locked] = because.marks
    assert locked.what == f"+1 lease {lease} of decode-engine (receive from p), committed"
    assert 0.0 <= locked.ago_s < 60.0


async def test_operators_of_either_daemon_hear_of_the_other_end(engines: Engines):
    p, d, pair = engines.p, engines.d, engines.pair
    tokens, room = tokens_of(100, seed=52), engines.room()
    lease = await p.lease(tokens)
    receive = await d.receive(room, tokens, "p")
    send = await p.send(room, tokens, lease=lease)
    await send.accepted()

    there, here = (
        daemon.ask(admin.AskOtherEnd(1, room), admin.OtherEnds).ends
        for daemon in (pair.decode, pair.prefill)
    )
    await send.abort("enough")
    with pytest.raises(HandoffError):
        await receive.done()

    assert [(one.peer, one.side, one.state, one.why_none) for one in (*there, *here)] == [
        ("p", "prefill", "streaming", ""),
        ("d", "decode", "receiving", ""),
    ]
    assert all(0 < one.round_trip_s < 1 and one.marks for one in (*there, *here))


async def test_flush_skips_what_is_locked_and_strict_flush_changes_nothing(engines: Engines):
    """scenario A37, scenario A40."""
    p, d, decode = engines.p, engines.d, engines.pair.decode
    await (await hand_over(p, d, engines.room(), tokens_of(64, seed=40))).end()
    held = await hand_over(p, d, engines.room(), tokens_of(96, seed=41))

    strict = decode.ask(admin.Flush(1, "strict"), admin.Report)
    loose = decode.ask(admin.Flush(1), admin.Report)

    assert strict.changed == {"freed_pages": 0}
    assert loose.changed == {"freed_pages": 4, "locked_pages": 6}
    assert "of decode-engine" in strict.refused[0]
    assert tree_tokens(decode) == [(0, 96)]
    await held.end()


async def test_evict_frees_the_oldest_first(engines: Engines):
    p, d, decode = engines.p, engines.d, engines.pair.decode
    old, new = tokens_of(64, seed=42), tokens_of(64, seed=43)
    for tokens in (old, new):
        await (await hand_over(p, d, engines.room(), tokens)).end()

    said = decode.ask(admin.Evict(1, 4), admin.Report)

    assert said.changed == {"evicted_pages": 4}
    assert ((await d.match(old)).tokens, (await d.match(new)).tokens) == (0, 64)


async def test_events_tell_the_story_without_a_gap(engines: Engines):
    """Invariant I8."""
    decode = engines.pair.decode
    last = decode.snapshot().last_event
    room = engines.room()
    await (await hand_over(engines.p, engines.d, room, tokens_of(100, seed=44))).end()

    page = decode.ask(admin.ListEvents(1, last), admin.EventPage)
    steps = [one.after for one in page.events if type(one).__name__ == "Moved" and one.room == room]

    assert [one.seq for one in page.events] == list(range(last + 1, last + 1 + len(page.events)))
    assert page.lost == 0
    assert steps == ["offered", "receiving", "verifying", "ready", "closed"]


async def test_http_pages_answer(engines: Engines):
    await (await hand_over(engines.p, engines.d, engines.room(), tokens_of(64, seed=45))).end()
    daemon = engines.pair.decode

    def get(page):
        link = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)
        link.request("GET", page)
        answer = link.getresponse()
        body = answer.read().decode()
        link.close()
        return answer.status, body

    assert get("/livez") == (200, "alive\n")
    assert get("/healthz") == (200, "alive\n")
    assert get("/readyz") == (200, "ready\n")
    assert get("/nowhere")[0] == 404
    info, status = json.loads(get("/info")[1]), json.loads(get("/status")[1])
    assert (info["node"], info["pool"]["pages"]) == ("d", [257])
    assert (status["node"], status["pools"][0]["cached_pages"]) == ("d", 4)
    counters = dict(
        line.rsplit(" ", 1) for line in get("/metrics")[1].splitlines() if line[:1] != "#"
    )
    assert float(counters['kvd_handoff_bytes_total{dir="received"}']) >= 4 * PAGE_BYTES
    assert float(counters["kvd_ledger_violations_total"]) == 0
