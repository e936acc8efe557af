"""vLLM's KV connector: a prefix cache of the node behind vLLM's own, and handoffs between nodes.

    --kv-transfer-config '{"kv_connector": "KvdConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvd.connectors.vllm", "kv_load_failure_policy": "recompute"}'

Read in this order:

- ``options``: what a user may set, and what is refused;
- ``identity``: whose KV an engine takes; and ``weights``, what their files tell of them;
- ``media``: what a prompt has beside its tokens, as images, and what that is found by;
- ``params``: what a router's ``kv_transfer_params`` say;
- ``orders``: what the scheduler's half tells the workers' in each step, and what these answer;
- ``tracked``: one request, as the scheduler's half knows it;
- ``scheduler``: that half, and what happens in a step. It knows nothing of tensors. Its rooms:
  ``sessions`` (who is spoken to), ``requests`` (which are here, and how one goes on alone),
  ``lookup`` (until a prompt is found), ``claims`` (until it has a lease), ``moves`` (what is copied
  in a step), ``under_way`` (until a copy is over, and vLLM's blocks meanwhile), ``held`` (until of
  a request that is over all is ordered), ``endings`` (until a lease is given back), ``resets``
  (what new weights end, until they have a new epoch);
- ``beside``, ``log``: work in threads, and lines in the engine's log;
- ``layout``: which bytes of vLLM's cache are which page of the pool;
- ``worker``: the half that has them copied;
- ``versions``: what the versions of vLLM have, and which were run;
- ``connector``: the two behind vLLM's interface. This module, ``stats`` and ``versions`` import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.connectors.vllm.connector import KvdConnector

__all__ = ["KvdConnector", "register"]


_MODULE = "kvd.connectors.vllm.connector"


def register() -> None:
    """Make the name ``KvdConnector`` known to vLLM: the entry point ``vllm.general_plugins``."""
    importlib.import_module(_MODULE).register_connector()


def __getattr__(name: str) -> object:
    """The engine is imported when its connector is asked for, and not before."""
    if name == "KvdConnector":
        return importlib.import_module(_MODULE).KvdConnector
    raise AttributeError(name)
