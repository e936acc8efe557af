"""Siege of the peers' socket: strangers, and peers that said Hello, under every name but ours."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kvd.client.blocking import attach
from kvd.core.handoff.offer import prompt_digest
from kvd.errors import Refusal
from kvd.types import Tokens, pack_ids
from kvd.wire import client, peer
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS, PEER_MESSAGES
from tests.fault.fuzz_values import Maker, kinds_of
from tests.fault.fuzz_wire import ANSWER_S, ROOMS, Tally, Wire
from tests.support.replies import each

if TYPE_CHECKING:
    from tests.fault.fuzz_target import Target
    from tests.support.daemons import Daemon


MOST_BEHIND = 40
"""Unreadable frames sent ahead of their Reject; beyond it libzmq's queues would only grow."""


NAMES = ("mallory", "oscar", "trudy")
PROMPT = pack_ids(list(range(1, 101)))


class Accomplice:
    """An engine at the besieged daemon whose handoffs are with the hostile peers."""

    def __init__(self, target: Target, make: Maker) -> None:
        self._make = make
        self._attachment = attach(target.daemon.client, Attach("hostile"))
        token = self._attachment.attached.token
        self._wire = Wire(target.daemon.client, routing_id=token)
        self._leases: list[int] = []

    def act(self) -> None:
        """Receive from one of them, or send to one that asks for the room."""
        rng = self._make.rng
        while frames := self._wire.hear():
            for message in each(CLIENT_REPLIES.decode(frames[0])):
                match message:
                    case client.Leased(lease=lease) | client.Received(lease=lease):
                        self._leases.append(lease)
                    case client.Sending(send=send):
                        self._wire.say(CLIENT_REQUESTS.encode(client.Advance(1, send, 40)))
        if len(self._leases) > 20:
            self._wire.say(CLIENT_REQUESTS.encode(client.ReleaseLease(1, self._leases.pop(0))))
        room, prompt = rng.choice(ROOMS), PROMPT
        if rng.random() < 0.5:
            asked = client.ReceiveRequest(1, room, (rng.choice(NAMES),), deadline_s=0.5)
        elif self._leases and rng.random() < 0.7:
            asked = client.SendRequest(1, room, self._leases[-1], deadline_s=0.5)
        else:
            asked = client.OpenLease(1, deadline_s=0.1)
        self._wire.say(CLIENT_REQUESTS.encode(asked), prompt)

    def leave(self) -> None:
        """Hang up: the daemon ends what it had."""
        self._wire.close()
        self._attachment.close()


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
        self._age = "0"
        """First digit of every life: those after a rest are later than any that damage has made."""
        self._unreadable = self._rejected = 0
        self._lives: list[str] = []
        self._spoken: deque[bytes] = deque(maxlen=200)
        """What the daemon said last: the frames of real handoffs, to be sent back damaged."""
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
        known["digest"] = [prompt_digest(Tokens(PROMPT), "")]
        known["start_tokens"], known["end_tokens"] = [0], [100]
        known["prompt_tokens"], known["decode_prefix_len"] = [100], [0]
        known["component"], known["pages"] = ["kv"], [pack_ids(list(range(1, 8)))]
        for wire, name in zip(self._wires[1:], NAMES, strict=True):
            self._greet(wire, name)
        self._accomplice = Accomplice(self.target, self.make)

    def storm(self, count: int) -> None:
        rng = self.make.rng
        for number in range(count):
            wire = rng.choice(self._wires)
            if not number % 2000:
                self._greet(self._wires[1], "mallory")
            if not number % 50:
                self._accomplice.act()
            frame = self.make.frame(rng.choice(self._kinds), node=self._node())
            if rng.random() < 0.1:
                frame = self.make.damaged(rng.choice(self._spoken))
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
        self._accomplice.leave()
        daemon = self.target.daemon
        daemon.wait_for(lambda: _is_alone(daemon), "keeps the accomplice", ANSWER_S)
        self._age = "f" if self._age == "c" else "c"
        for wire, name in zip(self._wires[1:], NAMES, strict=True):
            self._greet(wire, name)  # a new life proves that the old one writes no more
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
        self._lives.append(f"{self._age}{self._life:031x}")
        self.make.known["source"] = [*self._lives[-8:], "", "0" * 32, self._hello.source]
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
        self._spoken.append(frames[0])
        message = PEER_MESSAGES.decode(frames[0])
        match message:
            case peer.Offer(handoff=handoff):
                self.make.known["handoff"] = [*self.make.known["handoff"][-60:], handoff]
                self.tally.answered += 1
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


def _is_alone(daemon: Daemon) -> bool:
    return all(one.name == "healthy" for one in daemon.snapshot().clients)
