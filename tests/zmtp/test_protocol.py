"""The machine without a socket: what it understands, and what it hangs up on, at which byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.zmtp import frames
from kvd.zmtp.bounds import BOUNDS, COMMAND_BYTES, HANDSHAKE_BYTES, MAX_FRAMES, PIECE_BYTES
from kvd.zmtp.events import ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.frames import COMMAND, LONG, MORE
from kvd.zmtp.mechanism import DEALER, ROUTER, Null, own_properties
from kvd.zmtp.protocol import ProtocolState
from tests.zmtp.pairs import LIMIT, MAKERS, null

both = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
GREETING = frames.greeting(b"NULL", as_server=False)
READY = frames.command(b"READY", own_properties(b"DEALER", b"me"))


def listening(*said, limit=LIMIT):
    """A machine that has read ``said``, and all its events."""
    pair = null(limit=limit)
    for data in said:
        if pair.listening.state is not ProtocolState.OVER:
            pair.give(pair.listening, data)
    return pair


def fault(pair):
    last = pair.said[-1]
    assert isinstance(last, ConnectionClosed), pair.said
    assert pair.listening.state is ProtocolState.OVER
    assert pair.listening.held == 0
    return last.fault


# ---- what works ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [1, 2, 3, 7, 63, 64, 1 << 20])
def test_a_handshake_and_messages_survive_any_cut(make, size):
    pair = make(b"\0leading zero").shake(size)
    messages = [[b""], [b"a"], [b"x" * 255], [b"y" * 256], [b"1", b"", b"z" * 300], [b"q"] * 4]

    for message in messages:
        said = pair.tell(*message)
        for at in range(0, len(said), size):
            pair.give(pair.listening, said[at : at + size])

    ready, *rest = pair.said
    assert (ready.routing_id, ready.socket_type) == (b"\0leading zero", b"DEALER")
    assert rest == messages
    assert pair.listening.held == 0


SLOWEST_ROUND_TRIP_S = 2.0
"""What a network may need whose buffers are full: then is when links break and are made again."""


@both
def test_a_handshake_over_the_slowest_network_has_time_enough(make):
    pair, trips = make(), 0
    machines = pair.listening, pair.dialing
    while any(said := [b"".join(machine.to_send()) for machine in machines]):
        trips += 1
        for machine, heard in zip(machines, reversed(said), strict=True):
            pair.give(machine, heard)

    assert {machine.state for machine in machines} == {ProtocolState.TRAFFIC}
    # One more, before the first: that the connection was taken has to be heard.
    assert (1 + trips) * SLOWEST_ROUND_TRIP_S / 2 < BOUNDS.handshake_s


@both
def test_both_sides_speak(make):
    pair = make().shake()

    pair.give(pair.dialing, b"".join(pair.listening.pack([b"hello", b"back"])))

    assert [type(one) for one in pair.events[pair.dialing]] == [HandshakeDone, list]
    assert pair.events[pair.dialing][1] == [b"hello", b"back"]


def test_a_listener_knows_the_name_of_the_proven_key_and_no_other_way_to_one():
    assert MAKERS["curve"]().shake().said[0].name == "d"
    assert MAKERS["null"]().shake().said[0].name == ""


@both
def test_a_heartbeat_is_answered_between_and_within_messages(make):
    pair = make().shake()
    mechanism, said = pair.dialing._mechanism, []
    mechanism.wrap(said, b"first", MORE)
    mechanism.wrap(said, frames.named(b"PING", b"\0\x10context"), COMMAND)
    mechanism.wrap(said, b"second", 0)
    pair.give(pair.listening, b"".join(said))

    assert pair.said[1:] == [[], [b"first", b"second"]]
    pair.step()
    assert pair.events[pair.dialing][1:] == [[]], "and a PONG is a command, no message"


def test_a_pong_gives_the_context_back():
    pair = listening(GREETING, READY)
    pair.listening.to_send()

    pair.give(pair.listening, frames.command(b"PING", b"\0\x10" + b"0123456789abcdef" + b"more"))

    assert pair.listening.to_send() == [frames.command(b"PONG", b"0123456789abcdef")]


def test_a_command_that_is_not_known_changes_nothing():
    pair = listening(GREETING, READY, frames.command(b"SUBSCRIBE", b"x"), b"\0\1a")
    assert pair.said[1:] == [[], [b"a"]]


def test_an_idle_machine_keeps_nothing_of_a_large_read():
    pair = listening(GREETING, READY, b"\0\1a" * 1000 + b"\0")
    assert len(pair.listening._buffer) == 1


def test_a_version_above_ours_is_spoken_to():
    newer = GREETING[:11] + b"\x07" + GREETING[12:]
    assert isinstance(listening(newer, READY).said[0], HandshakeDone)


# ---- before the handshake is over ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"G", ConnectionFault.NOT_ZMTP),
        (b"\0" * 64, ConnectionFault.NOT_ZMTP),
        (b"\xff" * 10, ConnectionFault.NOT_ZMTP),
        (b"\xff" + bytes(8) + b"\x7f\x01", ConnectionFault.OLD_VERSION),
        (b"\xff" + bytes(8) + b"\x7f\x00", ConnectionFault.OLD_VERSION),
        (frames.greeting(b"PLAIN", as_server=False), ConnectionFault.MECHANISM),
        (frames.greeting(b"CURVE", as_server=False), ConnectionFault.MECHANISM),
        (GREETING + b"\0\1a", ConnectionFault.MALFORMED),
        (GREETING + b"\x05\1a", ConnectionFault.MALFORMED),
        (GREETING + b"\x0c\1a", ConnectionFault.MALFORMED),
        (GREETING + b"\x04\x00", ConnectionFault.MALFORMED),
        (GREETING + b"\x04\x03\x09ab", ConnectionFault.MALFORMED),
        (GREETING + frames.command(b"HELLO", b""), ConnectionFault.MALFORMED),
        (GREETING + frames.command(b"READY", b"\x01"), ConnectionFault.MALFORMED),
        (
            GREETING + frames.command(b"READY", b"\x04name\xff\xff\xff\xffx"),
            ConnectionFault.MALFORMED,
        ),
        (
            GREETING + frames.command(b"READY", own_properties(b"PUB", b"")),
            ConnectionFault.MALFORMED,
        ),
        (GREETING + frames.command(b"READY", b""), ConnectionFault.MALFORMED),
        (
            GREETING + frames.command(b"READY", own_properties(DEALER, bytes(256))),
            ConnectionFault.MALFORMED,
        ),
        (GREETING + frames.command(b"ERROR", b"\x02no"), ConnectionFault.REFUSED),
    ],
)
def test_what_nobody_may_say_before_the_handshake_is_over_ends_it(said, why):
    assert fault(listening(said)) is why
    assert fault(listening(*(said[at : at + 1] for at in range(len(said))))) is why


def test_a_long_frame_in_the_place_of_a_handshake_is_hung_up_on_when_its_length_is_read():
    header = bytes((COMMAND | LONG,)) + (16 << 20).to_bytes(8, "big")

    pair = listening(GREETING, *(header[at : at + 1] for at in range(9)))

    assert fault(pair) is ConnectionFault.TOO_LARGE
    assert (
        fault(listening(GREETING, frames.header(COMMAND_BYTES + 1, COMMAND)))
        is ConnectionFault.TOO_LARGE
    )


def test_a_handshake_has_so_many_bytes_in_all():
    """Two commands that are each short enough: the second is not waited for."""
    pair = MAKERS["curve"]()
    while pair.listening.state is not ProtocolState.HANDSHAKE:
        pair.step()
    pair.listening._handshake_left = 100

    pair.give(pair.listening, frames.header(99, COMMAND))

    assert fault(pair) is ConnectionFault.TOO_LARGE


# ---- traffic -------------------------------------------------------------------------------------


def test_a_message_is_hung_up_on_when_a_length_exceeds_what_is_left_of_all_its_frames():
    just = frames.header(LIMIT - 1, MORE) + bytes(LIMIT - 1) + frames.header(1, 0) + b"x"
    assert len(listening(GREETING, READY, just).said[-1]) == 2

    pair = listening(GREETING, READY, frames.header(LIMIT - 1, MORE) + bytes(LIMIT - 1))
    pair.give(pair.listening, frames.header(2, 0))
    assert fault(pair) is ConnectionFault.TOO_LARGE
    assert (
        fault(listening(GREETING, READY, frames.header(LIMIT + 1, 0))) is ConnectionFault.TOO_LARGE
    )
    assert (
        fault(listening(GREETING, READY, frames.header(2**64 - 1, 0))) is ConnectionFault.TOO_LARGE
    )


@both
def test_a_message_without_an_end_is_hung_up_on_at_its_fifth_frame(make):
    pair = make().shake()
    said = []
    for _ in range(MAX_FRAMES + 1):
        pair.dialing._mechanism.wrap(said, b"", MORE)

    pair.give(pair.listening, b"".join(said[:-1]))
    assert len(pair.said) == 1
    pair.give(pair.listening, said[-1])

    assert fault(pair) is ConnectionFault.TOO_MANY_FRAMES


@pytest.mark.parametrize("flags", [8, 0x80, 0xFF, 0x10 | MORE])
def test_a_frame_with_flags_that_nobody_knows_is_hung_up_on(flags):
    assert (
        fault(listening(GREETING, READY, bytes((flags, 1)) + b"aaaaaaaaaa"))
        is ConnectionFault.MALFORMED
    )


def test_a_long_command_is_hung_up_on_when_its_length_is_read():
    assert (
        fault(listening(GREETING, READY, frames.header(1025, COMMAND))) is ConnectionFault.TOO_LARGE
    )


def test_what_is_held_is_what_came_and_is_not_whole():
    pair = listening(GREETING, READY, frames.header(500, MORE) + bytes(500), b"\0\x09abc")
    assert pair.listening.held == 506, "and one for the frame that is whole"


def test_a_frame_that_comes_byte_by_byte_is_kept_in_few_pieces():
    """A piece for each byte would take forty times the memory."""
    size = 9_000
    pair = listening(GREETING, READY, frames.header(size, 0), *(b"x" for _ in range(size - 1)))
    assert [len(piece) for piece in pair.listening._body] == [PIECE_BYTES, size - PIECE_BYTES - 1]
    assert (pair.listening.held, pair.listening.lacks) == (size - 1, 1)

    pair.give(pair.listening, b"x\0\1y")

    assert pair.said[-2:] == [[b"x" * size], [b"y"]]
    assert pair.listening.held == 0


# ---- random --------------------------------------------------------------------------------------


BODIES = st.binary(max_size=600) | st.integers(8_000, 9_000).map(bytes)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    st.lists(st.lists(BODIES, min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(1, 700) | st.just(20_000), min_size=1, max_size=8),
    st.sampled_from(list(MAKERS)),
)
def test_messages_come_as_they_were_sent_however_they_are_cut(messages, cuts, kind):
    pair = MAKERS[kind](limit=50_000).shake()
    said = b"".join(pair.tell(*message) for message in messages)
    at = turn = 0
    while at < len(said):
        size = cuts[turn % len(cuts)]
        pair.give(pair.listening, said[at : at + size])
        at, turn = at + size, turn + 1

    assert pair.said[1:] == messages


@settings(max_examples=500, deadline=None, print_blob=True)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", GREETING, GREETING + READY]),
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
)
def test_no_bytes_raise_or_are_kept_beyond_the_bounds(noise, before, cuts):
    pair, said, at, turn = null(), before + noise, 0, 0
    while at < len(said) and pair.listening.state is not ProtocolState.OVER:
        size = cuts[turn % len(cuts)]
        pair.give(pair.listening, said[at : at + size])
        at, turn = at + size, turn + 1
        is_early = pair.listening.state in {ProtocolState.GREETING, ProtocolState.HANDSHAKE}
        assert pair.listening.held <= (HANDSHAKE_BYTES if is_early else LIMIT + 100)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.integers(0, 1200), st.integers(0, 7), st.sampled_from(["listening", "dialing"]))
def test_a_flipped_bit_of_a_curve_handshake_ends_it_or_changes_nothing(place, bit, side):
    """Where both go on all the same they agree on keys, and nobody is taken for somebody else."""
    pair = MAKERS["curve"]()
    pair.spoil(getattr(pair, side), place, bit)
    pair.shake()

    assert [one.name for one in pair.said if isinstance(one, HandshakeDone)] in ([], ["d"])
    if (
        pair.dialing.state is ProtocolState.TRAFFIC
        and pair.listening.state is ProtocolState.TRAFFIC
    ):
        pair.give(pair.listening, pair.tell(b"whole"))
        assert pair.said[-1] == [b"whole"]


def test_a_router_talks_to_dealers_requesters_and_routers():
    for kind in (b"DEALER", b"REQ", b"ROUTER"):
        ready = frames.command(b"READY", own_properties(kind, b""))
        assert isinstance(listening(GREETING, ready).said[0], HandshakeDone)
    assert Null(ROUTER).is_listening
