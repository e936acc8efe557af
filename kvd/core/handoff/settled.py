"""The end of the prefill side: Settled is said until Closed is heard, and tombstones answer.

What happens from SETTLED on, and what is remembered of every handoff that has an id.

``Settled`` means *I will never again write for this handoff*, so it is said only when no post is
outstanding. It is repeated until the decode side says Closed, or is replaced by a newer
incarnation, or has been silent for ``linger_s``; then a small tombstone stays, until the decode
side's floor has passed its id. One that is heard answers each Settled that reaches it: messages
that are lost must not end that, so it is asked ``PATIENCE`` times as long.

What the prefill side remembers of one decode incarnation: its handoffs, in the order of ids.

Every Ping asks which closed ones are below the floor, every beat which is the lowest open one. Both
cost what they answer, not what is remembered: a peer that leaves sixteen thousand tombstones here
makes neither dearer.

Invariant: ``open`` and ``closed`` are ascending, have no id in common, and together all of
``parts``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.message_sizes import page_id_bytes
from kvd.core.handoff.parts import PostSums
from kvd.core.handoff.protocol import Prefill, PrefillTrigger
from kvd.core.handoff.refusals import never_delivered
from kvd.core.handoff.sources import span_of
from kvd.core.handoff.transitions import move_prefill, tell_ended
from kvd.core.peers.peer import as_told
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, amount
from kvd.wire import client
from kvd.wire.peer import Closed, ReceiveOutcome, Settled

if TYPE_CHECKING:
    from kvd.core.handoff.parts import RequestName, SendPart
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.wire.peer import Offer


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffRecords:
    """The handoffs of one decode incarnation that this side answers for."""

    __slots__ = ("closed", "kept_bytes", "open", "parts")

    def __init__(self) -> None:
        self.parts: dict[int, SendPart] = {}
        """By handoff id."""
        self.open: list[int] = []
        """Those that may still be asked for pages, or wait for Closed."""
        self.closed: list[int] = []
        """Tombstones."""
        self.kept_bytes = 0
        """Of page ids in the Offers of the open ones."""

    def add_part(self, part: SendPart) -> None:
        """It has met its Offer or Abort."""
        self.parts[part.handoff] = part
        # Ids come in order but for overtaking, so this is an append nearly always.
        insort(self.open, part.handoff)

    def bury_part(self, handoff: int) -> None:
        """It is CLOSED: a tombstone from now on."""
        del self.open[bisect_left(self.open, handoff)]
        insort(self.closed, handoff)

    def fold(self, floor: int) -> None:
        """Forget the tombstones below the floor."""
        n_over = bisect_left(self.closed, floor)
        for handoff in self.closed[:n_over]:
            del self.parts[handoff]
        del self.closed[:n_over]


FOREVER = 2**63
"""Above every id."""

PATIENCE = 4
"""Who is heard, and never says Closed, is asked so many times as long as who is silent: a peer that
means no good would be asked for ever."""

GRACE_S = 2.0
"""At least so long ``finish`` waits for Closed, even where its deadline has passed already."""

MAX_RECORDS = 16_384
"""Of one peer, tombstones included: half a minute of 500 handoffs a second."""

MAX_DOUBTED = 1024
"""Peers that were forgotten, and may ask about bytes in doubt: as many as may be known at once."""

MAX_OPEN = 4096
"""Of one peer, tombstones not included: each may keep an Offer with its pages."""

KEPT_PROMPTS = 4
"""The page ids that are kept of one peer are those of so many of the longest prompts, in pages of
one token. In pages of 16 tokens a prompt takes a sixteenth of that."""

MIN_KEPT_BYTES = 1024 * 1024
"""And so many at least: 256 page ids for each of ``MAX_OPEN`` Offers."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SettledSends:
    """Settled parts and tombstones, by decode incarnation and handoff id."""

    def __init__(self, settings: Settings, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self.records: dict[str, HandoffRecords] = {}
        """By decode incarnation, every part that has met an Offer or an Abort, live ones too."""
        self.settled: dict[int, SendPart] = {}
        """By send id: those that wait for Closed."""
        self.named: dict[RequestName, SendPart] = {}
        """Of these the ones with a request id."""
        components = len(settings.spec.components)
        longest = settings.max_prompt_tokens * ID_BYTES * components
        self.max_kept_bytes = max(MIN_KEPT_BYTES, KEPT_PROMPTS * longest)
        """Of the page ids of open Offers of one peer."""
        self.delivered = self.failed = 0
        self.doubted: dict[str, int] = {}
        """By decode incarnation that was forgotten: the last handoff whose bytes were in doubt."""
        self.is_all_doubted = False
        """Whether there were more of these than are remembered: any unknown handoff may be one."""
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._out = out

    @property
    def n_records(self) -> int:
        """Handoffs of all peers, tombstones included."""
        return sum(len(record.parts) for record in self.records.values())

    def add_part(self, part: SendPart) -> None:
        """The part has met its Offer or Abort: it answers for that handoff from now on."""
        records = self.records.get(part.incarnation)
        if records is None:
            records = self.records[part.incarnation] = HandoffRecords()
        records.add_part(part)

    def keep_offer(self, part: SendPart, offer: Offer, kept_bytes: int) -> None:
        """The Offer stays with its part until that is CLOSED, and so many bytes of page ids."""
        part.offer = offer
        self.records[part.incarnation].kept_bytes += kept_bytes

    def find_part(self, incarnation: str, handoff: int) -> SendPart | None:
        """The part that answers for this handoff."""
        records = self.records.get(incarnation)
        return None if records is None else records.parts.get(handoff)

    def is_full(self, peer: Peer, handoff: int, kept_bytes: int = 0) -> bool:
        """Refuse a message about a handoff that we would have to remember, and cannot.

        ``kept_bytes``: of the page ids that would be kept with it.

        A Reject, not a Settled: that would have to stay true, which only a record makes sure of.
        An honest peer repeats the message until there is room.
        """
        # Counted by incarnation: what a stranger leaves here is its own limit, and no honest
        # peer's.
        records = self.records.get(peer.incarnation)
        if records is None:
            return False  # the first handoff of a peer is always taken
        n_open, n_records = len(records.open), len(records.parts)
        kept = records.kept_bytes + kept_bytes
        if n_open < MAX_OPEN and n_records < MAX_RECORDS and kept <= self.max_kept_bytes:
            return False
        self._peers.reject(
            peer.link,
            peer.incarnation,
            Refusal(
                Code.NO_ROOM,
                f"handoff {handoff} of {peer.name}: {n_open} of it are open here and {n_records} "
                f"remembered, the limits are {MAX_OPEN} and {MAX_RECORDS}; their page ids would be "
                f"{amount(kept)} with this one, of {amount(self.max_kept_bytes)}",
                side=self._settings.name,
                numbers={"open": n_open, "records": n_records, "kept_bytes": kept},
            ),
        )
        return True

    def settle_part(self, part: SendPart, refusal: Refusal | None) -> None:
        """The part is SETTLED: let the source lease go, and say so from now on."""
        part.ended = refusal
        self.settled[part.id] = part
        if part.request is not None:
            self.named[part.session, part.room, part.request.id] = part
        # No post is outstanding, so nothing reads the source pages any more.
        self.let_go(part, "sent")
        # No answer for so long means that nobody will give one: the tombstone answers who asks yet.
        part.linger_s = self._out.at_s + self._settings.linger_s
        if part.offer is not None and part.share.parts > 1:
            # Closed comes when the other sources have settled too, or that side gives up.
            limit_s = self._settings.max_deadline_s
            part.linger_s += max(0.0, min(limit_s, part.offer.deadline_s))
        # ``finish`` waits for the outcome, but not longer than its engine asked for.
        part.answer_s = max(part.deadline_s, self._out.at_s + GRACE_S)
        part.resend_gap_s = self._settings.resend_s
        if part.incarnation in self._peers.by_incarnation:
            self.say_settled(part)
        else:  # a newer process of that node has said Hello meanwhile: nobody will answer
            self.outlive_part(part)
            self.fold_tombstones(part.incarnation)

    def end_forgotten(self, part: SendPart, refusal: Refusal) -> None:
        """It was never offered: there is nobody to tell but those who watch."""
        self.let_go(part, "never-offered")
        # Somebody wished it, the engine or the decode side: that is no failure of ours.
        if refusal.code is Code.ABORTED:
            part.outcome = ReceiveOutcome.ABORTED
        self._tell_ended(part, refusal)

    def let_go(self, part: SendPart, cause: str) -> None:
        """No page of it is read any more: its prompt and its lease are the engine's alone."""
        if part.engine is not None:
            self._leases.holders.release(part.engine.lease, f"send {part.id}", cause)
            # The tokens of a long prompt are megabytes: a part that lingers must not keep them.
            part.engine = None

    def say_settled(self, part: SendPart) -> None:
        """Say Settled, now, and again later."""
        # Counted even while there is no link to say it on: when it is back, the next tick says it.
        part.plan_resend(self._out.at_s, self._settings)
        # Said at the link where it speaks now, which may be another one than the Offer came by.
        peer = self._peers.by_incarnation.get(part.incarnation)
        outcome, why = part.outcome, part.ended
        if outcome is ReceiveOutcome.DELIVERED and part.state is Prefill.CLOSED:
            # Its aux is gone: without it nothing is delivered to who has not heard of it before.
            outcome = ReceiveOutcome.FAILED
            why = self._unknown("asks again after this side stopped waiting for it")
        if peer is not None:
            self._out.send(
                peer.link,
                Settled(
                    source=self._settings.incarnation,
                    target=part.incarnation,
                    handoff=part.handoff,
                    outcome=outcome,
                    reason=as_told(why, peer),
                    aux=self._aux(part) if outcome is ReceiveOutcome.DELIVERED else b"",
                    moved_bytes=part.moved_bytes,
                    in_doubt=part.in_doubt,
                    checksums=part.checksums if outcome is ReceiveOutcome.DELIVERED else b"",
                ),
            )

    def _aux(self, part: SendPart) -> bytes:
        """What the engine gave; the aux of the other sources of a handoff stays at home."""
        return (part.aux or b"") if part.share.is_authoritative else b""

    def answer_below_floor(self, peer: Peer, handoff: int) -> None:
        """An Abort of a handoff that is over, and folded: true for ever, so nothing is kept."""
        self._out.send(
            peer.link,
            Settled(
                source=self._settings.incarnation,
                target=peer.incarnation,
                handoff=handoff,
                outcome=ReceiveOutcome.ABORTED,
            ),
        )

    def closed(self, peer: Peer, message: Closed) -> SendPart | None:
        """How it ended over there, which ``finish`` waits for; the part if it was committed.

        Only what was delivered here can be committed there: of an id that was aborted or refused a
        peer may say anything, and it counts for nobody.
        """
        part = self.find_part(peer.incarnation, message.handoff)
        # A Closed that comes twice, or before we have settled, changes nothing.
        if part is None or part.state is not Prefill.SETTLED:
            return None
        is_committed = message.outcome is ReceiveOutcome.COMMITTED
        if is_committed and part.outcome is not ReceiveOutcome.DELIVERED:
            is_committed = False
            self._peers.reject(peer.link, peer.incarnation, never_delivered(part, self._settings))
        refusal = None
        if not is_committed:
            # What ended it here comes first: over there it is told as our failure, with fewer
            # words.
            refusal = part.ended or message.reason or Refusal(Code.ABORTED, message.outcome.value)
        self._settled_to_closed(part, PrefillTrigger.CLOSED, message.outcome._value_, refusal)
        return part if is_committed else None

    def outlive_part(self, part: SendPart) -> None:
        """Nobody will say Closed: a new process is there, or a silence, or it does not answer."""
        limit_s = self._settings.linger_s
        why = f"it restarted, or was silent for {limit_s:.0f} s"
        if part.incarnation in self._peers.by_incarnation and self._silent_s(part) < limit_s:
            why = f"it was heard, and did not answer for {PATIENCE * limit_s:.0f} s"
        unknown = self._unknown(f"never said whether it committed: {why}")
        self._settled_to_closed(part, PrefillTrigger.OUTLIVED, "", part.ended or unknown)

    def _unknown(self, what: str) -> Refusal:
        return Refusal(
            Code.UNKNOWN_OUTCOME,
            f"everything was sent, but the decode side {what}",
            side=self._settings.name,
        )

    def tick(self) -> None:
        """Repeat, and stop waiting for who never answers."""
        now_s = self._out.at_s
        # A copy: who is outlived leaves.
        for part in list(self.settled.values()):
            if part.linger_s <= now_s and self._is_in_vain(part):
                self.outlive_part(part)
                continue
            # Asked at every tick; the second time ``finish_call`` is None and nothing is answered.
            if part.answer_s <= now_s:
                self._answer_finish(
                    part, self._unknown("has not said whether it committed by the deadline")
                )
            if part.resend_s <= now_s:
                self.say_settled(part)

    def _is_in_vain(self, part: SendPart) -> bool:
        """Whether to ask no more; its time of silence is over since it settled."""
        limit_s = self._settings.linger_s
        asked_too_long = self._out.at_s >= part.linger_s + (PATIENCE - 1) * limit_s
        return asked_too_long or self._silent_s(part) >= limit_s

    def _silent_s(self, part: SendPart) -> float:
        peer = self._peers.by_incarnation.get(part.incarnation)
        return float("inf") if peer is None else self._out.at_s - peer.heard_s

    def fold_tombstones(self, incarnation: str, floor: int = FOREVER) -> None:
        """Drop tombstones below the decode side's floor: they are never asked about again.

        No floor: its process is over, and they answer nobody.
        """
        records = self.records.get(incarnation)
        if records is not None:
            records.fold(floor)
            if not records.parts:
                del self.records[incarnation]
        if self.doubted and self.doubted.get(incarnation, FOREVER) < floor:
            del self.doubted[incarnation]

    def forget_peer(self, incarnation: str) -> None:
        """It has been silent for so long that nothing is kept of it; it may come back all the same.

        Then it says Abort of what it still waits for, and must not hear that nothing can land.
        """
        records = self.records.get(incarnation)
        parts = records.parts if records is not None else {}
        # It may have been forgotten before, and have asked for nothing yet.
        before = self.doubted.get(incarnation, 0)
        last = max([before, *(number for number, part in parts.items() if part.in_doubt)])
        self.fold_tombstones(incarnation)
        if last and len(self.doubted) < MAX_DOUBTED:
            self.doubted[incarnation] = last
        elif last:
            self.is_all_doubted = True

    def is_doubtful(self, incarnation: str, handoff: int) -> bool:
        """Whether bytes may be in doubt of a handoff that nobody here knows."""
        return self.is_all_doubted or handoff <= self.doubted.get(incarnation, 0)

    def floor(self, peer: Peer) -> int:
        """Handoff ids of this peer below it are closed here, and no Offer of them can come.

        Never above what the decode side has closed: an id that we have not met may still be open
        there, and its outcome must be kept for us.
        """
        records = self.records.get(peer.incarnation)
        # The lowest: below it every handoff that we have met is closed here.
        still_open = records.open[:1] if records is not None else []
        return min([peer.offer_floor, *still_open])

    def tell_engine(self, part: SendPart, refusal: Refusal) -> None:
        """The engine hears of a failure at once; a waiting ``finish`` is answered with it."""
        part.ended = refusal
        # A part that was only offered has no engine to tell; its peer hears Settled.
        if part.session:
            if part.is_numbered:
                self._out.answer(part.session, client.SendFailed(part.id, refusal))
            self._answer_finish(part, refusal)

    def _answer_finish(self, part: SendPart, refusal: Refusal | None) -> None:
        if part.finish_call is not None:
            self._out.answer(
                part.session,
                client.Finished(
                    call=part.finish_call,
                    failure=refusal,
                    decode_prefix_len=part.decode_prefix_len,
                    sent_pages=part.posted_pages,
                    sent_bytes=part.moved_bytes,
                ),
            )
            part.finish_call = None

    def _settled_to_closed(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal | None
    ) -> None:
        """CLOSED or OUTLIVED: answer ``finish``, tell everybody, keep a small tombstone."""
        move_prefill(part, trigger, why, self._out)
        self._answer_finish(part, refusal)
        self._tell_ended(part, refusal)
        self.settled.pop(part.id, None)
        if part.request is not None:
            self.named.pop((part.session, part.room, part.request.id), None)
        records = self.records[part.incarnation]
        records.bury_part(part.handoff)
        # What is large goes; the tombstone must only answer an Offer or Abort that comes late.
        if part.offer is not None:
            records.kept_bytes -= page_id_bytes(part.offer)
            part.offer = None
        part.ended = refusal
        part.aux = b""
        part.sums = PostSums()

    def _saved_bytes(self, part: SendPart) -> int:
        """What was not sent because it was cached over there: this source's share of it."""
        cached = span_of(part.share, 0, part.decode_prefix_len, self._leases.page_size)
        return self._leases.bytes_of(cached.end - cached.start)

    def _tell_ended(self, part: SendPart, refusal: Refusal | None) -> None:
        if refusal is None:
            self.delivered += 1
        else:
            self.failed += 1
        tell_ended(
            part,
            ReceiveOutcome.COMMITTED if refusal is None else part.outcome,
            refusal,
            prefix_tokens=part.decode_prefix_len,
            saved_bytes=self._saved_bytes(part) if refusal is None else 0,
            lease=0,
            out=self._out,
        )
