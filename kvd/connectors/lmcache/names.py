"""What LMCache calls an object, as a namespace and keys of pages.

Everything that tells objects apart is in one of the two: whose KV it is and how it lies in the
namespace, which tokens in the keys. Two objects with one name have the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from typing import Final

import msgspec

from kvd.client import Code
from kvd.connectors.identity import MEMBER, digest_of, plain
from kvd.connectors.refusals import refused_here

logger = logging.getLogger("kvd.connectors.lmcache")

MODEL_CHARS: Final = 160

TESTED: Final = ("0.5.6", "0.5.7")
"""Releases of LMCache that were run, as the how-to says; of the last one a candidate."""


def release_of(version: str) -> str:
    """The one that it is, or becomes: without what follows its three numbers."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found.group() if found else version


def check_version(version: str, *, any_version: bool) -> None:
    """Whether this LMCache may be used.

    Raises:
        KvdError: ``not-supported``: it was not run, and its user has not said to try it.
    """
    if release_of(version) in TESTED:
        return
    why = f"LMCache {version}: kvd's tier was tested with {', '.join(TESTED)}"
    if not any_version:
        more = '; set "any_version": true in adapter_params to try it'
        raise refused_here(Code.NOT_SUPPORTED, why + more)
    logger.warning("kvd: %s; it is tried, since any_version says so", why)


class ChunkName(msgspec.Struct, frozen=True):
    """One object of LMCache's.

    ``chunk``: the hash of its tokens and of all before them. ``rank``: of how many it is, and which
    part of the KV. ``group``: of layers. ``layout``: shapes and types, in words.
    """

    chunk: bytes
    model: str
    rank: int
    group: int
    salt: str
    layout: str
    n_bytes: int


class Naming(msgspec.Struct, frozen=True):
    """What objects of this server have in common.

    ``packing``: who lays out their bytes, and how chunks are hashed. ``weights``, ``partition``: as
    the user tells apart what LMCache calls by one name.
    """

    packing: str
    weights: str = ""
    partition: str = ""

    def namespace(self, name: ChunkName) -> str:
        """Whose KV it is; what stands before the first ``#`` has an epoch."""
        return _namespace(
            self, name.model, name.rank, name.group, name.salt, name.layout, name.n_bytes
        )


@functools.lru_cache(maxsize=1024)
def _namespace(
    naming: Naming, model: str, rank: int, group: int, salt: str, layout: str, n_bytes: int
) -> str:
    """Kept, since the objects of a call have one mostly: to make it takes as long as to ask."""
    parts = {
        **msgspec.structs.asdict(naming),
        "model": model,
        "rank": rank,
        "group": group,
        "salt": salt,
        "layout": layout,
        "n_bytes": n_bytes,
    }
    digest = digest_of(json.dumps(parts, sort_keys=True))
    return f"lmcache:{plain(model, MODEL_CHARS)}{MEMBER}{digest}"


def page_keys(name: ChunkName, n_pages: int) -> list[bytes]:
    """Of the pages of an object, in order."""
    return [
        hashlib.sha256(page.to_bytes(8, "big") + name.chunk).digest() for page in range(n_pages)
    ]
