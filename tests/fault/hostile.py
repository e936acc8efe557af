"""A peer that lies, as a process of its own: it is run where the daemon can be reached.

    python -m tests.fault.hostile metadata tcp://HOST:PORT SEED
    python -m tests.fault.hostile frames tcp://HOST:PORT SEED

``metadata`` says Hello with transport metadata that is whole and well formed, and whose inner part,
which NIXL reads, is the daemon's own with some bits changed. ``frames`` sends what is no message.
"""

from __future__ import annotations

import random
import sys
import time

import msgspec
import zmq

from kvd.sockets import open_dealer
from kvd.transfer.metadata import pack, unpack
from kvd.wire import peer
from kvd.wire.codec import PEER_MESSAGES

ANSWER_S = 5.0
STAY_S = 0.5
GENERATIONS = 3
FRAMES = 400


def greet(dealer: zmq.Socket[bytes], name: str, incarnation: str) -> peer.Hello:
    """Say Hello, and return the daemon's."""
    empty = peer.Hello(incarnation, "", name, "", 1, b"", 2**20, 2**16)
    dealer.send(PEER_MESSAGES.encode(empty))
    end_s = time.monotonic() + ANSWER_S
    while dealer.poll(max(0, int(1000 * (end_s - time.monotonic())))):
        message = PEER_MESSAGES.decode(dealer.recv_multipart()[0])
        if isinstance(message, peer.Hello):
            return message
    raise SystemExit("the daemon says no Hello")


def damaged(framed: bytes, source: random.Random) -> bytes:
    """Metadata whose frame is right and whose inside is not."""
    inside = unpack(framed)
    blob = bytearray(inside.blob)
    for _ in range(source.choice([1, 4, 64])):
        at = source.randrange(len(blob))
        blob[at] ^= 1 << source.randrange(8)
    if source.random() < 0.3:
        del blob[source.randrange(len(blob)) :]
    return pack(msgspec.structs.replace(inside, blob=bytes(blob), agent=f"m-{source.random()}"))


def main(what: str, address: str, seed: int) -> None:
    """Do harm for a moment."""
    source = random.Random(seed)
    name, incarnation = f"mallory-{seed}", f"{source.randrange(2**127):032x}"
    context = zmq.Context()
    dealer = open_dealer(context)
    dealer.connect(address)
    theirs = greet(dealer, name, incarnation)
    if what == "metadata":
        for generation in range(2, 2 + GENERATIONS):
            hello = peer.Hello(
                incarnation,
                theirs.source,
                name,
                theirs.layout,
                generation,
                damaged(theirs.metadata, source),
                2**20,
                2**16,
            )
            dealer.send(PEER_MESSAGES.encode(hello))
            time.sleep(STAY_S)
    else:
        valid = bytearray(PEER_MESSAGES.encode(theirs))
        for number in range(FRAMES):
            frame = bytearray(valid)
            frame[source.randrange(len(frame))] ^= 1 << source.randrange(8)
            dealer.send(bytes(frame) if number % 2 else source.randbytes(number))
        time.sleep(0.1)
    dealer.close(linger=500)
    context.term()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
