"""transformers with the node's prefix cache: what it has of a prompt is not computed.

    with kvd.connectors.transformers.node(model):
        out = model.generate(ids, max_new_tokens=64)

The model computes in a cache of this process, as without kvd; what the node has of the prompt is
copied into it before, and what was computed is copied to the node's pages afterwards. A lease lasts
as long as such a copy: while the model computes, nothing of the node's is held, and nothing of its
memory is read. So a daemon that ends, hangs, is full or refuses costs a prefill, and no token.

Read in this order:

- ``generate``: what a script sees, and what happens around a ``generate``;
- ``cache``: the cache that the model is given;
- ``layout``: which of its tensors is which page of the pool, and the pool that a model needs;
- ``copies``: from pages, and to them;
- ``batches``: the same for prompts of ``generate_batch``, in blocks of transformers' own;
- ``cache_link``: what is asked of the daemon, and when;
- ``weights``: whose KV it is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.connectors.transformers.cache import KvdCache
    from kvd.connectors.transformers.generate import GenerateNode, node
    from kvd.connectors.transformers.layout import pool_section

__all__ = ["GenerateNode", "KvdCache", "node", "pool_section"]

_HOMES = {
    "GenerateNode": "generate",
    "KvdCache": "cache",
    "node": "generate",
    "pool_section": "layout",
}


def __getattr__(name: str) -> object:
    """Torch and transformers are imported when something of theirs is asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    found: object = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return vars(found)[name]
