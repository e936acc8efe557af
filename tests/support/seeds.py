"""Which seeds a random test runs, and how a failure says which one it was."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_range(default: str) -> tuple[int, int]:
    """The first, and the one behind the last: ``KVD_SEEDS=first:last``, or these."""
    first, last = os.environ.get("KVD_SEEDS", default).split(":")
    return int(first), int(last)


@contextmanager
def repeatable(seed: int, file: str, test: str = "") -> Iterator[None]:
    """What fails in here says how it is repeated, with ``-k test`` where that is named."""
    try:
        yield
    except BaseException as error:
        which = f" -k {test}" if test else ""
        again = f"python -m pytest -q {os.path.relpath(file)}{which}"
        error.add_note(f"seed {seed}: KVD_SEEDS={seed}:{seed + 1} {again}")
        raise
