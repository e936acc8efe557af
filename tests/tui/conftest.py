"""A snapshot to show: one of everything, with a hostile name; and a daemon that answers with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.admin_peer import SNAPSHOT, Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.wire.snapshot import Snapshot


@pytest.fixture
def snapshot() -> Snapshot:
    """A node with a pool, a lease, a room, a peer and a request that waits."""
    return SNAPSHOT


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """The admin socket of a daemon."""
    one = Daemon(f"ipc://{tmp_path}/admin.sock")
    yield one
    one.close()
