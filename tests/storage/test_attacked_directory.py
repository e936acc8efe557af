"""What somebody does to the directory of a tier under the process that serves it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from kvd.storage.objects import LONGEST_NAME, escaped
from kvd.storage.orders import Searched
from kvd.transfer.process import TransportDown
from tests.storage.site import Site, key
from tests.support.disks import protect, small_disk, unmount

if TYPE_CHECKING:
    from pathlib import Path

LONG = "n" * LONGEST_NAME
SOON_S = 5.0


def directories(site: Site) -> set[str]:
    """Below that of the layout."""
    root = site.directory / site.layout
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()}


# ---- what is left where nothing lies -------------------------------------------------------------


async def test_a_directory_goes_with_the_last_object_in_it(site):
    """Namespaces come and go: what each leaves would fill a disk that has a bound."""
    namespaces = ["a", "b", LONG]
    for namespace in namespaces:
        await site.demote([key(1), key(2)], [1, 2], namespace)

    for namespace in namespaces:
        site.drop([key(1)], namespace)
    await site.demote([key(3)], [3], "other")
    left = directories(site)
    for namespace in namespaces:
        site.drop([key(2)], namespace)
    site.drop([key(3)], "other")
    await site.demote([], [])

    assert {escaped(name) for name in namespaces} < left
    assert directories(site) == {"writing"}


async def test_what_is_found_to_be_bad_leaves_no_directory_either(site):
    await site.demote([key(1)], [1], LONG)
    os.truncate(next(site.directory.rglob(key(1).hex())), 100)

    promoted = await site.promote([key(1)], [2], LONG)

    assert promoted.bad == (0,)
    assert directories(site) == {"writing"}


async def test_a_namespace_of_a_long_name_without_an_object_is_gone_at_the_next_start(site):
    await site.demote([key(1)], [1], LONG)
    next(site.directory.rglob(key(1).hex())).unlink()
    await site.stop()

    await site.start()

    assert directories(site) == {"writing"}


async def test_the_name_of_a_namespace_is_written_once(site):
    """Who dies, or has no room, while it is written would lose all objects of it."""
    await site.demote([key(1)], [1], LONG)
    (name,) = site.directory.rglob("namespace")
    before = name.stat()

    await site.demote([key(n) for n in range(2, 12)], [*range(2, 12)], LONG)

    assert (name.stat().st_ino, name.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# ---- what is in the place of an object -----------------------------------------------------------


def _listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a name of a socket is short
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(path.name)
    os.chdir(here)


def _full(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("x")


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        os.mkdir,
        _full,
        _listening,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.write_bytes(b""),
        lambda path: os.link(path.parents[3] / "kvd-tier", path),
    ],
)
async def test_what_is_no_file_is_bad_at_once_and_written_anew(site, put):
    keys = [key(1), key(2), key(3)]
    await site.demote(keys, [1, 2, 3])
    path = site.file(keys[1], "n")
    path.unlink()
    put(path)

    promoted = await asyncio.wait_for(site.promote(keys, [4, 5, 6]), SOON_S)
    again = await site.demote(keys[1:2], [2])
    found = await site.promote(keys, [7, 8, 9])

    assert promoted.bad == (1,)
    assert (again.written, again.why, found.bad) == ((0,), "", ())
    assert [site.page(page) for page in (7, 8, 9)] == [site.page(page) for page in (1, 2, 3)]


async def test_a_device_is_bad_at_once(site):
    await site.demote([key(1)], [1])
    path = site.file(key(1), "n")
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this user makes no devices")

    promoted = await asyncio.wait_for(site.promote([key(1)], [4]), SOON_S)

    assert promoted.bad == (0,)
    assert not path.exists()


# ---- what is in the place of a directory ---------------------------------------------------------


async def test_a_directory_that_somebody_removed_is_made_again(site):
    await site.demote([key(1), key(2)], [1, 2])
    shutil.rmtree(site.file(key(1), "n").parents[1])

    again = await site.demote([key(1), key(2)], [1, 2])

    assert (again.written, again.why) == ((0, 1), "")
    assert (await site.promote([key(1)], [3])).bad == ()


@pytest.mark.parametrize("above", [0, 1])
async def test_a_file_in_the_place_of_a_directory_goes_at_the_next_start(site, above):
    await site.demote([key(1)], [1])
    place = site.file(key(1), "n").parents[above]
    shutil.rmtree(place)
    place.write_text("mine")
    await site.stop()

    await site.start()
    again = await site.demote([key(1)], [1])

    assert site.heard(Searched)[0].removed == 1
    assert (again.written, again.why) == ((0,), "")


@pytest.mark.parametrize("above", [0, 1])
async def test_nothing_is_removed_behind_a_link_in_the_place_of_a_directory(site, tmp_path, above):
    """Somebody has moved it elsewhere, or it is an attack: what is there is not ours."""
    await site.demote([key(1)], [1])
    place, elsewhere = site.file(key(1), "n").parents[above], tmp_path / "elsewhere"
    place.rename(elsewhere)
    (elsewhere / "ssh").mkdir()
    (elsewhere / "ssh" / "key").write_text("mine")
    (elsewhere / "notes").write_text("mine")
    place.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    await site.stop()

    await site.start()

    assert site.found() == []
    assert sorted(elsewhere.rglob("*")) == before
    assert not place.is_symlink()


async def test_a_layout_that_is_a_link_is_left_and_told(make, site, tmp_path):
    await site.stop()
    elsewhere = tmp_path / "elsewhere"
    (site.directory / site.layout).rename(elsewhere)
    (elsewhere / "notes").write_text("mine")
    (site.directory / site.layout).symlink_to(elsewhere)

    with pytest.raises(TransportDown, match=f"{site.layout} is no directory"):
        await site.start()

    assert (elsewhere / "notes").exists()


async def test_names_that_are_no_text_are_removed(site):
    await site.demote([key(1)], [1])
    root, inner = site.directory / site.layout, site.file(key(1), "n").parent
    os.mkdir(os.fsencode(root) + b"/=\xff\xfe")
    (root / ("=" + "%FF")).mkdir()
    os.mkdir(os.fsencode(root) + b"/\xff")
    os.mknod(os.fsencode(inner) + b"/\xff\xfe")
    await site.stop()

    await site.start()

    assert site.found() == [("n", key(1))]
    assert site.heard(Searched)[0].removed == 4
    assert directories(site) == {"writing", "=n", f"=n/{inner.name}"}


# ---- the whole directory -------------------------------------------------------------------------


def _moved(site: Site) -> None:
    site.directory.rename(site.directory.with_name("moved"))


def _replaced(site: Site) -> None:
    _moved(site)
    shutil.copytree(site.directory.with_name("moved"), site.directory)


def _unlocked(site: Site) -> None:
    (site.directory / "lock").unlink()


def _emptied(site: Site) -> None:
    """As ``rm -rf DIRECTORY/*``, which comes to the last files when more is written again."""
    (site.directory / "kvd-tier").unlink()
    (site.directory / "lock").unlink()


@pytest.mark.parametrize(
    "how", [lambda site: shutil.rmtree(site.directory), _moved, _replaced, _unlocked, _emptied]
)
@pytest.mark.parametrize("is_read", [False, True])
async def test_a_process_whose_directory_is_another_one_ends_and_says_why(site, how, is_read):
    """It has the lock of what is not there any more: another daemon may have the next one."""
    keys = [key(n) for n in range(4)]
    await site.demote(keys, [1, 2, 3, 4])
    how(site)

    if is_read:
        site.order_promote(keys, [5, 6, 7, 8])
    else:
        site.order_demote([key(9)], [9])
    await site.until(lambda: site.exits)
    await site.start()

    assert "is another one than it was" in site.exits[0]
    assert (await site.demote([key(9)], [9])).written == (0,)
    assert (await site.promote([key(9)], [10])).bad == ()


async def test_nothing_of_another_daemons_directory_is_dropped(site):
    await site.demote([key(1)], [1])
    _replaced(site)

    site.drop([key(1)])
    site.drop_namespace("n")
    await site.until(lambda: site.exits)

    assert site.file(key(1), "n").exists() is True


# ---- what cannot be removed ----------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 2**22) as place:
        yield place


async def test_what_was_flushed_and_cannot_be_removed_stops_writing_until_it_can(make, disk):
    site = make(directory=disk / "tier")
    await site.start()
    await site.demote([key(1)], [1], "flushed")
    await site.demote([key(1)], [1], "kept")
    protect(disk)

    site.drop_namespace("flushed")
    refused = await site.demote([key(2)], [2], "kept")
    read = await site.promote([key(1)], [3], "kept")
    unmount(disk)
    again = await site.demote([key(2)], [2], "kept")
    await site.stop()
    await site.start()
    found = {namespace for namespace, _ in site.found()}
    await site.stop()

    assert refused.written == ()
    assert "=flushed cannot be removed: Read-only file system" in refused.why
    assert (read.bad, again.written) == ((), (0,))
    assert found == {"kept"}


async def test_what_should_have_made_room_and_cannot_be_removed_stops_writing(make, disk):
    """Else there is more than the bound."""
    site = make(directory=disk / "tier")
    await site.start()
    await site.demote([key(1), key(2)], [1, 2])
    await site.demote([key(1)], [1], "other")
    path = site.file(key(1), "n")
    protect(disk)
    site.drop([key(1)])
    await site.demote([], [])
    unmount(disk)

    again = await site.demote([key(3)], [3], "other")

    assert again.written == (0,)
    assert not path.exists()


async def test_a_flush_holds_from_its_first_moment(site):
    """Killed at any time within it, nothing of the namespace is found."""
    await site.demote([key(n) for n in range(1000)], [1 + n % 32 for n in range(1000)], "n")

    site.drop_namespace("n")
    await asyncio.to_thread(_until_gone, site.directory / site.layout / "=n")
    os.kill(site.process.pid, signal.SIGKILL)
    await site.until(lambda: site.exits)
    await site.start()

    assert site.found() == []
    assert directories(site) == {"writing"}


def _until_gone(path: Path) -> None:
    while path.exists():
        time.sleep(0)
