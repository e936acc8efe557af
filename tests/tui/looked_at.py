"""A daemon's admin socket in a process of its own, to be stopped and killed: answers looks.

    python -m tests.tui.looked_at ENDPOINT INCARNATION

It is a peer of the protocol. Each frame has a later clock; ``Why`` is answered in words.
"""

from __future__ import annotations

import sys
import time

import zmq

from kvd.wire.admin import Because, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from tests.tui.frames import frame, lease, table, vitals


def main(endpoint: str, incarnation: str) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    looks = left = 0
    sender, request, due_s = b"", None, 0.0

    def look() -> None:
        head = vitals(100.0 + looks / 10, incarnation=incarnation)
        answers = [table(lease(looks), revision=looks) for _ in request.queries]
        reply = frame(request.call, *answers, head=head)
        router.send_multipart([sender, ADMIN_REPLIES.encode(reply)])

    while True:
        if left and due_s <= time.monotonic():
            looks, left, due_s = looks + 1, left - 1, due_s + request.every_s
            look()
        if not router.poll(10):
            continue
        one, raw = router.recv_multipart()
        asked = ADMIN_REQUESTS.decode(raw)
        if isinstance(asked, Look):
            sender, request, left = one, asked, asked.frames - 1
            looks, due_s = looks + 1, time.monotonic() + asked.every_s
            look()
        else:
            because = Because(asked.call, "it is asked for", ())
            router.send_multipart([one, ADMIN_REPLIES.encode(because)])


if __name__ == "__main__":
    main(*sys.argv[1:])
