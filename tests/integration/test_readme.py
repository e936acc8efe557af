"""The README is true: its example runs, its commands exist, its configuration is valid."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvd.client
from kvd import curve
from kvd.config import Config, load
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

README = (Path(__file__).parents[2] / "README.md").read_text()
POOL = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "8", "pool.pages": "64"}
RUN_S = 60


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    prefill = Daemon("prefill-0", tmp_path, POOL)
    decode = Daemon("decode-0", tmp_path, POOL)
    decode.knows(prefill)
    try:
        prefill.start()
        decode.start()
        prefill.wait_ready()
        decode.wait_ready()
        yield prefill, decode
    finally:
        prefill.stop()
        decode.stop()


def test_readme_example_runs(daemons: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    prefill, decode = daemons
    example = tmp_path / "example.py"
    example.write_text(blocks("python")[0])

    done = subprocess.run(
        [sys.executable, str(example), prefill.client, decode.client],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "committed=True" in done.stdout
    assert "pages hold [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]" in done.stdout


async def test_readme_retraction_runs(daemons: tuple[Daemon, Daemon]) -> None:
    body = textwrap.indent(blocks("python")[1], "    ")
    names: dict[str, Any] = {}
    exec(f"async def take_back(lease, generated):\n{body}", names)

    async with kvd.client.connect(daemons[1].client, name="decode-engine") as node:
        lease = await node.lease(range(100), reserve_tokens=16)
        await names["take_back"](lease, range(100, 110))

        assert lease.kv_len == 110
        assert len(lease.pages) == 8


@pytest.mark.parametrize("host", [0, 1], ids=["prefill", "decode"])
def test_readme_configuration_of_two_hosts_is_valid(tmp_path: Path, host: int) -> None:
    """With keys in the places that ``kvd keygen`` fills."""
    ours, theirs = curve.new_pair(), curve.new_pair()
    curve.replace_files(tmp_path, ours)
    text = blocks("toml")[host].replace("/etc/kvd/peer.secret", str(tmp_path / curve.SECRET_FILE))
    keys = [ours.public, theirs.public] if host == 0 else [theirs.public, ours.public]
    text = text.replace("the key that kvd keygen printed on prefill-0", keys[0])
    text = text.replace("the key that it printed on decode-0", keys[1])
    file = tmp_path / "kvd.toml"
    file.write_text(text)

    assert isinstance(load(file, {}, []), Config)
    assert ours.public in text
    assert theirs.public in text


def test_readme_commands_to_serve_are_valid() -> None:
    serve = next(block for block in blocks("sh") if block.startswith("kvd serve"))
    for command in serve.replace("\\\n", " ").strip().split("&"):
        words = shlex.split(command)
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        if sets:
            assert isinstance(load(None, {}, sets), Config)


def test_readme_names_only_verbs_that_exist() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "kvd", "--help"], capture_output=True, text=True, check=True
    ).stdout
    named = set(re.findall(r"^kvd ([a-z]+)", "\n".join(blocks("sh")), flags=re.M))

    assert named
    assert {verb for verb in named if not re.search(rf"^\s+{verb}\b", known, flags=re.M)} == set()
