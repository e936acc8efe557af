"""Ranks that each have a daemon of their own, and what they must agree on.

Each of them leases, writes and sends by itself, and its daemon knows nothing of the others. So they
compare notes: from where all have cached the prompt, and which prefix the decode side has. The
logits are on one of them, whichever computed the last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.demo.cache import BlockTable
from kvd.demo.layout import Part
from kvd.demo.leased import leased_cache
from kvd.demo.sequences import Computed
from kvd.device.collectives import agree

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import Cache

    from kvd.demo.group import Group
    from kvd.demo.leased import Leased, Lengths, PoolViews
    from kvd.demo.sequences import Offered


class Shared(Computed, Protocol):
    """The tokens of a lease that several ranks compute."""

    @property
    def last_rank(self) -> int:
        """The rank that has the logits."""


class Together:
    """As ``Sequences``, for one of several ranks that each have a daemon.

    ``make``: what computes over the pages of one lease.
    """

    def __init__(
        self, views: PoolViews, group: Group, make: Callable[[Cache, Lengths], Shared]
    ) -> None:
        self.views = views
        self._group = group
        self._make = make
        self._begun: Shared | None = None

    def common_prefix(self, prefix_tokens: int) -> int:
        """As ``Sequences.common_prefix``: what one of them lacks, all compute."""
        return min(self._group.numbers(prefix_tokens))

    def begin(self, lease: Leased, lengths: Lengths, *, step_tokens: int) -> Shared:
        """As ``Sequences.begin``; no part of such a pool slides, so ``step_tokens`` is no limit."""
        tables = {Part.KV: BlockTable(lease.pages_of(Part.KV.value))}
        self._begun = self._make(leased_cache(self.views, tables, lengths), lengths)
        return self._begun

    def agree(self, send: Offered) -> None:
        """As ``Sequences.agree``."""
        send.accepted()
        agree("decode_prefix_len", send.decode_prefix_len, self._group.all)

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """As ``Sequences.known``."""
        assert self._begun is not None, "something was computed"
        return self._group.spread_tensor(logits, source=self._begun.last_rank)
