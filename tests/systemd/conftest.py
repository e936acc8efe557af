"""The guest of the tests here, with kvd installed: booted once by every process that runs tests."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.systemd.guest import Guest, booted, reason_not_to

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = """
[pool]
size = "8MiB"
layers = 4
heads = 2
head_dim = 64
"""


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """A running systemd: kvd is installed, with a small pool, and not started.

    User ``engine`` is in the group kvd, user ``stranger`` is not.
    """
    reason = reason_not_to()
    if reason:
        pytest.skip(reason)
    with booted(tmp_path_factory.mktemp("guest")) as one:
        one.kvd("systemd", "install")
        one.run("useradd", "--no-create-home", "--groups", "kvd", "engine")
        one.run("useradd", "--no-create-home", "stranger")
        one.path("/etc/kvd/conf.d").mkdir()
        one.path("/etc/kvd/conf.d/small.toml").write_text(SMALL)
        yield one


@pytest.fixture
def service(guest: Guest) -> Guest:
    """The guest with kvd.service up, maybe since the test before."""
    guest.systemctl("start", "kvd")
    return guest


@pytest.fixture
def idle(guest: Guest) -> Iterator[Guest]:
    """The guest with nothing of kvd up; afterwards it is as it was installed."""
    take_down(guest)
    yield guest
    take_down(guest)


def take_down(guest: Guest) -> None:
    """Everything of kvd, and the drop-ins of a test."""
    guest.systemctl("stop", "kvd.socket", "kvd", "kvd@*")
    guest.systemctl("reset-failed")
    drop_ins = guest.path("/run/systemd/system/kvd.service.d")
    if drop_ins.exists():
        shutil.rmtree(drop_ins)
        guest.systemctl("daemon-reload")
