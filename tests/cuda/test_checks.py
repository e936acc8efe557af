"""What ``kvd doctor`` and ``kvd config check`` say of devices, and ``kvd fence`` of pools there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from kvd.cli.doctor import memory
from kvd.cli.doctor.finding import Severity
from kvd.core.layout.spec import Device
from kvd.wire import admin
from tests.cli.inchild import subject
from tests.core.side import spec
from tests.core.test_rehearse import rehearsed
from tests.core.world import World

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG


@pytest.fixture(autouse=True)
def found(double, monkeypatch):
    for name, value in double.environment.items():
        monkeypatch.setenv(name, value)


def at(tmp_path, *sets):
    return subject(f"sockets.client=ipc://{tmp_path}/c.sock", "pool.pages=64", *sets)


def test_the_runtime_the_driver_and_every_device_are_named(tmp_path, double):
    [finding] = memory.cuda(at(tmp_path))

    assert finding.severity is GOOD
    assert finding.what == (
        "runtime 12.8, driver for 12.9; cuda:0 at 0000:01:00.0, cuda:1 at 0000:02:00.0 "
        f"({double.runtime.path})"
    )


def test_no_cuda_is_good_where_the_pool_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDART_LIBRARY", "/nowhere")

    [finding] = memory.cuda(at(tmp_path))

    assert finding.severity is GOOD
    assert finding.what.startswith("no CUDA device can be used here: /nowhere: cannot be loaded")
    assert finding.what.endswith("; the pool needs none")


def test_a_pool_on_a_device_is_measured_against_what_is_free_there(tmp_path):
    fits, too_large = (
        memory.cuda(at(tmp_path, "pool.device=cuda:1", f"pool.pages={pages}"))[1]
        for pages in (64, 9000)
    )

    assert (fits.check, fits.severity) == ("memory of cuda:1", GOOD)
    assert too_large.severity is WRONG
    assert too_large.what == "the pool takes 282.0 MiB of 256.0 MiB free"
    assert too_large.fix == "set pool.size to at most 256MiB, or end who has it"


@pytest.mark.parametrize(
    ("name", "value", "what", "fix"),
    [
        ("DOUBLE_DEVICES", "1", "needs cuda:1; here is cuda:0 alone", "choose another"),
        ("DOUBLE_COUNT_ERROR", "100", "cudaErrorNoDevice (100)", "install the NVIDIA driver"),
        ("CUDART_LIBRARY", "/nowhere", "/nowhere: cannot be loaded", "install the NVIDIA driver"),
    ],
)
def test_a_pool_on_a_device_that_is_not_here_is_wrong_in_both(
    tmp_path, monkeypatch, name, value, what, fix
):
    monkeypatch.setenv(name, value)

    [finding] = memory.cuda(at(tmp_path, "pool.device=cuda:1"))
    checked = config_check("--set", "pool.device=cuda:1")
    told = json.loads(config_check("--set", "pool.device=cuda:1", "--format", "json").stdout)

    assert finding.severity is WRONG
    assert what in finding.what
    assert finding.fix.startswith(fix)
    assert checked.returncode == 78
    assert "pool.device = cuda:1: " in checked.stderr
    assert what in checked.stderr
    assert told["errors"][0]["key"] == "pool.device"


def test_a_pool_on_a_device_that_is_here_is_right():
    checked = config_check("--set", "pool.device=cuda:1")

    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("ok: ")


@pytest.mark.parametrize("value", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:01", "CUDA:0", ""])
def test_what_names_no_device_is_refused(value):
    checked = config_check("--set", f"pool.device={value}")

    assert checked.returncode == 78
    assert "write cpu, or for example cuda:0" in checked.stderr


def config_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", "config", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_rehearsed_fence_says_that_the_daemon_ends_with_a_pool_on_a_device():
    pool = spec(64)
    far = tuple(replace(one, tier=Device("cuda:3")) for one in pool.components)

    here, there = (
        rehearsed(World(spec=one).p, admin.Fence(1)).notes
        for one in (pool, replace(pool, components=far))
    )

    assert here == ()
    assert there == (
        "the pool lies on a device, in memory of the transfer process: this daemon ends with it "
        "(status 1), and the next one has an empty pool",
    )
