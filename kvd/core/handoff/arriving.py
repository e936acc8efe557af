"""Receives whose engine uses what has come before the rest: how far that is, and who hears of it.

The writer says with Progress which pages are whole, and their sums; our transfer process compares
them (``verify``), and says so. The pages up to the first that is not known to be good are the ones
that an engine may load from: its lease counts them as written, and is its own with ``Received``.
What was loaded before counts then, and not before: the rest may never come. No page of them is
written again: a writer writes each once. The commit at the end may take equal cached pages in their
place; those that a copy reads stay until it is over, and none begins of them after that.

What must not live here: the sums (``verify``), transitions (``receive``), and the copies that are
made of them (``engine_copies``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.protocol import Decode
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart
    from kvd.core.handoff.payload import Payload
    from kvd.core.handoff.verify import Verifying
    from kvd.core.inputs import LandedGood
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox

COMING = (Decode.OFFERED, Decode.RECEIVING)


@mypyc_attr(allow_interpreted_subclasses=True)
class Arrivals:
    """Those of this node."""

    def __init__(
        self, payload: Payload, verifying: Verifying, leases: LeaseTable, out: Outbox
    ) -> None:
        self._payload = payload
        self._verifying = verifying
        self._leases = leases
        self._out = out

    def can_tell(self, attempt: ReceiveAttempt, lease: LeaseRecord) -> bool:
        """Whether its engine wants to hear how far it has come, and can be told.

        Not of several sources, each of which has a part of each prompt's pages; nor of what has no
        tokens in a row, as windows and states.
        """
        return (
            attempt.as_it_comes
            and len(attempt.parts) == 1
            and not attempt.is_pulled
            and not attempt.is_preloaded
            and lease.lent is None
            and not self._leases.components.each
        )

    def verified(self, got: LandedGood) -> None:
        """Our transfer process has compared the first pages of one route, and they are good."""
        part, index = self._verifying.ahead.get(got.ticket, (None, 0))
        # It may be over, or its last word may have come: then the end says what there is to say.
        if part is None or part.state not in COMING or part.ended is not None:
            return
        part.arrived[index] = max(got.pages, part.arrived.get(index, 0))
        tokens, attempt, lease = self._tokens(part), part.attempt, part.lease
        if lease is None or tokens <= attempt.arrived_tokens:
            return
        is_first, attempt.arrived_tokens = not attempt.arrived_tokens, tokens
        lease.written_tokens = max(lease.written_tokens, tokens)
        row = lease.page_table if is_first else b""
        told = client.Arriving(receive=attempt.id, lease=lease.id, tokens=tokens, pages=row)
        self._out.answer(attempt.session, told)

    def _tokens(self, part: ReceivePart) -> int:
        """So many of the first tokens are in pages that are good, along every route."""
        found = part.prompt_tokens
        for index, seal in enumerate(part.seals):
            if seal.first < seal.end:
                grant = part.routes[index].grant
                size = self._payload.parts[grant].component.page_size
                found = min(found, (seal.first + part.arrived.get(index, 0)) * size)
        return found
