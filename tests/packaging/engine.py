"""An engine of any environment, run by its Python: it talks to a daemon and writes its memory.

``python -I engine.py CLIENT_ENDPOINT``; what it says on the standard output is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np

import kvd
import kvd.client

TOKENS = list(range(100, 164))
PAGE = 16


def main(endpoint: str) -> None:
    """Lease a prompt, write its pages with numpy, leave it cached, and find it again."""
    with kvd.client.connect_sync(endpoint, name="light-engine") as node:
        pool = node.pool("main")
        arrays = pool.arrays("kv", layer=1)
        before = node.match(TOKENS).tokens
        lease = node.lease(TOKENS)
        written = arrays["k"][lease.pages]
        written[:] = np.arange(written.size).reshape(written.shape) % 251
        arrays["k"][lease.pages] = written
        lease.release(())
        again = node.lease(TOKENS)
        said = {
            "kvd": kvd.__file__,
            "before": before,
            "after": node.match(TOKENS).tokens,
            "prefix": again.prefix_len,
            "kept": bool((pool.arrays("kv", layer=1)["k"][again.pages] == written).all()),
            "shape": list(arrays["k"].shape),
            "dtype": str(arrays["k"].dtype),
            "numpy": np.__version__,
            "tensor": None,
        }
        again.release()
        try:
            said["tensor"] = [str(pool.layer(1)[0].dtype), list(pool.layer(1)[0].shape)]
        except kvd.client.KvdError as error:
            said["tensor"] = str(error)
        said["torch"] = importlib.util.find_spec("torch") is not None
        del arrays
    print(json.dumps(said))  # noqa: T201 - this is its answer


if __name__ == "__main__":
    main(sys.argv[1])
