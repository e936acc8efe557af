"""A lease of every pool family gives its pages to others and comes back: every byte is as it was.

scenario C13, scenario A34, with a real daemon and its real transfer process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from kvd.client import Lease, Node

PAGE = 16
SETTLE_S = 10.0
COMMON = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "16", "pool.pages": "41"}
FAMILIES = {
    "swa": {
        "pool.family": "swa",
        "pool.window_tokens": "32",
        "pool.window_layers": "3",
        "pool.window_pages": "33",
        "pool.saved_size": "256KiB",
    },
    "mla": {
        "pool.family": "mla",
        "pool.latent_dim": "32",
        "pool.rope_dim": "8",
        "pool.index_dim": "12",
        "pool.index_dtype": "uint8",
        "pool.index_page_size": "4",
        "pool.saved_size": "128KiB",
    },
    "fp8": {
        "pool.dtype": "float8_e4m3fn",
        "pool.scale_dtype": "float32",
        "pool.order": "layer_first",
        "pool.saved_size": "128KiB",
    },
    "hybrid": {
        "pool.family": "recurrent",
        "pool.state_layers": "3",
        "pool.state.conv": "bfloat16[4,8]",
        "pool.state.ssm": "float32[16,16]",
        "pool.states": "17",
        "pool.saved_size": "128KiB",
    },
    "hisparse": {
        "pool.family": "hisparse",
        "pool.latent_dim": "32",
        "pool.rope_dim": "8",
        "pool.index_dim": "12",
        "pool.index_dtype": "uint8",
        "pool.buffer_tokens": "64",
        "pool.buffer_pages": "17",
        "pool.saved_size": "128KiB",
    },
}
PROMPT = list(range(1, 101))
OUTPUT = list(range(5000, 5029))
"""29 of 30 output tokens have KV: 129 tokens in all, and the last of 9 pages holds one."""
KV_TOKENS = 129
WINDOW_FROM = 96
"""129 - 1 - 32 is token 96: what lies before it is not looked at again."""


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def daemon(family, tmp_path_factory):
    settings = {**COMMON, **FAMILIES[family]}
    if "pool.latent_dim" in settings:
        del settings["pool.heads"], settings["pool.head_dim"]
    with one_daemon(tmp_path_factory.mktemp(family), settings) as own:
        yield own


@pytest.fixture(autouse=True)
def at_rest(daemon):
    """Every test leaves nothing behind, and no invariant broken."""
    yield
    daemon.wait_for(lambda: not daemon.snapshot().leases, "still holds something", SETTLE_S)
    assert daemon.ask(admin.Audit(1), admin.Report).refused == ()
    daemon.ask(admin.Flush(1), admin.Report)
    for pool in daemon.snapshot().pools:
        assert (pool.free_pages, pool.saved_pages) == (pool.total_pages - 1, 0)


def used(node: Node, lease: Lease) -> dict[str, list[int]]:
    """By component, the pages that the lease goes on from; what is a copy is left out."""
    pages = {}
    for part in node.pool("main").memory.components:
        row = [int(page) for page in lease.pages_of(part.name)]
        match part.extent:
            case "whole":
                # What is in lockstep goes with whole pages of kv.
                pages[part.name] = row[: -(-KV_TOKENS // PAGE) * (PAGE // part.page_size)]
            case "tail":
                pages[part.name] = row[WINDOW_FROM // PAGE : -(-KV_TOKENS // PAGE)]
            case "per-request":
                pages[part.name] = row[1:]
    return pages


def tensors(node: Node, component: str) -> list[torch.Tensor]:
    """Each tensor of a component as bytes, its first dimension the page."""
    pool = node.pool("main")
    (part,) = [one for one in pool.memory.components if one.name == component]
    return [
        pool.tensors(component, layer=place.layer)[place.part].view(torch.uint8)
        for place in part.tensors
    ]


def scribble(node: Node, pages: dict[str, list[int]], seed: int) -> None:
    """Random bytes over everything these pages hold."""
    source = torch.Generator().manual_seed(seed)
    for component, ids in pages.items():
        for part in tensors(node, component):
            shape = (len(ids), *part.shape[1:])
            part[ids] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


def bytes_of(node: Node, pages: dict[str, list[int]]) -> dict[str, list[bytes]]:
    """What each of these pages holds, in their order."""
    return {
        component: [
            b"".join(part[page].contiguous().numpy().tobytes() for part in tensors(node, component))
            for page in ids
        ]
        for component, ids in pages.items()
    }


def own(node: Node, lease: Lease) -> dict[str, list[int]]:
    """Every page that the lease may write."""
    pages = {}
    for part in node.pool("main").memory.components:
        row = [int(page) for page in lease.pages_of(part.name)]
        if part.extent == "per-request":
            pages[part.name] = row[1:]
        elif part.extent != "buffer":
            pages[part.name] = [page for page in row[lease.prefix_len // part.page_size :] if page]
    return pages


async def running(node: Node) -> Lease:
    """A lease with KV of 129 tokens, 64 of them cached by somebody else."""
    before = await node.lease(PROMPT[:64])
    scribble(node, own(node, before), 1)
    await before.release(())
    lease = await node.lease(PROMPT, reserve_tokens=30)
    assert lease.prefix_len == 64
    scribble(node, own(node, lease), 7)
    return lease


async def take_everything(node: Node) -> None:
    """Others run: what was cached is gone, and every page has been written over."""
    held = []
    for first in range(20_000, 30_000, 1000):
        try:
            held.append(
                await node.lease(list(range(first, first + 64)), cache=False, deadline_s=0.05)
            )
        except KvdError:
            break
    for seed, lease in enumerate(held):
        scribble(node, own(node, lease), 1000 + seed)
    for lease in held:
        await lease.release()


def page_bytes(node: Node) -> dict[str, int]:
    return {one.name: one.page_bytes for one in node.pool("main").memory.components}


async def test_every_component_comes_back_byte_for_byte(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, used(node, lease))
        sizes = page_bytes(node)
        saved_bytes = sum(len(pages) * sizes[name] for name, pages in was.items())

        kept = await lease.retract(OUTPUT)
        assert kept == kvd.client.Retraction(sum(map(len, was.values())), saved_bytes)
        daemon.ask(admin.Flush(1), admin.Report)
        await take_everything(node)
        before = daemon.snapshot().totals
        back = await lease.resume()

        assert back == kvd.client.Resumption(prefix_len=0, restored_tokens=129, kv_len=129)
        assert bytes_of(node, used(node, lease)) == was
        after = daemon.snapshot().totals
        assert after.restored_bytes - before.restored_bytes == saved_bytes
        assert after.spared_bytes == before.spared_bytes
        await lease.release()


async def test_pages_that_are_still_cached_are_spared_with_what_is_in_lockstep(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, used(node, lease))
        before = daemon.snapshot().totals
        whole = [one for one in node.pool("main").memory.components if one.extent == "whole"]

        await lease.retract(OUTPUT)
        back = await lease.resume()

        assert back == kvd.client.Resumption(prefix_len=64, restored_tokens=65, kv_len=129)
        assert bytes_of(node, used(node, lease)) == was
        after = daemon.snapshot().totals
        each = sum(one.page_bytes * (PAGE // one.page_size) for one in whole)
        assert after.spared_bytes - before.spared_bytes == 4 * each
        await lease.release()


@pytest.mark.parametrize("family", ["swa"], indirect=True)
async def test_a_transfer_process_that_dies_over_several_copies_is_followed_by_one_that_does_all(
    daemon,
):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, used(node, lease))
        await lease.retract(OUTPUT)
        daemon.ask(admin.Flush(1), admin.Report)
        await take_everything(node)
        pid = daemon.transfer_pid()

        os.kill(pid, signal.SIGSTOP)
        resuming = asyncio.create_task(lease.resume())
        deadline_s = time.monotonic() + SETTLE_S
        while daemon.snapshot().leases[0].state != "restoring":
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        back = await resuming

        assert back == kvd.client.Resumption(prefix_len=0, restored_tokens=129, kv_len=129)
        assert bytes_of(node, used(node, lease)) == was
        await lease.release()
