"""The ranks that the tests of this directory share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.device.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks, with groups of the first 1, 2, 3 and of all 4."""
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    try:
        ranks.run("is_ready", 4)
        yield ranks
    finally:
        ranks.stop()
