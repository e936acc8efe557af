"""A session that does not read: it costs itself, and keeps what it may write while it lives."""

from __future__ import annotations

import zmq

from kvd.client.blocking import attach
from kvd.errors import Code
from kvd.sockets import BACKLOG_MESSAGES, open_dealer
from kvd.wire import client
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from tests.daemon.conftest import until
from tests.daemon.intruder import RawSession
from tests.daemon.kv import tokens_of
from tests.support.replies import each

REQUESTS = 2 * BACKLOG_MESSAGES
"""More answers than its own queue, the kernel and the daemon's queue take together."""


def test_session_that_reads_no_answer_is_hung_up_on_and_gives_its_lease_back_when_it_leaves(
    engines,
):
    daemon = engines.pair.decode
    attachment = attach(daemon.client, Attach("deaf"))
    context = zmq.Context()
    socket = open_dealer(context, routing_id=attachment.attached.token)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.SNDTIMEO, 5_000)
    socket.connect(daemon.client)
    tokens = tokens_of(100, seed=1).tobytes()

    socket.send_multipart([CLIENT_REQUESTS.encode(client.OpenLease(1)), tokens])
    for call in range(2, REQUESTS):
        socket.send(CLIENT_REQUESTS.encode(client.GetSnapshot(call)))
    until(lambda: "hung-up-on" in [one.state for one in daemon.snapshot().clients])

    assert [one.owner for one in daemon.snapshot().leases] == ["deaf"]
    why = attachment.last_word()
    assert why is not None
    assert why.code is Code.CLIENT_GONE
    assert f"{BACKLOG_MESSAGES} messages of the daemon unread" in why.message
    socket.close(linger=0)
    context.term()
    attachment.close()
    until(lambda: daemon.snapshot().leases == ())


def test_session_that_unsubscribed_is_told_no_more(engines):
    session = RawSession(engines.pair.decode)
    tokens = tokens_of(20, seed=2).tobytes()
    session.request(client.Subscribe(1))
    session.say(CLIENT_REQUESTS.encode(client.OpenLease(2)), tokens)
    told = []
    while not {client.Leased, client.Events} <= {type(one) for one in told}:
        told.append(session.hear())
    [leased] = [one for one in told if isinstance(one, client.Leased)]

    session.say(CLIENT_REQUESTS.encode(client.Unsubscribe(3)))
    while isinstance(done := session.hear(), client.Events):
        pass  # pushed before the daemon read it
    heard = [
        done,
        session.request(client.ReleaseLease(4, leased.lease)),
        session.request(client.GetSnapshot(5)),
    ]

    assert [type(one) for one in heard] == [client.Done, client.Done, client.Snapshotted]
    session.close()


def test_session_that_follows_events_and_reads_none_keeps_its_lease_and_its_answers(engines):
    """Events give way to answers: those that find no place are counted, and cost no session."""
    daemon = engines.pair.decode
    attachment = attach(daemon.client, Attach("follower"))
    context = zmq.Context()
    socket = open_dealer(context, routing_id=attachment.attached.token)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(daemon.client)
    tokens = tokens_of(100, seed=3).tobytes()
    socket.send(CLIENT_REQUESTS.encode(client.Subscribe(1)))
    socket.send_multipart([CLIENT_REQUESTS.encode(client.OpenLease(2)), tokens])
    until(lambda: [one.owner for one in daemon.snapshot().leases] == ["follower"])

    other = RawSession(daemon)
    for call in range(1, 3_000):
        leased = other.request(client.OpenLease(call), tokens)
        other.request(client.ReleaseLease(call, leased.lease))
    other.close()
    for call in range(10, 210):
        socket.send(CLIENT_REQUESTS.encode(client.GetSnapshot(call)))

    lost, answered = 0, set()
    while len(answered) < 200:
        assert socket.poll(5_000), "every answer comes"
        for message in each(CLIENT_REPLIES.decode(socket.recv())):
            if isinstance(message, client.Events):
                lost += message.lost
            elif isinstance(message, client.Snapshotted):
                answered.add(message.call)
    assert [one.owner for one in daemon.snapshot().leases] == ["follower"]
    other = RawSession(daemon)
    other.request(client.OpenLease(1), tokens)
    while not lost:
        assert socket.poll(5_000), "it is told how many it lost"
        message = CLIENT_REPLIES.decode(socket.recv())
        lost += message.lost if isinstance(message, client.Events) else 0
    other.close()
    socket.close(linger=0)
    context.term()
    attachment.close()
