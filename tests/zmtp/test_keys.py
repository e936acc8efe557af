"""CURVE, command by command: who is let in, and that nothing can be said again or otherwise."""

from __future__ import annotations

import pytest
from nacl import bindings

from kvd.zmtp import frames
from kvd.zmtp.curve import CurveClient, CurveServer
from kvd.zmtp.events import ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.frames import MORE
from kvd.zmtp.protocol import Protocol, ProtocolState
from tests.zmtp.pairs import Both, curve, new_ring


def last_fault(events):
    assert isinstance(events[-1], ConnectionClosed), events
    return events[-1].fault


def test_a_key_that_is_not_listed_is_told_nothing_after_its_proof():
    pair = curve(listed=False)
    while pair.step():
        if pair.said:
            break

    assert last_fault(pair.said) is ConnectionFault.UNKNOWN_KEY
    assert pair.listening.to_send() == []
    assert pair.dialing.state is ProtocolState.HANDSHAKE


def test_a_listener_that_lists_nobody_lets_nobody_in():
    ring = new_ring()
    pair = Both(CurveServer(ring), CurveClient(new_ring(), ring.public)).shake()
    assert last_fault(pair.said) is ConnectionFault.UNKNOWN_KEY


def test_a_key_that_is_listed_later_is_let_in():
    pair = curve(listed=False)
    pair.listening._mechanism._ring.names[pair.dialing._mechanism._ring.public] = "late"

    assert [one.name for one in pair.shake().said] == ["late"]


def test_a_client_that_takes_us_for_another_is_found_out_at_its_hello():
    pair = curve(server=new_ring().public).shake()
    assert last_fault(pair.said) is ConnectionFault.WRONG_SERVER_KEY


def test_a_server_with_another_key_is_not_believed():
    """It cannot even read the HELLO; whatever it says, its WELCOME does not open."""
    client = CurveClient(new_ring(), new_ring().public)
    client.begin()
    assert client.take(b"WELCOME", bytes(160)).fault is ConnectionFault.MALFORMED


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)])
def test_a_key_that_proves_nothing_is_no_key(public):
    """Of these every secret gives the same box, so anyone could have made it."""
    pair = curve()
    pair.step()
    server = pair.listening._mechanism
    hello = b"\1\0" + bytes(72) + public + bytes(8) + bytes(80)
    assert server.take(b"HELLO", hello).fault is ConnectionFault.MALFORMED


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (b"HELLO", b""),
        (b"HELLO", b"\2\0" + bytes(192)),
        (b"HELLO", bytes(195)),
        (b"INITIATE", bytes(300)),
        (b"READY", b""),
        (b"MESSAGE", bytes(40)),
        (b"", b""),
    ],
)
def test_a_command_that_has_no_place_at_the_beginning_ends_it(name, body):
    server = curve().listening._mechanism
    assert server.take(name, body).fault is ConnectionFault.MALFORMED


def initiate_of(pair):
    """The INITIATE of the dialing side, which it has not sent yet, and the server that waits."""
    client, server = pair.dialing._mechanism, pair.listening._mechanism
    hello = client.begin()
    welcome = server.take(*frames.split_command(hello[2:]))
    initiate = client.take(*frames.split_command(welcome[2:]))
    name, body = frames.split_command(initiate[9 if initiate[0] & frames.LONG else 2 :])
    assert name == b"INITIATE"
    return server, body


def test_an_initiate_is_taken_once():
    server, body = initiate_of(curve())
    assert isinstance(server.take(b"INITIATE", body), HandshakeDone)
    assert server.take(b"INITIATE", body).fault is ConnectionFault.MALFORMED
    assert server.take(b"HELLO", bytes(194)).fault is ConnectionFault.MALFORMED


def test_an_initiate_of_another_connection_is_not_taken():
    """Neither its cookie nor its vouch is of this one."""
    server, _ = initiate_of(curve())
    _, body = initiate_of(curve())
    assert server.take(b"INITIATE", body).fault is ConnectionFault.MALFORMED


@pytest.mark.parametrize("at", [0, 95, 96, 103, 104, 150, 250, -1])
def test_an_initiate_that_was_changed_anywhere_is_not_taken(at):
    server, body = initiate_of(curve())
    changed = bytearray(body)
    changed[at] ^= 1
    assert server.take(b"INITIATE", bytes(changed)).fault is ConnectionFault.MALFORMED


def test_a_message_is_read_once_and_in_its_order():
    pair = curve().shake()
    first, second = pair.tell(b"first"), pair.tell(b"second")
    pair.give(pair.listening, second)
    pair.give(pair.listening, first)

    assert pair.said[1] == [b"second"]
    assert last_fault(pair.said) is ConnectionFault.MALFORMED

    again = curve().shake()
    said = again.tell(b"x")
    again.give(again.listening, said + said)
    assert [type(one) for one in again.said] == [HandshakeDone, list, ConnectionClosed]


@pytest.mark.parametrize("at", [2, 9, 10, 17, 18, 30, -1])
def test_a_message_that_was_changed_anywhere_ends_the_connection(at):
    pair = curve().shake()
    said = bytearray(pair.tell(b"hello"))
    said[at] ^= 1
    pair.give(pair.listening, bytes(said))
    assert last_fault(pair.said) is ConnectionFault.MALFORMED


def test_a_message_in_clear_ends_a_connection_with_keys():
    pair = curve().shake()
    pair.give(pair.listening, b"\0\5hello")
    assert last_fault(pair.said) is ConnectionFault.MALFORMED


def test_a_message_of_our_own_does_not_open_when_it_comes_back():
    pair = curve().shake()
    for _ in range(3):
        back = b"".join(pair.listening.pack([b"mine"]))
    pair.give(pair.listening, back)
    assert last_fault(pair.said) is ConnectionFault.MALFORMED


def test_the_limit_of_a_message_is_of_what_is_in_the_boxes():
    pair = curve(limit=100).shake()
    pair.give(pair.listening, pair.tell(bytes(100)))
    pair.give(pair.listening, pair.tell(bytes(60), bytes(40)))
    assert [len(b"".join(one)) for one in pair.said[1:]] == [100, 100]

    said = []
    pair.dialing._mechanism.wrap(said, bytes(60), MORE)
    pair.dialing._mechanism.wrap(said, bytes(41), 0)
    pair.give(pair.listening, b"".join(said))
    assert last_fault(pair.said) is ConnectionFault.TOO_LARGE


def test_a_stranger_that_says_no_hello_for_us_costs_no_keys(monkeypatch):
    """Anyone may connect: what that costs is what a flood of connections costs."""
    client, ring = CurveClient(new_ring(), new_ring().public), new_ring()
    made = []
    pair_of = bindings.crypto_box_keypair
    monkeypatch.setattr(bindings, "crypto_box_keypair", lambda: made.append(1) or pair_of())
    machine = Protocol(CurveServer(ring), 1024)
    machine.receive(frames.greeting(b"CURVE", as_server=False) + client.begin())

    assert machine.next_event().fault is ConnectionFault.WRONG_SERVER_KEY
    assert not made
