"""What is left of the verbs without a tree, and without a byte."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import (
    Component,
    Mha,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.core.settings import CacheMode
from kvd.errors import Code
from kvd.types import NO_TOKENS, Tokens, count
from kvd.wire import client
from tests.core.engines import PROMPT, PageTotals, Sender, cached, totals
from tests.core.world import Side, World


def prefill_only(pages: int = 64) -> World:
    """Two nodes that count pages of 16 tokens, each of 2 layers of 4 heads."""
    kv = Component("kv", 2, Mha(4, 8, 8, "bfloat16"), 16, tier=Nowhere())
    spec = PoolSpec("main", "prefill-only", PageOrder.PAGE_FIRST, (kv,), (pages,))
    return World(spec=spec, cache_mode=CacheMode.PREFILL_ONLY)


def refused(side: Side, kind: type[client.Request], toks: Tokens = NO_TOKENS, **fields: object):
    reply = side.call(kind, toks, **fields)
    assert isinstance(reply, client.Failed), reply
    return reply.refusal


REFUSED = [
    (client.CommitLease, PROMPT, {"lease": 1}, "commit"),
    (client.CommitAndRelease, NO_TOKENS, {"lease": 1}, "commit-release"),
    (client.SayWritten, NO_TOKENS, {"lease": 1, "upto_tokens": 16}, "written"),
    (client.CommitUpTo, PROMPT, {"lease": 1, "upto_tokens": 16}, "commit-upto"),
    (client.CommitAndExtend, PROMPT, {"lease": 1, "extend_tokens": 16}, "commit-extend"),
    (client.ReleaseUpTo, NO_TOKENS, {"lease": 1, "upto_tokens": 16}, "release-upto"),
    (client.ReceiveRequest, PROMPT, {"room": 7, "source": ("p",)}, "receive"),
    (client.CancelReceive, NO_TOKENS, {"receive": 1}, "cancel"),
    (client.SendRequest, PROMPT, {"room": 7, "lease": 1}, "send"),
    (client.Advance, NO_TOKENS, {"send": 1, "upto_tokens": 16}, "advance"),
    (client.Finish, NO_TOKENS, {"send": 1, "aux": b""}, "finish"),
    (client.AbortSend, NO_TOKENS, {"send": 1, "reason": "x"}, "abort"),
    (client.MatchPrefix, PROMPT, {}, "match"),
    (client.RetractLease, NO_TOKENS, {"lease": 1, "keep": "host"}, "retract"),
    (client.ResumeLease, NO_TOKENS, {"lease": 1, "deadline_s": 1.0}, "resume"),
]


@pytest.mark.parametrize(("kind", "toks", "fields", "verb"), REFUSED)
def test_whatever_needs_kv_is_refused_where_there_is_none(kind, toks, fields, verb):
    """scenario D13"""
    world = prefill_only()
    world.d.lease(PROMPT)
    before = totals(world.d)

    refusal = refused(world.d, kind, toks, **fields)

    assert refusal.code is Code.NOT_SUPPORTED
    assert refusal.message == (
        f'{verb} needs KV, and pool main of d has none: cache.mode is "prefill-only" there, which '
        'counts tokens and takes no byte; set cache.mode = "radix"'
    )
    assert totals(world.d) == before


def test_leases_count_tokens_where_there_is_no_byte():
    """scenario D1"""
    world = prefill_only()

    lease = world.d.lease(PROMPT, reserve_tokens=12)
    assert (lease.prefix_tokens, count(lease.pages)) == (0, 7)
    assert totals(world.d) == PageTotals(free=56, held=7)
    row = world.d.call(client.ExtendLease, lease=lease.lease, n_tokens=10)
    assert isinstance(row, client.PageTable)
    assert totals(world.d) == PageTotals(free=55, held=8)
    assert isinstance(world.d.call(client.ReleaseLease, lease=lease.lease), client.Done)
    assert totals(world.d) == PageTotals(free=63)
    assert world.d.lease(PROMPT).prefix_tokens == 0


def test_tokens_beyond_the_count_wait_as_they_would_for_memory():
    world = prefill_only(pages=8)
    world.d.lease(PROMPT)

    assert world.d.call(client.OpenLease, PROMPT, deadline_s=1.0) is None
    refusal = refused(world.d, client.ExtendLease, lease=1, n_tokens=100)
    assert refusal.code is Code.NO_ROOM


def test_the_accounts_say_no_byte_and_a_placeholder_that_does_not_grow():
    for pages in (64, 6400):
        (pool,) = snapshot(prefill_only(pages).d.node).pools

        assert (pool.total_pages, pool.page_bytes, pool.placeholder_bytes) == (
            pages,
            0,
            2 * 16 * 4 * (8 + 8) * 2,
        )
    (pool,) = snapshot(World().d.node).pools
    assert (pool.page_bytes, pool.placeholder_bytes) == (128, 0)


def test_nodes_with_bytes_and_without_do_not_take_each_other_for_peers():
    kv = Component("kv", 1, Mha(1, 1, 1, "float32"), 16, tier=Nowhere())
    world = World()
    spec = PoolSpec("main", "prefill-only", PageOrder.PAGE_FIRST, (kv,), (64,))
    world.p.config = msgspec.structs.replace(world.p.config, spec=spec)
    world.restart(world.p)
    world.pass_time(3.0)

    refusal = refused(world.d, client.ReceiveRequest, PROMPT, room=7, source=("p",))

    why = 'p has no KV to exchange: cache.mode is "prefill-only" there; set cache.mode = "radix"'
    assert (refusal.code, refusal.message) == (Code.LAYOUT_MISMATCH, why)
    assert [one.layout for one in snapshot(world.p.node).peers] == [why]


# ---- off -----------------------------------------------------------------------------------------


def test_nothing_is_cached_or_matched_with_the_cache_off():
    world = World(cache_mode=CacheMode.OFF)
    cached(world.d, PROMPT)

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.lease(PROMPT).prefix_tokens == 0
    matched = world.d.call(client.MatchPrefix, PROMPT)
    assert isinstance(matched, client.MatchReply)
    assert matched.tokens == 0


def test_a_handoff_works_with_the_cache_off_on_both_sides():
    world = World(cache_mode=CacheMode.OFF)
    for room in (7, 8):
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
        sender = Sender(world, PROMPT, room=room)
        finished = sender.finish()
        assert isinstance(finished, client.Finished)
        assert finished.failure is None
        (received,) = [one for one in world.d.take() if isinstance(one, client.Received)]
        assert world.d.holds(received.pages, PROMPT)
        now = totals(world.d)
        assert (now.cached, now.quarantined, now.evictable) == (0, 0, 0)


def test_a_retracted_lease_comes_back_whole_with_the_cache_off():
    world = World(cache_mode=CacheMode.OFF)
    lease = world.d.lease(PROMPT)
    world.d.write(lease.pages, PROMPT)
    retracted = world.d.call(client.RetractLease, lease=lease.lease, keep="host")
    assert isinstance(retracted, client.Retracted)

    resumed = world.d.call(client.ResumeLease, lease=lease.lease, deadline_s=1.0)

    assert isinstance(resumed, client.Resumed)
    assert world.d.holds(resumed.pages, PROMPT)
    assert totals(world.d).cached == 0


KV = Component("kv", 1, Mha(1, 1, 1, "float32"), 16)
STATE = State((StateTensor("ssm", (2, 2), "float32"),))


@pytest.mark.parametrize(
    "beside",
    [
        Component("swa", 1, Mha(1, 1, 1, "float32"), 16, Tail(32)),
        Component("state", 1, STATE, 1, PerRequest()),
    ],
    ids=["swa", "recurrent"],
)
def test_no_component_is_cached_with_the_cache_off(beside):
    spec = PoolSpec("main", "any", PageOrder.PAGE_FIRST, (KV, beside), (64, 40))
    world = World(spec=spec, cache_mode=CacheMode.OFF)
    cached(world.d, PROMPT)

    states = snapshot(world.d.node).pools

    assert [(one.component, one.cached_pages, one.free_pages) for one in states] == [
        ("kv", 0, 63),
        (beside.name, 0, 39),
    ]
    assert world.d.lease(PROMPT).prefix_tokens == 0
