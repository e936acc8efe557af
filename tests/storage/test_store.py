"""Real storage processes over a real store: what one writes another finds, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.harness.store import ABSENT, SeaweedStore, weed
from tests.storage.site import StoreSite, key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(weed() is None, reason=ABSENT),
]

KEYS = [key(n) for n in range(6)]
"""Of pages 1 to 6."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[SeaweedStore]:
    found = SeaweedStore(tmp_path_factory.mktemp("store"))
    found.start()
    yield found
    found.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def make(store) -> AsyncIterator[Callable]:
    """Makes sites of one store that serve."""
    made: list[StoreSite] = []

    async def one(*of, **other) -> StoreSite:
        made.append(StoreSite(store, *of, **other))
        await made[-1].start()
        return made[-1]

    yield one
    for site in made:
        await site.stop()
        site.close()


async def test_what_one_node_wrote_another_finds_as_it_was(make):
    a, b = await make(), await make()
    were = [a.page(page) for page in range(1, 7)]
    b.forget()

    written = await a.demote(KEYS, [1, 2, 3, 4, 5, 6], "shared")
    probed = await b.probe([*KEYS, key(99)], "shared")
    promoted = await b.promote(KEYS, [26, 25, 24, 23, 22, 21], "shared")

    assert (written.written, written.why) == (tuple(range(6)), "")
    assert (probed.n_there, probed.why) == (6, "")
    assert (promoted.bad, promoted.why) == ((), "")
    assert [b.page(26 - n) for n in range(6)] == were
    assert promoted.n_bytes == sum(map(len, were))
