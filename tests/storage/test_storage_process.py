"""Real storage processes over real files: what is written comes back, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kvd.core.inputs import Demoted
from kvd.storage.orders import ObjectPart, Searched
from kvd.storage.sizes import object_bytes
from kvd.transfer.process import TransportDown
from tests.storage.site import KIB, LAYER_FIRST, PAGE_FIRST, SCALES, key
from tests.support.disks import protect, small_disk, unmount

SHAPES = {
    "page first": ({"kv": PAGE_FIRST}, (ObjectPart("kv"),)),
    "layer first": ({"kv": LAYER_FIRST}, (ObjectPart("kv"),)),
    "with scales": (
        {"kv": LAYER_FIRST, "scale": SCALES},
        (ObjectPart("kv"), ObjectPart("scale", 2)),
    ),
    "two shards": ({"kv": PAGE_FIRST, "kv#1": PAGE_FIRST}, (ObjectPart("kv"), ObjectPart("kv#1"))),
}
SIZE = object_bytes(64 * KIB)


@pytest.mark.parametrize("shape", SHAPES)
async def test_pages_come_back_as_they_were_over_any_other_pages(make, shape):
    site = make(*SHAPES[shape])
    await site.start()
    keys, pages = [key(n) for n in range(16)], list(range(1, 17))
    were = [site.page(page) for page in pages]

    demoted = await site.demote(keys, pages)
    promoted = await site.promote(keys, [32 - n for n in range(16)])

    assert demoted.written == tuple(range(16))
    assert (demoted.why, promoted.why, promoted.bad) == ("", "", ())
    assert demoted.n_bytes == promoted.n_bytes == sum(map(len, were))
    assert [site.page(32 - n) for n in range(16)] == were
    assert [site.page(page) for page in pages] == were


async def test_an_object_is_one_file_of_a_size_that_is_known(site):
    await site.demote([key(1), key(2)], [1, 2])

    assert [path.stat().st_size for path in site.files()] == [SIZE, SIZE]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in site.files())
    assert site.directory.stat().st_mode & 0o777 == 0o700


async def test_an_order_of_many_batches_is_answered_once_and_whole(site):
    numbers = list(range(500))
    pages = [1 + n % 32 for n in numbers]

    demoted = await site.demote([key(n) for n in numbers], pages)
    promoted = await site.promote([key(n) for n in numbers[:32]], pages[:32])

    assert demoted.written == tuple(numbers)
    assert len(site.heard(Demoted)) == 1
    assert promoted.bad == ()
    assert len(site.files()) == 500


async def test_what_moves_keeps_to_its_rate_each_way(make):
    """Pages of 64 KiB at 2 MiB a second: what one order takes is waited for by the next."""

    site = make(max_rate=2**21)
    await site.start()
    keys = [key(number) for number in range(30)]
    before = [site.page(page) for page in range(1, 31)]

    began_s = time.monotonic()
    for first in range(0, 30, 10):
        assert len((await site.demote(keys[first : first + 10], [*range(1, 11)])).written) == 10
    wrote_s = time.monotonic()
    for first in range(0, 30, 10):
        assert not (await site.promote(keys[first : first + 10], [*range(11, 21)])).bad
    read_s = time.monotonic()

    least_s = 20 * 2**16 / 2**21
    assert wrote_s - began_s > least_s
    assert read_s - wrote_s > least_s
    assert [site.page(page) for page in range(11, 21)] == before[:10]


async def test_orders_of_nothing_are_answered(site):
    assert (await site.demote([], [])).written == ()
    assert (await site.promote([], [])).bad == ()


@pytest.mark.parametrize(
    ("keys", "pages", "why"),
    [
        ([key(1)], [33], "page 33 is no page of the pool"),
        ([key(1)], [0], "page 0 is no page of the pool"),
        ([key(1)], [-1], "page -1 is no page of the pool"),
        ([key(1), key(2)], [1], "2 keys for 1 pages"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused_whole(site, keys, pages, why):
    demoted, promoted = await site.demote(keys, pages), await site.promote(keys, pages)

    assert (demoted.written, demoted.why) == ((), why)
    assert (promoted.bad, promoted.why) == (tuple(range(len(keys))), why)
    assert site.files() == []


# ---- what lies there -----------------------------------------------------------------------------


async def test_the_next_process_finds_what_lies_there_the_oldest_used_first(site):
    for number in (1, 2, 3):
        await site.demote([key(number)], [number])
        await asyncio.sleep(0.02)
    were = [site.page(number) for number in (1, 2, 3)]
    await site.promote([key(1)], [10])
    await site.stop()

    await site.start()
    promoted = await site.promote([key(1), key(2), key(3)], [20, 21, 22])

    assert site.found() == [("n", key(2)), ("n", key(3)), ("n", key(1))]
    assert promoted.bad == ()
    assert [site.page(page) for page in (20, 21, 22)] == were


NAMESPACES = ["", "n", "..", "a/b", "llama#x@3", "writing", "=", "ß" * 256, "x" * 199, "x" * 200]


async def test_namespaces_are_kept_apart_and_found_by_their_names(site):
    for number, namespace in enumerate(NAMESPACES):
        await site.demote([key(7)], [number + 1], namespace)
    dropped = {"a/b", "ß" * 256}
    for namespace in dropped:
        site.drop_namespace(namespace)
    were = {name: site.page(n + 1) for n, name in enumerate(NAMESPACES)}
    await site.demote([], [])  # behind what was dropped
    await site.stop()

    await site.start()

    left = set(NAMESPACES) - dropped
    assert {name for name, _ in site.found()} == left
    for name in left:
        assert (await site.promote([key(7)], [30], name)).bad == ()
        assert site.page(30) == were[name]


async def test_what_is_dropped_is_gone_before_what_is_ordered_after_it(site):
    await site.demote([key(n) for n in range(8)], list(range(1, 9)))

    site.drop([key(n) for n in range(4)])
    await site.demote([key(100)], [1])

    left = {path.name for path in site.files()}
    assert left == {key(n).hex() for n in (4, 5, 6, 7, 100)}
    assert (await site.promote([key(0), key(4)], [1, 2])).bad == (0,)


async def test_what_is_no_object_of_this_pool_is_removed_and_counted(make):
    site, other = make(), make(layout="another")
    await site.start()
    await site.demote([key(n) for n in range(5)], list(range(1, 6)))
    await site.stop()
    first, second = site.files()[:2]
    os.truncate(first, SIZE - 1)
    second.rename(second.parent / ("ab" * 20 if second.name[:2] != "ab" else "cd" * 20))
    (second.parent / "notes").write_text("x")

    await site.start()
    told = site.heard(Searched)[0]
    await site.stop()
    await other.start()

    assert told.removed == 3
    assert len(site.found()) == 3
    assert other.found() == []
    assert other.heard(Searched)[0].removed == 1
    assert "is of a pool with another layout" in other.heard(Searched)[0].why
    assert other.files() == []


# ---- disks ---------------------------------------------------------------------------------------


async def test_a_file_that_may_not_grow_is_named_and_leaves_nothing(site):
    resource.prlimit(site.process.pid, resource.RLIMIT_FSIZE, (SIZE - 1, SIZE - 1))

    demoted = await site.demote([key(1), key(2)], [1, 2])

    assert demoted.written == ()
    assert demoted.why == f"{site.directory}: File too large"
    left = {path.name for path in site.directory.rglob("*") if path.is_file()}
    assert left == {"lock", "kvd-tier"}


@pytest.fixture
def disk(tmp_path):
    """A file system with room for ten objects and a little."""
    with small_disk(tmp_path / "disk", 10 * SIZE + 2**16) as place:
        yield place


async def test_a_full_disk_is_named_and_what_lies_there_stays_good(make, disk):
    site = make(directory=disk / "tier")
    await site.start()
    keys = [key(n) for n in range(16)]

    demoted = await site.demote(keys, list(range(1, 17)))
    n_written = len(demoted.written)
    over = [17 + n for n in range(n_written)]
    promoted = await site.promote([keys[n] for n in demoted.written], over)
    site.drop([keys[n] for n in demoted.written[:2]])
    again = await site.demote(keys[14:], [15, 16])

    assert 8 <= n_written <= 10
    assert demoted.why == f"{site.directory}: No space left on device"
    assert promoted.bad == ()
    assert [site.page(page) for page in over] == [site.page(1 + n) for n in demoted.written]
    assert again.written == (0, 1)


async def test_a_disk_that_may_not_be_written_is_named_and_still_read(make, disk):
    site = make(directory=disk / "tier")
    await site.start()
    await site.demote([key(1)], [1])
    protect(disk)
    demoted = await site.demote([key(2)], [2])
    promoted = await site.promote([key(1)], [3])
    unmount(disk)

    assert demoted.why == f"{site.directory}: Read-only file system"
    assert promoted.bad == ()
    assert site.page(3) == site.page(1)


FAILING = """
import os, sys
import numpy as np
from kvd.storage.backend import StorageLost
from kvd.storage.nixl_files import FileMove, FileQueue
from kvd.transfer.nixl import Binding, MemorySpan
memory = np.zeros(8192, np.uint8)
address = memory.ctypes.data
shape = (np.array([0], np.uint64), np.array([8192], np.uint64))
binding = Binding()
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT)
move = [FileMove(fd, np.array([address], np.uint64))]
for do in (FileQueue.write, FileQueue.read):
    try:
        do(FileQueue(binding, do.__name__, [MemorySpan(address, 8192)], shape), move)
    except StorageLost as lost:
        print(lost)
"""


def test_what_nixl_says_of_a_failure_is_the_end_of_what_is_believed(tmp_path):
    """A file that may not be written, and one that is short: NIXL has no reason to give."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING, tmp_path / "file"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(line.startswith("NIXL's POSIX backend failed: nixl") for line in said)


# ---- whose directory it is -----------------------------------------------------------------------


async def test_a_directory_is_of_one_process(site, make):
    other = make()

    with pytest.raises(TransportDown, match="is in use by another process"):
        await other.start()

    assert not site.exits


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda path: path.chmod(0o755), "with mode 0755, and pages of prompts are for user"),
        (lambda path: (path / "mine").write_text("x"), "has 'mine' in it and is no tier of kvd"),
    ],
)
async def test_a_directory_that_is_not_for_pages_is_left_alone(make, tmp_path, prepare, why):
    (tmp_path / "tier").mkdir(mode=0o700)
    prepare(tmp_path / "tier")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(TransportDown, match=why):
        await make().start()

    assert sorted(tmp_path.rglob("*")) == before


async def test_a_directory_that_cannot_be_made_is_named(make, tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(TransportDown, match="cannot be used: Not a directory"):
        await make(directory=tmp_path / "file" / "tier").start()


# ---- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03, 0.1])
async def test_a_process_that_is_killed_leaves_whole_objects_or_none(site, after_s):
    numbers = {key(n): n for n in range(800)}
    site.order_demote(list(numbers), [1 + n % 32 for n in range(800)])
    await asyncio.sleep(after_s)
    os.kill(site.process.pid, signal.SIGKILL)
    await site.until(lambda: site.exits)

    await site.start()

    found = [one for _, one in site.found()]
    assert not list((site.directory / site.layout / "writing").iterdir())
    pages = [1 + numbers[one] % 32 for one in found]
    before = [site.page(page) for page in range(1, 33)]
    # Each over the page that it was made of, which stays as it is where what is read is right.
    for at in range(0, len(found), 32):
        assert (await site.promote(found[at : at + 32], pages[at : at + 32])).bad == ()
    assert [site.page(page) for page in range(1, 33)] == before


async def test_a_process_that_hangs_is_reaped_and_writes_nothing_any_more(site):
    keys = [key(n) for n in range(32)]
    await site.demote(keys, list(range(1, 33)))
    for _ in range(20):
        site.order_promote(keys, list(range(1, 33)))
    os.kill(site.process.pid, signal.SIGSTOP)

    await site.stop()
    region = site.regions[0].bytes
    region[:] = 7
    await asyncio.sleep(0.1)

    assert (region == 7).all()
    await site.start()
    assert len(site.found()) == 32


async def test_the_end_of_the_directory_of_its_layout_is_no_end_of_the_process(site):
    await site.demote([key(1)], [1])
    shutil.rmtree(site.directory / site.layout)

    promoted = await site.promote([key(1)], [2])
    demoted = await site.demote([key(2)], [1])

    assert promoted.why.endswith("it is not there")
    assert (demoted.written, demoted.why) == ((0,), "")
    assert not site.exits


async def test_of_one_order_the_first_is_found_as_the_last_one_used_also_where_it_was_read(site):
    keys = [key(n) for n in range(300)]
    pages = [1 + n % 32 for n in range(300)]
    await site.demote(keys, pages)
    await site.promote(keys[:32], pages[:32])

    await site.stop()
    await site.start()

    assert [found for _, found in site.found()] == [*keys[:31:-1], *keys[31::-1]]


async def test_what_a_stop_comes_to_later_is_found_as_used_before(site):
    await site.demote([key(n) for n in range(4)], [1, 2, 3, 4])
    await site.demote([key(4), key(5)], [5, 6], behind=1)
    site.age([key(2), key(3), key(9)], behind=3)
    await site.demote([key(6)], [7], behind=5)

    await site.stop()
    await site.start()

    coldest_first = [1, 0, 6, 3, 2, 5, 4]
    assert [found for _, found in site.found()] == [key(n) for n in coldest_first]


async def test_what_the_kernel_has_not_cached_comes_back_as_it_was(site):
    keys, pages = [key(n) for n in range(32)], list(range(1, 33))
    were = [site.page(page) for page in pages]
    await site.demote(keys, pages)
    for path in site.files():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    promoted = await site.promote(keys, pages[::-1])

    assert promoted.bad == ()
    assert [site.page(page) for page in pages[::-1]] == were
