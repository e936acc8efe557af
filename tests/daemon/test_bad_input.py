"""Hostile and broken input on the client, attach, admin and HTTP sockets of a real daemon.

Whoever can be told gets a typed error with the numbers; the daemon lives; and a handoff that runs
meanwhile is delivered as if nothing had been. The peers' socket: ``test_bad_peers``.
"""

from __future__ import annotations

import contextlib
import math
import socket
import urllib.request

import msgspec
import pytest

from kvd import __version__
from kvd.errors import Code
from kvd.wire import admin, client
from kvd.wire.attach import Attach, AttachReply, Join, Rejected
from kvd.wire.codec import (
    ADMIN_REPLIES,
    ADMIN_REQUESTS,
    ATTACH_REQUESTS,
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
)
from tests.daemon.conftest import until
from tests.daemon.intruder import TOKENS, TOO_LONG, RawSession, Wire, mutants

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def session(engines):
    """A raw session at the decode daemon."""
    raw = RawSession(engines.pair.decode)
    yield raw
    raw.close()


# ---- the client socket ---------------------------------------------------------------------------


def test_client_without_a_session_is_told_to_attach(engines):
    stranger = Wire(engines.pair.decode.client, CLIENT_REPLIES, b"no-session-of-yours")

    answer = stranger.asked(CLIENT_REQUESTS.encode(client.GetSnapshot(3)))

    assert isinstance(answer, client.Failed)
    assert (answer.call, answer.refusal.code) == (-1, Code.UNKNOWN_SESSION)
    assert "attach first" in answer.refusal.message
    stranger.close()


LEASE = CLIENT_REQUESTS.encode(client.OpenLease(1))
UNREADABLE_CLIENT_MESSAGES = {
    "empty": ([b""], Code.BAD_REQUEST),
    "foreign": ([b"\xff" * 50], Code.BAD_REQUEST),
    "http": ([b"GET / HTTP/1.1\r\n\r\n"], Code.BAD_REQUEST),
    "nested deeply": ([b"\x94" * 5_000], Code.BAD_REQUEST),
    "no array": ([b"\xa5lease"], Code.BAD_REQUEST),
    "truncated": ([LEASE[:-3], TOKENS], Code.BAD_REQUEST),
    "one frame more": ([LEASE, TOKENS, TOKENS], Code.BAD_REQUEST),
    "no tokens frame": ([LEASE], Code.BAD_REQUEST),
    "tokens where none belong": (
        [CLIENT_REQUESTS.encode(client.ReleaseLease(1, 1)), TOKENS],
        Code.BAD_REQUEST,
    ),
    "misaligned tokens": ([LEASE, TOKENS[:-1]], Code.BAD_TOKENS),
    "more tokens than the limit": ([LEASE, bytes(4 * (2**20 + 1))], Code.TOO_LARGE),
    "header of 5 MiB": ([bytes(5 * 2**20)], Code.BAD_REQUEST),
}


def test_client_message_that_cannot_be_read_is_refused(session):
    answers = {
        name: session.asked(*frames) for name, (frames, _) in UNREADABLE_CLIENT_MESSAGES.items()
    }

    assert {name: answer.refusal.code for name, answer in answers.items()} == {
        name: code for name, (_, code) in UNREADABLE_CLIENT_MESSAGES.items()
    }
    assert isinstance(session.request(client.GetSnapshot(2)), client.Snapshotted)


IMPOSSIBLE_REQUESTS = [
    (client.OpenLease(1, reserve_tokens=-1), Code.BAD_REQUEST),
    (client.OpenLease(1, reserve_tokens=2**62), Code.TOO_LARGE),
    (client.OpenLease(1, reserve_tokens=2**63 - 1), Code.TOO_LARGE),
    (client.OpenLease(1, reserve_tokens=1, promise_tokens=-1), Code.BAD_REQUEST),
    (client.OpenLease(1, reserve_tokens=1, promise_tokens=2**63 - 1), Code.TOO_LARGE),
    (
        client.OpenLease(1, reserve_tokens=2**63 - 1, promise_tokens=2**63 - 1),
        Code.TOO_LARGE,
    ),
    (client.CommitLease(1, 2**62), Code.UNKNOWN_LEASE),
    (client.CommitAndRelease(1, -1), Code.UNKNOWN_LEASE),
    (client.ReceiveRequest(1, -1, ("p",)), Code.BAD_ROOM),
    (client.ReceiveRequest(1, 2**63, ("p",)), Code.BAD_ROOM),
    (client.ReceiveRequest(1, 7, ()), Code.BAD_REQUEST),
    (client.ReceiveRequest(1, 7, ("p", "p")), Code.BAD_REQUEST),
    (client.ReceiveRequest(1, 7, ("p\x00\x1b[31m",)), Code.PEER_UNKNOWN),
    (client.ReceiveRequest(1, 7, ("p",), reserve_tokens=-5), Code.BAD_REQUEST),
    (client.ReceiveRequest(1, 7, ("p",), reserve_tokens=2**40), Code.TOO_LARGE),
    (client.ReceiveRequest(1, 7, ("p",), promise_tokens=-5), Code.BAD_REQUEST),
    (client.ReceiveRequest(1, 7, ("p",), promise_tokens=2**40), Code.TOO_LARGE),
    (client.ReceiveRequest(1, 7, ("p",), tier="gold"), Code.NOT_SUPPORTED),
    (client.SendRequest(1, 0, 1), Code.BAD_ROOM),
    (client.SendRequest(1, 2**63, 1), Code.BAD_ROOM),
    (client.SendRequest(1, 7, 2**40), Code.UNKNOWN_LEASE),
]


def test_client_requests_with_impossible_figures_are_refused(session):
    """scenario A16 too: what can never fit is refused at once."""
    found = [session.request(message, TOKENS) for message, _ in IMPOSSIBLE_REQUESTS]

    assert found == [code for _, code in IMPOSSIBLE_REQUESTS]


def test_client_requests_about_something_unknown_are_refused(session):
    messages = [
        client.ExtendLease(1, 2**40, 1),
        client.ReleaseLease(1, 0),
        client.CancelReceive(1, 2**63),
        client.Advance(1, -1, 5),
        client.Finish(1, 2**40, b""),
        client.AbortSend(1, 0, "x"),
    ]

    found = [session.request(message) for message in messages]

    assert found == [Code.UNKNOWN_LEASE] * 2 + [Code.UNKNOWN_HANDOFF] * 4


def test_lease_and_send_refuse_impossible_steps_and_stay_as_they_were(session):
    leased = session.request(client.OpenLease(1), TOKENS)
    sending = session.request(client.SendRequest(2, 2**63 - 1, leased.lease), TOKENS)

    codes = [
        session.request(client.ExtendLease(3, leased.lease, -1)),
        session.request(client.ExtendLease(4, leased.lease, 2**62)),
        session.request(client.CommitLease(5, leased.lease), bytes(4 * 5_000)),
        session.request(client.SendRequest(6, 2**63 - 1, leased.lease), TOKENS),
        session.request(client.SendRequest(7, 9, leased.lease), TOKENS[4:]),
        session.request(client.Advance(8, sending.send, 101)),
        session.request(client.Advance(9, sending.send, -1)),
        session.request(client.Finish(10, sending.send, bytes(2**16 + 1))),
    ]

    assert codes == [
        Code.BAD_REQUEST,
        Code.NO_ROOM,
        Code.BAD_REQUEST,
        Code.DUPLICATE_ROOM,
        Code.PROMPT_MISMATCH,
        Code.BAD_REQUEST,
        Code.BAD_REQUEST,
        Code.TOO_LARGE,
    ]
    assert isinstance(session.request(client.Advance(11, sending.send, 50)), client.Done)
    assert isinstance(session.request(client.CommitLease(12, leased.lease), b""), client.PageTable)


def test_leases_with_strange_deadlines_are_granted_or_refused_at_once(session):
    for deadline_s in (-1.0, 0.0, math.nan, math.inf, -math.inf, 1e308):
        answer = session.request(client.OpenLease(1, deadline_s=deadline_s), TOKENS)
        assert isinstance(answer, client.Leased | Code), deadline_s


def test_receive_whose_deadline_has_passed_ends(session, engines):
    for deadline_s in (-1.0, 0.0, -math.inf):
        room = engines.room()
        answer = session.request(
            client.ReceiveRequest(1, room, ("p",), deadline_s=deadline_s), TOKENS
        )
        if isinstance(answer, client.Receiving):
            answer = session.hear()
        assert isinstance(answer, Code | client.ReceiveFailed), deadline_s


def test_prompt_larger_than_the_pool_is_refused_with_both_figures(session):
    """scenario A16."""
    answer = session.asked(CLIENT_REQUESTS.encode(client.OpenLease(1)), bytes(4 * 16 * 300))

    assert answer.refusal.code is Code.TOO_LARGE
    assert "300" in answer.refusal.message
    assert "256" in answer.refusal.message


def test_random_client_frames_cost_nobody_anything(engines):
    valid = [
        CLIENT_REQUESTS.encode(message)
        for message in (
            client.OpenLease(1, "ns", 5, 2, 0.05, False),
            client.ReceiveRequest(2, 5, ("p",), deadline_s=0.05),
            client.SendRequest(3, 5, 1),
            client.Finish(4, 1, b"aux"),
            client.ExtendLease(5, 1, 100),
            client.MatchPrefix(6, "ns"),
        )
    ]
    session = RawSession(engines.pair.decode)
    for number, frame in enumerate(mutants(valid, 400)):
        session.say(*[frame, TOKENS[: number % 401]][: 1 + number % 2])
    session.say(CLIENT_REQUESTS.encode(client.GetSnapshot(77)))

    while not isinstance(answer := session.hear(), client.Snapshotted):
        assert answer is not None
    session.close()


def test_oversized_client_frame_closes_that_connection_only(engines, session):
    session.say(bytes(TOO_LONG))

    other = RawSession(engines.pair.decode)
    assert isinstance(other.request(client.GetSnapshot(1)), client.Snapshotted)
    other.close()


# ---- the attach socket ---------------------------------------------------------------------------


def test_attach_packets_that_make_no_sense_are_rejected(engines):
    packets = [
        b"\x00",
        b"GET / HTTP/1.1",
        b"\x94" * 3_000,
        bytes(150_000),
        ATTACH_REQUESTS.encode(Attach("x"))[:-1],
        ATTACH_REQUESTS.encode(Attach("x", 99)),
        ATTACH_REQUESTS.encode(Join(b"nobody's token")),
        ATTACH_REQUESTS.encode(Attach("n" * 100_000)),
    ]
    for packet in packets:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.settimeout(5)
            raw.connect(engines.pair.decode.attach)
            raw.send(packet)
            answer = msgspec.msgpack.decode(raw.recv(65_536), type=AttachReply)
            ended = raw.recv(65_536)
        assert isinstance(answer, Rejected), packet[:20]
        assert (bool(answer.refusal.message), ended) == (True, b""), packet[:20]


def test_random_attach_packets_open_no_session_that_stays(engines):
    valid = [ATTACH_REQUESTS.encode(message) for message in (Attach("x"), Join(b"t" * 16))]
    for packet in mutants(valid, 100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(engines.pair.decode.attach)
            with contextlib.suppress(OSError):
                raw.send(packet)

    until(lambda: [one.name for one in engines.pair.decode.snapshot().clients] == ["decode-engine"])


# ---- the admin socket ----------------------------------------------------------------------------


@pytest.fixture
def operator(engines):
    """A raw operator of the decode daemon."""
    raw = Wire(engines.pair.decode.admin, ADMIN_REPLIES)
    yield raw
    raw.close()


def test_admin_messages_that_cannot_be_read_are_refused(operator):
    for frames in (
        [b""],
        [b"\xc1" * 9],
        [b"\x94" * 5_000],
        [ADMIN_REQUESTS.encode(admin.ShowStatus(1)), b"more"],
        [ADMIN_REQUESTS.encode(admin.Why(1, "page", 3))[:-2]],
        [bytes(5 * 2**20)],
    ):
        answer = operator.asked(*frames)
        assert isinstance(answer, admin.AdminFailed), frames[0][:20]
        assert (answer.call, answer.refusal.code) == (-1, Code.BAD_REQUEST), frames[0][:20]


def test_admin_verb_that_is_unknown_is_refused_under_its_call(operator):
    answer = operator.asked(CLIENT_REQUESTS.encode(client.OpenLease(31)))

    assert isinstance(answer, admin.AdminFailed)
    assert (answer.call, answer.refusal.code) == (31, Code.BAD_REQUEST)
    assert f"this node is kvd {__version__}: ask it with that version" in answer.refusal.message


def test_admin_questions_about_nothing_are_refused(operator):
    for message in (
        admin.Why(5, "page", 2**62),
        admin.Why(5, "page", -1),
        admin.Why(5, "colour", 1),
        admin.Why(5, "node", 0),
        admin.Why(5, "lease", 2**40),
        admin.Why(5, "room", 0),
        admin.AbortRoom(5, 2**63, ""),
        admin.AbortRoom(5, 0, "x" * 10_000),
    ):
        answer = operator.asked(ADMIN_REQUESTS.encode(message))
        assert isinstance(answer, admin.AdminFailed), message
        assert (answer.call, answer.refusal.code) == (5, Code.BAD_REQUEST), message


def test_admin_figures_out_of_range_are_answered_all_the_same(operator):
    for message in (
        admin.ShowTree(5, -7),
        admin.ShowTree(5, 2**62),
        admin.ListEvents(5, -(2**40)),
        admin.ListEvents(5, 2**62),
        admin.ListEvents(5, 2**62, math.nan),
        admin.ListEvents(5, 2**62, -1.0),
        admin.ListEvents(5, 0, math.inf),
        admin.Evict(5, -3),
    ):
        answer = operator.asked(ADMIN_REQUESTS.encode(message))
        assert isinstance(answer, admin.Tree | admin.EventPage | admin.Report), message
        assert answer.call == 5, message


def test_random_admin_frames_are_each_answered(operator):
    # No verb that changes something: a flipped bit may leave a valid order.
    valid = [
        ADMIN_REQUESTS.encode(message)
        for message in (admin.Why(1, "page", 3), admin.ShowTree(2, 5), admin.ListEvents(3, 0))
    ]
    frames = list(mutants(valid, 200))
    for frame in frames:
        operator.say(frame)

    assert all(operator.hear() is not None for _ in frames)


# ---- HTTP ----------------------------------------------------------------------------------------


HTTP_NONSENSE = {
    b"\x00\x01\x02\xff\r\n\r\n": {b"400"},
    b"GET\r\n\r\n": {b"400"},
    b"POST /flush HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n": {
        b"404",
        b"405",
        b"413",
    },
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n": {b"404"},
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": {b"400", b"405", b"505"},
    # These may be hung up on while they are still being sent.
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n": {b"400", b"414", b"431", b""},
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n": {b"400", b"431", b""},
}


def test_http_nonsense_is_answered_with_an_error_and_served_on(engines):
    address = ("127.0.0.1", engines.pair.decode.http_port)
    for raw, statuses in HTTP_NONSENSE.items():
        with socket.create_connection(address, 5) as link:
            answer = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(raw)
                answer = link.recv(4_096)
        assert [*answer.split(b" "), b"", b""][1] in statuses, raw[:20]

    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/livez") as page:
        assert page.status == 200


def test_http_half_requests_and_hang_ups_cost_nothing(engines):
    address = ("127.0.0.1", engines.pair.decode.http_port)
    links = [socket.create_connection(address, 5) for _ in range(50)]
    for number, link in enumerate(links):
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[: number % 38])
        link.close()

    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/livez") as page:
        assert page.status == 200
