"""What the lock file remembers from one process to the next."""

import os

import pytest

from kvd.daemon import lock


class Killed(Exception):
    """The process ends here."""


def killed(*_: object) -> None:
    raise Killed


@pytest.fixture
def held(tmp_path):
    descriptor = lock.take(str(tmp_path / "lock"))
    yield descriptor
    os.close(descriptor)


def test_a_birth_is_later_than_the_last_when_the_clock_was_set_back(held, monkeypatch):
    monkeypatch.setattr(lock.time, "time_ns", lambda: 2_000)
    assert lock.next_birth(held) == 2_000

    monkeypatch.setattr(lock.time, "time_ns", lambda: 1_000)
    assert lock.next_birth(held) == 2_001


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_birth_is_later_than_the_last_when_the_one_between_was_killed_at(call, held, monkeypatch):
    monkeypatch.setattr(lock.time, "time_ns", lambda: 3_000_000)
    last = lock.next_birth(held)
    with monkeypatch.context() as patch:
        patch.setattr(lock.os, call, killed)
        patch.setattr(lock.time, "time_ns", lambda: 3_000)
        with pytest.raises(Killed):
            lock.next_birth(held)

    monkeypatch.setattr(lock.time, "time_ns", lambda: 1_000)
    assert lock.next_birth(held) > last


def test_the_line_is_whole_when_the_last_one_was_longer(held, monkeypatch):
    monkeypatch.setattr(lock.os, "getpid", lambda: 4_000_000)
    lock.next_birth(held)
    monkeypatch.setattr(lock.os, "getpid", lambda: 7)

    birth = lock.next_birth(held)

    assert os.pread(held, 100, 0).decode() == f"7 {birth}\n"
