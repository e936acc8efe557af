"""Pools of more than one component, as ``kvd pools``, ``locks`` and ``status`` show them."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.snapshot import (
    BufferState,
    CompanionState,
    HeldState,
    PoolState,
    WindowState,
)
from tests.cli.sentences import sentence_of

SWA = (
    PoolState("main", "kv", 16, 2**20, 101, 60, 30, 10, 0, 4, 6),
    PoolState(
        *("main", "swa", 16, 2**18, 41, 28, 12, 0, 0, 0, 0),
        extent="tail",
        window=WindowState(1024, 12, 60, 41),
    ),
)
HISPARSE = (
    PoolState(
        *("main", "kv", 64, 2**18, 101, 90, 10, 0, 0, 0, 0, 3, 8),
        tier="host",
        companions=(CompanionState("index", 16, 96, 4, 404, "device"),),
    ),
    PoolState(
        *("main", "buffer", 64, 2**18, 9, 4, 4, 0, 0, 0, 0),
        extent="buffer",
        buffer=BufferState(256, 90, 10, 2560),
    ),
)
RECURRENT = (
    PoolState(*("main", "kv", 1, 0, 1001, 1000, 0, 0, 0, 0, 0), tier="nowhere"),
    PoolState(*("main", "state", 1, 60, 9, 7, 1, 0, 0, 0, 0), extent="per-request"),
)


@pytest.fixture
def shown(run, daemon, snapshot):
    """What a verb prints of a snapshot that has these fields."""
    whole = daemon.answer

    def show(verb, **fields):
        changed = msgspec.structs.replace(snapshot, **fields)
        daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)
        return run(verb).stdout.splitlines()

    return show


def test_pools_show_a_row_for_the_window_and_what_full_allocation_would_have(shown):
    assert shown("pools", pools=SWA) == [
        "POOL      TOTAL  FREE  HELD  CACHED  LOCKED  EVICTABLE  QUAR  SUM",
        "main/kv     101    60    30      10       6          4     0  ok",
        "    [HHHHHHHHHHCCC...................] 16 tokens, 1.0 MiB a page",
        "main/swa     41    28    12       0       0          0     0  ok",
        "    [HHHHHHHHH.......................] 16 tokens, 256.0 KiB a page",
        "    window of 1024 tokens: 12 pages mapped, 60 with full allocation (20 %); 41 slides",
        "total of kv, swa: 111.2 MiB; 67.0 MiB free, 33.0 MiB held, 10.0 MiB cached, "
        "0 B quarantined",
    ]


def test_pools_show_companions_beside_theirs_and_how_often_the_buffer_had_a_page(shown):
    assert shown("pools", pools=HISPARSE)[1:] == [
        "main/kv        101    90    10       0       0          0     0  ok",
        "    [HHH.............................] 64 tokens, 256.0 KiB a page in host memory",
        "    with index: 4 pages of 16 tokens for each, 96 B a page",
        "    saved area: 3 of 8 pages hold 769.1 KiB of retracted leases",
        "main/buffer      9     4     4       0       0          0     0  ok",
        "    [HHHHHHHHHHHHHH..................] 64 tokens, 256.0 KiB a page",
        "    at most 256 tokens of a request; 90 hits, 10 misses (90.0 % were there), "
        "2.5 KiB copied",
        "total of kv, index, buffer: 27.5 MiB; 23.5 MiB free, 3.5 MiB held, 0 B cached, "
        "0 B quarantined",
    ]


def test_pools_count_tokens_where_only_states_have_bytes(shown):
    lines = shown("pools", pools=RECURRENT)

    assert lines[2].endswith("] 1000 tokens are counted, no byte is held")
    assert lines[4].endswith("] one state, 60 B a page")
    assert lines[5].startswith("total of kv, state: 540 B; 420 B free, 60 B held")


def test_locks_say_what_a_lease_has_beside_the_first_component(shown, snapshot):
    lease = msgspec.structs.replace(
        snapshot.leases[0],
        beside=(HeldState("swa", 4, 6, needed_nodes=(2, 9)), HeldState("state", 1, 2)),
    )

    assert shown("locks", leases=(lease,))[2] == sentence_of(
        "locks say what a lease has beside the first component"
    )


def test_status_adds_up_what_leases_hold_of_each_component(shown, snapshot):
    one = msgspec.structs.replace(snapshot.leases[0], beside=(HeldState("swa", 4, 6),))
    other = msgspec.structs.replace(one, id=8)

    lines = shown("status", leases=(one, other))

    assert [line for line in lines if line.startswith("leases")] == [
        "leases    2  holding 12 pages, 8 of swa; 1 wait for room"
    ]


def test_pools_say_how_many_pages_are_promised(shown):
    (kv, swa) = SWA
    promising = (msgspec.structs.replace(kv, promised_pages=40), swa)

    said = [line.strip() for line in shown("pools", pools=promising)]

    assert said.count("40 of 64 free and evictable pages are promised to leases") == 1
