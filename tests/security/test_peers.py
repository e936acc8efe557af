"""The port for peers, with keys: who gets in, as whom, and what everybody else gets."""

from __future__ import annotations

import contextlib
import itertools
import socket
import urllib.request

import pytest

import kvd.client
from kvd import curve
from kvd.client.admin import AdminClient
from kvd.core.inputs import FromPeer
from kvd.core.layout.spec import fingerprint
from kvd.errors import Code
from kvd.wire import admin, events, peer
from kvd.wire.peer import Hello
from tests.core.side import incarnation
from tests.core.world import World
from tests.daemon.conftest import until
from tests.security.callers import Caller, event, info
from tests.security.conftest import SHAPE, public_of
from tests.support.daemons import Daemon, two_daemons

PROMPT = list(range(1000, 1100))
MANY = 200


async def hand_over(pair, room):
    """A whole handoff from p to d: the bytes of the pages arrive."""
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill") as p,
        kvd.client.connect(pair.decode.client, name="decode") as d,
    ):
        lease = await p.lease(PROMPT, cache=False)
        k, _ = p.pool("main").layer(0)
        for page in lease.pages:
            k[int(page)] = room
        receiving = await d.receive(room, PROMPT, source="p", cache=False)
        sending = await p.send(room, PROMPT, lease=lease)
        outcome = await sending.finish(aux=b"first")
        await receiving.done()
        there, _ = d.pool("main").layer(0)
        arrived = {float(there[int(page), 0, 0, 0]) for page in receiving.lease.pages[:7]}
        await receiving.lease.release(())
        await lease.release(())
        return outcome.committed, receiving.aux, arrived


async def test_daemons_with_each_others_keys_hand_over(keyed):
    assert await hand_over(keyed.pair, 5) == (True, b"first", {5.0})


def test_a_listed_key_is_answered_under_its_own_name(keyed):
    with Caller(keyed.pair.prefill, keyed.mallory, keyed.server) as mallory:
        mallory.tell(mallory.hello("mallory"))
        assert mallory.hears(peer.Hello).node == "p"


def test_a_listed_key_is_given_what_it_takes_to_write(keyed):
    """Not a promise: why a key is given to those only who are trusted with the pool."""
    with Caller(keyed.pair.prefill, keyed.mallory, keyed.server) as mallory:
        mallory.tell(mallory.hello("mallory"))
        assert len(mallory.hears(peer.Hello).metadata) > 100


def test_without_keys_anyone_may_be_any_node():
    """Not a promise: what insecure = true means."""
    world = World()
    newer = Hello(
        incarnation("d", 9),
        "",
        "d",
        fingerprint(world.p.config.spec),
        1,
        b"meta",
        1_048_576,
        65_536,
    )
    world.p.node.step(FromPeer(world.now_s, "in:anyone", newer))
    assert world.p.node.peers.by_name["d"].incarnation == newer.source


def test_a_listed_key_cannot_say_hello_as_another_node(keyed):
    daemon = keyed.pair.prefill
    with Caller(daemon, keyed.mallory, keyed.server) as mallory:
        mallory.tell(mallory.hello("d", "f" * 32))
        refusal = mallory.hears(peer.Reject).refusal

    assert (refusal.code, refusal.side) == (Code.PEER_UNKNOWN, "p")
    assert refusal.message.startswith("the key of 'mallory' speaks as 'd'")
    (known,) = [one for one in daemon.snapshot().peers if one.name == "d"]
    assert (known.state, known.incarnation) == ("up", info(keyed.pair.decode)["incarnation"])


def test_a_listed_key_cannot_speak_for_the_process_of_another_node(keyed):
    daemon, source = keyed.pair.prefill, info(keyed.pair.decode)["incarnation"]
    with Caller(daemon, keyed.mallory, keyed.server) as mallory:
        mallory.tell(peer.Settled(source, mallory.target, 1, peer.ReceiveOutcome.ABORTED))
        refusal = mallory.hears(peer.Reject).refusal

    assert refusal.code is Code.PEER_UNKNOWN
    assert refusal.message.startswith("the key of 'mallory' speaks as 'd'")


def test_a_key_that_is_not_listed_gets_no_answer_and_is_told_to_the_operator(keyed):
    daemon = keyed.pair.prefill
    with Caller(daemon, curve.new_pair(), keyed.server) as stranger:
        stranger.tell(stranger.hello("stranger"))
        seen = event(daemon, events.PeerHandshakeFailed, reason="unknown-key")
        assert stranger.hears_nothing()

    assert (seen.peer, seen.address) == ("", "127.0.0.1")
    assert "stranger" not in {one.name for one in daemon.snapshot().peers}


def test_a_client_without_a_key_gets_no_answer(keyed):
    daemon = keyed.pair.prefill
    refused = daemon.snapshot().totals.messages_refused
    with Caller(daemon) as stranger:
        stranger.tell(stranger.hello("stranger"))
        assert stranger.handshake().startswith("FAILED")
        assert stranger.hears_nothing()
        event(daemon, events.PeerHandshakeFailed, reason="no-curve")
    assert daemon.snapshot().totals.messages_refused == refused, "nothing of it was read"


def test_a_client_that_takes_this_node_for_another_gets_no_answer(keyed):
    daemon = keyed.pair.prefill
    with Caller(daemon, keyed.mallory, curve.new_pair().public) as mallory:
        mallory.tell(mallory.hello("mallory"))
        assert mallory.handshake() == "FAILED_NO_DETAIL"
        assert mallory.hears_nothing()
        event(daemon, events.PeerHandshakeFailed, reason="wrong-server-key")


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"\xff" * 64])
def test_bytes_that_are_no_zmtp_are_hung_up_on(keyed, text):
    host, port = keyed.pair.prefill.peers.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(text)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := raw.recv(4096):
                answer += chunk
    assert len(answer) <= 64, "the greeting of ZMTP at most"
    assert keyed.pair.prefill.is_running


def test_failed_handshakes_are_counted_by_reason_and_told_seldom(keyed):
    daemon = keyed.pair.prefill
    for _ in range(MANY):
        if without_curve(daemon) >= 20:
            break
        with Caller(daemon) as stranger:  # which may hang up before the daemon has said no
            assert stranger.handshake().startswith("FAILED")
    assert without_curve(daemon) >= 20

    with AdminClient(daemon.admin) as client:
        told = client.request(admin.ListEvents(1, 0), timeout_s=5)
    seen = [one for one in told.events if type(one) is events.PeerHandshakeFailed]
    seen = [one for one in seen if one.reason == "no-curve" and not one.peer]
    apart_s = [later.at_s - one.at_s for one, later in itertools.pairwise(seen)]
    assert all(seconds >= 10 for seconds in apart_s)

    assert without_curve(daemon) >= sum(one.times for one in seen)


def without_curve(daemon):
    """How many handshakes without a key the daemon has counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    found = [one for one in lines if 'handshakes_failed_total{reason="no-curve"}' in one]
    return sum(float(line.split()[-1]) for line in found)


def test_who_is_not_let_in_yet_is_let_in_once_its_key_is_listed(tmp_path):
    """A dialing side must not give up: it is the other side that is restarted with the new key."""
    late = curve.new_pair()
    daemon = Daemon("p", tmp_path, SHAPE)
    server = daemon.make_keys()
    try:
        daemon.start()
        daemon.wait_ready()
        with Caller(daemon, late, server) as caller:
            caller.tell(caller.hello("late"))
            event(daemon, events.PeerHandshakeFailed, reason="unknown-key")
            daemon.stop()
            daemon.trusts("late", late.public)
            daemon.start()
            daemon.wait_ready()
            assert caller.hears(peer.Hello).node == "p"
    finally:
        daemon.stop()


def test_a_daemon_that_answers_with_another_key_is_not_talked_to(keyed):
    seen = event(keyed.pair.decode, events.PeerHandshakeFailed, peer="changed")

    assert (seen.address, seen.reason) == (keyed.changed, "refused")
    assert f"the key {public_of(keyed.pair.decode.directory)} of this node must be in" in seen.why
    assert "its own must be that of peers.keys.changed here" in seen.why


def test_a_daemon_that_answers_without_a_key_is_not_talked_to(keyed):
    seen = event(keyed.pair.decode, events.PeerHandshakeFailed, peer="bare", reason="no-curve")

    assert seen.address == keyed.bare
    assert seen.why == f"bare at {keyed.bare} has no key: set peers.secret_key_file there"


def test_a_daemon_that_answers_without_a_key_is_dialed_again(keyed):
    """libzmq would give it up for ever, and a key that it is given later would not help."""
    daemon = keyed.pair.decode
    event(daemon, events.PeerHandshakeFailed, peer="bare", reason="no-curve")
    before = without_curve(daemon)
    until(lambda: without_curve(daemon) > before)


@pytest.mark.slow
async def test_new_keys_come_with_a_restart_and_either_side_may_be_first(tmp_path):
    with two_daemons(tmp_path, SHAPE, with_keys=True) as pair:
        p, d = pair.prefill, pair.decode
        d.stop()
        p.trusts("d", d.make_keys())
        d.start()
        seen = event(p, events.PeerHandshakeFailed, reason="unknown-key")
        assert seen.address == "127.0.0.1"
        d.wait_ready()
        refused = event(d, events.PeerHandshakeFailed, peer="p")
        assert public_of(d.directory) in refused.why

        p.stop()  # d has dialed in vain for a while, and must not have given up
        p.start()
        p.wait_ready()

        event(d, events.PeerUp, peer="p")
        d.wait_for(lambda: d.snapshot().peers[0].agent == "loaded", "has no agent", 10)
        p.wait_for(lambda: p.snapshot().peers[0].agent == "loaded", "has no agent", 10)
        assert await hand_over(pair, 9) == (True, b"first", {9.0})
