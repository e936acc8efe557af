"""Attention on any device, in blocks: products of matrices and a running softmax, in torch alone.

K and V are read a block of pages at a time into a scratch that is used over and over, and the
softmax is carried from block to block (its maximum ``top``, its sum, the values weighed so far).
So what is allocated depends neither on the pool nor on the length of a sequence. For each call it
is at most

    scratch   BLOCK_TOKENS * kv_heads * (k_dim + v_dim)    for pages alone; of a latent k_dim only
    scores    BLOCK_TOKENS * heads * QUERY_TOKENS          and half as much for masks
    queries   3 * (k_dim + v_dim) * heads * QUERY_TOKENS   or as many as there are, if fewer

elements of at least 32 bits (and once more the scratch in 16 bits for K and V of 16 bits), the
result besides.

A block is copied because a product needs the tokens of a KV head at one stride, and pages that do
not follow each other have none. It stays in the cache of the processor until it is used, which is
why this is faster than gathering a sequence first: 4,096 tokens of 8 KV heads of 128 in 7 ms
instead of 12 ms of gathering and ``scaled_dot_product_attention`` on one core.

Scores and sums are in float32 for 16-bit types, else in the type of the arguments. Lengths and
block tables are read by the host: on CUDA this is a fallback, and it waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvd.device.batch import AttentionRule, BatchPages, Packed, is_latent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 1024
"""Tokens of K and V at a time. 512 costs a tenth more in steps, 2,048 leaves the cache."""

QUERY_TOKENS = 64
"""New tokens at a time: with BLOCK_TOKENS, 256 KiB of scores for each head in float32. Not fewer
for more heads: what comes out for a head shall not depend on which others are computed with it."""


class PagedBlocks:
    """Blocks of sequences whose K and V lie in pages: copied into a scratch, by block table."""

    def __init__(self, pages: BatchPages, dtype: torch.dtype) -> None:
        size = pages.page_size
        self._table, self._size, self.v_dim = pages.block_table, size, pages.v.shape[-1]
        self._lengths: list[int] = pages.lengths.tolist()
        self.step = max(BLOCK_TOKENS // size, 1) * size
        most = min(self.step // size, -(-max(self._lengths, default=0) // size))
        self._k = _Scratch(pages.k, most, dtype)
        self._v = None if is_latent(pages) else _Scratch(pages.v, most, dtype)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[sequence]

    def read(self, sequence: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (tokens, kv_heads, k_dim) and V of these tokens, until the next read.

        They are those of one block: no multiple of ``step`` lies between ``first`` and ``end``.
        """
        ids = self._table[sequence, first // self._size : -(-end // self._size)]
        here = slice(first % self._size, first % self._size + end - first)
        k = self._k.read(ids)[here]
        return k, k[..., : self.v_dim] if self._v is None else self._v.read(ids)[here]


class _Scratch:
    """Room for the pages of one block of K or V."""

    def __init__(self, view: torch.Tensor, pages: int, dtype: torch.dtype) -> None:
        self._view = view
        shape = (pages, *view.shape[1:])
        self._narrow = view.new_empty(shape)
        self._wide = self._narrow if view.dtype == dtype else view.new_empty(shape, dtype=dtype)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens, kv_heads, dim) of the pages with these ids, in the type that is computed in."""
        narrow, wide = self._narrow[: len(ids)], self._wide[: len(ids)]
        torch.index_select(self._view, 0, ids, out=narrow)
        if wide.dtype != narrow.dtype:
            wide.copy_(narrow)
        return wide.flatten(0, 1)


class PackedBlocks:
    """Blocks of sequences that lie one behind the other: views, but for another type."""

    step = BLOCK_TOKENS

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self._k, self._v, self._dtype = packed.k, packed.v, dtype
        self.v_dim = packed.v.shape[-1]
        self._starts: list[int] = packed.starts.tolist()

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._starts[sequence + 1] - self._starts[sequence]

    def read(self, sequence: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (tokens, kv_heads, k_dim) and V of these tokens."""
        here = slice(self._starts[sequence] + first, self._starts[sequence] + end)
        return self._k[here].to(self._dtype), self._v[here].to(self._dtype)


class _Softmax:
    """A softmax over scores that come block by block, and the values that it weighs.

    Its rows are (kv_heads, group * tokens): the queries that share a KV head, side by side. ``top``
    is the largest score so far and never -inf, so a row that sees nothing of a block, whose scores
    are all -inf, leaves no NaN.
    """

    def __init__(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with a first block.

        Args:
            scores: (kv_heads, rows, tokens); used up.
            values: (kv_heads, tokens, v_dim).
        """
        self._top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        weights = scores.sub_(self._top).exp_()
        self._sum = weights.sum(-1, keepdim=True)
        self._weighed = torch.bmm(weights, values)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Take in the next block, given as the first."""
        top = torch.maximum(self._top, scores.amax(-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        fading = self._top.sub_(top).exp_()
        self._sum.mul_(fading).add_(weights.sum(-1, keepdim=True))
        self._weighed.mul_(fading).baddbmm_(weights, values)
        self._top = top

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Take in one more score for each row, (kv_heads, rows, 1), whose value is zero."""
        top = torch.maximum(self._top, sinks)
        fading = self._top.sub_(top).exp_()
        self._sum.mul_(fading).add_((sinks - top).exp_())
        self._weighed.mul_(fading)

    def result(self) -> torch.Tensor:
        """(kv_heads, rows, v_dim); zeros in a row that saw nothing."""
        return self._weighed.div_(self._sum.masked_fill_(self._sum == 0, 1))


def attend(
    q: torch.Tensor, starts: Sequence[int], kv: BatchPages | Packed, rule: AttentionRule
) -> torch.Tensor:
    """Attention of packed queries.

    Args:
        q: (tokens, heads, k_dim).
        starts: where the queries of each sequence begin, and the end of the last.
        kv: K and V of as many sequences.
        rule: what a token sees.

    Returns:
        (tokens, heads, v_dim) in the dtype of ``q``.
    """
    dtype = q.dtype if q.dtype.itemsize > 2 else torch.float32
    blocks = PagedBlocks(kv, dtype) if isinstance(kv, BatchPages) else PackedBlocks(kv, dtype)
    out = q.new_empty((*q.shape[:2], kv.v.shape[-1]))
    for sequence in range(len(starts) - 1):
        # The last query is the last token: the position of the query in row r of q is r + ahead.
        ahead = blocks.length(sequence) - starts[sequence + 1]
        for first in range(starts[sequence], starts[sequence + 1], QUERY_TOKENS):
            end = min(first + QUERY_TOKENS, starts[sequence + 1])
            queries = q[first:end].to(dtype) * rule.scale
            queries = queries.reshape(end - first, kv.k.shape[-2], -1, q.shape[-1])
            positions = range(first + ahead, end + ahead)
            done = _attended(queries.permute(1, 2, 0, 3), positions, blocks, sequence, rule)
            out[first:end] = done.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attended(
    queries: torch.Tensor,
    positions: range,
    blocks: PagedBlocks | PackedBlocks,
    sequence: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of a few tokens of one sequence.

    Args:
        queries: (kv_heads, group, tokens, k_dim), scaled.
        positions: of these tokens in their sequence.
        blocks: K and V.
        sequence: which one.
        rule: what a token sees.

    Returns:
        (kv_heads, group, tokens, v_dim).
    """
    kv_heads, group, tokens, _ = queries.shape
    scored = _scored(queries, positions, blocks, sequence, rule)
    first = next(scored, None)
    if first is None:
        return queries.new_zeros((kv_heads, group, tokens, blocks.v_dim))
    softmax = _Softmax(*first)
    for scores, values in scored:
        softmax.add(scores, values)
    if rule.sinks is not None:
        sinks = rule.sinks.to(queries.dtype).view(kv_heads, group, 1)
        softmax.add_sinks(sinks.repeat_interleave(tokens, dim=1))
    return softmax.result().view(kv_heads, group, tokens, blocks.v_dim)


def _scored(
    queries: torch.Tensor,
    positions: range,
    blocks: PagedBlocks | PackedBlocks,
    sequence: int,
    rule: AttentionRule,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The scores of each block that is seen, and its values, as ``_Softmax`` takes them.

    Those of a block lie where those of the one before did.
    """
    end = blocks.length(sequence)
    end = min(end, positions.stop) if rule.is_causal else end
    first = 0 if rule.window is None else max(0, positions.start - rule.window + 1)
    rows = queries.flatten(1, 2)
    room = rows.new_empty(rows.shape[0] * rows.shape[1] * min(blocks.step, max(end - first, 0)))
    while first < end:
        stop = min((first // blocks.step + 1) * blocks.step, end)
        k, v = blocks.read(sequence, first, stop)
        scores = room[: rows.shape[0] * rows.shape[1] * (stop - first)].view(*rows.shape[:2], -1)
        torch.bmm(rows, k.permute(1, 2, 0), out=scores)
        if rule.softcap is not None:
            scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        hidden = _hidden(positions, range(first, stop), rule, scores.device)
        if hidden is not None:
            scores.view(*queries.shape[:3], -1).masked_fill_(hidden, -torch.inf)
        yield scores, v.transpose(0, 1)
        first = stop


def _hidden(
    queries: range, keys: range, rule: AttentionRule, device: torch.device
) -> torch.Tensor | None:
    """Which of ``keys`` each of ``queries`` does not see: (queries, keys), None if it sees all."""
    ahead = rule.is_causal and keys.stop - 1 > queries.start
    behind = rule.window is not None and keys.start <= queries.stop - 1 - rule.window
    if not (ahead or behind):
        return None
    at, of = (
        torch.arange(one.start, one.stop, dtype=torch.int32, device=device)
        for one in (queries, keys)
    )
    distance = at[:, None] - of
    hidden = distance < 0
    return hidden if rule.window is None else hidden | (distance >= rule.window)
