"""A daemon's admin socket that answers with what a test gives it, and a snapshot to answer with.

It is a peer of the protocol, not a stand-in for our code: a ZMQ ROUTER that speaks the wire.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvd.wire import admin
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from kvd.wire.snapshot import (
    ClientState,
    LeaseState,
    PeerState,
    PoolState,
    RoomState,
    Snapshot,
    Totals,
    WaitingState,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = "evil\x1b[2J[bold]\u202etxt"
"""A name that clears the screen, turns bold and runs backwards, if someone lets it."""

HARMLESS = r"evil\x1b[2J[bold]\u202etxt"

POOL = PoolState(
    pool="main",
    component="kv",
    page_size=16,
    page_bytes=2 * 2**20,
    total_pages=128,
    free_pages=87,
    held_pages=10,
    cached_pages=28,
    quarantined_pages=2,
    evictable_pages=20,
    locked_pages=8,
)
LEASE = LeaseState(
    id=7,
    state="held",
    owner=HOSTILE,
    pid=4711,
    session=3,
    reason="receive",
    room=9117,
    namespace="",
    age_s=95.0,
    prompt_tokens=160,
    prefix_tokens=64,
    locked_node=12,
    held_pages=6,
    quarantined_pages=0,
    holders=("engine decode-0", "handoff 41"),
    waiting_for="",
)
WAITING = WaitingState(
    kind="lease",
    owner="decode-1",
    room=0,
    priority=0,
    waited_s=1.5,
    deadline_in_s=28.5,
    needed_pages=200,
    why="needs 200 pages, 115 are free or evictable",
)
ROOM = RoomState(
    side="decode",
    part=1,
    handoff=41,
    room=9117,
    state="receiving",
    peer="prefill-0",
    incarnation="a" * 32,
    owner="decode-0",
    lease=7,
    prompt_tokens=160,
    decode_prefix_len=64,
    written_tokens=0,
    posted_pages=0,
    total_pages=6,
    moved_bytes=6 * 2**20,
    total_bytes=12 * 2**20,
    outstanding_posts=1,
    age_s=0.25,
    deadline_in_s=29.75,
    waiting_for="prefill-0 to write 3 more pages",
    story=("QUEUED -> OFFERED: admitted", "OFFERED -> RECEIVING: accept"),
)
PEER = PeerState(
    name="prefill-0",
    address="tcp://127.0.0.1:7402",
    state="suspect",
    incarnation="a" * 32,
    generation=2,
    agent="loaded",
    silent_s=1.3,
    round_trip_ms=0.41,
    layout="f" * 32,
    open_receives=1,
    open_sends=0,
)
SNAPSHOT = Snapshot(
    node="decode-node",
    incarnation="b" * 32,
    version="0.1.0",
    uptime_s=3725.0,
    state="serving",
    transport="nixl",
    generation=1,
    last_event=5,
    pools=(POOL,),
    leases=(LEASE,),
    waiting=(WAITING,),
    rooms=(ROOM,),
    peers=(PEER,),
    clients=(ClientState(3, "decode-0", (4711, 4712), 95.0, 1, 6, 1, 0),),
    totals=Totals(900, 5, 40, 39, 12, 1, 0, 2**30, 2**28, 16, 0, 0),
)


def status(_request: admin.AdminRequest) -> admin.AdminReply:
    """The snapshot, whatever is asked."""
    return admin.Status(0, SNAPSHOT)


class Daemon:
    """The admin socket of a daemon: answers each request with ``answer(request)``."""

    def __init__(
        self,
        endpoint: str,
        answer: Callable[[admin.AdminRequest], admin.AdminReply] = status,
    ) -> None:
        self.endpoint = endpoint
        self.asked: list[admin.AdminRequest] = []
        self.answer = answer
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        watch: tuple[bytes, admin.Look, int, float] | None = None
        while not self._stop.is_set():
            if watch is not None and watch[3] <= time.monotonic():
                sender, look, left, due_s = watch
                self._reply(sender, look)
                watch = (sender, look, left - 1, due_s + look.every_s) if left > 1 else None
            if not self._router.poll(10):
                continue
            sender, *_, frame = self._router.recv_multipart()
            request = ADMIN_REQUESTS.decode(frame)
            self.asked.append(msgspec.structs.replace(request, call=0))
            answer = self._reply(sender, request)
            if isinstance(request, admin.Look):
                due_s = time.monotonic() + request.every_s
                owes_more = request.frames > 1 and isinstance(answer, admin.Frame)
                watch = (sender, request, request.frames - 1, due_s) if owes_more else None

    def _reply(self, sender: bytes, request: admin.AdminRequest) -> admin.AdminReply:
        reply = msgspec.structs.replace(self.answer(request), call=request.call)
        self._router.send_multipart([sender, ADMIN_REPLIES.encode(reply)])
        return reply

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._router.close(linger=0)
        self._context.term()
