"""A tier of LMCache's server: its objects lie in the pool of the node's daemon.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvd.connectors.lmcache",
      "class_name": "KvdL2Adapter", "adapter_params": {}}'

LMCache keeps objects, each the KV of a chunk of tokens on one rank, in memory of its own, and asks
this tier for those that it lacks. Here an object is some pages, found by what LMCache calls it.

Read in this order:

- ``names``: what an object is called, and whose it is;
- ``objects``: holding, loading and storing some of them;
- ``tasks``: that in a thread of its own, for callers that never wait;
- ``adapter``: all of it behind LMCache's interface. This module alone imports LMCache.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.connectors.lmcache.adapter import KvdL2Adapter, KvdL2AdapterConfig

__all__ = ["KvdL2Adapter", "KvdL2AdapterConfig"]


def __getattr__(name: str) -> object:
    """LMCache is imported when it asks for its adapter, and not before."""
    if name in __all__:
        return vars(importlib.import_module(f"{__name__}.adapter"))[name]
    raise AttributeError(name)
