"""What the two halves tell each other: both travel with vLLM's own messages, once a step."""

from __future__ import annotations

import msgspec


class CopyOrder(msgspec.Struct, frozen=True):
    """Pages of a lease and blocks of the engine that stand for the same tokens, pair by pair.

    ``upto_tokens``: the KV of all tokens of the request below is there once this is done.
    """

    request: str
    lease: int
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    upto_tokens: int


class StepOrders(msgspec.Struct, frozen=True):
    """For the workers: what to copy before and after the forward pass of this step.

    ``token`` is of the session whose pages these are. ``failed``: requests whose blocks nobody
    fills: they are reported at once.
    """

    token: bytes = b""
    loads: tuple[CopyOrder, ...] = ()
    saves: tuple[CopyOrder, ...] = ()
    failed: tuple[str, ...] = ()


class StepReport(msgspec.Struct):
    """For the scheduler's half: by request, how far its KV is saved. Of several ranks the least.

    ``lost``: requests of which something could not be copied out; what is behind is not saved.
    """

    saved: dict[str, int]
    lost: set[str]

    def with_rank(self, other: StepReport) -> StepReport:
        """What holds for both."""
        both = {
            request: min(upto, other.saved[request])
            for request, upto in self.saved.items()
            if request in other.saved
        }
        return StepReport(both, self.lost | other.lost)
