"""The codec: messages survive the wire, old bytes stay readable, hostile bytes never raise."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import Code, Refusal
from kvd.wire import admin, client, peer
from kvd.wire.bounds import MAX_PEER_BYTES
from kvd.wire.codec import (
    ADMIN_REPLIES,
    ADMIN_REQUESTS,
    ATTACH_REPLIES,
    ATTACH_REQUESTS,
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
    MAX_HEADER_BYTES,
    NO_CALL,
    PEER_MESSAGES,
    SEVERAL_BYTES,
    check_tokens,
    joined_replies,
)
from tests.support.replies import each

CODECS = {
    "client requests": CLIENT_REQUESTS,
    "client replies": CLIENT_REPLIES,
    "attach requests": ATTACH_REQUESTS,
    "attach replies": ATTACH_REPLIES,
    "peer messages": PEER_MESSAGES,
    "admin requests": ADMIN_REQUESTS,
    "admin replies": ADMIN_REPLIES,
}

REFUSAL = Refusal(Code.NO_ROOM, "3 pages are needed", side="d", numbers={"needed_pages": 3})

KEPT = [
    (PEER_MESSAGES, peer.Accept("1", "2", 7, 64), "95a6616363657074a131a1320740"),
    (
        PEER_MESSAGES,
        peer.Ping("1", "2", 0, 3, 5, 6, "draining", "y", ("a>b",)),
        "9aa470696e67a131a13200030506a8647261696e696e67a17991a3613e62",
    ),
    (
        CLIENT_REQUESTS,
        client.SendRequest(1, 7, 3, "n", 30.0, "d", 0.5, 2, "r", b"pg", when_written=True),
        "9ca473656e64010703a16ecb403e000000000000a164cb3fe000000000000002a172c4027067c3",
    ),
    (
        PEER_MESSAGES,
        peer.Hello("1", "2", "p", "[]", 3, b"m", 4, 5, 1, 6, True, True, "h"),
        "9ea568656c6c6fa131a132a170a25b5d03c4016d04050106c3c3a168",
    ),
    (
        PEER_MESSAGES,
        peer.Abort("1", "2", 7, 9, "deadline"),
        "96a561626f7274a131a1320709a8646561646c696e65",
    ),
    (
        PEER_MESSAGES,
        peer.AskStory("s", "t", 1, 2, 7, "prefill"),
        "97a961736b2d73746f7279a173a174010207a770726566696c6c",
    ),
    (
        PEER_MESSAGES,
        peer.Story("s", "t", 1, "streaming", "x", 100, 64, 0, 384, 1, 29.5, (peer.Told(0.5, "y"),)),
        "9da573746f7279a173a17401a973747265616d696e67a178644000cd018001cb403d8000000000009192cb3f"
        "e0000000000000a179",
    ),
    (CLIENT_REQUESTS, client.MatchPrefix(1, "ns"), "93a56d6174636801a26e73"),
    (
        CLIENT_REQUESTS,
        client.Finish(4, 2, b"\x05", b"\x07"),
        "95a666696e6973680402c40105c40107",
    ),
    (
        CLIENT_REQUESTS,
        client.OpenLease(1, reserve_tokens=8, promise_tokens=5, tiers="now"),
        "9aa56c6561736501a00800cb403e000000000000c30005a36e6f77",
    ),
    (CLIENT_REQUESTS, client.SlideLease(1, 2, 16), "94a5736c69646501 0210"),
    (
        CLIENT_REQUESTS,
        client.FetchPages(1, 2, b"\x01\0\0\0"),
        "95a566657463680102c40401000000c400",
    ),
    (
        CLIENT_REPLIES,
        client.Leased(1, 2, 16, b"\x01\0\0\0", (b"\0", b""), 5, 3, 7),
        "9aa66c65617365640102 10c4040100000092c40100c400050307cb0000000000000000",
    ),
    (
        CLIENT_REPLIES,
        client.FetchReply(1, b"\x01\0\0\0", 1, 0, 0),
        "96a76665746368656401c40401000000010000",
    ),
]
"""Messages with the bytes they have in protocol 1: a change here breaks running peers."""

EARLIER = [
    (
        CLIENT_REQUESTS,
        client.SendRequest(1, 7, 3, "n", 30.0, "d", 0.5, 2, "r", b"pg"),
        "9ba473656e64010703a16ecb403e000000000000a164cb3fe000000000000002a172c4027067",
    ),
    (CLIENT_REPLIES, client.Sending(1, 2), "93a773656e64696e670102"),
    (
        CLIENT_REQUESTS,
        client.SendRequest(1, 7, 3, "n", 30.0, "d"),
        "97a473656e64010703a16ecb403e000000000000a164",
    ),
    (CLIENT_REQUESTS, client.Finish(4, 2, b"\x05"), "94a666696e6973680402c40105"),
    (
        PEER_MESSAGES,
        peer.Hello("1", "2", "p", "[]", 3, b"m", 4, 5, 1, 6, True),
        "9ca568656c6c6fa131a132a170a25b5d03c4016d04050106c3",
    ),
    (CLIENT_REQUESTS, client.BeginEpoch(1, "m", 7), "94a565706f636801a16d07"),
    (CLIENT_REPLIES, client.FlushReport(1, 2, 3, ("x",)), "95a7666c757368656401 020391a178"),
    (PEER_MESSAGES, peer.Accept("1", "2", 7), "94a6616363657074a131a13207"),
    (PEER_MESSAGES, peer.Ping("1", "2", 3, 0, 5, 6), "97a470696e67a131a13203000506"),
    (
        PEER_MESSAGES,
        peer.Ping("1", "2", 3, 0, 5, 6, "draining", "y"),
        "99a470696e67a131a13203000506a8647261696e696e67a179",
    ),
    (
        CLIENT_REQUESTS,
        client.OpenLease(1, "", 8, 0, 30.0, cache=False),
        "97a56c6561736501a00800cb403e000000000000c2",
    ),
    (
        CLIENT_REQUESTS,
        client.OpenLease(1, "", 8, 0, 30.0, cache=False, step_tokens=4, promise_tokens=5),
        "99a56c6561736501a00800cb403e000000000000c20405",
    ),
    (
        CLIENT_REPLIES,
        client.Leased(1, 2, 16, b"\x01\0\0\0", (b"\0", b""), 5),
        "97a66c65617365640102 10c4040100000092c40100c40005",
    ),
    (
        CLIENT_REQUESTS,
        client.OpenLease(1, "", 8, 0, 30.0, cache=False, step_tokens=4),
        "98a56c6561736501a00800cb403e000000000000c204",
    ),
    (
        CLIENT_REPLIES,
        client.Leased(1, 2, 16, b"\x01\0\0\0", (b"\0", b"")),
        "96a66c65617365640102 10c4040100000092c40100c400",
    ),
    (CLIENT_REPLIES, client.Receiving(1, 2, 16, 32), "95a9726563656976696e6701021020"),
    (
        CLIENT_REQUESTS,
        client.ReceiveRequest(1, 7, ("p",), "", 0, 0, 30.0, cache=True, tier=None),
        "9aa772656365697665010791a170a00000cb403e000000000000c3c0",
    ),
    (CLIENT_REPLIES, client.Leased(1, 2, 16, b"\x01\0\0\0"), "95a66c65617365640102 10c40401000000"),
    (CLIENT_REPLIES, client.PageTable(1, 2, b"\x01\0\0\0"), "94a3726f770102c40401000000"),
    (
        CLIENT_REPLIES,
        client.Resumed(1, 4, 3, 7, b"\x01\0\0\0"),
        "96a7726573756d656401040307c40401000000",
    ),
    (
        CLIENT_REPLIES,
        client.Received(1, 2, b"\x01\0\0\0", b"\x05"),
        "95a872656365697665640102c40401000000c40105",
    ),
]
"""Messages with the bytes that they had before they got more fields."""


@pytest.mark.parametrize(("codec", "message", "frame"), KEPT, ids=lambda one: type(one).__name__)
def test_codec_reads_and_writes_the_bytes_of_protocol_1(codec, message, frame: str) -> None:
    kept = bytes.fromhex(frame.replace(" ", ""))

    assert codec.encode(message) == kept
    assert codec.decode(kept) == message


@pytest.mark.parametrize(("codec", "message", "frame"), EARLIER, ids=lambda one: type(one).__name__)
def test_codec_reads_the_bytes_that_a_message_had_with_fewer_fields(
    codec, message, frame: str
) -> None:
    assert codec.decode(bytes.fromhex(frame.replace(" ", ""))) == message


def test_codec_reads_a_message_of_a_newer_minor_version() -> None:
    """Fields added at the end are skipped by an older reader."""
    newer = msgspec.msgpack.encode(["accept", "1", "2", 7, 64, "a field of tomorrow"])

    assert PEER_MESSAGES.decode(newer) == peer.Accept("1", "2", 7, 64)


def test_codec_fills_the_defaults_of_a_shorter_message() -> None:
    older = msgspec.msgpack.encode(["lease", 5])

    assert CLIENT_REQUESTS.decode(older) == client.OpenLease(5)


@pytest.mark.parametrize(
    ("codec", "message", "older"),
    [
        (
            PEER_MESSAGES,
            peer.Hello("1", "2", "p", "[]", 3, b"m", 4, 5, 1, 4 * 2**20),
            "9aa568656c6c6fa131a132a170a25b5d03c4016d040501",
        ),
        (
            CLIENT_REQUESTS,
            client.SendRequest(1, 7, 3, "n", 30.0),
            "96a473656e64010703a16ecb403e000000000000",
        ),
    ],
    ids=["hello", "send"],
)
def test_codec_reads_what_older_versions_send(codec, message, older: str) -> None:
    """Of a limit and of a destination that they do not know."""
    assert codec.decode(bytes.fromhex(older)) == message


def test_codec_keeps_refusals_with_their_numbers() -> None:
    message = client.Failed(3, REFUSAL)

    assert CLIENT_REPLIES.decode(CLIENT_REPLIES.encode(message)) == message


@pytest.mark.parametrize("name", CODECS)
@given(frame=st.binary(max_size=64))
def test_codec_never_raises_on_random_bytes(name: str, frame: bytes) -> None:
    """scenario G1, scenario G2: foreign bytes are a value, not an exception."""
    CODECS[name].decode(frame)


@pytest.mark.parametrize("name", ["client requests", "peer messages", "admin requests"])
def test_codec_never_raises_on_damaged_messages(name: str) -> None:
    """Every kept message, cut at every length and with random bytes flipped."""
    rng = random.Random(20261121)
    for _, _, text in KEPT:
        frame = bytes.fromhex(text.replace(" ", ""))
        for cut in range(len(frame)):
            CODECS[name].decode(frame[:cut])
        for _ in range(200):
            damaged = bytearray(frame)
            damaged[rng.randrange(len(frame))] = rng.randrange(256)
            CODECS[name].decode(bytes(damaged))


def test_codec_refuses_an_oversized_frame_with_both_numbers() -> None:
    refusal = PEER_MESSAGES.decode(b"\0" * (MAX_PEER_BYTES + 1))

    assert isinstance(refusal, Refusal)
    assert refusal.numbers == {"bytes": MAX_PEER_BYTES + 1, "limit": MAX_PEER_BYTES}


def test_codec_refuses_nesting_without_end() -> None:
    refusal = ADMIN_REQUESTS.decode(b"\x91" * 100_000)

    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.BAD_REQUEST


def test_codec_refuses_a_message_of_another_socket() -> None:
    frame = ADMIN_REQUESTS.encode(admin.Audit(1))

    assert isinstance(CLIENT_REQUESTS.decode(frame), Refusal)


@pytest.mark.parametrize(
    ("frame", "code"),
    [(b"\1\0\0", Code.BAD_TOKENS), (bytes(4 * 11), Code.TOO_LARGE)],
    ids=["not whole", "too many"],
)
def test_check_tokens_refuses(frame: bytes, code: Code) -> None:
    """scenario G2: a length that is not a multiple of 4, and more tokens than the limit."""
    refusal = check_tokens(frame, max_tokens=10)

    assert isinstance(refusal, Refusal)
    assert refusal.code is code


def test_check_tokens_takes_whole_tokens() -> None:
    assert check_tokens(bytes(40), max_tokens=10) == bytes(40)


INT64 = 2**63 - 1

LONG = Refusal(Code.ABORTED, "x" * 4097)

OUT_OF_BOUNDS = [
    (CLIENT_REQUESTS, client.OpenLease(1, reserve_tokens=2**64 - 1)),
    (CLIENT_REQUESTS, client.OpenLease(1, priority=2**32)),
    (CLIENT_REQUESTS, client.OpenLease(1, "x" * 257)),
    (CLIENT_REQUESTS, client.ExtendLease(1, 1, 2**63)),
    (CLIENT_REQUESTS, client.OpenLease(1, step_tokens=2**63)),
    (CLIENT_REQUESTS, client.SlideLease(1, 1, 2**63)),
    (CLIENT_REQUESTS, client.ReleaseLease(2**63, 1)),
    (CLIENT_REQUESTS, client.ReleaseLease(-1, 1)),
    (CLIENT_REQUESTS, client.ReceiveRequest(1, 7, ("x" * 129,))),
    (CLIENT_REQUESTS, client.AbortSend(1, 1, "x" * 1025)),
    (ADMIN_REQUESTS, admin.AbortRoom(1, 7, "x" * 1025)),
    (ADMIN_REQUESTS, admin.Evict(1, 2**63)),
    (PEER_MESSAGES, peer.Accept("x" * 129, "", 1)),
    (PEER_MESSAGES, peer.Accept("", "", 2**63)),
    (PEER_MESSAGES, peer.Progress("", "", 1, -1)),
    (PEER_MESSAGES, peer.Abort("", "", 1, 1, "x" * 4097)),
    (PEER_MESSAGES, peer.Reject("", "", LONG)),
    (PEER_MESSAGES, peer.Closed("", "", 1, peer.ReceiveOutcome.FAILED, LONG)),
    (PEER_MESSAGES, peer.Settled("", "", 1, peer.ReceiveOutcome.FAILED, LONG)),
    (
        PEER_MESSAGES,
        peer.Reject(
            "", "", Refusal(Code.ABORTED, "", numbers=dict.fromkeys(map(str, range(65)), 1))
        ),
    ),
    (PEER_MESSAGES, peer.Reject("", "", Refusal(Code.ABORTED, "", numbers={"n": "x" * 4097}))),
]


@pytest.mark.parametrize(("codec", "message"), OUT_OF_BOUNDS, ids=lambda one: type(one).__name__)
def test_codec_refuses_what_is_longer_or_larger_than_its_field(codec, message) -> None:
    refusal = codec.decode(codec.encode(message))

    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.BAD_REQUEST


WITHIN_BOUNDS = [
    (CLIENT_REQUESTS, client.OpenLease(INT64, "x" * 256, INT64, -(2**31))),
    (CLIENT_REQUESTS, client.ReceiveRequest(1, 2**64 - 1, ("x" * 128,), reserve_tokens=-1)),
    (CLIENT_REQUESTS, client.Advance(1, 2**64 - 1, -1)),
    (CLIENT_REQUESTS, client.SlideLease(1, 2**64 - 1, -1)),
    (CLIENT_REQUESTS, client.FetchPages(1, 2**64 - 1, b"abc", b"\xff")),
    (PEER_MESSAGES, peer.Progress("", "", INT64, INT64)),
    (PEER_MESSAGES, peer.Reject("", "", Refusal(Code.ABORTED, "x" * 4096))),
]


@pytest.mark.parametrize(("codec", "message"), WITHIN_BOUNDS, ids=lambda one: type(one).__name__)
def test_codec_leaves_to_the_core_what_the_core_can_refuse_itself(codec, message) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("frame", "call"),
    [
        (CLIENT_REQUESTS.encode(client.AbortSend(5, 1, "x" * 1025)), 5),
        (CLIENT_REQUESTS.encode(client.ReleaseLease(2**63, 1)), NO_CALL),
        (ADMIN_REQUESTS.encode(admin.AbortRoom(5, 1, "")), 5),
        (msgspec.msgpack.encode(["verb-of-tomorrow", 5, {}]), 5),
        (b"\x92\xa5lease", NO_CALL),
        (b"\x91" * 100_000, NO_CALL),
        (bytes(MAX_HEADER_BYTES + 1), NO_CALL),
    ],
    ids=[
        "out of bounds",
        "its call is",
        "of another socket",
        "unknown verb",
        "cut",
        "nested",
        "too long",
    ],
)
def test_codec_tells_whose_request_it_refused(frame: bytes, call: int) -> None:
    assert CLIENT_REQUESTS.call_of(frame) == call


@pytest.mark.parametrize("codec", [CLIENT_REQUESTS, ATTACH_REQUESTS, ADMIN_REQUESTS, PEER_MESSAGES])
def test_codec_quotes_little_of_a_frame_that_it_refuses(codec) -> None:
    """A long tag would be kept in events, and sent back in a Reject that nobody reads."""
    tag = "x" * 1_000_000
    frames = [msgspec.msgpack.encode(shape) for shape in ([tag, 1], {"type": tag}, {tag: 1})]

    refusals = [codec.decode(frame) for frame in frames]

    assert all(len(refusal.message) < 500 for refusal in refusals)
    rejects = [PEER_MESSAGES.encode(peer.Reject("", "", refusal)) for refusal in refusals]
    assert all(isinstance(PEER_MESSAGES.decode(frame), peer.Reject) for frame in rejects)


REPLIES = st.one_of(
    st.builds(client.Done, st.integers(0, 2**40)),
    st.builds(client.Leased, st.just(1), st.just(2), st.just(3), st.integers(0, 90_000).map(bytes)),
    st.builds(client.Failed, st.integers(-1, 9), st.just(REFUSAL)),
    st.builds(client.Received, st.integers(1, 9), st.just(2), st.just(b""), st.binary(max_size=9)),
    st.just(client.Events(2, ())),
)


@given(replies=st.lists(REPLIES, min_size=1, max_size=40))
def test_replies_of_one_turn_are_few_messages_and_keep_their_order(replies) -> None:
    frames = joined_replies([CLIENT_REPLIES.encode(one) for one in replies])

    heard = [each(CLIENT_REPLIES.decode(frame)) for frame in frames]
    assert [one for several in heard for one in several] == replies
    for several, frame in zip(heard, frames, strict=True):
        # One alone goes as it is; no others share a message that is longer than was said.
        assert len(several) > 1 or frame == CLIENT_REPLIES.encode(several[0])
        assert len(several) == 1 or len(frame) < SEVERAL_BYTES + 64
    # As few as that allows: what is in two neighbours would not fit into one.
    sizes = [sum(len(CLIENT_REPLIES.encode(one)) for one in several) for several in heard]
    firsts = [len(CLIENT_REPLIES.encode(several[0])) for several in heard]
    assert all(a + b > SEVERAL_BYTES for a, b in zip(sizes, firsts[1:], strict=False))


def test_several_in_several_are_no_message() -> None:
    inner = ["several", [["done", 1]]]

    assert isinstance(CLIENT_REPLIES.decode(msgspec.msgpack.encode(inner)), client.Several)
    nested = CLIENT_REPLIES.decode(msgspec.msgpack.encode(["several", [inner]]))

    assert isinstance(nested, Refusal)
