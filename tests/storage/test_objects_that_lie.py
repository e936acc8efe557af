"""Objects that are not as they say are named and removed, and none is ever used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.storage.sizes import HEAD_BYTES, object_bytes
from tests.storage.site import KIB, Site, key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = object_bytes(64 * KIB)
KEYS = [key(n) for n in range(6)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def serving() -> AsyncIterator[Site]:
    """One that serves all tests; each has a namespace of its own."""
    with tempfile.TemporaryDirectory() as directory:
        site = Site(Path(directory) / "tier")
        await site.start()
        yield site
        await site.stop()
        site.close()


def _flip(path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _swap(one, other) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


BAD = {
    "gone": (lambda a, _: a.unlink(), "it is not there"),
    "empty": (lambda a, _: os.truncate(a, 0), "it ends after 0 bytes, within its head"),
    "short": (lambda a, _: os.truncate(a, SIZE - 4096), f"has {SIZE - 4096} bytes where {SIZE}"),
    "long": (lambda a, _: os.truncate(a, SIZE + 1), f"has {SIZE + 1} bytes where {SIZE}"),
    "head flipped": (lambda a, _: _flip(a, 20), "its head is damaged"),
    "another kind of file": (lambda a, _: _flip(a, 0), "does not begin as an object"),
    "another version": (lambda a, _: _flip(a, 4), "it is of version 0, and this kvd reads 1"),
    "first byte": (lambda a, _: _flip(a, HEAD_BYTES), "does not have the sum"),
    "last byte": (lambda a, _: _flip(a, SIZE - 1), "does not have the sum"),
    "swapped": (_swap, "under another name"),
    "page of another": (
        lambda a, b: a.write_bytes(a.read_bytes()[:HEAD_BYTES] + b.read_bytes()[HEAD_BYTES:]),
        "does not have the sum",
    ),
    "left as zeros": (
        lambda a, _: a.write_bytes(a.read_bytes()[:HEAD_BYTES] + bytes(SIZE - HEAD_BYTES)),
        "does not have the sum",
    ),
}
"""What happens to the first of two objects, and what is said of it."""


@pytest.mark.parametrize("what", BAD)
async def test_an_object_that_lies_is_named_and_removed_and_hurts_no_other(serving, what):
    site, (damage, why) = serving, BAD[what]
    await site.demote(KEYS, [1, 2, 3, 4, 5, 6], what)
    damage(site.file(KEYS[2], what), site.file(KEYS[3], what))

    promoted = await site.promote(KEYS, [11, 12, 13, 14, 15, 16], what)

    bad = {2, 3} if what == "swapped" else {2}
    assert set(promoted.bad) == bad
    assert promoted.why.startswith(f"object {KEYS[2].hex()[:12]}: ")
    assert why in promoted.why
    for n in set(range(6)) - bad:
        assert site.page(11 + n) == site.page(1 + n)
    left = {KEYS[n].hex() for n in set(range(6)) - bad}
    assert {path.name for path in site.files(what)} == left


async def test_what_is_known_to_be_wrong_by_its_head_is_not_read_into_the_pool(serving):
    site = serving
    await site.demote(KEYS[:2], [1, 2], "head")
    _swap(site.file(KEYS[0], "head"), site.file(KEYS[1], "head"))
    before = site.page(9)

    await site.promote(KEYS[:1], [9], "head")

    assert site.page(9) == before
