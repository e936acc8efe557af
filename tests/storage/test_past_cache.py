"""Pages that are not in the kernel's page cache: they come past it, and are what they were."""

from __future__ import annotations

import os

import pytest

from kvd.storage.orders import ObjectPart
from kvd.storage.posix import reads_past_cache
from kvd.storage.sizes import BLOCK_BYTES, HEAD_BYTES
from tests.storage.site import LAYER_FIRST, PAGE_FIRST, SCALES, key

KEYS = [key(n) for n in range(16)]


@pytest.fixture(autouse=True)
def _on_a_disk(tmp_path):
    if not reads_past_cache(str(tmp_path / "trial")):
        pytest.skip("the file system of tests reads nothing past the page cache")
    assert not (tmp_path / "trial").exists()


def cached_blocks(path):
    """Which blocks of a file the kernel has in its page cache; looking brings none there."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        found = []
        for at in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
            try:
                os.preadv(file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT)
                found.append(at)
            except BlockingIOError:
                os.posix_fadvise(file.fileno(), at, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        return found


def cool(path):
    """Put a file out of the page cache."""
    with open(path, "rb+", buffering=0) as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize(
    ("shapes", "parts", "is_past_cache"),
    [
        ({"kv": PAGE_FIRST}, (ObjectPart("kv"),), True),
        ({"kv": LAYER_FIRST}, (ObjectPart("kv"),), True),
        ({"kv": LAYER_FIRST, "scale": SCALES}, (ObjectPart("kv"), ObjectPart("scale", 2)), False),
    ],
)
async def test_a_page_that_is_nowhere_in_memory_comes_past_the_cache(
    make, shapes, parts, is_past_cache
):
    site = make(shapes, parts)
    await site.start()
    pages = list(range(1, 17))
    were = [site.page(page) for page in pages]
    await site.demote(KEYS, pages)
    for path in site.files():
        cool(path)
    cold, warm = site.files()[:8], site.files()[8:]
    for path in warm:
        path.read_bytes()

    promoted = await site.promote(KEYS, [32 - n for n in range(16)])

    assert (promoted.why, promoted.bad) == ("", ())
    assert [site.page(32 - n) for n in range(16)] == were
    assert all(bool(cached_blocks(path)) is not is_past_cache for path in cold)
    assert all(cached_blocks(path)[:2] == [0, HEAD_BYTES] for path in warm)

    again = await site.promote(KEYS, pages)
    assert (again.why, again.bad) == ("", ())
    assert [site.page(page) for page in pages] == were


async def test_what_lies_is_found_out_where_it_comes_past_the_cache(site):
    await site.demote(KEYS[:3], [1, 2, 3])
    short, flipped, head = (site.file(one, "n") for one in KEYS[:3])
    os.truncate(short, HEAD_BYTES + BLOCK_BYTES)
    for path, at in ((flipped, HEAD_BYTES + 100), (head, 40)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    for path in site.files():
        cool(path)

    promoted = await site.promote(KEYS[:3], [4, 5, 6])

    assert sorted(promoted.bad) == [0, 1, 2]
