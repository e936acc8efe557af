"""What the two halves tell each other: both travel with vLLM's own messages, once a step.

Page numbers mean nothing by themselves. They are of a lease, the lease is of a session, and the
session is of one life of the daemon: after a restart the same numbers may be another engine's. So
each order has the key of its lease, and the workers hold it against what they have joined.

An order is under way from the step that makes it until every rank has answered it, by its number:
copied, or not and never going to be. Many steps may lie between.
"""

from __future__ import annotations

import msgspec

from kvd.client import LeaseKey
from kvd.client.mover.pieces import NO_BLOCK


class AdapterWeights(msgspec.Struct, frozen=True):
    """Those that an adapter's name stands for: by vLLM's number of it, and files as they lie there.

    ``stamp``: as ``weights.stamp_of`` says it.
    """

    number: int
    stamp: str


class CopyOrder(msgspec.Struct, frozen=True):
    """Pages of a lease and blocks of the engine that stand for the same tokens, pair by pair.

    ``blocks``: a row for each group of layers; ``NO_BLOCK`` where that has none for these tokens.
    ``number``: of this order, which no other one has. ``first_page``: where ``pages`` begin among
    those of the lease. ``upto_tokens``: the KV of all tokens of the request below is there once
    this is done, and what was ordered before it. ``is_last``: false: a load of which more follow,
    so that vLLM hears of none yet. ``adapter``: a rank that has read other files for it copies
    nothing.
    """

    number: int
    request: str
    key: LeaseKey
    first_page: int
    pages: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    upto_tokens: int
    is_last: bool = True
    adapter: AdapterWeights | None = None

    @property
    def used(self) -> tuple[int, ...]:
        """Blocks that it reads or writes."""
        found: tuple[int, ...] = ()
        for row in self.blocks:
            found += row if NO_BLOCK not in row else tuple(b for b in row if b != NO_BLOCK)
        return found


class StepOrders(msgspec.Struct, frozen=True):
    """For the workers: what to copy from this step on.

    ``number``: of the step. ``token`` opens the session that the workers are to be of, empty: of
    none. ``session`` and ``incarnation``: as in the keys of its leases; 0 and empty while nobody
    can be asked. ``is_idle``: nothing is computed in this step. ``failed``: requests whose blocks
    nobody fills. ``freed``: requests that are over, whose blocks are needed no more. Both are
    reported at once. ``awaited``: orders whose blocks are another one's from this step on, so that
    they end before it begins.
    """

    number: int = 0
    token: bytes = b""
    session: int = 0
    incarnation: str = ""
    is_idle: bool = False
    loads: tuple[CopyOrder, ...] = ()
    saves: tuple[CopyOrder, ...] = ()
    failed: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()
    awaited: tuple[int, ...] = ()

    def are_of(self, key: LeaseKey) -> bool:
        """Whether a lease with that key is of the session that can be asked now."""
        return (key.session, key.incarnation) == (self.session, self.incarnation)


class StepReport(msgspec.Struct):
    """For the scheduler's half: by the number of an order, how many ranks have answered it.

    ``done``: these have copied their part. ``failed``: these have not, and write or read nothing of
    it any more. ``number``: of the step that this was said in; left out: of the last one.
    ``unfit``: why the engine's blocks are no pages of the pool. ``adapters``: by number, the stamp
    of the files that vLLM has read since the last time; empty: it has read unlike ones.
    """

    done: dict[int, int] = msgspec.field(default_factory=dict)
    failed: dict[int, int] = msgspec.field(default_factory=dict)
    number: int | None = None
    unfit: str = ""
    adapters: dict[int, str] = msgspec.field(default_factory=dict)

    def with_rank(self, other: StepReport) -> StepReport:
        """What both say."""
        numbers = [number for number in (self.number, other.number) if number is not None]
        return StepReport(
            done=_summed(self.done, other.done),
            failed=_summed(self.failed, other.failed),
            number=min(numbers, default=None),
            unfit=self.unfit or other.unfit,
            adapters={
                number: stamp
                if self.adapters.get(number, stamp) == other.adapters.get(number, stamp)
                else ""
                for number, stamp in (other.adapters | self.adapters).items()
            },
        )


def _summed(mine: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {order: mine.get(order, 0) + others.get(order, 0) for order in {*mine, *others}}
