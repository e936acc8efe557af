"""What an engine computes the tokens of a lease with, whether it is one process or several.

``prefill`` and ``decode`` are written against this: they lease, send and receive, and neither knows
how many processes the model is divided among. Each way of dividing it has its own file: ``tensor``,
``context``, ``pipeline``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.demo.leased import LeasedSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from kvd.demo.leased import Leased, Lengths, PoolViews


class Computed(Protocol):
    """The tokens of one lease, as far as they are computed."""

    @property
    def written_tokens(self) -> int:
        """Tokens that are computed."""

    @property
    def peak_window_pages(self) -> int:
        """The most window pages that the lease had at once."""

    @property
    def slides(self) -> int:
        """How often it slid."""

    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute the next tokens; (vocabulary,) logits after the last one.

        Where another rank has those, they are zeros until ``Sequences.known`` was asked.
        """


class Offered(Protocol):
    """As much of a send as is needed here."""

    @property
    def decode_prefix_len(self) -> int:
        """What the decode side has cached."""

    def accepted(self) -> None:
        """Wait until that is known."""


class Sequences(Protocol):
    """Makes sequences of leases; on every rank that has a daemon of its own there is one."""

    @property
    def views(self) -> PoolViews:
        """The memory of this rank."""

    def common_prefix(self, prefix_tokens: int) -> int:
        """How many tokens all ranks have cached, where this one has ``prefix_tokens``."""

    def begin(self, lease: Leased, lengths: Lengths, *, step_tokens: int) -> Computed:
        """Go on with the tokens of ``lease`` from there; as ``LeasedSequence``."""

    def agree(self, send: Offered) -> None:
        """All ranks were offered the same handoff, before any of them says that it is done.

        Raises:
            Disagreement: they were not; the message has what each of them was told.
        """

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that ``compute`` gave last, on every rank."""


class Alone:
    """The whole model in this process."""

    def __init__(self, model: PreTrainedModel, views: PoolViews) -> None:
        self.views = views
        self._model = model

    def common_prefix(self, prefix_tokens: int) -> int:
        """As ``Sequences.common_prefix``."""
        return prefix_tokens

    def begin(self, lease: Leased, lengths: Lengths, *, step_tokens: int) -> Computed:
        """As ``Sequences.begin``."""
        return LeasedSequence(self._model, self.views, lease, lengths, step_tokens=step_tokens)

    def agree(self, send: Offered) -> None:
        """As ``Sequences.agree``: there is nobody to differ."""

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """As ``Sequences.known``."""
        return logits
