"""A double of the CUDA runtime for all tests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.cuda.double import compiled
from tests.transfer.conftest import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(double: Double) -> Runtime:
    """The double in this process."""
    return double.runtime


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """Makes nodes with a real transfer process."""
    made = Rig("nixl")
    yield made
    await made.end()
