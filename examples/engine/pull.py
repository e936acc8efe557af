"""A prefix that another node has: pulled from there, with no engine at the other end.

    python pull.py ENDPOINT SOURCE_ENDPOINT

An engine of the second node computes a prompt there. One of the first node, where a longer prompt
begins with it, has its KV brought over, and computes what comes behind.
"""

from __future__ import annotations

import sys

import model
import numpy as np

from kvd.client import KvdError, SyncLease, SyncNode, connect_sync

SHARED = np.arange(3000, 3256)
PROMPT = np.append(SHARED, np.arange(77))


def compute(node: SyncNode, lease: SyncLease, tokens: np.ndarray, have: int, known: int) -> str:
    """Compute what is behind ``have``, and share it; ``known``: tokens that the lease knows."""
    memory = model.memory_of(node.pool("main"))
    try:
        model.compute(memory, lease.pages, tokens, have)
        lease.commit(tokens[known:])
        return f"{model.wrong(memory, lease.pages, tokens)} of {len(tokens)} tokens are wrong"
    finally:
        lease.leave()


def answer(node: SyncNode, tokens: np.ndarray, source: str) -> None:
    """A prompt of which the other node may have more than this one."""
    try:
        pull = node.receive(tokens, source=source, namespace=model.NAMESPACE, deadline_s=5)
        pull.done()  # An engine polls: ``begin_receive`` in one step, ``pull.poll()`` in others.
        lease, have, known = pull.lease, pull.n_tokens, pull.n_tokens
        print(f"pulled: {have} tokens are here, {pull.prefix_len} were before")
    except KvdError as error:  # The other node is gone, or serves enough pulls already.
        print("not pulled:", error.code)
        lease = node.lease(tokens, namespace=model.NAMESPACE, deadline_s=0)
        have, known = lease.prefix_len, len(tokens)
    print("decode:", compute(node, lease, tokens, have, known))


def main(endpoint: str, source_endpoint: str) -> None:
    """Compute there, pull from here."""
    source = "prefill-0"
    try:
        with connect_sync(source_endpoint, name="prefill", within_s=1.0) as node:
            source = node.name
            lease = node.lease(SHARED, namespace=model.NAMESPACE)
            print("prefill:", compute(node, lease, SHARED, lease.prefix_len, len(SHARED)))
    except KvdError as error:
        print("nothing was computed there:", error.code)
    try:
        with connect_sync(endpoint, name="decode", on_unreachable="miss") as node:
            answer(node, PROMPT, source)
    except KvdError as error:
        print("computed without kvd:", error.code)


if __name__ == "__main__":
    main(*sys.argv[1:])
