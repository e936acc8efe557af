"""The link against an admin socket: news, answers, and a daemon that goes and comes back."""

from __future__ import annotations

import queue

import msgspec
import pytest

from kvd.errors import Code, Refusal
from kvd.wire.admin import (
    AdminFailed,
    Because,
    EventPage,
    ListEvents,
    ShowStatus,
    Status,
    Why,
)
from kvd.wire.events import Evicted
from tests.cli.admin_peer import Daemon
from tui import old_link as link_module
from tui.old_link import Link
from tui.old_model import Answered, Down, Question, Seen

LIMIT_S = 10.0
EVENT = Evicted(5, 1.0, 4, 1, "room")


@pytest.fixture
def respond(snapshot):
    """Answers as a daemon with one event."""

    def answer(request):
        match request:
            case ShowStatus():
                return Status(0, snapshot)
            case ListEvents(after_seq=after):
                return EventPage(0, 0, (EVENT,) if after < EVENT.seq else ())
            case Why(id=7):
                return Because(0, "decode-0 holds it.", ("since 3 s",))
            case _:
                return AdminFailed(0, Refusal(Code.UNKNOWN_LEASE, "there is no lease 8"))

    return answer


@pytest.fixture
def news(monkeypatch):
    """What the link brings."""
    monkeypatch.setattr(link_module, "ANSWER_S", 0.2)
    return queue.SimpleQueue()


@pytest.fixture
def start(news):
    """Starts a link to an endpoint."""
    links = []

    def start(endpoint):
        links.append(Link(endpoint, news.put))
        links[-1].start()
        return links[-1]

    yield start
    for link in links:
        link.stop()
        link.join(LIMIT_S)
        assert not link.is_alive()


def until(news, is_it):
    """The first news that is it."""
    while True:
        one = news.get(timeout=LIMIT_S)
        if is_it(one):
            return one


def test_each_event_is_brought_once(daemon, respond, news, start, snapshot):
    daemon.answer = respond
    start(daemon.endpoint)

    assert [news.get(timeout=LIMIT_S) for _ in range(2)] == [
        Seen(snapshot, (EVENT,)),
        Seen(snapshot, ()),
    ]


def test_a_question_is_answered_and_a_refusal_is_an_answer(daemon, respond, news, start):
    daemon.answer = respond
    link = start(daemon.endpoint)

    link.ask(Question("lease", 7))
    link.ask(Question("lease", 8))
    answers = [until(news, lambda one: isinstance(one, Answered)) for _ in range(2)]

    assert answers == [
        Answered(Question("lease", 7), ("decode-0 holds it.", "since 3 s")),
        Answered(Question("lease", 8), ("there is no lease 8",)),
    ]


def test_a_daemon_that_goes_and_comes_back_is_followed_by_itself(
    tmp_path, respond, news, start, snapshot
):
    """A new incarnation starts its events again at 1."""
    endpoint = f"ipc://{tmp_path}/admin.sock"
    start(endpoint)
    until(news, lambda one: isinstance(one, Down))

    first = Daemon(endpoint)
    first.answer = respond
    until(news, lambda one: one == Seen(snapshot, (EVENT,)))
    first.close()
    until(news, lambda one: isinstance(one, Down))

    again = msgspec.structs.replace(snapshot, incarnation="c" * 32)
    second = Daemon(endpoint)
    second.answer = lambda request: (
        Status(0, again) if isinstance(request, ShowStatus) else respond(request)
    )
    until(news, lambda one: one == Seen(again, (EVENT,)))
    second.close()
