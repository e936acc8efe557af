"""What the other end of a handoff says of it: asked over the peer links, for an operator.

An operator asks about a room. For each part of it here the daemon at its other end is asked once,
and once only; the answer goes out when all have spoken, or a second after the question, with a
reason for each that has not. Nothing is repeated, and nothing waits for it.

A peer is told only of a handoff that it is the other end of: incarnation, handoff and room must be
those of a part. A story is longer than the question, so one that asks all the time is not answered.
What it says about itself is shown, never believed: no state depends on it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvd.core import effects
from kvd.core.handoff.parts import ReceivePart
from kvd.core.inspect.rows import receive_row, send_row
from kvd.core.inspect.schema import ROOM
from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal
from kvd.wire import admin
from kvd.wire.peer import MAX_TOLD, AskStory, Story, Told

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from kvd.core.inputs import FromOperator
    from kvd.core.inspect.rows import HandoffRow
    from kvd.core.inspect.view import NodeView
    from kvd.core.peers.peer import Peer

MAX_INQUIRIES = 64
"""Under way at a time: operators are few, and each waits a second at most."""

MAX_ENDS = 16
"""Parts of one room that are asked about."""

ANSWER_S = 1.0
"""Longer than any round trip, shorter than patience."""

DECODE = "decode"
PREFILL = "prefill"

MAX_STORIES = 100
"""That one peer is told within ``ANSWER_S``: more than operators ask for, and no burden."""

_LONGEST_S = 1e9
"""A moment further away than that is none; a NaN is not either."""


class Inquiry:
    """One question of an operator: its ends as they would be reported now."""

    __slots__ = ("call", "ends", "n_open", "operator", "since_s")

    def __init__(self, operator: bytes, call: int, since_s: float) -> None:
        self.operator = operator
        self.call = call
        self.since_s = since_s
        self.ends: list[admin.OtherEnd] = []
        self.n_open = 0
        """Of its ends: those that have not spoken."""


class Question:
    """What one peer was asked: the answer fills that end of that inquiry."""

    __slots__ = ("end", "incarnation", "inquiry")

    def __init__(self, inquiry: Inquiry, end: int, incarnation: str) -> None:
        self.inquiry = inquiry
        self.end = end
        self.incarnation = incarnation


class Inquiries:
    """Both halves: what we ask others, and what we tell them."""

    def __init__(self, node: NodeView) -> None:
        self.open: list[Inquiry] = []
        """The oldest first."""
        self.questions: dict[int, Question] = {}
        """By the number of the ask."""
        self._node = node
        self._out = node.out
        self._last = 0
        self._stories = Counter[str]()
        """By incarnation: how many it was told since ``_stories_s``."""
        self._stories_s = 0.0

    # ---- we ask ------------------------------------------------------------------------------

    def ask(self, got: FromOperator, message: admin.AskOtherEnd) -> None:
        """Ask every other end of the room; answered at once where there is nobody to ask."""
        parts = self._parts_of(message.room)
        refusal = self._refusal(message.room, len(parts))
        if refusal is not None:
            failed = admin.AdminFailed(message.call, refusal)
            self._out.effects.append(effects.AnswerOperator(got.operator, failed))
            return
        inquiry = Inquiry(got.operator, message.call, self._out.at_s)
        self.open.append(inquiry)
        for part in parts[:MAX_ENDS]:
            self._ask_about(inquiry, part)
        if not inquiry.n_open:
            self._report(inquiry)

    def told(self, peer: Peer, message: Story) -> None:
        """An answer; one that nobody waits for any more is nothing."""
        question = self.questions.get(message.ask)
        if question is None or question.incarnation != peer.incarnation:
            return
        # Before it is used: a second Story to the same ask must find nothing to fill.
        del self.questions[message.ask]
        inquiry = question.inquiry
        end = inquiry.ends[question.end]
        inquiry.ends[question.end] = _heard(end, message, self._out.at_s - inquiry.since_s)
        inquiry.n_open -= 1
        if not inquiry.n_open:
            self._report(inquiry)

    def tick(self) -> None:
        """Who has not spoken in time is reported as silent."""
        for inquiry in list(self.open):
            # The oldest come first: behind this one none is due.
            if self._out.at_s - inquiry.since_s < ANSWER_S:
                break
            self._report(inquiry)

    def _refusal(self, room: int, n_parts: int) -> Refusal | None:
        if not n_parts:
            return Refusal(Code.BAD_REQUEST, f"no open handoff in room {room} on this node")
        if len(self.open) < MAX_INQUIRIES:
            return None
        return Refusal(
            Code.NO_ROOM,
            f"{len(self.open)} such questions are under way: ask again in a second",
            side=self._node.settings.name,
            numbers={"limit": MAX_INQUIRIES},
        )

    def _parts_of(self, room: int) -> list[ReceivePart | SendPart]:
        decoder, prefiller = self._node.decoder, self._node.prefiller
        parts: list[ReceivePart | SendPart] = [
            part for part in decoder.open.known() if part.room == room
        ]
        parts += prefiller.rooms.parts_of(room)
        parts += [part for part in prefiller.settled_sends.settled.values() if part.room == room]
        return parts

    def _ask_about(self, inquiry: Inquiry, part: ReceivePart | SendPart) -> None:
        side = PREFILL if isinstance(part, ReceivePart) else DECODE
        ours = f"receive:{part.id}" if isinstance(part, ReceivePart) else f"send:{part.id}"
        peer = self._node.peers.by_incarnation.get(part.incarnation)
        why = self._why_not_asked(part, peer)
        if peer is not None and not why:
            why = f"it has not answered within {ANSWER_S:.0f} s"
            # Counted up and never used again: a late Story must not answer a later question.
            self._last += 1
            self.questions[self._last] = Question(inquiry, len(inquiry.ends), part.incarnation)
            inquiry.n_open += 1
            mine = self._node.settings.incarnation
            self._out.send(
                peer.link,
                AskStory(
                    source=mine,
                    target=part.incarnation,
                    ask=self._last,
                    handoff=part.handoff,
                    room=part.room,
                    side=side,
                ),
            )
        inquiry.ends.append(admin.OtherEnd(ours, part.peer, side, why_none=why))

    def _why_not_asked(self, part: ReceivePart | SendPart, peer: Peer | None) -> str:
        if not part.peer:
            return "no peer yet"
        if not part.handoff:
            return "nothing was offered to it yet"
        if peer is None:
            return "the process that it was with is gone"
        if peer.life is Life.LOST:
            return f"it has been silent for {self._out.at_s - peer.heard_s:.1f} s"
        return ""

    def _report(self, inquiry: Inquiry) -> None:
        self.open.remove(inquiry)
        # Forgotten with it: who answers now finds nobody, and the dict does not grow by who never
        # does.
        if inquiry.n_open:
            for ask in [
                ask for ask, question in self.questions.items() if question.inquiry is inquiry
            ]:
                del self.questions[ask]
        answer = admin.OtherEnds(inquiry.call, tuple(inquiry.ends))
        self._out.effects.append(effects.AnswerOperator(inquiry.operator, answer))

    # ---- we are asked ------------------------------------------------------------------------

    def asked(self, peer: Peer, message: AskStory) -> None:
        """Tell it of the handoff that it has with us; anything else is unknown to it."""
        if self._out.at_s - self._stories_s >= ANSWER_S:
            self._stories.clear()
            self._stories_s = self._out.at_s
        self._stories[peer.incarnation] += 1
        # Without a word: it is the answers that cost.
        if self._stories[peer.incarnation] > MAX_STORIES:
            return
        story = Story(self._node.settings.incarnation, peer.incarnation, message.ask)
        table = self._node.leases
        if message.side == DECODE:
            receive = self._receive_with(peer, message)
            if receive is not None:
                story = self._story(receive, receive_row(table, receive), message.ask)
        elif message.side == PREFILL:
            send = self._node.prefiller.settled_sends.find_part(peer.incarnation, message.handoff)
            if send is not None and send.room == message.room:
                story = self._story(send, send_row(table, send), message.ask)
        self._out.send(peer.link, story)

    def _receive_with(self, peer: Peer, message: AskStory) -> ReceivePart | None:
        decoder = self._node.decoder
        part = decoder.open.by_handoff.get(message.handoff) or next(
            (part for part in decoder.open.known() if part.handoff == message.handoff), None
        )
        # Numbers are guessable: without this any peer could ask what the others receive.
        is_its_own = part is not None and part.incarnation == peer.incarnation
        return part if is_its_own and part is not None and part.room == message.room else None

    def _story(self, part: ReceivePart | SendPart, row: HandoffRow, ask: int) -> Story:
        said = ROOM.state(self._node, row)
        marks = part.history.marks(self._out.at_s)
        return Story(
            source=self._node.settings.incarnation,
            target=said.incarnation,
            ask=ask,
            state=said.state,
            waiting_for=said.waiting_for[:MAX_TOLD],
            prompt_tokens=said.prompt_tokens,
            decode_prefix_len=said.decode_prefix_len,
            moved_bytes=said.moved_bytes,
            total_bytes=part.total_bytes,
            outstanding_posts=said.outstanding_posts,
            deadline_in_s=said.deadline_in_s,
            marks=tuple([Told(mark.ago_s, mark.what[:MAX_TOLD]) for mark in marks]),
        )


def _heard(end: admin.OtherEnd, message: Story, round_trip_s: float) -> admin.OtherEnd:
    """That end, as it has told of itself; its moments are as old as half the way here more."""
    if not message.state:
        return replace(end, round_trip_s=round_trip_s, why_none="it knows no such room")
    half_s = round_trip_s / 2
    return replace(
        end,
        state=message.state,
        waiting_for=message.waiting_for,
        prompt_tokens=message.prompt_tokens,
        decode_prefix_len=message.decode_prefix_len,
        moved_bytes=message.moved_bytes,
        total_bytes=message.total_bytes,
        outstanding_posts=message.outstanding_posts,
        deadline_in_s=_seconds(message.deadline_in_s) - half_s,
        marks=tuple(admin.Mark(_seconds(mark.ago_s) + half_s, mark.what) for mark in message.marks),
        round_trip_s=round_trip_s,
        why_none="",
    )


def _seconds(told_s: float) -> float:
    """What a stranger calls a time; 0 if it is none."""
    return told_s if -_LONGEST_S < told_s < _LONGEST_S else 0.0
