"""What the lock file remembers from one process to the next."""

import os

import pytest

from kvd.daemon import lock


class Killed(Exception):
    """The process ends here."""


def killed(*_: object) -> None:
    raise Killed


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "lock")


@pytest.fixture
def held(path):
    descriptor = lock.take(path)
    yield descriptor
    os.close(descriptor)


def test_a_birth_is_later_than_the_last_when_the_clock_was_set_back(held, path, monkeypatch):
    monkeypatch.setattr(lock.time, "time_ns", lambda: 2_000)
    first = lock.next_birth(held, path)
    assert first.at_ns == 2_000

    monkeypatch.setattr(lock.time, "time_ns", lambda: 1_000)
    assert lock.next_birth(held, path) == (2_001, first.home)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "pwrite", "ftruncate"])
def test_a_birth_is_later_than_the_last_when_the_one_between_was_killed_at(
    call, held, path, monkeypatch
):
    """And of its home, whatever was half written."""
    monkeypatch.setattr(lock.time, "time_ns", lambda: 3_000_000)
    last = lock.next_birth(held, path)
    with monkeypatch.context() as patch:
        patch.setattr(lock.os, call, killed)
        patch.setattr(lock.time, "time_ns", lambda: 3_000)
        with pytest.raises(Killed):
            lock.next_birth(held, path)

    monkeypatch.setattr(lock.time, "time_ns", lambda: 1_000)
    after = lock.next_birth(held, path)
    assert after.at_ns > last.at_ns
    assert after.home == last.home


@pytest.mark.parametrize("left", [b"", b"7", b"7 8 9", b"x y", b"\xff\xfe", b"7 " + b"f" * 31])
def test_a_home_of_which_nothing_can_be_read_is_a_new_one(left, held, path, tmp_path):
    """Its births are in order with nobody's: peers ask whether it lives before they believe it."""
    first = lock.next_birth(held, path)
    (tmp_path / "lock.birth").write_bytes(left)
    after = lock.next_birth(held, path)
    assert after.home != first.home
    assert after.at_ns > first.at_ns, "the lock file has it, too"


def test_a_birth_that_an_older_version_left_in_the_lock_file_counts(held, path):
    os.pwrite(held, f"7 {2**62}\n".encode(), 0)
    assert lock.next_birth(held, path).at_ns == 2**62 + 1


def test_two_directories_are_two_homes(held, path, tmp_path):
    (tmp_path / "other").mkdir()
    other = lock.take(str(tmp_path / "other" / "lock"))
    try:
        first = lock.next_birth(held, path)
        assert lock.next_birth(other, str(tmp_path / "other" / "lock")).home != first.home
    finally:
        os.close(other)


def test_the_line_is_whole_when_the_last_one_was_longer(held, path, monkeypatch):
    monkeypatch.setattr(lock.os, "getpid", lambda: 4_000_000)
    lock.next_birth(held, path)
    monkeypatch.setattr(lock.os, "getpid", lambda: 7)

    birth = lock.next_birth(held, path)

    assert os.pread(held, 100, 0).decode() == f"7 {birth.at_ns}\n"
