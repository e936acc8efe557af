"""SGLang's storage for HiCache: the node's pool behind the pages that SGLang keeps in host memory.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvd", "interface_v1": 1,
      "module_path": "kvd.connectors.sglang", "class_name": "KvdHiCache",
      "hicache_storage_pass_prefix_keys": true}'

SGLang names a page by a hash of its tokens and of all before them. Such a chain of names is looked
up, saved and loaded as a prompt of keys, in a namespace that no unlike engine has; the bytes go
between SGLang's host memory and the pool by the client's mover. Whatever the daemon does not do is
a page that SGLang computes.

Read in this order:

- ``host_pages``: where the pages of a host pool of SGLang lie, and the pool that they need;
- ``identity``: whose pages these are;
- ``chains``: SGLang's names of pages, as keys;
- ``page_store``: pages by their chain, looked up, saved and loaded;
- ``storage_link``: the session with the daemon, and how long anything of it may take;
- ``backend``: the two behind SGLang's interface for a storage of host pages;
- ``linker``: the same store behind SGLang's interface for device pages without host pages.

``backend``, ``linker`` and the plugin here alone import SGLang.
"""

from __future__ import annotations

import enum
import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.connectors.sglang.backend import KvdHiCache
    from kvd.connectors.sglang.linker import KvdLinker

__all__ = ["KvdHiCache", "KvdLinker", "register"]

MATCH: Final = (
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.match"
)
"""Of SGLang's tree: what asks a linker about a prompt, whose start it does not tell."""


UTILS: Final = "sglang.srt.disaggregation.utils"

TRANSFERS: Final = "kvd"
"""What ``--disaggregation-transfer-backend`` has for ours."""


def register() -> None:
    """The entry point ``sglang.srt.plugins``: who changes weights is seen, and what is matched."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from kvd.connectors.sglang.identity import UPDATES, weight_changes  # noqa: PLC0415

    for target in UPDATES:
        HookRegistry.register(target, weight_changes.begin, HookType.BEFORE)
    HookRegistry.register(MATCH, _tell_linker, HookType.BEFORE)
    _add_transfers()
    weight_changes.is_watched = True


def _add_transfers() -> None:
    """The sixth of SGLang's backends of transfers: its enumeration, its flag, and its classes."""
    from sglang.srt.arg_groups.choices import (  # noqa: PLC0415
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if TRANSFERS not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([TRANSFERS])
    known = {member.name: member.value for member in TransferBackend}
    known[TRANSFERS.upper()] = TRANSFERS
    # A class anew: an enumeration that has members cannot be added to.
    wider = enum.Enum("TransferBackend", known, module=UTILS)  # type: ignore[misc]
    HookRegistry.register(f"{UTILS}.TransferBackend", wider, HookType.REPLACE)
    HookRegistry.register(f"{UTILS}.get_kv_class", _kv_class, HookType.AROUND)


def _kv_class(known: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Ours where it is ours; else SGLang's."""
    if transfer_backend.value != TRANSFERS or class_type.value == "kvargs":
        return known(transfer_backend, class_type)
    from kvd.connectors.sglang import disaggregation  # noqa: PLC0415

    return {
        "manager": disaggregation.KvdTransfer,
        "sender": disaggregation.KvdSender,
        "receiver": disaggregation.KvdReceiver,
        "bootstrap_server": disaggregation.KvdBootstrapServer,
    }[class_type.value]


def _tell_linker(wrapper: Any, key: Any, req: Any, result: object) -> None:
    """A linker of kvd's is told the whole prompt, before it is asked about its end."""
    from kvd.connectors.sglang.linker import KvdLinker  # noqa: PLC0415

    linker = wrapper.cache_linker
    if isinstance(linker, KvdLinker):
        linker.tell_prompt(req.rid, key.maybe_to_bigram_view(wrapper.cache.tree_core.is_eagle)[0])


def __getattr__(name: str) -> object:
    """The engine is imported when its storage is asked for, and not before."""
    if name == "KvdHiCache":
        return importlib.import_module("kvd.connectors.sglang.backend").KvdHiCache
    if name == "KvdLinker":
        return importlib.import_module("kvd.connectors.sglang.linker").KvdLinker
    raise AttributeError(name)
