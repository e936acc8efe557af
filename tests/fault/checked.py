"""What an engine compares its pages with, and how it gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.client import KvdError
from tests.fault.prompts import Prompt, page_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.client import Lease
    from tests.fault.jobs import Known
    from tests.fault.prompts import Memory

    Tokens = NDArray[np.int32]

GONE = frozenset({"unreachable", "unknown-session", "shutting-down", "pool-changed"})


class Checked:
    """How many pages were looked at, and how many were wrong."""

    def __init__(self, *, may_be_torn: bool = False) -> None:
        self.pages = 0
        self.may_be_torn = may_be_torn
        self.wrong: list[str] = []

    def must_be_kept(self, lease: Lease) -> None:
        """A lease of before the restart is worth nothing where its pages are not kept."""
        if lease.record.lost is not None and not lease.record.is_kept:
            self.wrong.append(f"lease {lease.id} of before the restart is not kept")

    def look(self, memory: Memory, lease: Lease, keys: list[bytes], what: str) -> None:
        """Compare the pages of ``keys`` with what they must be."""
        pages = lease.pages.tolist()[: len(keys)]
        self.pages += len(keys)
        bad = memory.wrong(pages, keys)
        if bad and self.may_be_torn:
            bad = [place for place in bad if not memory.is_torn_whole(pages[place], keys[place])]
        if bad:
            where = ", ".join(f"place {place} page {pages[place]}" for place in bad)
            self.wrong.append(f"{what}: {where} of {len(keys)} pages, lease {lease.id}")


async def give_back(lease: Lease, *, commit: bool) -> None:
    """Release it; a session that is gone has released it."""
    try:
        await lease.release(() if commit else None)
    except KvdError as refused:
        if refused.code not in GONE:
            raise


def prompt_of(prompt: Prompt) -> tuple[Tokens, list[bytes]]:
    """Its tokens, and what determines each of its pages."""
    tokens = prompt.tokens()
    return tokens, page_keys(prompt.namespace, tokens)


def known_of(known: Known) -> tuple[Tokens, list[bytes]]:
    """The same, with what a room added to it."""
    tokens, keys = prompt_of(known.prompt)
    if known.grow:
        new = Prompt(known.prompt.family, 0, known.grow, known.room, "").tokens()
        return grown_of(known.prompt, tokens, new)
    return tokens, keys


def grown_of(prompt: Prompt, tokens: Tokens, new: Tokens) -> tuple[Tokens, list[bytes]]:
    """The same, with ``new`` after its own ``tokens``."""
    whole = np.concatenate([tokens, new])
    return whole, page_keys(prompt.namespace, whole)
