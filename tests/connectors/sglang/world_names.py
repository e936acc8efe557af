"""Names of pages as SGLang makes them; needs nothing, so that any Python can read it."""

from __future__ import annotations

import hashlib


def names_of(count: int, seed: str = "a", before: str = "") -> list[str]:
    """A chain of hashes, each over the one before it."""
    found = []
    for number in range(count):
        before = hashlib.sha256(f"{before} {seed} {number}".encode()).hexdigest()
        found.append(before)
    return found
