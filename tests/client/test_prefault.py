"""A mapped pool is at hand before it is touched: the first write costs what the next one does."""

from __future__ import annotations

import os
import resource
import threading

import pytest

from kvd.client import mapping as mapping_module
from kvd.client.mapping import STEP_BYTES, Mapping, Prefault
from kvd.errors import KvdError
from kvd.pools.arena import reserve

SIZE = 16 * 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def mapping():
    arena = reserve("kv", SIZE)
    one = Mapping(arena.fd, SIZE)
    yield one
    one.close()
    arena.close()


def faults_of_writing(mapping: Mapping) -> int:
    """Page faults of this thread when it writes to each page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    mapping.bytes[::PAGE] = 7
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_without_it_each_page_costs_a_fault(mapping):
    """Or the test below would prove nothing."""
    assert faults_of_writing(mapping) >= SIZE // PAGE
    assert faults_of_writing(mapping) < 16


def test_the_first_write_meets_no_fault(mapping):
    mapping.begin_prefault()
    assert mapping.prefault is not None
    assert mapping.prefault.over.wait(10)

    assert mapping.prefault.done_bytes == SIZE
    assert faults_of_writing(mapping) < 16


def test_it_changes_no_byte():
    arena = reserve("kv", SIZE)
    writer, reader = Mapping(arena.fd, SIZE), Mapping(arena.fd, SIZE)
    writer.bytes[:] = 5
    reader.begin_prefault()
    reader.prefault.over.wait(10)

    assert (reader.bytes == 5).all()
    writer.close()
    reader.close()
    arena.close()


def test_closing_ends_it_before_the_memory_is_unmapped(monkeypatch):
    arena = reserve("kv", SIZE)
    mapping = Mapping(arena.fd, SIZE)
    goes_on, began = threading.Event(), threading.Event()

    def madvise(*_):
        began.set()
        assert goes_on.wait(10)
        return 0

    monkeypatch.setattr(mapping_module._libc, "madvise", madvise)
    mapping.begin_prefault()
    assert began.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    mapping.close()

    assert mapping.prefault.done_bytes <= 2 * STEP_BYTES
    assert not mapping.prefault._thread.is_alive()
    arena.close()


def test_a_mapping_that_is_still_seen_stays_usable(mapping):
    mapping.begin_prefault()
    view = mapping.bytes
    with pytest.raises(KvdError, match="wrong-state"):
        mapping.close()
    view[0] = 1
    del view


def test_a_kernel_that_refuses_costs_nothing(monkeypatch):
    monkeypatch.setattr(mapping_module._libc, "madvise", lambda *_: -1)
    one = Prefault(0, SIZE)

    assert one.over.wait(10)
    assert one.done_bytes == 0
    one.stop()
