"""SGLang's own HiCache, its host pools and storage threads, on the CPU; run by SGLang's Python.

    python -m tests.connectors.sglang.engine SCENARIO SOCKET PID

The pools, the controller with its threads, the file backend and the fault injector are SGLang's.
Played is the scheduler: who gives host pages to a prefetch, and who takes what it acknowledges. A
scenario fails by an exception. It asks whoever runs it for a daemon that is restarted by a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import torch

from tests.connectors.sglang.absent import stand_in

stand_in()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PAGE = 16
TOKENS = 64 * PAGE
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KVD = {
    "backend_name": "kvd",
    "module_path": "kvd.connectors.sglang",
    "class_name": "KvdHiCache",
    "interface_v1": 1,
    "kvd.weights": "played",
}

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def mha_device(layers=3):
    return MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 2, 32, layers, "cpu", False)


def mla_device(layers=3):
    return MLATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=96,
        qk_rope_head_dim=32,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def host_of(device, layout):
    """SGLang's host pool for one of its device pools."""
    info = device.get_device_pool_infos()[0].buffer_info
    kind = MLATokenToKVPoolHost if isinstance(device, MLATokenToKVPool) else MHATokenToKVPoolHost
    return kind(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=device.layer_num,
    )


class PlayedAllocator:
    """What the controller reads of the allocator where nothing goes to a device."""

    def __init__(self, device):
        self._device = device

    def get_kvcache(self):
        return self._device


class PlayedScheduler:
    """One rank whose pages are in host memory alone."""

    def __init__(self, device, host, backend, extra, **parallel) -> None:
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        ranks |= {"attn_dcp_size": 1, "attn_dcp_rank": 0, **parallel}
        get_parallel().override_permanently(**ranks)
        self.host = host
        self.controller = HiCacheController(
            PlayedAllocator(device),
            host,
            PAGE,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend=backend,
            model_name="org/model",
            prefetch_threshold=PAGE,
            storage_backend_extra_config=dict(extra),
        )

    @property
    def storage(self):
        return self.controller.storage_backend

    def names(self, tokens):
        return get_storage_hash_str(tokens, None, page_size=PAGE)

    def write(self, tokens, first=0):
        """Pages from ``first`` on, each with what only its name has; as the tree backs them up."""
        names = self.names(tokens)
        indices = self.host.alloc((len(names) - first) * PAGE)
        for number, name in enumerate(names[first:]):
            at = int(indices[number * PAGE])
            self.host.set_from_flat_data_page(at, self.content(name))
        self.controller.write_storage(
            indices, tokens[first * PAGE :], names[first:], prefix_keys=names[:first]
        )
        operation = self.controller.ack_backup_queue.get(timeout=60)
        self.host.free(indices)
        return operation.completed_tokens // PAGE

    def read(self, tokens, first=0):
        """How many pages a prefetch brings behind ``first``; each must have what is its own."""
        names = self.names(tokens)
        last = names[first - 1] if first else None
        operation = self.controller.prefetch(
            "r", tokens[first * PAGE :], last, names[:first]
        )
        assert self.controller.prefetch_hit_queue.get(timeout=60) is operation
        n_hits = len(operation.hash_value)
        self.hits = n_hits
        if not n_hits:
            return 0
        indices = operation.host_indices = self.host.alloc(n_hits * PAGE)
        for number in range(n_hits):
            at = int(indices[number * PAGE])
            self.host.set_from_flat_data_page(at, torch.zeros_like(self.content("00")))
        self.controller.prefetch_buffer.put(operation)
        n_pages = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            n_pages = max(n_pages, (ack.completed_tokens or 0) // PAGE)
            if ack.completed_req:
                break
        for number, name in enumerate(names[first : first + n_pages]):
            page = self.host.get_data_page(int(indices[number * PAGE]))
            assert torch.equal(page, self.content(name)), f"page {first + number} is another's"
        self.host.free(indices)
        return n_pages

    def content(self, name):
        drawn = torch.Generator().manual_seed(int(name[:12], 16))
        like = self.host.get_dummy_flat_data_page()
        return torch.randint(0, 200, like.shape, generator=drawn).to(like.dtype)

    def close(self):
        self.controller.detach_storage_backend()


@contextmanager
def scheduler(socket, *, device=None, layout="page_first", backend="dynamic", extra=(), **parallel):
    device = device or mha_device()
    given = {**KVD, "kvd.socket": socket, **dict(extra)} if backend == "dynamic" else dict(extra)
    found = PlayedScheduler(device, host_of(device, layout), backend, given, **parallel)
    try:
        yield found
    finally:
        found.close()


def prompt(pages, seed):
    return torch.randint(
        0, 1000, (pages * PAGE,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def conversation():
    """Turns of several conversations over one system prompt, in turns; pages of each prompt."""
    system, found = prompt(3, 1), []
    history = {talk: system + prompt(1, 10 + talk) for talk in range(4)}
    for turn in range(4):
        for talk in range(4):
            history[talk] = history[talk] + prompt(1 + (talk + turn) % 3, 100 * talk + turn)
            found.append(list(history[talk]))
    return found


# ---- scenarios ---------------------------------------------------------------------------------


def hits_of(rank):
    """Of each prompt, how many pages were found and came; what was not is written."""
    found = []
    for tokens in conversation():
        n_pages = rank.read(tokens)
        assert n_pages == rank.hits
        found.append(n_pages)
        if n_pages < len(tokens) // PAGE:
            assert rank.write(tokens, n_pages) == len(tokens) // PAGE - n_pages
    return found


def same_hits_as_files(socket):
    with (
        tempfile.TemporaryDirectory() as files,
        scheduler(socket, backend="file", extra={}) as own,
    ):
        own.storage.file_path = files
        expected = hits_of(own)
    assert sum(expected) > 40
    for layout in LAYOUTS:
        with scheduler(socket, layout=layout) as rank:
            assert hits_of(rank) == expected, layout
        with scheduler(socket, layout=layout) as another:
            assert [another.read(tokens) for tokens in conversation()] == [
                len(tokens) // PAGE for tokens in conversation()
            ]


def mla_pages(socket):
    for layout in ("layer_first", "page_first", "page_first_direct"):
        with scheduler(socket, device=mla_device(), layout=layout) as rank:
            assert rank.write(prompt(5, 50)) == 5
            assert rank.read(prompt(5, 50)) == 5
        # Every rank of such a model has the same pages.
        with scheduler(socket, device=mla_device(), layout=layout, tp_rank=1, tp_size=2) as other:
            assert other.read(prompt(5, 50)) == 5


def nothing_is_shared_with_unlike_ranks(socket):
    tokens = prompt(4, 60)
    with scheduler(socket) as rank:
        assert rank.write(tokens) == 4
    unlike = [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 2},
        {"layout": "page_head"},
        {"layout": "layer_first"},
        {"extra": {"kvd.weights": "other"}},
        {"extra": {"kvd.partition": "mine"}},
    ]
    for other in unlike:
        with scheduler(socket, **other) as rank:
            assert rank.read(tokens) == 0, other
    with scheduler(socket) as rank:
        assert rank.read(tokens) == 4


def pages_behind_those_that_sglang_has(socket):
    tokens = prompt(9, 70)
    with scheduler(socket) as rank:
        assert rank.write(tokens[: 4 * PAGE]) == 4
        assert rank.write(tokens, 4) == 5
        assert rank.read(tokens, 6) == 3
        assert rank.read(tokens) == 9


def beside_pools(socket):
    """v2: a draft's pages with each of KV, and states for some."""
    device = mha_device()
    with scheduler(socket, device=device) as rank:
        storage, tokens = rank.storage, prompt(6, 80)
        names = rank.names(tokens)
        draft, window = host_of(mha_device(1), "page_first"), host_of(mha_device(2), "page_first")
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        storage.register_mem_host_pool_v2(window, PoolName.SWA)
        assert rank.write(tokens) == 6
        asked = [
            PoolTransfer(PoolName.DRAFT),
            PoolTransfer(
                PoolName.SWA, keys=["_"] * 2, hit_policy=PoolHitPolicy.TRAILING_PAGES
            ),
        ]
        info = HiCacheStorageExtraInfo(prefix_keys=[])
        assert storage.batch_exists_v2(names, asked, info).kv_hit_pages == 0

        def transfers(n_draft, window_pages):
            at = draft.alloc(n_draft * PAGE), window.alloc(len(window_pages) * PAGE)
            keys = [names[page] for page in window_pages]
            return [
                PoolTransfer(PoolName.DRAFT, host_indices=at[0], keys=names[:n_draft]),
                PoolTransfer(
                    PoolName.SWA,
                    host_indices=at[1],
                    keys=keys,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                ),
            ]

        # The window is there for prefixes of 3 and 6 pages, the draft's for 5.
        given = transfers(5, [1, 2, 4, 5])
        for pool, transfer in zip((draft, window), given, strict=True):
            for number, name in enumerate(transfer.keys):
                like = pool.get_dummy_flat_data_page()
                page = torch.full_like(like, int(name[:2], 16) / 8)
                pool.set_from_flat_data_page(int(transfer.host_indices[number * PAGE]), page)
        assert storage.batch_set_v2(given, info) == {"draft": [True] * 5, "swa": [True] * 4}
        found = storage.batch_exists_v2(names, asked, info)
        assert found.restorable_prefix_pages == [3], found
        assert found.extra_pool_hit_pages == {"kv": 6, "draft": 5, "swa": 6}
        taken = transfers(5, [1, 2])
        assert storage.batch_get_v2(taken, info) == {"draft": [True] * 5, "swa": [True] * 2}
        for pool, transfer in zip((draft, window), taken, strict=True):
            for number, name in enumerate(transfer.keys):
                page = pool.get_data_page(int(transfer.host_indices[number * PAGE]))
                assert bool((page == int(name[:2], 16) / 8).all())
        missing = transfers(6, [0])
        assert storage.batch_get_v2(missing, info) == {
            "draft": [True] * 5 + [False],
            "swa": [False],
        }


def cleared(socket):
    tokens = prompt(3, 90)
    with scheduler(socket) as rank:
        rank.write(tokens)
        rank.storage.clear()
        assert rank.read(tokens) == 0
        assert rank.write(tokens) == 3
        assert rank.read(tokens) == 3


def refused(socket):
    for extra, word in [
        ({"interface_v1": 0}, "interface_v1"),
        ({"kvd.sockets": "x"}, "kvd.sockets"),
        ({"kvd.threads": "x"}, "threads"),
    ]:
        try:
            with scheduler(socket, extra=extra):
                pass
        except ValueError as error:
            assert word in str(error)
        else:
            raise AssertionError(extra)


def injected_faults(socket):
    """SGLang's own injector: calls that fail and are late; what comes is right."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.01"
    with scheduler(socket) as rank:
        n_read = sum(rank.read(tokens) + 0 * rank.write(tokens) for tokens in conversation())
        assert n_read


def times(act):
    began_s = time.monotonic()
    found = act()
    return found, time.monotonic() - began_s


def told(word):
    """Have who runs this do something with the daemon."""
    print(json.dumps(word), flush=True)
    assert sys.stdin.readline().strip() == "done"


BOUND_S = 15.0
"""With SGLang's own look of a second into its queues, on a machine that is busy."""


def a_fault(kind, step, socket, pid):
    """A daemon that is killed, stopped or restarted; SGLang reads on, and no page is another's."""
    from kvd.connectors.sglang import storage_link
    from kvd.connectors.sglang.page_store import PageStore

    storage_link.SILENT_S = storage_link.RETRY_S = 0.2
    has_happened = []

    def act():
        if has_happened:
            return
        has_happened.append(kind)
        if kind == "stopped":
            os.kill(pid, signal.SIGSTOP)
        elif kind == "killed":
            told("kill")
        else:
            told("restart")

    plain = PageStore._ordered

    def ordered(self, *args, **how):
        is_now = step == ("saving" if how["to_pages"] else "loading")
        if is_now:
            act()
        order = plain(self, *args, **how)
        if step == ("ordered save" if how["to_pages"] else "ordered load"):
            act()
        return order

    with scheduler(socket) as rank:
        assert rank.write(prompt(6, 1)) == 6
        PageStore._ordered = ordered
        if step == "before":
            act()
        for tokens in (prompt(6, 1), prompt(7, 2)):
            n_read, took_s = times(lambda tokens=tokens: rank.read(tokens))
            assert took_s < BOUND_S, took_s
            _, took_s = times(lambda tokens=tokens, n=n_read: rank.write(tokens, min(n, 5)))
            assert took_s < BOUND_S, took_s
        assert has_happened
        PageStore._ordered = plain
        if kind == "stopped":
            os.kill(pid, signal.SIGCONT)
        if kind == "killed":
            told("start")
        until_s = time.monotonic() + 60
        while rank.write(prompt(4, 3)) != 4 or rank.read(prompt(4, 3)) != 4:
            assert time.monotonic() < until_s, "it is not used again"
            time.sleep(0.3)


SCENARIOS = {
    found.__name__: found
    for found in (
        same_hits_as_files,
        mla_pages,
        nothing_is_shared_with_unlike_ranks,
        pages_behind_those_that_sglang_has,
        beside_pools,
        cleared,
        refused,
        injected_faults,
    )
}


def main(name, socket, pid="0"):
    torch.set_num_threads(1)
    if name.startswith("fault:"):
        _, kind, step = name.split(":")
        a_fault(kind, step, socket, int(pid))
    else:
        SCENARIOS[name](socket)
    print(json.dumps("passed"), flush=True)
    # SGLang's threads are daemons, and its pools need no farewell.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
