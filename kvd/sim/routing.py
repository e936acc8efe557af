"""Which node a request goes to: three ways, from what a router can know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.sim.decode_node import DecodeNode, NodeShape
    from kvd.types import Tokens

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
