"""A scripted daemon behind real sockets: it answers what the test tells it to.

It can be restarted: sessions and memory are kept or not, as the test says; sockets are others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec
from kvd.daemon.session_entries import AttachLimits
from kvd.daemon.sessions import Past
from kvd.journal.engines import EngineRecord, Process
from kvd.pools.build import PoolRegion, pool_memory
from kvd.sockets import Frames, LoopSocket, open_router
from kvd.wire import client as wire
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from tests.support.attaching import AttachListener, ListenedAttach
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.errors import Code, Refusal

POOL = PoolSpec(
    "main",
    "mha",
    PageOrder.PAGE_FIRST,
    (Component("kv", 2, Mha(2, 8, 8, "bfloat16"), 4),),
    (8,),
)

Script = Callable[[wire.Request, bytes], list[wire.Reply]]


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.002)


def answering(**by_kind: Callable[[Any], list[wire.Reply]]) -> Script:
    """A script: what to answer by kind of request; nothing to any other."""

    def script(request: wire.Request, _: bytes) -> list[wire.Reply]:
        kind = type(request).__name__
        return by_kind[kind](request) if kind in by_kind else []

    return script


class Daemon(AttachListener):
    """Sessions are real; answers are ``script``'s; what came is in ``got``, in order."""

    def __init__(self, directory: Path, spec: PoolSpec, placed: list[PoolRegion]) -> None:
        self.endpoint = self.said_endpoint = f"ipc://{directory}/client.sock"
        self.got: list[wire.Request] = []
        self.tokens: list[bytes] = []
        self.ended: list[int] = []
        self.joins: list[int] = []
        self.refusals: list[Code] = []
        self.returns: list[tuple[int, tuple[int, ...]]] = []
        self.kept: frozenset[int] = frozenset()
        """The leases that it keeps over a restart."""
        self.lives = 0
        self.strangers = 0
        """Messages under a routing id of no session."""
        self._engines: dict[int, EngineRecord] = {}
        self.script: Script = lambda request, tokens: []
        self._memory = pool_memory(spec)
        self._fds = [one.arena.fd for one in placed]
        self._token = b""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread.start()
        self._call(self._open)

    def push(self, *messages: wire.Reply) -> None:
        """Send messages to the last client that asked something."""
        self._call(lambda: self._send(list(messages)))

    def hang_up(self) -> None:
        """What a client sees of a daemon's death."""
        self._call(self._shut)

    def break_stream(self) -> None:
        """Hang up on the client socket alone, and listen there no more."""
        self._call(self._shut_stream)

    def listen_again(self) -> None:
        """The opposite of ``break_stream``."""
        self._call(self._open_stream)

    def restart(self, *, keep: Collection[int] = (), knows_sessions: bool = True) -> None:
        """Begin another life after ``hang_up``, keeping these leases."""
        self.kept = frozenset(keep)
        if not knows_sessions:
            self._engines = {}
        self._call(self._open)

    def take_memory(self, placed: list[PoolRegion]) -> None:
        """The next life has other memory."""
        self._fds = [one.arena.fd for one in placed]

    def send_away(self, session: int, refusal: Refusal) -> None:
        """End a session, and say why."""
        self._call(lambda: self._attach.hang_up(session, refusal))

    def awaited(self) -> dict[int, tuple[Process, ...]]:
        """Session to its processes of before the restart that have not come back."""
        return self._attach._sessions.awaited()

    def session_opened(self, session: int, token: bytes, name: str, process: Process) -> None:
        self._engines[session] = EngineRecord(session, b"S" + token, name, (Process(process.pid),))

    def session_joined(self, session: int, process: Process) -> None:
        one = self._engines[session]
        processes = (*one.processes, Process(process.pid))
        self._engines[session] = EngineRecord(session, one.token, one.name, processes)

    def process_left(self, session: int, pid: int) -> None:
        """As ``SessionNotes``."""

    def session_ended(self, session: int) -> None:
        self._engines.pop(session, None)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._call(self._shut)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def asked(self, *kinds: type) -> list[wire.Request]:
        """The requests of these kinds so far."""
        return [request for request in self.got if isinstance(request, kinds)]

    def _call(self, action: Callable[[], object]) -> None:
        """Run ``action`` on the daemon's loop, and wait for it."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _open(self) -> None:
        self.lives += 1
        path = self.endpoint.removeprefix("ipc://")
        self._open_stream()
        self._attach = ListenedAttach(
            os.path.join(os.path.dirname(path), "attach.sock"),
            self,
            (self._memory,),
            self._fds,
            incarnation=str(self.lives) * 32,
            limits=AttachLimits(max_frame_bytes=1 << 20),
            past=Past(tuple(self._engines.values()), max(self._engines, default=0) + 1),
            notes=self,
            endpoint=self.said_endpoint,
        )
        self._attach.serve(self._loop)

    def _open_stream(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = open_router(self._context)
        router.bind(self.endpoint)
        self._router = LoopSocket(router, self._take, loop=self._loop)

    def _shut_stream(self) -> None:
        self._router.close()
        self._context.term()

    def joined(self, session: int, pid: int) -> None:
        self.joins.append(session)

    def gone(self, session: int) -> None:
        self.ended.append(session)

    def refused(self, pid: int, why: Refusal) -> None:
        self.refusals.append(why.code)

    def returned(self, session: int, pid: int, leases: tuple[int, ...]) -> None:
        self.returns.append((session, leases))

    def _shut(self) -> None:
        """End this life; repeatable."""
        if self._context.closed:
            return
        self._attach.close()
        self._shut_stream()

    def _take(self, frames: Frames) -> None:
        if self._attach.session_of(frames[0]) is None:
            self.strangers += 1
            return
        self._token = frames[0]
        request = CLIENT_REQUESTS.decode(frames[1])
        assert isinstance(request, wire.Request)
        tokens = frames[2] if len(frames) > 2 else b""
        self.got.append(request)
        self.tokens.append(tokens)
        self._send(self.script(request, tokens))

    def _send(self, messages: list[wire.Reply]) -> None:
        for message in messages:
            self._router.send([self._token, CLIENT_REPLIES.encode(message)])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[PoolSpec], Daemon]]:
    """A daemon with a pool of the test's choice."""
    with contextlib.ExitStack() as own:

        def start(spec: PoolSpec) -> Daemon:
            placed = build_pool(spec)
            for one in placed:
                own.callback(one.arena.close)
            daemon = Daemon(tmp_path, spec, placed)
            daemon.start()
            own.callback(daemon.stop)
            return daemon

        yield start


@pytest.fixture
def daemon(serve: Callable[[PoolSpec], Daemon]) -> Daemon:
    return serve(POOL)
