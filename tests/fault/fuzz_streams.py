"""Sieges of what lies below the messages: the attach socket, HTTP, and the byte streams of ZMQ."""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
import time
from typing import TYPE_CHECKING

from kvd.client.blocking import attach
from kvd.errors import KvdError, Refusal
from kvd.wire.attach import Attach, AttachRequest, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS
from kvd.zmtp.bounds import BOUNDS
from tests.fault.fuzz_values import Maker, kinds_of
from tests.fault.fuzz_wire import ANSWER_S, Tally

if TYPE_CHECKING:
    from tests.fault.fuzz_target import Target

IDLE_CONNECTIONS = 30
"""Left open without a word while a siege lasts."""
SWEPT_S = 0.5
"""How late the end of a time is noticed, at most."""
CROWD = 300
"""Sessions at once; limits.max_clients is 256."""
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Attachers:
    """Processes that attach badly: nonsense, strange names, passed descriptors, silence, crowds."""

    name = "attach"
    counter = 'kvd_messages_refused_total socket="attach"'

    def __init__(self, target: Target, seed: int) -> None:
        self.make = Maker(seed)
        self.tally = Tally()
        self._path = target.daemon.attach
        self._kinds = kinds_of(AttachRequest)
        self._endpoint = target.daemon.client
        self._read_end, self._write_end = os.pipe()
        self.again()

    def again(self) -> None:
        self._idle = [self._connected() for _ in range(IDLE_CONNECTIONS)]
        with contextlib.suppress(KvdError):
            self._kept = attach(self._endpoint, Attach("hostile"))
        self.make.known = {"protocol": [1], "name": ["hostile", "é" * 64, "x" * 128, "\x1b[2J"]}
        self.make.known["token"] = [self._kept.attached.token, b"S" + b"x" * 16]

    def storm(self, count: int) -> None:
        rng = self.make.rng
        self._crowd()
        for _ in range(count):
            packet = self.make.frame(rng.choice(self._kinds))
            if rng.random() < 0.002:
                packet = bytes(150_000)
            self.tally.frames += 1
            with self._connected() as raw:
                self._talk(raw, packet)

    def calm(self) -> None:
        for one in self._idle:
            one.close()
        self._kept.close()

    def _crowd(self) -> None:
        """More sessions at once than there may be: those beyond the limit are told so."""
        packet = ATTACH_REQUESTS.encode(Attach("hostile"))
        crowd = []
        for _ in range(CROWD):
            crowd.append(self._connected())
            crowd[-1].send(packet)
            self.tally.frames += 1
            self._hear(crowd[-1], packet)
        for one in crowd:
            one.close()

    def _talk(self, raw: socket.socket, packet: bytes) -> None:
        """Say it: with descriptors, more than once, without waiting for the answer."""
        way = self.make.rng.randrange(30)
        passed = array.array("i", [self._read_end] * (3 if way == 0 else 1)) if way < 3 else None
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendmsg([packet], ancillary)
            if way == 3:
                raw.send(packet + b"more")
            if way == 4:
                return  # hung up without hearing the answer
            self._hear(raw, packet)

    def _hear(self, raw: socket.socket, packet: bytes) -> None:
        answer, passed, _, _ = raw.recvmsg(2**20, socket.CMSG_SPACE(64))
        for _, _, data in passed:
            for fd in array.array("i", data[: len(data) - len(data) % 4]):
                os.close(fd)
        if not answer:
            if packet:
                self.tally.trouble(f"hung up on {packet[:40]!r} without a word")
            return
        self.tally.answered += 1
        message = ATTACH_REPLIES.decode(answer)
        expected = ATTACH_REQUESTS.decode(packet)
        if isinstance(message, Refusal):
            self.tally.trouble(f"unreadable answer {answer[:60]!r}")
        elif isinstance(message, Rejected):
            self.tally.refused(message.refusal)
        elif isinstance(expected, Refusal):
            self.tally.trouble(f"{packet[:40]!r} was attached")

    def _connected(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.settimeout(ANSWER_S)
        raw.connect(self._path)
        return raw


class Browsers:
    """HTTP clients that speak it badly; each connection carries several requests."""

    name = "http"
    counter = 'kvd_messages_refused_total socket="http"'
    PER_CONNECTION = (1, 10, 40, 40, 40, 1500)
    METHODS = (b"GET", b"GET", b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"BREW", b"get")
    TARGETS = (b"/livez", b"/readyz", b"/healthz", b"/info", b"/", b"/../../etc/passwd", b"*")
    TARGETS += (b"http://x/livez", b"/livez?a=%00", b"/%2e%2e", b"//livez", b"/livez#x")
    COSTLY = (b"/metrics", b"/status")
    HEADERS = (b"X: y", b"Host: a", b"Accept: */*", b"Expect: 100-continue", b"Range: bytes=0-")
    HEADERS += (b"Content-Length: 0", b"TE: trailers", b"X: " + b"z" * 2000)
    BROKEN = (b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    BROKEN += (
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    )
    BROKEN += (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",)
    BROKEN += (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",)
    BROKEN += (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",)
    BROKEN += (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",)
    BROKEN += (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",)

    def __init__(self, target: Target, seed: int) -> None:
        self.make = Maker(seed)
        self.tally = Tally()
        self._address = ("127.0.0.1", target.daemon.http_port)
        self.again()

    def again(self) -> None:
        self._idle = [self._connected() for _ in range(IDLE_CONNECTIONS)]
        for number, one in enumerate(self._idle):
            one.send(b"GET /metrics HTTP/1.1\r\n"[: number % 24])

    def storm(self, count: int) -> None:
        sent = 0
        while sent < count:
            per = self.make.rng.choice(self.PER_CONNECTION)
            requests = [self._request() for _ in range(min(per, count - sent))]
            last = self._last(requests[-1])
            sent += len(requests)
            self.tally.frames += len(requests)
            self._talk(requests[:-1], last)

    def calm(self) -> None:
        for one in self._idle:
            one.close()

    def _request(self) -> bytes:
        """One that can be read: each must be answered."""
        rng = self.make.rng
        target = rng.choice(self.TARGETS) if rng.random() < 0.98 else rng.choice(self.COSTLY)
        lines = [b"%s %s HTTP/1.1" % (rng.choice(self.METHODS), target), b"Host: x"]
        more = rng.choice(self.HEADERS)
        if rng.random() < 0.5 and not more.startswith((b"Host", b"Expect")):
            lines.append(more)
        return b"\r\n".join([*lines, b"", b""])

    def _last(self, request: bytes) -> bytes:
        """The last of a connection may be anything."""
        match self.make.rng.randrange(4):
            case 0:
                return request
            case 1:
                return self.make.damaged(request)
            case 2:
                return self.make.noise()
            case _:
                return self.make.rng.choice(self.BROKEN)

    def _talk(self, requests: list[bytes], last: bytes) -> None:
        with self._connected() as link:
            answers = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(b"".join([*requests, last]))
                link.shutdown(socket.SHUT_WR)
                while got := link.recv(2**16):
                    answers += got
        found = STATUS_LINE.findall(answers)
        self.tally.answered += len(found)
        for status in found:
            self.tally.codes[status.decode()] += 1
        if b"500" in found:
            self.tally.trouble(f"a page failed: {answers[:200]!r}")
        if len(found) < len(requests) and b"503" not in found:
            self.tally.trouble(
                f"{len(found)} answers to {len(requests)} requests, then {last[:50]!r}"
            )

    def _connected(self) -> socket.socket:
        link = socket.create_connection(self._address, ANSWER_S)
        link.settimeout(ANSWER_S)
        return link


class Streams:
    """Connections to the ZMQ sockets that do not speak ZMTP, or speak it badly."""

    name = "zmtp"
    counter = "kvd_messages_refused_total"
    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
    READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    PER_CONNECTION = 20

    def __init__(self, target: Target, seed: int) -> None:
        self.make = Maker(seed)
        self.tally = Tally()
        daemon = target.daemon
        host, port = daemon.peers.removeprefix("tcp://").split(":")
        self._doors = [
            (socket.AF_INET, (host, int(port))),
            (socket.AF_UNIX, daemon.client.removeprefix("ipc://")),
            (socket.AF_UNIX, daemon.admin.removeprefix("ipc://")),
        ]
        self.again()

    def again(self) -> None:
        self._idle = [self._connected(number) for number in range(IDLE_CONNECTIONS)]
        for number, one in enumerate(self._idle):
            one.send(self.GREETING[: number * 2 + 1])

    def storm(self, count: int) -> None:
        sent = 0
        while sent < count:
            frames = [self._frame() for _ in range(min(self.PER_CONNECTION, count - sent))]
            sent += len(frames)
            self.tally.frames += len(frames)
            self._talk(sent, b"".join(frames))

    def calm(self) -> None:
        for one in self._idle:
            one.close()
        # Who wants another mechanism is left waiting, and not heard: that it has hung up is seen
        # when its time is up.
        time.sleep(BOUNDS.refused_s + SWEPT_S)

    def _frame(self) -> bytes:
        """A ZMTP frame: flags, length, body; each of them may lie."""
        rng = self.make.rng
        body = self.make.noise()
        flags = rng.choice((0, 0, 0, 1, 4, 2, 3, 6, 7, 8, 255))
        if flags & 2:
            length = rng.choice((len(body), len(body), 2**24, 2**31, 2**63 - 1, 2**64 - 1))
            return bytes([flags]) + length.to_bytes(8, "big") + body
        return bytes([flags, rng.choice((len(body) % 256, len(body) % 256, 255))]) + body

    def _talk(self, number: int, frames: bytes) -> None:
        rng = self.make.rng
        ready = bytes([4, len(self.READY)]) + self.READY
        begin = self.GREETING + ready
        match rng.randrange(5):
            case 0:
                begin = self.make.damaged(begin)
            case 1:
                begin = self.GREETING + self.make.damaged(ready)
            case 2:
                begin = b""
        with self._connected(number) as link:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                link.sendall(begin + frames)
            if rng.random() < 0.3:
                with contextlib.suppress(OSError):
                    self.tally.answered += bool(link.recv(4096))

    def _connected(self, number: int) -> socket.socket:
        family, address = self._doors[number % len(self._doors)]
        link = socket.socket(family, socket.SOCK_STREAM)
        link.settimeout(ANSWER_S)
        link.connect(address)
        return link
