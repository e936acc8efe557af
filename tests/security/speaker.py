"""Whoever speaks ZMTP without libzmq, and so says what libzmq never would."""

from __future__ import annotations

import contextlib
import socket
import time

from kvd import curve
from kvd.zmtp import frames
from kvd.zmtp.curve import CurveClient, KeyRing
from kvd.zmtp.mechanism import DEALER, Null
from kvd.zmtp.protocol import Protocol, ProtocolState

WITHIN_S = 5.0
GREETING = frames.greeting(b"NULL", as_server=False)


def by_key(pair, server, routing_id=b""):
    """The mechanism of a client with this pair of keys."""
    ring = KeyRing(curve.raw(pair.secret), {})
    return CurveClient(ring, curve.raw(server), DEALER, routing_id)


class Speaker:
    """A connection to an endpoint of a daemon; ``mechanism`` None says no word by itself."""

    def __init__(self, endpoint, mechanism=None):
        if endpoint.startswith("ipc://"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(WITHIN_S)
            self.sock.connect(endpoint.removeprefix("ipc://"))
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self.sock = socket.create_connection((host, int(port)), WITHIN_S)
        self.machine = None
        if mechanism is not None:
            self.machine = Protocol(mechanism, 64 << 20)
            self._shake()

    def _shake(self):
        """The handshake, as long as the other side takes part in it."""
        with contextlib.suppress(OSError):
            while self.machine.state is not ProtocolState.TRAFFIC:
                self.sock.sendall(b"".join(self.machine.to_send()))
                if not self._hear():
                    return
                while self.machine.next_event() is not None:
                    if self.machine.state is ProtocolState.OVER:
                        return
                    self.machine.accept()

    def _hear(self):
        data = self.sock.recv(65536)
        self.machine.receive(data)
        return bool(data)

    @property
    def is_in(self):
        return self.machine.state is ProtocolState.TRAFFIC

    def say(self, *message):
        self.sock.sendall(b"".join(self.machine.pack(message)))

    def asks(self, *message):
        """The first frame of what is said next to it."""
        self.say(*message)
        return self.hears()

    def hears(self, within_s=WITHIN_S):
        """The next message, or None for silence."""
        self.sock.settimeout(within_s)
        end_s = time.monotonic() + within_s
        try:
            while time.monotonic() < end_s:
                event = self.machine.next_event()
                if event:
                    return event[0]
                if event is None and not self._hear():
                    return None
        except TimeoutError:
            pass
        return None

    def pours(self, data, times):
        """Say the same again and again; how often it could, before it was hung up on."""
        for number in range(times):
            try:
                self.sock.sendall(data)
            except OSError:
                return number
        return times

    def is_hung_up_on(self):
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self):
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def nobody(routing_id=b""):
    """The mechanism of a client without keys."""
    return Null(DEALER, routing_id)
