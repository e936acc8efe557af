"""A GPU for all tests here, or the reason why there is none.

Everything here runs with the double of the runtime too (``python -m tests.gpu.run --rehearse``),
but what needs a CUDA build of torch, or memory that the processor cannot reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvd.device.cuda import Runtime
from kvd.device.cuda_library import load
from tests.gpu.face import Face
from tests.gpu.memory import device, host, runtime, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.gpu.nodes import Nodes

__all__ = ["device", "host", "runtime", "stream"]
"""Fixtures of others, for all tests here."""

DEVICE = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them need a GPU."""
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def cuda() -> Runtime:
    """The runtime of this host."""
    found = load()
    if not isinstance(found, Runtime):
        pytest.skip(found.why)
    return found


@pytest.fixture(scope="session")
def is_double(cuda: Runtime) -> bool:
    """Whether the runtime is the double of tests/cuda."""
    return Face(cuda.path).is_double


@pytest.fixture(scope="session")
def sees_torch(cuda: Runtime, is_double: bool) -> None:
    """Skips where engines of this interpreter cannot see a device."""
    import torch  # noqa: PLC0415 - seconds, for those that need it

    if not is_double and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} is no CUDA build, or finds no device")


@pytest_asyncio.fixture
async def nodes(cuda: Runtime) -> AsyncIterator[Nodes]:
    """Makes transfer processes with regions on devices."""
    from tests.gpu.nodes import Nodes  # noqa: PLC0415 - brings NIXL's tests along

    made = Nodes(cuda)
    yield made
    await made.end()
