"""The mechanism CURVE (RFC 26): both sides prove long-term keys, frames are boxed by passing ones.

::

    client                                   server
    HELLO     C', Box[0](C' -> S)      -->
                                       <--   WELCOME   Box[S', cookie](S -> C')
    INITIATE  cookie, Box[C, vouch, properties](C' -> S')  -->
    vouch: Box[C', S](C -> S')
                                       <--   READY     Box[properties](S' -> C')
    MESSAGE   Box[flags, payload]      <-->

C and S are long-term, C' and S' of this connection alone. Nonces of a side only grow.

The cookie lets a server forget a client between WELCOME and INITIATE. Ours cannot: it holds the
connection. So its cookie is random bytes that it expects again; no secret of it leaves the process.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, ClassVar, Final

from nacl import bindings
from nacl.exceptions import CryptoError

from kvd.zmtp import frames
from kvd.zmtp.events import ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.mechanism import DEALER, ROUTER, malformed, met, own_properties, refused

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY: Final = 32
NONCE: Final = 8
LONG_NONCE: Final = 16
MAC: Final = 16
COOKIE: Final = 96

_HELLO_BOX: Final = MAC + 64
_HELLO: Final = 2 + 72 + KEY + NONCE + _HELLO_BOX
_WELCOME: Final = LONG_NONCE + MAC + KEY + COOKIE
_VOUCH: Final = LONG_NONCE + MAC + 2 * KEY
_INITIATE: Final = COOKIE + NONCE + MAC + KEY + _VOUCH
"""At least: properties follow."""
_READY: Final = NONCE + MAC

_MESSAGE: Final = b"\x07MESSAGE"
_BOX_AT: Final = len(_MESSAGE) + NONCE

BY_CLIENT: Final = b"CurveZMQMESSAGEC"
BY_SERVER: Final = b"CurveZMQMESSAGES"


class KeyRing:
    """Our own key, and the public keys that are let in, each with the name that it is listed by."""

    def __init__(self, secret: bytes, names: Mapping[bytes, str]) -> None:
        self.secret = secret
        self.public = bindings.crypto_scalarmult_base(secret)
        self.names = dict(names)


class _Boxes:
    """What both sides do alike: short-term keys, nonces that only grow, boxed frames."""

    name: ClassVar[bytes] = b"CURVE"
    overhead: ClassVar[int] = _BOX_AT + MAC + 1

    def __init__(self, out_prefix: bytes, in_prefix: bytes) -> None:
        self._out_prefix, self._in_prefix = out_prefix, in_prefix
        self._public, self._secret = b"", b""
        """Of this connection alone; made when the other side is worth it."""
        self._key = b""
        """Of both short-term keys."""
        self._sent = 0
        self._seen = 0

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(NONCE, "big")

    def _is_fresh(self, nonce: bytes) -> bool:
        number = int.from_bytes(nonce, "big")
        if number <= self._seen:
            return False
        self._seen = number
        return True

    def wrap(self, out: list[bytes], payload: bytes, flags: int) -> None:
        """As ``Mechanism``: every frame is a message of its own, its flags are in the box."""
        nonce = self._next_nonce()
        boxed = flags & frames.MORE | (frames.BOXED_COMMAND if flags & frames.COMMAND else 0)
        box = bindings.crypto_secretbox_easy(
            bytes((boxed,)) + payload, self._out_prefix + nonce, self._key
        )
        out.append(frames.header(_BOX_AT + len(box), 0) + _MESSAGE + nonce + box)

    def unwrap(self, body: bytes) -> bytes | ConnectionClosed:
        """As ``Mechanism``."""
        if len(body) < self.overhead or not body.startswith(_MESSAGE):
            return malformed("a frame that is no MESSAGE of CURVE")
        nonce = body[len(_MESSAGE) : _BOX_AT]
        if not self._is_fresh(nonce):
            return malformed("a MESSAGE whose nonce is not above the one before")
        plain = _open(body[_BOX_AT:], self._in_prefix + nonce, self._key)
        return malformed("a MESSAGE that does not open") if plain is None else plain


class CurveServer(_Boxes):
    """The side that holds a ring of listed keys."""

    def __init__(self, ring: KeyRing) -> None:
        super().__init__(BY_SERVER, BY_CLIENT)
        self.is_listening = True
        self._ring = ring
        self._their_public = b""
        self._cookie = b""
        self._is_over = False

    def begin(self) -> bytes:
        """As ``Mechanism``: a server waits."""
        return b""

    def take(self, name: bytes, body: bytes) -> bytes | HandshakeDone | ConnectionClosed:
        """As ``Mechanism``."""
        if name == b"HELLO" and not self._cookie:
            return self._welcome(body)
        if name == b"INITIATE" and self._cookie and not self._is_over:
            self._is_over = True
            return self._initiated(body)
        return malformed(f"{name[:20]!r} in its handshake")

    def _welcome(self, body: bytes) -> bytes | ConnectionClosed:
        if len(body) != _HELLO or body[:2] != b"\x01\x00":
            return malformed("a HELLO of another form")
        self._their_public = body[74 : 74 + KEY]
        nonce, box = body[-_HELLO_BOX - NONCE : -_HELLO_BOX], body[-_HELLO_BOX:]
        key = _shared(self._their_public, self._ring.secret)
        if key is None:
            return malformed("a HELLO with a key that is none")
        if _open(box, b"CurveZMQHELLO---" + nonce, key) is None:
            return ConnectionClosed(
                ConnectionFault.WRONG_SERVER_KEY, "its HELLO is boxed for another public key"
            )
        self._is_fresh(nonce)
        # Now, and not when it connected: whoever does not know whom it dials costs no keys.
        self._public, self._secret = bindings.crypto_box_keypair()
        self._cookie = secrets.token_bytes(COOKIE)
        fresh = secrets.token_bytes(LONG_NONCE)
        welcome = bindings.crypto_secretbox_easy(
            self._public + self._cookie, b"WELCOME-" + fresh, key
        )
        return frames.command(b"WELCOME", fresh + welcome)

    def _initiated(self, body: bytes) -> HandshakeDone | ConnectionClosed:
        """Whoever it is has its long-term key, which it vouches for; whether that one is listed."""
        if len(body) < _INITIATE or not hmac.compare_digest(body[:COOKIE], self._cookie):
            return malformed("an INITIATE without the cookie of its WELCOME")
        nonce = body[COOKIE : COOKIE + NONCE]
        key = _shared(self._their_public, self._secret)
        if key is None or not self._is_fresh(nonce):
            return malformed("an INITIATE whose nonce is not above the one before")
        plain = _open(body[COOKIE + NONCE :], b"CurveZMQINITIATE" + nonce, key)
        if plain is None:
            return malformed("an INITIATE that does not open")
        client, vouch, metadata = plain[:KEY], plain[KEY : KEY + _VOUCH], plain[KEY + _VOUCH :]
        proof = _shared(client, self._secret)
        said = proof and _open(vouch[LONG_NONCE:], b"VOUCH---" + vouch[:LONG_NONCE], proof)
        if said != self._their_public + self._ring.public:
            return malformed("a vouch that is not for this connection")
        name = self._ring.names.get(client)
        if name is None:
            return ConnectionClosed(ConnectionFault.UNKNOWN_KEY, "its key is not listed")
        self._key = key
        return met(ROUTER, metadata, name)

    def accept(self) -> bytes:
        """As ``Mechanism``."""
        nonce = self._next_nonce()
        box = bindings.crypto_secretbox_easy(
            own_properties(ROUTER, b""), b"CurveZMQREADY---" + nonce, self._key
        )
        return frames.command(b"READY", nonce + box)


class CurveClient(_Boxes):
    """The side that knows whom it dials."""

    def __init__(
        self, ring: KeyRing, server: bytes, socket_type: bytes = DEALER, routing_id: bytes = b""
    ) -> None:
        """``server``: the public key that must answer."""
        super().__init__(BY_CLIENT, BY_SERVER)
        self._public, self._secret = bindings.crypto_box_keypair()
        self.is_listening = False
        self._ring = ring
        self._server = server
        self._socket_type = socket_type
        self._properties = own_properties(socket_type, routing_id)
        self._hello_key = _shared(server, self._secret) or b""

    def begin(self) -> bytes:
        """As ``Mechanism``."""
        if not self._hello_key:  # no key that anybody can have: nothing we say would open
            return b""
        nonce = self._next_nonce()
        box = bindings.crypto_secretbox_easy(
            bytes(64), b"CurveZMQHELLO---" + nonce, self._hello_key
        )
        return frames.command(b"HELLO", b"\x01\x00" + bytes(72) + self._public + nonce + box)

    def take(self, name: bytes, body: bytes) -> bytes | HandshakeDone | ConnectionClosed:
        """As ``Mechanism``."""
        match name:
            case b"WELCOME" if not self._key:
                return self._initiate(body)
            case b"READY" if self._key:
                return self._ready(body)
            case b"ERROR":
                return refused(body)
            case _:
                return malformed(f"{name[:20]!r} in its handshake")

    def _initiate(self, body: bytes) -> bytes | ConnectionClosed:
        nonce = body[:LONG_NONCE]
        plain = None
        if len(body) == _WELCOME:
            plain = _open(body[LONG_NONCE:], b"WELCOME-" + nonce, self._hello_key)
        if plain is None:
            return malformed("a WELCOME that does not open")
        theirs, cookie = plain[:KEY], plain[KEY:]
        key, proof = _shared(theirs, self._secret), _shared(theirs, self._ring.secret)
        if key is None or proof is None:
            return malformed("a WELCOME with a key that is none")
        self._key = key
        fresh = secrets.token_bytes(LONG_NONCE)
        vouch = bindings.crypto_secretbox_easy(
            self._public + self._server, b"VOUCH---" + fresh, proof
        )
        short = self._next_nonce()
        box = bindings.crypto_secretbox_easy(
            self._ring.public + fresh + vouch + self._properties,
            b"CurveZMQINITIATE" + short,
            self._key,
        )
        return frames.command(b"INITIATE", cookie + short + box)

    def _ready(self, body: bytes) -> HandshakeDone | ConnectionClosed:
        nonce = body[:NONCE]
        if len(body) < _READY or not self._is_fresh(nonce):
            return malformed("a READY of another form")
        metadata = _open(body[NONCE:], b"CurveZMQREADY---" + nonce, self._key)
        if metadata is None:
            return malformed("a READY that does not open")
        return met(self._socket_type, metadata)

    def accept(self) -> bytes:
        """As ``Mechanism``: it has said everything."""
        return b""


def _shared(public: bytes, secret: bytes) -> bytes | None:
    """The key of a pair of keys; None where ``public`` is one of the few that prove nothing."""
    try:
        return bindings.crypto_box_beforenm(public, secret)
    except CryptoError:
        return None


def _open(box: bytes, nonce: bytes, key: bytes) -> bytes | None:
    """What is in a box of at least ``MAC`` bytes; None where it was not made with that key."""
    try:
        return bindings.crypto_secretbox_open_easy(box, nonce, key)
    except CryptoError:
        return None
