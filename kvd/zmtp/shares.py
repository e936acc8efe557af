"""What each key has of a listener: places, and bytes that are kept for it.

A *key* is whoever can be told apart from others: a listed public key, a session, a process, or an
address (``Listener`` says which). Connections cost nothing to open and frames nothing to begin, so
nothing here is decided between connections before it is decided between their keys: what one key
does takes nothing from another that has less.

Bytes have three bounds, and whoever is beyond one is hung up on::

    a key alone     above key_bytes its own heaviest connection goes
    all together    above total_bytes the heaviest connection of the heaviest key goes,
                    of those that have more than safe_bytes
    all are small   above total_bytes, and no key has more than safe_bytes: the connection for which
                    something has been kept longest goes

The last one is for many keys that each keep a little back. Whoever sends a message and goes on is
young; to make it the oldest, the others would have to send all of ``total_bytes`` while it sends
one message.

No input, no output, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd.zmtp.connection import ZmtpConnection


class Places:
    """Connections that may have to make place for others, by key; who came or spoke last is last.

    Of the key with most connections the first one is missed least. Of keys that have as many, the
    one whose first connection is the oldest.
    """

    def __init__(self) -> None:
        self._turn = 0
        """Counts who came and who spoke, so that connections of unlike keys compare."""
        self._key_of: dict[ZmtpConnection, str] = {}
        self._of_key: dict[str, dict[ZmtpConnection, int]] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, connection: ZmtpConnection) -> bool:
        return connection in self._key_of

    def add(self, connection: ZmtpConnection, key: str) -> None:
        """It has come, as one of ``key``."""
        self._turn += 1
        self._key_of[connection] = key
        self._of_key.setdefault(key, {})[connection] = self._turn

    def spoke(self, connection: ZmtpConnection) -> None:
        """It is the last of its key again; of no meaning where it is not here."""
        key = self._key_of.get(connection)
        if key is not None:
            self._turn += 1
            mine = self._of_key[key]
            del mine[connection]
            mine[connection] = self._turn

    def remove(self, connection: ZmtpConnection) -> bool:
        """It is over, or stays; whether it was here."""
        key = self._key_of.pop(connection, None)
        if key is None:
            return False
        mine = self._of_key[key]
        del mine[connection]
        if not mine:
            del self._of_key[key]
        return True

    def least_missed(self) -> ZmtpConnection | None:
        """Who makes place for the next."""
        if not self._of_key:
            return None
        crowd = max(self._of_key.values(), key=_crowding)
        return next(iter(crowd))


def _crowding(mine: dict[ZmtpConnection, int]) -> tuple[int, int]:
    return len(mine), -next(iter(mine.values()))


class KeptBytes:
    """What one key makes us keep, on ``connections``."""

    __slots__ = ("connections", "key", "weight")

    def __init__(self, key: str) -> None:
        self.key: Final = key
        self.weight = 0
        self.connections: set[ZmtpConnection] = set()


class Budget:
    """Bytes that are kept for connections, by key and in all. It never hangs up itself."""

    def __init__(self, *, key_bytes: int, safe_bytes: int, total_bytes: int) -> None:
        """``safe_bytes``: whoever has no more than that does not go for being the heaviest."""
        self.weight = 0
        self._key_bytes = key_bytes
        self._safe_bytes = safe_bytes
        self._total_bytes = total_bytes
        self._kept_of: dict[ZmtpConnection, KeptBytes] = {}
        self._by_key: dict[str, KeptBytes] = {}
        self._since: dict[ZmtpConnection, None] = {}
        """For whom something is kept; for whom it has been longest is first."""

    def add(self, connection: ZmtpConnection, key: str) -> None:
        """What is kept for it counts for ``key`` from now on."""
        kept = self._by_key.get(key)
        if kept is None:
            kept = self._by_key[key] = KeptBytes(key)
        kept.connections.add(connection)
        self._kept_of[connection] = kept
        self.weigh(connection, connection.weight, is_fresh=True)

    def remove(self, connection: ZmtpConnection) -> bool:
        """Nothing is kept for it any more, or it counts elsewhere; whether it was here."""
        kept = self._kept_of.get(connection)
        if kept is None:
            return False
        self.weigh(connection, -connection.weight, is_fresh=False)
        del self._kept_of[connection]
        self._since.pop(connection, None)
        kept.connections.discard(connection)
        if not kept.connections:
            del self._by_key[kept.key]
        return True

    def weigh(self, connection: ZmtpConnection, more: int, *, is_fresh: bool) -> bool:
        """``more`` bytes are kept for it, or fewer; ``is_fresh``: those that are, since just now.

        Of a connection that is not here, of no meaning: what a handshake keeps has its own bound.

        Returns:
            whether somebody is ``beyond`` now.
        """
        kept = self._kept_of.get(connection)
        if kept is None:
            return False
        kept.weight += more
        self.weight += more
        if is_fresh or not connection.weight:
            self._since.pop(connection, None)
        if connection.weight:
            self._since.setdefault(connection)
        return kept.weight > self._key_bytes or self.weight > self._total_bytes

    def beyond(self, connection: ZmtpConnection) -> tuple[ZmtpConnection, str] | None:
        """Who is to go now that ``connection`` weighs what it does, and why; None: nobody."""
        kept = self._kept_of.get(connection)
        if kept is not None and kept.weight > self._key_bytes:
            return _heaviest(kept.connections), (
                f"{kept.weight} bytes were kept for {kept.key}, {self._key_bytes} are for each"
            )
        if self.weight <= self._total_bytes:
            return None
        why = f"{self.weight} bytes were kept for {len(self._by_key)} together"
        heaviest = max(self._by_key.values(), key=_weight_of)
        if heaviest.weight > self._safe_bytes:
            return _heaviest(heaviest.connections), (
                f"{why}, {heaviest.weight} of them for {heaviest.key}"
            )
        return next(iter(self._since)), f"{why}, and for nobody longer than for it"


def _weight_of(kept: KeptBytes | ZmtpConnection) -> int:
    return kept.weight


def _heaviest(connections: set[ZmtpConnection]) -> ZmtpConnection:
    return max(connections, key=_weight_of)
