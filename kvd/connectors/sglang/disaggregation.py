"""SGLang's backend of transfers between prefill and decode engines, by way of the nodes' daemons.

    --disaggregation-mode prefill --disaggregation-transfer-backend kvd

SGLang's own classes stay in charge of who meets whom: its bootstrap server, its tables of ranks,
its queues, its timeouts. Ours hand the pages over, and say how far they are:

    KVPoll        prefill engine                          decode engine
    Bootstrapping the decode engine has no pages yet,     the prefill engine is looked up
                  or this node none for the prompt
    WaitingFor-   its room is open                        SGLang has no pages for the prompt
    Input
    Transferring  pages are copied and sent               pages are on their way
    Success       the decode engine's node has all        all is in SGLang's pages
    Failed        it ended, with a reason, and no byte of SGLang's pages moves

SGLang may also free pages without asking: for an abort, or because another rank has failed. So
``abort``, ``failure_exception`` and ``clear`` return when no byte moves. That is a wait for copies
of this process alone, and no timer ends it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel
from sglang.srt.utils.network import NetworkAddress
from sglang.version import __version__ as sglang_version
from typing_extensions import override

from kvd.client import room_of
from kvd.client.mover.engine_memory import HOST
from kvd.connectors.attributes import attribute
from kvd.connectors.sglang.backend import NOT_WATCHED, namespace_of
from kvd.connectors.sglang.chains import PromptKeys, keys_of_prompt
from kvd.connectors.sglang.device_pool import MetadataRows, TransferPool
from kvd.connectors.sglang.handoff_link import HandoffLink
from kvd.connectors.sglang.host_pages import HostPages
from kvd.connectors.sglang.identity import weight_changes
from kvd.connectors.sglang.options import check_version, handoff_options
from kvd.connectors.sglang.room_handoff import (
    WORD_BYTES,
    HandoffStage,
    HandoffTerms,
    IncomingKV,
    OutgoingKV,
    PageChunk,
    RoomHandoff,
)
from kvd.connectors.sglang.room_mail import (
    Letter,
    RoomHeard,
    RoomMail,
    RoomOver,
    RoomWanted,
    frames_of,
    letter_of,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

H = TypeVar("H", bound=RoomHandoff)

logger = logging.getLogger("kvd.connectors.sglang")

READ_EVERY_MS: Final = 200
"""A thread that reads letters looks so often whether it is to end."""

NOT_SERVED: Final = (
    "kvd hands over pages of full attention of equal ranks, and this engine has {}: use another "
    "--disaggregation-transfer-backend"
)

SECOND: Final = "room {} is another request's: a router draws one for each"

UNLIKE_RANKS: Final = (
    "kvd hands over between engines of equal ranks: attention TP, CP and PP are {} there and {} "
    "here; give both servers the same --tp-size (with --enable-dp-attention: the same --tp-size "
    "divided by --dp-size)"
)

QUEUES: Final = "sglang.srt.disaggregation"

_told_by: set[str] = set()
"""Queues that tell."""

SAID_STAGES: Final = {
    HandoffStage.MEETING: KVPoll.Bootstrapping,
    HandoffStage.OPEN: KVPoll.WaitingForInput,
    HandoffStage.MOVING: KVPoll.Transferring,
    HandoffStage.DONE: KVPoll.Success,
    HandoffStage.FAILED: KVPoll.Failed,
}


class KvdTransfer(CommonKVManager):
    """What SGLang calls a manager: one in each rank of either engine.

    Raises:
        ValueError: the engine has KV that kvd does not hand over, ``KVD_SGLANG`` is not as it must
            be, or SGLang is one that was not run.
        KvdError: ``layout-mismatch``: the daemon's pool is not for these pages.
    """

    def __init__(
        self,
        args: Any,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,  # noqa: FBT001, FBT002 - as SGLang calls it
    ) -> None:
        self._options = handoff_options(os.environ)
        check_version(sglang_version, any_version=self._options.any_version)
        if why := _why_not_served(args, server_args):
            raise ValueError(NOT_SERVED.format(why))
        if not weight_changes.is_watched:
            logger.warning(NOT_WATCHED)
        tell_prompts()
        device = HOST if get_device().device == HOST else f"cuda:{args.gpu_id}"
        pages = HostPages("kv", TransferPool(args), device=device)
        logger.info("kvd: a pool for SGLang's pages:\n%s", pages.section())
        config = _rank_of(server_args, is_mla=bool(is_mla_backend))
        self.namespace = namespace_of(config, pages, self._options)
        rank = f"{disaggregation_mode.value}-tp{config.tp_rank}-{os.getpid()}"
        self.link = HandoffLink(
            self._options.name or f"sglang-{rank}",
            self._options,
            pages,
            why_over=lambda: weight_changes.why_over,
        )
        self.link.start()
        self.rows = MetadataRows(args.aux_data_ptrs, args.aux_item_lens)
        timeouts = (
            envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
            envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        )
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        self._within_s = float(sum(timeouts) if is_prefill else timeouts[1])
        self.mail = RoomMail(float(timeouts[0]))
        self._posting = threading.Lock()
        self._engine = secrets.token_hex(WORD_BYTES)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._is_closed = threading.Event()
        self._reader = threading.Thread(target=self._read_letters, name="kvd-mail", daemon=True)
        self._reader.start()
        if not is_prefill:
            self._start_heartbeat_checker_thread()

    # ---- what requests need ----------------------------------------------------------------------

    def terms_of(self, room: int, req: Any) -> HandoffTerms:
        """What is said of a request's room."""
        tokens = array("q", req.origin_input_ids)
        if attribute(req, "pd_rebootstrap_in_progress"):
            tokens.extend(req.output_ids)
        ranks = (self.attn_tp_size, self.attn_tp_rank)
        return HandoffTerms(
            room=room,
            kvd_room=room if ranks[0] == 1 else room_of(f"sglang {room} {ranks[1]}"),
            prompt=prompt_of(req, tokens, int(self.kv_args.page_size)),
            n_tokens=len(tokens),
            namespace=self.namespace,
            within_s=self._within_s,
        )

    @property
    def here(self) -> tuple[str, int]:
        """Where this rank reads letters."""
        return self.local_ip, self.rank_port

    def post(self, host: str, port: int, letter: Letter, *, is_again: bool = False) -> None:
        """Send a letter; an engine that is not there gets none. Any thread may.

        Args:
            host: with ``port``, where it is read.
            port: of a socket.
            letter: what is told.
            is_again: there was no answer. SGLang's sockets connect once: one that found nobody
                finds nobody later, so it is made anew.
        """
        with self._posting:
            try:
                address = NetworkAddress(host, port)
                endpoint = address.to_tcp()
                if is_again:
                    self._disconnect(endpoint)
                socket = self._connect(endpoint, is_ipv6=address.is_ipv6)
                # Not SGLang's way, which waits 30 s for one that has gone: the loop is everybody's.
                socket.send_multipart(frames_of(letter), zmq.NOBLOCK)
            except (zmq.ZMQError, ValueError) as error:
                logger.warning("kvd: nothing was told to %s:%d: %s", host, port, error)

    def _disconnect(self, endpoint: str) -> None:
        with self._socket_lock:
            for sockets in (self._socket_cache, self._monitor_cache):
                socket = sockets.pop(endpoint, None)
                if socket is not None:
                    socket.close(linger=0)

    @override
    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """The prefill engine has summed the whole prompt; here a part of it may be older."""
        return not get_disagg().disaggregation_decode_enable_radix_cache

    # ---- SGLang's memory -------------------------------------------------------------------------

    def deregister_buffer_to_engine(self) -> None:
        """SGLang is about to give its memory back to the device: no byte of it moves then."""
        self.link.shut("SGLang has released its memory")

    def register_buffer_to_engine(self) -> None:
        """It is there again."""
        self.link.open_again()

    def close(self) -> None:
        """Leave the daemon; repeatable."""
        self._is_closed.set()
        self._reader.join()
        self.link.close()

    def _read_letters(self) -> None:
        while not self._is_closed.is_set():
            if self.server_socket.poll(READ_EVERY_MS):
                letter = letter_of(self.server_socket.recv_multipart())
                if letter is None:
                    logger.warning("kvd: a letter that is none was dropped")
                    continue
                self.mail.came(letter)
                if isinstance(letter, RoomWanted | RoomOver):
                    self.post(letter.host, letter.port, self._heard(letter))

    def _heard(self, letter: RoomWanted | RoomOver) -> RoomHeard:
        is_over = isinstance(letter, RoomOver)
        return RoomHeard(letter.room, letter.life, is_over=is_over, engine=self._engine)


class RoomSide(Generic[H]):
    """What senders and receivers have in common, before SGLang's own class of each."""

    _handoff: H | None = None
    _is_second = False
    """Its room is another request's: SGLang's tables, which go by room, are that one's."""
    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any

    def _takes_room(self, handoff: H) -> bool:
        """Whether the room is this request's, which goes on by ``handoff`` then."""
        if not self.kv_mgr.mail.open(self.bootstrap_room, handoff.read):
            self._is_second, self.conclude_state = True, KVPoll.Failed
            return False
        self._handoff = handoff
        return True

    def poll(self) -> Any:
        """How far it is; failed only when no byte of its pages moves."""
        handoff = self._handoff
        if self.conclude_state is None and handoff is not None:
            _take(self, handoff)
        return _said(super().poll(), handoff)  # type: ignore[misc]

    def clear(self) -> None:
        """It is over for SGLang."""
        if not self._is_second:
            self._let_go("SGLang has forgotten it")
            super().clear()  # type: ignore[misc]

    def failure_exception(self) -> None:
        """Raise why it has failed; its pages are free then."""
        if self._is_second:
            raise KVTransferError(self.bootstrap_room, SECOND.format(self.bootstrap_room))
        self._let_go("it has failed on another rank")
        super().failure_exception()  # type: ignore[misc]

    def _let_go(self, why: str) -> None:
        if self._handoff is not None:
            self._handoff.free_pages(why)
            is_answered = self._handoff.stage is not HandoffStage.DONE
            self.kv_mgr.mail.close(self.bootstrap_room, is_answered=is_answered)


class KvdSender(RoomSide[OutgoingKV], CommonKVSender):
    """A request of the prefill engine."""

    _early_send_wait_event: Any

    def tell_prompt(self, req: Any) -> None:
        """Which prompt it is; kvd's plugin says it."""
        if self.conclude_state is not None or not self._has_room():
            return
        terms = self.kv_mgr.terms_of(self.bootstrap_room, req)
        outgoing = OutgoingKV(self.kv_mgr.link, terms, self.kv_mgr)
        if self._takes_room(outgoing):
            outgoing.start()

    def _has_room(self) -> bool:
        return bool(self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Failed)

    @override
    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object | None = None,
    ) -> None:
        """Copy these pages, behind those of the calls before."""
        outgoing = self._handoff
        if outgoing is None or self.conclude_state in {KVPoll.Success, KVPoll.Failed}:
            return
        first = self.curr_idx
        self.curr_idx += len(kv_indices)
        is_last = self.curr_idx == self.num_kv_indices
        event, self._early_send_wait_event = self._early_send_wait_event, None
        metadata = self.kv_mgr.rows.read(self.aux_index) if is_last else None
        outgoing.put(PageChunk(first, [int(page) for page in kv_indices], event, metadata))
        self._record_transfer_indices(kv_indices, state_indices)

    @override
    def abort(self) -> None:
        """SGLang gives it up; its pages are free then."""
        if not self._is_second:
            super().abort()
            self._let_go("it was aborted")


class KvdReceiver(RoomSide[IncomingKV], CommonKVReceiver):
    """A request of the decode engine."""

    def tell_prompt(self, req: Any) -> None:
        """Which prompt it is; kvd's plugin says it."""
        if self.conclude_state is not None:
            return
        mgr = self.kv_mgr
        terms = mgr.terms_of(self.bootstrap_room, req)
        self._takes_room(IncomingKV(mgr.link, terms, mgr))

    @override
    def init(self, prefill_dp_rank: int) -> None:
        """Look the prefill engine up; one of unlike ranks is told so, and waits for nothing."""
        super().init(prefill_dp_rank)
        if self._handoff is None or self.conclude_state is not None:
            return
        # Of unlike ranks there may be several. SGLang has what one of them says of a request said
        # of all.
        self._handoff.meets(*_address_of(self.bootstrap_infos[0]), self._look_up)
        there, here = _ranks_of(self.prefill_info), _ranks_of(self.kv_mgr)
        if there != here:
            why = UNLIKE_RANKS.format(there, here)
            self._handoff.give_up(why)
            _failed(self, why)

    def _look_up(self) -> tuple[str, int] | None:
        """Where the prefill engine reads letters now; None: its server does not say."""
        self.invalidate_cached_bootstrap_infos()
        [cp], [tp], [pp] = self.target_cp_ranks, self.target_tp_ranks, self.target_pp_ranks
        found = self._get_bootstrap_info_from_server(self.prefill_dp_rank, cp, tp, pp)
        return None if found is None else _address_of(found)

    @override
    def _register_kv_args(self) -> bool:
        """Nothing of the pool is told to the other engine: the daemons compare theirs."""
        return True

    @override
    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Have these pages filled."""
        incoming, rows = self._handoff, self.kv_mgr.rows
        if incoming is None or aux_index is None:
            _failed(self, "kvd was not told which prompt it is: its plugin must be loaded")
            return
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError(NOT_SERVED.format("pages that do not lie in one pool"))
        first = (decode_prefix_len or 0) // self.kv_mgr.kv_args.page_size
        n_pages = len(incoming.terms.prompt.keys) - first
        if len(kv_indices) != n_pages:
            _failed(self, f"SGLang gives {len(kv_indices)} pages for {n_pages} of the prompt")
            return
        incoming.fill(
            first,
            [int(page) for page in kv_indices],
            lambda metadata: rows.write(aux_index, metadata),
        )
        self.init_time = time.time()

    @override
    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Its pages are free then, and the prefill engine is told."""
        self._let_go("the decode engine has aborted it")


class KvdBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own, as it is."""


# ---- for both sides ------------------------------------------------------------------------------


def _address_of(found: Any) -> tuple[str, int]:
    """Of a rank, as SGLang's bootstrap server tells it."""
    return found["rank_ip"], int(found["rank_port"])


def _ranks_of(engine: Any) -> tuple[int, int, int]:
    return (engine.attn_tp_size, engine.attn_cp_size, engine.pp_size)


def _take(side: Any, handoff: RoomHandoff) -> None:
    """Write down for SGLang how far it is; in the thread of its scheduler alone."""
    if handoff.stage is HandoffStage.FAILED:
        _failed(side, handoff.why)
    else:
        side.kv_mgr.update_status(side.bootstrap_room, SAID_STAGES[handoff.stage])


def _failed(side: Any, why: str) -> None:
    with side.kv_mgr.failure_lock:
        side.kv_mgr.failure_records.setdefault(side.bootstrap_room, why)
    side.kv_mgr.update_status(side.bootstrap_room, KVPoll.Failed)


def _said(status: Any, handoff: RoomHandoff | None) -> Any:
    """A failure is said when no byte moves; until then it is on its way."""
    if status != KVPoll.Failed or handoff is None or handoff.give_up("SGLang has given it up"):
        return status
    return KVPoll.Transferring


def prompt_of(req: Any, tokens: array[int], page_size: int) -> PromptKeys:
    """The keys of a request's pages: SGLang's names of whole ones, as its storages have them."""
    n_whole = len(tokens) // page_size * page_size
    seed = storage_namespace_seed(req.extra_key, req.cache_salt)
    names = get_hash_str(tokens[:n_whole], seed, page_size) if n_whole else []
    is_shared = not req.skip_radix_cache_insert and req.input_embeds is None
    keys = keys_of_prompt(names, tokens[n_whole:].tobytes(), bytes.fromhex(seed or ""))
    return PromptKeys(keys, is_shared)


def tell_prompts() -> None:
    """Have SGLang's queues tell each request of ours which prompt it is; repeatable."""
    for target, tell in (
        (f"{QUEUES}.prefill.PrefillBootstrapQueue.create_sender", _tell_sender),
        (f"{QUEUES}.decode.DecodePreallocQueue._create_receiver_and_enqueue", _tell_receiver),
    ):
        if target not in _told_by:
            _told_by.add(target)
            HookRegistry.register(target, tell, HookType.AFTER)
    HookRegistry.apply_hooks()


def _tell_sender(_made: object, _queue: object, req: Any, *_args: object, **_how: object) -> None:
    if isinstance(req.disagg_kv_sender, KvdSender):
        req.disagg_kv_sender.tell_prompt(req)


def _tell_receiver(made: Any, _queue: object, req: Any, *_args: object, **_how: object) -> None:
    if isinstance(made.kv_receiver, KvdReceiver):
        made.kv_receiver.tell_prompt(req)


def _why_not_served(args: Any, server_args: Any) -> str:
    """What of it would be missing on the other side; empty: nothing."""
    parallel = get_parallel()
    found = {
        "states beside KV (" + ", ".join(kind.value for kind in args.state_types) + ")": bool(
            args.state_types
        ),
        "pools of a model that drafts (--speculative-algorithm)": bool(args.num_draft_entries),
        "stages of a pipeline (--pp-size)": parallel.pp_size > 1,
        "ranks of a context (--attn-cp-size)": parallel.attn_cp_size > 1,
        "ranks of a decode context (--dcp-size)": parallel.attn_dcp_size > 1,
        "KV that is divided among ranks (--enable-kv-cache-sharding)": (
            parallel.enable_kv_cache_sharding
        ),
        "adapters (--enable-lora; SGLang draws a name for each in each server)": bool(
            attribute(server_args, "enable_lora")
        ),
        "sparse KV in host memory (--enable-hisparse)": bool(
            attribute(server_args, "enable_hisparse")
        ),
        "rows of metadata on a device (SGLANG_MOONCAKE_CUSTOM_MEM_POOL)": (
            envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() is not None
        ),
    }
    return "; ".join(what for what, is_so in found.items() if is_so)


def _rank_of(server_args: Any, *, is_mla: bool) -> HiCacheStorageConfig:
    """Which part of the model this rank has, as SGLang tells a storage."""
    parallel = get_parallel()
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        attn_cp_rank=parallel.attn_cp_rank,
        attn_cp_size=parallel.attn_cp_size,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=attribute(server_args, "served_model_name"),
    )
