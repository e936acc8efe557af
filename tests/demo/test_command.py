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


def test_demo_refuses_a_page_size_where_pages_are_single_tokens() -> None:
    result = CliRunner().invoke(demo_command, ["--model", "mamba", "--page-size", "16"])

    assert result.exit_code == 2
    assert "mamba keeps no KV of tokens: its pages are single tokens" in result.output


def test_demo_refuses_pages_of_one_token_where_a_window_begins_at_a_page() -> None:
    result = CliRunner().invoke(demo_command, ["--model", "gemma", "--page-size", "1"])

    assert result.exit_code == 2
    assert "gemma has layers with a window" in result.output


def test_demo_refuses_turns_where_nothing_is_said() -> None:
    result = CliRunner().invoke(demo_command, ["--model", "embedding", "--turns", "5"])

    assert result.exit_code == 2
    assert "embedding embeds texts: there is no conversation" in result.output


def test_demo_says_what_to_install_when_transformers_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    result = CliRunner().invoke(demo_command, [])

    assert result.exit_code == 1
    assert "transformers cannot be found here" in result.output
    assert "pip install 'kvd[demo]'" in result.output


def test_demo_refuses_a_file_that_it_could_not_write_at_the_end(tmp_path: Path) -> None:
    result = CliRunner().invoke(demo_command, ["--json", str(tmp_path / "none" / "out.json")])

    assert result.exit_code == 2
    assert "is no directory" in result.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--tp", "2"], "2 is not P:D, the ranks of prefill and decode, each of 1 to 8"),
        (["--tp", "0:1"], "0:1 is not P:D"),
        (["--tp", "3:1"], "llama as TP 3: 8 query heads cannot be divided among 3 ranks"),
        (["--tp", "2:1", "--cp", "2"], "a prefill engine is divided in one way, not by TP 2 and"),
        (["--cp", "1"], "1 is not in the range 2<=x<=8"),
        (["--pp", "5"], "llama as PP 5: 4 layers are too few for 5 stages"),
        (["--model", "gemma", "--cp", "2"], "gemma as CP 2: only KV of layers that look at every"),
        (["--model", "embedding", "--tp", "1:2"], "embedding hands no KV over"),
    ],
)
def test_demo_refuses_ranks_that_nothing_can_be_divided_among(options: list[str], why: str) -> None:
    result = CliRunner().invoke(demo_command, options)

    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
