"""Scenarios of the linker, under SGLang's own tree, allocator and device pool on the CPU.

Played are the model, which writes into its pages what their names say, the arguments of a server,
and the scheduler, which asks the tree in SGLang's order: match, load back, start the loads,
forward, finish them, insert.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from array import array
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel

from kvd.client import KvdError, connect_sync
from kvd.connectors import daemon_link
from kvd.connectors.sglang import linker, register
from kvd.connectors.sglang.page_store import PageStore
from tests.connectors.sglang import engine
from tests.connectors.sglang.device_pools import PAGE, TOKENS, mha_device, mla_device
from tests.connectors.sglang.engine import BOUND_S, prompt, times

register()
HookRegistry.apply_hooks()


class PlayedEngine:
    """One rank: a tree over a device pool, and requests that come one after the other."""

    def __init__(self, socket, device=None, drafts=(), **extra) -> None:
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        get_parallel().override_permanently(**ranks, attn_dcp_size=1, attn_dcp_rank=0)
        self.device = device or mha_device()
        self.allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", self.device, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=4, max_context_len=TOKENS, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            sidecar_draft_device_pools=drafts,
        )
        self.tree = UnifiedRadixCache(params)
        extra = {"kvd.endpoint": socket, "kvd.weights": "played", **extra}
        config = {
            "linker": "KvdLinker",
            "linker_module_path": "kvd.connectors.sglang",
            "linker_extra_config": extra,
        }
        self.linker = create_unified_cache_linker(
            None, params, backend="dynamic", config=config, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)
        self._numbers = itertools.count()

    # ---- a request -------------------------------------------------------------------------------

    def find(self, tokens):
        """As the scheduler looks a request up: it, what the device has, and pages in kvd."""
        request = SimpleNamespace(
            rid=f"r{next(self._numbers)}",
            last_node=None,
            kv=None,
            swa_branching_seqlen=None,
            session=None,
        )
        return self.find_again(request, tokens)

    def find_again(self, request, tokens):
        key = RadixKey(array("q", tokens))
        found = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node = found.last_device_node
        n_tokens = found.device_prefix_len
        request.device_slots = self.tree.path_device_indices(found.last_device_node)[:n_tokens]
        return request, n_tokens // PAGE, found.host_hit_length // PAGE

    def answer(self, tokens, between=lambda step: None):
        """Pages of the device and of kvd that it went on from; None: SGLang has given it up."""
        request, n_device, n_found = self.find(tokens)
        between("found")
        loaded = torch.empty(0, dtype=torch.int64)
        if n_found:
            n_tokens, _ = self.tree.linker.load_back(request)
            loaded = self.tree.linker.private_load_indices.get(request.rid, loaded)
            assert len(loaded) == n_tokens
        between("queued")
        index = self.tree.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        if index >= 0:
            for layer in range(self.device.layer_num):
                self.linker.layer_done_counter.wait_until(layer)
        if request.rid in self.tree.linker.finish_loads():
            self.allocator.free(loaded)
            return None
        names = get_storage_hash_str(tokens, None, page_size=PAGE)
        slots = torch.cat([request.device_slots, loaded])
        n_here = len(slots) // PAGE
        for number in range(n_here):
            self.check(int(slots[number * PAGE]), names[number])
        computed = self.allocator.alloc(len(tokens) - len(slots))
        assert computed is not None, "device pages are lost"
        for number, name in enumerate(names[n_here:]):
            self.write(int(computed[number * PAGE]), name)
        slots = torch.cat([slots, computed])
        # It frees what of these the tree has had itself meanwhile.
        key = RadixKey(array("q", tokens))
        n_known = len(request.device_slots)
        self.tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=n_known))
        return n_device, len(loaded) // PAGE

    def settle(self):
        """Wait for all that is stored, as the scheduler's steps see to it."""
        until_s = time.monotonic() + 60
        while self.tree.linker.pending_offloads:
            self.tree.check_hicache_events()
            assert time.monotonic() < until_s, "an offload never ends"
            time.sleep(0.01)

    def evict(self, pages=TOKENS // PAGE):
        self.tree.evict(EvictParams(num_tokens=pages * PAGE))

    def is_whole(self):
        """With nothing in the tree all pages are free."""
        self.settle()
        self.evict()
        return self.allocator.available_size() == TOKENS

    # ---- pages -----------------------------------------------------------------------------------

    def _page(self, at, name):
        drawn = torch.Generator().manual_seed(int(name[:12], 16))
        for buffer in self._buffers():
            page = buffer[at : at + PAGE]
            yield page, torch.randint(0, 200, page.shape, generator=drawn).to(page.dtype)

    def _buffers(self):
        if isinstance(self.device, MLATokenToKVPool):
            return list(self.device.kv_buffer)
        return [*self.device.k_buffer, *self.device.v_buffer]

    def write(self, at, name):
        for page, content in self._page(at, name):
            page.copy_(content)

    def check(self, at, name):
        for page, content in self._page(at, name):
            assert torch.equal(page, content), "KV that is not its own"


ARGUMENTS = {"disagg": SimpleNamespace(disaggregation_mode="null")}
"""Of a server: what the tree reads of them."""


@contextmanager
def played(socket, **how):
    context = runtime_context._CONTEXT
    before, context._config_bags = context._config_bags, ARGUMENTS
    try:
        found = PlayedEngine(socket, **how)
        try:
            yield found
        finally:
            found.tree.linker.close()
    finally:
        context._config_bags = before


# ---- scenarios ---------------------------------------------------------------------------------


def linker_keeps_what_the_device_evicts(socket):
    tokens = prompt(6, 1)
    with played(socket) as rank:
        assert rank.answer(tokens) == (0, 0)
        assert rank.answer(tokens) == (6, 0)
        rank.settle()
        rank.evict()
        assert rank.answer(tokens) == (0, 6)
        assert rank.is_whole()


def linker_finds_the_end_of_a_prompt_whose_start_the_device_has(socket):
    """Its end was evicted from the device; and it was stored in parts, as it was computed."""
    system = prompt(3, 2)
    first, second = system + prompt(4, 3), system + prompt(2, 4)
    longer = first + prompt(2, 5)
    with played(socket) as rank:
        for tokens in (first, longer):
            rank.answer(tokens)
            rank.settle()
        rank.evict()
        assert rank.answer(second) == (0, 3)
        assert rank.answer(longer) == (3, 6)
        assert rank.is_whole()


def linker_has_latents(socket):
    """MLA: one buffer of each layer, and whole and begun again by another engine."""
    tokens = prompt(6, 20)
    with played(socket, device=mla_device()) as rank:
        assert rank.answer(tokens) == (0, 0)
        rank.settle()
        rank.evict()
        assert rank.answer(tokens + prompt(2, 21)) == (0, 6)
        assert rank.is_whole()
    with played(socket, device=mla_device()) as another:
        assert another.answer(tokens) == (0, 6)
        assert another.is_whole()


def linker_shares_with_another_engine(socket):
    tokens = prompt(5, 6)
    with played(socket) as rank:
        rank.answer(tokens)
        rank.settle()
    with played(socket) as another:
        assert another.answer(tokens) == (0, 5)
        assert another.is_whole()
    for unlike in ({"kvd.weights": "other"}, {"kvd.partition": "mine"}):
        with played(socket, **unlike) as other:
            assert other.answer(tokens) == (0, 0)


def take_every_page(socket):
    """Another engine of the node: what nobody holds is evicted for it."""
    with connect_sync(socket, name="others") as node:
        for count in range(40, 0, -1):
            try:
                node.lease([7], reserve_tokens=(count - 1) * PAGE, deadline_s=0).release()
            except Exception:  # noqa: BLE001 - that many cannot be had
                continue
            return


def linker_holds_what_it_has_told(socket):
    tokens = prompt(5, 7)
    with played(socket) as rank:
        rank.answer(tokens)
        rank.settle()
        rank.evict()

        def between(step):
            if step == "found":
                take_every_page(socket)

        assert rank.answer(tokens, between) == (0, 5)
        # Who does not come back holds nothing for ever.
        rank.settle()
        rank.evict()
        _, _, n_found = rank.find(tokens)
        assert n_found == 5
        linker.HELD_S, before = -1.0, linker.HELD_S
        try:
            rank.find(tokens)
            rank.find(prompt(1, 8))
            told = [told for told in rank.linker._told.values() if told.until_s > time.monotonic()]
            assert len(told) == 1
        finally:
            linker.HELD_S = before
        rank.linker._sweep(everything=True)
        assert rank.is_whole()


def linker_aborts_nobody_whose_pages_are_gone(socket):
    """It was left meanwhile: the request is computed, not given up."""
    tokens = prompt(5, 9)
    with played(socket) as rank:
        rank.answer(tokens)
        rank.settle()
        rank.evict()
        assert rank.answer(tokens, lambda _: rank.linker._sweep(everything=True)) == (0, 0)
        assert rank.is_whole()


def linker_cancels_and_resets(socket):
    tokens = prompt(5, 10)
    with played(socket) as rank:
        rank.answer(tokens)
        rank.settle()
        rank.evict()
        request, _, n_found = rank.find(tokens)
        assert n_found == 5
        assert rank.tree.linker.load_back(request)[0] == 5 * PAGE
        loaded = rank.tree.linker.private_load_indices[request.rid]
        rank.tree.linker.release_request(request.rid)
        assert not rank.tree.linker.inflight_load_rids
        rank.allocator.free(loaded)
        assert rank.tree.linker.start_layer_wise_loading() == -1
        assert rank.is_whole()
        rank.find(tokens)
        rank.tree.linker.reset()
        assert rank.answer(tokens) == (0, 5)
        assert rank.is_whole()


def linker_refuses_other_models_and_options(socket):
    for how, word in (
        ({"kvd.endpoints": "x"}, "kvd.endpoints"),
        ({"drafts": (mha_device(1),)}, "a model that drafts"),
        ({"device": mha_device(layers=5)}, "page_bytes"),
    ):
        said = ""
        try:
            with played(socket, **how):
                pass
        except (ValueError, KvdError) as error:
            said = str(error)
        assert word in said, (how, said)


class FaultAt:
    """A fault of the daemon at one step, once."""

    def __init__(self, kind, step, pid) -> None:
        self.kind, self._step, self._pid, self.has_happened = kind, step, pid, False

    def __call__(self, step):
        if step != self._step or self.has_happened:
            return
        self.has_happened = True
        if self.kind == "stopped":
            os.kill(self._pid, signal.SIGSTOP)
        else:
            engine.told("kill" if self.kind == "killed" else "restart")

    @contextmanager
    def while_saving(self):
        plain = PageStore._ordered

        def ordered(store, *args, **how):
            if how["to_pages"]:
                self("saving")
            order = plain(store, *args, **how)
            if how["to_pages"]:
                self("ordered save")
            return order

        with mock.patch.object(PageStore, "_ordered", ordered):
            yield

    def over(self):
        if self.kind == "stopped":
            os.kill(self._pid, signal.SIGCONT)
        if self.kind == "killed":
            engine.told("start")


def a_fault(kind, step, socket, pid):
    """What comes is right; what does not come is computed, or given up as SGLang has it."""
    daemon_link.SILENT_S = daemon_link.RETRY_S = 0.2
    fault = FaultAt(kind, step, pid)
    with played(socket) as rank:
        rank.answer(prompt(6, 11))
        rank.settle()
        rank.evict()
        with fault.while_saving():
            fault("before")
            for tokens in (prompt(6, 11) + prompt(2, 12), prompt(4, 13)):
                _, took_s = times(lambda tokens=tokens: rank.answer(tokens, fault))
                assert took_s < BOUND_S, took_s
            rank.settle()
        assert fault.has_happened
        fault.over()
        until_s = time.monotonic() + 60
        for seed in itertools.count(100):
            rank.answer(prompt(4, seed))
            rank.settle()
            rank.evict()
            if rank.answer(prompt(4, seed)) == (0, 4):
                break
            assert time.monotonic() < until_s, "it is not used again"
            time.sleep(0.3)
        assert rank.is_whole()


def run(name, socket, pid):
    if name.startswith("linker:"):
        a_fault(*name.split(":")[1:], socket, pid)
    else:
        globals()[name](socket)
