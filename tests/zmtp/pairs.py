"""Two machines that talk to each other, without a socket between them."""

from __future__ import annotations

from nacl import bindings

from kvd.zmtp.curve import CurveClient, CurveServer, KeyRing
from kvd.zmtp.events import ConnectionClosed, HandshakeDone
from kvd.zmtp.mechanism import DEALER, Null
from kvd.zmtp.protocol import Protocol, ProtocolState

LIMIT = 10_000


def new_ring(names=()):
    """A key of its own, and whom it lists: (public key, name)."""
    _, secret = bindings.crypto_box_keypair()
    return KeyRing(secret, dict(names))


class Both:
    """A listening and a dialing machine; what each has said goes to the other, ``step`` by step."""

    def __init__(self, listening, dialing, limit=LIMIT):
        self.listening = Protocol(listening, limit)
        self.dialing = Protocol(dialing, limit)
        self.events = {self.listening: [], self.dialing: []}
        self._spoilt = None
        self._carried = {self.listening: 0, self.dialing: 0}

    def spoil(self, machine, place, bit):
        """Of what ``machine`` will say, the byte at ``place`` has a flipped bit."""
        self._spoilt = (machine, place, bit)

    def _on_the_way(self, machine, said):
        at, out = self._carried[machine], bytearray(said)
        self._carried[machine] += len(said)
        if self._spoilt is not None and self._spoilt[0] is machine:
            _, place, bit = self._spoilt
            if at <= place < at + len(said):
                out[place - at] ^= 1 << bit
        return bytes(out)

    def step(self, size=1 << 20):
        """Carry what both have said in pieces of ``size``; whether anything was."""
        carried = False
        for mine, other in (
            (self.listening, self.dialing),
            (self.dialing, self.listening),
        ):
            if other.state is ProtocolState.OVER:
                continue
            said = self._on_the_way(mine, b"".join(mine.to_send()))
            carried = carried or bool(said)
            for at in range(0, len(said), size):
                self.give(other, said[at : at + size])
        return carried

    def give(self, machine, data):
        """Let it have bytes, and take every event."""
        machine.receive(data)
        while (
            machine.state is not ProtocolState.OVER and (event := machine.next_event()) is not None
        ):
            self.events[machine].append(event)
            if isinstance(event, HandshakeDone):
                machine.accept()
            if isinstance(event, ConnectionClosed):
                return

    def shake(self, size=1 << 20):
        """The whole handshake, or as much as there is of it."""
        while self.step(size):
            pass
        return self

    @property
    def said(self):
        """The events of the listening machine."""
        return self.events[self.listening]

    def tell(self, *frames):
        """What the dialing side says as a message, as bytes."""
        return b"".join(self.dialing.pack(frames))


def null(routing_id=b"me", **limits):
    return Both(Null(), Null(DEALER, routing_id), **limits)


def curve(routing_id=b"me", listed=True, server=None, **limits):
    """``listed``: whether the client's key is; ``server``: whom the client takes it for."""
    client = new_ring()
    ring = new_ring([(client.public, "d")] if listed else [])
    return Both(
        CurveServer(ring), CurveClient(client, server or ring.public, DEALER, routing_id), **limits
    )


MAKERS = {"null": null, "curve": curve}
