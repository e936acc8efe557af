"""ZMTP 3.1 as bytes, right and wrong, without a library: greetings, commands, frames, CURVE."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

MORE, LONG, COMMAND = 1, 2, 4
ANSWER_S = 2.0


def connected(endpoint: str, *, source: str = "") -> socket.socket:
    """A plain stream to where ZMQ listens."""
    address = urlsplit(endpoint)
    if address.scheme == "ipc":
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(ANSWER_S)
        raw.connect(address.path)
    else:
        raw = socket.socket()
        raw.settimeout(ANSWER_S)
        if source:
            raw.bind((source, 0))
        raw.connect((address.hostname, address.port))
    return raw


def reset(raw: socket.socket) -> None:
    """Close it so that the other end reads a reset."""
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def greeting(
    mechanism: bytes = b"NULL", version: bytes = b"\x03\x01", *, as_server: bool = False
) -> bytes:
    """The 64 bytes that a connection begins with."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + version + mechanism.ljust(20, b"\0")[:20] + bytes([as_server]) + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame; a long one where it must be."""
    if len(body) > 255 or flags & LONG:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def announced(length: int, flags: int = 0) -> bytes:
    """The head of a frame that is said to be so long."""
    return bytes([flags | LONG]) + struct.pack(">Q", length)


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, COMMAND)


def properties(*pairs: tuple[bytes, bytes]) -> bytes:
    """As READY and INITIATE carry them."""
    return b"".join(
        bytes([len(name) % 256]) + name + struct.pack(">I", len(value)) + value
        for name, value in pairs
    )


def ready(identity: bytes | None = b"", kind: bytes = b"DEALER") -> bytes:
    """The handshake of NULL; ``None``: it names no identity."""
    pairs = [(b"Socket-Type", kind)]
    if identity is not None:
        pairs.append((b"Identity", identity))
    return command(b"READY", properties(*pairs))


def hear(raw: socket.socket, at_least: int = 1, within_s: float = ANSWER_S) -> bytes:
    """So many bytes, or what came until it ended or time was up."""
    found = b""
    raw.settimeout(within_s)
    with contextlib.suppress(OSError):
        while len(found) < at_least:
            more = raw.recv(65_536)
            if not more:
                break
            found += more
    return found


class Keys(NamedTuple):
    """A pair of curve25519, raw."""

    public: bytes
    secret: bytes


class Sodium:
    """The four functions of NaCl that CURVE needs, from whichever libsodium is installed."""

    def __init__(self) -> None:
        places = [importlib.util.find_spec(name) for name in ("zmq", "nacl")]
        roots = [Path(one.origin).parents[1] for one in places if one and one.origin]
        found = [path for root in roots for path in root.glob("*.libs/libsodium*")]
        if not found:
            raise RuntimeError("no libsodium beside pyzmq: the sieges of CURVE need one")
        self._library = ctypes.CDLL(str(found[0]))

    def pair(self) -> Keys:
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        self._library.crypto_box_keypair(public, secret)
        return Keys(public.raw, secret.raw)

    def box(self, what: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        """Box[what](secret -> public)."""
        out = ctypes.create_string_buffer(len(what) + 16)
        length = ctypes.c_ulonglong(len(what))
        self._library.crypto_box_easy(out, what, length, nonce, public, secret)
        return out.raw

    def unbox(self, what: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        """The opposite; raises ``ValueError`` where it is no box of theirs."""
        out = ctypes.create_string_buffer(max(1, len(what) - 16))
        length = ctypes.c_ulonglong(len(what))
        if self._library.crypto_box_open_easy(out, what, length, nonce, public, secret):
            raise ValueError("no box of theirs")
        return out.raw[: len(what) - 16]


class Curve:
    """The client's side of one CURVE connection, step by step, so that each can be done wrong."""

    def __init__(self, sodium: Sodium, server: bytes, own: Keys) -> None:
        self._sodium = sodium
        self._server = server
        self._own = own
        self._passing = sodium.pair()
        self._counter = 0
        self.cookie = b""
        self._theirs = b""

    def hello(self) -> bytes:
        """The body of HELLO, without its name: 194 bytes."""
        nonce = self._nonce()
        boxed = self._sodium.box(
            bytes(64), b"CurveZMQHELLO---" + nonce, self._server, self._passing.secret
        )
        return b"\x01\x00" + bytes(72) + self._passing.public + nonce + boxed

    def take_welcome(self, body: bytes) -> None:
        """What follows the name WELCOME."""
        nonce = b"WELCOME-" + body[:16]
        found = self._sodium.unbox(body[16:], nonce, self._server, self._passing.secret)
        self._theirs, self.cookie = found[:32], found[32:]

    def initiate(self, told: bytes) -> bytes:
        """The body of INITIATE with these properties."""
        long_nonce = os.urandom(16)
        vouch = self._sodium.box(
            self._passing.public + self._server,
            b"VOUCH---" + long_nonce,
            self._theirs,
            self._own.secret,
        )
        nonce = self._nonce()
        boxed = self._sodium.box(
            self._own.public + long_nonce + vouch + told,
            b"CurveZMQINITIATE" + nonce,
            self._theirs,
            self._passing.secret,
        )
        return self.cookie + nonce + boxed

    def message(self, body: bytes, flags: int = 0) -> bytes:
        nonce = self._nonce()
        prefix = b"CurveZMQMESSAGEC" + nonce
        boxed = self._sodium.box(bytes([flags]) + body, prefix, self._theirs, self._passing.secret)
        return nonce + boxed

    def _nonce(self) -> bytes:
        self._counter += 1
        return struct.pack(">Q", self._counter)


def shaken(raw: socket.socket, curve: Curve, identity: bytes = b"") -> bool:
    """Greet and go through the handshake of CURVE; whether the server said READY."""
    raw.sendall(greeting(b"CURVE") + command(b"HELLO", curve.hello()))
    said = hear(raw, 64 + 170)
    if len(said) < 64 + 170:
        return False
    curve.take_welcome(said[64 + 2 + 8 :][:160])
    told = properties((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    raw.sendall(command(b"INITIATE", curve.initiate(told)))
    return b"\x05READY" in hear(raw)
