"""A recorded load over a cluster of decode nodes: what each way of routing reuses and balances.

A node is its real index and admission, and a simple engine beside it. A request takes a lease for
its prompt and its output, waits for the node's one input, through which what the node lacks comes
at a fixed rate, is committed, decodes at a fixed rate, and lets go:

    arrive -- admission --> admitted -- turn at the input --> begun -- delta / rate --> committed
           -- output / rate --> released

The handoff machinery is left out: leases are the plain ones of an engine. A router knows what a
router may know: what is cached where, and what waits there. With a ``Drive`` below its pool a node
writes to it what is about to leave the pool, and a request waits for its pages from there. One of
them may be a store that all nodes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core import effects, inputs
from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec
from kvd.core.node import NodeState
from kvd.core.settings import Settings
from kvd.sim.agenda import START_S, Agenda
from kvd.sim.drive import GENERATION, Drive, DriveShape
from kvd.trace import TraceRequest, expand
from kvd.types import NO_TOKENS, Incarnation, NodeName, Tokens, count
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.sim.storage import SimDisk

# ---- one node ------------------------------------------------------------------------------------

NAMESPACE = "trace"
SESSION = 1
FOREVER_S = 1e9
TICK_S = 0.05

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
    drive: DriveShape | None = None
    """Below each pool."""
    store: DriveShape | None = None
    """Below all of them, and asked after the drive."""

    @property
    def tiers(self) -> tuple[DriveShape, ...]:
        """Those of a node, the nearest first."""
        return tuple(tier for tier in (self.drive, self.store) if tier is not None)


class Served(msgspec.Struct, frozen=True):
    """What became of one request."""

    node: int
    prompt_tokens: int
    reused_tokens: int
    promoted_tokens: int
    """Of those, what was read from a tier for it."""
    wait_s: float
    """From its arrival until its turn at the input: for memory, and for those before it."""


class DecodeNode:
    """One node; ``served`` is told of every request when its turn has come."""

    def __init__(
        self,
        number: int,
        shape: NodeShape,
        agenda: Agenda,
        served: Callable[[Served], None],
        stored: SimDisk[bool] | None = None,
    ) -> None:
        """``stored``: what lies in the store, if there is one."""
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
            tiers=tuple(tier.settings(shape.page_tokens) for tier in shape.tiers),
        )
        self._node = NodeState(settings, agenda.now_s)
        self._is_to_tick = False
        self._drives: dict[str, Drive] = {}
        for tier in shape.tiers:
            objects = stored if tier.is_shared else None
            objects = objects or tier.objects(shape.page_tokens)
            drive = Drive(tier, shape.page_tokens, objects, agenda, self._feed)
            self._drives[drive.name] = drive
        for name in self._drives:
            self._feed(inputs.TierReady(agenda.now_s, name, GENERATION))
        self._feed(inputs.ClientJoined(at_s=agenda.now_s, session=SESSION, name=name, pid=1))

    # ---- what a router may ask ---------------------------------------------------------------

    def match(self, tokens: Tokens) -> int:
        """Tokens of the prompt that are cached here, in the pool or below; changes nothing."""
        cached = self._node.leases.tree.probe(tokens, NAMESPACE)
        return cached + self._node.tiers.promotions.told(tokens, NAMESPACE, cached)[0]

    def backlog_s(self) -> float:
        """How long the input is busy with what it has, were nothing of the queue cached."""
        busy_s = max(0.0, self._free_s - self._agenda.now_s)
        return busy_s + self._waiting_tokens / self._shape.prefill_tokens_per_s

    def moved(self, tier: DriveShape | None) -> tuple[int, int]:
        """Tokens that it has read from a tier, and written to it."""
        if tier is None:
            return 0, 0
        drive = self._drives[tier.settings(self._shape.page_tokens).name]
        return drive.read_tokens, drive.written_tokens

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
                promoted_tokens=reply.promoted_tokens,
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
            match effect:
                case effects.AnswerEngine(message=client.Leased() as reply):
                    self._admitted(reply.call, reply)
                case effects.AnswerEngine(message=client.Failed() as reply):
                    self._failed(reply)
                case effects.AnswerEngine():
                    pass
                case _:
                    assert isinstance(effect, effects.StorageOrder)
                    self._drives[effect.tier].order(effect)
        if self._drives and not self._is_to_tick:
            self._is_to_tick = True
            self._agenda.after(TICK_S, self._tick)

    def _tick(self) -> None:
        """Once after anything has happened, and on while a drive has orders."""
        self._feed(inputs.Tick(self._agenda.now_s))
        self._is_to_tick = False
        tiers = self._node.tiers
        if tiers.moves.under_way or tiers.promotions.probes.under_way:
            self._is_to_tick = True
            self._agenda.after(TICK_S, self._tick)

    def _failed(self, reply: client.Failed) -> None:
        """A request that can never fit; no other call is refused."""
        tokens, _, _ = self._calls.pop(reply.call)
        self._waiting_tokens -= count(tokens)
        self.open_requests -= 1
        self.refused += 1


# ---- routing -------------------------------------------------------------------------------------

Route = Callable[[int, Tokens], DecodeNode]
"""The node for the request with this number and this prompt."""


def round_robin(nodes: Sequence[DecodeNode], _: NodeShape) -> Route:
    """One after the other, whatever is where."""
    return lambda number, _: nodes[number % len(nodes)]


def longest_match(nodes: Sequence[DecodeNode], _: NodeShape) -> Route:
    """The node that has most of the prompt; among equals the first."""

    def route(_: int, tokens: Tokens) -> DecodeNode:
        return max(nodes, key=lambda node: (node.match(tokens), -node.number))

    return route


def load_aware(nodes: Sequence[DecodeNode], shape: NodeShape) -> Route:
    """The node where the prompt would be soonest: what waits there, and what is lacking there.

    Among equals the one with the fewest open requests, then the first.
    """

    def route(_: int, tokens: Tokens) -> DecodeNode:
        n_tokens = count(tokens)

        def cost(node: DecodeNode) -> tuple[float, int, int]:
            lacking_s = (n_tokens - node.match(tokens)) / shape.prefill_tokens_per_s
            return (node.backlog_s() + lacking_s, node.open_requests, node.number)

        return min(nodes, key=cost)

    return route


ROUTINGS: dict[str, Callable[[Sequence[DecodeNode], NodeShape], Route]] = {
    "round-robin": round_robin,
    "longest-match": longest_match,
    "load-aware": load_aware,
}


# ---- a whole trace -------------------------------------------------------------------------------

MS_PER_S = 1000


class Balance(msgspec.Struct, frozen=True):
    """How evenly something is spread over the nodes: 1 and 0 where it is perfectly so."""

    max_over_mean: float
    variation: float
    """Standard deviation over mean."""


class Routed(msgspec.Struct, frozen=True):
    """What one way of routing came to."""

    routing: str
    requests: int
    refused: int
    """Prompt and output are larger than a pool."""
    reuse: float
    """Share of prompt tokens that need not be sent."""
    promoted: float
    """Share of prompt tokens that came from the tiers; a part of ``reuse``."""
    saved_bytes: int
    sent_tokens: int
    written_tokens: int
    """To the drives."""
    store_read_tokens: int
    """From the store, wanted in the end or not."""
    store_written_tokens: int
    balance_requests: Balance
    balance_sent_tokens: Balance
    wait_p50_s: float
    wait_p99_s: float
    wait_mean_s: float


class Replay(msgspec.Struct, frozen=True):
    """What ``kvd sim --trace`` reports."""

    trace: str
    requests: int
    prompt_tokens: int
    shape: NodeShape
    routings: tuple[Routed, ...]


def replay(
    name: str, requests: Sequence[TraceRequest], shape: NodeShape, told: Callable[[str], None]
) -> Replay:
    """The trace under each way of routing; ``told`` is called once per request and routing."""
    return Replay(
        trace=name,
        requests=len(requests),
        prompt_tokens=sum(request.input_length for request in requests),
        shape=shape,
        routings=tuple(run(routing, requests, shape, told) for routing in ROUTINGS),
    )


def run(
    routing: str, requests: Sequence[TraceRequest], shape: NodeShape, told: Callable[[str], None]
) -> Routed:
    """The trace under one way of routing, until the last request is released."""
    agenda = Agenda()
    served: list[Served] = []
    stored = shape.store.objects(shape.page_tokens) if shape.store is not None else None
    nodes = [DecodeNode(k, shape, agenda, served.append, stored) for k in range(shape.nodes)]
    route = ROUTINGS[routing](nodes, shape)

    def arrive(number: int) -> None:
        request = requests[number]
        tokens = expand(request)
        route(number, tokens).arrive(tokens, request.output_length)
        told(routing)

    for number, request in enumerate(requests):
        agenda.at(START_S + request.timestamp / MS_PER_S / shape.speed, arrive, number)
    while agenda.is_waiting:
        agenda.step()
    prompt_tokens = sum(answer.prompt_tokens for answer in served)
    reused_tokens = sum(answer.reused_tokens for answer in served)
    counts, sent = np.zeros((2, shape.nodes))
    for answer in served:
        counts[answer.node] += 1
        sent[answer.node] += answer.prompt_tokens - answer.reused_tokens
    waits = np.array([answer.wait_s for answer in served] or [0.0])
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    to_store = [node.moved(shape.store) for node in nodes]
    return Routed(
        routing=routing,
        requests=len(served),
        refused=sum(node.refused for node in nodes),
        reuse=reused_tokens / max(1, prompt_tokens),
        promoted=sum(answer.promoted_tokens for answer in served) / max(1, prompt_tokens),
        saved_bytes=nodes[0].bytes_of(reused_tokens),
        sent_tokens=prompt_tokens - reused_tokens,
        written_tokens=sum(node.moved(shape.drive)[1] for node in nodes),
        store_read_tokens=sum(n_read for n_read, _ in to_store),
        store_written_tokens=sum(n_written for _, n_written in to_store),
        balance_requests=_balance(counts),
        balance_sent_tokens=_balance(sent),
        wait_p50_s=p50,
        wait_p99_s=p99,
        wait_mean_s=float(waits.mean()),
    )


def _balance(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Balance:
    mean = float(shares.mean())
    if not mean:
        return Balance(1.0, 0.0)
    return Balance(float(shares.max()) / mean, float(shares.std()) / mean)
