"""A handle of device memory goes with the place of its device: what is elsewhere is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvd.client.device_mapping import DeviceMapping
from kvd.device.cuda_library import VARIABLE
from kvd.errors import Code, KvdError
from kvd.transfer.devices import Devices, DeviceUnusable
from kvd.transfer.orders import NO_FD, RegionPlan
from kvd.wire.memory import DeviceMemory
from tests.transfer.conftest import SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double

SIZE = 2**20

OWNER = f"""
import sys
from kvd.device.cuda_library import load
runtime = load()
print(runtime.share(runtime.allocate(1, {SIZE})).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def handle(double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """Of memory on the second device, which another process owns."""
    monkeypatch.setenv(VARIABLE, str(double.path))
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        yield bytes.fromhex(owner.stdout.readline())
        owner.communicate()


@pytest.mark.parametrize("reach_each_other", [False, True])
def test_memory_of_another_device_than_its_handle_says_is_refused(
    handle: bytes, cuda: Runtime, monkeypatch: pytest.MonkeyPatch, *, reach_each_other: bool
) -> None:
    """Where devices reach each other it would open, and each access would cross between them."""
    monkeypatch.setenv("DOUBLE_PEERS", str(int(reach_each_other)))

    def opened_at(device: int) -> None:
        place = DeviceMemory("main", "kv", 0, cuda.bus_id(device), handle)
        DeviceMapping(place, SIZE).close()

    opened_at(1)
    with pytest.raises(KvdError) as refused:
        opened_at(0)
    said = refused.value.refusal.message
    assert f"the device at {cuda.bus_id(0)}, cuda:0 here" in said
    if reach_each_other:
        assert refused.value.code == Code.LAYOUT_MISMATCH.value
        assert f"what its handle opens is on cuda:1, at {cuda.bus_id(1)}" in said
    else:
        assert refused.value.code == Code.UNREACHABLE.value
    opened_at(1)


def test_memory_that_is_not_on_its_device_is_shared_with_nobody(
    double: Double, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(double.path))
    devices = Devices()
    area = devices.area(RegionPlan("layered", NO_FD, SHAPES["layered"]), 1)
    (shared,) = devices.shared({"layered": area})
    assert shared.bus_id == cuda.bus_id(1)
    devices._used["layered"] = 0
    with pytest.raises(DeviceUnusable, match=r"on cuda:0, 0000:.*memory is on cuda:1, 0000:"):
        devices.shared({"layered": area})
