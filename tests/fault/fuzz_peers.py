"""Siege of the peers' socket: strangers, and peers that said Hello, under every name but ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Refusal
from kvd.wire import peer
from kvd.wire.codec import PEER_MESSAGES
from tests.fault.fuzz_values import Maker, kinds_of
from tests.fault.fuzz_wire import ANSWER_S, ROOMS, Tally, Wire

if TYPE_CHECKING:
    from tests.fault.fuzz_target import Target


MOST_BEHIND = 40
"""Unreadable frames sent ahead of their Reject; beyond it libzmq's queues would only grow."""


class Peers:
    """Strangers and peers that said Hello: everything a peer may say, under every name but ours."""

    name = "peers"
    counter = 'kvd_messages_refused_total socket="peers"'

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.make = Maker(seed)
        self.tally = Tally()
        self._kinds = kinds_of(peer.Message)
        self._life = seed
        self._unreadable = self._rejected = 0
        self._lives: list[str] = []
        self.again()

    def again(self) -> None:
        self._wires = [Wire(self.target.daemon.peers) for _ in range(4)]
        first = self._wires[0]
        first.say(PEER_MESSAGES.encode(peer.Ping("", "", 1, 0, 0, 0)))
        self._hello = None
        while self._hello is None:
            self._take(first, first.hear(ANSWER_S))
        known = self.make.known
        known["target"] = [self._hello.source] * 3 + ["", "f" * 32]
        known["layout"] = [self._hello.layout]
        known["metadata"] = [b"no metadata", b""]
        known["protocol"] = [peer.PROTOCOL]
        known["room"] = list(ROOMS)
        known["handoff"] = list(range(1, 60))
        known["generation"] = [1, 1, 1, 2]
        for wire, name in zip(self._wires[1:], ("mallory", "oscar", "trudy"), strict=True):
            self._greet(wire, name)

    def storm(self, count: int) -> None:
        rng = self.make.rng
        for number in range(count):
            wire = rng.choice(self._wires)
            if not number % 2000:
                self._greet(self._wires[1], "mallory")
            frame = self.make.frame(rng.choice(self._kinds), node=self._node())
            self.tally.frames += 1
            message = PEER_MESSAGES.decode(frame)
            frames = [frame] if rng.random() > 0.02 else [frame] * rng.choice((2, 3))
            if isinstance(message, Refusal) or len(frames) > 1:
                self._unreadable += 1
            wire.say(*frames)
            if not number % 32:
                self._keep_up(MOST_BEHIND)

    def _keep_up(self, most_behind: int) -> None:
        """Hear what is said, and wait while the daemon is further behind than so many frames."""
        self._drain()
        deadline_s = time.monotonic() + ANSWER_S
        while self._unreadable - self._rejected > most_behind and time.monotonic() < deadline_s:
            self._drain(0.005)

    def calm(self) -> None:
        self._keep_up(0)
        if self._rejected != self._unreadable:
            self.tally.trouble(f"{self._rejected} of {self._unreadable} unreadable were rejected")
        for wire in self._wires:
            wire.close()

    def _node(self) -> str:
        """Never the name of an honest node: who may claim one is for the transport to say."""
        return self.make.rng.choice(("mallory", "oscar", "trudy", "", "d", "x" * 128, "\0"))

    def _greet(self, wire: Wire, name: str) -> None:
        """A Hello that is taken: a new life of this node."""
        self._life += 1
        self._lives.append(f"{self._life:032x}")
        self.make.known["source"] = [*self._lives[-8:], "", "f" * 32, self._hello.source]
        wire.say(
            PEER_MESSAGES.encode(
                msgspec.structs.replace(
                    self._hello,
                    source=self._lives[-1],
                    target="",
                    node=name,
                    generation=1,
                    metadata=b"no metadata",
                )
            )
        )

    def _drain(self, wait_s: float = 0.0) -> None:
        for wire in self._wires:
            frames = wire.hear(wait_s)
            while frames is not None:
                self._take(wire, frames)
                frames = wire.hear()

    def _take(self, wire: Wire, frames) -> None:
        message = PEER_MESSAGES.decode(frames[0])
        match message:
            case Refusal():
                self.tally.trouble(f"unreadable answer {frames[0][:60]!r}: {message}")
            case peer.Reject(target=target, refusal=refusal):
                self.tally.answered += 1
                self.tally.refused(refusal)
                self._rejected += (target, refusal.side) == ("", "")
            case peer.Hello():
                self._hello = message
                self.tally.answered += 1
            case peer.Ping(echo=0):
                pass  # its own
            case _:
                self.tally.answered += 1
