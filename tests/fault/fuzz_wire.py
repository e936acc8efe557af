"""Sieges of the client and the admin socket.

A siege sends hostile frames and counts what comes back. Every frame gets exactly one answer, with
the call that it came with where that could be read.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvd.client.blocking import attach
from kvd.errors import Code, Refusal
from kvd.sockets import open_dealer
from kvd.types import pack_ids
from kvd.wire import admin, client
from kvd.wire.attach import Attach
from kvd.wire.codec import (
    ADMIN_REPLIES,
    ADMIN_REQUESTS,
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
    NO_CALL,
)
from kvd.zmtp.bounds import MAX_FRAMES
from tests.fault.fuzz_target import POOL_PAGES, Target
from tests.fault.fuzz_values import Maker, kinds_of
from tests.support.replies import each

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_UNANSWERED = 256
"""Frames sent ahead of their answers."""
ANSWER_S = 15.0
MOST_TROUBLES = 10
TOO_MANY_TOKENS = bytes(4 * (2**20 + 1))
ROOMS = list(range(1, 20))


class Tally:
    """What was sent, and what came back."""

    def __init__(self) -> None:
        self.frames = 0
        self.answered = 0
        self.codes: Counter[str] = Counter()
        self.troubles: list[str] = []

    def trouble(self, what: str) -> None:
        """Something that must not be."""
        if len(self.troubles) < MOST_TROUBLES:
            self.troubles.append(what)

    def refused(self, refusal: Refusal) -> None:
        """Count an answer that is a refusal; ``internal`` would be an exception in a step."""
        self.codes[refusal.code.value] += 1
        if refusal.code is Code.INTERNAL:
            self.trouble(f"internal: {refusal.message}")


class Wire:
    """A DEALER that says what it likes, and remembers which answers it is owed."""

    def __init__(self, endpoint, *, routing_id=None):
        self._context = zmq.Context()
        self._socket = open_dealer(self._context, routing_id=routing_id, max_frame_bytes=64 * 2**20)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self.endpoint = endpoint
        self.owed: Counter[int] = Counter()

    def say(self, *frames):
        self._socket.send_multipart(frames, copy=False)

    def hear(self, wait_s=0.0):
        """The frames of the next message, or None."""
        if wait_s and not self._socket.poll(1e3 * wait_s):
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def is_hung_up_on(self, within_s):
        """Whether the other side ends the connection, or has; what it said before can be heard."""
        return bool(self._ends.poll(1e3 * within_s))

    def close(self):
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


class Asking:
    """A siege of a socket that answers each request once."""

    replies = CLIENT_REPLIES

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.make = Maker(seed)
        self.tally = Tally()
        self.wires: list[Wire] = []
        self._n_owed = 0
        self._last_call = 0

    def ask(self, wire: Wire, call: int, *frames: bytes) -> None:
        """Send one message that is to be answered with ``call``."""
        wire.owed[call] += 1
        self._n_owed += 1
        self.tally.frames += 1
        wire.say(*frames)
        if not self._n_owed % 16:
            self.drain(0.0)
        deadline_s = time.monotonic() + ANSWER_S
        while self._n_owed > MOST_UNANSWERED and time.monotonic() < deadline_s:
            self.drain(0.05)

    def overstep(self, wire: Wire, *frames: bytes) -> None:
        """Send one message of more frames than any may have: it is hung up on, and nothing else is.

        Half of the time everything is answered before. Otherwise answers that take the daemon more
        than one turn have nobody to go to: what is owed on this connection then need not come.
        """
        if self.make.rng.random() < 0.5:
            self._wait_for(lambda: not wire.owed.total(), ANSWER_S)
            self._judge(wire)
        self.tally.frames += 1
        wire.say(*frames)
        if not wire.is_hung_up_on(ANSWER_S):
            self.tally.trouble(f"{len(frames)} frames were not hung up on")
        self.drain(0.0)
        self._n_owed -= wire.owed.total()
        wire.close()
        self.wires[self.wires.index(wire)] = Wire(wire.endpoint)

    def drain(self, wait_s: float) -> None:
        """Take the answers that are there; wait for the first of each wire."""
        for wire in self.wires:
            frames = wire.hear(wait_s)
            while frames is not None:
                self._heard(wire, frames)
                frames = wire.hear()

    def finish(self, within_s: float = ANSWER_S) -> None:
        """Wait for what is owed still, and report what never came."""
        self._wait_for(lambda: not self._n_owed, within_s)
        for wire in self.wires:
            self._judge(wire)
            wire.close()
        self.wires.clear()
        self._n_owed = 0

    def _wait_for(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition() and time.monotonic() < deadline_s:
            self.drain(0.05)

    def _judge(self, wire: Wire) -> None:
        if wire.owed.total():
            self.tally.trouble(f"never answered: {dict(wire.owed.most_common(5))}")

    def next_call(self) -> int:
        """A fresh number, now and then one that was used before."""
        if self.make.rng.random() < 0.03:
            return self._last_call
        self._last_call += 1
        return self._last_call

    def _heard(self, wire: Wire, frames: list[bytes]) -> None:
        message = self.replies.decode(frames[0])
        if len(frames) != 1 or isinstance(message, Refusal):
            self.tally.trouble(f"unreadable answer {frames[0][:60]!r}: {message}")
            return
        for one in each(message):
            self._heard_one(wire, one)

    def _heard_one(self, wire: Wire, message) -> None:
        self.heard(wire, message)
        if isinstance(message, client.Push) or self.is_further(wire, message):
            return
        self.tally.answered += 1
        self._n_owed -= 1
        wire.owed[message.call] -= 1
        if not wire.owed[message.call]:
            del wire.owed[message.call]
        elif wire.owed[message.call] < 0:
            self.tally.trouble(f"nobody asked for {message}")
        if isinstance(message, client.Failed | admin.AdminFailed):
            self.tally.refused(message.refusal)

    def heard(self, wire: Wire, message) -> None:
        """An answer or a push; for those who want to know."""

    def is_further(self, wire: Wire, message) -> bool:
        """Whether it is a second answer, and more than one were asked for."""
        return False


class Clients(Asking):
    """Sessions with valid tokens at both daemons that break every rule of the client API."""

    name = "client"
    counter = "kvd_rpc_errors_total"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._kinds = kinds_of(client.Request)
        self._held: deque[tuple[Wire, int, int]] = deque()
        self._held_pages = 0
        self._open()

    def storm(self, count: int) -> None:
        for _ in range(count):
            if self._held_pages > POOL_PAGES // 8:
                wire, lease, pages = self._held.popleft()
                self._held_pages -= pages
                call = self.next_call()
                self.ask(wire, call, CLIENT_REQUESTS.encode(client.ReleaseLease(call, lease)))
            self._one()

    def calm(self) -> None:
        """Everything is answered, then all sessions are over."""
        self.finish()
        for attachment in self._attachments:
            attachment.close()
        self._held.clear()
        self._held_pages = 0

    def again(self) -> None:
        self._open()

    def _open(self) -> None:
        daemons = (self.target.daemon, self.target.daemon, self.target.other)
        self._attachments = [attach(one.client, Attach("hostile")) for one in daemons]
        for one, attachment in zip(daemons, self._attachments, strict=True):
            self.wires.append(Wire(one.client, routing_id=attachment.attached.token))
        self.make.known = {name: [1, 2, 3] for name in ("lease", "send", "receive", "of")}
        self.make.known["room"] = list(ROOMS)
        self.make.known["source"] = [["p"], ["d"]]
        for wire in self.wires:  # one by one: how many wait in libzmq is what the heap then keeps
            call = self.next_call()
            self.ask(wire, call, CLIENT_REQUESTS.encode(client.MatchPrefix(call)), TOO_MANY_TOKENS)
            self._wait_for(lambda: not self._n_owed, ANSWER_S)

    def _one(self) -> None:
        rng = self.make.rng
        kind = rng.choice(self._kinds)
        wire = rng.choice(self.wires)
        header, tokens = self.make.frame(kind, call=self.next_call()), self._tokens()
        if rng.random() < 0.1:
            header, *rest = rng.choice(self.target.captured)
            header, tokens = self.make.damaged(header), rest[0] if rest else tokens
        message = CLIENT_REQUESTS.decode(header)
        if isinstance(message, Refusal):
            frames = [header, tokens][: rng.randrange(1, 3)]
            self.ask(wire, CLIENT_REQUESTS.call_of(header), *frames)
            return
        if isinstance(message, client.OpenLease | client.ReceiveRequest):
            header, message = self._tamed(message)
        elif isinstance(message, client.AboutPrompt):
            header, message = self._tamed_within(message)
        takes = isinstance(message, client.TAKES_TOKENS)
        frames = [header, tokens] if takes else [header]
        if rng.random() < 0.04:
            frames = rng.choice(([header], [header, tokens], [header, tokens, tokens]))
        self.ask(wire, message.call, *frames)

    def _tamed(self, message):
        """Nobody may take the whole pool for long: that would be greed, not a flaw."""
        if not 0 <= message.deadline_s < 0.3 and self.make.rng.random() < 0.9:
            message = msgspec.structs.replace(message, deadline_s=0.05)
        return CLIENT_REQUESTS.encode(message), message

    def _tamed_within(self, message):
        """The same of what is asked about a prompt; mostly one that is kept."""
        inner = msgspec.structs.replace(message.request, call=message.call)
        if isinstance(inner, client.OpenLease | client.ReceiveRequest):
            _, inner = self._tamed(inner)
        known_tokens = 0 if self.make.rng.random() < 0.5 else message.known_tokens
        message = msgspec.structs.replace(message, request=inner, known_tokens=known_tokens)
        return CLIENT_REQUESTS.encode(message), message

    def _tokens(self) -> bytes:
        rng = self.make.rng
        match rng.randrange(40):
            case 0:
                return b""
            case 1:
                return rng.randbytes(4 * rng.randrange(40) + rng.randrange(1, 4))
            case 2:
                return pack_ids([-1, -(2**31), 2**31 - 1] * rng.randrange(1, 30))
            case 3 if rng.random() < 0.1:
                return pack_ids(list(range(POOL_PAGES * 16 + 1)))
            case _:
                first = rng.choice((1, 1, 1, 5000))
                return pack_ids(list(range(first, first + rng.choice((1, 10, 16, 40, 100, 400)))))

    def heard(self, wire: Wire, message) -> None:
        known = self.make.known
        match message:
            case (
                client.Leased(lease=lease, pages=pages) | client.Received(lease=lease, pages=pages)
            ):
                self._held.append((wire, lease, len(pages) // 4))
                self._held_pages += len(pages) // 4
                _learn(known["lease"], lease)
            case client.Sending(send=send):
                _learn(known["send"], send)
            case client.Receiving(receive=receive):
                _learn(known["receive"], receive)


class Strangers(Asking):
    """Requests from routing ids that no session has: each is told to attach."""

    name = "client, no session"
    counter = "kvd_rpc_errors_total"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._kinds = kinds_of(client.Request)
        self.again()

    def again(self) -> None:
        ids = [self.make.rng.randbytes(size) for size in (1, 5, 16, 17, 255)]
        self.wires = [Wire(self.target.daemon.client, routing_id=b"S" + one[:254]) for one in ids]

    def storm(self, count: int) -> None:
        rng = self.make.rng
        for _ in range(count):
            header = self.make.frame(rng.choice(self._kinds), call=self.next_call())
            tokens = rng.randbytes(rng.choice((0, 3, 4, 400)))
            self.ask(rng.choice(self.wires), NO_CALL, *[header, tokens][: rng.randrange(1, 3)])

    def calm(self) -> None:
        self.finish()
        wrong = {code: n for code, n in self.tally.codes.items() if code != "unknown-session"}
        if wrong:
            self.tally.trouble(f"a stranger was told {wrong}")


class Operators(Asking):
    """Orders and questions of operators who cannot spell."""

    name = "admin"
    counter = 'kvd_messages_refused_total socket="admin"'
    replies = ADMIN_REPLIES
    COSTLY = (admin.Fence, admin.Record)
    """One of each is obeyed between two rests: a restart of the transfer process, a file."""

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._kinds = kinds_of(admin.AdminRequest)
        self.again()

    def again(self) -> None:
        self._obeyed: set[type] = set()
        self._further: Counter[tuple[Wire, int]] = Counter()
        """Frames that looks asked for beyond their first one, by connection and call."""
        self._unseen: Counter[tuple[Wire, int]] = Counter()
        """Looks that no frame has come for yet."""
        self.wires = [Wire(self.target.daemon.admin) for _ in range(3)]
        self.make.known = {"kind": ["page", "node", "room", "lease"], "id": list(range(1, 60))}
        self.make.known |= {"limit": [1, 5], "room": ROOMS, "after_seq": [10**6]}

    def storm(self, count: int) -> None:
        rng = self.make.rng
        for _ in range(count):
            frame = self.make.frame(rng.choice(self._kinds), call=self.next_call())
            message = ADMIN_REQUESTS.decode(frame)
            if isinstance(message, self.COSTLY):
                if type(message) in self._obeyed:
                    frame = frame[:-1]
                self._obeyed.add(type(message))
            if isinstance(message, admin.Drain):
                frame = frame[
                    :-1
                ]  # a node that obeys refuses the healthy engine beside us, rightly
            frames = [frame] if rng.random() > 0.02 else [frame] * rng.choice((2, 3, 50))
            wire = rng.choice(self.wires)
            if isinstance(message, admin.Look) and len(frames) == 1:
                self._further[wire, message.call] += message.frames - 1
                self._unseen[wire, message.call] += 1
            if len(frames) > MAX_FRAMES:
                self.overstep(wire, *frames)
                continue
            call = ADMIN_REQUESTS.call_of(frame) if len(frames) == 1 else NO_CALL
            self.ask(wire, call, *frames)

    def is_further(self, wire: Wire, message) -> bool:
        look = wire, message.call
        is_ended = isinstance(message, admin.AdminFailed) and "next look" in message.refusal.message
        if not is_ended and not isinstance(message, admin.Frame):
            return False
        # Another request may have had the same number, so what is owed does not tell.
        if self._unseen[look]:
            self._unseen[look] -= 1
            return False
        self._further[look] -= 1
        return self._further[look] >= 0

    def calm(self) -> None:
        self.finish()


def _learn(ids: list, one: int) -> None:
    ids.append(one)
    if len(ids) > 40:
        del ids[0]
