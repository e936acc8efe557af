"""What one device cannot show."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.inputs import PostDone
from tests.gpu.nodes import painted
from tests.transfer.conftest import SHAPES


async def test_pages_go_from_one_device_to_another(cuda, nodes):
    """NVLink or PCIe, whichever UCX takes."""
    if cuda.device_count() < 2:
        pytest.skip("needs two devices, there is one")
    shapes = {"kv": SHAPES["kv"]}
    sender = await nodes.start("sender", shapes, {"kv": 0})
    receiver = await nodes.start("receiver", shapes, {"kv": 1})
    await sender.load(receiver)
    content = painted(SHAPES["kv"].total_bytes, 1)
    sender.memories["kv"].write(content)
    pages = list(range(1, 25))
    sender.post(1, receiver, pages, pages)
    assert isinstance(await sender.outcome(1), PostDone)
    first = SHAPES["kv"].page_bytes
    assert np.array_equal(receiver.memories["kv"].read()[first:], content[first:])
