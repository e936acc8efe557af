"""Pools of more than one component: their rows, their views, and what is asked of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import kvd.client
from kvd.client import KvdError
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    Mla,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.errors import Code, Refusal
from kvd.types import pack_ids
from kvd.wire import client as wire
from tests.client.conftest import answering

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.client import Reply

    Serve = Callable[[PoolSpec], Any]

KV = Component("kv", 2, Mha(2, 8, 8, "bfloat16"), 4)
SWA = PoolSpec(
    "main",
    "swa",
    PageOrder.PAGE_FIRST,
    (KV, Component("swa", 3, Mha(2, 8, 8, "bfloat16"), 4, Tail(8))),
    (16, 8),
)
HISPARSE = PoolSpec(
    "main",
    "hisparse",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 2, Mla(16, 4, "bfloat16"), 8, tier=Host()),
        Component("index", 2, Mha(1, 4, 0, "float8_e4m3fn"), 4),
        Component("buffer", 2, Mla(16, 4, "bfloat16"), 8, Buffer(32)),
    ),
    (16, 32, 6),
)

RECURRENT = PoolSpec(
    "main",
    "recurrent",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 0, Mha(1, 1, 1, "bfloat16"), 1, tier=Nowhere()),
        Component(
            "state",
            2,
            State((StateTensor("ssm", (4, 3), "float32"), StateTensor("conv", (6,), "bfloat16"))),
            1,
            PerRequest(),
        ),
    ),
    (64, 5),
)
PREFILL_ONLY = PoolSpec(
    "main",
    "prefill-only",
    PageOrder.PAGE_FIRST,
    (Component("kv", 2, Mha(2, 8, 8, "bfloat16"), 4, tier=Nowhere()),),
    (1000,),
)


def leasing(*pages: int, beside: tuple[bytes, ...]) -> Callable[[Any], list[Reply]]:
    return lambda r: [wire.Leased(r.call, 70, 8, pack_ids(pages), beside)]


# ---- rows ----------------------------------------------------------------------------------------


async def test_a_window_row_is_replaced_whole_while_the_pages_grow(serve: Serve) -> None:
    daemon = serve(SWA)
    daemon.script = answering(
        OpenLease=leasing(4, 5, 6, beside=(pack_ids([0, 2, 3]),)),
        ExtendLease=lambda r: [wire.PageTable(r.call, 3, pack_ids([7]), (pack_ids([0, 2, 3, 1]),))],
        CommitLease=lambda r: [
            wire.PageTable(r.call, 1, pack_ids([8, 6, 7]), (pack_ids([0, 2, 3, 1]),))
        ],
        SlideLease=lambda r: [wire.PageTable(r.call, 4, b"", (pack_ids([0, 0, 3, 1]),))],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(12), step_tokens=4)
        opened = lease.pages_of("swa")
        assert opened.tolist() == [0, 2, 3]
        await lease.extend(4)
        assert (lease.pages.tolist(), lease.pages_of("swa").tolist()) == (
            [4, 5, 6, 7],
            [0, 2, 3, 1],
        )
        await lease.commit()
        await lease.slide(13)
        assert lease.pages_of("kv").tolist() == [4, 8, 6, 7]
        assert lease.pages_of("swa").tolist() == [0, 0, 3, 1]
        assert (opened.tolist(), opened.flags.writeable) == ([0, 2, 3], False)

    assert daemon.got[0] == wire.OpenLease(1, step_tokens=4)
    assert daemon.got[3] == wire.SlideLease(4, 70, 13)


async def test_a_received_lease_has_the_rows_that_came_with_it(serve: Serve) -> None:
    daemon = serve(SWA)
    daemon.script = answering(
        ReceiveRequest=lambda r: [
            wire.Receiving(r.call, 11, 4),
            wire.Received(11, 71, pack_ids([4, 5, 6]), b"", (pack_ids([0, 1, 2]),)),
        ]
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(7, range(12), "prefill-0", step_tokens=16, tier="device")
        await handoff.done()
        assert handoff.lease.pages_of("swa").tolist() == [0, 1, 2]

    assert daemon.got == [
        wire.ReceiveRequest(1, 7, ("prefill-0",), tier="device", step_tokens=16),
    ]


async def test_a_resumed_lease_has_other_rows_and_a_retracted_one_none(serve: Serve) -> None:
    daemon = serve(SWA)
    daemon.script = answering(
        OpenLease=leasing(4, 5, beside=(pack_ids([1, 2]),)),
        RetractLease=lambda r: [wire.Retracted(r.call, 4, 1024)],
        ResumeLease=lambda r: [
            wire.Resumed(r.call, 4, 4, 8, pack_ids([4, 9]), (pack_ids([0, 6]),))
        ],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(8))
        await lease.retract()
        with pytest.raises(KvdError, match="lease 70 is retracted: it has no pages until resume"):
            lease.pages_of("swa")
        await lease.resume()
        assert (lease.pages.tolist(), lease.pages_of("swa").tolist()) == ([4, 9], [0, 6])


async def test_a_refused_slide_leaves_every_row_as_it_was(serve: Serve) -> None:
    daemon = serve(SWA)
    refused = Refusal(Code.BAD_REQUEST, "slide to 99 of 8 tokens", side="node-a")
    daemon.script = answering(
        OpenLease=leasing(4, 5, beside=(pack_ids([1, 2]),)),
        SlideLease=lambda r: [wire.Failed(r.call, refused)],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(8))
        with pytest.raises(KvdError, match="slide to 99 of 8 tokens"):
            await lease.slide(99)
        assert (lease.pages.tolist(), lease.pages_of("swa").tolist()) == ([4, 5], [1, 2])


async def test_slide_and_fetch_of_a_lease_without_pages_are_refused_here(serve: Serve) -> None:
    daemon = serve(HISPARSE)
    daemon.script = answering(
        OpenLease=leasing(4, beside=(pack_ids([1]),)),
        RetractLease=lambda r: [wire.Retracted(r.call, 1, 256)],
        ReleaseLease=lambda r: [wire.Done(r.call)],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(8))
        await lease.retract()
        for verb in (lambda: lease.slide(4), lambda: lease.fetch([0])):
            with pytest.raises(KvdError, match="lease 70 is retracted") as caught:
                await verb()
            assert caught.value.code == "wrong-state"
        await lease.release()
        for verb in (lambda: lease.slide(4), lambda: lease.fetch([0])):
            with pytest.raises(KvdError, match="lease 70 was released") as caught:
                await verb()
            assert caught.value.code == "unknown-lease"

    assert [type(one).__name__ for one in daemon.got] == [
        *("OpenLease", "RetractLease", "ReleaseLease")
    ]


async def test_a_companion_is_in_lockstep_and_takes_no_row_beside(serve: Serve) -> None:
    daemon = serve(HISPARSE)
    daemon.script = answering(OpenLease=leasing(3, 5, beside=(pack_ids([2, 4, 1, 3]),)))

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(16))
        assert lease.pages_of("kv").tolist() == [3, 5]
        assert lease.pages_of("index").tolist() == [6, 7, 10, 11]
        assert lease.pages_of("buffer").tolist() == [2, 4, 1, 3]


async def test_a_state_row_has_the_one_to_read_and_the_one_to_write(serve: Serve) -> None:
    daemon = serve(RECURRENT)
    daemon.script = answering(OpenLease=leasing(*range(1, 9), beside=(pack_ids([3, 4]),)))

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(8))
        assert lease.pages_of("state").tolist() == [3, 4]


async def test_an_unknown_component_is_refused_with_those_that_exist(serve: Serve) -> None:
    daemon = serve(HISPARSE)
    daemon.script = answering(OpenLease=leasing(3, beside=(b"",)))

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        pool, lease = node.pool("main"), await node.lease(range(8))
        asked: tuple[Callable[[], object], ...] = (
            lambda: lease.pages_of("swa"),
            lambda: pool.view("swa", layer=0),
            lambda: pool.tensors("swa", layer=0),
            lambda: pool.page_size_of("swa"),
            lambda: pool.component("swa"),
        )
        for ask in asked:
            with pytest.raises(KvdError, match="no component 'swa'; it has kv, index, buffer") as e:
                ask()
            assert e.value.code == "bad-request"


async def test_a_daemon_that_sends_no_row_for_a_component_is_found_out(serve: Serve) -> None:
    daemon = serve(SWA)
    daemon.script = answering(OpenLease=leasing(3, beside=()))

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(4))
        assert lease.pages.tolist() == [3]
        with pytest.raises(KvdError, match="0 rows beside that of lease 70, and none for 'swa'"):
            lease.pages_of("swa")


# ---- fetch ---------------------------------------------------------------------------------------


async def test_fetch_tells_the_device_page_of_each_page_in_the_order_asked(serve: Serve) -> None:
    daemon = serve(HISPARSE)
    daemon.script = answering(
        OpenLease=leasing(3, 5, 7, beside=(pack_ids([2, 4]),)),
        FetchPages=lambda r: [wire.FetchReply(r.call, pack_ids([4, 2]), 1, 1, 512)],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(range(24))
        found = await lease.fetch([2, 0], ahead=np.array([1]))
        with pytest.raises(KvdError, match="bad-pages: page numbers are 0 to"):
            await lease.fetch([-1])

    assert (found.pages.tolist(), found.pages.dtype) == ([4, 2], np.int32)
    assert (found.hits, found.misses, found.copied_bytes) == (1, 1, 512)
    assert daemon.got[1:] == [wire.FetchPages(2, 70, pack_ids([2, 0]), pack_ids([1]))]


def test_the_blocking_client_slides_and_fetches_too(serve: Serve) -> None:
    daemon = serve(HISPARSE)
    daemon.script = answering(
        OpenLease=leasing(3, beside=(pack_ids([2, 4]),)),
        ReceiveRequest=lambda r: [wire.Failed(r.call, Refusal(Code.PEER_UNKNOWN, "no such peer"))],
        SlideLease=lambda r: [wire.PageTable(r.call, 1, b"", (pack_ids([2, 4]),))],
        FetchPages=lambda r: [wire.FetchReply(r.call, pack_ids([2]), 0, 1, 512)],
    )

    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        lease = node.lease(range(8), step_tokens=8)
        lease.slide(4)
        assert lease.pages_of("index").tolist() == [6, 7]
        assert lease.fetch([0]).pages.tolist() == [2]
        with pytest.raises(KvdError, match="no such peer"):
            node.receive(7, [1], "p", step_tokens=8, tier="host")

    assert daemon.got == [
        wire.OpenLease(1, step_tokens=8),
        wire.SlideLease(2, 70, 4),
        wire.FetchPages(3, 70, pack_ids([0])),
        wire.ReceiveRequest(4, 7, ("p",), tier="host", step_tokens=8),
    ]


# ---- memory --------------------------------------------------------------------------------------


async def test_a_component_says_what_an_engine_must_know_of_it(serve: Serve) -> None:
    daemon = serve(SWA)

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        assert (pool.page_size, pool.page_size_of("kv"), pool.page_size_of("swa")) == (4, 4, 4)
        window = pool.component("swa")
        assert (window.extent, window.extent_tokens, window.tier, window.pages) == (
            *("tail", 8, "device", 8),
        )
        assert (pool.component("kv").extent, pool.memory.family) == ("whole", "swa")


async def test_every_component_has_views_of_its_own_memory(serve: Serve) -> None:
    daemon = serve(HISPARSE)

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        (latent,) = pool.layer(1)
        (keys,) = pool.view("index", layer=1)
        (copy,) = pool.view("buffer", layer=1)
        assert (tuple(latent.shape), latent.dtype) == ((16, 8, 1, 20), torch.bfloat16)
        assert (tuple(keys.shape), keys.dtype) == ((32, 4, 1, 4), torch.float8_e4m3fn)
        assert tuple(copy.shape) == (6, 8, 1, 20)
        latent[5].fill_(2.0)
        assert not copy.any()
        assert not keys.view(torch.uint8).any()
        del latent, keys, copy


async def test_tensors_of_a_state_are_named_as_they_are_configured(serve: Serve) -> None:
    daemon = serve(RECURRENT)

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        named = pool.tensors("state", layer=1)
        assert {name: (tuple(one.shape), one.dtype) for name, one in named.items()} == {
            "ssm": ((5, 4, 3), torch.float32),
            "conv": ((5, 6), torch.bfloat16),
        }
        named["ssm"][3].fill_(1.5)
        named["conv"][3].fill_(2.5)
        ssm, conv = pool.view("state", layer=1)
        assert (float(ssm.sum()), float(conv.sum())) == (1.5 * 12, 2.5 * 6)
        with pytest.raises(KvdError, match="keeps bytes in state alone") as caught:
            pool.layer(0)
        assert caught.value.code == "not-supported"
        del named, ssm, conv


async def test_a_pool_that_only_counts_says_which_key_makes_it_so(serve: Serve) -> None:
    daemon = serve(PREFILL_ONLY)
    daemon.script = answering(OpenLease=leasing(3, 5, beside=()))

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool, lease = node.pool("main"), await node.lease(range(8))
        assert lease.pages.tolist() == [3, 5]
        for look in (lambda: pool.layer(0), lambda: pool.view("kv", layer=0)):
            with pytest.raises(KvdError, match=r"cache\.mode = 'prefill-only'") as caught:
                look()
            assert caught.value.code == "not-supported"
