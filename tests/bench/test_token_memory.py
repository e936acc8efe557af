"""KV by token: every component of a pool is written, and foreign bytes in any of them are found."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from benchmarks.token_memory import TokenMemory, WrittenTokens
from kvd.client.attachment import Attachment
from kvd.client.connection import Connection
from kvd.client.lease import Lease
from kvd.client.pool import Pools
from kvd.client.port import Port
from kvd.client.prompt import PromptAddress
from kvd.client.state import LeaseView
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Mha,
    Mla,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.pools.build import pool_memory
from kvd.types import Tokens, pack_ids
from kvd.wire.attach import Attached
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = Tokens(pack_ids(range(300, 311)))
"""Eleven tokens: two pages and three quarters of one."""
OTHER = Tokens(pack_ids(range(900, 911)))
EVERYTHING = PoolSpec(
    "main",
    "everything",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 2, Mla(6, 2, "bfloat16"), 4),
        Component("index", 2, Mha(1, 3, 0, "uint8"), 2),
        Component("swa", 1, Mha(2, 4, 4, "float16"), 4, Tail(4)),
        Component("state", 2, State((StateTensor("ssm", (3, 2), "float32"),)), 1, PerRequest()),
        Component("buffer", 2, Mla(6, 2, "bfloat16"), 4, Buffer(8)),
    ),
    (8, 16, 8, 4, 4),
)


@pytest.fixture
def pools() -> Iterator[Pools]:
    """A pool with every kind of component, as an attached engine sees it."""
    with contextlib.ExitStack() as own:
        placed = build_pool(EVERYTHING)
        for one in placed:
            own.callback(one.arena.close)
        here, there = socket.socketpair()
        own.callback(there.close)
        attached = Attached(1, b"token", "node-a", "1", (pool_memory(EVERYTHING),))
        attachment = Attachment(here, attached, [os.dup(one.arena.fd) for one in placed])
        own.callback(attachment.close)
        yield Pools(attachment)


class Nothing:
    """A channel to no daemon."""

    def look(self) -> None:
        """It never hangs up."""


def lease(pools: Pools, kv: list[int], swa: list[int], state: list[int]) -> Lease:
    """A lease on these rows; nothing is asked of a daemon."""
    rows = (pack_ids(swa), pack_ids(state), pack_ids([1]))
    port = Port(Connection(max_frame_bytes=1), Nothing())  # type: ignore[arg-type]
    view = LeaseView(7, prefix_tokens=0, pages=pack_ids(kv), beside=rows)
    return Lease(port, pools, view, PromptAddress(pools.match_page_tokens, ()))


def test_what_is_written_piece_by_piece_is_found_in_every_component(pools: Pools) -> None:
    memory = TokenMemory(pools.pool("main"))
    one = lease(pools, [3, 5, 2], [0, 6, 7], [0, 2])
    other = lease(pools, [1, 4, 7], [2, 3, 4], [2, 3])

    memory.write(WrittenTokens(one, PROMPT, 0, 8))
    memory.write(WrittenTokens(one, PROMPT, 8, 11), WrittenTokens(other, OTHER, 0, 11))

    memory.check(one, PROMPT)
    memory.check(other, OTHER)
    (latent,) = pools.pool("main").view("buffer", layer=0)
    assert not latent.any()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (([1, 5, 4], [1, 2, 3], [0, 3]), "foreign kv: place 4 of 11"),
        (([1, 4, 7], [1, 2, 7], [0, 3]), "foreign swa: place 4 of 7"),
        (([1, 4, 7], [1, 2, 3], [0, 2]), "foreign state: place 0 of 1"),
    ],
    ids=["kv", "swa", "state"],
)
def test_a_page_that_somebody_else_wrote_is_found(
    pools: Pools, rows: tuple[list[int], list[int], list[int]], words: str
) -> None:
    memory = TokenMemory(pools.pool("main"))
    one = lease(pools, [3, 5, 2], [0, 6, 7], [0, 2])
    memory.write(WrittenTokens(one, PROMPT, 0, 11))

    memory.write(WrittenTokens(lease(pools, *rows), OTHER, 0, 11))

    with pytest.raises(AssertionError, match=words):
        memory.check(one, PROMPT)


def test_a_companion_is_written_in_lockstep(pools: Pools) -> None:
    """Page 5 of kv has tokens 4 to 7; of the index that is pages 10 and 11."""
    memory = TokenMemory(pools.pool("main"))
    memory.write(WrittenTokens(lease(pools, [3, 5, 2], [0, 6, 7], [0, 2]), PROMPT, 4, 8))

    (keys,) = pools.pool("main").view("index", layer=1)

    assert keys[10:12, :, 0, 0].flatten().tolist() == [token % 251 for token in range(304, 308)]
    assert [page for page in range(16) if keys[page].any()] == [10, 11]
