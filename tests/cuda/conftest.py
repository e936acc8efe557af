"""A double of the CUDA runtime for all tests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cuda.double import compiled

if TYPE_CHECKING:
    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(double: Double) -> Runtime:
    """The double in this process."""
    return double.runtime
