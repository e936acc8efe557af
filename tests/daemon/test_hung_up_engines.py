"""Engines that live keep what they may write, whatever becomes of their connections."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import zmq

import kvd.client
from kvd.client.blocking import attach
from kvd.errors import Code, KvdError
from kvd.sockets import BACKLOG_MESSAGES, open_dealer
from kvd.types import page_ids
from kvd.wire import admin, client
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from tests.daemon.conftest import until
from tests.daemon.intruder import RawSession, Wire
from tests.daemon.kv import tokens_of

DEAF = """
import sys, zmq
from kvd.client.blocking import attach
from kvd.sockets import open_dealer
from kvd.wire import client
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REQUESTS
from tests.daemon.kv import tokens_of

endpoint, requests = sys.argv[1], int(sys.argv[2])
attachment = attach(endpoint, Attach("deaf"))
socket = open_dealer(zmq.Context(), routing_id=attachment.attached.token)
socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(endpoint)
tokens = tokens_of(100, seed=1).tobytes()
socket.send_multipart([CLIENT_REQUESTS.encode(client.OpenLease(1)), tokens])
for call in range(2, requests):
    socket.send(CLIENT_REQUESTS.encode(client.GetSnapshot(call)))
print("deaf", flush=True)
sys.stdin.read()
"""
"""Holds a lease, asks and reads no answer."""

FOLLOWER = """
import sys, zmq
from kvd.client.blocking import attach
from kvd.sockets import open_dealer
from kvd.wire import client
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from tests.daemon.kv import tokens_of

endpoint, sends = sys.argv[1], int(sys.argv[2])
attachment = attach(endpoint, Attach("follower"))
socket = open_dealer(zmq.Context(), routing_id=attachment.attached.token)
socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(endpoint)
tokens = tokens_of(100, seed=2).tobytes()
socket.send_multipart([CLIENT_REQUESTS.encode(client.OpenLease(1)), tokens])
lease = CLIENT_REPLIES.decode(socket.recv()).lease
for call in range(2, 2 + sends):
    request = client.SendRequest(call, 70_000 + call, lease, "", 4.0)
    socket.send_multipart([CLIENT_REQUESTS.encode(request), tokens])
    assert isinstance(CLIENT_REPLIES.decode(socket.recv()), client.Sending)
socket.send(CLIENT_REQUESTS.encode(client.Subscribe(1_000)))
BEFORE
print("blocked", flush=True)
sys.stdin.read()
"""
"""Follows events and then reads nothing; the end of each of its sends is a push to it."""


@pytest.fixture
def engine(engines):
    """Starts an engine of its own process; its first line is read."""
    started = []

    def start(source, *arguments):
        command = [sys.executable, "-c", source, engines.pair.decode.client, *map(str, arguments)]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(one)
        assert one.stdout.readline()
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdin.close()
        one.stdout.close()


def client_of(daemon, name):
    return next((one for one in daemon.snapshot().clients if one.name == name), None)


async def test_a_deaf_engine_that_lives_keeps_its_pages_and_gives_them_back_when_it_dies(
    engines, engine
):
    daemon = engines.pair.decode
    child = engine(DEAF, 2 * BACKLOG_MESSAGES)
    until(lambda: client_of(daemon, "deaf").state == "hung-up-on")
    [kept] = daemon.snapshot().leases
    free = daemon.snapshot().pools[0].free_pages

    with pytest.raises(KvdError) as refused:
        await engines.d.lease(tokens_of(16 * (free + 1), seed=9), deadline_s=0)
    every = await engines.d.lease(tokens_of(16 * free, seed=9), cache=False)

    assert refused.value.code == "deadline"
    assert "hung up on for" in str(refused.value)
    assert (kept.owner, kept.held_pages) == ("deaf", 7)
    assert f"pid {child.pid} to end" in kept.waiting_for
    assert f"{BACKLOG_MESSAGES} messages of the daemon unread" in kept.waiting_for
    why = daemon.ask(admin.Why(1, "lease", kept.id), admin.Because)
    assert any(f"waits for pid {child.pid} to end" in fact for fact in why.facts)
    child.kill()
    killed_s = time.monotonic()
    until(lambda: client_of(daemon, "deaf") is None)
    assert time.monotonic() - killed_s < 1
    assert [one.owner for one in daemon.snapshot().leases] == ["decode-engine"]
    await every.release()


async def test_an_engine_that_follows_events_and_makes_no_call_keeps_its_pages(engines, engine):
    daemon = engines.pair.decode
    child = engine(FOLLOWER.replace("BEFORE", ""), 8)
    [kept] = [one for one in daemon.snapshot().leases if one.owner == "follower"]
    tokens = tokens_of(64, seed=5)
    # Each step is a push, and they are more than the pipe of answers takes.
    for _ in range(3 * BACKLOG_MESSAGES // 4):
        lease = await engines.d.lease(tokens)
        await lease.release()

    until(lambda: not daemon.snapshot().rooms)  # the pushes that may not be lost
    free = daemon.snapshot().pools[0].free_pages
    every = await engines.d.lease(tokens_of(16 * free, seed=9), cache=False)

    [still] = [one for one in daemon.snapshot().leases if one.owner == "follower"]
    assert (still.id, still.held_pages) == (kept.id, kept.held_pages)
    child.kill()
    killed_s = time.monotonic()
    until(lambda: client_of(daemon, "follower") is None)
    assert time.monotonic() - killed_s < 1
    await every.release()


def test_a_session_that_is_hung_up_on_is_answered_nothing_more_and_leaves_by_its_own_word(engines):
    daemon = engines.pair.decode
    attachment = attach(daemon.client, Attach("chatty"))
    context = zmq.Context()
    socket = open_dealer(context, routing_id=attachment.attached.token)
    socket.setsockopt(zmq.RCVTIMEO, 5_000)
    socket.connect(daemon.client)
    opening = CLIENT_REQUESTS.encode(client.OpenLease(1))
    socket.send_multipart([opening, tokens_of(100, seed=1).tobytes()])
    leased = CLIENT_REPLIES.decode(socket.recv())

    attachment._sock.send(b"what the attach socket does not take")
    until(lambda: client_of(daemon, "chatty").state == "hung-up-on")
    socket.send(CLIENT_REQUESTS.encode(client.ReleaseLease(2, leased.lease)))
    refused = CLIENT_REPLIES.decode(socket.recv())

    assert refused.refusal.code is Code.UNKNOWN_SESSION
    assert [one.id for one in daemon.snapshot().leases] == [leased.lease]
    assert len(page_ids(leased.pages)) == 7
    assert attachment.last_word().code is Code.WRONG_STATE
    socket.close(linger=0)
    context.term()
    attachment.close()
    until(lambda: daemon.snapshot().leases == ())


def test_an_engine_that_closes_its_attach_socket_only_keeps_what_it_holds(engines, engine):
    daemon = engines.pair.decode
    source = FOLLOWER.replace("BEFORE", "attachment._sock.close()")
    child = engine(source, 0)

    until(lambda: client_of(daemon, "follower").state == "hung-up-on")

    [kept] = daemon.snapshot().leases
    assert "closed its attach socket without a word" in kept.waiting_for
    child.kill()
    until(lambda: daemon.snapshot().leases == ())


def test_a_session_whose_client_socket_alone_is_closed_keeps_its_lease(engines):
    daemon = engines.pair.decode
    session = RawSession(daemon)
    leased = session.request(client.OpenLease(1), tokens_of(40, seed=1).tobytes())

    Wire.close(session)
    asked = RawSession(daemon)  # served after the daemon has seen the end of the other
    asked.request(client.GetSnapshot(1))

    assert [one.id for one in daemon.snapshot().leases] == [leased.lease]
    session.attachment.close()
    asked.close()
    until(lambda: daemon.snapshot().leases == ())


async def test_an_engine_that_was_hung_up_on_is_told_what_to_do_and_can_connect_anew(engines):
    daemon = engines.pair.decode
    node = await kvd.client.connect(daemon.client, name="hung-up")
    lease = await node.lease(tokens_of(100, seed=1))
    await lease.commit()

    node._attachment._sock.send(b"what the attach socket does not take")
    until(lambda: client_of(daemon, "hung-up").state == "hung-up-on")
    with pytest.raises(KvdError) as told:
        await node.match([1])

    assert (told.value.code, told.value.retryable) == ("wrong-state", False)
    assert [one.id for one in daemon.snapshot().leases] == [lease.id]
    async with kvd.client.connect(daemon.client, name="anew") as anew:
        assert (await anew.match(tokens_of(100, seed=1))).tokens == 96
        await node.close()
        until(lambda: daemon.snapshot().leases == ())
