"""What no client of libzmq says, on every socket: the daemon lives, serves, and keeps little."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kvd.client import connect_sync
from kvd.wire import admin, client
from kvd.wire.codec import (
    ADMIN_REPLIES,
    ADMIN_REQUESTS,
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
    PEER_MESSAGES,
)
from kvd.wire.peer import Hello, Ping, Reject
from kvd.zmtp import frames
from kvd.zmtp.frames import COMMAND, LONG, MORE
from tests.security.callers import Caller, info
from tests.security.conftest import SHAPE
from tests.security.speaker import GREETING, Speaker, by_key, nobody
from tests.security.test_limits import NOISE_BYTES, peak_bytes
from tests.support.daemons import Daemon

ANONYMOUS = {
    "client": 0x6B8B4567,
    "admin": 0xE43C9869,
    "peers": 0xF4B0DC51,
    "peers with keys": 0x2AE8944A,
}
"""With these a ROUTER of libzmq would begin to number clients without a name, in every process."""
CLAIMED = 64
LOOKS = {
    "client": CLIENT_REQUESTS.encode(client.GetSnapshot(1)),
    "admin": ADMIN_REQUESTS.encode(admin.ShowStatus(1)),
    "peers": PEER_MESSAGES.encode(Ping("0" * 32, "", 1, 0, 0, 0)),
}
ANSWERS = {
    "client": (CLIENT_REPLIES, client.Failed),
    "admin": (ADMIN_REPLIES, admin.Status),
    "peers": (PEER_MESSAGES, Hello | Reject),
}
LONGEST = 16 << 20
HEARTBEAT_S = 1.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A daemon that listens for peers on loopback, without keys."""
    daemon = Daemon("bare", tmp_path_factory.mktemp("bare"), SHAPE)
    daemon.start()
    daemon.wait_ready()
    yield daemon
    daemon.stop()


def endpoint(daemon, which):
    return {"client": daemon.client, "admin": daemon.admin, "peers": daemon.peers}[which]


def serves(daemon, which, mechanism):
    """Whether it answers a new connection."""
    with Speaker(endpoint(daemon, which), mechanism) as one:
        codec, kind = ANSWERS[which]
        return isinstance(codec.decode(one.asks(LOOKS[which])), kind)


def predicted(which):
    """The routing ids that libzmq would give to the next clients without a name."""
    base = ANONYMOUS[which]
    return [b"\0" + ((base + n) % 2**32).to_bytes(4, "big") for n in range(CLAIMED)]


@pytest.mark.parametrize("which", ["client", "admin", "peers"])
def test_no_routing_id_ends_the_daemon(bare, which):
    """Also those with a zero first, which a ROUTER of libzmq counts with itself."""
    strange = [b"\0", b"\0" * 255, bytes(5), *predicted(which)]
    with contextlib.ExitStack() as own:
        for routing_id in strange:
            one = own.enter_context(Speaker(endpoint(bare, which), nobody(routing_id)))
            assert one.is_in
        assert all(serves(bare, which, nobody()) for _ in range(4))
    assert bare.is_running


def test_no_routing_id_of_a_listed_key_ends_the_daemon(keyed):
    daemon = keyed.pair.prefill
    with contextlib.ExitStack() as own:
        for routing_id in predicted("peers with keys"):
            mechanism = by_key(keyed.mallory, keyed.server, routing_id)
            own.enter_context(Speaker(daemon.peers, mechanism))
        for _ in range(4):
            with Caller(daemon, keyed.mallory, keyed.server) as mallory:
                mallory.tell(mallory.hello("mallory"))
                assert mallory.hears(Hello).node == "p"
    assert daemon.is_running


@pytest.mark.parametrize("which", ["client", "admin", "peers"])
@pytest.mark.parametrize("size", [0, 1000, 1 << 20])
def test_a_message_without_an_end_is_hung_up_on(bare, which, size):
    frame = frames.header(size, MORE) + bytes(size)
    before = peak_bytes(bare)
    with Speaker(endpoint(bare, which), nobody()) as one:
        one.pours(frame, 2000 if size < 1 << 20 else 200)
        assert one.is_hung_up_on()
    assert peak_bytes(bare) < before + 3 * NOISE_BYTES
    assert serves(bare, which, nobody())


def test_a_message_without_an_end_of_a_listed_key_is_hung_up_on(keyed):
    with Speaker(keyed.pair.prefill.peers, by_key(keyed.mallory, keyed.server)) as one:
        for _ in range(2000):
            said = []
            one.machine._mechanism.wrap(said, b"", MORE)
            if not one.pours(b"".join(said), 1):
                break
        assert one.is_hung_up_on()
    assert keyed.pair.prefill.is_running


MIB = 2**20


def test_no_listed_key_ends_the_message_of_another(keyed):
    """One on 44 connections, and a message of four MiB that comes in two halves beside them."""
    daemon = keyed.pair.prefill
    before = peak_bytes(daemon)
    with contextlib.ExitStack() as own:
        eve = own.enter_context(Speaker(daemon.peers, by_key(keyed.eve, keyed.server)))
        said = []
        eve.machine._mechanism.wrap(said, bytes(4 * MIB), 0)
        whole = b"".join(said)
        eve.sock.sendall(whole[: 2 * MIB])
        for _ in range(44):
            one = own.enter_context(Speaker(daemon.peers, by_key(keyed.mallory, keyed.server)))
            one.pours(frames.header(MIB, 0) + bytes(MIB - 1), 1)
        eve.sock.sendall(whole[2 * MIB :])
        assert isinstance(PEER_MESSAGES.decode(eve.hears()), Reject)
    assert peak_bytes(daemon) < before + (32 + 40) * MIB


def test_strangers_at_the_client_socket_end_no_call_of_an_engine(bare):
    """Fifty of them keep as much as they can, while an engine says how its prompt goes."""
    with contextlib.ExitStack() as own:
        node = own.enter_context(connect_sync(bare.client, name="honest"))
        for _ in range(50):
            one = own.enter_context(Speaker(endpoint(bare, "client"), nobody()))
            one.pours(frames.header(MIB, 0) + bytes(MIB - 1), 1)
        for length in (10, 100_000, 1_000_000):
            assert node.match(np.arange(length, dtype=np.int32)).tokens == 0


@pytest.mark.parametrize("which", ["client", "admin", "peers"])
def test_half_messages_of_many_connections_have_one_budget(bare, which):
    """Twelve times the longest message, each all but its last byte."""
    before = peak_bytes(bare)
    head = frames.header(LONGEST, 0)
    with contextlib.ExitStack() as own:
        many = [own.enter_context(Speaker(endpoint(bare, which), nobody())) for _ in range(12)]
        for one in many:
            one.pours(head + bytes(LONGEST - 1), 1)
        assert serves(bare, which, nobody())
    assert peak_bytes(bare) < before + (64 + 40) * 2**20


@pytest.mark.parametrize("length", [COMMAND | LONG, LONG])
def test_nothing_long_is_kept_before_a_handshake_is_over(keyed, length):
    """With keys and without one: sixty times 16 MiB would be a gigabyte."""
    daemon = keyed.pair.prefill
    before = peak_bytes(daemon)
    said = bytes((length,)) + LONGEST.to_bytes(8, "big") + bytes(1 << 20)
    greeting = frames.greeting(b"CURVE", as_server=False)
    with contextlib.ExitStack() as own:
        many = [own.enter_context(Speaker(daemon.peers)) for _ in range(60)]
        for one in many:
            one.pours(greeting + said, 1)
        assert all(one.is_hung_up_on() for one in many)
    assert peak_bytes(daemon) < before + NOISE_BYTES
    with Speaker(daemon.peers) as other:  # in clear
        other.pours(GREETING + said, 1)
        assert other.is_hung_up_on()


def test_a_thousand_silent_connections_keep_nobody_out(keyed):
    daemon = keyed.pair.prefill
    with contextlib.ExitStack() as own:
        for _ in range(1000):
            own.enter_context(Speaker(daemon.peers))
        with Caller(daemon, keyed.mallory, keyed.server) as mallory:
            mallory.tell(mallory.hello("mallory"))
            assert mallory.hears(Hello).node == "p"


def test_a_listed_key_hears_nothing_that_is_for_another_key(keyed):
    """The routing id of a link whose connection is gone is worth nothing."""
    daemon = keyed.pair.prefill
    about = info(daemon)
    with Caller(daemon, keyed.mallory, keyed.server) as known:
        hello = known.hello("mallory")
        with Speaker(daemon.peers, by_key(keyed.mallory, keyed.server, b"link")) as mallory:
            mallory.say(PEER_MESSAGES.encode(hello))
            while not isinstance(PEER_MESSAGES.decode(mallory.hears()), Ping):
                pass
    with Speaker(daemon.peers, by_key(keyed.eve, keyed.server, b"link")) as eve:
        assert eve.is_in
        assert eve.hears(within_s=3 * HEARTBEAT_S) is None
        eve.say(LOOKS["peers"])
        assert PEER_MESSAGES.decode(eve.hears()).source == about["incarnation"]
