"""A client and a daemon of different versions: each side says so, with both and what to install."""

from __future__ import annotations

import functools
import socket
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

import kvd.client
from kvd import __version__
from kvd.client.attachment import dial, take_answer
from kvd.client.endpoint import attach_path
from kvd.daemon.listeners import listen_at
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import PROTOCOL, Attach, Attached, Join, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.client.conftest import Daemon

LATER = "9.1.0"
LATER_PROTOCOL = PROTOCOL + 1
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
