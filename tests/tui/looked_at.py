"""A daemon's admin socket in a process of its own, to be stopped and killed: answers looks.

    python -m tests.tui.looked_at ENDPOINT INCARNATION

It is a peer of the protocol. Each frame has a later clock; ``Why`` is answered in words.
"""

from __future__ import annotations

import sys

import zmq

from kvd.wire.admin import Because, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from tests.tui.frames import frame, lease, table, vitals


def main(endpoint: str, incarnation: str) -> None:
    """Answer until killed."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    looks = 0
    while True:
        sender, raw = router.recv_multipart()
        request = ADMIN_REQUESTS.decode(raw)
        if isinstance(request, Look):
            looks += 1
            head = vitals(100.0 + looks / 10, incarnation=incarnation)
            answers = [table(lease(looks), revision=looks) for _ in request.queries]
            reply = frame(request.call, *answers, head=head)
        else:
            reply = Because(request.call, "it is asked for", ())
        router.send_multipart([sender, ADMIN_REPLIES.encode(reply)])


if __name__ == "__main__":
    main(*sys.argv[1:])
