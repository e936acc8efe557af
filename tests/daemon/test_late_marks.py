"""A real engine whose copy waits for a mark that does not come: kvd says so wherever one asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner

import kvd.client
from kvd.cli import kvd as command
from kvd.cli.doctor.finding import Severity, Subject
from kvd.cli.doctor.service import late_marks as doctors_marks
from kvd.client.mover import late_marks
from kvd.client.mover.host_lane import HostLane
from kvd.config.load import load
from kvd.config.schema import Config
from tests.support.copies import BYTES, LAYERS, PAGE, kept_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with kept_daemon(tmp_path, pages=33) as made:
        yield made


def said(daemon: Daemon, *words: str) -> str:
    verb, *arguments = words
    found = CliRunner().invoke(command, [verb, "--connect", daemon.admin, *arguments])
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


def doctors(daemon: Daemon) -> list[tuple[Severity, str]]:
    config = load(Path(os.devnull), {}, (f"sockets.admin={daemon.admin}",))
    assert isinstance(config, Config)
    return [(found.severity, found.what) for found in doctors_marks(Subject(config, {}))]


def test_a_mark_that_does_not_come_is_said_with_its_bound_until_it_does(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come = False
    monkeypatch.setattr(HostLane, "has_come", lambda *_: has_come)
    monkeypatch.setattr(late_marks, "LATE_S", 0.1)
    own = np.full((LAYERS, 40, BYTES), 0xEE, np.uint8)
    with (
        kvd.client.connect_sync(daemon.client, name="vllm-0", key="engine") as node,
        kvd.client.join(daemon.client, key="engine", rank=1, ranks=2) as worker,
    ):
        lease = node.lease(np.arange(2 * PAGE, dtype=np.int32))
        blocks = worker.blocks(dict(enumerate(own)), block_size=PAGE)
        save = blocks.begin_save(lease.key, {"kv": [1, 2]}, pages={"kv": lease.pages})
        daemon.wait_for(lambda: daemon.snapshot().late_marks, "has not heard of it", 5)
        waits = "waits for the mark of vllm-0 rank 1 since"
        (mark,) = daemon.snapshot().late_marks
        for asked in (
            ("why", "lease", str(lease.id)),
            ("why", "page", str(lease.pages[0])),
            ("why", "client", str(mark.session)),
            ("status",),
        ):
            assert waits in said(daemon, *asked), asked
            assert "until 60.0 s" in said(daemon, *asked), asked

        ((severity, what),) = doctors(daemon)
        assert severity is Severity.POOR
        assert waits in what

        has_come = True
        save.result(5)
        assert not doctors(daemon)
        assert not daemon.snapshot().late_marks
        assert waits not in said(daemon, "why", "lease", str(lease.id))

        has_come = False
        blocks = worker.blocks(dict(enumerate(own)), block_size=PAGE, mark_within_s=0.5)
        load = blocks.begin_load(lease.key, {"kv": [1, 2]}, pages={"kv": lease.pages})
        with pytest.raises(kvd.client.KvdError, match=r"has not come within 0\.5 s"):
            load.result(5)
        daemon.wait_for(lambda: not daemon.snapshot().late_marks, "still waits", 5)
        has_come = True
