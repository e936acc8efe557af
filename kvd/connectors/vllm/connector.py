"""The two halves behind vLLM's interface. With ``stats`` and ``versions`` it imports vLLM."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from kvd.client import KvdError, connect_sync
from kvd.connectors.attributes import attribute
from kvd.connectors.vllm.identity import (
    BlockPacking,
    adapter_rules,
    agreed,
    identity_of,
    packing_of,
)
from kvd.connectors.vllm.layout import (
    check_pages,
    check_stages,
    layer_groups,
    page_size_of,
    scheduled_sizes,
)
from kvd.connectors.vllm.log import logger
from kvd.connectors.vllm.media import MediaKeys
from kvd.connectors.vllm.options import options_of
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.stats import KvdPromMetrics, KvdStats
from kvd.connectors.vllm.under_way import SchedulerBlocks
from kvd.connectors.vllm.versions import (
    ADAPTERS_BY_NAME,
    HEARS_OF_REQUESTS,
    LAYOUTS,
    CacheHitSource,
    FailedBlocks,
    KVConnectorTransferResults,
    hear_of_adapters,
    hear_of_weights,
    layout_name,
    manager_of,
    not_served,
    see_adapters_read,
    untested,
)
from kvd.connectors.vllm.weights import Adapters, process_began_ns
from kvd.connectors.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvd.client import SyncNode
    from kvd.connectors.vllm.layout import LayerGroup
    from kvd.connectors.vllm.orders import StepOrders
    from kvd.connectors.vllm.weights import AdapterView

NAME: Final = "KvdConnector"

WISHED: Final = "BLHNC"
"""The layout of the KV cache that is asked for."""

UNNAMED: Final = "what this engine's KV is of is not known yet"

MOST_ENGINE_CHARS: Final = 59
"""Of an engine's id, in the name of its session."""


class Unfit(RuntimeError):
    """This engine cannot be served, and why; it does not start."""


class KvdMetadata(KVConnectorMetadata):
    """The orders of a step; ``unfilled``: by request, blocks that nobody fills: ``versions``."""

    def __init__(self, orders: StepOrders, unfilled: dict[str, tuple[int, ...]]) -> None:
        self.orders = orders
        self.unfilled = unfilled


class KvdWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers have answered, all ranks together; and how they pack, said once."""

    def __init__(self, report: StepReport, packings: tuple[BlockPacking, ...] = ()) -> None:
        self.report = report
        self.packings = packings

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What holds for both."""
        assert isinstance(other, KvdWorkerMetadata)
        return KvdWorkerMetadata(
            self.report.with_rank(other.report), self.packings + other.packings
        )


class KvdHandshake(KVConnectorHandshakeMetadata):
    """How a worker packs blocks, for the scheduler's half, before there are requests."""

    def __init__(self, packing: BlockPacking) -> None:
        self.packing = packing


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """A cache of the node behind vLLM's own, and handoffs between nodes."""

    _cache_hit_source = CacheHitSource.HOST
    _changed_by = ""
    """What was called that may have changed the model's weights since they were read."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        _show_log()
        self._options = options_of(transfer.kv_connector_extra_config)
        self._groups = _checked_groups(
            vllm_config, kv_cache_config, any_version=self._options.any_version
        )
        self._config = vllm_config
        self._media = MediaKeys(vllm_config, by_uuid=self._options.media == "uuid")
        self._n_blocks = kv_cache_config.num_blocks
        self._block_specs = [
            (group.layer_names, group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups
        ]
        block_size = page_size_of(self._groups)
        self._packing: BlockPacking | None = None
        """How this worker packs, until the scheduler's half has heard of it."""
        self._agreed: BlockPacking | None = None
        self._namespace = self._untold = ""
        """What the engine's KV is of; and the same, until the metrics have heard of it."""
        self._blocks = SchedulerBlocks(self._groups)
        self._failed = None if HEARS_OF_REQUESTS else FailedBlocks(block_size)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if role is KVConnectorRole.SCHEDULER:
            self._since_ns = process_began_ns()
            self._adapters = Adapters(
                since_ns=self._since_ns,
                rules=adapter_rules(vllm_config.lora_config),
                by_path=self._options.adapters == "path",
                room=_adapters_kept(vllm_config),
            )
            self._scheduler = SchedulerHalf(
                self._options,
                block_size=block_size,
                connect=lambda: self._connect(transfer.engine_id, kv_cache_config, ranks),
                blocks=self._blocks,
                ranks=ranks,
            )
            self._scheduler.arrivals.is_on = self._options.load_parts and self._failed is None
            self._hear_of_weights(self._scheduler)
            if vllm_config.lora_config is not None:
                self._hear_of_adapters(self._scheduler)
            self._scheduler.watch()
        else:
            self._worker = WorkerHalf(
                self._options,
                block_size=block_size,
                rank=_rank(parallel.tensor_parallel_size) if ranks > 1 else 0,
                ranks=ranks,
            )
            if vllm_config.lora_config is not None:
                self._worker.adapters.by_name = ADAPTERS_BY_NAME
                see_adapters_read(self._worker.adapters.read)

    # ---- the scheduler's half ----------------------------------------------------------------

    def _hear_of_weights(self, scheduler: SchedulerHalf) -> None:
        """Have it told of resets of vLLM's own cache, and of calls that change the weights."""
        self._blocks.on_reset = scheduler.fill_no_more
        self._blocks.on_tried = scheduler.changes.own_reset
        hear_of_weights(self._weights_change, self._weights_go)

    def _hear_of_adapters(self, scheduler: SchedulerHalf) -> None:
        """Have both told of what vLLM does with its adapters."""
        adapters = self._adapters
        adapters.by_name = ADAPTERS_BY_NAME
        adapters.on_other_weights = scheduler.forget_adapter
        adapters.on_doubt = scheduler.doubt_adapters
        adapters.numbers_here = scheduler.adapters_here
        scheduler.adapter_stays = adapters.stays
        # Its operations for these take -1, which stands for none, as the last place of all.
        scheduler.mixes_adapters = current_platform.is_cpu()

        def loads(adapter: AdapterView) -> None:
            """What is read is said in a step."""
            adapters.loads(adapter)
            scheduler.wants_word = True

        adapters.hears_of_loads = hear_of_adapters(loads, adapters.removes)

    def _connect(self, engine: str | None, cache: KVCacheConfig, ranks: int) -> SyncNode:
        """A session with a daemon whose pool fits; the workers know more of their blocks later."""
        # What tells data parallel engines apart stands at its end.
        name = f"vllm {(engine or '')[-MOST_ENGINE_CHARS:]}"
        kind = f"vllm {vllm.__version__}"
        node = connect_sync(
            self._options.endpoint or None, name=name, kind=kind, on_unreachable="miss"
        )
        try:
            check_pages(
                node.pool(self._options.pool),
                scheduled_sizes(cache.kv_cache_groups, self._groups),
                page_size=page_size_of(self._groups),
                ranks=ranks,
            )
        except BaseException:
            node.close()
            raise
        return node

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Who knows which blocks a request has, and counts who needs them."""
        self._blocks.bind(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Before 0.30 vLLM says no more than this."""
        self._blocks.bind(manager_of(gpu_block_pool))

    @property
    def requires_kv_delivery(self) -> bool:
        """Whatever does not come is computed."""
        return False

    def on_new_request(self, request: Request) -> None:
        """Look it up, so that the answer is here when it is scheduled."""
        self._half.kept_in("a request comes", None, self._arrived, request)

    def _arrived(self, request: Request) -> None:
        extra = self._media.of(request, self._half.block_size) if self._namespace else UNNAMED
        adapter = request.lora_request
        lora = None if adapter is None else self._adapters.ask(adapter)
        self._half.arrived(request, lora=lora, extra=extra)

    def _tell_of_adapters(self) -> None:
        """Those whose requests are neither cached nor looked up, and why."""
        while self._adapters.flaws:
            name, flaw = self._adapters.flaws.popitem()
            logger.warning("kvd does not cache what LoRA adapter %s computes: %s", name, flaw)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """How the workers pack; behind a connector of several this may be another one's."""
        self._name([told.packing for told in metadata.values() if isinstance(told, KvdHandshake)])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same, by stage of a pipeline and rank within it."""
        in_order = [metadata[place] for place in sorted(metadata)]
        self.set_xfer_handshake_metadata(dict(enumerate(in_order)))

    def _name(self, packings: list[BlockPacking]) -> None:
        """Everything that decides what the engine's KV is of is known now."""
        packing = agreed(packings)
        if packings and packing is None:
            tags = ", ".join(sorted({packing.tag for packing in packings}))
            logger.warning("kvd caches nothing: ranks of this engine pack unlike blocks: %s", tags)
        if not self._namespace and packing is not None:
            self._identify(packing)

    def _identify(self, packing: BlockPacking) -> None:
        """Say it to whoever asks for pages, to the log, and to the metrics."""
        self._agreed = packing
        found = identity_of(
            self._config,
            self._options,
            packing,
            block_specs=self._block_specs,
            version=vllm.__version__,
            since_ns=self._since_ns,
            environment=os.environ,
            snapshot=_snapshot,
            changed_by=self._changed_by,
        )
        if found.namespace == self._namespace:
            return
        if not self._namespace:
            # In host memory by processors, and of a device by its copy engine.
            n, device = self._options.copy_threads, self._config.device_config.device_type
            threads = f"{n} thread{'s' if n > 1 else ''} of each worker"
            mover = threads if device == "cpu" else f"the copy engine of {device}"
            logger.info(
                "kvd: pool %s at %s, namespace %s, blocks packed as %r, copied by %s",
                *(self._options.pool, self._options.endpoint or "this host's daemon"),
                *(found.namespace, packing.tag, mover),
            )
        self._half.name(found.namespace)
        self._namespace = self._untold = found.namespace
        logger.info("kvd namespace %s is of %s", found.namespace, found.in_words())
        for name, text in found.parts.items():
            logger.debug("kvd namespace %s: %s=%s", found.namespace, name, text)
        for why in found.alone:
            logger.warning(
                "kvd: what this engine caches is for itself alone, until it ends: %s", why
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``SchedulerHalf.matched``."""
        self._blocks.settled(request.request_id)
        if self._failed is not None:
            self._failed.looked_up(request.request_id, num_computed_tokens)
        return self._half.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See ``SchedulerHalf.given_blocks``."""
        if num_external_tokens:
            self._blocks.fills(request, num_external_tokens)
            if self._failed is not None:
                self._failed.waits(request.request_id, num_external_tokens)
        else:
            self._blocks.settled(request.request_id)
        self._half.given_blocks(request, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """How many of these lay in this node's pool, were sent for it, or read from a tier."""
        sent = self._half.sent_tokens(request.request_id, num_external_tokens)
        read = self._half.tier_tokens(request.request_id, num_external_tokens)
        found = {
            CacheHitSource.HOST: num_external_tokens - sent - read,
            CacheHitSource.P2P: sent,
            CacheHitSource.DISK: read,
        }
        return {source: n for source, n in found.items() if n}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step."""
        if self._adapters.flaws:
            self._tell_of_adapters()
        # How far each request was before is read of the request itself, where that is needed.
        orders = self._half.step(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
        )
        failed = self._failed
        return KvdMetadata(orders, failed.of(orders.failed, self._blocks.of) if failed else {})

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have done."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvdWorkerMetadata) and told.packings:
            self._name(list(told.packings))
        if isinstance(told, KvdWorkerMetadata) and told.report.adapters:
            self._adapters.read_by_workers(told.report.adapters)
        if connector_output.invalid_block_ids:
            self._half.spoiled(connector_output.invalid_block_ids)
        self._half.reported(told.report if isinstance(told, KvdWorkerMetadata) else None)
        for request_id in connector_output.finished_recving or ():
            self._blocks.filled(request_id)
        if self._failed is not None:
            self._failed.over(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """VLLM needs its blocks no more. Who copies them holds them; see ``under_way``."""
        self._blocks.settled(request.request_id, is_over=True)
        if self._failed is not None:
            self._failed.over([request.request_id])
        # Of one that was aborted vLLM passes the answer on to nobody.
        is_sound = request.status is not RequestStatus.FINISHED_ERROR
        is_heard = is_sound and request.status is not RequestStatus.FINISHED_ABORTED
        return self._half.finished(request, is_heard=is_heard, is_sound=is_sound)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, [])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All layers of a block in one stretch, where the attention backend has that.

        A copy engine moves one piece of 2 MiB faster than 32 of 64 KiB. vLLM goes by its backend's
        own layout where that has none, with a warning, which is spared where none has: on a CPU.
        Connectors side by side must ask for one layout or none, so one that only caches asks for
        none; whoever sets ``VLLM_KV_CACHE_LAYOUT`` is not asked against.
        """
        transfer = vllm_config.kv_transfer_config
        handoffs = transfer is None or options_of(transfer.kv_connector_extra_config).handoffs
        is_wished = handoffs and WISHED in LAYOUTS and not current_platform.is_cpu()
        return WISHED if is_wished else None

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed though nothing is to be computed."""
        return self._half.has_work

    def reset_cache(self) -> bool | None:
        """Drop what is cached of this model, for every engine of the node.

        False would end vLLM's pause or sleep in an error. A daemon that is not there is no reason:
        this engine uses nothing of before until the daemon has dropped it.
        """
        is_remembered = self._half.flush()
        if self._agreed is not None:
            # New weights may have been read from files that have changed since this engine began.
            self._identify(self._agreed)
        return is_remembered

    def _weights_change(self, by: str) -> None:
        """Something is about to be called that may change the model's weights."""
        self._changed_by = by
        self._adapters.all_go()
        needs_reset = self._half.weights_change(by)
        if not needs_reset and self._agreed is not None:
            self._identify(self._agreed)

    def _weights_go(self, by: str) -> None:
        """Something is about to be called that gives them away."""
        self._changed_by = by
        self._half.weights_go(by)

    # ---- the workers' half -------------------------------------------------------------------

    @property
    def _copier(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> StepOrders:
        told = self._get_connector_metadata()
        assert isinstance(told, KvdMetadata)
        return told.orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The blocks of each layer."""
        cache = self._config.cache_config
        self._packing = packing_of(
            kv_caches,
            self._config.compilation_config.static_forward_context,
            version=vllm.__version__,
            layout=layout_name(cache),
            cache_dtype=cache.cache_dtype,
        )
        try:
            self._copier.register(
                kv_caches, self._groups, n_blocks=self._n_blocks, tag=self._packing.tag
            )
        except KvdError as error:
            logger.error("kvd: %s", error)
            raise Unfit(str(error)) from None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether an engine may give its memory away while it sleeps; vLLM asks from 0.33 on."""
        return True

    def unregister_kv_caches(self) -> None:
        """The memory of the blocks is about to be given away; vLLM says so from 0.33 on."""
        self._copier.take_back()

    def restore_kv_caches(self) -> None:
        """It is there again, where it was; vLLM says so from 0.33 on."""
        self._copier.give_again()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End copies whose blocks this step gives to others, where they could not be held."""
        assert isinstance(kv_connector_metadata, KvdMetadata)
        self._copier.give_back(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Have blocks filled from pages, beside the steps."""
        self._copier.load(self._orders)
        if self._failed is not None:
            self._failed.ordered(self._orders, self._get_connector_metadata().unfilled)

    def has_connector_metadata(self) -> bool:
        """Whether vLLM is to ask at each layer of a step: it calls the two hooks below then."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer: whole blocks are, in ``wait_for_save``."""

    def wait_for_save(self) -> None:
        """Have pages filled from the blocks that this step writes; nothing is waited for."""
        self._copier.save(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Whose blocks are filled, and of whom they are not."""
        loaded, failed = self._copier.take_results()
        return KVConnectorTransferResults(
            finished_sending=self._copier.take_freed(),
            finished_recving=loaded,
            failed_recving=failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The same, as vLLM asks before 0.30; and ``get_block_ids_with_load_errors`` behind it."""
        found = self.get_transfer_results(finished_req_ids)
        if self._failed is not None:
            self._failed.heard(found)
        return found.finished_sending, found.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that failed, where vLLM does not hear of their requests."""
        return self._failed.take() if self._failed is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What has become of orders; and how blocks are packed, if that was not said before."""
        report, packing = self._copier.take_report(), self._packing
        if packing is None:
            return KvdWorkerMetadata(report) if report is not None else None
        self._packing = None
        return KvdWorkerMetadata(report or StepReport(), (packing,))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """How blocks are packed.

        A connector of several passes on the first answer to all of them, and those that take it for
        theirs fail: there the first step says it.
        """
        is_alone = has_kv_transfer_group() and get_kv_transfer_group() is self
        if self._packing is None or not is_alone:
            return None
        packing, self._packing = self._packing, None
        return KvdHandshake(packing)

    # ---- both --------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvdStats | None:
        """What has come of it since the last time."""
        if self._worker is not None:
            return KvdStats.of_copies(self._worker.counts)
        half, untold, self._untold = self._half, self._untold, ""
        found = None
        if any(vars(half.counts).values()):
            found = half.kept_in("its counts", None, KvdStats.of_requests, half.counts)
        return (found or KvdStats(data={})).with_namespace(untold) if untold else found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> KvdStats | None:
        """The same, from what travelled."""
        return KvdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdPromMetrics:
        """``vllm:kvd_*``."""
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Leave the daemon."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._adapters.close()
        if self._worker is not None:
            self._worker.close()


def register_connector() -> None:
    """Make the connector known by its name; repeatable."""
    with contextlib.suppress(ValueError):  # it is, in a process that loads plugins twice
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def _show_log() -> None:
    """Have the connector's lines written where vLLM's are, unless the user has said where.

    A handler of the root is no such word: a library's first warning puts one there, which writes
    warnings alone.
    """
    theirs, names = logging.getLogger("vllm"), logger.name.split(".")
    own = [logging.getLogger(".".join(names[: n + 1])) for n in range(len(names))]
    if any(said.handlers or said.level or not said.propagate for said in own):
        return
    for handler in theirs.handlers:
        logger.addHandler(handler)
    if theirs.handlers:
        logger.setLevel(theirs.getEffectiveLevel())
        logger.propagate = theirs.propagate


def _checked_groups(
    config: VllmConfig, cache: KVCacheConfig, *, any_version: bool
) -> tuple[LayerGroup, ...]:
    """The groups of layers of an engine that can be served; any other one is refused."""
    told = untested(vllm.__version__)
    if told and not any_version:
        raise Unfit(f'{told}; set "kvd.any_version": true to try')
    if told:
        logger.warning("%s; it is tried, since kvd.any_version says so", told)
    parallel, scheduler = config.parallel_config, config.scheduler_config
    stages = parallel.pipeline_parallel_size
    try:
        groups = layer_groups(
            cache.kv_cache_groups,
            context_ranks=parallel.prefill_context_parallel_size
            * parallel.decode_context_parallel_size,
            match_tokens=attribute(config.cache_config, "prefix_match_unit"),
            step_tokens=attribute(scheduler, "max_num_scheduled_tokens")
            or scheduler.max_num_batched_tokens,
        )
        if stages > 1:
            n_layers = config.model_config.get_total_num_hidden_layers()
            cut = [get_pp_indices(n_layers, stage, stages) for stage in range(stages)]
            check_stages([end - first for first, end in cut])
    except KvdError as error:
        raise Unfit(str(error)) from None
    if reason := not_served(config, len(groups)):
        raise Unfit(reason)
    return groups


def _adapters_kept(config: VllmConfig) -> int:
    """So many adapters vLLM keeps, once it has read them.

    Engines in step with others (data parallel ones of a model with experts) drop all in each empty
    step that they make for these.
    """
    if config.parallel_config.data_parallel_size > 1:
        return 0
    return attribute(config.lora_config, "max_cpu_loras") or 0


def _rank(tensor_ranks: int) -> int:
    """This worker's among all of its engine, as vLLM counts them: stage by stage."""
    stage: int = get_pp_group().rank_in_group
    return stage * tensor_ranks + int(get_tensor_model_parallel_rank())


def _snapshot(name: str, revision: str | None, directory: str | None) -> str | None:
    """Where the cache of the Hugging Face hub has a repository; None: it has not."""
    try:
        # As vLLM has found it itself; other versions do that elsewhere.
        from vllm.transformers_utils.repo_utils import hf_api  # noqa: PLC0415

        found: str = hf_api().snapshot_download(
            name, revision=revision, cache_dir=directory, local_files_only=True
        )
    except (ImportError, OSError, ValueError):
        return None
    return found


# Behind a connector of several vLLM looks for what it counts by this name alone, in a process that
# may have no plugins; whoever does that has imported the connector before.
register_connector()
