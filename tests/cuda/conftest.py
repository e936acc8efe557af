"""A double of the CUDA runtime for all tests here."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.cuda.double import NIXL, Double, compiled
from tests.gpu.memory import device, host, runtime, stream
from tests.support.garbage import collect_of_others
from tests.transfer.conftest import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvd.device.cuda import Runtime

__all__ = ["device", "host", "runtime", "stream"]
"""Fixtures of others, for all tests here."""


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test holds, no other waits for; and what it took of a device is given back.

    Memory of a device is a descriptor of this process here.
    """
    names = request.fixturenames
    found = request.getfixturevalue("double") if "double" in names else None
    if not isinstance(found, Double):
        yield
        return
    # The collection below is for what this test has left, and finds what all before it have.
    collect_of_others()
    kept = found.memory()
    yield
    found.let_go()
    gc.collect()  # what nobody needs any more may free its own
    found.poison(0)
    found.give_back(kept)


@pytest.fixture
def cuda(double: Double) -> Runtime:
    """The double in this process."""
    return double.runtime


@pytest.fixture
def kernels(double: Double) -> Iterator[None]:
    """This process stands for an engine's kernels, which reach device memory."""
    with double.kernels():
        yield


@pytest.fixture(scope="module")
def nixl() -> Iterator[None]:
    """Processes that are started have the double of NIXL, which moves memory of the double."""
    path = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(NIXL), path))))
        yield


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """Makes nodes with a real transfer process."""
    made = Rig("nixl")
    yield made
    await made.end()
