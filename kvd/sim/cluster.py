"""A recorded load over a cluster of decode nodes: what each way of routing reuses and balances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.sim.agenda import START_S, Agenda
from kvd.sim.decode_node import DecodeNode, NodeShape, Served
from kvd.sim.routing import ROUTINGS
from kvd.trace import TraceRequest, expand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    saved_bytes: int
    sent_tokens: int
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
    nodes = [DecodeNode(k, shape, agenda, served.append) for k in range(shape.nodes)]
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
    prompt_tokens = sum(one.prompt_tokens for one in served)
    reused_tokens = sum(one.reused_tokens for one in served)
    counts, sent = np.zeros((2, shape.nodes))
    for one in served:
        counts[one.node] += 1
        sent[one.node] += one.prompt_tokens - one.reused_tokens
    waits = np.array([one.wait_s for one in served] or [0.0])
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return Routed(
        routing=routing,
        requests=len(served),
        refused=sum(node.refused for node in nodes),
        reuse=reused_tokens / max(1, prompt_tokens),
        saved_bytes=nodes[0].bytes_of(reused_tokens),
        sent_tokens=prompt_tokens - reused_tokens,
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
