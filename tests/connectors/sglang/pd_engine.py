"""One engine of a pair, prefill or decode, of SGLang's own queues on the CPU (``pd_process``).

SGLang's are: the queues of its two schedulers (``PrefillBootstrapQueue``, ``DecodePreallocQueue``,
``DecodeTransferQueue``) with what its schedulers call of them, its bootstrap server, requests,
tree, allocator and device pools in host memory, its plugins' hooks, and its fault injector. Played
are the model, which writes into pages what their tokens say, and the loop of the scheduler.

The first line says what it is; each further line is a command, and whatever happens to a request
is told in a line. A request may stop at a step (``at``) until it is told to go on. An engine of
several ranks is as many processes: what the first one hears of requests, all do in the same step,
as SGLang's do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import socket
import threading
import time
import traceback
from array import array
from types import SimpleNamespace
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import utils
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel

from kvd.connectors.sglang import register

register()
HookRegistry.apply_hooks()

from sglang.srt.disaggregation.decode import (  # noqa: E402 - what was registered is applied
    DecodePreallocQueue,
    DecodeReqToTokenPool,
    DecodeTransferQueue,
    SchedulerDisaggregationDecodeMixin,
)
from sglang.srt.disaggregation.prefill import (  # noqa: E402
    PrefillBootstrapQueue,
    SchedulerDisaggregationPrefillMixin,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.mem_cache.common import release_kv_cache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from kvd.connectors.sglang import disaggregation, room_handoff, room_mail  # noqa: E402
from tests.connectors.sglang.device_pools import (  # noqa: E402
    PAGE,
    TOKENS,
    mha_device,
    mla_device,
)

LAYERS = 3
FOREIGN = 85
"""What the next owner of a page writes into it."""


def server_arguments(role, port, told):
    """What the classes here read of a server's arguments, by the groups of SGLang's context."""
    disagg = {
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": "kvd",
        "disaggregation_bootstrap_port": port,
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_enable_kv_checksum": False,
        "disaggregation_ib_device": None,
        "disaggregation_decode_enable_radix_cache": bool(told.get("radix")),
        "disaggregation_decode_enable_offload_kvcache": False,
        "disaggregation_decode_host_receive_threshold": 1.0,
        "disaggregation_decode_retraction_backup": "none",
        "disaggregation_decode_polling_interval": 1,
        "enable_pd_role_switch": False,
        "num_reserved_decode_tokens": 16,
        "optimistic_prefill_attempts": int(told.get("optimistic", 0)),
    }
    return {
        "disagg": SimpleNamespace(**disagg),
        "serving": SimpleNamespace(host="127.0.0.1", port=1, strip_thinking_cache=False),
        "device": SimpleNamespace(device="cpu", gpu_id=0),
        "memory": SimpleNamespace(disable_radix_cache=False),
        "spec": SimpleNamespace(speculative_algorithm=None),
        "schedule": SimpleNamespace(chunked_prefill_size=64),
        "observability": SimpleNamespace(enable_trace=False),
    }


class PlayedStep:
    """What both schedulers have."""

    def __init__(self, role, port, told) -> None:
        self.role = role
        self.rank = told.get("rank", 0)
        with mock.patch.object(runtime_context, "_validate_parallel"):  # ``more`` is alone there
            get_parallel().override_permanently(**self._ranks(told))
        runtime_context._CONTEXT._config_bags = server_arguments(role, port, told)
        attn = get_parallel()
        self.part = f"{attn.attn_tp_rank} of {attn.attn_tp_size}"
        """Of the heads this rank has its own."""
        if told.get("kv") == "mla":
            self.part = "all"
        self.device = {"mha": mha_device, "mla": mla_device}[told.get("kv", "mha")]()
        self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", self.device, need_sort=False
        )
        rows = {"size": 8, "max_context_len": TOKENS, "device": "cpu"}
        self.req_to_token_pool = (
            DecodeReqToTokenPool(**rows, enable_memory_saver=False, pre_alloc_size=8)
            if role == "decode"
            else ReqToTokenPool(**rows, enable_memory_saver=False)
        )
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.req_to_metadata_buffer_idx_allocator = utils.ReqToMetadataIdxAllocator(16)
        self.disagg_metadata_buffers = utils.MetadataBuffers(16, 16, torch.float32, 16)
        model = {"num_hidden_layers": LAYERS, "hf_text_config": None, "hf_config": None}
        runner = SimpleNamespace(
            kv_cache_dtype_str="bfloat16",
            effective_logical_max_total_num_tokens=TOKENS,
        )
        self.model_config = SimpleNamespace(**model, get_total_num_kv_heads=lambda: 2)
        self.random_seed, self.scheduler_stage_metrics = 1, None
        self.tp_worker = SimpleNamespace(model_runner=runner, is_hybrid_swa=False)
        arguments = {"served_model_name": "tiny", "enable_lora": told.get("lora", False)}
        self.server_args = SimpleNamespace(**arguments)
        self.kv_shard_widening = 1
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.rust_server = self.kv_checksum_computer = self.last_batch = None
        self.enable_hisparse = self.enable_lora = self.enable_staging = False
        self.enable_decode_hicache = self.enable_priority_scheduling = False
        self.enable_overlap, self.processed_tokens_counter = False, 0
        self.running_batch = SimpleNamespace(reqs=[])
        self.waiting_queue = []
        self.metrics_reporter = SimpleNamespace(
            enable_metrics=False, current_scheduler_metrics_enabled=False
        )
        self.batch_result_processor = SimpleNamespace(
            _maybe_update_reasoning_tokens=lambda *_: None
        )
        self.output_streamer = SimpleNamespace(stream_output=self._streamed)
        self.backend = utils.TransferBackend("kvd")

    def _ranks(self, told):
        """As SGLang's context has them. ``tp``, ``dp``: of them ``dp`` groups have attention each;
        ``store``: where ranks meet; ``more``: what an engine that is not served has."""
        tp, dp, store = told.get("tp", 1), told.get("dp", 1), told.get("store")
        found = dist.FileStore(store, tp) if store else dist.HashStore()
        dist.init_process_group("gloo", store=found, rank=self.rank, world_size=tp)
        attn_tp = tp // dp
        groups = [
            dist.new_group([*range(start, start + attn_tp)]) for start in range(0, tp, attn_tp)
        ]
        alone = [dist.new_group([rank]) for rank in range(tp)][self.rank]
        dp_rank, attn_rank = divmod(self.rank, attn_tp)
        self.attn_tp_cpu_group, self.attn_cp_cpu_group = groups[dp_rank], alone
        world, attn, stage = (
            SimpleNamespace(cpu_group=group, world_size=size, rank_in_group=rank)
            for group, size, rank in (
                (dist.group.WORLD, tp, self.rank),
                (groups[dp_rank], attn_tp, attn_rank),
                (alone, 1, 0),
            )
        )
        ranks = {"tp_rank": self.rank, "tp_size": tp, "pp_rank": 0, "pp_size": 1, "dp_size": dp}
        ranks |= {"attn_tp_rank": attn_rank, "attn_tp_size": attn_tp}
        ranks |= {"attn_cp_rank": 0, "attn_cp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        ranks |= {"attn_dp_size": dp, "attn_dp_rank": dp_rank, "dp_rank": dp_rank}
        ranks |= {"num_dp_ranks": dp, "dist_init_addr": None, "node_rank": 0, "nnodes": 1}
        ranks |= {"enable_kv_cache_sharding": False, "enable_cp_tp_group_sharing": False}
        ranks |= {"enable_dsa_cache_layer_split": False, "world_group": world}
        ranks |= {"load_balance_method": "round_robin", "attn_tp_group": attn, "pp_group": stage}
        return ranks | told.get("more", {})

    def request(self, told):
        prefill = self.role == "prefill"
        found = Req(
            told["rid"],
            "",
            array("q", told["tokens"]),
            SamplingParams(max_new_tokens=1 if prefill else 4),
            bootstrap_host="127.0.0.1",
            bootstrap_port=told["port"],
            bootstrap_room=told["room"],
            disagg_mode=utils.DisaggregationMode(self.role),
            extra_key=told.get("extra_key"),
            cache_salt=told.get("salt"),
            vocab_size=1000,
        )
        if told.get("unshared"):
            found.skip_radix_cache_insert = True
        return found

    def _streamed(self, requests, *_args, **_how):
        for request in requests:
            if isinstance(request.finished_reason, FINISH_ABORT):
                say(rid=request.rid, over="aborted", why=request.finished_reason.message)

    # ---- pages -----------------------------------------------------------------------------------

    def _rows(self, request, start, end):
        """KV rows of these tokens, and what they are to hold; page by page."""
        tokens = request.origin_input_ids
        slots = self.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        for at in range(start // PAGE * PAGE, end, PAGE):
            last = min(at + PAGE, len(tokens))
            said = tokens[:last].tobytes() + self.part.encode()
            seed = hashlib.sha256(said).hexdigest()[:12]
            drawn = torch.Generator().manual_seed(int(seed, 16))
            for buffer in self._buffers():
                where = slots[at:last].long()
                shape = (PAGE, *buffer.shape[1:])
                content = torch.randint(0, 200, shape, generator=drawn).to(buffer.dtype)
                yield buffer, where, content[: last - at]

    def _buffers(self):
        if isinstance(self.device, MLATokenToKVPool):
            return list(self.device.kv_buffer)
        return [*self.device.k_buffer, *self.device.v_buffer]

    def compute(self, request, start, end):
        for buffer, where, content in self._rows(request, start, end):
            buffer[where] = content

    def check(self, request):
        n_tokens = len(request.origin_input_ids)
        for buffer, where, content in self._rows(request, 0, n_tokens):
            assert torch.equal(buffer[where], content), "KV that is not its own"

    def spoil_free_pages(self):
        """Whoever has them next writes into them: a copy that is late is seen."""
        pages = self.token_to_kv_pool_allocator.free_pages
        for buffer in self._buffers():
            for page in pages.tolist():
                buffer[page * PAGE : (page + 1) * PAGE] = FOREIGN

    def are_free_pages_spoiled(self):
        pages = self.token_to_kv_pool_allocator.free_pages
        return all(
            bool((buffer[page * PAGE : (page + 1) * PAGE] == FOREIGN).all())
            for buffer in self._buffers()
            for page in pages.tolist()
        )

    def is_whole(self):
        """With nothing in the tree everything is free."""
        self.tree_cache.evict(EvictParams(num_tokens=TOKENS))
        allocator = self.token_to_kv_pool_allocator
        rows = self.req_to_metadata_buffer_idx_allocator
        return allocator.available_size() == TOKENS and rows.available_size() == 16

    def say_whole(self):
        say(whole=self.is_idle and self.is_whole())
        self.spoil_free_pages()


class PlayedPrefill(PlayedStep, SchedulerDisaggregationPrefillMixin):
    """The scheduler of a prefill engine, which computes a chunk of one request at each step."""

    def __init__(self, port, told) -> None:
        super().__init__("prefill", port, told)
        if self.rank == 0:
            server = utils.get_kv_class(self.backend, utils.KVClassType.BOOTSTRAP_SERVER)
            self.server = server("127.0.0.1", port)
        wait_listening(port)
        self.disagg_prefill_inflight_queue = []
        self.disagg_prefill_pending_chunk_rids = set()
        self.queue = self.disagg_prefill_bootstrap_queue = PrefillBootstrapQueue(
            token_to_kv_pool=self.device,
            draft_token_to_kv_pool=None,
            req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
            metadata_buffers=self.disagg_metadata_buffers,
            gpu_id=0,
            bootstrap_port=port,
            max_total_num_tokens=TOKENS,
            scheduler=self,
            scheduler_stage_metrics=None,
            transfer_backend=self.backend,
        )
        self.transfer = self.queue.kv_manager
        self.computing = []

    def add(self, told):
        self.queue.add(self.request(told), 2)

    def abort(self, rid):
        for request in [*self.queue.queue, *self.disagg_prefill_inflight_queue]:
            if request.rid == rid:
                request.disagg_kv_sender.abort()
        for request in [found for found in self.computing if found.rid == rid]:
            # SGLang: ``release_aborted_prefill_waiting_req`` and its like.
            self.computing.remove(request)
            self.release_aborted_prefill_waiting_req(request)
            self.spoil_free_pages()
            say(rid=rid, over="aborted", why="by its scheduler")

    def step(self):
        for request in self.queue.pop_bootstrapped():
            self._begin(request)
        for request in list(self.computing):
            self._chunk(request)
        before = list(self.disagg_prefill_inflight_queue)
        done = self.process_disagg_prefill_inflight_queue()
        for request in done:
            assert request in before
            if not isinstance(request.finished_reason, FINISH_ABORT):
                say(rid=request.rid, over="sent")
        if done:
            self.spoil_free_pages()

    def _begin(self, request):
        request.init_next_round_input(self.tree_cache)
        request.lock = self.tree_cache.lock(request.last_node)
        n_tokens, n_known = len(request.origin_input_ids), request.prefix_len
        self.req_to_token_pool.alloc([request])
        row = request.kv.req_pool_idx
        known = self.tree_cache.path_device_indices(request.last_node)[:n_known]
        self.req_to_token_pool.write((row, slice(0, n_known)), known)
        n_wanted = -(-(n_tokens - n_known) // PAGE) * PAGE
        n_lacking = n_wanted - self.token_to_kv_pool_allocator.available_size()
        if n_lacking > 0:  # as SGLang's scheduler does
            self.tree_cache.evict(EvictParams(num_tokens=n_lacking))
        new = self.token_to_kv_pool_allocator.alloc(n_wanted)
        assert new is not None
        self.req_to_token_pool.write((row, slice(n_known, n_tokens)), new[: n_tokens - n_known])
        request.kv.kv_committed_len = request.kv.kv_allocated_len = n_tokens
        request.extend_end = n_known
        self.computing.append(request)

    def _chunk(self, request):
        n_tokens = len(request.origin_input_ids)
        end = min(n_tokens, (request.extend_end // 64 + 1) * 64)
        self.compute(request, request.extend_end, end)
        request.extend_end = end
        is_met = self.check_bootstrap(request)
        if request not in self.computing:
            return
        if end < n_tokens:
            if is_met:
                self.send_kv_chunk(request)
            return
        request.output_ids.append(sum(request.origin_input_ids) % 1000)
        self.computing.remove(request)
        # One that is not met yet is parked there, and sent when it is.
        self.disagg_prefill_inflight_queue.append(request)
        if is_met:
            self.send_kv_chunk(request, last_chunk=True)

    def _release_aborted_request(self, request):
        pass

    @property
    def is_idle(self):
        return not (self.queue.queue or self.computing or self.disagg_prefill_inflight_queue)


class PlayedDecode(PlayedStep, SchedulerDisaggregationDecodeMixin):
    """The scheduler of a decode engine, whose requests are over with their first token."""

    def __init__(self, port, told) -> None:
        super().__init__("decode", port, told)
        self.is_cached = bool(told.get("radix"))
        self.transferring = self.disagg_decode_transfer_queue = DecodeTransferQueue(
            req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
            metadata_buffers=self.disagg_metadata_buffers,
            scheduler=self,
            tree_cache=self.tree_cache,
        )
        self.queue = self.disagg_decode_prealloc_queue = DecodePreallocQueue(
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            draft_token_to_kv_pool=None,
            req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
            metadata_buffers=self.disagg_metadata_buffers,
            scheduler=self,
            transfer_queue=self.transferring,
            tree_cache=self.tree_cache,
            gpu_id=0,
            bootstrap_port=port,
            max_total_num_tokens=TOKENS,
            num_reserved_decode_tokens=16,
            transfer_backend=self.backend,
        )
        self.transfer = self.queue.kv_manager

    def add(self, told):
        self.queue.add(self.request(told))

    def abort(self, rid):
        for found in [*self.queue.queue, *self.transferring.queue]:
            if found.req.rid == rid:
                found.kv_receiver.abort()

    def step(self):
        n_before = len(self.transferring.queue)
        self.process_decode_queue()
        for request in self.waiting_queue:
            self.check(request)
            assert list(request.output_ids) == [sum(request.origin_input_ids) % 1000]
            request.finished_reason = FINISH_LENGTH(length=1)
            release_kv_cache(request, self.tree_cache, checkpoint=True)
            say(rid=request.rid, over="came", cached=request.kv.cache_protected_len)
        if self.waiting_queue and not self.is_cached:  # SGLang has a ``ChunkCache`` then
            self.tree_cache.evict(EvictParams(num_tokens=TOKENS))
        self.waiting_queue.clear()
        if len(self.transferring.queue) < n_before:
            self.spoil_free_pages()

    @property
    def is_idle(self):
        return not (self.queue.queue or self.transferring.queue)


# ---- the process ---------------------------------------------------------------------------------

_saying = threading.Lock()
_lines = None


def say(**told):
    with _saying:
        _lines.write(f"{json.dumps(told)}\n")
        _lines.flush()


def wait_listening(port):
    until_s = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        else:
            return


class StopAt:
    """A task stops at a step of the connector's, once, until it is told to go on."""

    def __init__(self) -> None:
        self.step = ""
        self._go = threading.Event()
        opened = room_handoff.OutgoingKV._tell_open

        @functools.wraps(opened)
        def tell_open(handoff):
            opened(handoff)
            self("offered")

        mock.patch.object(room_handoff.OutgoingKV, "_tell_open", tell_open).start()
        plain = room_handoff.RoomHandoff._copy

        @functools.wraps(plain)
        def copy(handoff, *args, **how):
            begin = plain(handoff, *args, **how)
            self("save" if how["to_pages"] else "load")

            def begun():
                order = begin()
                self("ordered")
                return order

            return begun

        mock.patch.object(room_handoff.RoomHandoff, "_copy", copy).start()
        answered = room_handoff.RoomHandoff._was_answered

        @functools.wraps(answered)
        def was_answered(handoff, heard):
            answered(handoff, heard)
            self("heard")

        mock.patch.object(room_handoff.RoomHandoff, "_was_answered", was_answered).start()

    def __call__(self, step):
        if step == self.step:
            self.step = ""
            self._go.clear()
            say(at=step)
            self._go.wait()

    def go(self):
        self._go.set()


def spoil(kind, changed):
    """Letters of that kind have these fields instead of their own; none: they are as they are."""

    def spoilt(letter):
        is_one = type(letter).__name__ == kind
        return room_mail.frames_of(msgspec.structs.replace(letter, **changed) if is_one else letter)

    disaggregation.frames_of = spoilt


FOR_ALL = {"add", "abort"}
"""Commands that all ranks of a group obey in one step."""


def commands_of(engine, heard):
    """What is to be done before the next step, by all of its ranks alike."""
    found = []
    with contextlib.suppress(queue.Empty):
        found.append(heard.get(timeout=0.002))
    mine = [command for command in found if command[0] not in FOR_ALL]
    told = [[command for command in found if command[0] in FOR_ALL]]
    group = engine.attn_tp_cpu_group
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(told, src=dist.get_process_group_ranks(group)[0], group=group)
    return [*mine, *told[0]]


def commanded(engine, stop, heard):
    """One command, by its name."""
    name, *args = heard
    {
        "add": engine.add,
        "abort": engine.abort,
        "stop at": lambda step: setattr(stop, "step", step),
        "fail": envs.SGLANG_TEST_DISAGG_FAILURE_PROB.set,
        "release memory": engine.transfer.deregister_buffer_to_engine,
        "resume memory": engine.transfer.register_buffer_to_engine,
        "whole": engine.say_whole,
        "spoil": spoil,
        "spoiled": lambda: say(spoiled=engine.are_free_pages_spoiled()),
    }[name](*args)


def serve(connection):
    """One engine, until the other end has gone."""
    global _lines  # noqa: PLW0603 - of this process
    _lines = connection.makefile("rw")
    torch.set_num_threads(1)
    role, port, told, environment = json.loads(_lines.readline())
    os.environ |= environment
    try:
        assert "kvd" in DISAGG_TRANSFER_BACKEND_CHOICES
        engine = (PlayedPrefill if role == "prefill" else PlayedDecode)(port, told)
        heard, stop = queue.Queue(), StopAt()
        threading.Thread(
            target=_read, args=(connection.makefile("r"), heard, stop), daemon=True
        ).start()
        engine.spoil_free_pages()
        say(ready=engine.transfer.namespace)
        while True:
            for command in commands_of(engine, heard):
                commanded(engine, stop, command)
            engine.step()
    except BaseException:  # noqa: BLE001 - whoever runs this has to hear of it
        say(failed=traceback.format_exc())


def _read(lines, heard, stop):
    for line in lines:
        command = json.loads(line)
        if command == ["go"]:  # also where the scheduler waits for what has stopped
            stop.go()
        else:
            heard.put(command)
    os._exit(0)
