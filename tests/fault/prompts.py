"""Prompts that share prefixes, and what every page of them must hold.

The bytes of a page follow from the namespace, the tokens of the page and all tokens before it, so a
page that belongs to another prompt, another place or another namespace is wrong, and so is a torn
one. A page is compared by its digest.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.errors import KvdError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvd.client import Node

PAGE_TOKENS = 16
SHAPE = {
    "pool.layers": "4",
    "pool.heads": "2",
    "pool.head_dim": "64",
    "pool.pages": "257",
    "pool.huge_pages": "off",
}
"""32 KiB a page, page first: the bytes of a page are one block."""

TEAR = 0x5A
FAMILIES = 6
TRUNK_PAGES = 8
NAMESPACES = ("", "lora-7")


class Prompt(msgspec.Struct, frozen=True):
    """A prompt by name: a trunk that its family shares up to ``trunk``, then tokens of its own."""

    family: int
    trunk: int
    own: int
    branch: int
    namespace: str = ""

    def tokens(self) -> NDArray[np.int32]:
        shared = _draw(("trunk", self.family), TRUNK_PAGES * PAGE_TOKENS)[: self.trunk]
        return np.concatenate([shared, _draw(("own", self.family, self.branch), self.own)])


def choose_prompt(source: random.Random, most_pages: int = 16) -> Prompt:
    """A prompt of 1 to ``most_pages`` pages; some come again, most share a prefix."""
    most = most_pages * PAGE_TOKENS
    trunk = source.choice([0, 3, 5, 8]) * PAGE_TOKENS + source.choice([0, 0, 7])
    trunk = min(trunk, TRUNK_PAGES * PAGE_TOKENS, most - PAGE_TOKENS)
    return Prompt(
        family=source.randrange(FAMILIES),
        trunk=trunk,
        own=source.randint(1, most - trunk),
        branch=source.randrange(40) if source.random() < 0.3 else source.randrange(2**31),
        namespace=source.choice(NAMESPACES),
    )


def page_keys(namespace: str, tokens: NDArray[np.int32]) -> list[bytes]:
    """What determines each page, in order."""
    key = hashlib.blake2b(namespace.encode(), digest_size=16).digest()
    keys = []
    for start in range(0, len(tokens), PAGE_TOKENS):
        here = tokens[start : start + PAGE_TOKENS].tobytes()
        key = hashlib.blake2b(key + here, digest_size=16).digest()
        keys.append(key)
    return keys


class Memory:
    """The pool of one session as rows of bytes, a row a page."""

    def __init__(self, node: Node, *, is_kept: bool = False) -> None:
        """``is_kept``: it outlives its daemon, so what is leased stays ours while that is away."""
        pool = node.pool("main")
        part = pool.memory.components[0]
        assert pool.memory.order == "page_first"
        whole = pool._mapping(part).bytes[: part.pages * part.page_bytes]
        self.rows = whole.reshape(part.pages, part.page_bytes)
        self._connection = node._port.connection
        self._is_kept = is_kept

    def check_ours(self) -> None:
        """An engine that has left its session has no pages: it must not write, nor believe any.

        Raises:
            KvdError: as every call of that session does now.
        """
        why_not = self._connection.end or (None if self._is_kept else self._connection.away)
        if why_not is not None:
            raise KvdError(why_not)

    def write(self, page: int, key: bytes) -> None:
        """What the page of ``key`` must hold."""
        self.check_ours()
        row = self.rows[page]
        row[:] = np.frombuffer(_content(key, len(row)), np.uint8)

    def tear(self, page: int) -> None:
        """Change its second half, while it may be being sent."""
        self.check_ours()
        row = self.rows[page]
        row[len(row) // 2 :] ^= TEAR

    def wrong(self, pages: Iterable[int], keys: Iterable[bytes]) -> list[int]:
        """Places in ``pages`` whose bytes are not what their key asks for, by digest."""
        self.check_ours()
        return [
            place
            for place, (page, key) in enumerate(zip(pages, keys, strict=False))
            if _digest(self.rows[page].tobytes()) != _wanted(key, self.rows.shape[1])
        ]

    def is_torn_whole(self, page: int, key: bytes) -> bool:
        """Whether it holds exactly what ``tear`` leaves.

        It was changed before it was read, so what was sent is what came: kvd cannot know better.
        """
        row = np.frombuffer(_content(key, self.rows.shape[1]), np.uint8).copy()
        row[len(row) // 2 :] ^= TEAR
        return bool((self.rows[page] == row).all())


@functools.lru_cache(maxsize=4096)
def _wanted(key: bytes, size: int) -> bytes:
    return _digest(_content(key, size))


@functools.lru_cache(maxsize=512)
def _content(key: bytes, size: int) -> bytes:
    return hashlib.shake_128(key).digest(size)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@functools.lru_cache(maxsize=256)
def _draw(name: tuple[str | int, ...], count: int) -> NDArray[np.int32]:
    seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest())
    return np.random.default_rng(seed).integers(1, 2**31 - 1, count, dtype=np.int32)
