"""A scheduler that never waits for the daemon: begun in one step, looked for in later ones.

    python scheduler.py [ENDPOINT [REQUESTS]]

It computes in the pages themselves, a chunk of each request a step. A request that the daemon does
not serve, because it is gone, does not answer or has no room, is computed in memory of its own.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import model
import numpy as np

from kvd.client import KvdError, PendingCall, SyncLease, SyncNode, connect_sync

CHUNK = 64
"""Tokens of a request that are computed in one step."""

LOOK_S = 1.0
"""A daemon that is not there is looked for so often."""


@dataclass
class Request:
    """A prompt. ``asked``: for pages; ``lease``: it has them; ``why_alone``: it goes without."""

    number: int
    tokens: np.ndarray
    asked: PendingCall[SyncLease] | None = None
    lease: SyncLease | None = None
    why_alone: str = ""
    found: int = 0
    computed: int = 0
    wrong: int = 0

    def alone(self, why: str) -> None:
        """From the first token on: what was computed in pages went with them."""
        self.asked, self.lease, self.why_alone, self.computed = None, None, why, 0


class Scheduler:
    """One engine's. ``node``: the session, while there is one."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(1)
        self._connecting: Future[tuple[SyncNode, model.Memory]] | None = None
        self._look_at_s = 0.0
        self._memory: model.Memory = []
        self.node: SyncNode | None = None

    def start(self) -> None:
        """Before the first step it may wait for the daemon."""
        self._see_to_session()
        wait([self._connecting] if self._connecting else [])
        self._see_to_session()

    def step(self, requests: list[Request]) -> None:
        """Bring each of these a step further."""
        self._see_to_session()
        for request in requests:
            if request.lease is None and not request.why_alone:
                self._ask(request)
            elif request.lease is not None:
                self._compute_in_pages(request, request.lease)
            else:
                request.computed += CHUNK  # In memory of this process, as if there was no kvd.

    def close(self) -> None:
        """Leave. What was leased ends with the session."""
        self._thread.shutdown()
        if self._connecting is not None and self._connecting.exception() is None:
            self.node, _ = self._connecting.result()
        if self.node is not None:
            self.node.close()

    def _see_to_session(self) -> None:
        if self.node is not None:
            self.node.pump()  # Reads what has come, and goes back to a daemon that was restarted.
            if self.node.end is not None:  # For good, as with other memory: no page is ours now.
                self.node.close()
                self.node, self._memory = None, []
        elif self._connecting is not None:
            if self._connecting.done():
                if self._connecting.exception() is None:
                    self.node, self._memory = self._connecting.result()
                self._connecting = None
        elif time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            # To connect and to map a pool takes a while, so it is not done in a step.
            self._connecting = self._thread.submit(self._opened)

    def _opened(self) -> tuple[SyncNode, model.Memory]:
        node = connect_sync(
            self._endpoint, name="scheduler", within_s=LOOK_S, on_unreachable="miss"
        )
        return node, model.memory_of(node.pool("main"))

    def _ask(self, request: Request) -> None:
        try:
            if request.asked is not None:
                request.lease = request.asked.poll()  # None while there is no answer; never waits.
            elif self.node is not None:
                request.asked = self.node.begin_lease(
                    request.tokens, namespace=model.NAMESPACE, deadline_s=0
                )
            else:
                request.alone("no session")
        except KvdError as error:
            request.alone(error.code)
        if request.lease is not None:
            request.asked = None
            request.found = request.computed = request.lease.prefix_len

    def _compute_in_pages(self, request: Request, lease: SyncLease) -> None:
        upto = min(request.computed + CHUNK, len(request.tokens))
        try:
            pages = lease.pages  # Anew in each step: this raises once they are not ours.
            model.compute(self._memory, pages, request.tokens, request.computed, upto)
            request.computed = upto
            if upto < len(request.tokens):
                lease.share(upto_tokens=upto)  # Others find it before the prompt is computed.
            else:
                request.wrong = model.wrong(self._memory, pages, request.tokens)
                lease.leave((), upto)  # Neither is waited for.
        except KvdError as error:
            request.alone(error.code)


def main(endpoint: str | None = None, requests: str = "8") -> None:
    """Requests that begin alike come one after the other; say what became of each."""
    scheduler = Scheduler(endpoint)
    scheduler.start()
    begins, running, slowest_s = np.arange(512), [], 0.0
    coming = [Request(n, np.append(begins, np.arange(n, n + 200))) for n in range(int(requests))]
    while coming or running:
        if coming and len(running) < 2:
            running.append(coming.pop(0))
        began_s = time.perf_counter()
        scheduler.step(running)
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
        for request in [one for one in running if one.computed >= len(one.tokens)]:
            running.remove(request)
            how = request.why_alone or f"{request.found} tokens found, {request.wrong} wrong"
            print(f"request {request.number}: {how}")
        time.sleep(0.005)  # What a step of the model takes.
    scheduler.close()
    print(f"slowest step: {slowest_s * 1000:.1f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
