"""An engine in thirty lines: what its node has of a prompt is not computed, and the rest is shared.

    python smallest.py [ENDPOINT]

It computes in the pages themselves. ENDPOINT is the daemon's client socket.
"""

from __future__ import annotations

import sys

import model
import numpy as np

from kvd.client import KvdError, SyncNode, connect_sync

PROMPT = np.arange(1000, 1100)  # 100 token ids: six whole pages of 16, and a part of one


def answer(node: SyncNode, tokens: np.ndarray) -> None:
    """One request. Whatever goes wrong in it, its lease ends."""
    memory, whose = model.memory_of(node.pool("main")), model.NAMESPACE
    print("match:", node.match(tokens, namespace=whose).tokens, "tokens are cached")  # for now
    lease = node.lease(tokens, namespace=whose, deadline_s=0)  # they stay; a page for the others
    try:
        model.compute(memory, lease.pages, tokens, lease.prefix_len)  # never what is below that
        lease.commit()  # the KV of all tokens is written: others find it from now on
        print("lease:", lease.prefix_len, "tokens were there, the rest is computed;", end=" ")
        print(model.wrong(memory, lease.pages, tokens), "of", len(tokens), "are wrong")
    finally:
        lease.leave()  # its pages are somebody else's from here on; what was committed is cached


def main() -> None:
    """Serve one request, with kvd or without."""
    try:
        with connect_sync(
            *sys.argv[1:], name="smallest", within_s=1.0, on_unreachable="miss"
        ) as node:
            answer(node, PROMPT)
    except KvdError as error:  # no daemon, one that has ended, no room: each costs a prefill
        print("computed without kvd:", error.code)


if __name__ == "__main__":
    main()
