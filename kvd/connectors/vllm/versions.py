"""The versions of vLLM: which were run, and what the older ones of these have not.

All that is known of a version is here, or in the figures of a test that names it; the rest of the
connector speaks to the newest. These things came by and by:

- before 0.30 a load that fails is told by its blocks, not by its request, and the scheduler's half
  is given the pool of blocks, not who manages it;
- before 0.29 the layout of the KV cache has no name of its own kind;
- before 0.32 vLLM does not ask where a hit came from;
- before 0.33 it does not say when an engine that sleeps gives the memory of its blocks away.

Read without vLLM, this module has stand-ins for its types.
"""

from __future__ import annotations

import enum
import inspect
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from kvd.connectors.attributes import attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvd.connectors.vllm.orders import StepOrders

    Rows = Callable[[str], Sequence[Sequence[int]]]

__all__ = ["CacheHitSource", "KVConnectorTransferResults"]
"""Of vLLM, or in their place."""

TESTED: Final = ((0, 25), (0, 26), (0, 27), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32))
"""Series that were run, major and minor, the oldest first: see ``tests/engines/versions.json``."""

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
except ImportError:
    SAYS_WHEN_IT_SLEEPS = False
else:
    SAYS_WHEN_IT_SLEEPS = "unregister_kv_caches" in vars(KVConnectorBase_V1)
"""Whether a connector hears that memory of blocks is given away."""

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    # Before 0.30. Of sets too, with the same names.
    import dataclasses

    @dataclasses.dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        """What has become of transfers since the last time, by request."""

        finished_sending: set[str]
        finished_recving: set[str]
        failed_recving: set[str]

    HEARS_OF_REQUESTS = False
else:
    HEARS_OF_REQUESTS = True
"""Whether a load that failed is told by its request; if not, by its blocks."""

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:

    class CacheHitSource(enum.Enum):  # type: ignore[no-redef]
        """Before 0.32 nobody asks."""

        HOST = "host"
        P2P = "p2p"
        DISK = "disk"


try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError:
    LAYOUTS: frozenset[str] = frozenset()
    """Names of layouts that can be asked for."""
else:
    LAYOUTS = frozenset(KVCacheLayout.__members__)


def dotted(version: tuple[int, ...]) -> str:
    """As it is written."""
    return ".".join(map(str, version))


def tested() -> str:
    """Those that were run, in words."""
    return ", ".join(map(dotted, TESTED))


def untested(version: str) -> str:
    """What there is to say of a version that was not run; empty: it was."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) in TESTED:
        return ""
    return f"vLLM {version}: kvd's connector was tested with {tested()}"


def layout_name(cache_config: Any) -> str:
    """Of the engine's KV cache, in the words of its version."""
    try:
        return str(cache_config.kv_cache_layout)
    except AttributeError:
        # Before 0.29 each backend has one of its own, NHD or HND.
        from vllm.v1.attention.backends.utils import get_kv_cache_layout  # noqa: PLC0415

        return str(get_kv_cache_layout())


@runtime_checkable
class BindingScheduler(Protocol):
    """vLLM's, where it is made."""

    kv_cache_manager: Any


def manager_of(block_pool: object) -> Any:
    """The ``KVCacheManager`` of that pool: before 0.30 vLLM's scheduler gives the pool alone.

    It does so where it is made, so it is among those who call.

    Raises:
        LookupError: nobody who calls has it.
    """
    for caller in _callers():
        if isinstance(caller, BindingScheduler):
            manager = caller.kv_cache_manager
            if manager is not None and manager.block_pool is block_pool:
                return manager
    raise LookupError("vLLM's scheduler has no KV cache manager of the block pool that it binds")


def _callers() -> Iterator[object]:
    """The objects whose methods have called this module's, the nearest first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


@runtime_checkable
class LoadingEngine(Protocol):
    """vLLM's core, where it makes its scheduler."""

    model_executor: Any


def _engine() -> LoadingEngine | None:
    """The one that makes what calls this module; None: no such engine is among those who call."""
    return next((one for one in _callers() if isinstance(one, LoadingEngine)), None)


def hear_of_adapters(heard: Callable[[Any], None], removed: Callable[[int], None]) -> bool:
    """Have ``heard`` told of each adapter that the engine loads on its user's word, before it does.

    And ``removed`` of each, by number, that it drops on such a word.

    Its requests name an adapter by number and path, and one may be loaded in place while they run.
    No vLLM tells that to a connector. The engine that does it makes its scheduler, so it is among
    those who call.

    Returns:
        Whether it is told: not where nobody who calls is such an engine.
    """
    engine = _engine()
    if engine is None:
        return False
    executor = engine.model_executor
    load = executor.add_lora

    def told(adapter: Any) -> Any:
        heard(adapter)
        return load(adapter)

    executor.add_lora = told
    remove = executor.remove_lora

    def told_of_end(number: int) -> Any:
        removed(number)
        return remove(number)

    executor.remove_lora = told_of_end
    return True


KEEPS_WEIGHTS: Final = frozenset(
    {
        *("check_health", "profile", "annotate_profile", "synchronize_device", "wake_up"),
        *("pin_lora", "list_loras", "get_supported_tasks"),
        *("reset_mm_cache", "reset_encoder_cache", "release_late_interaction_query_cache"),
        *("compute_weight_checksums", "save_sharded_state", "save_tensorized_model"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("supports_draft_weight_updates", "execute_dummy_batch", "update_max_model_len"),
        *("get_cache_block_size_bytes", "get_compilation_match_table", "get_kv_cache_spec"),
        *("get_model_inspection", "get_encoder_timing_stats", "get_supported_kv_cache_layouts"),
    }
)
"""What can be called of all workers, and leaves their weights what they are; all else may not.

Adapters that come and go so are not heard of: see ``hear_of_adapters``."""


@runtime_checkable
class CallingEngine(Protocol):
    """VLLM's core, where its user has all workers called."""

    def collective_rpc(self, method: Any, *args: Any, **more: Any) -> Any:
        """What each answers."""
        ...


KEPT_LEVELS: Final = (0, 1)
"""Of sleep: the engine that wakes has its weights again. Behind any other one it has none."""


def hear_of_weights(heard: Callable[[str], None], gone: Callable[[str], None]) -> bool:
    """Have ``heard`` told of each call that may change the model's weights, before it is made.

    Args:
        heard: is given what is called: the name of a worker's method, or of a function.
        gone: is told in its place, where the engine goes to sleep and gives its weights away. That
            is a call of the executor's own.

    Returns:
        Whether it is told, as ``hear_of_adapters``.
    """
    engine = _engine()
    if not isinstance(engine, CallingEngine):
        return False
    call, executor = engine.collective_rpc, engine.model_executor

    def sleeps(level: int = 1) -> None:
        if level not in KEPT_LEVELS:
            gone(f"sleep at level {level}")

    def told(
        method: Any,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = method if isinstance(method, str) else "a function"
        if name == "sleep":
            sleeps(*args, **(kwargs or {}))
        elif name not in KEEPS_WEIGHTS:
            heard(name)
        return call(method, timeout, args, kwargs)

    engine.collective_rpc = told
    go_to_sleep = executor.sleep

    def told_of_sleep(level: int = 1) -> Any:
        sleeps(level)
        return go_to_sleep(level)

    executor.sleep = told_of_sleep
    return True


try:
    from vllm.lora.worker_manager import WorkerLoRAManager
except ImportError:
    _READS: Callable[[Any, Any], Any] | None = None
else:
    _READS = WorkerLoRAManager._load_adapter  # noqa: SLF001 - there is no other place


def _adapters_by_name() -> bool:
    """Whether vLLM's own cache knows adapters by their names alone, whatever their paths."""
    try:
        from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415 - a test plays it
            _gen_lora_extra_hash_keys,
        )
    except ImportError:
        return True
    adapter = SimpleNamespace(lora_name="name", lora_path="path", path="path", name="name")
    return "path" not in repr(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter)))


ADAPTERS_BY_NAME = _adapters_by_name()


def see_adapters_read(around: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Have each adapter that vLLM's worker in this process reads be read by ``around``.

    It is given what is read, and what does it. No vLLM tells that to a connector. Who is told is
    the last that asked. What is read is vLLM's own from then on, whatever becomes of the files.
    """
    reads = _READS
    if reads is None:
        return

    def seen(manager: Any, adapter: Any) -> Any:
        return around(adapter, lambda: _unmapped(reads(manager, adapter)))

    WorkerLoRAManager._load_adapter = seen  # noqa: SLF001 - as above


@runtime_checkable
class PinnableTensor(Protocol):
    """Of torch."""

    def is_pinned(self) -> bool:
        """Whether it lies in memory that a device reads; that is no file."""
        ...

    def clone(self) -> PinnableTensor:
        """As much in memory of its own."""
        ...


def _unmapped(model: Any) -> Any:
    """The same adapter, none of whose weights is a file that is mapped.

    vLLM copies them to its layers each time that the adapter is given a place there. Where memory
    is not pinned, as on a CPU, it copies them from the file itself, and whoever writes to that has
    changed them.
    """
    more = attribute(model, "modules_to_save") or {}
    for weights in (*model.loras.values(), *more.values()):
        for name, found in list(vars(weights).items()):
            if isinstance(found, PinnableTensor) and not found.is_pinned():
                setattr(weights, name, found.clone())
    return model


ONE_GROUP_ONLY: Final = (
    "the layers of this model are in several groups, and before 0.30 vLLM ends where a load of "
    "such a model fails: kvd's connector serves it there with --disable-hybrid-kv-cache-manager"
)

NO_SLEEP: Final = (
    "--enable-sleep-mode, or --enable-cumem-allocator, with which an engine can sleep too: before "
    "0.33 vLLM tells no connector when one that sleeps gives the memory of its blocks away, and a "
    "copy may be under way: run it without kvd, or without these"
)


def not_served(config: Any, n_groups: int) -> str:
    """What this version does not tell a connector that such an engine needs; empty: nothing.

    Args:
        config: of vLLM.
        n_groups: in how many groups its layers are.
    """
    if n_groups > 1 and not HEARS_OF_REQUESTS:
        return ONE_GROUP_ONLY
    return NO_SLEEP if _can_sleep(config.model_config) and not SAYS_WHEN_IT_SLEEPS else ""


def _can_sleep(model: Any) -> bool:
    """Whether its memory can be given away: vLLM asks for no more than how it was allocated."""
    if model is None:
        return False
    return model.enable_sleep_mode or attribute(model, "enable_cumem_allocator") is True


class FailedBlocks:
    """Loads that fail, for a vLLM that hears of blocks: the same object in both halves.

    It computes anew from the first block that it hears of. So that is the first one that was to be
    loaded, and none that it has of its own cache, which other requests have too.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._local: dict[str, int] = {}
        """How many tokens of each that is looked up vLLM has itself."""
        self._waiting: dict[str, slice] = {}
        """In the scheduler's half, which blocks of each that waits for a load are to be filled."""
        self._ordered: dict[str, Sequence[int]] = {}
        """In the workers', the blocks of each load."""
        self._failed: set[int] = set()

    def looked_up(self, request_id: str, local_tokens: int) -> None:
        """VLLM has so many of its tokens itself."""
        self._local[request_id] = local_tokens

    def waits(self, request_id: str, n_tokens: int) -> None:
        """It waits until so many tokens behind those are loaded."""
        first = self._local.get(request_id, 0)
        self._waiting[request_id] = slice(first // self._size, -(-(first + n_tokens) // self._size))

    def over(self, requests: Iterable[str]) -> None:
        """These do not wait any more."""
        for request_id in requests:
            self._local.pop(request_id, None)
            self._waiting.pop(request_id, None)

    def of(self, failed: Iterable[str], rows: Rows) -> dict[str, tuple[int, ...]]:
        """By request, the blocks that nobody fills.

        Args:
            failed: requests whose load is not even ordered.
            rows: who has which blocks.
        """
        waiting = self._waiting
        return {name: tuple(rows(name)[0][waiting[name]]) for name in failed if name in waiting}

    def ordered(self, orders: StepOrders, failed: Mapping[str, Sequence[int]]) -> None:
        """The loads of this step, and those of it that fail as they come."""
        self._ordered.update(failed)
        for order in orders.loads:
            self._ordered[order.request] = order.blocks[0]

    def heard(self, results: KVConnectorTransferResults) -> None:
        """What vLLM is about to hear of requests."""
        for request_id in results.finished_recving:
            blocks = self._ordered.pop(request_id, ())
            if request_id in results.failed_recving:
                self._failed.update(blocks)

    def take(self) -> set[int]:
        """Blocks of loads that failed, once each."""
        failed, self._failed = self._failed, set()
        return failed
