"""SGLang's own HiCache, its host pools and storage threads, on the CPU; run by SGLang's Python.

    echo '["cleared", "ipc:///...", 0]' | python -m tests.connectors.sglang.engine

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
import traceback
from contextlib import contextmanager, suppress

import torch

from kvd.connectors import daemon_link
from kvd.connectors.sglang import register
from kvd.connectors.sglang.identity import weight_changes
from kvd.connectors.sglang.page_store import PageStore
from tests.connectors.sglang.absent import stand_in

stand_in()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import (  # noqa: E402
    SchedulerWeightUpdaterManager,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from tests.connectors.sglang.device_pools import PAGE, mha_device, mla_device  # noqa: E402

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KVD = {
    "backend_name": "kvd",
    "module_path": "kvd.connectors.sglang",
    "class_name": "KvdHiCache",
    "interface_v1": 1,
    "kvd.weights": "played",
}

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def host_of(device, layout):
    """SGLang's host pool for one of its device pools."""
    info = device.get_device_pool_infos()[0].buffer_info
    is_mla = isinstance(device, MLATokenToKVPool)
    kind = MLATokenToKVPoolHost if is_mla else MHATokenToKVPoolHost
    more = {"target_layer_num": device.layer_num} if is_mla else {}
    return kind(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=device.layer_num,
        **more,
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
        operation = self.controller.prefetch("r", tokens[first * PAGE :], last, names[:first])
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
    given = {**KVD, "kvd.endpoint": socket, **dict(extra)} if backend == "dynamic" else dict(extra)
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
            PoolTransfer(PoolName.SWA, keys=["_"] * 2, hit_policy=PoolHitPolicy.TRAILING_PAGES),
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


def weights_that_change(socket):
    """SGLang's registry calls the plugin's hook before its own method, which fails here."""
    register()
    HookRegistry.apply_hooks()
    tokens = prompt(3, 95)
    try:
        with scheduler(socket) as rank:
            assert rank.write(tokens) == 3
            with suppress(AttributeError):
                SchedulerWeightUpdaterManager.update_weights_from_tensor(None, None)
            assert rank.read(tokens) == 0
            assert rank.write(prompt(3, 96)) == 0
    finally:
        weight_changes.why_over = ""
    with scheduler(socket) as another:
        assert another.read(tokens) == 3
        assert another.read(prompt(3, 96)) == 0


def refused(socket):
    for extra, word in [
        ({"interface_v1": 0}, "interface_v1"),
        ({"kvd.endpoints": "x"}, "kvd.endpoints"),
        ({"kvd.copy_threads": "x"}, "copy_threads"),
    ]:
        said = ""
        try:
            with scheduler(socket, extra=extra):
                pass
        except ValueError as error:
            said = str(error)
        assert word in said, extra


def injected_faults(socket):
    """SGLang's own injector: calls that fail and are late; what comes is right."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.01"
    try:
        with scheduler(socket) as rank:
            found = [(rank.read(tokens), rank.write(tokens)) for tokens in conversation()]
        assert sum(n_read for n_read, _ in found)
        assert min(n_written for _, n_written in found) == 0
    finally:
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"]
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"]


def times(act):
    began_s = time.monotonic()
    found = act()
    return found, time.monotonic() - began_s


def say(word):
    """A line to whoever runs this."""
    sys.stdout.write(f"{json.dumps(word)}\n")
    sys.stdout.flush()


def told(word):
    """Have who runs this do something with the daemon."""
    say(word)
    assert sys.stdin.readline().strip() == "done"


BOUND_S = 15.0
"""With SGLang's own look of a second into its queues, on a machine that is busy."""


class FaultOnce:
    """The daemon is killed, stopped or restarted at one step of the store, the first time."""

    def __init__(self, kind, step, pid) -> None:
        self.kind, self._step, self._pid = kind, step, pid
        self.has_happened = False
        self._plain = PageStore._ordered

    def at(self, step):
        if self.has_happened or step != self._step:
            return
        self.has_happened = True
        if self.kind == "stopped":
            os.kill(self._pid, signal.SIGSTOP)
        else:
            told("kill" if self.kind == "killed" else "restart")

    @contextmanager
    def within(self):
        """While the store is asked to save and to load."""

        def ordered(store, *args, **how):
            self.at("saving" if how["to_pages"] else "loading")
            order = self._plain(store, *args, **how)
            self.at("ordered save" if how["to_pages"] else "ordered load")
            return order

        PageStore._ordered = ordered
        try:
            self.at("before")
            yield
        finally:
            PageStore._ordered = self._plain
        assert self.has_happened

    def over(self):
        """The daemon is well again."""
        if self.kind == "stopped":
            os.kill(self._pid, signal.SIGCONT)
        if self.kind == "killed":
            told("start")


def a_fault(kind, step, socket, pid):
    """SGLang reads and writes on, waits no longer than a bound, and no page is another's."""
    daemon_link.SILENT_S = daemon_link.RETRY_S = 0.2
    fault = FaultOnce(kind, step, pid)
    with scheduler(socket) as rank:
        assert rank.write(prompt(6, 1)) == 6
        with fault.within():
            for tokens in (prompt(6, 1), prompt(7, 2)):
                n_read, took_s = times(lambda tokens=tokens: rank.read(tokens))
                assert took_s < BOUND_S, took_s
                _, took_s = times(lambda tokens=tokens, n=n_read: rank.write(tokens, min(n, 5)))
                assert took_s < BOUND_S, took_s
        fault.over()
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
        weights_that_change,
        refused,
        injected_faults,
    )
}


def main():
    """One scenario a line, in turns: to import SGLang takes longer than all of them."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, socket, pid = json.loads(line)
        # Daemons of scenarios lie beside each other, and each is another one.
        try:
            if name.startswith("fault:"):
                a_fault(*name.split(":")[1:], socket, pid)
            elif name.startswith("linker"):
                from tests.connectors.sglang import linker_engine  # noqa: PLC0415 - it takes ours

                linker_engine.run(name, socket, pid)
            else:
                SCENARIOS[name](socket)
            say("passed")
        except BaseException:  # noqa: BLE001 - whoever runs this has to hear of it
            say(f"failed: {traceback.format_exc()}")
    # SGLang's threads are daemons, and its pools need no farewell.
    os._exit(0)


if __name__ == "__main__":
    main()
