"""A lease in the engine's hands."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from kvd.client.tokens import token_frame
from kvd.errors import Code, KvdError, Refusal
from kvd.wire import client as wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvd.client.pool import Pools
    from kvd.client.port import Port
    from kvd.client.state import LeaseState
    from kvd.client.tokens import TokenIds


class Lease:
    """A locked prefix and held pages. It lasts until ``release``, or the death of the session."""

    def __init__(self, port: Port, pools: Pools, state: LeaseState) -> None:
        self._port = port
        self._pools = pools
        self._state = state

    @property
    def id(self) -> int:
        """The lease's number, as ``kvd why lease`` takes it."""
        return self._state.number

    @property
    def prefix_len(self) -> int:
        """Tokens that were cached already when the lease began; page aligned."""
        return self._state.prefix_tokens

    @property
    def is_released(self) -> bool:
        """Whether ``release`` has been answered."""
        return self._state.is_released

    @property
    def pages(self) -> NDArray[np.int32]:
        """Page ids of all its tokens and of the reserve, in token order; read-only.

        A commit may swap pages for equal cached ones: read this again after it. ``torch`` knows no
        read-only tensors, so it takes a copy: ``torch.from_numpy(lease.pages.copy())``.

        Raises:
            KvdError: ``unknown-lease`` after the release: the pages are someone else's now.
        """
        if self._state.is_released:
            raise KvdError(
                Refusal(
                    Code.UNKNOWN_LEASE,
                    f"lease {self.id} was released: its pages may be someone else's by now",
                    side="client",
                )
            )
        return self._state.pages

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """Page ids of one component.

        Raises:
            KvdError: ``bad-request`` when no pool has such a component.
        """
        self._pools.check_leased(component)
        return self.pages

    async def extend(self, n_tokens: int) -> None:
        """Hold pages for ``n_tokens`` more; never waits.

        Raises:
            KvdError: ``no-room`` with the numbers and the holders; the lease is as it was.
        """
        request = wire.ExtendLease(
            self._port.connection.next_call(), self.id, operator.index(n_tokens)
        )
        await self._port.ask(request, wire.Row, lease=self._state)

    async def commit(self, new_tokens: TokenIds = ()) -> None:
        """The KV of the known tokens and of ``new_tokens`` is written: whole pages are cached.

        Raises:
            KvdError: ``bad-request`` when the lease holds no pages for so many tokens: ``extend``
                it first. It is as it was.
        """
        request = wire.CommitLease(self._port.connection.next_call(), self.id)
        await self._port.ask(request, wire.Row, tokens=token_frame(new_tokens), lease=self._state)

    async def release(self, new_tokens: TokenIds | None = None) -> None:
        """Unlock and free; the lease is over.

        Args:
            new_tokens: commit first: the known tokens and these; ``()`` for none beyond the known;
                left out: commit nothing.
        """
        call = self._port.connection.next_call()
        if new_tokens is None:
            await self._port.ask(wire.ReleaseLease(call, self.id), wire.Done, lease=self._state)
            return
        await self._port.ask(
            wire.CommitAndRelease(call, self.id),
            wire.Done,
            tokens=token_frame(new_tokens),
            lease=self._state,
        )
