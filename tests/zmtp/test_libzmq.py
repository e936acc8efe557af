"""Beside libzmq: its DEALERs at our listener, our dialer at its ROUTERs, and at our listener."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time

import pytest
import zmq
from msgspec import structs

from kvd import curve
from kvd.cli.doctor.peers import be_client
from kvd.sockets import open_router
from kvd.types import Sent
from kvd.zmtp import frames
from kvd.zmtp.bounds import BOUNDS
from kvd.zmtp.connection import UNHEARD_S
from kvd.zmtp.curve import CurveClient, KeyRing
from kvd.zmtp.dialer import Dialer
from kvd.zmtp.events import ConnectionFault
from kvd.zmtp.mechanism import DEALER, Null
from kvd.zmtp.turns import WriteBatch
from tests.zmtp.inn import WITHIN_S, Inn, in_thread, on_uvloop, until

SEED = 1515
SIZES = [0, 1, 255, 256, 16_383, 16_384, 65_536, 1 << 20]


class Keys:
    """A listening and a dialing pair."""

    def __init__(self):
        self.listening, self.dialing = curve.new_pair(), curve.new_pair()
        name = {curve.raw(self.dialing.public): "d"}
        self.ring = KeyRing(curve.raw(self.listening.secret), name)

    def client(self, dealer):
        be_client(dealer, self.dialing, self.listening.public)

    def mechanism(self):
        return CurveClient(
            KeyRing(curve.raw(self.dialing.secret), {}), curve.raw(self.listening.public)
        )


def echo(connection, message):
    assert connection.send(message) is Sent.TAKEN


def roundtrip(dealer, messages):
    for message in messages:
        dealer.send_multipart(message)
    return [dealer.recv_multipart() for _ in messages]


def some_messages():
    rng = random.Random(SEED)
    bodies = [rng.randbytes(size) for size in SIZES]
    return [[one] for one in bodies] + [[b"", bodies[4], b"x"], [b"a", b"b", b"c", bodies[-1]]]


@pytest.mark.parametrize("where", ["tcp", "ipc"])
@pytest.mark.parametrize("keyed", [False, True], ids=["null", "curve"])
def test_a_dealer_gets_every_message_back(where, keyed, tmp_path):
    @on_uvloop
    async def run():
        keys = Keys()
        path = str(tmp_path / "s") if where == "ipc" else None
        inn = Inn(ring=keys.ring if keyed else None, path=path)
        inn.host.answer = echo
        messages = some_messages()
        dealer = inn.dealer(b"\0one", keys.client if keyed else None)
        assert await in_thread(roundtrip, dealer, messages) == messages
        (connection,) = inn.host.here
        assert (connection.routing_id, connection.name) == (b"\0one", "d" if keyed else "")
        await inn.listener.close(linger_s=1)

    run()


@pytest.mark.parametrize("keyed", [False, True], ids=["null", "curve"])
def test_a_dealer_that_beats_stays(keyed):
    """It would hang up on us after 0.2 s without an answer to one."""

    @on_uvloop
    async def run():
        keys = Keys()
        inn = Inn(ring=keys.ring if keyed else None)

        def prepare(dealer):
            if keyed:
                keys.client(dealer)
            dealer.setsockopt(zmq.HEARTBEAT_IVL, 50)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)

        dealer = inn.dealer(b"one", prepare)
        await until(lambda: inn.host.here)
        connection = inn.host.here[0]
        await asyncio.sleep(0.6)
        dealer.send(b"still here")
        await until(lambda: inn.host.got == [[b"still here"]])
        assert inn.host.here == [connection]

    run()


@on_uvloop
async def test_a_dealer_without_keys_and_one_with_others_are_turned_away():
    keys = Keys()
    inn = Inn(ring=keys.ring)
    stranger, own = curve.new_pair(), keys.listening.public
    for prepare in (
        lambda _: None,
        lambda dealer: be_client(dealer, stranger, own),
        lambda dealer: be_client(dealer, keys.dialing, curve.new_pair().public),
    ):
        dealer = inn.dealer(b"x", prepare)
        dealer.send(b"hello")
    wanted = {
        ConnectionFault.MECHANISM,
        ConnectionFault.UNKNOWN_KEY,
        ConnectionFault.WRONG_SERVER_KEY,
    }
    await until(lambda: wanted <= set(inn.host.turned_away))
    assert inn.host.got == []


@on_uvloop
async def test_a_dealer_comes_back_when_it_was_hung_up_on():
    inn = Inn()
    dealer = inn.dealer(b"one")
    dealer.send(b"first")
    await until(lambda: inn.host.got == [[b"first"]])
    inn.host.here[0].close()
    await until(lambda: inn.host.came == 2)
    dealer.send(b"second")
    await until(lambda: inn.host.got == [[b"first"], [b"second"]])


# ---- our dialer ----------------------------------------------------------------------------------


class Dialed:
    """Our dialer, and what it heard."""

    def __init__(self, port, mechanism, host="127.0.0.1", bounds=BOUNDS):
        self.got, self.failed, self.missed = [], [], []
        self.dialer = Dialer(
            host,
            port,
            mechanism,
            WriteBatch(asyncio.get_running_loop()),
            on_message=self.got.append,
            on_failed=lambda closed: self.failed.append(closed.fault),
            on_unreachable=self.missed.append,
            bounds=bounds,
        )


def dealing():
    return Null(DEALER)


@pytest.mark.parametrize("keyed", [False, True], ids=["null", "curve"])
def test_our_dialer_and_a_router_of_libzmq_exchange_every_message(keyed):
    @on_uvloop
    async def run():
        keys, messages = Keys(), some_messages()
        with zmq.Context() as context, open_router(context) as router:
            if keyed:
                router.setsockopt(zmq.CURVE_SERVER, 1)
                router.setsockopt(zmq.CURVE_SECRETKEY, keys.listening.secret.encode())
            one = Dialed(
                router.bind_to_random_port("tcp://127.0.0.1"), keys.mechanism if keyed else dealing
            )
            for message in messages:  # before there is anybody
                assert one.dialer.send(message) is Sent.TAKEN

            def echo_all():
                for _ in messages:
                    router.send_multipart(router.recv_multipart())

            await in_thread(echo_all)
            await until(lambda: len(one.got) == len(messages))
            assert one.got == messages
            one.dialer.send([b"last word"])
            await one.dialer.close(linger_s=1)
            assert one.dialer.send([b"too late"]) is Sent.GONE
            assert router.poll(5_000)
            assert router.recv_multipart()[1] == b"last word"

    run()


@on_uvloop
async def test_our_dialer_dials_again_when_the_other_side_comes_back():
    with zmq.Context() as context:
        with open_router(context) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            one = Dialed(port, dealing)
            one.dialer.send([b"1"])
            assert (await in_thread(router.recv_multipart))[1:] == [b"1"]
        await until(lambda: one.dialer._connection is None)
        one.dialer.send([b"2"])  # kept until somebody is there
        with open_router(context) as router:
            router.bind(f"tcp://127.0.0.1:{port}")
            assert (await in_thread(router.recv_multipart))[1:] == [b"2"]
        await one.dialer.close()
    assert one.failed == []


@on_uvloop
async def test_our_dialer_keeps_so_much_for_nobody_and_no_more():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        one = Dialed(nobody.getsockname()[1], dealing)
        taken = 0
        while one.dialer.send([b"x"]) is Sent.TAKEN:
            taken += 1
        assert taken == one.dialer.bounds.backlog_messages
        assert one.dialer.send([b"x"]) is Sent.FULL
        await one.dialer.close()


@on_uvloop
async def test_whom_we_dialed_must_end_a_message_in_time_too():
    """Heartbeats between its frames give it no more, and then the address is dialed again."""
    inn = Inn()
    ping = frames.command(b"PING", b"\0\0")
    one = Dialed(inn.address[1], dealing, bounds=structs.replace(BOUNDS, message_s=0.4))
    await until(lambda: inn.host.came == 1)
    began_s = time.monotonic()
    (connection,) = inn.host.here
    connection._put([b"\1\1a"])
    while inn.host.came == 1:
        connection._put([ping])
        await asyncio.sleep(0.02)
        assert time.monotonic() - began_s < WITHIN_S
    connection, *_ = inn.host.here
    connection.send([b"whole"])
    await until(lambda: one.got == [[b"whole"]])
    await one.dialer.close()


class Resolving:
    """What a name is found to be, whatever it is."""

    def __init__(self, dialer, *addresses):
        self._loop, self.addresses = dialer._batch.loop, list(addresses)
        dialer._batch.loop = self

    def __getattr__(self, name):
        return getattr(self._loop, name)

    async def getaddrinfo(self, host, port, **_):
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.addresses
        ]


@on_uvloop
async def test_the_addresses_of_a_name_are_tried_in_turn():
    """At the first is nobody, the second takes connections and says no word, the third is it."""
    inn = Inn(host="127.0.0.3")
    port = inn.address[1]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.2", port))
        deaf.listen()
        one = Dialed(port, dealing, bounds=structs.replace(BOUNDS, handshake_s=0.3))
        Resolving(one.dialer, "127.0.0.1", "127.0.0.2", "127.0.0.3")
        one.dialer.send([b"found"])
        await until(lambda: inn.host.got == [[b"found"]])
        inn.host.here[0].close()
        await until(lambda: inn.host.came == 2)
        await one.dialer.close()
    assert one.failed == [ConnectionFault.TOO_SLOW], "the one that served is the first again"


@on_uvloop
async def test_who_is_turned_away_or_says_nothing_makes_place_for_the_next_address():
    first = Inn(host="127.0.0.1")
    second = Inn(host="127.0.0.2", port=first.address[1])
    one = Dialed(first.address[1], dealing, bounds=structs.replace(BOUNDS, silent_s=0.4))
    Resolving(one.dialer, "127.0.0.1", "127.0.0.2")
    await until(lambda: first.host.came == 1)
    await until(lambda: second.host.came == 1)  # nothing was heard of the first
    second.host.here[0].send([b"not you"])
    await until(lambda: one.got == [[b"not you"]])
    one.dialer.send([b"go"])
    one.dialer.turn_away()
    await until(lambda: second.host.got == [[b"go"]])
    await until(lambda: first.host.came == 2)
    await one.dialer.close()


@on_uvloop
async def test_who_speaks_now_and_then_is_not_silent():
    inn = Inn()
    one = Dialed(inn.address[1], dealing, bounds=structs.replace(BOUNDS, silent_s=0.4))
    await until(lambda: inn.host.came == 1)
    for _ in range(10):
        inn.host.here[0].send([b"here"])
        await asyncio.sleep(0.1)
    assert inn.host.came == 1
    await until(lambda: inn.host.came == 2)
    await one.dialer.close()


@on_uvloop
async def test_our_dialer_tells_why_nobody_is_reached():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        one = Dialed(port, dealing)
        await until(lambda: one.missed)
        assert set(one.missed) == {f"nobody listens at 127.0.0.1 port {port}"}
        await one.dialer.close()
    lost = Dialed(port, dealing, host="kvd-no-such-host.invalid")
    await until(lambda: lost.missed)
    assert "the name kvd-no-such-host.invalid cannot be resolved" in lost.missed[0]
    await lost.dialer.close()


@on_uvloop
async def test_our_dialer_tells_why_a_handshake_failed():
    keys = Keys()
    with zmq.Context() as context, open_router(context) as bare, open_router(context) as other:
        other.setsockopt(zmq.CURVE_SERVER, 1)
        other.setsockopt(zmq.CURVE_SECRETKEY, curve.new_pair().secret.encode())
        to_bare = Dialed(bare.bind_to_random_port("tcp://127.0.0.1"), keys.mechanism)
        to_other = Dialed(other.bind_to_random_port("tcp://127.0.0.1"), keys.mechanism)
        await until(lambda: len(to_bare.failed) >= 2 and len(to_other.failed) >= 2)
        assert set(to_bare.failed) == {ConnectionFault.MECHANISM}
        assert set(to_other.failed) == {ConnectionFault.HUNG_UP}
        await to_bare.dialer.close()
        await to_other.dialer.close()


@on_uvloop
async def test_both_ends_are_given_up_by_the_kernel_when_nothing_is_acknowledged():
    """Else they would be tried ever later, and a link be away for as long again as a cut was."""
    inn = Inn()
    one = Dialed(inn.address[1], dealing)
    await until(lambda: inn.host.here)

    ends = [one.dialer._connection, inn.host.here[0]]
    asked = [
        end._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends if end
    ]

    assert asked == [1000 * UNHEARD_S] * 2
    await one.dialer.close()


@pytest.mark.parametrize("keyed", [False, True], ids=["null", "curve"])
def test_our_dialer_and_our_listener_exchange_every_message(keyed):
    @on_uvloop
    async def run():
        keys, messages = Keys(), some_messages()
        inn = Inn(ring=keys.ring if keyed else None)
        inn.host.answer = echo
        one = Dialed(inn.address[1], keys.mechanism if keyed else dealing, host="localhost")
        for message in messages:
            one.dialer.send(message)
        await until(lambda: len(one.got) == len(messages))
        assert one.got == messages
        await one.dialer.close(linger_s=1)
        await until(lambda: inn.host.went == [ConnectionFault.HUNG_UP])

    run()


@on_uvloop
async def test_closing_ends_a_dialer_in_every_state():
    inn = Inn()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        for port in (inn.address[1], deaf.getsockname()[1]):
            for turns in (0, 1, 3, 10):
                one = Dialed(port, dealing)
                for _ in range(turns):
                    await asyncio.sleep(0.001)
                await asyncio.wait_for(one.dialer.close(linger_s=0.1), WITHIN_S)
                await one.dialer.close()
    assert len(os.listdir("/proc/self/fd")) < 200
