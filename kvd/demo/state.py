"""A recurrent layer whose state lies only in a pool of kvd.

A recurrent layer keeps one state per sequence: what its convolution last saw, and what its scan
has summed up. A state stands for all tokens before one point and cannot be rolled back. So a lease
names two pages, and the engine copies on write:

    lease.pages_of("state")   [ the state after prefix_len tokens, or 0 | the lease's own ]
                                read, never written                       written

``transformers`` updates states in place, so it is given the own page itself: whatever was computed
last lies in the pool at any moment, ready to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transformers.cache_utils import LinearAttentionLayer

if TYPE_CHECKING:
    import torch


class StateViews(NamedTuple):
    """The states of one layer in all pages.

    ``conv``: (pages, channels, tokens); ``scan``: (pages, heads, head_dim, state_dim).
    """

    conv: torch.Tensor
    scan: torch.Tensor


class StateLayer(LinearAttentionLayer):
    """One recurrent layer of one sequence.

    Invariant: only ``own_page`` is written, and it is not the null page.
    """

    def __init__(
        self, views: StateViews, *, source_page: int, own_page: int, written_tokens: int
    ) -> None:
        """A layer that goes on after ``written_tokens``.

        Args:
            views: the states of this layer.
            source_page: where the state after those tokens is; 0: in ``own_page`` already, or
                nowhere, when there were none.
            own_page: what is written.
            written_tokens: how many tokens the state stands for.
        """
        assert own_page, "the null page is nobody's state"
        super().__init__()
        conv, scan = views.conv[own_page : own_page + 1], views.scan[own_page : own_page + 1]
        if source_page:
            conv.copy_(views.conv[source_page : source_page + 1])
            scan.copy_(views.scan[source_page : source_page + 1])
        self.conv_states[0], self.recurrent_states[0] = conv, scan
        self.is_conv_states_initialized[0] = True
        self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = written_tokens > 0
        self.conv_kernel_size[0] = conv.shape[-1]
