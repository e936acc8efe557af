"""Handshakes with peers that fail: counted by reason, and told now and then with what to do.

A stranger can make handshakes fail as often as it likes: each is counted, one in ten seconds of a
reason is told, and nothing is kept of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvd.core.inputs import HandshakeFailed
from kvd.core.peers.registry import BY_ADDRESS
from kvd.zmtp.events import ConnectionFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.curve import PeerKeys
    from kvd.daemon.reactor import Reactor
    from kvd.zmtp.events import ConnectionClosed

TELL_EVERY_S: Final = 10.0

UNKNOWN_KEY: Final = "unknown-key"
WRONG_SERVER_KEY: Final = "wrong-server-key"
NO_CURVE: Final = "no-curve"
CUT_SHORT: Final = "cut-short"
CROWDED: Final = "crowded"
MALFORMED: Final = "malformed"
REFUSED: Final = "refused"
UNREACHABLE: Final = "unreachable"
NO_KEY: Final = "no-key"

TELL_AFTER_S: Final = 5.0
"""A daemon that restarts is not there for moments: that is told of who stays away."""


class Handshakes:
    """Takes those that fail. ``count`` takes the reason of each."""

    def __init__(
        self, reactor: Reactor, keys: PeerKeys | None, count: Callable[[str], None]
    ) -> None:
        self._reactor = reactor
        self._keys = keys
        self._count = count
        self._told_s: dict[tuple[str, str], float] = {}
        """When a reason was told last, by its link."""
        self._times: Counter[tuple[str, str]] = Counter()
        """How often it has happened since."""
        self._away: dict[str, tuple[str, float]] = {}
        """Why nobody is reached on a link, and since when; told ones have been away for ever."""

    def dialed_us(self, address: str, closed: ConnectionClosed) -> None:
        """Somebody at ``address`` came, and got no further."""
        match closed.fault:
            case ConnectionFault.UNKNOWN_KEY:
                reason = UNKNOWN_KEY
                why = (
                    f"a client at {address} has a key that is not in peers.keys of this node: list "
                    "it under its node's name and kvd reload, or find out who it is"
                )
            case ConnectionFault.WRONG_SERVER_KEY:
                reason = WRONG_SERVER_KEY
                why = (
                    f"{address} dials this node with another public key than its own: peers.keys "
                    "there"
                )
            case ConnectionFault.MECHANISM:
                reason = NO_CURVE
                why = f"{address} dials this node without keys: set peers.secret_key_file there"
                if self._keys is None:
                    why = f"{address} dials this node with keys: set peers.secret_key_file here too"
            case ConnectionFault.HUNG_UP | ConnectionFault.TOO_SLOW:
                reason = CUT_SHORT
                why = f"{address} connected to peers.listen and hung up or was silent"
                if closed.fault is ConnectionFault.TOO_SLOW:
                    why += ", or the network is too slow"
            case ConnectionFault.CROWDED:
                reason = CROWDED
                why = (
                    f"too many connect to peers.listen at once: {address} and others of the oldest "
                    "were hung up on; find out who connects and says nothing"
                )
            case _:
                reason = MALFORMED
                why = f"{address} does not speak ZMTP 3 to peers.listen: {closed.why}"
        self._failed("", address, reason, why)

    def dialed_them(self, link: str, name: str, address: str, closed: ConnectionClosed) -> None:
        """Whom we dialed ended it, or we did."""
        keys = self._keys
        if closed.fault is ConnectionFault.MECHANISM:
            reason = NO_CURVE
            why = f"{name} at {address} has no key: set peers.secret_key_file there"
            if keys is None:
                why = f"{name} at {address} wants keys: set peers.secret_key_file and peers.keys"
        elif closed.fault is ConnectionFault.TOO_SLOW:
            reason = CUT_SHORT
            why = (
                f"{address} takes the connection and does not end the handshake: is it the kvd of "
                f"{name}, and is it or the network overloaded?"
            )
        elif keys is None:
            reason, why = CUT_SHORT, f"{address} hangs up or is silent: is it the kvd of {name}?"
        else:
            reason = REFUSED
            is_nameless = name == address  # an engine gave that alone
            who = address if is_nameless else f"{name} at {address}"
            its = "in peers.keys" if is_nameless else f"that of peers.keys.{name}"
            why = (
                f"{who} ends the handshake: the key {keys.own.public} of this node must be in its "
                f"peers.keys, and its own must be {its} here"
            )
        self._failed(link, address, reason, why)

    def without_key(self, link: str, name: str, address: str) -> None:
        """An engine named a node at an address, and nobody could prove to be that one."""
        why = f"the key of {name} is not in peers.keys of this node, so {address} is not dialed"
        self._failed(link, address, NO_KEY, why)

    def not_reached(self, link: str, name: str, address: str, why: str) -> None:
        """Nobody takes a connection; ``why`` empty: somebody does again. Told once for a reason."""
        if not why:
            self._away.pop(link, None)
            return
        self._count(UNREACHABLE)
        now_s = self._reactor.clock()
        before, since_s = self._away.get(link, ("", now_s))
        is_told = since_s == float("inf")
        if before != why and is_told:
            since_s, is_told = now_s - TELL_AFTER_S, False
        self._away[link] = (why, since_s)
        # An engine that gave the address waits now, and not for long.
        is_by_address = link.startswith(BY_ADDRESS)
        if is_told or now_s - since_s < (0.0 if is_by_address else TELL_AFTER_S):
            return
        self._away[link] = (why, float("inf"))
        place = address if is_by_address else f"peers.connect.{name}"
        self._reactor.feed(
            HandshakeFailed(
                at_s=now_s,
                link=link,
                address=address,
                reason=UNREACHABLE,
                why=f"{why}: is kvd up there, and is {place} its address?",
                times=1,
            )
        )

    def _failed(self, link: str, address: str, reason: str, why: str) -> None:
        """Count it; tell it unless the same was told a moment ago."""
        self._count(reason)
        key, now_s = (link, reason), self._reactor.clock()
        self._times[key] += 1
        if now_s - self._told_s.get(key, float("-inf")) < TELL_EVERY_S:
            return
        # By link and reason, and not by address: a stranger has any number of those, and few of
        # these.
        self._told_s[key], times = now_s, self._times.pop(key)
        self._reactor.feed(
            HandshakeFailed(
                at_s=now_s, link=link, address=address, reason=reason, why=why, times=times
            )
        )
