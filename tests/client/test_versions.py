"""A client and a daemon of different versions: each side says so, with both and what to install."""

from __future__ import annotations

import copy
import functools
import pickle
import socket
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace

import kvd.client
from kvd import __version__
from kvd.client.attachment import Attachment, dial, take_answer
from kvd.client.connection import Call, Connection
from kvd.client.endpoint import attach_path
from kvd.client.state import EventsLost
from kvd.daemon.listeners import listen_at
from kvd.errors import Code, KvdError, Refusal
from kvd.types import Tokens
from kvd.wire import client as wire
from kvd.wire.attach import PROTOCOL, Attach, Attached, Join, RankAnswer, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS
from kvd.wire.events import Evicted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.client.conftest import Daemon

LATER = "9.1.0"
LATER_PROTOCOL = PROTOCOL + 1
EVICTED = Evicted(2, 0.0, pages=1, nodes=1, reason="room")
OTHER_SHAPE = {"type": "attach-shared", "protocol": LATER_PROTOCOL, "version": LATER, "name": ["x"]}


def answer_to(daemon: Daemon, packet: bytes) -> KvdError:
    """What a client that says ``packet`` is told."""
    sock = dial(attach_path(daemon.endpoint))
    assert sock is not None
    with sock:
        sock.send(packet)
        sock.settimeout(5)
        sock.recv(1, socket.MSG_PEEK)
        with pytest.raises(KvdError) as told:
            take_answer(sock)
    return told.value


@pytest.mark.parametrize(
    "packet",
    [
        ATTACH_REQUESTS.encode(Attach("x", protocol=LATER_PROTOCOL, version=LATER)),
        ATTACH_REQUESTS.encode(Join(b"t" * 16, protocol=LATER_PROTOCOL, version=LATER)),
        msgspec.msgpack.encode(OTHER_SHAPE),
    ],
    ids=["attach", "join", "what is no message here"],
)
def test_a_daemon_tells_a_later_client_both_versions_and_what_to_install(daemon, packet):
    error = answer_to(daemon, packet)

    assert (error.code, error.retryable) == ("versions-differ", False)
    assert error.numbers == {"client": LATER_PROTOCOL, "daemon": PROTOCOL}
    assert error.refusal.side == "node-a"
    assert str(error) == (
        f"versions-differ: the client is kvd {LATER}, which speaks protocol {LATER_PROTOCOL}, "
        f"node-a is kvd {__version__}, which speaks protocol {PROTOCOL}: install kvd {__version__} "
        f"in the engine's environment, or kvd {LATER} on the node and restart its daemon"
    )


def test_a_client_that_does_not_say_its_version_is_told_what_is_known(daemon):
    error = answer_to(daemon, ATTACH_REQUESTS.encode(Attach("x", protocol=LATER_PROTOCOL)))

    assert error.code == "versions-differ"
    assert f"kvd of unknown version, which speaks protocol {LATER_PROTOCOL}" in str(error)
    assert str(error).endswith("install the same version of kvd on both sides")


async def test_every_way_to_connect_raises_it(daemon, monkeypatch):
    """The client's word for itself is its installed version, whoever asks."""
    later = functools.partial(Attach, protocol=LATER_PROTOCOL)
    monkeypatch.setattr("kvd.client.sync.Attach", later)
    monkeypatch.setattr("kvd.client.api.Attach", later)
    monkeypatch.setattr("kvd.client.attachment.__version__", LATER)

    with (
        pytest.raises(KvdError, match=f"client is kvd {LATER}.*node-a is kvd {__version__}"),
        kvd.client.connect_sync(daemon.endpoint, name="engine"),
    ):
        pass
    with pytest.raises(KvdError, match=f"client is kvd {LATER}.*node-a is kvd {__version__}"):
        async with kvd.client.connect(daemon.endpoint, name="engine"):
            pass


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[bytes], str]]:
    """A daemon of another version, as far as its first answer; the endpoint of it."""
    listener = listen_at(
        str(tmp_path / "attach.sock"), socket.SOCK_SEQPACKET, mode=0o600, group=None
    )
    # An end where nobody comes.
    listener.settimeout(10)
    served = []

    def start(answer: bytes) -> str:
        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.send(answer)
                sock.settimeout(10)
                sock.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        served.append(thread)
        return f"ipc://{tmp_path}/client.sock"

    yield start
    for thread in served:
        thread.join()
    listener.close()


ATTACHED = msgspec.to_builtins(Attached(1, b"S", "node-b", "1" * 32, ()))


@pytest.mark.parametrize(
    "answer",
    [
        {**ATTACHED, "protocol": LATER_PROTOCOL, "version": LATER, "token": b"S"},
        {"type": "attached", "protocol": LATER_PROTOCOL, "version": LATER, "session": "one"},
        {"type": "rejected", "protocol": LATER_PROTOCOL, "version": LATER, "refusal": "no"},
    ],
    ids=["as here", "of another shape", "a refusal of another shape"],
)
def test_a_client_says_of_a_later_daemon_both_versions_and_what_to_install(another, answer):
    endpoint = another(msgspec.msgpack.encode(answer))

    with pytest.raises(KvdError) as told, kvd.client.connect_sync(endpoint, name="engine"):
        pass

    error = told.value
    assert (error.code, error.retryable) == ("versions-differ", False)
    assert error.numbers == {"client": PROTOCOL, "daemon": LATER_PROTOCOL}
    assert error.refusal.side == "client"
    assert str(error) == (
        f"versions-differ: the client is kvd {__version__}, which speaks protocol {PROTOCOL}, the "
        f"daemon is kvd {LATER}, which speaks protocol {LATER_PROTOCOL}: install kvd {LATER} in "
        f"the engine's environment, or kvd {__version__} on the node and restart its daemon"
    )


def test_what_another_version_refuses_is_told_as_it_said_it(another):
    """It may have its own sentence for it, and knows better."""
    refusal = Refusal(Code.VERSIONS_DIFFER, "its own words", side="node-b")
    rejected = Rejected(refusal, protocol=LATER_PROTOCOL, version=LATER)
    endpoint = another(ATTACH_REPLIES.encode(rejected))

    with (
        pytest.raises(KvdError, match="versions-differ: its own words"),
        kvd.client.connect_sync(endpoint, name="engine"),
    ):
        pass


def test_another_version_of_the_same_protocol_is_served(daemon, monkeypatch):
    monkeypatch.setattr("kvd.client.attachment.__version__", "0.0.9")

    with kvd.client.connect_sync(daemon.endpoint, name="engine") as node:
        assert node.pool("main").name == "main"


# ---- what only a later version says --------------------------------------------------------------


def later_code(reply: wire.Reply, code: str = "not-yet-known") -> msgspec.Raw:
    """A reply as a later daemon would say it, with a code that is not known here."""
    return msgspec.Raw(msgspec.msgpack.encode(reply).replace(b"\xa7no-room", packed(code)))


def packed(text: str) -> bytes:
    return msgspec.msgpack.encode(text)


FULL = Refusal(Code.NO_ROOM, "the pool is full", "node-b", {"pages": 3})


def begun(*kinds: type[wire.Request]) -> tuple[Connection, list[Call]]:
    own = Connection(max_frame_bytes=4096)
    return own, [own.begin(kind(own.next_call()), Tokens(b"")) for kind in kinds]


def test_a_code_that_is_not_known_comes_as_it_is() -> None:
    own, (lease,) = begun(wire.OpenLease)
    own.feed([bytes(later_code(wire.Failed(1, FULL)))])

    found = lease.answer.value
    assert isinstance(found, Refusal)
    error = KvdError(found)
    assert (error.code, error.retryable, error.numbers) == ("not-yet-known", False, {"pages": 3})
    assert str(error) == "not-yet-known: the pool is full"
    assert found.code == Code("not-yet-known") != Code.NO_ROOM
    assert Code("not-yet-known") not in set(Code)
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == found
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Refusal) == found
    assert own.unreadable_messages == 0


@pytest.mark.parametrize("code", ["", "No-Room", "no room", "x" * 65, "-x", "x--y"])
def test_what_is_no_code_by_its_form_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="not a valid Code"):
        Code(code)


def test_one_unknown_part_of_a_message_costs_nobody_else() -> None:
    own, (lease, match, other) = begun(wire.OpenLease, wire.MatchPrefix, wire.MatchPrefix)
    queue = own.open_events()
    parts: list[object] = [
        wire.MatchReply(2, 8, 0, 0),
        ["answer-of-tomorrow", 3, {"a": 1}],
        later_code(wire.Failed(1, FULL)),
        ["events", 0, [{"type": "of-tomorrow", "seq": 1}, EVICTED, {"type": "x", "seq": 8}]],
        ["several", [wire.MatchReply(3, 8, 0, 0)]],
        ["events", 0, [replace(EVICTED, seq=9)]],
        17,
    ]
    own.feed([msgspec.msgpack.encode(["several", parts])])

    assert isinstance(match.answer.value, wire.MatchReply)
    assert isinstance(lease.answer.value, Refusal)
    assert other.answer.value is None
    taken = [queue.take() for _ in range(5)]
    lost, again = EventsLost(1), replace(EVICTED, seq=9)
    assert taken == [lost, EVICTED, replace(lost, count=6), again, None]
    assert own.unreadable_messages == 5


def test_a_message_of_tomorrow_is_counted_and_ends_nothing() -> None:
    own, (match,) = begun(wire.MatchPrefix)
    nested: object = 1
    for _ in range(400):
        nested = ["several", [nested]]
    for frame in (b"", b"\xc1", packed("x"), msgspec.msgpack.encode(["tomorrow", 1]),
                  msgspec.msgpack.encode(nested)):  # fmt: skip
        own.feed([frame])
    assert own.unreadable_messages == 5
    assert match.answer.value is None


def test_a_word_of_tomorrow_on_the_attach_socket_is_no_hang_up() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    attachment = Attachment(here, Attached(1, b"S", "node-b", "1" * 32, ()), [])
    with there:
        there.send(msgspec.msgpack.encode({"type": "of-tomorrow", "call": 1}))
        assert attachment.last_word() is None
        there.send(b"\xc1")
        there.send(ATTACH_REPLIES.encode(RankAnswer(3)))
        assert attachment.hear() == RankAnswer(3)
        assert attachment.hear() is None
    word = attachment.last_word()
    assert word is not None
    assert word.code is Code.UNREACHABLE
    attachment.close()
