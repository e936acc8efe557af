"""Asking the daemon, on a thread of its own: the console's loop never waits.

The thread asks for the state twice a second and for questions as they come, and hands over what it
learns as ``News``. It goes on for ever: a daemon that does not answer is news too, and a fresh
connection is made for the next attempt.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from kvd.client.admin import AdminClient
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.admin import (
    AdminFailed,
    AdminReply,
    Because,
    EventPage,
    ListEvents,
    ShowStatus,
    Status,
    Why,
)
from tui.old_model import MAX_EVENTS, Answered, Down, Question, Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.old_model import News

    OnNews = Callable[[News], None]

POLL_S = 0.5
ANSWER_S = 2.0
CALL = 1


class NewsLink(Protocol):
    """What the app needs of a link."""

    def start(self) -> None:
        """Begin to bring news."""

    def ask(self, question: Question) -> None:
        """Put a question; the answer comes as ``Answered``."""

    def stop(self) -> None:
        """Bring no more news."""


class Link(threading.Thread):
    """Polls until ``stop``; ``on_news`` is called on this thread."""

    def __init__(self, endpoint: str, on_news: OnNews) -> None:
        super().__init__(name="link", daemon=True)
        self._endpoint = endpoint
        self._on_news = on_news
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._incarnation = ""
        self._after_seq = 0

    def ask(self, question: Question) -> None:
        """Put a question; the answer comes as ``Answered``."""
        self._questions.put(question)

    def stop(self) -> None:
        """End the thread after what it is doing."""
        self._questions.put(None)

    @override
    def run(self) -> None:
        """Connect, ask, and connect again when that fails."""
        going = True
        while going:
            try:
                with AdminClient(self._endpoint) as client:
                    self._serve(client)
                    going = False
            except KvdError as exc:
                self._on_news(Down(exc.refusal.message))
                going = self._pause()

    def _serve(self, client: AdminClient) -> None:
        """Ask until stopped."""
        while True:
            self._on_news(self._look(client))
            try:
                question = self._questions.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if question is None:
                return
            self._on_news(_why(client, question))

    def _pause(self) -> bool:
        """Wait before the next attempt; False if stopped meanwhile. Questions are forgotten."""
        try:
            return self._questions.get(timeout=POLL_S) is not None
        except queue.Empty:
            return True

    def _look(self, client: AdminClient) -> Seen:
        """The state, and the events since the last look."""
        status = client.request(ShowStatus(CALL), timeout_s=ANSWER_S)
        if not isinstance(status, Status):
            raise KvdError(_unexpected(status))
        shot = status.snapshot
        if shot.incarnation != self._incarnation:
            self._incarnation = shot.incarnation
            self._after_seq = max(0, shot.last_event - MAX_EVENTS)
        page = client.request(ListEvents(CALL, self._after_seq), timeout_s=ANSWER_S)
        if not isinstance(page, EventPage):
            raise KvdError(_unexpected(page))
        if page.events:
            self._after_seq = page.events[-1].seq
        return Seen(shot, page.events, page.lost)


def _why(client: AdminClient, question: Question) -> Answered:
    """What the daemon says to a question; a refusal is an answer too."""
    reply = client.request(Why(CALL, question.kind, question.number), timeout_s=ANSWER_S)
    if isinstance(reply, Because):
        return Answered(question, (reply.sentence, *reply.facts))
    return Answered(question, (_unexpected(reply).message,))


def _unexpected(reply: AdminReply) -> Refusal:
    """A refusal as it is, anything else as one."""
    if isinstance(reply, AdminFailed):
        return reply.refusal
    what = f"the daemon answered {type(reply).__name__}: its version and the console's differ"
    return Refusal(Code.INTERNAL, what)
