"""The handoff protocol as data: which trigger leads from which state to which.

Two machines, one per side of a part. Everything that changes a handoff's state is a row here; a
pair without a row is illegal and raises ``IllegalTransition`` with the history of the handoff. What
happens on the edge (messages, pages, locks) is ``receive`` and ``send`` (and ``settled`` for its
last edge): a row from one state to another has a method there that is named after it, as
``offered_or_receiving_to_draining``; a row that stays in its state fires in the handler of what has
happened. The exhaustive model in ``tests/model`` explores exactly these rows over a link that
loses, repeats and reorders.

Theory of operation. The decode side owns the pages and repeats its last message until the writer
has said ``Settled``: *I will never again write for this handoff*. A handoff that may have been
accepted is never freed, only drained: ``DRAINING`` ends by ``Settled``, by a fence, or by proof
that the writer is gone, and by nothing else. The prefill side repeats ``Settled`` until ``Closed``.

A receive from several sources has a part for each, and one lease for all of them. Each part has a
state of its own and is drained alone; what they have in common happens on the edges. They become
READY together, when the last one is verified. Where one fails or the receive is given up, those
that are asked for are given up too, and those that are verified, or about to be, are dropped. The
lease's pages come back when no part of it is OFFERED, RECEIVING or DRAINING.

Handoff ids are assigned when the Offer is sent and grow within an incarnation. Each side tells the
other the lowest id it still cares about; below that floor everything is refused or ignored, so that
tombstones stay bounded.

One transition: the table decides, the part's history remembers, the event tells.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.wire.events import HandoffEnded, Moved

if TYPE_CHECKING:
    from kvd.core.handoff.parts import PartHistory, ReceivePart, SendPart
    from kvd.core.outbox import Outbox
    from kvd.errors import Refusal
    from kvd.wire.peer import ReceiveOutcome


class Decode(enum.Enum):
    """States of one part on the side that receives the KV."""

    # By identity, which no hash of a name is faster than: a part is asked for its state all along.
    __hash__ = object.__hash__

    QUEUED = "queued"
    OFFERED = "offered"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


class DecodeTrigger(enum.Enum):
    """What can happen to a part on the decode side."""

    __hash__ = object.__hash__

    ADMITTED = "admitted"
    """Peer ready, prefix locked, delta pages held."""
    GIVEN_UP = "given-up"
    """Cancelled, deadline, stalled, client gone, peer lost, or it can never fit."""
    ACCEPTED = "accepted"
    DELIVERED = "delivered"
    """Settled(DELIVERED): every byte has landed."""
    SETTLED = "settled"
    """Settled with any other outcome."""
    VERIFIED = "verified"
    CORRUPTED = "corrupted"
    DROPPED = "dropped"
    """Another source of the same receive failed: what this one has delivered is of no use."""
    WRITER_GONE = "writer-gone"
    """Proof, never a guess: new incarnation, or our own restart after reaping."""
    FENCED = "fenced"
    """Our receiving transfer process was reaped and its successor is another generation."""
    RELEASED = "released"
    """The lease that came out of it was released, or its client is gone."""


class Prefill(enum.Enum):
    """States of one part on the side that sends the KV."""

    __hash__ = object.__hash__

    AWAIT_ENGINE = "await-engine"
    AWAIT_OFFER = "await-offer"
    STREAMING = "streaming"
    FLUSHING = "flushing"
    DRAINING = "draining"
    SETTLED = "settled"
    CLOSED = "closed"
    FORGOTTEN = "forgotten"


class PrefillTrigger(enum.Enum):
    """What can happen to a part on the prefill side."""

    __hash__ = object.__hash__

    ENGINE_OPENED = "engine-opened"
    OFFERED = "offered"
    ADVANCED = "advanced"
    FINISHED = "finished"
    """The engine said that the last token's KV is written, and gave the aux."""
    FLUSHED = "flushed"
    """The last post is done, or there was nothing to post."""
    ABORTED = "aborted"
    """The decode side said Abort."""
    GIVEN_UP = "given-up"
    """Engine failed, client gone, post failed, peer lost, deadline."""
    REFUSED = "refused"
    """The two sides' prompts, pages or generations do not agree."""
    DRAINED = "drained"
    """No post is outstanding: each is done, or its sending agent is destroyed."""
    CLOSED = "closed"
    """The decode side told its outcome."""
    OUTLIVED = "outlived"
    """A newer decode incarnation, or nobody said Closed before the deadline."""


D, DT, P, PT = Decode, DecodeTrigger, Prefill, PrefillTrigger

DECODE: dict[tuple[Decode, DecodeTrigger], Decode] = {
    (D.QUEUED, DT.ADMITTED): D.OFFERED,
    # No Offer has left: nobody knows of the pages, and nothing is drained.
    (D.QUEUED, DT.GIVEN_UP): D.CLOSED,
    (D.OFFERED, DT.ACCEPTED): D.RECEIVING,
    # Accept may be lost or overtaken, and a writer with nothing to post settles without it: what
    # RECEIVING hears, OFFERED may hear first.
    (D.OFFERED, DT.DELIVERED): D.VERIFYING,
    (D.OFFERED, DT.SETTLED): D.CLOSED,
    # Not CLOSED, though no Accept was heard: the Offer may have arrived and its pages be written.
    (D.OFFERED, DT.GIVEN_UP): D.DRAINING,
    # A proof, so nothing is left to drain; bytes in flight are the quarantine's question.
    (D.OFFERED, DT.WRITER_GONE): D.CLOSED,
    # The new transport generation ends it over there, and its Settled says why.
    (D.OFFERED, DT.FENCED): D.OFFERED,
    # Accept answers each repeated Offer.
    (D.RECEIVING, DT.ACCEPTED): D.RECEIVING,
    (D.RECEIVING, DT.DELIVERED): D.VERIFYING,
    (D.RECEIVING, DT.SETTLED): D.CLOSED,
    (D.RECEIVING, DT.GIVEN_UP): D.DRAINING,
    (D.RECEIVING, DT.WRITER_GONE): D.CLOSED,
    (D.RECEIVING, DT.FENCED): D.RECEIVING,
    (D.VERIFYING, DT.VERIFIED): D.READY,
    (D.VERIFYING, DT.CORRUPTED): D.CLOSED,
    (D.VERIFYING, DT.DROPPED): D.CLOSED,
    # The bytes are here and nobody writes them any more: what remains is to look at them.
    (D.VERIFYING, DT.GIVEN_UP): D.VERIFYING,
    # Late messages of a writer that has settled: it has said its last word, and keeps to it.
    (D.VERIFYING, DT.ACCEPTED): D.VERIFYING,
    (D.VERIFYING, DT.DELIVERED): D.VERIFYING,
    (D.VERIFYING, DT.WRITER_GONE): D.VERIFYING,
    (D.VERIFYING, DT.FENCED): D.VERIFYING,
    (D.DRAINING, DT.ACCEPTED): D.DRAINING,
    (D.DRAINING, DT.GIVEN_UP): D.DRAINING,
    # Only these four end a drain. There is no row for a deadline, and must be none.
    (D.DRAINING, DT.DELIVERED): D.CLOSED,
    (D.DRAINING, DT.SETTLED): D.CLOSED,
    (D.DRAINING, DT.WRITER_GONE): D.CLOSED,
    (D.DRAINING, DT.FENCED): D.CLOSED,
    (D.READY, DT.RELEASED): D.CLOSED,
    # The pages are the lease's, and no writer has them: nothing that it does matters any more.
    (D.READY, DT.ACCEPTED): D.READY,
    (D.READY, DT.DELIVERED): D.READY,
    (D.READY, DT.WRITER_GONE): D.READY,
    (D.READY, DT.FENCED): D.READY,
}
"""Decode side. ``CLOSED`` has no rows: a closed part is a tombstone that answers Closed again."""

PREFILL: dict[tuple[Prefill, PrefillTrigger], Prefill] = {
    (P.AWAIT_ENGINE, PT.ENGINE_OPENED): P.STREAMING,
    (P.AWAIT_ENGINE, PT.OFFERED): P.AWAIT_ENGINE,
    # Without an engine nothing was posted, so there is nothing to drain.
    (P.AWAIT_ENGINE, PT.ABORTED): P.SETTLED,
    (P.AWAIT_ENGINE, PT.GIVEN_UP): P.SETTLED,
    (P.AWAIT_ENGINE, PT.REFUSED): P.SETTLED,
    (P.AWAIT_OFFER, PT.OFFERED): P.STREAMING,
    # The engine does not wait for the Offer: what it writes is posted when that comes.
    (P.AWAIT_OFFER, PT.ADVANCED): P.AWAIT_OFFER,
    (P.AWAIT_OFFER, PT.FINISHED): P.AWAIT_OFFER,
    # No handoff id yet, so nothing to settle and nobody who would ask again.
    (P.AWAIT_OFFER, PT.GIVEN_UP): P.FORGOTTEN,
    (P.STREAMING, PT.OFFERED): P.STREAMING,
    (P.STREAMING, PT.ADVANCED): P.STREAMING,
    (P.STREAMING, PT.FINISHED): P.FLUSHING,
    # Not SETTLED: posts that are under way cannot be called back, and may still write.
    (P.STREAMING, PT.ABORTED): P.DRAINING,
    (P.STREAMING, PT.GIVEN_UP): P.DRAINING,
    (P.FLUSHING, PT.OFFERED): P.FLUSHING,
    (P.FLUSHING, PT.FLUSHED): P.SETTLED,
    (P.FLUSHING, PT.ABORTED): P.DRAINING,
    (P.FLUSHING, PT.GIVEN_UP): P.DRAINING,
    (P.DRAINING, PT.OFFERED): P.DRAINING,
    (P.DRAINING, PT.ABORTED): P.DRAINING,
    (P.DRAINING, PT.GIVEN_UP): P.DRAINING,
    # The only way out, and no deadline takes it: Settled must be true when it is said.
    (P.DRAINING, PT.DRAINED): P.SETTLED,
    # Late messages are answered with Settled again, which is still true.
    (P.SETTLED, PT.OFFERED): P.SETTLED,
    (P.SETTLED, PT.ABORTED): P.SETTLED,
    (P.SETTLED, PT.GIVEN_UP): P.SETTLED,
    (P.SETTLED, PT.CLOSED): P.CLOSED,
    (P.SETTLED, PT.OUTLIVED): P.CLOSED,
}
"""Prefill side. ``CLOSED`` is a tombstone; ``FORGOTTEN`` never had an id and leaves nothing.

No rows by intent: the engine outruns its part, so ``advance`` and ``finish`` for one that is past
``FLUSHING`` are answered and fire nothing; an Offer that is refused in a room that awaits one
settles its own id, as a record apart (``AWAIT_ENGINE``, ``REFUSED``), and the room awaits on.
"""


class IllegalTransition(Exception):
    """A trigger without a row: a bug in the daemon, reported with the handoff's history."""


def decode_next(state: Decode, trigger: DecodeTrigger) -> Decode:
    """The state after ``trigger``; raises ``IllegalTransition`` where the table has no row."""
    try:
        return DECODE[state, trigger]
    except KeyError:
        raise _no_row("decode", state, trigger) from None


def prefill_next(state: Prefill, trigger: PrefillTrigger) -> Prefill:
    """The state after ``trigger``; raises ``IllegalTransition`` where the table has no row."""
    try:
        return PREFILL[state, trigger]
    except KeyError:
        raise _no_row("prefill", state, trigger) from None


def _no_row(
    side: str, state: Decode | Prefill, trigger: DecodeTrigger | PrefillTrigger
) -> IllegalTransition:
    return IllegalTransition(f"{side} side: no row for {trigger.value} in {state.value}")


@mypyc_attr(allow_interpreted_subclasses=True)
class RowWords:
    """A row of a table in the words of events and histories: made once, told for every part."""

    __slots__ = ("after", "before", "line", "side", "trigger")

    def __init__(self, side: str, before: str, trigger: str, after: str) -> None:
        self.side = side
        self.before = before
        self.trigger = trigger
        self.after = after
        self.line = f"{before} -> {after} ({trigger}"

    def tell(
        self, part_id: int, room: int, peer: str, why: str, history: PartHistory, out: Outbox
    ) -> None:
        """A part has gone from one state to another."""
        history.add_line(out.at_s, f"{self.line}: {why})" if why else f"{self.line})")
        out.seq = seq = out.seq + 1
        # By position, as the events of leases.
        out.events.append(
            Moved(
                seq,
                out.at_s,
                self.side,
                part_id,
                room,
                peer,
                self.before,
                self.after,
                self.trigger,
                why,
            )
        )


_DECODE_WORDS: dict[tuple[Decode, DecodeTrigger], RowWords] = {
    row: RowWords("decode", row[0].value, row[1].value, after.value)
    for row, after in DECODE.items()
}

_PREFILL_WORDS: dict[tuple[Prefill, PrefillTrigger], RowWords] = {
    row: RowWords("prefill", row[0].value, row[1].value, after.value)
    for row, after in PREFILL.items()
}


def move_decode(part: ReceivePart, trigger: DecodeTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the decode side."""
    before = part.state
    part.state = after = decode_next(before, trigger)
    # A repeated message fires its row again; only what has changed is worth a line and an event.
    if after is not before:
        words = _DECODE_WORDS[before, trigger]
        words.tell(part.id, part.attempt.room, part.peer, why, part.history, out)


def move_prefill(part: SendPart, trigger: PrefillTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the prefill side."""
    before = part.state
    part.state = after = prefill_next(before, trigger)
    if after is not before:
        words = _PREFILL_WORDS[before, trigger]
        words.tell(part.id, part.room, part.peer, why, part.history, out)


def tell_ended(
    part: ReceivePart | SendPart,
    outcome: ReceiveOutcome,
    reason: Refusal | None,
    *,
    prefix_tokens: int,
    saved_bytes: int,
    lease: int,
    out: Outbox,
) -> None:
    """A part of either side is over; ``lease`` had its pages, 0 on the prefill side."""
    out.seq = seq = out.seq + 1
    # By position, as the events of leases.
    out.events.append(
        HandoffEnded(
            seq,
            out.at_s,
            "decode" if isinstance(part.state, Decode) else "prefill",
            part.id,
            part.room,
            part.peer,
            outcome._value_,  # ``value`` is two calls
            reason.code.value if reason else "",
            reason.message if reason else "",
            part.prompt_tokens,
            prefix_tokens,
            part.moved_bytes,
            saved_bytes,
            out.at_s - part.since_s,
            lease,
        )
    )
