"""``kvd doctor`` where the pool is to lie on a device: three ways, each moved and judged."""

from __future__ import annotations

import pytest

from kvd.cli.doctor import devices
from kvd.cli.doctor.finding import Severity
from tests.cli.test_doctor import subject

pytestmark = pytest.mark.usefixtures("nixl")

FAR = "pool.device=cuda:1"
SHARE = ("pool.layers=4", "pool.heads=2", "pool.head_dim=64")


@pytest.fixture
def environment(double, monkeypatch) -> pytest.MonkeyPatch:
    for name, value in {**double.environment, "DOUBLE_BYTES": str(2**30)}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("sockets", "poor"), [("none", 0), ("emulated", 2), ("forced", 3)], ids=["rdma", "host", "tcp"]
)
def test_each_way_is_moved_and_judged(environment, sockets, poor):
    environment.setenv("NIXL_DOUBLE_SOCKETS", sockets)

    found = devices.device_transfer(subject(FAR, *SHARE))

    sides = [" from host to device", " from device to device", " from device to host"]
    assert [any(side in one.what for one in found) for side in sides] == [True] * 3, found
    assert [one.severity for one in found].count(Severity.POOR) == poor
    for one in found:
        if one.severity is Severity.POOR:
            assert "emulated: UCX has no way of its own for that" in one.what
            assert one.fix.startswith("keep the pool in host memory (no pool.device)")
        else:
            assert one.what.endswith("same-host")


def test_bytes_that_come_back_changed_are_wrong(environment, monkeypatch):
    monkeypatch.setattr(devices, "holds", lambda *_: False)
    [finding] = devices.device_transfer(subject(FAR, *SHARE))
    assert finding.severity is Severity.WRONG


def test_a_device_without_room_is_poor_with_what_it_takes(environment):
    environment.setenv("DOUBLE_BYTES", str(2**20))
    [finding] = devices.device_transfer(subject(FAR, *SHARE))
    assert finding.severity is Severity.POOR
    assert "cudaErrorMemoryAllocation" in finding.what
    assert "a context each" in finding.fix


def test_without_a_pool_on_a_device_nothing_is_started(monkeypatch):
    monkeypatch.setattr(devices, "measure_devices", None)
    assert devices.device_transfer(subject(*SHARE)) == []
