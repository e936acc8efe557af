"""Pools that outlive their daemon: found as they were left, or made, and never half of each."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.core.layout.geometry import geometry
from kvd.core.layout.spec import PageOrder
from kvd.pools import memory as memory_of_pools
from kvd.pools.arena import HUGE_PAGE_BYTES, SEALS, NotReserved
from kvd.pools.file_memory import LOCK_NAME, open_directory
from kvd.pools.location import Backing, PoolLocation, own_name
from kvd.pools.memory import DaemonMemory, MemoryOrigin, open_memory
from tests.pools.keeping import (
    ANON,
    JOURNAL_BYTES,
    KV,
    LARGER,
    STORE,
    at,
    content,
    opened,
    shm_directory,
    spec,
    written,
)
from tests.support.descriptors import none_left

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def directory() -> Iterator[Path]:
    with shm_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    with none_left():
        yield


def kept(directory: Path) -> dict[str, int]:
    """The files and what they take."""
    return {path.name: path.stat().st_blocks * 512 for path in sorted(directory.iterdir())}


SMALL = {"kvd.journal": HUGE_PAGE_BYTES, "kvd.kv": HUGE_PAGE_BYTES, "kvd.lock": 0}
LARGE = {**SMALL, "kvd.kv": 2 * HUGE_PAGE_BYTES}


# ---- files ---------------------------------------------------------------------------------------


def test_files_are_made_whole_and_zero_and_closed_to_others(directory: Path) -> None:
    with opened(at(directory), saved=3) as memory:
        assert (memory.origin, memory.reason) == (
            MemoryOrigin.MADE,
            f"made in {directory}: there was none",
        )
        assert [(one.name, one.geometry, one.is_pool) for one in memory.placed] == [
            ("kv", geometry(KV, pages=10, order=PageOrder.PAGE_FIRST), True),
            ("kv.saved", geometry(KV, pages=3, order=PageOrder.PAGE_FIRST), False),
        ]
        assert content(memory.placed[0].arena, 9) == (bytes(9), bytes(9))
        saved = os.readlink(f"/proc/self/fd/{memory.placed[1].arena.fd}")

    assert kept(directory) == SMALL
    assert {path.stat().st_mode & 0o7777 for path in directory.iterdir()} == {0o600}
    assert saved.startswith("/memfd:")


def test_the_next_daemon_finds_every_byte_and_says_so(directory: Path) -> None:
    with opened(at(directory), saved=3) as memory:
        written(memory.placed[0].arena, b"pages")
        assert memory.journal is not None
        written(memory.journal, b"table")
        inode = os.fstat(memory.placed[0].arena.fd).st_ino

    with opened(at(directory), saved=5) as memory:
        assert (memory.origin, memory.reason) == (MemoryOrigin.FOUND, f"found in {directory}")
        assert content(memory.placed[0].arena, 5) == (b"pages", b"pages")
        assert memory.journal is not None
        assert content(memory.journal, 5) == (b"table", b"table")
        assert os.fstat(memory.placed[0].arena.fd).st_ino == inode


def test_found_memory_is_known_again_and_renewed_memory_is_not(directory: Path) -> None:
    with opened(at(directory)) as memory:
        first = memory.identity
    with opened(at(directory), saved=3) as memory:
        found = memory.identity
        old = os.dup(memory.placed[0].arena.fd)  # or the number of its file may be given again
        memory.renew("its journal has another layout")
        renewed = memory.identity
        os.close(old)

    assert len(first) == 16
    assert found == first
    assert renewed != first


def test_found_memory_is_no_second_time_taken_from_the_host(directory: Path) -> None:
    """What is there already need not fit beside itself."""
    with opened(at(directory), pages=LARGER):
        pass
    before = kept(directory)

    with opened(at(directory), pages=LARGER) as memory:
        assert memory.origin is MemoryOrigin.FOUND

    assert kept(directory) == before == LARGE


def resize(directory: Path) -> None:
    os.truncate(directory / "kvd.kv", 2 * HUGE_PAGE_BYTES)


def open_to_others(directory: Path) -> None:
    (directory / "kvd.kv").chmod(0o620)


def link_twice(directory: Path) -> None:
    os.link(directory / "kvd.kv", directory / "other")


def exchange_for_a_link(directory: Path) -> None:
    (directory / "kvd.kv").rename(directory / "elsewhere")
    (directory / "kvd.kv").symlink_to(directory / "elsewhere")


def exchange_for_a_pipe(directory: Path) -> None:
    (directory / "kvd.kv").unlink()
    os.mkfifo(directory / "kvd.kv", 0o600)


def truncate_and_regrow(directory: Path) -> None:
    os.truncate(directory / "kvd.kv", 4096)
    os.truncate(directory / "kvd.kv", HUGE_PAGE_BYTES)


def lose_the_journal(directory: Path) -> None:
    (directory / "kvd.journal").unlink()


def lose_the_pages(directory: Path) -> None:
    (directory / "kvd.kv").unlink()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (resize, "kvd.kv has 4 MiB where 2 MiB are needed"),
        (open_to_others, "kvd.kv has mode 0620 where 0600 keeps others out"),
        (link_twice, "kvd.kv has 2 names"),
        (exchange_for_a_link, "kvd.kv is no regular file"),
        (exchange_for_a_pipe, "kvd.kv is no regular file"),
        (truncate_and_regrow, "kvd.kv has lost 2 MiB of its 2 MiB"),
        (lose_the_journal, "kvd.journal is missing"),
        (lose_the_pages, "kvd.kv is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_is_replaced_as_a_whole_and_why_is_said(
    directory: Path, spoil: object, why: str
) -> None:
    with opened(at(directory)) as memory:
        written(memory.placed[0].arena, b"old")
        assert memory.journal is not None
        written(memory.journal, b"old")
    assert callable(spoil)
    spoil(directory)

    with opened(at(directory)) as memory:
        assert (memory.origin, memory.reason) == (MemoryOrigin.MADE, f"made in {directory}: {why}")
        assert content(memory.placed[0].arena, 3) == (bytes(3), bytes(3))
        assert memory.journal is not None
        assert content(memory.journal, 3) == (bytes(3), bytes(3))

    assert {name: size for name, size in kept(directory).items() if name in SMALL} == SMALL


def test_a_pool_of_another_size_is_replaced_and_what_is_of_no_more_use_goes(
    directory: Path,
) -> None:
    with opened(at(directory)):
        pass
    (directory / "kvd.index").write_bytes(b"of a component that is gone")
    (directory / "notes").write_bytes(b"not ours")

    with opened(at(directory), pages=LARGER) as memory:
        assert memory.reason == f"made in {directory}: kvd.kv has 2 MiB where 4 MiB are needed"

    assert kept(directory) == {**LARGE, "notes": 4096}


def test_what_is_of_no_more_use_goes_where_the_rest_is_found(directory: Path) -> None:
    with opened(at(directory)):
        pass
    (directory / "kvd.index").write_bytes(b"of a component that is gone")

    with opened(at(directory)) as memory:
        assert memory.origin is MemoryOrigin.FOUND

    assert kept(directory) == SMALL


def test_a_pool_that_would_not_fit_leaves_what_was_there(directory: Path) -> None:
    """A slip in pool.size must not cost the cache."""
    with opened(at(directory)) as memory:
        written(memory.placed[0].arena, b"kept")

    with pytest.raises(NotReserved, match=r"^the pool needs [0-9,]+ MiB in .* on this tmpfs: "):
        open_memory(spec(2**38), at(directory), JOURNAL_BYTES)

    with opened(at(directory)) as memory:
        assert memory.origin is MemoryOrigin.FOUND
        assert content(memory.placed[0].arena, 4) == (b"kept", b"kept")


def test_renewed_memory_is_other_memory_and_an_old_mapping_cannot_reach_it(
    directory: Path,
) -> None:
    """An engine of the daemon before may write for as long as it lives."""
    with opened(at(directory), saved=3) as memory:
        old = os.dup(memory.placed[0].arena.fd)
        saved = memory.placed[1].arena.fd

        memory.renew("its journal has another layout")
        os.pwrite(old, b"late", 0)

        assert (memory.origin, memory.reason) == (
            MemoryOrigin.MADE,
            f"made in {directory}: its journal has another layout",
        )
        assert content(memory.placed[0].arena, 4)[0] == bytes(4)
        assert memory.placed[1].arena.fd == saved
        os.close(old)

    assert kept(directory) == SMALL


# ---- others --------------------------------------------------------------------------------------


@needs_root
def test_a_file_of_somebody_else_is_an_error_that_says_what_to_do(directory: Path) -> None:
    with opened(at(directory)):
        pass
    os.chown(directory / "kvd.kv", NOBODY, NOBODY)

    with pytest.raises(NotReserved) as refused:
        open_memory(spec(), at(directory), JOURNAL_BYTES)

    assert str(refused.value) == (
        f"{directory}/kvd.kv belongs to uid {NOBODY}, and this process runs as uid 0: remove it "
        "as that user, or set pool.directory to a directory of your own"
    )
    assert kept(directory) == SMALL


@needs_root
def test_a_directory_that_somebody_else_made_first_is_refused(directory: Path) -> None:
    """Anyone may make a directory in /dev/shm, under any name."""
    os.chown(directory, NOBODY, NOBODY)

    with pytest.raises(NotReserved, match=rf"^{directory} belongs to uid {NOBODY}, and this "):
        open_memory(spec(), at(directory), JOURNAL_BYTES)

    assert kept(directory) == {}


def test_a_link_in_the_place_of_the_directory_is_not_followed(directory: Path) -> None:
    (directory / "real").mkdir(mode=0o700)
    (directory / "link").symlink_to(directory / "real")

    with pytest.raises(NotReserved, match=r"/link is a symbolic link or no directory, so "):
        open_memory(spec(), at(directory / "link"), JOURNAL_BYTES)

    assert list((directory / "real").iterdir()) == []


def test_a_link_in_the_place_of_the_lock_is_not_followed(directory: Path) -> None:
    (directory / "kvd.lock").symlink_to(directory / "victim")

    with pytest.raises(NotReserved, match=r"/kvd.lock cannot be opened: .*: remove it$"):
        open_memory(spec(), at(directory), JOURNAL_BYTES)

    assert not (directory / "victim").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)

    with pytest.raises(NotReserved, match=rf"^{directory} has mode {mode:04o}, so others could"):
        open_memory(spec(), at(directory), JOURNAL_BYTES)


def test_a_directory_that_lies_on_no_memory_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "pool"

    with pytest.raises(NotReserved, match=rf"^{own} lies on \w+, and pool.backing wants a dire"):
        open_memory(spec(), at(own), JOURNAL_BYTES)


def test_a_tmpfs_is_no_place_for_huge_pages_and_what_fits_is_named(directory: Path) -> None:
    with pytest.raises(NotReserved) as refused:
        open_memory(
            spec(), PoolLocation(Backing.HUGETLBFS, str(directory), "/run/kvd"), JOURNAL_BYTES
        )

    assert str(refused.value) == (
        f"{directory} lies on tmpfs, and pool.backing wants a directory on hugetlbfs: set "
        "pool.directory to one, or set pool.backing = 'shm'"
    )


def test_a_directory_that_cannot_be_made_is_said(directory: Path) -> None:
    with pytest.raises(NotReserved, match=r"/no/pool cannot be used: No such file or directory: "):
        open_memory(spec(), at(directory / "no" / "pool"), JOURNAL_BYTES)


# ---- two daemons ---------------------------------------------------------------------------------


def test_a_second_daemon_is_told_who_has_the_pool(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_of_pools, "WAIT_S", 0.0)
    with opened(at(directory)), pytest.raises(NotReserved) as refused:
        open_memory(spec(), at(directory), JOURNAL_BYTES)

    assert str(refused.value) == (
        f"{directory} is in use by a daemon that runs (pid {os.getpid()}): stop it, or give each "
        "daemon a pool.directory of its own"
    )


def test_the_pool_is_in_use_until_the_last_copy_of_the_lock_goes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer process holds one: its peers write into the pages until it has ended."""
    monkeypatch.setattr(memory_of_pools, "WAIT_S", 0.0)
    with opened(at(directory)) as memory:
        (lock,) = memory.keeper.keep_open
        copy = os.dup(lock)

    with pytest.raises(NotReserved, match="in use by a daemon"):
        open_memory(spec(), at(directory), JOURNAL_BYTES)
    os.close(copy)

    with opened(at(directory)) as memory:
        assert memory.origin is MemoryOrigin.FOUND


def test_a_lock_that_was_removed_before_it_was_taken_is_no_lock(directory: Path) -> None:
    """A pool is dropped in the moment between the two: others would lock another file."""
    dropping = open_directory(at(directory), wait_s=0.0)
    removed = []

    def trace(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_name == "_is_locked" and not removed:
            removed.append(os.stat(directory / LOCK_NAME).st_ino)
            dropping.discard()
            dropping.close()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        memory = open_memory(spec(), at(directory), JOURNAL_BYTES)
    finally:
        sys.settrace(before)
    (lock,) = memory.keeper.keep_open

    assert os.fstat(lock).st_ino == os.stat(directory / LOCK_NAME).st_ino
    assert [os.fstat(lock).st_ino] != removed
    memory.close()


def test_directories_are_named_after_the_user_and_the_runtime_directory() -> None:
    me = os.geteuid()
    runtimes = ["/run/kvd", "/run-kvd", "/run/kvd-a", "/run/kvd/a", "/run//kvd/", "/" + "ä" * 99]

    names = [own_name(runtime) for runtime in runtimes]

    assert names[:5] == [
        f"kvd-{me}-run-kvd",
        f"kvd-{me}-run%2Dkvd",
        f"kvd-{me}-run-kvd%2Da",
        f"kvd-{me}-run-kvd-a",
        f"kvd-{me}-run-kvd",
    ]
    assert len(names[5]) < 100
    assert PoolLocation(Backing.SHM, None, "/run/kvd").path() == Path(f"/dev/shm/kvd-{me}-run-kvd")


# ---- the store of systemd ------------------------------------------------------------------------


def held(memory: DaemonMemory) -> dict[str, int]:
    """What systemd gives the next one: copies of what it was given."""
    return {name: os.dup(fd) for name, fd in memory.keeper.to_store.items()}


def test_what_systemd_held_is_found_and_nothing_is_stored_again() -> None:
    with opened(STORE, saved=3, given={}) as memory:
        assert (memory.origin, memory.reason) == (
            MemoryOrigin.MADE,
            "made in systemd's store of descriptors: there was none",
        )
        assert list(memory.keeper.to_store) == ["kvd.kv", "kvd.journal"]
        for fd in memory.keeper.to_store.values():
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        written(memory.placed[0].arena, b"pages")
        given = held(memory)

    with opened(STORE, given=given) as memory:
        assert (memory.origin, memory.reason) == (
            MemoryOrigin.FOUND,
            "found in systemd's store of descriptors",
        )
        assert content(memory.placed[0].arena, 5) == (b"pages", b"pages")
        assert (memory.keeper.to_store, memory.keeper.stale, memory.keeper.keep_open) == (
            {},
            (),
            (),
        )


def test_half_of_what_was_held_is_let_go_and_all_of_it_made() -> None:
    """A daemon killed between two messages to systemd leaves that."""
    with opened(STORE, given={}) as memory:
        given = held(memory)
    os.close(given.pop("kvd.journal"))

    with opened(STORE, given=given) as memory:
        assert memory.reason == ("made in systemd's store of descriptors: kvd.journal is missing")
        assert (list(memory.keeper.to_store), memory.keeper.stale) == (
            ["kvd.kv", "kvd.journal"],
            ("kvd.kv",),
        )


def test_a_descriptor_that_anybody_could_have_made_is_no_pool() -> None:
    with opened(STORE, given={}) as memory:
        given = held(memory)
    os.close(given["kvd.kv"])
    given["kvd.kv"] = os.memfd_create("kvd:kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(given["kvd.kv"], 0, HUGE_PAGE_BYTES)

    with opened(STORE, given=given) as memory:
        assert memory.reason == (
            "made in systemd's store of descriptors: kvd.kv is not sealed as kvd seals it"
        )
        assert set(memory.keeper.stale) == {"kvd.kv", "kvd.journal"}


def test_what_came_of_another_use_is_left_alone() -> None:
    """The socket of a unit kvd.socket is called so too."""
    reader, writer = os.pipe()

    with opened(STORE, given={"kvd.socket": reader, "other": writer}) as memory:
        assert memory.keeper.stale == ()

    os.close(reader)
    os.close(writer)


def test_renewed_memory_of_the_store_is_to_take_the_place_of_the_old() -> None:
    with opened(STORE, given={}) as memory:
        first = {os.fstat(fd).st_ino for fd in memory.keeper.to_store.values()}

        memory.renew("its journal has another layout")

        assert memory.keeper.stale == ("kvd.kv", "kvd.journal")
        assert first.isdisjoint({os.fstat(fd).st_ino for fd in memory.keeper.to_store.values()})


def test_without_systemd_there_is_no_store() -> None:
    with pytest.raises(NotReserved, match=r"NOTIFY_SOCKET is not set.*or set pool.backing = 'shm'"):
        open_memory(spec(), STORE, JOURNAL_BYTES)


# ---- neither -------------------------------------------------------------------------------------


def test_anonymous_memory_is_always_made_and_has_no_journal() -> None:
    with opened(ANON, saved=3) as memory:
        assert [one.name for one in memory.placed] == ["kv", "kv.saved"]
        assert (memory.origin, memory.reason, memory.journal) == (
            MemoryOrigin.MADE,
            "made as anonymous memory: there was none",
            None,
        )
        assert (memory.keeper.keep_open, memory.keeper.to_store, memory.keeper.stale) == (
            (),
            {},
            (),
        )


def test_nothing_stays_taken_when_not_all_can_be(directory: Path) -> None:
    huge = msgspec.structs.replace(spec(), saved_pages=(2**40,))

    with pytest.raises(NotReserved, match=r"kv\.saved"):
        open_memory(huge, at(directory), JOURNAL_BYTES)

    assert kept(directory) == {"kvd.lock": 0}


# ---- killed at any moment ------------------------------------------------------------------------


TOUCHING = tuple(f"/kvd/pools/{name}.py" for name in ("arena", "memory", "file_memory"))
"""The files that make and remove memory; the others only look."""


STEP = 11
"""Lines between two places to die at; with 1 it takes half a minute."""


def dies_at_line(number: int, directory: Path, pages: int) -> bool:
    """Open the memory in a child that kills itself before its ``number``-th line of those.

    Returns:
        whether it died of that; False once it has no so many lines.
    """
    child = os.fork()
    if not child:
        left = number

        def trace(frame: FrameType, event: str, _arg: object) -> object:
            nonlocal left
            path = frame.f_code.co_filename
            if not path.endswith(TOUCHING):
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), 9)
            return trace

        sys.settrace(trace)  # type: ignore[arg-type]
        memory = open_memory(spec(pages), at(directory), JOURNAL_BYTES)
        sys.settrace(None)
        for arena in (memory.placed[0].arena, memory.journal):
            assert arena is not None
            written(arena, b"new!")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in {0, 9}
    return status == 9


def test_a_kill_at_any_line_leaves_a_whole_pool_or_none(directory: Path) -> None:
    """A pool of 2 MiB is there, and one of 4 is being made in its place."""
    number = 0
    while True:
        for path in directory.iterdir():
            path.unlink()
        with opened(at(directory)) as memory:
            for arena in (memory.placed[0].arena, memory.journal):
                assert arena is not None
                written(arena, b"old!")
        died = dies_at_line(number, directory, LARGER)
        left = kept(directory)

        with opened(at(directory), pages=LARGER) as memory:
            assert memory.journal is not None
            marks = {content(memory.placed[0].arena, 4)[0], content(memory.journal, 4)[0]}
            assert marks == ({bytes(4)} if died else {b"new!"}), (number, left)
            if memory.origin is MemoryOrigin.FOUND:
                assert left == LARGE
        assert kept(directory) == LARGE
        if not died:
            break
        number += STEP
    assert number > 200
