"""Attention the plain way, in float64, token by token of the block table; and pools to run it on.

Nothing of it is shared with what is tested.
"""

from __future__ import annotations

import msgspec
import torch

from kvd.device.attention import AttentionRule, BatchPages, Packed

JUNK = float("nan")
"""What lies wherever no token of a sequence does: whoever reads it shows it."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """One sequence: q (new, heads, k_dim), the new tokens last in k (tokens, kv_heads, k_dim)."""
    # Junk that nobody sees must not come in as 0 * NaN; who sees it differs from what is tested.
    q, k, v = q.double(), k.double().nan_to_num(), v.double().nan_to_num()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if rule.is_causal:
        seen &= torch.arange(len(k)) <= at
    if rule.window is not None:
        seen &= torch.arange(len(k)) > at - rule.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1).nan_to_num()[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def over(q: list[torch.Tensor], kv: BatchPages | Packed, rule: AttentionRule) -> torch.Tensor:
    """A batch, packed: the K and V of each sequence looked up token by token."""
    return torch.cat([attention(one, *tokens_of(kv, number), rule) for number, one in enumerate(q)])


def tokens_of(kv: BatchPages | Packed, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence."""
    if isinstance(kv, Packed):
        here = slice(int(kv.starts[number]), int(kv.starts[number + 1]))
        return kv.k[here], kv.v[here]
    size, tokens = kv.k.shape[1], torch.arange(int(kv.lengths[number]))
    pages = kv.block_table[number].long()[tokens // size]
    return kv.k[pages, tokens % size], kv.v[pages, tokens % size]


class Shape(msgspec.Struct, frozen=True):
    """Of a pool and its heads. ``order``: "page" or "layer" first; ``latent``: V is part of K."""

    page_size: int
    kv_heads: int = 2
    group: int = 4
    k_dim: int = 32
    v_dim: int = 32
    order: str = "page"
    latent: bool = False
    dtype: str = "float32"

    @property
    def type(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


class Pool:
    """A pool of several layers in one piece of memory, full of junk but where tokens were put."""

    def __init__(
        self, shape: Shape, pages: int, seed: int, *, layers: int = 3, junk: float = JUNK
    ) -> None:
        self.shape = shape
        self._chance = torch.Generator().manual_seed(seed)
        each = [shape.k_dim] if shape.latent else [shape.k_dim, shape.v_dim]
        flat = (layers, pages, shape.page_size, shape.kv_heads)
        if shape.order == "page":
            memory = torch.full((pages, layers, shape.page_size * shape.kv_heads * sum(each)), junk)
            inner = memory.to(shape.type)[:, layers // 2]
            parts = inner.split([shape.page_size * shape.kv_heads * dim for dim in each], dim=-1)
            views = [
                part.unflatten(-1, (*flat[2:], dim)) for part, dim in zip(parts, each, strict=True)
            ]
        else:
            views = [torch.full((*flat, dim), junk).to(shape.type)[layers // 2] for dim in each]
        self.k = views[0]
        self.v = views[0][..., : shape.v_dim] if shape.latent else views[1]
        order = torch.randperm(pages - 1, generator=self._chance) + 1
        self._free = order.tolist()

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the pool's type."""
        return torch.randn(*shape, generator=self._chance).to(self.shape.type)

    def pages(self, lengths: list[int], *, window: int | None = None, new: int = 1) -> BatchPages:
        """A batch of so many tokens each; pages that ``window`` does not reach are none."""
        size = self.shape.page_size
        counts = [-(-length // size) for length in lengths]
        table = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            start = 0 if window is None else max(0, length - new - window + 1)
            for index in range(start // size, count):
                page = self._free.pop()
                table[number, index] = page
                written = slice(max(0, start - index * size), min(size, length - index * size))
                for view in (self.k,) if self.shape.latent else (self.k, self.v):
                    view[page, written] = self.random(*view[page, written].shape)
        return BatchPages(self.k, self.v, table, torch.tensor(lengths, dtype=torch.int32))

    def queries(self, *counts: int) -> list[torch.Tensor]:
        """New tokens of each sequence."""
        heads = self.shape.kv_heads * self.shape.group
        return [self.random(count, heads, self.shape.k_dim) for count in counts]

    def rule(self, **how: object) -> AttentionRule:
        return AttentionRule(scale=self.shape.k_dim**-0.5, **how)  # type: ignore[arg-type]


def starts_of(counts: list[int]) -> torch.Tensor:
    """Where sequences of so many tokens begin: cu_seqlens."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
