"""What a page is called in a tier: by everything that decides its bytes, and by nothing else.

    key of a root    blake2b-160(layout of the pool, namespace as the tree has it)
    key of a page    blake2b-160(key of the page before it, the page's tokens)

So a key names its page by the layout, the namespace with its epoch, and all tokens from the start
of the prompt to the end of the page. Nothing of it is of a process, a node, or a pool's size:
another daemon of the same layout comes to the same keys.

What must not live here: which keys lie where (``index``).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from kvd.core.layout.spec import fingerprint

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec

KEY_BYTES: Final = 20
"""Of one key; several are one behind the other in ``bytes``."""


def layout_digest(spec: PoolSpec) -> bytes:
    """Stands for what pages of such a pool are: in no two layouts do their bytes mean the same."""
    return blake2b(fingerprint(spec).encode(), digest_size=KEY_BYTES).digest()


def root_key(layout: bytes, namespace: str) -> bytes:
    """What stands before the first page of a namespace; ``layout`` is the ``layout_digest``."""
    return blake2b(layout + namespace.encode(), digest_size=KEY_BYTES).digest()


def next_key(before: bytes, page_tokens: bytes) -> bytes:
    """The key of the page that follows the one of key ``before``."""
    return blake2b(before + page_tokens, digest_size=KEY_BYTES).digest()


def keys_along(before: bytes, tokens: bytes, page_bytes: int) -> list[bytes]:
    """The keys of all whole pages of ``tokens``, which follow the page of key ``before``."""
    found = []
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        before = blake2b(
            before + tokens[start : start + page_bytes], digest_size=KEY_BYTES
        ).digest()
        found.append(before)
    return found


def each_key(keys: bytes) -> list[bytes]:
    """Keys that follow each other, one by one."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
