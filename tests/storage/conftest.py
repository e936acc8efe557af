"""Storage processes that end with their test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.storage.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest_asyncio.fixture
async def make(tmp_path) -> AsyncIterator[Callable[..., Site]]:
    """Makes sites, of one directory unless it is told another."""
    made: list[Site] = []

    def one(*of, directory=tmp_path / "tier", **other) -> Site:
        made.append(Site(directory, *of, **other))
        return made[-1]

    yield one
    for site in made:
        await site.stop()
        site.close()


@pytest_asyncio.fixture
async def site(make) -> Site:
    """One that serves."""
    found = make()
    await found.start()
    return found
