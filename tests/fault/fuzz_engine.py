"""The healthy engine: what everybody else sees while somebody besieges a daemon.

``python -m tests.fault.fuzz_engine CLIENT_OF_P CLIENT_OF_D`` works with both daemons without end:
lease, commit, release and a full-hit match on ``d``, and now and then a handoff between the two, in
either direction, whose bytes it compares. A line on stdin asks for a ``Report`` of what it has seen
since the last one, as a line of JSON; the end of stdin ends it.
"""

from __future__ import annotations

import itertools
import select
import sys
import time

import msgspec
import numpy as np

from kvd.client import Node
from kvd.client.blocking import BlockingChannel, attach
from kvd.client.connection import Connection
from kvd.client.sync import SyncLease, SyncNode
from kvd.errors import KvdError
from kvd.wire.attach import Attach

PAGE = 16
PROMPT_TOKENS = 320
HANDOFF_TOKENS = 100
OWN = "neighbours"
"""Their namespace: a hostile request that is well formed begins a new epoch of another one."""
HANDOFF_EVERY_S = 0.15
PAUSE_S = 0.002
"""Between two rounds: an engine has other work too."""
FIRST_ROOM = 2**40
MOST_TROUBLES = 20
MOST_CAPTURED = 300


class Report(msgspec.Struct):
    """What the engine saw: every call in milliseconds, and what went wrong, in words."""

    calls_ms: list[float] = []
    handoffs_ms: list[float] = []
    retried: list[str] = []
    """Handoffs that ended with a code that says: try again."""
    troubles: list[str] = []
    captured: list[list[bytes]] = []
    """The messages that it has sent to ``d`` so far, in the first report."""

    def trouble(self, what: str) -> None:
        """Something that must not be."""
        if len(self.troubles) < MOST_TROUBLES:
            self.troubles.append(what)


class Recording(Connection):
    """A connection that keeps the messages it sends, for a besieger to damage."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self.captured: list[list[bytes]] = []

    def take_outgoing(self):
        outgoing = super().take_outgoing()
        if len(self.captured) < MOST_CAPTURED:
            self.captured += [list(one.frames) for one in outgoing]
        return outgoing


def recorded(endpoint: str) -> tuple[SyncNode, Recording]:
    """A session as ``connect_sync`` opens it, whose messages are kept."""
    attachment = attach(endpoint, Attach("healthy"))
    connection = Recording(max_frame_bytes=attachment.attached.max_frame_bytes)
    channel = BlockingChannel(endpoint, attachment, connection, "healthy")
    return SyncNode(Node(attachment, connection, channel), attachment, channel), connection


class Engine:
    """Sessions with both daemons, and what they have lived through."""

    def __init__(self, p: SyncNode, d: SyncNode) -> None:
        self.report = Report()
        self._nodes = {"p": p, "d": d}
        self._bytes = {name: page_bytes(node) for name, node in self._nodes.items()}
        self._source = np.random.default_rng(9)
        self._rooms = itertools.count(FIRST_ROOM)
        self._handoff_s = 0.0
        self._prompt = self._fresh(PROMPT_TOKENS)
        self._kept = d.lease(self._prompt, namespace=OWN)
        self._kept.commit()

    @property
    def has_both_directions(self) -> bool:
        """Whether it has handed over from either daemon to the other."""
        return len(self.report.handoffs_ms) > 1

    def round(self) -> None:
        now_s = time.monotonic()
        if now_s - self._handoff_s > HANDOFF_EVERY_S:
            self._handoff_s = now_s
            self._try_handoff()
        d = self._nodes["d"]
        tokens = np.concatenate([self._prompt[:160], self._fresh(40)])
        lease = self._timed(lambda: d.lease(tokens, namespace=OWN))
        if lease.prefix_len != 160:
            self.report.trouble(f"prefix of {lease.prefix_len}, locked are 160")
        self._timed(lease.commit)
        self._timed(lease.release)
        found = self._timed(lambda: d.match(self._prompt, namespace=OWN)).tokens
        if found != PROMPT_TOKENS:
            self.report.trouble(f"{found} of {PROMPT_TOKENS} locked tokens match")

    def close(self) -> None:
        """Let go of the memory, so that the sessions can unmap it."""
        self._bytes.clear()

    def _timed(self, verb):
        began_s = time.perf_counter()
        result = verb()
        self.report.calls_ms.append(1e3 * (time.perf_counter() - began_s))
        return result

    def _try_handoff(self) -> None:
        room = next(self._rooms)
        source, target = ("p", "d") if room % 2 else ("d", "p")
        began_s = time.perf_counter()
        try:
            self._hand_over(room, source, target)
        except KvdError as error:
            if not error.retryable:
                raise
            self.report.retried.append(f"{source} to {target}: {error}")
            return
        self.report.handoffs_ms.append(1e3 * (time.perf_counter() - began_s))

    def _hand_over(self, room: int, source: str, target: str) -> None:
        tokens = self._fresh(HANDOFF_TOKENS)
        here, there = self._nodes[source], self._nodes[target]
        lease = here.lease(tokens, namespace=OWN, cache=False)
        try:
            written = self._source.integers(0, 256, self._rows(source, lease).shape, dtype=np.uint8)
            self._bytes[source][lease.pages] = written
            receive = there.receive(room, tokens, source, namespace=OWN, cache=False)
            outcome = here.send(room, tokens, lease=lease, namespace=OWN).finish(b"aux")
            receive.done()
            arrived = self._rows(target, receive.lease)
            if not (
                outcome.committed and receive.aux == b"aux" and np.array_equal(arrived, written)
            ):
                self.report.trouble(f"room {room} from {source} arrived wrong: {outcome}")
            receive.lease.release()
        finally:
            lease.release(())

    def _rows(self, name: str, lease: SyncLease):
        return self._bytes[name][lease.pages]

    def _fresh(self, count: int):
        return self._source.integers(0, 2**31 - 1, count, dtype=np.int32)


def page_bytes(node: SyncNode):
    """The pool as (pages, bytes of a page): it is laid out page first."""
    pool = node.pool("main")
    part = pool.component("kv")
    return pool._mapping(part).bytes[: part.pages * part.page_bytes].reshape(part.pages, -1)


def main() -> None:
    p_endpoint, d_endpoint = sys.argv[1:]
    (p, _), (d, connection) = recorded(p_endpoint), recorded(d_endpoint)
    with p, d:
        engine = Engine(p, d)
        while not engine.has_both_directions:
            engine.round()
        engine.report.captured = connection.captured
        say(engine)
        while True:
            if select.select([sys.stdin], [], [], PAUSE_S)[0]:
                if not sys.stdin.buffer.raw.read(1):
                    engine.close()
                    return
                say(engine)
            try:
                engine.round()
            except KvdError as error:
                engine.report.trouble(str(error))
                time.sleep(PAUSE_S)


def say(engine: Engine) -> None:
    """Print what was seen since the last time."""
    report, engine.report = engine.report, Report()
    sys.stdout.write(f"{msgspec.json.encode(report).decode()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
