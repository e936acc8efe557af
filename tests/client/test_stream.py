"""The client socket over a real unix stream: what waits, what is kept, what ends it."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest
import zmq

from kvd.client.stream import BACKLOG_MESSAGES, ClientStream
from kvd.sockets import open_router
from kvd.types import MAX_FRAME_BYTES, Sent
from kvd.zmtp import frames
from kvd.zmtp.bounds import TURN_MESSAGES
from kvd.zmtp.events import ConnectionFault, HandshakeDone
from kvd.zmtp.mechanism import Null
from kvd.zmtp.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.zmtp.events import Frames

LONG = 300_000
"""Bytes of a message that the kernel takes in several pieces."""


class Peer:
    """The other end, one connection at a time, in steps as well."""

    def __init__(self, path: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(4)
        self.sock: socket.socket | None = None
        self.got: list[Frames] = []
        self.met: list[HandshakeDone] = []

    def accept(self) -> None:
        self.sock, _ = self._listening.accept()
        self.sock.setblocking(False)
        self.machine = Protocol(Null(), MAX_FRAME_BYTES)
        self.write(*self.machine.to_send())

    def read(self, most: int = 1 << 20) -> bool:
        """Take what has come; whether there was anything."""
        assert self.sock is not None
        try:
            came = self.sock.recv(most)
        except BlockingIOError:
            return False
        if not came:
            return False
        self.machine.receive(came)
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, list):
                self.got.append(event)
            else:
                assert isinstance(event, HandshakeDone), event
                self.met.append(event)
                self.machine.accept()
        self.write(*self.machine.to_send())
        return True

    def say(self, *messages: Frames) -> None:
        self.write(*(piece for message in messages for piece in self.machine.pack(message)))

    def write(self, *pieces: bytes) -> None:
        assert self.sock is not None
        self.sock.setblocking(True)
        for piece in pieces:
            self.sock.sendall(piece)
        self.sock.setblocking(False)

    def hang_up(self) -> None:
        assert self.sock is not None
        self.sock.close()

    def close(self) -> None:
        self._listening.close()
        if self.sock is not None:
            self.sock.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "client.sock")


@pytest.fixture
def peer(path: str) -> Iterator[Peer]:
    with contextlib.closing(Peer(path)) as one:
        yield one


@pytest.fixture
def stream(path: str) -> Iterator[ClientStream]:
    one = ClientStream(path, b"Sroute")
    yield one
    one.hang_up()


def nothing(_: Frames) -> None:
    raise AssertionError("a message that nobody sent")


def meet(stream: ClientStream, peer: Peer) -> None:
    assert stream.dial()
    peer.accept()
    while not stream.is_met:
        stream.write()
        peer.read()
        stream.read(nothing)


def carry(stream: ClientStream, peer: Peer) -> None:
    """Until nothing moves any more."""
    moves = True
    while moves:
        before = stream.has_unsent
        stream.write()
        moves = peer.read() or (before and not stream.has_unsent)


# ---- out -----------------------------------------------------------------------------------------


def test_what_was_sent_before_the_handshake_goes_out_behind_it(
    stream: ClientStream, peer: Peer
) -> None:
    assert stream.send([b"header", b"tokens"]) is Sent.TAKEN
    stream.write()
    meet(stream, peer)
    stream.write()
    while peer.read():
        pass

    assert peer.got == [[b"header", b"tokens"]]
    assert [one.routing_id for one in peer.met] == [b"Sroute"]
    assert (stream.has_unsent, stream.is_blocked) == (False, False)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16_383, 16_384, LONG])
def test_messages_of_any_length_arrive_whole_and_in_order(
    stream: ClientStream, peer: Peer, size: int
) -> None:
    meet(stream, peer)
    sent = [[b"%d" % number, os.urandom(size)] for number in range(40)]
    for message in sent:
        assert stream.send(message) is Sent.TAKEN

    carry(stream, peer)

    assert peer.got == sent


def test_a_peer_that_reads_a_little_at_a_time_gets_all_of_it(
    stream: ClientStream, peer: Peer
) -> None:
    meet(stream, peer)
    sent = [[b"a" * number, b"b" * (number * 1013)] for number in range(300)]
    for message in sent:
        stream.send(message)
    stream.write()
    assert stream.is_blocked

    while len(peer.got) < len(sent):
        peer.read(50_001)
        stream.write()

    assert peer.got == sent
    assert not stream.is_blocked


def test_no_more_than_a_backlog_waits_for_a_peer_that_does_not_read(
    stream: ClientStream, peer: Peer
) -> None:
    meet(stream, peer)
    page = bytes(1024)
    taken = 0
    while not stream.is_blocked:
        while stream.send([page]) is Sent.TAKEN:
            taken += 1
        stream.write()
        assert taken < 9 * BACKLOG_MESSAGES
    while stream.send([page]) is Sent.TAKEN:
        taken += 1

    assert taken > BACKLOG_MESSAGES
    assert stream.unsent_bytes < 1040 * BACKLOG_MESSAGES
    carry(stream, peer)
    assert len(peer.got) == taken
    assert stream.unsent_bytes == 0
    assert stream.send([page]) is Sent.TAKEN


def test_what_the_peer_cannot_have_read_goes_out_on_the_next_connection(
    stream: ClientStream, peer: Peer
) -> None:
    meet(stream, peer)
    sent = [[b"%d" % number, bytes(LONG)] for number in range(40)]
    for message in sent:
        stream.send(message)
    stream.write()
    while len(peer.got) < 2:
        peer.read(70_000)
    peer.hang_up()
    stream.write()
    stream.read(nothing)
    assert stream.fault is not None
    whole = len(peer.got)

    stream.hang_up()
    meet(stream, peer)
    carry(stream, peer)

    again = peer.got[whole:]
    assert again == sent[len(sent) - len(again) :]
    assert 0 < len(again) <= len(sent) - whole
    assert not stream.has_unsent


# ---- in ------------------------------------------------------------------------------------------


def test_messages_come_in_order_and_in_turns(stream: ClientStream, peer: Peer) -> None:
    meet(stream, peer)
    sent = [[b"%d" % number] for number in range(TURN_MESSAGES + 5)]
    peer.say(*sent)
    got: list[Frames] = []

    assert stream.read(got.append)
    assert (len(got), stream.is_left) == (TURN_MESSAGES, True)
    assert stream.read(got.append)
    assert not stream.is_left
    assert not stream.read(got.append)

    assert got == sent


def test_a_long_message_arrives_whole(stream: ClientStream, peer: Peer) -> None:
    meet(stream, peer)
    long = os.urandom(150_000)
    peer.say([long], [b"after"])
    got: list[Frames] = []
    while len(got) < 2:
        assert stream.read(got.append) or stream.is_left

    assert got == [[long], [b"after"]]


def test_a_message_whose_taker_raises_costs_itself_alone(stream: ClientStream, peer: Peer) -> None:
    meet(stream, peer)
    peer.say([b"first"], [b"bad"], [b"last"])
    got: list[bytes] = []

    def take(message: Frames) -> None:
        if message == [b"bad"]:
            raise RuntimeError("a bug")
        got.append(message[0])

    with pytest.raises(RuntimeError, match="a bug"):
        stream.read(take)
    assert stream.is_left
    stream.read(take)

    assert got == [b"first", b"last"]
    assert not stream.is_left


def test_a_heartbeat_is_answered(stream: ClientStream, peer: Peer) -> None:
    meet(stream, peer)
    peer.write(frames.command(b"PING", b"\0\0context"))
    stream.read(nothing)
    stream.write()

    assert peer.sock is not None
    assert peer.sock.recv(100) == frames.command(b"PONG", b"context")


def test_a_message_above_the_bound_ends_the_connection_when_its_length_is_read(
    stream: ClientStream, peer: Peer
) -> None:
    meet(stream, peer)
    peer.say([b"before"])
    peer.write(frames.header(MAX_FRAME_BYTES + 1, 0))
    got: list[Frames] = []
    stream.read(got.append)

    assert got == [[b"before"]]
    assert stream.fault is not None
    assert stream.fault.fault is ConnectionFault.TOO_LARGE
    assert f"{MAX_FRAME_BYTES + 1} bytes" in stream.fault.why


def test_what_a_peer_said_before_it_hung_up_is_read_though_it_takes_no_more(
    stream: ClientStream, peer: Peer
) -> None:
    meet(stream, peer)
    peer.say([b"last words"])
    peer.hang_up()
    stream.send([b"too late"])
    stream.write()
    got: list[Frames] = []
    while stream.read(got.append):
        pass

    assert got == [[b"last words"]]
    assert stream.fault is not None
    assert stream.has_unsent


# ---- whom it talks to ----------------------------------------------------------------------------


def test_nobody_there_is_no_connection(stream: ClientStream, peer: Peer) -> None:
    peer.close()

    assert not stream.dial()
    assert stream.fileno() == -1
    assert not stream.read(nothing)
    assert stream.send([b"waits"]) is Sent.TAKEN


def test_it_talks_to_a_router_of_libzmq(stream: ClientStream, path: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = open_router(context)
    router.bind(f"ipc://{path}")
    got: list[Frames] = []
    try:
        assert stream.dial()
        stream.write()
        stream.send([b"header", bytes(LONG)])
        deadline = 500
        while not router.poll(10):
            stream.read(got.append)
            stream.write()
            deadline -= 1
            assert deadline
        assert router.recv_multipart() == [b"Sroute", b"header", bytes(LONG)]
        router.send_multipart([b"Sroute", b"answer", bytes(LONG)])
        while not got:
            stream.read(got.append)
            deadline -= 1
            router.poll(1)
            assert deadline
    finally:
        router.close(linger=0)
        context.term()

    assert got == [[b"answer", bytes(LONG)]]
