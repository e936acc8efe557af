"""The second column of ``benchmarks radix``: ``Node.step`` on the same requests.

A request is a lease of its prompt and, at once, its commit and release: what an engine asks for,
without sockets. The clock runs over both steps, pages, owners and events included; effects and
events are then dropped, because nobody listens here.
"""

from __future__ import annotations

import time

from benchmarks.replay import NAMESPACE, Cost
from kvd.core.effects import Answer, Step
from kvd.core.inputs import ClientJoined, FromClient
from kvd.core.node import Node
from kvd.core.settings import Settings
from kvd.core.spec import Component, Order, PoolSpec, Raw
from kvd.types import Incarnation, NodeName, Tokens, count
from kvd.wire import client

SESSION = 1


class NodeColumn:
    """A node with one engine attached."""

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        component = Component("kv", 1, Raw(page_size), page_size)
        pages = capacity_tokens // page_size + 1
        spec = PoolSpec("bench", "mha", Order.PAGE_FIRST, (component,), (pages,))
        self._page_size = page_size
        self._at_s = 0.0
        self._node = Node(Settings(NodeName("bench"), Incarnation("0" * 32), spec), self._at_s)
        self._node.step(ClientJoined(self._at_s, SESSION, "bench", 1))

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree."""
        return self._node.leases.tree.cached_pages * self._page_size

    def serve(self, tokens: Tokens) -> Cost:
        """Lease; then commit and release."""
        self._at_s += 1.0
        node, clock = self._node, time.perf_counter_ns
        opening = FromClient(self._at_s, SESSION, client.OpenLease(1, NAMESPACE), tokens)
        start = clock()
        opened = node.step(opening)
        ns = clock() - start
        leased = _answer(opened)
        assert isinstance(leased, client.Leased), leased
        ending = FromClient(self._at_s, SESSION, client.CommitAndRelease(2, leased.lease))
        start = clock()
        ended = node.step(ending)
        ns += clock() - start
        assert isinstance(_answer(ended), client.Done)
        n_new = count(tokens) // self._page_size * self._page_size - leased.prefix_tokens
        return Cost(ns, leased.prefix_tokens, n_new)


def _answer(step: Step) -> client.Reply:
    (effect,) = step.effects
    assert isinstance(effect, Answer)
    return effect.message
