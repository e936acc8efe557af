"""KV that says whose it is: every byte of a token's KV is its id, in whatever components it lies.

What lives here: writing it through a pool's views and looking whether it is still there. So whoever
reads a page can tell whether it is the right one, without a model. What must not: leases, daemons.

A component with slots for tokens (the first, its companions, windows) has the id in each slot that
has a page; a state has a digest of all tokens that it stands for. A device buffer holds copies of
the first component, made by the daemon: it is not written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvd.types import Tokens, count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.client import Pool
    from kvd.client.lease import Lease

COLOURS = 251
"""Values of a byte: a prime, so that tokens a page apart differ."""


class ComponentBytes(NamedTuple):
    """A component with bytes: its tensors as bytes, each ``(pages, ...)``.

    ``page_size`` is in tokens, 0 for a state.
    """

    name: str
    page_size: int
    tensors: tuple[NDArray[np.uint8], ...]


class WrittenTokens(NamedTuple):
    """The KV of ``tokens[first:last]`` in the pages of a lease on these tokens."""

    lease: Lease
    tokens: Tokens | memoryview
    first: int
    last: int


class TokenMemory:
    """The bytes of a pool, by token."""

    def __init__(self, pool: Pool) -> None:
        self._parts: list[ComponentBytes] = []
        for component in pool.memory.components:
            if not component.total_bytes or component.extent == "buffer":
                continue
            layers = sorted({place.layer for place in component.tensors})
            views = [view for layer in layers for view in pool.view(component.name, layer=layer)]
            tensors = tuple(view.view(torch.uint8).numpy() for view in views)
            is_state = component.extent == "per-request"
            self._parts.append(
                ComponentBytes(component.name, 0 if is_state else component.page_size, tensors)
            )

    def write(self, *pieces: WrittenTokens) -> None:
        """The KV of these tokens, in every layer of every component."""
        for part in self._parts:
            found = [_places(part, piece) for piece in pieces]
            *places, values = [np.concatenate(column) for column in zip(*found, strict=True)]
            for tensor in part.tensors:
                shape = values.shape + (1,) * (tensor.ndim - len(places))
                tensor[tuple(places)] = values.reshape(shape)

    def check(self, lease: Lease, tokens: Tokens) -> None:
        """The lease's pages hold the KV of these tokens, where it has pages for them.

        Looks at a byte of each token, in the first and the last tensor of every component.

        Raises:
            AssertionError: they do not.
        """
        for part in self._parts:
            *places, values = _places(
                part, WrittenTokens(lease=lease, tokens=tokens, first=0, last=count(tokens))
            )
            for tensor in (part.tensors[0], part.tensors[-1]):
                found = tensor[(*places, *[0] * (tensor.ndim - len(places)))]
                wrong = np.flatnonzero(found != values)
                assert not wrong.size, f"foreign {part.name}: place {wrong[0]} of {values.size}"


def _places(part: ComponentBytes, piece: WrittenTokens) -> tuple[NDArray[np.integer], ...]:
    """Indices into the part's tensors, an array for each axis; last the bytes that belong there."""
    ids = np.frombuffer(piece.tokens, "<i4")
    row = piece.lease.pages_of(part.name)
    if not part.page_size:
        digest = int(ids[: piece.last].sum(dtype=np.int64)) % COLOURS
        return row[1:], np.array([digest], np.uint8)
    positions = np.arange(piece.first, piece.last)
    pages = row[positions // part.page_size]
    is_there = pages > 0
    positions = positions[is_there]
    return (
        pages[is_there],
        positions % part.page_size,
        (ids[positions] % COLOURS).astype(np.uint8),
    )
