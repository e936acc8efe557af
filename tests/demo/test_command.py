"""``kvd demo`` before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvd.demo.command import demo_command

if TYPE_CHECKING:
    from pathlib import Path


def test_demo_loads_no_torch_when_it_is_imported() -> None:
    code = (
        "import sys, kvd.demo.command\n"
        "print([m for m in ('torch', 'transformers', 'nixl', 'textual') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_demo_refuses_an_unknown_model_with_the_known_ones() -> None:
    result = CliRunner().invoke(demo_command, ["--model", "lama"])

    assert result.exit_code == 2
    assert "'lama' is not one of" in result.output
    assert all(name in result.output for name in ("deepseek", "gemma", "gptoss", "llama", "mamba"))


@pytest.mark.parametrize(
    ("device", "model", "why"),
    [
        ("gpu", "llama", "'gpu' is neither cpu nor cuda:N"),
        ("cuda", "llama", "'cuda' is neither cpu nor cuda:N"),
        ("cpu", "mamba", "mamba keeps states, which it computes in the pool"),
    ],
)
def test_demo_refuses_a_device_that_no_engine_could_use(device: str, model: str, why: str) -> None:
    result = CliRunner().invoke(demo_command, ["--device", device, "--model", model])

    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_demo_says_what_to_install_when_transformers_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    result = CliRunner().invoke(demo_command, [])

    assert result.exit_code == 78
    assert f"transformers is not installed in {sys.prefix}" in result.output
    assert "pip install 'kvd[demo]'" in result.output


def test_demo_refuses_a_file_that_it_could_not_write_at_the_end(tmp_path: Path) -> None:
    result = CliRunner().invoke(demo_command, ["--json", str(tmp_path / "none" / "out.json")])

    assert result.exit_code == 2
    assert "is no directory" in result.output
