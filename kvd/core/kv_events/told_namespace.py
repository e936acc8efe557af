"""What routers are told of a namespace: where its blocks begin, its adapter and its salt.

What must not live here: which namespaces are told of (``announcer``).
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvd.core.cache.namespaces import MEMBER, name_in
from kvd.core.kv_events.block_names import root_name

_LORA: Final = "lora="
_SALT: Final = "salt="
_DIGEST_CHARS: Final = 24
_HEX: Final = frozenset("0123456789abcdef")


class ToldNamespace(msgspec.Struct, frozen=True):
    """What a router is told of a namespace; ``root`` is the name of what is before its blocks."""

    root: int
    lora_name: str
    salt: str


def told_namespace(key: str) -> ToldNamespace:
    """The same by what stands behind the ``#``, as connectors put it: ``lora=...;salt=...``.

    A connector puts a digest of its weights behind an adapter's name, and a router has the name.
    """
    found = {_LORA: "", _SALT: ""}
    for member in name_in(key).partition(MEMBER)[2].split(";"):
        for word in found:
            if member.startswith(word):
                found[word] = member.removeprefix(word)
    name, dash, digest = found[_LORA].rpartition("-")
    is_digest = bool(dash and name) and len(digest) == _DIGEST_CHARS and _HEX.issuperset(digest)
    return ToldNamespace(
        root=root_name(key),
        lora_name=name if is_digest else found[_LORA],
        salt=found[_SALT],
    )
