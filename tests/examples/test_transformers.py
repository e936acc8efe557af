"""``examples/transformers`` runs as its README says, and says what that says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config import Config, load
from kvd.connectors.transformers import pool_section
from tests.support.daemons import Daemon

HERE = Path(__file__).parents[2] / "examples" / "transformers"
LINE = re.compile(r"turn (\d): (\d+) of (\d+) tokens found, \[(.*)\]")


def chat(endpoint: str) -> tuple[list[int], list[str]]:
    """How much each turn found, and what was said."""
    done = subprocess.run(
        [sys.executable, "chat.py"],
        cwd=HERE,
        env={**os.environ, "KVD_SOCKETS__CLIENT": endpoint, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    turns = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    return [int(turn[2]) for turn in turns], [turn[4] for turn in turns]


@pytest.fixture
def daemon(tmp_path):
    """As ``kvd serve --config kvd.toml``, with sockets of its own."""
    made = Daemon("chat", tmp_path, {})
    made.config_file = HERE / "kvd.toml"
    made.start()
    made.wait_ready(120)
    yield made
    made.ask_to_stop()
    made.stop()


def test_the_second_run_finds_what_the_first_one_left(daemon) -> None:
    found, said = chat(daemon.client)
    assert found == [0, 176, 352]
    again, said_again = chat(daemon.client)
    assert again == [144, 320, 496]
    alone, said_alone = chat(f"{daemon.client}.nobody")
    assert alone == [0, 0, 0]
    assert said == said_again == said_alone


def test_the_pool_is_the_one_that_the_connector_asks_for() -> None:
    sys.path.insert(0, str(HERE))
    try:
        from chat import small_model  # noqa: PLC0415
    finally:
        sys.path.remove(str(HERE))
    words = [line for line in pool_section(small_model(), "64MiB").splitlines() if "=" in line]
    text = (HERE / "kvd.toml").read_text("utf-8")
    assert [word for word in words if word not in text] == []
    assert isinstance(load(HERE / "kvd.toml", {}, ()), Config)
