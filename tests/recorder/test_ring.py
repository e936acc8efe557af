from __future__ import annotations

import os
import random

import pytest

from kvd.core import inputs
from kvd.core.layout.spec import budgets
from kvd.recorder import ring
from kvd.recorder.input_records import (
    StateMark,
    Unknown,
    headed_message,
    headed_request,
    input_of,
    mark_in,
    mark_of,
    record_of,
    record_of_mark,
)
from kvd.recorder.record_layout import CLIENT_FRAME, INPUT, MARK, PEER_FRAME, InputRecord
from kvd.recorder.recording import records_in
from kvd.recorder.ring import RecordRing
from kvd.types import Tokens
from kvd.wire import client, peer
from kvd.wire.codec import CLIENT_REQUESTS, PEER_MESSAGES
from tests.core.families import SPECS, worked


@pytest.fixture
def ends():
    """The writer's and the reader's view of a small ring."""
    descriptor = ring.create(4096)
    writer, reader = RecordRing(descriptor), RecordRing(descriptor)
    yield writer, reader
    writer.close()
    reader.close()
    os.close(descriptor)


def test_what_is_written_is_read_as_it_was_however_often_the_ring_closes(ends):
    writer, reader = ends
    seed = 7
    rng = random.Random(seed)
    at = 0
    for number in range(2000):
        record = InputRecord(
            float(number), rng.randbytes(rng.randint(0, 300)), rng.randbytes(rng.randint(0, 900)),
            rng.choice((INPUT, MARK, CLIENT_FRAME, PEER_FRAME)),
        )  # fmt: skip
        assert writer.write(record.headed(), record.tokens), f"seed {seed}"

        assert reader.skim(at)[:2] == (record.is_mark, float(number))
        read, at = reader.read(at)
        reader.forget(at)

        assert read == record, f"seed {seed}, record {number}"
    assert at == writer.end == reader.begin > 100 * reader.size


def test_a_full_ring_takes_nothing_until_the_reader_has_forgotten_something(ends):
    writer, reader = ends
    record = InputRecord(1.0, b"m" * 1000)
    assert [writer.write(record.headed(), record.tokens) for _ in range(5)] == [
        True,
        True,
        True,
        True,
        False,
    ]
    end = writer.end

    assert not writer.write(record.headed(), record.tokens)
    assert reader.end == end
    _, after = reader.read(0)
    reader.forget(after)

    assert writer.write(record.headed(), record.tokens)
    assert not writer.write(record.headed(), record.tokens)


def test_a_record_longer_than_the_ring_is_not_taken(ends):
    writer, reader = ends

    assert not writer.write(InputRecord(1.0, b"m" * 4096).headed())
    assert reader.end == 0


def test_pieces_are_the_stretch_in_order_across_the_place_where_the_ring_closes(ends):
    writer, reader = ends
    for _ in range(3):
        writer.write(InputRecord(1.0, b"x" * 1000).headed())
        reader.forget(writer.end)
    begin = writer.end
    writer.write(InputRecord(2.0, bytes(range(250)) * 6).headed())

    pieces = list(reader.pieces(begin, writer.end, 100))

    assert b"".join(pieces)[16 : 16 + 1500] == bytes(range(250)) * 6
    assert {len(piece) for piece in pieces[:-1]} == {100}


def test_tokens_of_a_request_come_back_with_it():
    happened = inputs.FromClient(1.5, 3, client.OpenLease(9, "lora"), Tokens(b"\1\0\0\0" * 40))

    record = record_of(happened)

    assert record.tokens == happened.tokens
    assert len(record.message) < 150
    assert input_of(record) == happened


@pytest.mark.parametrize("n_tokens", [0, 1, 5, 40, 700])
def test_what_came_in_a_frame_is_recorded_as_it_came_and_read_as_it_was(ends, n_tokens):
    writer, reader = ends
    message, tokens = client.OpenLease(9, "lora"), Tokens(b"\1\0\0\0" * n_tokens)
    request = inputs.FromClient(1.5, 3, message, tokens)
    ping = inputs.FromPeer(
        2.5, "in:7", peer.Abort("a" * 32, "b" * 32, 4, 5, "cancelled"), "decode-0"
    )
    frames = (CLIENT_REQUESTS.encode(message), PEER_MESSAGES.encode(ping.message))

    assert writer.write(headed_request(request, frames[0]), tokens)
    assert writer.write(headed_message(ping, frames[1]))

    first, at = reader.read(0)
    second, end = reader.read(at)
    assert (input_of(first), input_of(second)) == (request, ping)
    assert bytes(first.message).endswith(frames[0])
    assert bytes(second.message).endswith(frames[1])
    assert end == writer.end
    assert list(records_in(reader.bytes_at(0, end))) == [first, second]


def test_an_input_without_tokens_and_a_mark_come_back_too():
    tick, mark = inputs.Tick(2.0), StateMark(5, 6, b"d" * 16)

    assert input_of(record_of(tick)) == tick
    assert mark_in(record_of_mark(mark, 2.0)) == mark


@pytest.mark.parametrize(
    ("family", "budget"),
    [(family, one.name) for family, spec in SPECS.items() for one in budgets(spec)],
)
def test_marks_differ_when_pages_of_any_component_do(family, budget):
    one, other = (worked(family, seed=1, steps=30).node for _ in range(2))
    assert mark_of(one) == mark_of(other)

    keeper = other.leases.components.named(budget)
    (other.leases.pool if keeper is None else keeper.pool).take_pages(1)

    assert mark_of(one) != mark_of(other)


ABORT = PEER_MESSAGES.encode(peer.Abort("a" * 32, "b" * 32, 4, 5, "cancelled"))


@pytest.mark.parametrize(
    "record",
    [
        InputRecord(1.0, b""),
        InputRecord(1.0, b"\xc1"),
        InputRecord(1.0, b"\x82\xa4type\xa7Nothing\xa4at_s\xcb" + bytes(8)),
        InputRecord(1.0, record_of(inputs.Tick(1.0)).message, b"tokens"),
        InputRecord(1.0, bytes(7), kind=CLIENT_FRAME),
        InputRecord(1.0, bytes(8) + b"\x92\xa7nothing\1", kind=CLIENT_FRAME),
        InputRecord(1.0, b"\5", kind=PEER_FRAME),
        InputRecord(1.0, b"\1\1\xff\xff" + ABORT, kind=PEER_FRAME),
        InputRecord(1.0, b"\1\1ab\xc1", kind=PEER_FRAME),
        InputRecord(1.0, b"\1\1ab" + ABORT, b"tokens", PEER_FRAME),
    ],
)
def test_a_record_that_is_no_input_is_said_to_be_none(record):
    with pytest.raises(Unknown):
        input_of(record)
