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
- ``backend``: the two behind SGLang's interface. This module alone imports SGLang.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.connectors.sglang.backend import KvdHiCache

__all__ = ["KvdHiCache"]


def __getattr__(name: str) -> object:
    """The engine is imported when its storage is asked for, and not before."""
    if name == "KvdHiCache":
        return importlib.import_module("kvd.connectors.sglang.backend").KvdHiCache
    raise AttributeError(name)
