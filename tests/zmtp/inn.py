"""A listener on a real socket, and those who connect to it."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from typing import TYPE_CHECKING, ClassVar

import uvloop
import zmq

from kvd.sockets import open_dealer
from kvd.zmtp import frames
from kvd.zmtp.bounds import BOUNDS
from kvd.zmtp.listener import BACKLOG, Listener, ListenerOwner
from kvd.zmtp.mechanism import own_properties
from kvd.zmtp.turns import WriteBatch

if TYPE_CHECKING:
    from kvd.zmtp.events import ConnectionClosed

WITHIN_S = 10.0
GREETING = frames.greeting(b"NULL", as_server=False)


def ready(routing_id=b""):
    """All that a client without keys has to say before its first message."""
    return GREETING + frames.command(b"READY", own_properties(b"DEALER", routing_id))


class Guests(ListenerOwner):
    """Who came, what they said, and why they went."""

    def __init__(self):
        self.came = 0
        self.here = []
        self.got = []
        self.went = []
        self.turned_away = []
        self.lets_in = True
        self.answer = lambda connection, message: None

    def welcome(self, connection):
        if self.lets_in:
            self.came += 1
            self.here.append(connection)
        return self.lets_in

    def take(self, connection, frames):
        self.got.append(frames)
        self.answer(connection, frames)

    def gone(self, connection, closed: ConnectionClosed):
        self.here.remove(connection)
        self.went.append(closed.fault)

    def failed(self, connection, closed: ConnectionClosed):
        self.turned_away.append(closed.fault)


class Raw:
    """A connection that says any bytes."""

    def __init__(self, address):
        if isinstance(address, str):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(address)
        else:
            self.sock = socket.create_connection(address)
        self.sock.setblocking(False)

    async def say(self, data):
        await asyncio.get_running_loop().sock_sendall(self.sock, data)
        return self

    async def hears(self, size=65536):
        return await asyncio.wait_for(
            asyncio.get_running_loop().sock_recv(self.sock, size), WITHIN_S
        )

    async def is_hung_up_on(self):
        """Wait for the end; whatever is said before is dropped."""
        try:
            while await self.hears():
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self):
        self.sock.close()


class Inn:
    """A listener, its host, and everything that a test opened."""

    open: ClassVar[list[Inn]] = []
    """To be closed when the test ends, however it ends."""

    def __init__(self, bounds=BOUNDS, ring=None, path=None, *, host="127.0.0.1", port=0):
        self.open.append(self)
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        sock.bind(path or (host, port))
        sock.listen(BACKLOG)
        self.address = sock.getsockname()
        self.endpoint = f"ipc://{path}" if path else f"tcp://{host}:{self.address[1]}"
        self.host = Guests()
        self.batch = WriteBatch(loop)
        self.listener = Listener(sock, self.host, self.batch, ring=ring, bounds=bounds)
        self.context = zmq.Context()
        self.opened = []

    def dealer(self, routing_id=None, prepare=None):
        """A socket of libzmq."""
        dealer = open_dealer(self.context, routing_id=routing_id, max_frame_bytes=64 << 20)
        if prepare is not None:
            prepare(dealer)
        dealer.connect(self.endpoint)
        self.opened.append(dealer)
        return dealer

    def raw(self):
        one = Raw(self.address)
        self.opened.append(one)
        return one

    async def guest(self, routing_id=b""):
        """A raw one that is let in."""
        one = self.raw()
        before = self.host.came
        await one.say(ready(routing_id))
        await until(lambda: self.host.came > before)
        return one

    async def close(self):
        for one in self.opened:
            one.close()  # dealers do not linger
        await self.listener.close()
        self.context.term()


async def until(condition):
    """Let the loop run until it holds."""
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        await asyncio.sleep(0.001)


async def in_thread(work, *args):
    """Libzmq's own calls, which block."""
    return await asyncio.wait_for(asyncio.to_thread(work, *args), 3 * WITHIN_S)


def on_uvloop(test):
    """Run it on the loop that the daemon has; every inn is closed when it ends."""

    async def run(*args, **kwargs):
        try:
            await test(*args, **kwargs)
        finally:
            while Inn.open:
                await Inn.open.pop().close()

    @functools.wraps(test)
    def run_now(*args, **kwargs):
        uvloop.run(run(*args, **kwargs))

    return run_now
