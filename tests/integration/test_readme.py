"""The README and the pages of docs are true: examples run, configuration is valid."""

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

ROOT = Path(__file__).parents[2]
POOL = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "8", "pool.pages": "64"}
RUN_S = 60


def blocks(language: str, page: str = "README.md") -> list[str]:
    """The fenced blocks of one language on one page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.S | re.M)


def block_with(text: str, language: str, page: str) -> str:
    """The first of them in which this stands."""
    return next(block for block in blocks(language, page) if text in block)


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


async def test_retraction_of_the_page_for_engines_runs(daemons: tuple[Daemon, Daemon]) -> None:
    body = textwrap.indent(block_with("retract", "python", "docs/howto/engine.md"), "    ")
    names: dict[str, Any] = {}
    exec(f"async def take_back(lease, generated):\n{body}", names)

    async with kvd.client.connect(daemons[1].client, name="decode-engine") as node:
        lease = await node.lease(range(100), reserve_tokens=16)
        await names["take_back"](lease, range(100, 110))

        assert lease.kv_len == 110
        assert len(lease.pages) == 8


@pytest.mark.parametrize("host", [0, 1], ids=["prefill", "decode"])
def test_configuration_of_two_hosts_is_valid(tmp_path: Path, host: int) -> None:
    """With keys in the places that ``kvd keygen`` fills."""
    ours, theirs = curve.new_pair(), curve.new_pair()
    curve.replace_files(tmp_path, ours)
    text = blocks("toml", "docs/howto/hosts.md")[host]
    text = text.replace("/etc/kvd/peer.secret", str(tmp_path / curve.SECRET_FILE))
    keys = [ours.public, theirs.public] if host == 0 else [theirs.public, ours.public]
    text = text.replace("the key that kvd keygen printed on prefill-0", keys[0])
    text = text.replace("the key that it printed on decode-0", keys[1])
    file = tmp_path / "kvd.toml"
    file.write_text(text)

    assert isinstance(load(file, {}, []), Config)
    assert ours.public in text
    assert theirs.public in text


def test_commands_to_serve_of_the_tutorial_are_valid() -> None:
    serve = block_with("kvd serve", "sh", "docs/tutorial.md").replace("\\\n", " ")
    found = 0
    for command in serve.strip().split("&"):
        words = shlex.split(command)
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        if sets:
            found += 1
            assert isinstance(load(None, {}, sets), Config)
    assert found == 2
