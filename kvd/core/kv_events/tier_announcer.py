"""Says which blocks lie in the tiers of this node alone, once each, as ``announcer`` of the pool.

A tier knows its objects by keys, and routers want tokens. So what is written or read is noted here
with its tokens, for as long as it lies there; what lay there when this daemon began is told of when
it is first used. A store that nodes share is no node's own: nobody is told of it.

    written, read     noted ─┬─ the one before it is told, or there is none ─> told
                             └─ else it waits for that one
    removed           told of, if it was told

What must not live here: when something is written, read or removed (``tiers``).

Invariant: what is told lies in a tier, and was told behind one that was told.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.effects import BlocksRemoved, BlocksStored
from kvd.core.kv_events.block_names import NAME_BYTES, NO_BLOCK, last_name, names_along
from kvd.core.kv_events.told_namespace import ToldNamespace
from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.core.outbox import Outbox

STORAGE: Final = "STORAGE"
"""What routers call it, wherever it is."""


class TierBlock(msgspec.Struct, frozen=True):
    """One object, as routers know it; some 300 bytes."""

    before_key: bytes
    """Of the object before it; empty at the beginning of a prompt."""
    before: int
    name: bytes
    tokens: Tokens
    namespace: ToldNamespace


@mypyc_attr(allow_interpreted_subclasses=True)
class TierAnnouncer:
    """What lies in the tiers, as far as its tokens are known, and what of it was told."""

    __slots__ = ("_known", "_orphans", "_out", "_page_bytes", "_told", "_untold")

    def __init__(self, page_bytes: int, out: Outbox) -> None:
        self._known: dict[bytes, TierBlock] = {}
        """By key."""
        self._told: set[bytes] = set()
        self._orphans: dict[bytes, list[bytes]] = {}
        """By the key that they wait for."""
        self._untold: deque[bytes] = deque()
        """To be told once more, from tick to tick."""
        self._page_bytes = page_bytes
        self._out = out

    @property
    def is_pending(self) -> bool:
        """Whether a tick has something to tell."""
        return bool(self._untold)

    @property
    def told_blocks(self) -> int:
        """Blocks that consumers know to be there."""
        return len(self._told)

    def note(
        self, namespace: ToldNamespace, tokens: Tokens, keys: Sequence[bytes], before_key: bytes
    ) -> None:
        """Objects of these keys lie there: the last pages of ``tokens``, a prompt from its start.

        ``before_key``: of the object that the first of them follows, there or not.
        """
        if all(key in self._known for key in keys):
            return
        size = self._page_bytes
        first = len(tokens) // size - len(keys)
        names = names_along(namespace.root, tokens, size)
        for at, key in enumerate(keys, first):
            if key not in self._known:
                self._known[key] = TierBlock(
                    before_key=before_key if at else b"",
                    before=last_name(names[: at * NAME_BYTES]) if at else NO_BLOCK,
                    name=names[at * NAME_BYTES : (at + 1) * NAME_BYTES],
                    tokens=Tokens(tokens[at * size : (at + 1) * size]),
                    namespace=namespace,
                )
                self._tell(key)
            before_key = key

    def left(self, keys: Iterable[bytes]) -> None:
        """These are not there any more."""
        known, told = self._known, self._told
        names = []
        for key in keys:
            block = known.pop(key, None)
            if block is not None and key in told:
                told.discard(key)
                names.append(block.name)
        if names:
            self._out.effects.append(BlocksRemoved(STORAGE, b"".join(names)))

    def tell_all(self) -> None:
        """Consumers know nothing: all of it is told from tick to tick."""
        self._told = set()
        self._orphans = {}
        self._untold = deque(self._known)

    def tick(self, most_tokens: int) -> None:
        """Tell what waits, up to so many tokens."""
        untold = self._untold
        while untold and most_tokens > 0:
            most_tokens -= self._tell(untold.popleft())

    def _tell(self, key: bytes) -> int:
        """Tell of it, and of what waits for that; how many tokens that was."""
        known, told, n_bytes = self._known, self._told, 0
        ready = [key]
        while ready:
            key = ready.pop()
            block = known.get(key)
            if block is None or key in told:
                continue
            before = block.before_key
            if before and before not in told:
                self._orphans.setdefault(before, []).append(key)
                continue
            told.add(key)
            n_bytes += len(block.tokens)
            self._out.effects.append(
                BlocksStored(
                    medium=STORAGE,
                    before=block.before,
                    names=block.name,
                    tokens=block.tokens,
                    lora_name=block.namespace.lora_name,
                    salt=block.namespace.salt,
                )
            )
            ready += self._orphans.pop(key, ())
        return n_bytes // ID_BYTES
