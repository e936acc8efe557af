"""One decode node on a recorded load: its real index and admission, and a simple engine beside it.

A request takes a lease for its prompt and its output, waits for the node's one input, through
which what the node lacks comes at a fixed rate, is committed, decodes at a fixed rate, and lets go:

    arrive -- admission --> admitted -- turn at the input --> begun -- delta / rate --> committed
           -- output / rate --> released

The handoff machinery is left out: leases are the plain ones of an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core import effects, inputs
from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec
from kvd.core.node import NodeState
from kvd.core.settings import Settings
from kvd.types import NO_TOKENS, Incarnation, NodeName, Tokens, count
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.sim.agenda import Agenda

NAMESPACE = "trace"
SESSION = 1
FOREVER_S = 1e9

LAYERS, HEADS, WIDTH, DTYPE = 32, 8, 128, "bfloat16"
"""Llama 3.1 8B: 128 KiB of KV a token."""


class NodeShape(msgspec.Struct, frozen=True):
    """The cluster, and how fast its nodes are."""

    nodes: int
    pool_tokens: int
    page_tokens: int
    prefill_tokens_per_s: float
    """Of one node: at most so much of what it lacks comes in, one request after the other."""
    decode_tokens_per_s: float
    """Of each request that decodes, however many do."""
    speed: float = 1.0
    """How much faster than recorded the requests arrive."""


class Served(msgspec.Struct, frozen=True):
    """What became of one request."""

    node: int
    prompt_tokens: int
    reused_tokens: int
    wait_s: float
    """From its arrival until its turn at the input: for memory, and for those before it."""


class DecodeNode:
    """One node; ``served`` is told of every request when its turn has come."""

    def __init__(
        self, number: int, shape: NodeShape, agenda: Agenda, served: Callable[[Served], None]
    ) -> None:
        self.number = number
        self.open_requests = 0
        """Arrived, and not yet released."""
        self.refused = 0
        self._shape = shape
        self._agenda = agenda
        self._served = served
        self._free_s = 0.0
        """When the input has done everything that was admitted."""
        self._waiting_tokens = 0
        """Of prompts that wait for memory."""
        self._calls: dict[int, tuple[Tokens, int, float]] = {}
        self._n_calls = 0
        component = Component(
            name="kv",
            layers=LAYERS,
            layout=Mha(heads=HEADS, k_dim=WIDTH, v_dim=WIDTH, dtype=DTYPE),
            page_size=shape.page_tokens,
        )
        pages = shape.pool_tokens // shape.page_tokens + 1
        spec = PoolSpec(
            name="main",
            family="mha",
            order=PageOrder.PAGE_FIRST,
            components=(component,),
            pages=(pages,),
        )
        name = f"d{number}"
        settings = Settings(
            NodeName(name),
            Incarnation(f"{number:032x}"),
            spec,
            max_deadline_s=FOREVER_S,
            max_queue=2**31,
        )
        self._node = NodeState(settings, agenda.now_s)
        self._feed(inputs.ClientJoined(at_s=agenda.now_s, session=SESSION, name=name, pid=1))

    # ---- what a router may ask ---------------------------------------------------------------

    def match(self, tokens: Tokens) -> int:
        """Tokens of the prompt that are cached here; changes nothing."""
        return self._node.leases.tree.probe(tokens, NAMESPACE)

    def backlog_s(self) -> float:
        """How long the input is busy with what it has, were nothing of the queue cached."""
        busy_s = max(0.0, self._free_s - self._agenda.now_s)
        return busy_s + self._waiting_tokens / self._shape.prefill_tokens_per_s

    def bytes_of(self, n_tokens: int) -> int:
        """Bytes of the KV of so many tokens."""
        return self._node.leases.bytes_of(n_tokens)

    # ---- one request -------------------------------------------------------------------------

    def arrive(self, tokens: Tokens, output_tokens: int) -> None:
        """A request: ask for room."""
        self.open_requests += 1
        self._waiting_tokens += count(tokens)
        call = self._n_calls + 1
        self._calls[call] = (tokens, output_tokens, self._agenda.now_s)
        self._call(client.OpenLease, NAMESPACE, output_tokens, 0, FOREVER_S, tokens=tokens)

    def _admitted(self, call: int, reply: client.Leased) -> None:
        tokens, output_tokens, arrived_s = self._calls.pop(call)
        n_tokens, now_s, shape = count(tokens), self._agenda.now_s, self._shape
        self._waiting_tokens -= n_tokens
        begun_s = max(now_s, self._free_s)
        delta_tokens = n_tokens - reply.prefix_tokens
        self._free_s = begun_s + delta_tokens / shape.prefill_tokens_per_s
        self._served(
            Served(
                node=self.number,
                prompt_tokens=n_tokens,
                reused_tokens=reply.prefix_tokens,
                wait_s=begun_s - arrived_s,
            )
        )
        self._agenda.at(self._free_s, self._call, client.CommitLease, reply.lease)
        self._agenda.at(
            self._free_s + output_tokens / shape.decode_tokens_per_s, self._release, reply.lease
        )

    def _release(self, lease: int) -> None:
        self.open_requests -= 1
        self._call(client.ReleaseLease, lease)

    # ---- the node ----------------------------------------------------------------------------

    def _call(
        self, kind: type[client.Request], *fields: object, tokens: Tokens = NO_TOKENS
    ) -> None:
        self._n_calls += 1
        message = kind(self._n_calls, *fields)  # type: ignore[arg-type]  # of its own kind
        self._feed(
            inputs.FromClient(
                at_s=self._agenda.now_s, session=SESSION, message=message, tokens=tokens
            )
        )

    def _feed(self, happened: inputs.Input) -> None:
        for effect in self._node.step(happened).effects:
            assert type(effect) is effects.AnswerEngine
            reply = effect.message
            if type(reply) is client.Leased:
                self._admitted(reply.call, reply)
            elif type(reply) is client.Failed:
                self._failed(reply)

    def _failed(self, reply: client.Failed) -> None:
        """A request that can never fit; no other call is refused."""
        tokens, _, _ = self._calls.pop(reply.call)
        self._waiting_tokens -= count(tokens)
        self.open_requests -= 1
        self.refused += 1
