"""Which tokens of a batch each context-parallel rank computes: arithmetic, without a tensor.

The **logical rows** of a batch are the tokens of its sequences, one sequence after the other. A
split gives each of them to one rank; a rank keeps its rows sequence by sequence::

    one sequence of 10 tokens on 4 ranks, '.' is a row of padding
    zigzag          blocks 2 2 1 1 1 1 1 1     0 1 9 | 2 3 8 | 4 7 . | 5 6 .
    interleaved     token i on rank i % 4      0 4 8 | 1 5 9 | 2 6 . | 3 7 .
    contiguous                                 0 1 2 | 3 4 5 | 6 7 . | 8 9 .

A gather moves as many rows of each rank: ``max_len``, those of the rank that has most in the whole
batch. Two sequences of 9 tokens on 4 ranks are 6 4 4 4 rows by zigzag, so 6, where the tokens
divided by the ranks would be 5. What was gathered is read through ``order``, which names no row of
padding: that is why none can ever be kept, hashed or sent.

Invariant: the rows of all ranks are ``0 .. tokens``, each exactly once.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.layout.shards import page_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Split(enum.Enum):
    """How the tokens of a batch are cut among the ranks."""

    ZIGZAG = "zigzag"
    """Each sequence in ``2 * ranks`` blocks, rank r has blocks r and ``2 * ranks - 1 - r``: with
    a causal mask every rank has the same work."""
    INTERLEAVED = "interleaved"
    """Token i of a sequence is on rank ``i % ranks``."""
    CONTIGUOUS = "contiguous"
    """The batch as one row of tokens, cut evenly. Goes for every batch."""


class Sharding(msgspec.Struct, frozen=True):
    """One batch cut among the ranks. ``lengths``: tokens of each sequence. Make it by ``shard``."""

    split: Split
    lengths: tuple[int, ...]
    ranks: int

    @property
    def tokens(self) -> int:
        """The logical rows of the batch."""
        return sum(self.lengths)

    def rows(self, rank: int) -> NDArray[np.int64]:
        """The logical row of each row of ``rank``, in the order in which it keeps them."""
        if self.split is Split.CONTIGUOUS:
            return np.arange(*page_share(0, self.tokens, rank, self.ranks))
        parts = [np.empty(0, np.int64)]
        end = 0
        for length in self.lengths:
            begin, end = end, end + length
            if self.split is Split.INTERLEAVED:
                parts.append(np.arange(begin + rank, end, self.ranks))
                continue
            parts.extend(
                np.arange(*page_share(begin, end, block, 2 * self.ranks))
                for block in (rank, 2 * self.ranks - 1 - rank)
            )
        return np.concatenate(parts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each rank, over all sequences of the batch; looks at every token."""
        return tuple(len(self.rows(rank)) for rank in range(self.ranks))

    @property
    def max_len(self) -> int:
        """Rows that each rank brings to a gather, padding included."""
        return max(self.counts)

    def order(self) -> NDArray[np.int64]:
        """Where each logical row lies among the ``ranks * max_len`` gathered rows.

        Shape (tokens,): ``gathered[order]`` is the batch in logical order, without padding.
        """
        order = np.empty(self.tokens, np.int64)
        max_len = self.max_len
        for rank in range(self.ranks):
            rows = self.rows(rank)
            order[rows] = rank * max_len + np.arange(rows.size)
        return order


def is_applicable(split: Split, lengths: Sequence[int], ranks: int) -> bool:
    """Whether every sequence of the batch is long enough for each rank to have some of it."""
    least = {Split.ZIGZAG: 2 * ranks, Split.INTERLEAVED: ranks, Split.CONTIGUOUS: 0}[split]
    return all(length >= least for length in lengths)


def shard(split: Split, lengths: Sequence[int], ranks: int) -> Sharding:
    """The batch cut by ``split``, or contiguously if a sequence of it is too short for that.

    Contiguously, and not left whole: one short sequence beside a long one must not make every rank
    compute the long one. What is gathered is the same rows in the same order either way. Ranks may
    then have no rows at all, of a batch with fewer tokens than ranks; they still join the gather.

    Raises:
        ValueError: a negative length, or no rank.
    """
    if ranks < 1 or any(length < 0 for length in lengths):
        msg = f"cannot cut sequences of {tuple(lengths)} tokens among {ranks} ranks"
        raise ValueError(msg)
    applied = split if is_applicable(split, lengths, ranks) else Split.CONTIGUOUS
    return Sharding(applied, tuple(lengths), ranks)
