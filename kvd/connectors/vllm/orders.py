"""What the two halves tell each other: both travel with vLLM's own messages, once a step.

Page numbers mean nothing by themselves. They are of a lease, the lease is of a session, and the
session is of one life of the daemon: after a restart the same numbers may be another engine's. So
each order has the key of its lease, and the workers hold it against what they have joined.
"""

from __future__ import annotations

import msgspec

from kvd.client import LeaseKey


class CopyOrder(msgspec.Struct, frozen=True):
    """Pages of a lease and blocks of the engine that stand for the same tokens, pair by pair.

    ``upto_tokens``: the KV of all tokens of the request below is there once this is done.
    """

    request: str
    key: LeaseKey
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    upto_tokens: int


class StepOrders(msgspec.Struct, frozen=True):
    """For the workers: what to copy before and after the forward pass of this step.

    ``number``: of the step; the report of it says the same. ``token`` opens the session that the
    workers are to be of, empty: of none. ``session`` and ``incarnation``: as in the keys of its
    leases; 0 and empty while nobody can be asked. ``failed``: requests whose blocks nobody fills.
    ``freed``: requests that are over, whose blocks are needed no more. Both are reported at once.
    """

    number: int = 0
    token: bytes = b""
    session: int = 0
    incarnation: str = ""
    loads: tuple[CopyOrder, ...] = ()
    saves: tuple[CopyOrder, ...] = ()
    failed: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()

    def are_of(self, key: LeaseKey) -> bool:
        """Whether a lease with that key is of the session that can be asked now."""
        return (key.session, key.incarnation) == (self.session, self.incarnation)


class StepReport(msgspec.Struct):
    """For the scheduler's half: by request, how far its KV is saved. Of several ranks the least.

    ``lost``: requests of which something could not be copied out; what is behind is not saved.
    ``again``: nothing was copied of it yet, since the rank was not of that session: order it anew.
    ``number``: of the step whose orders this answers; left out: of the last one. ``unfit``: why the
    engine's blocks are no pages of the pool.
    """

    saved: dict[str, int]
    lost: set[str]
    again: set[str] = msgspec.field(default_factory=set)
    number: int | None = None
    unfit: str = ""

    def with_rank(self, other: StepReport) -> StepReport:
        """What holds for both."""
        lost = self.lost | other.lost
        both = {
            request: min(upto, other.saved[request])
            for request, upto in self.saved.items()
            if request in other.saved and request not in lost
        }
        numbers = [number for number in (self.number, other.number) if number is not None]
        return StepReport(
            saved=both,
            lost=lost,
            again=(self.again | other.again) - lost,
            number=min(numbers, default=None),
            unfit=self.unfit or other.unfit,
        )
