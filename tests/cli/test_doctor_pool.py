"""``kvd doctor``: where the pool's memory is to lie, on file systems made for it."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import pytest

from kvd.cli.doctor import host, memory
from kvd.cli.doctor.finding import Severity
from tests.cli.inchild import in_child, nobody, subject, write

if TYPE_CHECKING:
    from pathlib import Path

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG
CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x44000
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")


def mounted(folder: Path, size: str):
    """Goes on in a mount namespace where ``folder`` is a tmpfs of ``size``."""

    def mount() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        assert libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
        data = f"size={size},mode=0700".encode()
        assert libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, data) == 0

    return mount


def kept(folder: Path, *sets: str):
    return subject(
        "pool.backing=shm",
        f"pool.directory={folder}",
        f"sockets.client=ipc://{folder}/../c.sock",
        *sets,
    )


def test_anon_is_good_and_says_that_the_cache_ends_with_the_daemon():
    [finding] = memory.backing(subject())

    assert (finding.severity, finding.what) == (
        GOOD,
        "anon: the cache ends with the daemon (shm would keep it)",
    )


@root_only
def test_a_tmpfs_with_room_is_good_and_one_without_is_wrong_with_what_to_type(tmp_path):
    folder = tmp_path / "pool"
    folder.mkdir()
    enough = in_child(mounted(folder, "256m"), memory.backing, kept(folder))
    little = in_child(mounted(folder, "32m"), memory.backing, kept(folder))
    just = in_child(mounted(folder, "68m"), memory.backing, kept(folder))

    assert enough["pool memory"].severity is GOOD
    assert enough["pool memory"].what == f"shm in {folder}: 68.0 MiB of 256.0 MiB free"
    assert little["pool memory"].severity is WRONG
    assert little["pool memory"].fix.startswith(f"mount -o remount,size=1G {folder}")
    assert just["pool memory"].severity is POOR


@root_only
def test_a_pool_that_is_there_counts_as_room(tmp_path):
    folder = tmp_path / "pool"
    folder.mkdir()

    def with_pool() -> None:
        mounted(folder, "96m")()
        with (folder / "kvd.kv").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 64 * 2**20)

    found = in_child(with_pool, memory.backing, kept(folder))

    assert found["pool memory"].severity is GOOD
    assert "64.0 MiB of it taken by a pool that is there" in found["pool memory"].what


@root_only
@pytest.mark.parametrize(
    ("mode", "owner", "said", "fix"),
    [
        (0o777, 0, "others could put files there", "chmod 0700 "),
        (0o700, 65534, "belongs to uid 65534", "chown 0 "),
    ],
)
def test_a_directory_of_others_is_wrong(tmp_path, mode, owner, said, fix):
    folder = tmp_path / "pool"
    folder.mkdir()

    def spoil() -> None:
        mounted(folder, "256m")()
        folder.chmod(mode)
        os.chown(folder, owner, -1)

    found = in_child(spoil, memory.backing, kept(folder))

    assert found["pool memory"].severity is WRONG
    assert said in found["pool memory"].what
    assert found["pool memory"].fix.startswith(fix)


def test_a_directory_on_a_disk_is_wrong_for_files_in_memory(tmp_path):
    kind = memory.kind_of(tmp_path.stat().st_dev)
    if kind == "tmpfs":
        pytest.skip("temporary files are in memory here")

    [finding] = memory.backing(kept(tmp_path))

    assert finding.severity is WRONG
    assert finding.what == f"{tmp_path} lies on {kind}, and pool.backing = shm wants tmpfs"


def test_a_symbolic_link_is_wrong(tmp_path):
    (tmp_path / "link").symlink_to("/dev/shm")

    [finding] = memory.backing(kept(tmp_path / "link"))

    assert finding.severity is WRONG
    assert "symbolic link" in finding.what


@root_only
def test_a_directory_that_the_user_cannot_make_is_wrong(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()

    def spoil() -> None:
        mounted(folder, "256m")()
        tmp_path.chmod(0o755)
        folder.chmod(0o755)
        nobody()

    found = in_child(spoil, memory.backing, kept(folder / "pool"))

    assert found["pool memory"].severity is WRONG
    assert found["pool memory"].fix.startswith(("install -d -m 0700",))


def test_a_store_needs_systemd(tmp_path):
    [without] = memory.backing(subject("pool.backing=fdstore", root=tmp_path))
    write(tmp_path, run__systemd__system__here="")
    [having] = memory.backing(subject("pool.backing=fdstore", root=tmp_path))

    assert (without.severity, having.severity) == (WRONG, GOOD)
    assert "pool.backing = 'shm'" in without.fix


def test_huge_pages_that_were_not_set_apart_are_wrong():
    found = memory.backing(subject("pool.backing=hugetlbfs", "pool.size=1TiB"))

    assert found[0].severity is WRONG
    assert "hugepages" in found[0].fix
    assert host.huge_pages(subject("pool.backing=hugetlbfs"))[0].severity is GOOD
