"""An engine that dies by kill -9 at one point of one call.

    python -m tests.fault.doomed VERB MOMENT ENDPOINT NAME ROOM SEED

Before it dies it holds a committed lease, one that is not, and whatever the verb needs; its last
words are its session and the time. ``written``: the request has been handed to the socket, and may
or may not have left; ``waiting``: the daemon has it; ``replied``: the answer is here.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import kvd.client
from kvd.client import KvdError
from kvd.client.endpoint import attach_path
from tests.fault.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from kvd.client import Lease, Node

PROMPT_TOKENS = 100
WAITING_S = 0.03
MOMENTS = ("written", "waiting", "replied")


class Held:
    """What it has in its hands when it dies."""

    def __init__(self, node: Node, open_lease: Lease, room: int, seed: int) -> None:
        self.node = node
        self.lease = open_lease
        self.room = room
        self.tokens = prompt(seed, "held")


def prompt(seed: int, which: str) -> np.ndarray:
    """Tokens of one of its prompts; nobody else has them, except who hands over with it."""
    family = ("kept", "held", "asked").index(which)
    return Prompt(2000 + family, 0, PROMPT_TOKENS, seed).tokens()


async def _receiving(held: Held) -> kvd.client.Receive:
    return await held.node.receive(held.room, held.tokens, "p", deadline_s=5.0)


async def _sending(held: Held) -> kvd.client.Send:
    return await held.node.send(held.room, held.tokens, lease=held.lease, deadline_s=5.0)


async def _lease(held: Held) -> Coroutine[None, None, object]:
    return held.node.lease(prompt(held.room, "asked"), reserve_tokens=64)


async def _lease_that_waits(held: Held) -> Coroutine[None, None, object]:
    free = (await held.node.snapshot()).pools[0]
    pages = free.free_pages + free.evictable_pages
    await held.node.lease(np.arange(16 * pages, dtype=np.int32), cache=False)
    return held.node.lease(prompt(held.room, "asked"), deadline_s=20.0)


async def _extend(held: Held) -> Coroutine[None, None, object]:
    return held.lease.extend(64)


async def _commit(held: Held) -> Coroutine[None, None, object]:
    return held.lease.commit()


async def _release(held: Held) -> Coroutine[None, None, object]:
    return held.lease.release(())


async def _retract(held: Held) -> Coroutine[None, None, object]:
    return held.lease.retract()


async def _resume(held: Held) -> Coroutine[None, None, object]:
    await held.lease.retract()
    return held.lease.resume(deadline_s=5.0)


async def _match(held: Held) -> Coroutine[None, None, object]:
    return held.node.match(held.tokens)


async def _events(held: Held) -> Coroutine[None, None, object]:
    return anext(held.node.events())


async def _half_a_frame(held: Held) -> Coroutine[None, None, object]:
    return held.node.match(np.arange(2**20, dtype=np.int32))


async def _half_a_greeting(held: Held) -> Coroutine[None, None, object]:
    loop = asyncio.get_running_loop()
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.setblocking(False)
    await loop.sock_connect(raw, sys.argv[3].removeprefix("ipc://"))
    return loop.sock_sendall(raw, b"\xff\x00\x00\x00\x00")


async def _receive(held: Held) -> Coroutine[None, None, object]:
    await held.lease.release()
    return _receiving(held)


async def _done(held: Held) -> Coroutine[None, None, object]:
    await held.lease.release()
    return (await _receiving(held)).done()


async def _cancel(held: Held) -> Coroutine[None, None, object]:
    await held.lease.release()
    return (await _receiving(held)).cancel()


async def _send(held: Held) -> Coroutine[None, None, object]:
    return _sending(held)


async def _accepted(held: Held) -> Coroutine[None, None, object]:
    return (await _sending(held)).accepted()


async def _advance(held: Held) -> Coroutine[None, None, object]:
    return (await _sending(held)).advance(64)


async def _finish(held: Held) -> Coroutine[None, None, object]:
    return (await _sending(held)).finish(b"last words")


async def _abort(held: Held) -> Coroutine[None, None, object]:
    return (await _sending(held)).abort("on purpose")


VERBS: dict[str, Callable[[Held], Awaitable[Coroutine[None, None, object]]]] = {
    "lease": _lease,
    "lease that waits": _lease_that_waits,
    "extend": _extend,
    "commit": _commit,
    "release": _release,
    "retract": _retract,
    "resume": _resume,
    "match": _match,
    "events": _events,
    "half a frame": _half_a_frame,
    "half a greeting": _half_a_greeting,
    "receive": _receive,
    "done": _done,
    "cancel": _cancel,
    "send": _send,
    "accepted": _accepted,
    "advance": _advance,
    "finish": _finish,
    "abort": _abort,
}
RECEIVES = frozenset({"receive", "done", "cancel"})
SENDS = frozenset({"send", "accepted", "advance", "finish", "abort"})
ATTACH = "attach"
"""No session yet: it dies with the connection made, the request sent, or the answer here."""


def die(session: int) -> None:
    """Say so, and be gone."""
    os.write(1, f"{session} {time.monotonic()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


async def attach(moment: str, endpoint: str, name: str) -> None:
    """Die while a session is being opened."""
    if moment == "written":
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(attach_path(endpoint))
        die(0)
    opening = asyncio.ensure_future(kvd.client.connect(endpoint, name=name)._open())
    if moment == "waiting":
        await asyncio.sleep(0)
        die(0)
    die((await opening).session)


async def main(verb: str, moment: str, endpoint: str, name: str, room: int, seed: int) -> None:
    """Live up to that moment."""
    if verb == ATTACH:
        await attach(moment, endpoint, name)
    node = await kvd.client.connect(endpoint, name=name)
    kept = await node.lease(prompt(room, "kept"))
    await kept.commit()
    held = Held(node, await node.lease(prompt(room, "held")), room, room)
    call = asyncio.ensure_future(await VERBS[verb](held))
    match moment:
        case "written":
            await asyncio.sleep(0)
            time.sleep(random.Random(seed).choice([0.0, 0.0005, 0.002]))  # noqa: ASYNC251 - dying
        case "waiting":
            await asyncio.sleep(WAITING_S)
        case _:
            await asyncio.wait([call], timeout=1.0)
            if call.done() and isinstance(call.exception(), KvdError):
                pass  # the other side ended it: an answer as well
    die(node.session)


if __name__ == "__main__":
    words = sys.argv[1:]
    asyncio.run(main(words[0], words[1], words[2], words[3], int(words[4]), int(words[5])))
