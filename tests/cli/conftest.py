"""A daemon to ask, and ``kvd`` to ask it with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from kvd.cli import kvd
from tests.cli.admin_peer import HARMLESS, HOSTILE, SNAPSHOT, Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvd.wire.snapshot import Snapshot


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that answers with the snapshot until told otherwise."""
    one = Daemon(f"ipc://{tmp_path}/admin.sock")
    yield one
    one.close()


@pytest.fixture
def run(daemon: Daemon) -> Callable[..., Result]:
    """Runs ``kvd VERB ...`` against the daemon."""

    def run(verb: str, *arguments: str) -> Result:
        return CliRunner().invoke(kvd, [verb, "--connect", daemon.endpoint, *arguments])

    return run


@pytest.fixture
def snapshot() -> Snapshot:
    """What the daemon answers at first."""
    return SNAPSHOT


@pytest.fixture
def hostile() -> tuple[str, str]:
    """A hostile name, and what may be printed of it."""
    return HOSTILE, HARMLESS
